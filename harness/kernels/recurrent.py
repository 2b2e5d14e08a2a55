"""The recurrence on the device: every draft's own state is kept, and a commit takes one of them."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.fold import advance, unit
from harness.kernels.numbers import as_stored, columns, folded_tile, over_columns, tile_of, unfolded


@triton.jit
def recurrent_verify(
    q, k, v, g, beta, lengths, slots, out, d_out, C, drafts, eps, scale, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEEP_D: tl.constexpr,
    INTERPRETED: tl.constexpr, EXP: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Outputs of a window token by token from C [slots, HV, V, K]; drafts [B, m, HV, V, K] in C's format.

    One program per (BV rows, window, value head); arguments as ring_verify's
    """
    tile, b, hv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, n = tl.load(slots + b).to(tl.int64), tl.load(lengths + b)
    if slot < 0 or n == 0:
        return
    rows, keys = tile * BV + tl.arange(0, BV), columns(BK)
    place, inside = folded_tile(slot * HV + hv, tile * BV, V, K, BK, BV)
    S = unfolded(tl.load(C + place, mask=inside, other=0.0).to(tl.float32), BK, BV)
    window, mine = (b.to(tl.int64) * H + hv // (HV // H)) * m, (b.to(tl.int64) * HV + hv) * m
    for t in range(n):
        key = tl.load(k + (window + t) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
        query = tl.load(q + (window + t) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
        value = tl.load(v + (mine + t) * V + rows, mask=rows < V, other=0.0).to(tl.float32)
        S, d = advance(S, key, value, tl.load(g + mine + t), tl.load(beta + mine + t), eps, INTERPRETED, EXP, STRIDED)
        o = over_columns(S * (unit(query, eps, INTERPRETED) * scale), STRIDED)
        tl.store(out + (mine + t) * V + rows, as_stored(o, out), mask=rows < V)
        if KEEP_D:
            tl.store(d_out + (mine + t) * V + rows, d, mask=rows < V)
        to, _ = folded_tile((b.to(tl.int64) * m + t) * HV + hv, tile * BV, V, K, BK, BV)
        tl.store(drafts + to, tl.reshape(as_stored(S, drafts), place.shape), mask=inside)


@triton.jit
def take_draft(C, drafts, slots, accepted, m, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """C[slots[b]] = drafts[b, accepted[b] - 1] where any token was accepted."""
    tile, b, hv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, n = tl.load(slots + b).to(tl.int64), tl.load(accepted + b)
    if slot < 0 or n <= 0:
        return
    rows, keys = tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    kept, inside = tile_of((b * m + n - 1) * HV + hv, rows, keys, V, K)
    to, _ = tile_of(slot * HV + hv, rows, keys, V, K)
    tl.store(C + to, tl.load(drafts + kept, mask=inside, other=0.0), mask=inside)
