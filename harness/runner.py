"""Every design of a run in lock-step on the same tokens, read against the oracle at every point of the grid.

One Runner owns some of the heads; heads never meet, so shares of them run in separate processes (harness.shards).
Memory does not grow with the decode: a block of steps is generated, decoded, measured and handed on as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness import pool
from harness.arithmetic import Conventions
from harness.arms import Arm, decode_block
from harness.conditioning import Found, begin_conditioning, begin_inner, has_operator
from harness.config import Config, backends
from harness.decode import Stream
from harness.designs import designs, oracle_engine
from harness.intervals import Intervals
from harness.metrics import SinceLast
from harness.reference.calls import Truth
from harness.reference.emulated import Emulated
from harness.reference.oracle import Oracle
from harness.reference.state import EmulatedState
from harness.ring import RingSpec
from harness.schedule import Block, Pieces, Schedule
from harness.tokens import Shape
from harness.watch import first_nonfinite
from harness.window import Step, Windows

Rows = tuple[str, dict[str, Any]]  # variant, column -> [n]
PREFILL = RingSpec(64, 64, 1, "commit")
INNER = ("inverse_residual", "operator_norm", "operator_radius")
CACHE_BYTES = 8 << 20  # of k_hat and q_hat per block: what a core's cache can still help with
# of a device's memory for what one block holds, where more steps share one bookkeeping: two blocks are under way, and
# what is derived from them comes on top
DEVICE_SHARE, DEVICE_STEPS = 1 / 8, 1536


@dataclass
class Begun:
    """What is found out about small matrices, on a device beside its work: call to have it."""

    windows: Found  # conditioning of every window
    pieces: Found | None  # and of every interval, where each is one piece
    inner: dict[str, Found]  # by design


@dataclass
class Now:
    """A block at work, and what every design is read against."""

    block: Block
    windows: Windows
    pieces: Pieces | None
    intervals: Intervals
    begun: Begun
    keys: dict[str, np.ndarray] = field(default_factory=dict)  # what every design's rows begin with


class Runner:
    """Runs `config` for the key heads in `heads` (a slice of the layer's)."""

    def __init__(self, config: Config, heads: slice = slice(None), device: str = "cpu", steps: int | None = None):
        self.config, self.device = config, device
        decode, whole = config.decode, Shape.of(config.model)
        self.first_head = range(whole.H)[heads][0] * whole.group
        count = len(range(whole.H)[heads])
        self.shape = Shape(count, count * whole.group, whole.V, whole.K)
        self.stream = Stream(decode, whole, heads=heads, device=device)
        self.grid = RingSpec.of(config.ring)
        self.initial = self.stream.initial_state()
        self.designs = designs(config, device)
        self.references = {d.spec.name: self._reference(d) for d in self.designs}
        self.oracle_engine = oracle_engine(config, device)
        self.block_steps = steps or block_steps(config, count, device)

    def _reference(self, design: Emulated) -> Conventions:
        return design.arithmetic.conventions if self.config.reference == "own" else Conventions()

    def run(self, progress: Callable[[int], None] = lambda tokens: None) -> Iterator[list[Rows]]:
        """Yield the rows of one block after the other; progress(committed tokens, all slots) after each."""
        decode = self.config.decode
        arms, oracles = self._start(progress)
        oracle_since = SinceLast(decode.slots)
        # a device decodes while the next block is made ready
        for now in pool.ahead(self._given(arms)) if self.device == "cuda" else self._given(arms):
            truth = {c: self._truth(oracle, now.pieces) for c, oracle in oracles.items()}
            now.keys = self._keys(now.block, next(iter(truth.values())))
            # first of all, as it leaves products behind that others share
            rows = [self._arm_rows(now, arm, truth[arm.reference]) for arm in arms]
            rows.insert(0, self._oracle_rows(now, oracle_since, [t.bound for t in truth.values()]))
            progress(int(now.block.accepted.sum()))
            yield [r for r in rows if r]

    # --- decoding ---------------------------------------------------------------------------------------------

    def _start(self, progress: Callable[[int], None]) -> tuple[list[Arm], dict[Conventions, Oracle]]:
        decode, B = self.config.decode, self.config.decode.slots
        oracles = {c: Oracle(self.shape, self.initial, c, self.oracle_engine) for c in set(self.references.values())}
        fillers = {d.spec.name: d.filler(PREFILL) if decode.prefill else d for d in self.designs}
        states = {name: self._create(filler, self.initial) for name, filler in fillers.items()}
        for t in range(0, decode.prefill, PREFILL.max_window):
            size = min(PREFILL.max_window, decode.prefill - t)
            tokens = self.stream.tokens(torch.full((B,), t), size).map(lambda x: x[None])
            windows = Windows(tokens, np.full((1, B), size), self.shape)
            for oracle in oracles.values():
                oracle.advance(windows)
            step = Step(windows, 0)
            for name, filler in fillers.items():
                filler.verify(states[name], step)
                filler.commit(states[name], step.slots, step.lengths)
            progress(size * B)
        # from here on they are drawn beside the decode
        self.stream.forget()
        arms = []
        for design in self.designs:
            state = states[design.spec.name]
            if decode.prefill:
                # the checkpoint is handed over, which its own format holds already; records start anew
                kept = fillers[design.spec.name].read(state, "kept", range(B))
                filled, state = state, self._create(design, kept)
                state.tokens = list(filled.tokens)
            arms.append(Arm(design, self.references[design.spec.name], state, SinceLast(B)))
        return arms, oracles

    def _create(self, design: Emulated, initial: Tensor) -> EmulatedState:
        d = self.config.decode
        return design.create(self.shape, d.slots, initial, seed=d.seed, first_head=self.first_head, device=self.device)

    def _given(self, arms: list[Arm]) -> Iterator[Now]:
        """One block after the other, as far as it depends on no design's or oracle's state."""
        decode = self.config.decode
        left = np.zeros(decode.slots, dtype=np.int64)
        schedule = Schedule(decode, self.config.acceptance, self.grid, decode.prefill, decode.tokens)
        for block in schedule.blocks(self.block_steps):
            windows = block.windows(self.stream, self.shape)
            pieces = block.pieces(self.stream, self.shape)
            begun = self._begin(windows, pieces, arms)
            intervals = Intervals(left, block, self.stream.device)
            left = intervals.left
            yield Now(block, windows, pieces, intervals, begun)

    def _begin(self, windows: Windows, pieces: Pieces | None, arms: list[Arm]) -> Begun:
        # an interval longer than one piece has no matrix of its own here
        whole = pieces is not None and ((pieces.points >= 0) | (pieces.windows.lengths == 0)).all()
        inner = {}
        for arm in arms:
            spec, a = arm.design.spec, arm.design.arithmetic
            # what its declaration would invert says nothing of what an outside kernel does
            if arm.design.backend != "outside" and has_operator(spec.verify, "product", spec.inverse):
                operator = has_operator(spec.verify, spec.fold, spec.inverse)
                inner[arm.name] = begin_inner(windows, a, spec.inverse, operator)
        intervals = begin_conditioning(pieces.windows) if pieces is not None and whole else None
        return Begun(begin_conditioning(windows), intervals, inner)

    def _truth(self, oracle: Oracle, pieces: Pieces | None) -> Truth:
        if pieces is None:
            nothing = oracle.S[:, :0, :, 0]
            return Truth(oracle.S[None][:0], nothing, nothing, np.empty((0, *oracle.S.shape[:2])))
        return oracle.advance(pieces.windows, pieces.points)

    # --- rows -------------------------------------------------------------------------------------------------

    def _keys(self, block: Block, truth: Truth) -> dict[str, np.ndarray]:
        """What every design's rows begin with: by steps, then by slots, then by heads."""
        HV, grid = self.shape.HV, block.grid
        # one row of a state tells nearly always
        for rows in (truth.S[..., :1, :], truth.S):
            some = rows.flatten(-2).any(-1).cpu().numpy()[grid.point, grid.slot]
            if some.all():
                break
        return {
            "slot": np.repeat(grid.slot, HV),
            "head": np.tile(np.arange(self.first_head, self.first_head + HV), len(grid.slot)),
            "flush": np.repeat(grid.flush, HV),
            "tokens": np.repeat(grid.tokens, HV),
            "zero_state": ~some.reshape(-1),
        }

    def _oracle_rows(self, now: Now, since: SinceLast, bounds: list[np.ndarray]) -> Rows | None:
        names = ("cond2", "condinf", "skeel", "max_power", "gate_span")
        block, begun = now.block, now.begun
        worst = since.add(begun.windows(), block.lengths > 0, block.points)
        if now.pieces is None:
            return None
        rows: dict[str, Any] = dict(now.keys)
        rows |= dict(zip(names, flat(worst).T, strict=True))
        rows["backend"] = np.full(len(rows["slot"]), "fp64", dtype=object)
        # of the references in use the one that is least certain
        rows["oracle_bound"] = flat(np.max(bounds, 0)[block.grid.point, block.grid.slot])
        inside = flat(begun.pieces()[block.grid.point, block.grid.slot]) if begun.pieces else None
        for i, name in enumerate(names):
            # masked: not computed
            rows[f"interval_{name}"] = np.ma.masked_all(len(rows["slot"])) if inside is None else inside[:, i]
        return "oracle", rows

    def _arm_rows(self, now: Now, arm: Arm, truth: Truth) -> Rows | None:
        before = arm.state.clone()
        seen = decode_block(arm.design, arm.state, now.windows, now.block, truth.S)
        tokens = arm.token_errors(seen, truth, now.intervals)
        inner = None
        if arm.name in now.begun.inner:
            # worst since the last grid point
            inner = arm.since.add(now.begun.inner[arm.name](), now.block.lengths > 0, now.block.points)
        if now.pieces is None:
            return None
        rows: dict[str, Any] = dict(now.keys)
        grid, HV = now.block.grid, self.shape.HV
        for name in ("history", "folded"):
            rows[name] = np.repeat(getattr(seen, name)[grid.slot, grid.point], HV)
        rows["backend"] = np.full(len(rows["slot"]), arm.design.backend, dtype=object)
        states = seen.errors[grid.slot, grid.point]
        rows |= dict(zip(("served_fro", "served_max", "kept_fro", "kept_max"), flat(states).T, strict=True))
        rows |= {name: flat(x) for name, x in tokens.items()}
        if inner is not None:
            # a design without an operator of its own has the residual alone
            rows |= dict(zip(INNER, flat(inner).T, strict=False))
        rows["nonfinite_stage"] = self._stages(now, arm, before, rows)
        return arm.name, rows

    def _stages(self, now: Now, arm: Arm, before: EmulatedState, rows: dict[str, Any]) -> Any:
        """First non-finite site of every row, None where all is finite; found by running the block again."""
        bad = ~np.all([np.isfinite(v) for k, v in rows.items() if k[-4:] in ("_fro", "_max", "_med")], axis=0)
        if not bad.any():
            return np.full(len(bad), None)
        where = {(int(s), int(h)) for s, h in zip(rows["slot"][bad], rows["head"][bad] - self.first_head, strict=True)}
        if where - set(arm.stages):
            new = where - set(arm.stages)
            found = first_nonfinite(arm.design, before, now.windows, now.block, new)
            for key in new:
                arm.stages[key] = found.get(key, "unknown")
        stages = [arm.stages.get((s, h)) for s, h in zip(rows["slot"], rows["head"] - self.first_head, strict=True)]
        return np.array([stage if b else None for stage, b in zip(stages, bad, strict=True)], dtype=object)


def flat(x: np.ndarray) -> np.ndarray:
    """[n, HV, ...] as rows, [n HV, ...]."""
    return x.reshape(-1, *x.shape[2:])


def block_steps(config: Config, heads: int, device: str = "cpu") -> int:
    """Steps decoded between two rounds of bookkeeping, for a share of so many key heads."""
    model, lanes = config.model, config.decode.slots * config.decode.window
    keys = lanes * heads * model.key_dim * 2
    if device == "cpu":
        return int(np.clip(CACHE_BYTES // (8 * keys), 1, 256))
    rows = heads * model.value_heads // model.key_heads * (model.rows or model.value_dim)
    # windows as drawn and as laid out; o and d of the oracle and of every design; a grid point of a slot in four steps
    made = 1 + len(config.variants) * len(backends(config))
    step = 2 * (keys + lanes * rows) + 2 * lanes * rows * made + config.decode.slots * rows * model.key_dim // 4
    return int(np.clip(DEVICE_SHARE * memory_of(device) // (8 * step), 1, DEVICE_STEPS))


def memory_of(device: str) -> int:
    """Bytes of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)
