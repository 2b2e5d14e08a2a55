"""The two folds on the device: the product of stored d and k_hat, and the replay of raw records."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import (
    as_stored,
    columns,
    decay,
    dot,
    folded_tile,
    over_columns,
    quotient,
    tile_of,
    unfolded,
)
from harness.kernels.prepare import weights, writes


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
    C, raw_k, raw_v, ring_g, raw_beta, slots, lengths, cache_base, out, eps, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IN_PLACE: tl.constexpr,
    INTERPRETED: tl.constexpr, EXP: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """The same by the recurrence over raw records, one token after the other in registers."""
    tile, i, hv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, w = tl.load(slots + i).to(tl.int64), tl.load(lengths + i)
    if slot < 0 or (IN_PLACE and w == 0):
        return
    place, inside = folded_tile(slot * HV + hv, tile * BV, V, K, BK, BV)
    S = unfolded(tl.load(C + place, mask=inside, other=0.0).to(tl.float32), BK, BV)
    rows, base = tile * BV + tl.arange(0, BV), tl.load(cache_base + slot)
    S = replayed(
        S, raw_k, raw_v, ring_g, raw_beta, slot * H + hv // (HV // H), slot * HV + hv, rows, w, base, eps,
        K, V, L, BK, INTERPRETED, EXP, STRIDED,
    )  # fmt: skip
    to, _ = folded_tile((slot if IN_PLACE else i) * HV + hv, tile * BV, V, K, BK, BV)
    tl.store(out + to, tl.reshape(as_stored(S, out), place.shape), mask=inside)


@triton.jit
def replayed(
    S, raw_k, raw_v, ring_g, raw_beta, key_head, head, rows, w, base, eps,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr, EXP: tl.constexpr,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """S [I, BV, J], the given rows [BV] of a state, after w records from base on."""
    keys = columns(BK)
    last = tl.maximum(w - 1, 0)
    row = base & (L - 1)
    some = (keys < K) & (w > 0)
    key = tl.load(raw_k + (key_head * L + row) * K + keys, mask=some, other=0.0)
    value = tl.load(raw_v + (head * L + row) * V + rows, mask=(rows < V) & (w > 0), other=0.0)
    g, beta = tl.load(ring_g + head * L + row), tl.load(raw_beta + head * L + row)
    for t in range(w):
        # the next token is on its way while this one is worked on
        row = (base + tl.minimum(t + 1, last)) & (L - 1)
        next_key = tl.load(raw_k + (key_head * L + row) * K + keys, mask=keys < K, other=0.0)
        next_value = tl.load(raw_v + (head * L + row) * V + rows, mask=rows < V, other=0.0)
        next_g, next_beta = tl.load(ring_g + head * L + row), tl.load(raw_beta + head * L + row)
        S, _ = advance(S, key.to(tl.float32), value.to(tl.float32), g, beta, eps, INTERPRETED, EXP, STRIDED)
        key, value, g, beta = next_key, next_value, next_g, next_beta
    return S


@triton.jit
def unit(key, eps, INTERPRETED: tl.constexpr):
    """key [I, J] over its norm, [I, 1, J]."""
    norm = tl.sqrt(tl.sum(tl.sum(key * key, axis=0), axis=0) + eps)
    return quotient(key, norm, INTERPRETED)[:, None, :]


@triton.jit
def advance(S, key, value, g, beta, eps, INTERPRETED: tl.constexpr, EXP: tl.constexpr, STRIDED: tl.constexpr):
    """S [I, BV, J] after one token of raw key [I, J], and its write d [BV]. STRIDED: as over_columns says."""
    k_hat = unit(key, eps, INTERPRETED)
    S = S * decay(g, EXP)
    d = (value - over_columns(S * k_hat, STRIDED)) * beta
    return S + d[None, :, None] * k_hat, d
