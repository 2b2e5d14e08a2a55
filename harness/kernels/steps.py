"""A design's steps on the device: preallocated, launches only, so that verify and commit fit in a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from harness.errors import RingError
from harness.kernels import cursors as moves
from harness.kernels.fold import fold_product, fold_replay
from harness.kernels.numbers import INTERPRETED
from harness.kernels.recurrent import recurrent_verify, take_draft
from harness.kernels.route import route
from harness.kernels.window import ring_verify

if TYPE_CHECKING:
    from harness.kernels.block import Tape
    from harness.kernels.design import Triton, TritonState

BLOCK = 128  # slots a program of the cursor kernels moves


class Tiling(NamedTuple):
    """How a window kernel is shared out: rows of a state per tile, warps, stages, and the programs a multiprocessor
    should have; where windows and key heads are fewer than that, several programs share the tiles of one.
    registers: the most a thread may take, so that more programs fit beside each other; None: what the compiler likes
    """

    rows: int
    warps: int
    stages: int
    wanted: int
    registers: int | None = None


# the fastest of those measured on an H200 (H 16, HV 32, K = V = 128, 1 to 256 slots). FEW, HALF: VERIFY for few
# windows, and for bf16 products
VERIFY, FEW, HALF = Tiling(32, 2, 2, 3, 128), Tiling(32, 2, 3, 3), Tiling(64, 2, 2, 3)
FLUSH, REPLAY = Tiling(32, 2, 3, 4), Tiling(32, 1, 2, 16)
# ieee products run on CUDA cores out of registers, of which smaller tiles take fewer
IEEE_VERIFY, IEEE_FLUSH = Tiling(16, 2, 3, 3), Tiling(8, 1, 2, 4)
RECURRENT, FOLD, FOLD_REPLAY = (8, 1), (32, 4), (16, 1)  # rows and warps


class Inputs(NamedTuple):
    """A window of every slot: q, k [B, H, m, K], v [B, HV, m, V], g, beta [B, HV, m] fp32, lengths [B] int32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    lengths: Tensor

    def step(self, i: int) -> Inputs:
        """Of inputs with a leading axis of steps, the i-th step's."""
        return Inputs(*(x[i] for x in self))


