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
import torch.nn.functional as F
from torch import Tensor

from harness.arithmetic import Conventions
from harness.conditioning import conditioning, has_operator, residual, window_operator
from harness.config import Config
from harness.decode import Stream
from harness.designs import designs
from harness.metrics import SinceLast, per_interval, state_errors, token_errors
from harness.reference.emulated import Emulated
from harness.reference.oracle import Oracle
from harness.reference.state import EmulatedState, Lazy
from harness.ring import RingSpec
from harness.schedule import Block, Schedule
from harness.tokens import Shape
from harness.watch import first_nonfinite
from harness.window import Step, Windows

Rows = tuple[str, dict[str, Any]]  # variant, column -> [n]
PREFILL = RingSpec(64, 64, 1, "commit")
INNER = ("inverse_residual", "operator_norm", "operator_radius")
BLOCK_BYTES = 4 << 20  # of k_hat and q_hat per block: what a core's cache can still help with


@dataclass
class Arm:
    """One design at work, and what it has produced since the last grid point."""

    design: Emulated
    reference: Conventions  # of the oracle it is read against
    state: EmulatedState
    tokens: dict[str, list[Tensor | None]]  # per slot [T, HV, V] of o and d
    since: SinceLast
    stages: dict[tuple[int, int], str] = field(default_factory=dict)  # (slot, head) -> first non-finite site

    @property
    def name(self) -> str:
        return self.design.spec.name


