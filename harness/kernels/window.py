"""Ring verify: a window's outputs from checkpoint, history and window, in one read of the state.

A slot whose flag is up folds its history in the same pass: the state is read once, folded, stored and used. Which route
a slot takes is decided on the device. Formulas and operand formats: README.md beside this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import as_stored, decay, dot, round_bf16, tile_of


@triton.jit
def unit(x, live, eps, scale, KEY: tl.constexpr):
    """Rows of x [n, K] over their norm, times scale [n]; rows that are not live are zero; rounded as keys are."""
    x = x / tl.sqrt(tl.sum(x * x, axis=1) + eps)[:, None] * scale[:, None]
    x = x * live.to(tl.float32)[:, None]
    return round_bf16(x) if KEY == "bf16" else x


@triton.jit
def halves(x, BS: tl.constexpr, N: tl.constexpr):
    """Rows 2i and 2i + 1 of x [2 BS, N] apart, [BS, N] each."""
    return tl.split(tl.permute(tl.reshape(x, (BS, 2, N)), (0, 2, 1)))


@triton.jit
def history(
    ring_d, d_lo, ring_g, row, valid, head, v, V: tl.constexpr, L: tl.constexpr, LOW: tl.constexpr, EXP: tl.constexpr
):
    """W d [BV, BC] and the total decay of a history whose j-th record lies in row[j]; zero behind it.

    head  the (slot, value head) the records belong to; v [BV] the rows of the state
    """
    g = tl.where(valid, tl.load(ring_g + head * L + row), 0.0)
    total = tl.sum(g, axis=0)
    W = tl.where(valid, decay(total - tl.cumsum(g, axis=0), EXP), 0.0)
    at = (head * L + row)[None, :] * V + v[:, None]
    d = tl.load(ring_d + at, mask=(v < V)[:, None], other=0.0).to(tl.float32)
    if LOW:
        d += tl.load(d_lo + at, mask=(v < V)[:, None], other=0.0).to(tl.float32)
    return d * W[None, :], decay(total, EXP)


@triton.jit
def ring_verify(
    q, k, v, g, beta, lengths, slots, out, d_out,
    C, ring_k, ring_d, ring_g, d_lo, raw_v, raw_k, raw_beta, write_pos, cache_base, is_flush,
    eps, scale, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, KEY: tl.constexpr, DOT: tl.constexpr, FOLD: tl.constexpr, INVERSE: tl.constexpr,
    REPLAYED: tl.constexpr, LOW: tl.constexpr, READ_LOW: tl.constexpr, RAW: tl.constexpr, INTERPRETED: tl.constexpr,
    EXP: tl.constexpr,
):  # fmt: skip
    """One program per (BV rows, window, value head).

    q, k [B, H, m, K]; v [B, HV, m, V]; g, beta [B, HV, m] fp32; lengths, slots [B], a negative slot or a length of 0
    is skipped; REPLAYED: a flagged slot's history is in C already; out, d_out [B, HV, m, V]; C [slots, HV, V, K];
    rings [slots, heads, L, width]; cursors [slots] int32
    """
    tile, b, hv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, n = tl.load(slots + b).to(tl.int64), tl.load(lengths + b)
    if slot < 0 or n == 0:
        return
    w, base, flag = tl.load(write_pos + slot), tl.load(cache_base + slot), tl.load(is_flush + slot)
    h = hv // (HV // H)
    rows, keys, lane, record = tile * BV + tl.arange(0, BV), tl.arange(0, BK), tl.arange(0, BS), tl.arange(0, BC)
    # the state is asked for first: it is most of what moves
    place, inside = tile_of(slot * HV + hv, rows, keys, V, K)
    S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
    live = lane < n
    # dead lanes read a live one and are zeroed: a masked operand can leave stale shared memory behind
    at = tl.minimum(lane, n - 1)
    window = (b.to(tl.int64) * H + h) * m
    # k_hat and q_hat in turn, so that one product serves both
    both = tl.arange(0, 2 * BS)
    asks, there = both % 2, (window + tl.minimum(both // 2, n - 1))[:, None] * K + keys[None, :]
    from_k = tl.load(k + there, mask=(keys < K)[None, :], other=0.0).to(tl.float32)
    from_q = tl.load(q + there, mask=(keys < K)[None, :], other=0.0).to(tl.float32)
    kq = tl.where(asks[:, None] == 0, from_k, from_q)
    kq = unit(kq, both // 2 < n, eps, tl.where(asks == 0, 1.0, scale), KEY)
    mine = (b.to(tl.int64) * HV + hv) * m
    step_g, step_beta = tl.load(g + mine + at), tl.load(beta + mine + at)
    values = tl.load(v + (mine + at)[None, :] * V + rows[:, None], mask=(rows < V)[:, None], other=0.0)
    values = values.to(tl.float32) * live.to(tl.float32)[None, :]
    G = tl.cumsum(tl.where(live, step_g, 0.0), axis=0)
    gain = tl.where(live, step_beta, 0.0)

    head, key_head = slot * HV + hv, slot * H + h
    on = tl.zeros((BV, 2 * BS), tl.float32)
    if w > 0 and not (REPLAYED and flag != 0):
        # rows behind the history may hold anything, so none of them is read
        valid = record < w
        row = (base + tl.minimum(record, w - 1)) & (L - 1)
        Wd, total = history(ring_d, d_lo, ring_g, row, valid, head, rows, V, L, READ_LOW, EXP)
        past = tl.load(
            ring_k + (key_head * L + row)[:, None] * K + keys[None, :], mask=(keys < K)[None, :], other=0.0
        ).to(tl.float32)
        if flag != 0:
            if LOW and not READ_LOW:
                Wd, total = history(ring_d, d_lo, ring_g, row, valid, head, rows, V, L, True, EXP)
            S = as_stored(S * total + dot(Wd, past, FOLD, INTERPRETED), C)
            tl.store(C + place, S, mask=inside)
            S = S.to(tl.float32)
            on = dot(S, tl.trans(kq), DOT, INTERPRETED)
        else:
            on = dot(S, tl.trans(kq), DOT, INTERPRETED) * total
            on += dot(Wd, dot(past, tl.trans(kq), DOT, INTERPRETED), DOT, INTERPRETED)
    else:
        on = dot(S, tl.trans(kq), DOT, INTERPRETED)
    on_k, on_q = tl.split(tl.reshape(on, (BV, BS, 2)))
    k_hat, _ = halves(kq, BS, BK)
    on_keys, on_queries = halves(dot(kq, tl.trans(k_hat), DOT, INTERPRETED), BS, BS)

    i, j = lane[:, None], lane[None, :]
    E = decay(tl.where(i >= j, G[:, None] - G[None, :], float("-inf")), EXP)
    A = tl.where(i > j, gain[:, None] * E * on_keys, 0.0)
    F = E * on_queries
    R = (values - decay(G, EXP)[None, :] * on_k) * gain[None, :]
    if INVERSE == "rhs_solve":
        D = R
        for t in tl.static_range(1, BS):
            row_A = tl.sum(tl.where(i == t, A, 0.0), axis=0)
            taken = tl.sum(D * row_A[None, :], axis=1)
            D = tl.where(j == t, D - taken[:, None], D)
    else:
        T = tl.where(i == j, 1.0, 0.0) - tl.where(i == 1, A, 0.0)
        for t in tl.static_range(2, BS):
            row_A = tl.sum(tl.where(i == t, A, 0.0), axis=0)
            T = T - tl.where(i == t, tl.sum(row_A[:, None] * T, axis=0)[None, :], 0.0)
        D = tl.zeros((BV, BS), tl.float32)
        for t in tl.static_range(BS):
            column = tl.sum(tl.where(j == t, R, 0.0), axis=1)
            D += column[:, None] * tl.sum(tl.where(j == t, T, 0.0), axis=1)[None, :]
    o = decay(G, EXP)[None, :] * on_q
    for t in tl.static_range(BS):
        column = tl.sum(tl.where(j == t, D, 0.0), axis=1)
        o += column[:, None] * tl.sum(tl.where(j == t, F, 0.0), axis=1)[None, :]

    to = (mine + lane)[None, :] * V + rows[:, None]
    put = live[None, :] & (rows < V)[:, None]
    tl.store(out + to, as_stored(o, out), mask=put)
    tl.store(d_out + to, D, mask=put)
    new = (base + w + lane) & (L - 1)
    record_place = (head * L + new)[None, :] * V + rows[:, None]
    high = as_stored(D, ring_d)
    tl.store(ring_d + record_place, high, mask=put)
    if LOW:
        tl.store(d_lo + record_place, as_stored(D - high.to(tl.float32), d_lo), mask=put)
    if RAW:
        tl.store(raw_v + record_place, as_stored(values, raw_v), mask=put)
    if tile == 0:
        tl.store(ring_g + head * L + new, step_g, mask=live)
        if RAW:
            tl.store(raw_beta + head * L + new, step_beta, mask=live)
        if hv % (HV // H) == 0:
            key_place = (key_head * L + new)[:, None] * K + keys[None, :]
            written = live[:, None] & (keys < K)[None, :]
            tl.store(ring_k + key_place, as_stored(k_hat, ring_k), mask=written)
            if RAW:
                raw = tl.load(k + (window + at)[:, None] * K + keys[None, :], mask=written, other=0.0)
                tl.store(raw_k + key_place, raw, mask=written)