class Steps:
    """Windows of at most m tokens on all slots of a state. Nothing here reads the device.

    out [B, HV, m, V] in the output's format; with keep_d, d the same in fp32. Inputs and the state's cursors
    are trusted: harness.kernels.design checks them on the host before it comes here.
    """

    def __init__(self, design: Triton, state: TritonState, m: int, keep_d: bool = False):
        self.design, self.state, self.m, self.keep_d = design, state, m, keep_d
        s, B, device = state.shape, state.slots, state.device
        self.BK, self.BC, self.BS = width(s.K), width(state.spec.length), max(4, triton.next_power_of_2(m))
        self.out = torch.empty(B, s.HV, m, s.V, dtype=design.formats["output"], device=device)
        self.d = torch.empty(B, s.HV, m, s.V, device=device) if keep_d else self.out
        self.folded = torch.zeros(B, dtype=torch.int32, device=device)
        self.scratch: list[Tensor] = []
        self.drafts: Tensor | None = None
        self.tape: Tape | None = None  # of the block of steps launched last
        # a launch may begin before the one ahead has ended
        self.early = not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.early else {}
        self.units = 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
        c = design.arithmetic.conventions
        self.eps = c.eps * (s.K if c.eps_at == "mean" else 1)
        if design.spec.fold == "snapshot":
            self.drafts = torch.empty(B, m, *state.checkpoint.shape[1:], dtype=state.checkpoint.dtype, device=device)
        elif design.spec.verify == "window":
            heads, BS = (B, s.HV), self.BS
            sizes = [(*heads, self.BC), heads, (*heads, BS, BS), (*heads, BS, BS), (*heads, BS)]
            self.scratch = [torch.empty(size, device=device) for size in sizes]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated: checkpoint, records, drafts, scratch."""

        def total(*tensors: Tensor) -> int:
            return sum(x.numel() * x.element_size() for x in tensors)

        return {
            "checkpoint": total(self.state.checkpoint),
            "records": total(*self.state.records.values()),
            "drafts": 0 if self.drafts is None else total(self.drafts),
            "scratch": total(*self.scratch),
        }

    def place(self, cursors: Tensor) -> None:
        """Put the device's cursors [3, B] int32 where they are wanted."""
        self.state.on_device.copy_(cursors)
        self.route()

    def route(self) -> None:
        """Pack who verifies and who flushes next."""
        state = self.state
        state.routed = True
        if self.design.spec.verify == "tokens":
            return
        w, base, flag = state.on_device
        route[(1,)](
            state.every, w, base, flag, state.plan, state.counts, state.slots, self.design.spec.fold_current,
            max(16, min(256, triton.next_power_of_2(state.slots))), self.early, **self.launch,
        )  # fmt: skip

    def verify(self, x: Inputs) -> None:
        """Outputs of one window per slot into `out`, records written; a flagged slot folds first."""
        design, state, s = self.design, self.state, self.state.shape
        B, m, scale, r, none = state.slots, self.m, s.K**-0.5, state.records, state.on_device
        if design.spec.verify == "tokens":
            rows, warps = tile(s.V, RECURRENT)
            raw = [r.get(name, none) for name in ("k", "v", "g", "beta")]
            recurrent_verify[(triton.cdiv(s.V, rows), B, s.HV)](
                *x, state.every, *state.on_device, self.out, self.d, state.checkpoint,
                none if self.drafts is None else self.drafts, *raw, self.eps, scale, m, s.H, s.HV,
                s.K, s.V, state.spec.length, self.BK, rows, self.keep_d, design.choices, num_warps=warps,
            )  # fmt: skip
            return
        if not state.routed:
            self.route()
        rings = [r.get(name, none) for name in ("k_hat", "k_hat_lo", "d", "d_lo", "g", "k", "v", "beta")]
        for flush in (False, True):
            t, rows, shares = self._shared(self._tiling(flush))
            ring_verify[(B * s.H * shares,)](
                *x, state.plan, state.counts, self.out, self.d, state.checkpoint, *rings, *self.scratch,
                self.eps, scale, B, m, s.H, s.HV, s.K, s.V, state.spec.length, self.BK, rows, self.BS, self.BC,
                triton.next_power_of_2(s.group), shares, design.choices, self.keep_d, flush, self.early,
                num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers, **self.launch,
            )  # fmt: skip

    def commit(self, accepted: Tensor) -> None:
        """Keep accepted [B] int32 tokens of every window; -1 leaves a slot as it is."""
        state, s = self.state, self.state.shape
        w, base, flag = state.on_device
        grid, L = (triton.cdiv(state.slots, BLOCK),), state.spec.length
        at_once = state.spec.fold_when == "commit"
        moves.advance_cursors[grid](
            state.every, accepted, w, base, flag, self.folded, state.slots, state.spec.flush_at, L, at_once,
            self.design.spec.fold_current, BLOCK, self.early, **self.launch,
        )  # fmt: skip
        if self.drafts is not None:
            rows, warps = tile(s.V, FOLD)
            take_draft[(triton.cdiv(s.V, rows), state.slots, s.HV)](
                state.checkpoint, self.drafts, state.every, accepted, self.m, s.HV, s.K, s.V, self.BK, rows,
                num_warps=warps,
            )  # fmt: skip
        elif at_once:
            self.fold(self.folded)
        if at_once:
            moves.absorb[grid](state.every, self.folded, w, base, state.slots, L, BLOCK)
        self.route()

    def fold(self, lengths: Tensor, out: Tensor | None = None, slots: Tensor | None = None) -> None:
        """The design's own fold of lengths[i] records of slots[i] (all), in place or into out [n, HV, V, K]."""
        state, s, r, none = self.state, self.state.shape, self.state.records, self.state.on_device
        slots = state.every if slots is None else slots
        to = state.checkpoint if out is None else out
        if self.design.spec.fold == "replay":
            rows, warps = tile(s.V, FOLD_REPLAY)
            fold_replay[(triton.cdiv(s.V, rows), len(slots), s.HV)](
                state.checkpoint, r["k"], r["v"], r["g"], r["beta"], slots, lengths, state.on_device[1], to,
                self.eps, s.H, s.HV, s.K, s.V, state.spec.length, self.BK, rows, out is None, self.design.choices,
                num_warps=warps,
            )  # fmt: skip
            return
        rows, warps = tile(s.V, FOLD)
        fold_product[(triton.cdiv(s.V, rows), len(slots), s.HV)](
            state.checkpoint, *(r.get(name, none) for name in ("k_hat", "k_hat_lo", "d", "d_lo", "g")), slots, lengths,
            state.on_device[1], to, s.H, s.HV, s.K, s.V, state.spec.length, self.BK, rows, self.BC, out is None,
            self.design.choices, num_warps=warps,
        )  # fmt: skip

    def _tiling(self, flush: bool) -> Tiling:
        """The tiles of a window kernel of this design."""
        replay, state = self.design.spec.fold == "replay", self.design.options.state
        if flush:
            return REPLAY if replay else IEEE_FLUSH if state == "ieee" else FLUSH
        if state == "ieee":
            return IEEE_VERIFY
        if self.state.slots * self.state.shape.H < 4 * self.units:
            return FEW
        return HALF if state == "bf16" else VERIFY

    def _shared(self, t: Tiling) -> tuple[Tiling, int, int]:
        """How it is shared out here; rows of a tile, programs per window and key head."""
        s = self.state.shape
        if self.BS > 4:
            # it needs far more registers than that
            t = t._replace(registers=None)
        rows = min(t.rows, width(s.V))
        shares = triton.next_power_of_2(triton.cdiv(self.units * t.wanted, self.state.slots * s.H))
        return t, rows, min(shares, triton.next_power_of_2(triton.cdiv(s.V, rows) * s.group))