class Runner:
    """Runs `config` for the key heads in `heads` (a slice of the layer's)."""

    def __init__(self, config: Config, heads: slice = slice(None), device: str = "cpu", steps: int | None = None):
        self.config, self.device = config, device
        model, decode = config.model, config.decode
        whole = Shape(model.key_heads, model.value_heads, model.rows or model.value_dim, model.key_dim)
        self.first_head = range(whole.H)[heads][0] * whole.group
        count = len(range(whole.H)[heads])
        self.shape = Shape(count, count * whole.group, whole.V, whole.K)
        self.stream = Stream(decode, whole, heads=heads, device=device)
        ring = config.ring
        self.grid = RingSpec(ring.length, ring.max_window, ring.flush_at, ring.fold_when)
        self.initial = self.stream.initial_state()
        self.designs = designs(config, device)
        self.references = {d.spec.name: self._reference(d) for d in self.designs}
        self.block_steps = steps or block_steps(config, count)

    def _reference(self, design: Emulated) -> Conventions:
        return design.arithmetic.conventions if self.config.reference == "own" else Conventions()

    def run(self, progress: Callable[[int], None] = lambda tokens: None) -> Iterator[list[Rows]]:
        """Yield the rows of one block after the other; progress(committed tokens, all slots) after each."""
        decode, B = self.config.decode, self.config.decode.slots
        arms, oracles = self._start(progress)
        oracle_since = SinceLast(B)
        schedule = Schedule(decode, self.config.acceptance, self.grid, decode.prefill, decode.tokens)
        for block in schedule.blocks(self.block_steps):
            windows = block.windows(self.stream, self.shape)
            pieces = block.pieces(self.stream, self.shape)
            before = {arm.name: arm.state.clone() for arm in arms}
            seen = self._decode(block, windows, pieces, arms, oracles)
            rows = [self._oracle_rows(block, windows, pieces, oracle_since, seen.zero)]
            rows += [self._arm_rows(block, windows, arm, before[arm.name], seen) for arm in arms]
            progress(int(block.accepted.sum()))
            yield [r for r in rows if r]

    # --- decoding ---------------------------------------------------------------------------------------------

    def _start(self, progress: Callable[[int], None]) -> tuple[list[Arm], dict[Conventions, Oracle]]:
        decode, B = self.config.decode, self.config.decode.slots
        oracles = {c: Oracle(self.shape, self.initial, c) for c in set(self.references.values())}
        states = {}
        for design in self.designs:
            ring = PREFILL if decode.prefill else design.ring
            states[design.spec.name] = self._create(design, ring, self.initial)
        for t in range(0, decode.prefill, PREFILL.max_window):
            size = min(PREFILL.max_window, decode.prefill - t)
            tokens = self.stream.tokens(torch.full((B,), t), size).map(lambda x: x[None])
            windows = Windows(tokens, np.full((1, B), size), self.shape)
            for oracle in oracles.values():
                oracle.advance(windows, 0, 1, list(range(B)))
            for design in self.designs:
                step = Step(windows, 0)
                filler = type(design)(design.spec, PREFILL, design.arithmetic)
                filler.verify(states[design.spec.name], step)
                filler.commit(states[design.spec.name], step.slots, step.lengths)
            progress(size * B)
        arms = []
        for design in self.designs:
            state = states[design.spec.name]
            if decode.prefill:
                # the checkpoint is handed over as it is; records start anew
                filled, state = state, self._create(design, design.ring, state.checkpoint)
                state.checkpoint, state.tokens = filled.checkpoint, list(filled.tokens)
            logs: dict[str, list[Tensor | None]] = {"o": [None] * B, "d": [None] * B}
            arms.append(Arm(design, self.references[design.spec.name], state, logs, SinceLast(B)))
        return arms, oracles

    def _create(self, design: Emulated, ring: RingSpec, initial: Tensor) -> EmulatedState:
        d = self.config.decode
        return type(design)(design.spec, ring, design.arithmetic).create(
            self.shape, d.slots, initial, seed=d.seed, first_head=self.first_head, device=self.device
        )

    def _decode(self, block: Block, windows: Windows, pieces: Any, arms: list[Arm], oracles: Any) -> Seen:
        events = {event.step: i for i, event in enumerate(block.events)}
        seen = Seen({arm.name: [] for arm in arms}, {c: [] for c in oracles})
        outputs: dict[str, list[Any]] = {arm.name: [] for arm in arms}
        accepted = [row[row > 0].tolist() for row in block.accepted]
        for i in range(len(block.t)):
            step = Step(windows, i)
            for arm in arms:
                result = arm.design.verify(arm.state, step)
                outputs[arm.name].append(result)
                arm.design.commit(arm.state, step.slots, accepted[i])
            if i in events:
                event, (first, count) = block.events[events[i]], pieces[1][events[i]]
                truth = {}
                for conventions, oracle in oracles.items():
                    S, o, d = oracle.advance(pieces[0], first, count, event.slots)
                    seen.truth[conventions].append((o, d))
                    truth[conventions] = S
                seen.zero.append(~truth[next(iter(truth))].flatten(2).any(-1).cpu().numpy())
                for arm in arms:
                    self._read(arm, event.slots, truth[arm.reference], seen.errors[arm.name])
        for arm in arms:
            keep_tokens(arm, outputs[arm.name], block)
        return seen

    def _read(self, arm: Arm, slots: list[int], S: Tensor, into: list[Any]) -> None:
        cursors = arm.state.cursors
        own = [(cursors.write_pos[s], cursors.is_flush[s] or cursors.write_pos[s] == 0) for s in slots]
        served = arm.design.read(arm.state, "served", slots)
        first = state_errors(served, S)
        kept = arm.design.read(arm.state, "kept", slots)
        second = first if kept is served else state_errors(kept, S)
        into.append((own, torch.cat((first, second), -1).cpu().numpy()))

    # --- rows -------------------------------------------------------------------------------------------------

    def _keys(self, block: Block) -> dict[str, np.ndarray]:
        """slot, head, flush and tokens of every row, events first, then slots, then heads."""
        heads = np.arange(self.first_head, self.first_head + self.shape.HV)
        points = [(s, f, t) for e in block.events for s, f, t in zip(e.slots, e.flush, e.tokens, strict=True)]
        slot, flush, tokens = (np.repeat(x, len(heads)) for x in zip(*points, strict=True))
        return {"slot": slot, "head": np.tile(heads, len(points)), "flush": flush, "tokens": tokens}

    def _ordered(self, block: Block, per_slot: list[np.ndarray]) -> np.ndarray:
        """per slot [points, HV, ...] -> the row order of _keys, [rows, ...]."""
        taken = [iter(x) for x in per_slot]
        rows = np.stack([next(taken[s]) for e in block.events for s in e.slots])
        return rows.reshape(-1, *rows.shape[2:])

    def _oracle_rows(
        self, block: Block, windows: Windows, pieces: Any, since: SinceLast, zero: list[Any]
    ) -> Rows | None:
        names = ("cond2", "condinf", "skeel", "max_power", "gate_span")
        seen = since.add(conditioning(windows), block.lengths > 0, _ends(block))
        if pieces is None:
            return None
        rows: dict[str, Any] = dict(self._keys(block))
        worst = self._ordered(block, seen)
        rows |= {name: worst[:, i] for i, name in enumerate(names)}
        # an interval longer than one piece has no matrix of its own here: recorded as not computed
        inside = conditioning(pieces[0])[0] if all(count == 1 for _, count in pieces[1]) else None
        for i, name in enumerate(names):
            column = np.ma.masked_all(len(worst)) if inside is None else inside[..., i].reshape(-1)
            rows[f"interval_{name}"] = column
        rows["zero_state"] = np.concatenate([z.reshape(-1) for z in zero])
        return "oracle", rows

    def _arm_rows(self, block: Block, windows: Windows, arm: Arm, before: EmulatedState, seen: Seen) -> Rows | None:
        spec, a = arm.design.spec, arm.design.arithmetic
        inner = None
        if spec.verify == "window":
            parts = [residual(windows, a, spec.inverse)] if has_operator(spec.verify, "product", spec.inverse) else []
            if has_operator(spec.verify, spec.fold, spec.inverse):
                parts += window_operator(windows, a, spec.inverse)
            if parts:
                values = torch.stack(parts, -1).cpu().numpy()
                inner = arm.since.add(values, block.lengths > 0, _ends(block))
        if not block.events:
            return None
        rows: dict[str, Any] = dict(self._keys(block))
        own = [x for o, _ in seen.errors[arm.name] for x in o]
        rows["history"], rows["folded"] = (np.repeat(x, self.shape.HV) for x in zip(*own, strict=True))
        errors = np.concatenate([e.reshape(-1, 4) for _, e in seen.errors[arm.name]])
        rows |= dict(zip(("served_fro", "served_max", "kept_fro", "kept_max"), errors.T, strict=True))
        for name in ("d", "o"):
            middle, worst = self._token_rows(block, arm, name, seen)
            rows[f"{name}_med"], rows[f"{name}_max"] = middle, worst
        if inner is not None:
            columns = self._ordered(block, inner)
            # a design without an operator of its own has the residual alone
            rows |= dict(zip(INNER, columns.T, strict=False))
        rows["zero_state"] = np.concatenate([z.reshape(-1) for z in seen.zero])
        rows["nonfinite_stage"] = self._stages(block, windows, arm, before, rows)
        return arm.name, rows

    def _token_rows(self, block: Block, arm: Arm, name: str, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        """Median and maximum per interval of the errors of o or d, in row order; frees the tokens it has used."""
        exact, ends = seen.tokens(arm.reference, name, block)
        middle: list[np.ndarray] = [np.empty(0)] * len(exact)
        worst: list[np.ndarray] = [np.empty(0)] * len(exact)
        for s, x in enumerate(exact):
            if x is not None:
                mine = arm.tokens[name][s]
                assert mine is not None
                middle[s], worst[s] = per_interval(token_errors(mine[: len(x)], x), ends[s])
                arm.tokens[name][s] = mine[len(x) :]
        return self._ordered(block, middle), self._ordered(block, worst)

    def _stages(self, block: Block, windows: Windows, arm: Arm, before: EmulatedState, rows: dict[str, Any]) -> Any:
        """First non-finite site of every row, None where all is finite; found by running the block again."""
        bad = ~np.all([np.isfinite(v) for k, v in rows.items() if k[-4:] in ("_fro", "_max", "_med")], axis=0)
        where = {(int(s), int(h)) for s, h in zip(rows["slot"][bad], rows["head"][bad] - self.first_head, strict=True)}
        if where - set(arm.stages):
            new = where - set(arm.stages)
            found = first_nonfinite(arm.design, before, windows, block, new)
            for key in new:
                arm.stages[key] = found.get(key, "unknown")
        stages = [arm.stages.get((s, h)) for s, h in zip(rows["slot"], rows["head"] - self.first_head, strict=True)]
        return np.array([stage if b else None for stage, b in zip(stages, bad, strict=True)], dtype=object)


@dataclass
class Seen:
    """What one block showed: state errors per arm, exact tokens per oracle, whether a state was zero."""

    errors: dict[str, list[Any]]
    truth: dict[Conventions, list[tuple[Tensor, Tensor]]]
    zero: list[Any] = field(default_factory=list)
    _tokens: dict[Any, Any] = field(default_factory=dict)

    def tokens(self, reference: Conventions, name: str, block: Block) -> tuple[list[Tensor | None], list[list[int]]]:
        """The exact o or d of each slot's finished intervals, [T, HV, V], and where in T each interval ends."""
        if (reference, name) not in self._tokens:
            B = block.t.shape[1]
            found: list[list[Tensor]] = [[] for _ in range(B)]
            ends: list[list[int]] = [[] for _ in range(B)]
            for event, pair in zip(block.events, self.truth[reference], strict=True):
                exact = pair[0 if name == "o" else 1]
                for i, (s, b, e) in enumerate(zip(event.slots, event.begin, event.tokens, strict=True)):
                    found[s].append(exact[i, ..., : e - b].permute(2, 0, 1))
                    ends[s].append((ends[s][-1] if ends[s] else 0) + e - b)
            self._tokens[reference, name] = [torch.cat(x) if x else None for x in found], ends
        return self._tokens[reference, name]


def keep_tokens(arm: Arm, outputs: list[Any], block: Block) -> None:
    """Append the committed lanes of a block's outputs and writes to the arm's tokens, [T, HV, V] each."""
    steps, slots, lanes = (torch.from_numpy(x) for x in np.nonzero(_committed(block)))
    for name in ("o", "d"):
        parts = [r.padded(name) if isinstance(r, Lazy) else getattr(r, name) for r in outputs]  # [B, HV, V, lanes]
        widest = max(x.shape[-1] for x in parts)
        # a token pass stops at the last accepted lane
        parts = [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in parts]
        at = (x.to(parts[0].device) for x in (steps, slots, lanes))
        new = torch.stack(parts).permute(0, 1, 4, 2, 3)[tuple(at)]
        for b, old in enumerate(arm.tokens[name]):
            mine = new if len(arm.tokens[name]) == 1 else new[slots == b]
            arm.tokens[name][b] = mine if old is None or not len(old) else torch.cat((old, mine))


def _committed(block: Block) -> np.ndarray:
    """[W, B, lanes] whether a lane was committed."""
    return np.arange(block.accepted.max()) < block.accepted[..., None]


def block_steps(config: Config, heads: int) -> int:
    """Steps decoded between two rounds of bookkeeping, for a share of so many key heads."""
    step = config.decode.slots * config.decode.window * heads * config.model.key_dim * 16
    return int(np.clip(BLOCK_BYTES // step, 1, 256))


def _ends(block: Block) -> list[list[int]]:
    """Per slot, the steps after which it has a grid point."""
    ends: list[list[int]] = [[] for _ in range(block.t.shape[1])]
    for event in block.events:
        for slot in event.slots:
            ends[slot].append(event.step)
    return ends
