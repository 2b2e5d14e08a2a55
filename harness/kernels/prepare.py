"""What a window's outputs need that no row of the state enters: once per window and key head, before its states.

k_hat, q_hat and history scores stay with the program; history weights, A or its inverse, F and e^G of its value heads
go to scratch, which is read back a tile at a time. The records that do not depend on the state (k_hat, raw k, g, beta)
are written here too. Formulas: README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import as_stored, decay, dot, quotient, round_bf16


@triton.jit
def weights(ring_g, row, valid, head, L: tl.constexpr, EXP: tl.constexpr, AXIS: tl.constexpr = 0):
    """W, zero behind the history, and the total decay of a history whose j-th record lies in row[j], along AXIS.

    AXIS 0: row, valid [BC] of one head; 1: valid [heads, BC], row [1, BC], head [heads, 1]
    """
    g = tl.where(valid, tl.load(ring_g + head * L + row, mask=valid, other=0.0), 0.0)
    total = tl.sum(g, axis=AXIS)
    left = (total if AXIS == 0 else total[:, None]) - tl.cumsum(g, axis=AXIS)
    return tl.where(valid, decay(left, EXP), 0.0), decay(total, EXP)


@triton.jit
def writes(ring_d, d_lo, row, valid, head, v, V: tl.constexpr, L: tl.constexpr, LOW: tl.constexpr):
    """d [BV, BC] of a history whose j-th record lies in row[j], zero behind it; v [BV] the rows of the state."""
    at = (head * L + row)[None, :] * V + v[:, None]
    inside = valid[None, :] & (v < V)[:, None]
    d = tl.load(ring_d + at, mask=inside, other=0.0).to(tl.float32)
    if LOW:
        d += tl.load(d_lo + at, mask=inside, other=0.0).to(tl.float32)
    return d


@triton.jit
def on_keys_of(x, BS: tl.constexpr):
    """Of x [2 BS, 2 BS], lanes of k_hat and q_hat in turn both ways: k_hat k_hat' and q_hat k_hat', [BS, BS] each."""
    of_keys, of_queries = tl.split(tl.permute(tl.reshape(x, (BS, 2, BS, 2)), (0, 2, 3, 1)))
    on_keys, _ = tl.split(of_keys)
    on_queries, _ = tl.split(of_queries)
    return on_keys, on_queries


@triton.jit
def prepare(
    q, k, g, beta, ring_k, ring_g, raw_k, raw_beta, W_out, total_out, A_out, F_out, eG_out, eps, scale,
    b, slot, past, base, first, n, h, m, H, HV, written,
    K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    KEY: tl.constexpr, DOT: tl.constexpr, INVERSE: tl.constexpr, RAW: tl.constexpr, INTERPRETED: tl.constexpr,
    EXP: tl.constexpr,
):  # fmt: skip
    """Returns kq [2 BS, BK], lanes of k_hat and q_hat in turn, and the history's k_hat [BC, BK].

    q, k [B, H, m, K]; g, beta [B, HV, m] fp32; the window of batch row b, n > 0 tokens, and key head h, on a history of
    `past` records from base on; rings [slots, heads, L, width], new records from `first` on, if `written`.
    W_out [B, HV, BC]; total_out [B, HV]; A_out (T, or A for a right-hand-side solve), F_out [B, HV, BS, BS];
    eG_out [B, HV, BS]; fp32
    """
    keys, lane, record = tl.arange(0, BK), tl.arange(0, BS), tl.arange(0, BC)
    live = lane < n
    # dead lanes read a live one and are zeroed: a masked operand can leave stale shared memory behind
    at = tl.minimum(lane, n - 1)
    # k_hat and q_hat in turn, so that one product serves both
    both = tl.arange(0, 2 * BS)
    asks, there = both % 2, ((b * H + h) * m + tl.minimum(both // 2, n - 1))[:, None] * K + keys[None, :]
    raw = tl.load(tl.where(asks == 0, k, q)[:, None] + there, mask=(keys < K)[None, :], other=0.0)
    # rows behind the history may hold anything, so none of them is read
    row, valid = (base + tl.minimum(record, tl.maximum(past - 1, 0))) & (L - 1), record < past
    key_head = slot * H + h
    from_k = ring_k + (key_head * L + row)[:, None] * K + keys[None, :]
    hist = tl.load(from_k, mask=valid[:, None] & (keys < K)[None, :], other=0.0).to(tl.float32)
    # all value heads that read this key head at once
    of, G = tl.arange(0, BG), HV // H
    hv, real = h * G + tl.minimum(of, G - 1), of < G
    mine, head = (b * HV + hv)[:, None], (slot * HV + hv)[:, None]
    step_g, step_beta = tl.load(g + mine * m + at[None, :]), tl.load(beta + mine * m + at[None, :])
    W, total = weights(ring_g, row[None, :], valid[None, :] & real[:, None], head, L, EXP, 1)
    tl.store(W_out + mine * BC + record[None, :], W, mask=real[:, None])
    tl.store(total_out + b * HV + hv, total, mask=real)

    kq = raw.to(tl.float32)
    norm = tl.sqrt(tl.sum(kq * kq, axis=1) + eps)
    kq = (
        quotient(kq, norm[:, None], INTERPRETED)
        * tl.where(both // 2 < n, tl.where(asks == 0, 1.0, scale), 0.0)[:, None]
    )
    if KEY == "bf16":
        kq = round_bf16(kq)
    on_keys, on_queries = on_keys_of(dot(kq, tl.trans(kq), DOT, INTERPRETED), BS)
    r, c = lane[None, :, None], lane[None, None, :]
    decays = tl.cumsum(tl.where(live[None, :], step_g, 0.0), axis=1)
    gain = tl.where(live[None, :], step_beta, 0.0)
    E = decay(tl.where(r >= c, decays[:, :, None] - decays[:, None, :], float("-inf")), EXP)
    A = tl.where(r > c, gain[:, :, None] * E * on_keys[None, :, :], 0.0)
    if INVERSE == "substitution":
        T = tl.where(r == c, 1.0, 0.0) - tl.where(r == 1, A, 0.0)
        for t in tl.static_range(2, BS):
            row_A = tl.sum(tl.where(r == t, A, 0.0), axis=1)
            T = T - tl.where(r == t, tl.sum(row_A[:, :, None] * T, axis=1)[:, None, :], 0.0)
        A = T
    square = ((b * HV + hv)[:, None, None] * BS + r) * BS + c
    tl.store(A_out + square, A, mask=real[:, None, None])
    tl.store(F_out + square, E * on_queries[None, :, :], mask=real[:, None, None])
    tl.store(eG_out + mine * BS + lane[None, :], decay(decays, EXP), mask=real[:, None])

    if written:
        new = head * L + ((first + lane) & (L - 1))[None, :]
        put = live[None, :] & real[:, None]
        tl.store(ring_g + new, step_g, mask=put)
        if RAW:
            tl.store(raw_beta + new, step_beta, mask=put)
        # of the rows of kq those that are keys
        held = ((asks == 0) & (both // 2 < n))[:, None] & (keys < K)[None, :]
        to = (key_head * L + ((first + both // 2) & (L - 1)))[:, None] * K + keys[None, :]
        tl.store(ring_k + to, as_stored(kq, ring_k), mask=held)
        if RAW:
            tl.store(raw_k + to, raw, mask=held)
    return kq, hist
