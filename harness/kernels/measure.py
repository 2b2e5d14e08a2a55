"""How far a design's states are from exact ones: what relative errors need, summed where the states lie.

One program reads a tile of the exact state, the checkpoint and the folded copy once and leaves six numbers, so no state
is widened in memory. Formulas: README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.kernels.numbers import Choices, operand, tile_of
from harness.kernels.prepare import past_rows, weights
from harness.kernels.steps import Steps, tile, width

SUMS = 6  # of a tile: squares of served - exact, kept - exact, exact; largest magnitudes of the three
READ = (16, 8)  # rows of a state per program, and warps: 64 registers, none spilled


@triton.jit
def weigh(ring_g, slots, lengths, cache_base, W_out, total_out, HV, L: tl.constexpr, BC: tl.constexpr, O: tl.constexpr):
    """W_out [n, HV, BC] and total_out [n, HV] fp32: decays of lengths[i] records of slots[i], as a verify takes them.

    One program per (i, value head)
    """
    i, hv = tl.program_id(0), tl.program_id(1)
    slot, w = tl.load(slots + i).to(tl.int64), tl.load(lengths + i)
    if slot < 0:
        return
    row, valid = past_rows(tl.load(cache_base + slot), w, L, BC)
    W, total, _ = weights(ring_g, row, valid, w, slot * HV + hv, L, O)
    tl.store(W_out + (i * HV + hv) * BC + tl.arange(0, BC), W)
    tl.store(total_out + i * HV + hv, total)


@triton.jit
def error_sums(
    exact, C, kept, ring_k, k_lo, ring_d, d_lo, W_in, total_in, slots, points, lengths, cache_base, found, B, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    O: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """found [n, HV, V/BV, 6] fp64: SUMS of slots[i] at its grid point points[i], with lengths[i] records.

    exact [P, B, HV, V, K] fp64; C [slots, HV, V, K]; kept [n, HV, V, K]; rings [slots, heads, L, width]; W_in, total_in
    as weigh wrote them. A negative slot is passed over. Served is, by HISTORY,
    records  e^G C + sum_j (W_j d_j) k_hat_j', operands as the verify reads them and the sum in fp64
    copy     C [n, HV, V, K], in which the history is folded; the rings and what weigh writes are not read
    none     C, which is kept, too: no copies are read
    One program per (BV rows, i, value head)
    """
    tile, i, hv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, point = tl.load(slots + i).to(tl.int64), tl.load(points + i).to(tl.int64)
    if slot < 0:
        return
    rows, keys = tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    mine, head, key_head = i * HV + hv, slot * HV + hv, slot * H + hv // (HV // H)
    at, inside = tile_of((point * B + slot) * HV + hv, rows, keys, V, K)
    S = tl.load(exact + at, mask=inside, other=0.0)
    place, _ = tile_of(mine if HISTORY == "copy" else head, rows, keys, V, K)
    state = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
    if HISTORY == "records":
        w, base = tl.load(lengths + i), tl.load(cache_base + slot)
        served = operand(state, O.state).to(tl.float64) * tl.load(total_in + mine).to(tl.float64)
        for j in range(w):
            row = (base + j) & (L - 1)
            k_hat = tl.load(ring_k + (key_head * L + row) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            if O.low_k and O.read_low:
                k_hat += tl.load(k_lo + (key_head * L + row) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
            d = tl.load(ring_d + (head * L + row) * V + rows, mask=rows < V, other=0.0).to(tl.float32)
            if O.low_d and O.read_low:
                d += tl.load(d_lo + (head * L + row) * V + rows, mask=rows < V, other=0.0).to(tl.float32)
            Wd = operand(d * tl.load(W_in + mine * BC + j), O.history)
            served += Wd.to(tl.float64)[:, None] * operand(k_hat, O.score).to(tl.float64)[None, :]
    else:
        served = state.to(tl.float64)
    if HISTORY == "none":
        fold = served
    else:
        copy, _ = tile_of(mine, rows, keys, V, K)
        fold = tl.load(kept + copy, mask=inside, other=0.0).to(tl.float64)
    # a lane that does not exist holds zeros, but a decay that is no number makes one of them NaN
    off_served, off_kept = tl.where(inside, served - S, 0.0), tl.where(inside, fold - S, 0.0)
    to = found + (mine * tl.num_programs(0) + tile) * 6
    put(to, off_served)
    put(to + 1, off_kept)
    put(to + 2, S)


@triton.jit
def put(to, x):
    """Sum of squares of fp64 x [R, C], and three places on its largest magnitude."""
    square = tl.sum(tl.sum(x * x, axis=1), axis=0)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    tl.store(to, square)
    # a maximum may pass over a NaN; a sum of squares is NaN exactly where a term is
    tl.store(to + 3, tl.where(square != square, square, largest))


def decays(g: Tensor, lengths: Sequence[int], base: Sequence[int], choices: Choices) -> tuple[Tensor, Tensor]:
    """W [n, HV, BC] and total [n, HV] of the first lengths[i] records of rings g [n, HV, L] fp32, which begin in row
    base[i]."""
    (n, HV, L), BC = g.shape, width(g.shape[2])
    each, counts, first = torch.tensor([range(n), lengths, base], dtype=torch.int32, device=g.device)
    W, total = torch.empty(n, HV, BC, device=g.device), torch.empty(n, HV, device=g.device)
    weigh[(n, HV)](g, each, counts, first, W, total, HV, L, BC, choices, num_warps=1)
    return W, total


class Measure:
    """The states of some slots against exact [P, B, HV, V, K] fp64, at most `most` slots at a time; launches only."""

    def __init__(self, steps: Steps, exact: Tensor, most: int):
        state, s = steps.state, steps.state.shape
        self.steps, self.exact, self.BC = steps, exact.contiguous(), steps.BC
        self.rows, self.warps = tile(s.V, READ)
        self.tiles = triton.cdiv(s.V, self.rows)
        # a design without records has one state, which is read in place
        self.history = "copy" if steps.design.spec.verify == "tokens" else "records"
        n = most if state.records else 0
        self.kept = torch.empty(n, *state.checkpoint.shape[1:], dtype=state.checkpoint.dtype, device=state.device)
        self.served = self.kept
        if n and self.history == "copy" and state.checkpoint.dtype != torch.float32:
            self.served = torch.empty(self.kept.shape, device=state.device)
        self.W = torch.empty(n, s.HV, self.BC, device=state.device)
        self.total = torch.empty(n, s.HV, device=state.device)

    def room(self, *n: int) -> Tensor:
        """Where look leaves what it finds of n slots, [*n, HV, tiles, 6]."""
        s = self.steps.state
        return torch.empty(*n, s.shape.HV, self.tiles, SUMS, dtype=torch.float64, device=s.device)

    def look(self, slots: Tensor, points: Tensor, lengths: Tensor, found: Tensor) -> None:
        """Sums of slots[i] against exact[points[i]], with lengths[i] records, [n] int32 each, into found [n, ...]."""
        steps, state, s = self.steps, self.steps.state, self.steps.state.shape
        r, none, base, n, L = state.records, state.on_device, state.on_device[1], len(slots), state.spec.length
        C, history = state.checkpoint, self.history if r else "none"
        if r:
            steps.fold(lengths, self.kept, slots)
        if history == "copy":
            C = self.served
            if C is not self.kept:
                steps.fold(lengths, C, slots)
        elif r:
            weigh[(n, s.HV)](
                r["g"], slots, lengths, base, self.W, self.total, s.HV, L, self.BC, steps.design.choices, num_warps=1
            )
        error_sums[(self.tiles, n, s.HV)](
            self.exact, C, self.kept, *(r.get(name, none) for name in ("k_hat", "k_hat_lo", "d", "d_lo")),
            self.W, self.total, slots, points, lengths, base, found, state.slots, s.H, s.HV,
            s.K, s.V, L, steps.BK, self.rows, self.BC, steps.design.choices, history, num_warps=self.warps,
        )  # fmt: skip


def relative(found: Tensor) -> Tensor:
    """[n, HV, tiles, 6] -> [n, HV, 4]: ||served - S||_F / ||S||_F and the same of maxima, then both of kept; absolute
    where S is 0."""
    squares, largest = found[..., :3].sum(-2).sqrt(), found[..., 3:].amax(-2)
    norms = torch.stack((squares, largest), -1)  # [n, HV, 3, 2]
    scale = norms[..., 2:, :]
    return (norms[..., :2, :] / torch.where(scale == 0, 1.0, scale)).flatten(-2)
