"""What a window's outputs need that no row of the state enters: once per window and key head, before its states.

k_hat, q_hat and history scores stay with the program; history weights, A or its inverse, F and e^G of its value heads
go to scratch, which is read back a tile at a time. The records that do not depend on the state (k_hat, raw k, g, beta)
are written here too. Formulas: README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.inverse import doubling
from harness.kernels.numbers import as_stored, decay, dot, norm, operand, quotient, rest, rounded


@triton.jit
def weights(ring_g, row, valid, past, head, L: tl.constexpr, O: tl.constexpr, AXIS: tl.constexpr = 0):
    """Of a history of `past` records, the j-th in row[j], along AXIS: W, zero behind it, its decay and the log of it.

    AXIS 0: row, valid [BC] of one head; 1: valid [heads, BC], row [1, BC], head [heads, 1]
    """
    G = tl.where(valid, tl.load(ring_g + head * L + row, mask=valid, other=0.0), 0.0)
    if not O.cumulative:
        G = tl.cumsum(G, axis=AXIS)
    # the last of these sums and no other: in another order it differs, and the last record would decay by that
    last = tl.arange(0, valid.shape[AXIS]) == past - 1
    total = tl.sum(tl.where(last if AXIS == 0 else last[None, :], G, 0.0), axis=AXIS)
    left = (total if AXIS == 0 else total[:, None]) - G
    return tl.where(valid, decay(left, O.exp), 0.0), decay(total, O.exp), total


@triton.jit
def past_rows(base, past, L: tl.constexpr, BC: tl.constexpr):
    """Ring rows of a history of `past` records from base on, [BC], and which of them it has.

    Behind it stands its last row again, as rows there may hold anything and are not read.
    """
    record = tl.arange(0, BC)
    return (base + tl.minimum(record, tl.maximum(past - 1, 0))) & (L - 1), record < past


@triton.jit
def past_keys(ring_k, k_lo, row, valid, key_head, keys, K: tl.constexpr, L: tl.constexpr, LOW: tl.constexpr):
    """k_hat [BC, BK] of a history whose j-th record lies in row[j], zero behind it; keys [BK] the columns."""
    at, inside = (key_head * L + row)[:, None] * K, valid[:, None] & (keys < K)[None, :]
    k_hat = tl.load(ring_k + at + keys[None, :], mask=inside, other=0.0).to(tl.float32)
    if LOW:
        k_hat += tl.load(k_lo + at + keys[None, :], mask=inside, other=0.0).to(tl.float32)
    return k_hat


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
    q, k, g, beta, ring_k, k_lo, ring_g, raw_k, raw_beta, W_out, total_out, A_out, F_out, eG_out, eps, scale,
    b, slot, past, base, first, n, h, m, H, HV, written,
    K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    O: tl.constexpr, LOW: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    """Returns kq [2 BS, BK], lanes of k_hat and q_hat in turn, and the history's k_hat [BC, BK], LOW parts included.

    q, k [B, H, m, K]; g, beta [B, HV, m] fp32; the window of batch row b, n > 0 tokens, and key head h, on a history of
    `past` records from base on; rings [slots, heads, L, width], new records from `first` on, if `written`; ANEW: as the
    history is folded first, cumulative gates begin with them. W_out [B, HV, BC]; total_out [B, HV]; A_out (T, or A for
    a right-hand-side solve), F_out [B, HV, BS, BS], as products read them; eG_out [B, HV, BS]; fp32
    """
    keys, lane, record = tl.arange(0, BK), tl.arange(0, BS), tl.arange(0, BC)
    live = lane < n
    # dead lanes read a live one and are zeroed: a masked operand can leave stale shared memory behind
    at = tl.minimum(lane, n - 1)
    # k_hat and q_hat in turn, so that one product serves both
    both = tl.arange(0, 2 * BS)
    asks, there = both % 2, ((b * H + h) * m + tl.minimum(both // 2, n - 1))[:, None] * K + keys[None, :]
    raw = tl.load(tl.where(asks == 0, k, q)[:, None] + there, mask=(keys < K)[None, :], other=0.0)
    row, valid = past_rows(base, past, L, BC)
    key_head = slot * H + h
    hist = past_keys(ring_k, k_lo, row, valid, key_head, keys, K, L, LOW)
    # all value heads that read this key head at once
    of, G = tl.arange(0, BG), HV // H
    hv, real = h * G + tl.minimum(of, G - 1), of < G
    mine, head = (b * HV + hv)[:, None], (slot * HV + hv)[:, None]
    step_g, step_beta = tl.load(g + mine * m + at[None, :]), rounded(tl.load(beta + mine * m + at[None, :]), O.beta)
    W, total, log_total = weights(ring_g, row[None, :], valid[None, :] & real[:, None], past, head, L, O, 1)
    tl.store(W_out + mine * BC + record[None, :], W, mask=real[:, None])
    tl.store(total_out + b * HV + hv, total, mask=real)

    kq = raw.to(tl.float32)
    size = norm(tl.sum(kq * kq, axis=1), eps, O.outside)
    kq = (
        quotient(kq, size[:, None], O.interpreted)
        * tl.where(both // 2 < n, tl.where(asks == 0, 1.0, scale), 0.0)[:, None]
    )
    kq = rounded(kq, O.key)
    on_keys, on_queries = on_keys_of(dot(kq, tl.trans(kq), O.gram, O.interpreted), BS)
    r, c = lane[None, :, None], lane[None, None, :]
    decays = tl.cumsum(tl.where(live[None, :], step_g, 0.0), axis=1)
    gain = tl.where(live[None, :], step_beta, 0.0)
    E = decay(tl.where(r >= c, decays[:, :, None] - decays[:, None, :], float("-inf")), O.exp)
    if O.after:
        # the error of a token is taken off the state before that token's own decay
        early = tl.load(g + mine * m + tl.maximum(at - 1, 0)[None, :])
        early = tl.cumsum(tl.where((live & (lane > 0))[None, :], early, 0.0), axis=1)
        of_A = decay(tl.where(r > c, early[:, :, None] - decays[:, None, :], float("-inf")), O.exp)
    else:
        of_A = E
    A = rounded(tl.where(r > c, gain[:, :, None] * of_A * on_keys[None, :, :], 0.0), O.scores)
    if O.inverse == "substitution":
        T = tl.where(r == c, 1.0, 0.0) - tl.where(r == 1, A, 0.0)
        for t in tl.static_range(2, BS):
            row_A = tl.sum(tl.where(r == t, A, 0.0), axis=1)
            T = T - tl.where(r == t, tl.sum(row_A[:, :, None] * T, axis=1)[:, None, :], 0.0)
        A = operand(T, O.solve, True)
    elif O.inverse == "doubling":
        A = operand(doubling(A, BS, O.series), O.solve, True)
    square = ((b * HV + hv)[:, None, None] * BS + r) * BS + c
    tl.store(A_out + square, A, mask=real[:, None, None])
    F = operand(rounded(E * on_queries[None, :, :], O.scores), O.output, True)
    tl.store(F_out + square, F, mask=real[:, None, None])
    tl.store(eG_out + mine * BS + lane[None, :], decay(decays, O.exp), mask=real[:, None])

    if written:
        new = head * L + ((first + lane) & (L - 1))[None, :]
        put = live[None, :] & real[:, None]
        if O.cumulative:
            step_g = decays if ANEW else decays + log_total[:, None]
        tl.store(ring_g + new, step_g, mask=put)
        if O.raw:
            tl.store(raw_beta + new, step_beta, mask=put)
        # of the rows of kq those that are keys
        held = ((asks == 0) & (both // 2 < n))[:, None] & (keys < K)[None, :]
        to = (key_head * L + ((first + both // 2) & (L - 1)))[:, None] * K + keys[None, :]
        high = as_stored(kq, ring_k)
        tl.store(ring_k + to, high, mask=held)
        if O.low_k:
            tl.store(k_lo + to, as_stored(rest(kq, high.to(tl.float32)), k_lo), mask=held)
        if O.raw:
            tl.store(raw_k + to, raw, mask=held)
    return kq, hist
