"""The two folds on the device: the product of stored d and k_hat, and the replay of raw records."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import as_stored, decay, dot, row_sums, tile_of
from harness.kernels.prepare import weights
from harness.kernels.window import writes


@triton.jit
def fold_product(
    C, ring_k, ring_d, ring_g, d_lo, slots, lengths, cache_base, out, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    DOT: tl.constexpr, LOW: tl.constexpr, IN_PLACE: tl.constexpr, INTERPRETED: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """out[i], or the slot's own place, = the checkpoint of slots[i] after lengths[i] records."""
    tile, i, hv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, w = tl.load(slots + i).to(tl.int64), tl.load(lengths + i)
    if slot < 0 or (IN_PLACE and w == 0):
        return
    base = tl.load(cache_base + slot)
    rows, keys, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BC)
    place, inside = tile_of(slot * HV + hv, rows, keys, V, K)
    S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
    if w > 0:
        row = (base + tl.minimum(record, w - 1)) & (L - 1)
        valid = record < w
        W, total = weights(ring_g, row, valid, slot * HV + hv, L, EXP)
        Wd = writes(ring_d, d_lo, row, valid, slot * HV + hv, rows, V, L, LOW) * W[None, :]
        head = slot * H + hv // (HV // H)
        past = tl.load(ring_k + (head * L + row)[:, None] * K + keys[None, :], mask=(keys < K)[None, :], other=0.0)
        S = S * total + dot(Wd, past.to(tl.float32), DOT, INTERPRETED)
    to, _ = tile_of((slot if IN_PLACE else i) * HV + hv, rows, keys, V, K)
    tl.store(out + to, as_stored(S, out), mask=inside)


@triton.jit
def fold_replay(
    C, raw_k, raw_v, ring_g, raw_beta, which, count, slots, lengths, taken, cache_base, out, eps, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IN_PLACE: tl.constexpr,
    EXP: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """The same by the recurrence over raw records, one token after the other in registers.

    which [count[0]] the i that fold, taken [n] those of them that are not idle; programs share out their tiles
    """
    TV: tl.constexpr = (V + BV - 1) // BV
    for j in range(tl.program_id(0), tl.load(count) * HV * TV, tl.num_programs(0)):
        rows, keys, hv = (j % TV) * BV + tl.arange(0, BV), tl.arange(0, BK), (j // TV) % HV
        i = tl.load(which + j // TV // HV).to(tl.int64)
        slot, w = tl.load(slots + i).to(tl.int64), tl.load(lengths + i)
        if tl.load(taken + i) == 0:
            w = 0
        if slot >= 0 and (not IN_PLACE or w > 0):
            base = tl.load(cache_base + slot)
            place, inside = tile_of(slot * HV + hv, rows, keys, V, K)
            S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
            head, key_head = slot * HV + hv, slot * H + hv // (HV // H)
            for t in range(w):
                row = (base + t) & (L - 1)
                key = tl.load(raw_k + (key_head * L + row) * K + keys, mask=keys < K, other=0.0).to(tl.float32)
                value = tl.load(raw_v + (head * L + row) * V + rows, mask=rows < V, other=0.0).to(tl.float32)
                g, beta = tl.load(ring_g + head * L + row), tl.load(raw_beta + head * L + row)
                S, _ = advance(S, key, value, g, beta, eps, EXP, STRIDED)
            to, _ = tile_of((slot if IN_PLACE else i) * HV + hv, rows, keys, V, K)
            tl.store(out + to, as_stored(S, out), mask=inside)


@triton.jit
def advance(S, key, value, g, beta, eps, EXP: tl.constexpr, STRIDED: tl.constexpr):
    """S [BV, BK] after one token, and its write d [BV]. STRIDED: the order of the sum S k_hat, as row_sums says."""
    k_hat = key / tl.sqrt(tl.sum(key * key, axis=0) + eps)
    S = S * decay(g, EXP)
    d = (value - row_sums(S * k_hat[None, :], STRIDED)) * beta
    return S + d[:, None] * k_hat[None, :], d
