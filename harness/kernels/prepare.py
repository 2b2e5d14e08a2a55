"""What a window's outputs need that no row of the state enters: once per window and head, before the state is read.

Written to scratch that ring_verify reads: k_hat and q_hat, history scores, history weights, A or its inverse, F, e^G.
The records that do not depend on the state (k_hat, raw k, g, beta) are written here too. Formulas: README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import as_stored, decay, dot, quotient, round_bf16
from harness.kernels.route import planned


@triton.jit
def weights(ring_g, row, valid, head, L: tl.constexpr, EXP: tl.constexpr):
    """W [BC], zero behind the history, and the total decay of a history whose j-th record lies in row[j]."""
    g = tl.where(valid, tl.load(ring_g + head * L + row, mask=valid, other=0.0), 0.0)
    total = tl.sum(g, axis=0)
    return tl.where(valid, decay(total - tl.cumsum(g, axis=0), EXP), 0.0), decay(total, EXP)


@triton.jit
def on_keys_of(x, BS: tl.constexpr):
    """Of x [2 BS, 2 BS], lanes of k_hat and q_hat in turn both ways: k_hat k_hat' and q_hat k_hat', [BS, BS] each."""
    of_keys, of_queries = tl.split(tl.permute(tl.reshape(x, (BS, 2, BS, 2)), (0, 2, 3, 1)))
    on_keys, _ = tl.split(of_keys)
    on_queries, _ = tl.split(of_queries)
    return on_keys, on_queries


@triton.jit
def prepare(
    q, k, g, beta, lengths, plan, counts, ring_k, ring_g, raw_k, raw_beta,
    kq_out, scores_out, W_out, total_out, A_out, F_out, eG_out, eps, scale, B, m, H, HV,
    K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr, KEY: tl.constexpr,
    DOT: tl.constexpr, INVERSE: tl.constexpr, RAW: tl.constexpr, INTERPRETED: tl.constexpr, EXP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per (planned row of the batch, key head).

    q, k [B, H, m, K]; g, beta [B, HV, m] fp32; lengths [B], a row of length 0 is skipped; plan, counts as route made
    them; rings [slots, heads, L, width].
    kq_out [B, H, 2 BS, K], lanes of k_hat and q_hat in turn; scores_out [B, H, BC, 2 BS]; W_out [B, HV, BC];
    total_out [B, HV]; A_out (T, or A for a right-hand-side solve), F_out [B, HV, BS, BS]; eG_out [B, HV, BS]; fp32
    """
    i, h = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if i >= tl.load(counts) + tl.load(counts + 1):
        return
    b, slot, past, base, first = planned(plan, B, i)
    n = tl.load(lengths + b)
    if n == 0:
        return
    keys, lane, record = tl.arange(0, BK), tl.arange(0, BS), tl.arange(0, BC)
    live = lane < n
    # dead lanes read a live one and are zeroed: a masked operand can leave stale shared memory behind
    at = tl.minimum(lane, n - 1)
    window, key_head = b * H + h, slot * H + h
    # k_hat and q_hat in turn, so that one product serves both
    both = tl.arange(0, 2 * BS)
    asks, there = both % 2, (window * m + tl.minimum(both // 2, n - 1))[:, None] * K + keys[None, :]
    kq = tl.load(tl.where(asks == 0, k, q)[:, None] + there, mask=(keys < K)[None, :], other=0.0).to(tl.float32)
    valid = record < past
    # rows behind the history may hold anything, so none of them is read
    row = (base + tl.minimum(record, tl.maximum(past - 1, 0))) & (L - 1)
    hist = tl.load(
        ring_k + (key_head * L + row)[:, None] * K + keys[None, :], mask=valid[:, None] & (keys < K)[None, :], other=0.0
    ).to(tl.float32)
    norm = tl.sqrt(tl.sum(kq * kq, axis=1) + eps)
    kq = (
        quotient(kq, norm[:, None], INTERPRETED)
        * tl.where(both // 2 < n, tl.where(asks == 0, 1.0, scale), 0.0)[:, None]
    )
    if KEY == "bf16":
        kq = round_bf16(kq)
    tl.store(kq_out + (window * 2 * BS + both)[:, None] * K + keys[None, :], kq, mask=(keys < K)[None, :])
    turned = tl.trans(kq)
    scores = dot(hist, turned, DOT, INTERPRETED)
    tl.store(scores_out + (window * BC + record)[:, None] * (2 * BS) + both[None, :], scores)
    on_keys, on_queries = on_keys_of(dot(kq, turned, DOT, INTERPRETED), BS)
    r, c = lane[:, None], lane[None, :]
    new = (first + lane) & (L - 1)
    for hv in range(h * (HV // H), (h + 1) * (HV // H)):
        mine, head = b * HV + hv, slot * HV + hv
        step_g, step_beta = tl.load(g + mine * m + at), tl.load(beta + mine * m + at)
        G = tl.cumsum(tl.where(live, step_g, 0.0), axis=0)
        gain = tl.where(live, step_beta, 0.0)
        W, total = weights(ring_g, row, valid, head, L, EXP)
        tl.store(W_out + mine * BC + record, W)
        tl.store(total_out + mine, total)
        E = decay(tl.where(r >= c, G[:, None] - G[None, :], float("-inf")), EXP)
        A = tl.where(r > c, gain[:, None] * E * on_keys, 0.0)
        if INVERSE == "substitution":
            T = tl.where(r == c, 1.0, 0.0) - tl.where(r == 1, A, 0.0)
            for t in tl.static_range(2, BS):
                row_A = tl.sum(tl.where(r == t, A, 0.0), axis=0)
                T = T - tl.where(r == t, tl.sum(row_A[:, None] * T, axis=0)[None, :], 0.0)
            A = T
        square = (mine * BS + r) * BS + c
        tl.store(A_out + square, A)
        tl.store(F_out + square, E * on_queries)
        tl.store(eG_out + mine * BS + lane, decay(G, EXP))
        tl.store(ring_g + head * L + new, step_g, mask=live)
        if RAW:
            tl.store(raw_beta + head * L + new, step_beta, mask=live)

    # records of the rows of kq that are keys
    held = (asks == 0) & (both // 2 < n)
    key_place = (key_head * L + ((first + both // 2) & (L - 1)))[:, None] * K + keys[None, :]
    written = held[:, None] & (keys < K)[None, :]
    tl.store(ring_k + key_place, as_stored(kq, ring_k), mask=written)
    if RAW:
        raw = tl.load(k + there, mask=written, other=0.0)
        tl.store(raw_k + key_place, raw, mask=written)
