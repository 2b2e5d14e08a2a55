"""The recurrence on the device, token by token: every draft's own state is kept and a commit takes one of them, or raw
records are, and their replay comes before the next window."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.fold import advance, replayed, unit
from harness.kernels.numbers import as_stored, columns, folded_tile, over_columns, rounded, tile_of, unfolded


@triton.jit
def recurrent_verify(
    q, k, v, g, beta, lengths, slots, write_pos, cache_base, is_flush, out, d_out, C, drafts,
    raw_k, raw_v, ring_g, raw_beta, eps, scale, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, KEEP_D: tl.constexpr,
    O: tl.constexpr,
):  # fmt: skip
    """Outputs of a window token by token from C [slots, HV, V, K]; drafts [B, m, HV, V, K] in C's format.

    O.raw: from the state after the history's replay, which a flag rounds and stores; records and no drafts are written.
    One program per (BV rows, window, value head); layers are more slots; arguments as ring_verify's
    """
    tile, b, hv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, n = tl.load(slots + b).to(tl.int64), tl.load(lengths + b)
    if slot < 0 or n == 0:
        return
    rows, keys = tile * BV + tl.arange(0, BV), columns(BK)
    place, inside = folded_tile(slot * HV + hv, tile * BV, V, K, BK, BV)
    S = unfolded(tl.load(C + place, mask=inside, other=0.0).to(tl.float32), BK, BV)
    window, mine = (b.to(tl.int64) * H + hv // (HV // H)) * m, (b.to(tl.int64) * HV + hv) * m
    if O.raw:
        w, base = tl.load(write_pos + slot), tl.load(cache_base + slot)
        key_head, head = slot * H + hv // (HV // H), slot * HV + hv
        S = replayed(S, raw_k, raw_v, ring_g, raw_beta, key_head, head, rows, w, base, eps, K, V, L, BK, O)
        if (tl.load(is_flush + slot) != 0) & (w > 0):
            folded = as_stored(S, C)
            tl.store(C + place, tl.reshape(folded, place.shape), mask=inside)
            S = folded.to(tl.float32)
    for t in range(n):
        raw = tl.load(k + (window + t) * K + keys, mask=keys < K, other=0.0)
        query = tl.load(q + (window + t) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
        value = tl.load(v + (mine + t) * V + rows, mask=rows < V, other=0.0).to(tl.float32)
        step_g, step_beta = tl.load(g + mine + t), rounded(tl.load(beta + mine + t), O.beta)
        S, d = advance(S, raw.to(tl.float32), value, step_g, step_beta, eps, O)
        o = over_columns(S * rounded(unit(query, eps, O) * scale, O.key), O.strided)
        tl.store(out + (mine + t) * V + rows, as_stored(o, out), mask=rows < V)
        if KEEP_D:
            tl.store(d_out + (mine + t) * V + rows, d, mask=rows < V)
        if O.raw:
            row = (base + w + t) & (L - 1)
            tl.store(raw_v + (head * L + row) * V + rows, as_stored(value, raw_v), mask=rows < V)
            tl.store(raw_k + (key_head * L + row) * K + keys, raw, mask=(keys < K) & (tile + hv % (HV // H) == 0))
            tl.store(ring_g + head * L + row, step_g, mask=tile == 0)
            tl.store(raw_beta + head * L + row, step_beta, mask=tile == 0)
        else:
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