def check(x: Inputs, state: TritonState, m: int) -> None:
    """Raise RingError naming the first input that is not as the kernels read it."""
    s, B = state.shape, state.slots
    heads: dict[str, tuple[int, ...]] = {"q": (B, s.H, m, s.K), "k": (B, s.H, m, s.K), "v": (B, s.HV, m, s.V)}
    gates = ((B, s.HV, m), (torch.float32,))
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
    wanted = {"g": gates, "beta": gates, "lengths": ((B,), (torch.int32,))}
    for name, shape in heads.items():
        wanted[name] = shape, (torch.bfloat16, torch.float32)
    for name, (size, dtypes) in wanted.items():
        y: Tensor = getattr(x, name)
        if tuple(y.shape) != size:
            raise RingError(f"{name}: shape {list(y.shape)}, the state's windows are {list(size)}")
        if y.dtype not in dtypes:
            raise RingError(f"{name}: {y.dtype} is not {' or '.join(map(str, dtypes))}")
        if y.device != state.checkpoint.device:
            raise RingError(f"{name}: on {y.device}, the state on {state.checkpoint.device}")
        if not y.is_contiguous():
            raise RingError(f"{name}: strides {list(y.stride())} are not those of a contiguous tensor")
    if x.k.dtype != x.q.dtype:
        raise RingError(f"k: {x.k.dtype} beside q of {x.q.dtype}")


def tile(V: int, wanted: tuple[int, int]) -> tuple[int, int]:
    """Rows per program, no more than there are, and warps."""
    return min(wanted[0], triton.next_power_of_2(V)), wanted[1]


def width(n: int) -> int:
    """A power of two that holds n and may be the inner dimension of a product."""
    return max(16, triton.next_power_of_2(n))
