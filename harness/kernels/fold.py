"""The two folds on the device: the product of stored d and k_hat, and the replay of raw records."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import (
    add_write,
    as_stored,
    columns,
    decay,
    dot,
    folded_tile,
    norm,
    over_columns,
    quotient,
    rounded,
    tile_of,
    unfolded,
)
from harness.kernels.prepare import past_keys, past_rows, weights, writes


@triton.jit
def fold_product(
    C, ring_k, k_lo, ring_d, d_lo, ring_g, slots, lengths, cache_base, out, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    IN_PLACE: tl.constexpr, O: tl.constexpr,
):  # fmt: skip
    """out[i], or the slot's own place, = the checkpoint of slots[i] after lengths[i] records."""
    tile, i, hv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, w = tl.load(slots + i).to(tl.int64), tl.load(lengths + i)
    if slot < 0 or (IN_PLACE and w == 0):
        return
    base = tl.load(cache_base + slot)
    rows, keys = tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    place, inside = tile_of(slot * HV + hv, rows, keys, V, K)
    S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
    if w > 0:
        row, valid = past_rows(base, w, L, BC)
        W, total, _ = weights(ring_g, row, valid, w, slot * HV + hv, L, O)
        Wd = writes(ring_d, d_lo, row, valid, slot * HV + hv, rows, V, L, O.low_d) * W[None, :]
        # rows behind the history are read from its last one, and W is zero there
        k_hat = past_keys(ring_k, k_lo, row, row >= 0, slot * H + hv // (HV // H), keys, K, L, O.low_k)
        S = S * total + dot(Wd, k_hat, O.fold, O.interpreted)
    to, _ = tile_of((slot if IN_PLACE else i) * HV + hv, rows, keys, V, K)
    tl.store(out + to, as_stored(S, out), mask=inside)


@triton.jit
def fold_replay(
    C, raw_k, raw_v, ring_g, raw_beta, slots, lengths, cache_base, out, eps, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IN_PLACE: tl.constexpr,
    O: tl.constexpr,
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
        K, V, L, BK, O,
    )  # fmt: skip
    to, _ = folded_tile((slot if IN_PLACE else i) * HV + hv, tile * BV, V, K, BK, BV)
    tl.store(out + to, tl.reshape(as_stored(S, out), place.shape), mask=inside)


@triton.jit
def replayed(
    S, raw_k, raw_v, ring_g, raw_beta, key_head, head, rows, w, base, eps,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, O: tl.constexpr,
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
        S, _ = advance(S, key.to(tl.float32), value.to(tl.float32), g, beta, eps, O)
        key, value, g, beta = next_key, next_value, next_g, next_beta
    return S


@triton.jit
def unit(key, eps, O: tl.constexpr):
    """key [I, J] over its norm, [I, 1, J]."""
    size = norm(tl.sum(tl.sum(key * key, axis=0), axis=0), eps, O.outside)
    return quotient(key, size, O.interpreted)[:, None, :]


@triton.jit
def advance(S, key, value, g, beta, eps, O: tl.constexpr):
    """S [I, BV, J] after one token of raw key [I, J], and its write d [BV]."""
    k_hat = rounded(unit(key, eps, O), O.key)
    if O.after:
        d = (value - over_columns(S * k_hat, O.strided)) * beta
        S = S * decay(g, O.exp)
    else:
        S = S * decay(g, O.exp)
        d = (value - over_columns(S * k_hat, O.strided)) * beta
    return add_write(S, d[None, :, None], k_hat), d
