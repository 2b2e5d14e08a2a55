"""Verify and fold of one step for every (slot, head), compiled. Formulas: harness.reference.verify and .fold.

Arrays are contiguous fp64 with the shapes of the shared state; `c` holds one row per rounding (compiled.rounding), in
the order of CODES. Sums run in fp64 in any order and are rounded where the accumulator is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from harness.compiled.rounding import round_one, round_row

CODES = (
    "decay score_left score_acc score score_right history_d history_left history_acc state_acc rhs solve_left solve_acc"
    " inverse d output_left output_acc output store_d store_g fold_d fold_left fold_k fold_right fold_acc checkpoint"
    " step recurrent_left recurrent_acc"
).split()
(DECAY, SCORE_LEFT, SCORE_ACC, SCORE, SCORE_RIGHT, HISTORY_D, HISTORY_LEFT, HISTORY_ACC, STATE_ACC, RHS, SOLVE_LEFT,
 SOLVE_ACC, INVERSE, D, OUTPUT_LEFT, OUTPUT_ACC, OUTPUT, STORE_D, STORE_G, FOLD_D, FOLD_LEFT, FOLD_K, FOLD_RIGHT,
 FOLD_ACC, CHECKPOINT, STEP, RECURRENT_LEFT, RECURRENT_ACC) = range(len(CODES))  # fmt: skip

F1, F2, F3, F4, I1 = (*(f"float64[{':, ' * i}::1]" for i in range(4)), "int64[::1]")


def compiled(arguments: str, result: str = "void") -> Any:
    """Compile at import, or load what an earlier import compiled: one signature, so a wrong type is an error."""
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True)


def summing(arguments: str, result: str) -> Any:
    """The same, with sums that may be reordered and fused. Roundings live in functions of their own."""
    flags = {"reassoc", "contract", "nsz"}
    return njit(f"{result}({arguments})", cache=True, error_model="numpy", nogil=True, fastmath=flags)


@summing(f"{F1}, {F1}, int64", "float64")
def dot(x, y, n):
    total = 0.0
    for i in range(n):
        total += x[i] * y[i]
    return total


@summing(f"{F1}, {F1}, int64, int64, int64", "float64")
def dot_strided(x, y, first, step, n):
    total = 0.0
    for i in range(first, n, step):
        total += x[i] * y[i]
    return total


@compiled(f"{F1}, {F1}, int64, int64, boolean, {F1}", "float64")
def blocked_dot(x, y, n, block, strided, acc):
    """x . y accumulated as Dot does: all at once, or block by block."""
    if block == 0 or block >= n:
        return round_one(dot(x, y, n), acc)
    blocks = -(-n // block)
    total = 0.0
    for b in range(blocks):
        if strided:
            part = dot_strided(x, y, b, blocks, n)
        else:
            part = dot(x[b * block : min((b + 1) * block, n)], y[b * block :], min(block, n - b * block))
        part = round_one(part, acc)
        total = part if b == 0 else round_one(total + part, acc)
    return total


@compiled(f"{F1}, int64, int64, int64, boolean, boolean, {F2}, {F1}", "float64")
def history_decays(g, base, w, L, cumulative, exact, c, W):
    """W[:w] and the total decay of a history whose g record is g [L]."""
    mask = L - 1
    if w == 0:
        return 1.0
    if cumulative:
        last = g[(base + w - 1) & mask]
        for j in range(w):
            W[j] = round_one(math.exp(round_one(last - g[(base + j) & mask], c[DECAY])), c[DECAY])
        return round_one(math.exp(last), c[DECAY])
    if exact:
        after = 0.0
        for j in range(w - 1, -1, -1):
            W[j] = math.exp(after)
            after += g[(base + j) & mask]
        return math.exp(after)
    total = 0.0
    for j in range(w):
        total += g[(base + j) & mask]
        W[j] = round_one(total, c[DECAY])
    last = W[w - 1]
    for j in range(w):
        W[j] = round_one(math.exp(round_one(last - W[j], c[DECAY])), c[DECAY])
    return round_one(math.exp(last), c[DECAY])


@compiled(
    f"{F4}, {F4}, {F4}, {F4}, {F3}, {F3}, {F4}, {F4}, boolean, {F4}, {F4}, {F4}, {F4}, {F3}, "
    f"boolean, boolean, boolean, {I1}, {I1}, {I1}, {F2}, {F4}, {F4}"
)
def verify_window(C, kq, kq_score, v, beta, eG, X, F, explicit, ring_k, ring_k_lo, ring_d, ring_d_lo, ring_g,
                  read_lo, cumulative, exact, base, w, live, c, o, d):  # fmt: skip
    """o and d [B, HV, V, m] of one window per live slot.

    C [B, HV, V, K] as read; kq, kq_score [B, H, 2m, K] as read; v [B, HV, V, m]; beta, eG [B, HV, m];
    X, F [B, HV, m, m]; ring_* [B, heads, L, width], *_lo with L = 0 where there is none; base, w, live [B]
    """
    B, HV, V, K = C.shape
    H, m2 = kq.shape[1], kq.shape[2]
    m, L, group = m2 // 2, ring_d.shape[2], HV // H
    keys, scores = np.empty(K), np.empty((L, m2))
    W, Wd = np.empty(L), np.empty((L, V))
    hw, R, Dl = np.empty((V, m2)), np.empty(m), np.empty(m)
    for b in range(B):
        if live[b] == 0:
            continue
        for h in range(H):
            for j in range(w[b]):
                row = (base[b] + j) & (L - 1)
                for k in range(K):
                    keys[k] = ring_k[b, h, row, k]
                if read_lo:
                    for k in range(K):
                        keys[k] += ring_k_lo[b, h, row, k]
                round_row(keys, K, c[SCORE_LEFT])
                for i in range(m2):
                    scores[j, i] = dot(keys, kq_score[b, h, i], K)
                round_row(scores[j], m2, c[SCORE_ACC])
                round_row(scores[j], m2, c[SCORE])
                round_row(scores[j], m2, c[SCORE_RIGHT])
            for hv in range(h * group, (h + 1) * group):
                for i in range(V):
                    for j in range(m2):
                        hw[i, j] = dot(C[b, hv, i], kq[b, h, j], K)
                    round_row(hw[i], m2, c[STATE_ACC])
                if w[b]:
                    total = history_decays(ring_g[b, hv], base[b], w[b], L, cumulative, exact, c, W)
                    for j in range(w[b]):
                        row = (base[b] + j) & (L - 1)
                        for i in range(V):
                            Wd[j, i] = ring_d[b, hv, row, i]
                        if read_lo:
                            for i in range(V):
                                Wd[j, i] += ring_d_lo[b, hv, row, i]
                        for i in range(V):
                            Wd[j, i] *= W[j]
                        round_row(Wd[j], V, c[HISTORY_D])
                        round_row(Wd[j], V, c[HISTORY_LEFT])
                    for i in range(V):
                        for t in range(m2):
                            hw[i, t] *= total
                        round_row(hw[i], m2, c[HISTORY_ACC])
                        for j in range(w[b]):
                            for t in range(m2):
                                hw[i, t] += Wd[j, i] * scores[j, t]
                        round_row(hw[i], m2, c[HISTORY_ACC])
                for i in range(V):
                    for t in range(m):
                        R[t] = (v[b, hv, i, t] - eG[b, hv, t] * hw[i, t]) * beta[b, hv, t]
                    round_row(R, m, c[RHS])
                    out = d[b, hv, i]
                    if explicit:
                        round_row(R, m, c[SOLVE_LEFT])
                        for t in range(m):
                            out[t] = dot(R, X[b, hv, t], m)
                        round_row(out, m, c[SOLVE_ACC])
                    else:
                        for t in range(m):
                            out[t] = R[t]
                            for j in range(t):
                                out[t] = round_one(out[t] - X[b, hv, t, j] * out[j], c[INVERSE])
                    round_row(out, m, c[D])
                    for t in range(m):
                        Dl[t] = out[t]
                    round_row(Dl, m, c[OUTPUT_LEFT])
                    out = o[b, hv, i]
                    for t in range(m):
                        out[t] = eG[b, hv, t] * hw[i, m + t]
                    round_row(out, m, c[OUTPUT_ACC])
                    for t in range(m):
                        out[t] += dot(Dl, F[b, hv, t], m)
                    round_row(out, m, c[OUTPUT_ACC])
                    round_row(out, m, c[OUTPUT])


@compiled(f"{F4}, {F4}, {F4}, {F4}, {F4}, {F3}, boolean, boolean, boolean, {I1}, {I1}, {I1}, {F2}, boolean, {F4}")
def fold_product(C, ring_k, ring_k_lo, ring_d, ring_d_lo, ring_g, has_lo, cumulative, exact, slots, base, w, c,
                 kept, out):  # fmt: skip
    """out [n, HV, V, K]: the state of C and the first w[i] records of slots[i].

    kept: as the fold forms and stores it; otherwise as a verify reads it, C being the operand then.
    """
    n, HV, V, K = out.shape
    H, L = ring_k.shape[1], ring_k.shape[2]
    group = HV // H
    first_d, second_d = (FOLD_D, FOLD_LEFT) if kept else (HISTORY_D, HISTORY_LEFT)
    keys, W, Wd = np.empty((L, K)), np.empty(L), np.empty((L, V))
    for s in range(n):
        b = slots[s]
        for h in range(H):
            for j in range(w[s]):
                row = (base[s] + j) & (L - 1)
                for k in range(K):
                    keys[j, k] = ring_k[b, h, row, k]
                if has_lo:
                    for k in range(K):
                        keys[j, k] += ring_k_lo[b, h, row, k]
                if kept:
                    round_row(keys[j], K, c[FOLD_K])
                    round_row(keys[j], K, c[FOLD_RIGHT])
                else:
                    round_row(keys[j], K, c[SCORE_LEFT])
            for hv in range(h * group, (h + 1) * group):
                total = history_decays(ring_g[b, hv], base[s], w[s], L, cumulative, exact, c, W)
                for j in range(w[s]):
                    row = (base[s] + j) & (L - 1)
                    for i in range(V):
                        Wd[j, i] = ring_d[b, hv, row, i]
                    if has_lo:
                        for i in range(V):
                            Wd[j, i] += ring_d_lo[b, hv, row, i]
                    for i in range(V):
                        Wd[j, i] *= W[j]
                    round_row(Wd[j], V, c[first_d])
                    round_row(Wd[j], V, c[second_d])
                for i in range(V):
                    row_out, row_in = out[s, hv, i], C[b, hv, i]
                    if w[s] == 0:
                        for k in range(K):
                            row_out[k] = row_in[k]
                        continue
                    for k in range(K):
                        row_out[k] = total * row_in[k]
                    if kept:
                        round_row(row_out, K, c[FOLD_ACC])
                    for j in range(w[s]):
                        x = Wd[j, i]
                        for k in range(K):
                            row_out[k] += x * keys[j, k]
                    if kept:
                        round_row(row_out, K, c[FOLD_ACC])
                        round_row(row_out, K, c[CHECKPOINT])


@compiled(f"{F4}, {F4}, {F4}, {F4}, {F3}, {F3}, {I1}, int64, boolean, {F2}, {F4}, {F4}, {F4}")
def token_pass(S, k, q, v, gain, eg, lengths, block, strided, c, out, o, d):
    """out [n, HV, V, K]: S after lengths[s] tokens of slot s; o and d [n, HV, V, m] of those tokens.

    k, q [n, H, m, K] as the product reads them, q empty in a replay; v [n, HV, m, V] and gain, eg [n, HV, m] as
    window.token_steps prepares them. Rows of S are independent: each passes all its tokens in cache.
    """
    n, HV, V, K = S.shape
    H = k.shape[1]
    group, asked = HV // H, q.shape[2] > 0
    read = np.empty(K)
    reads = c[RECURRENT_LEFT, 0] != 0
    for s in range(n):
        for hv in range(HV):
            h = hv // group
            for i in range(V):
                row = out[s, hv, i]
                for t in range(K):
                    row[t] = S[s, hv, i, t]
                for t in range(lengths[s]):
                    operand = row
                    if reads:
                        for j in range(K):
                            read[j] = row[j]
                        round_row(read, K, c[RECURRENT_LEFT])
                        operand = read
                    predicted = blocked_dot(operand, k[s, h, t], K, block, strided, c[RECURRENT_ACC])
                    x = round_one(v[s, hv, t, i] - gain[s, hv, t] * predicted, c[D])
                    decay = eg[s, hv, t]
                    for j in range(K):
                        row[j] = decay * row[j] + x * k[s, h, t, j]
                    round_row(row, K, c[STEP])
                    d[s, hv, i, t] = x
                    if asked:
                        operand = row
                        if reads:
                            for j in range(K):
                                read[j] = row[j]
                            round_row(read, K, c[RECURRENT_LEFT])
                            operand = read
                        y = blocked_dot(operand, q[s, h, t], K, block, strided, c[RECURRENT_ACC])
                        o[s, hv, i, t] = round_one(y, c[OUTPUT])


@summing(f"{F1}, {F1}, int64", "UniTuple(float64, 4)")
def _row(x, y, n):
    error, size, worst, largest = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        e = abs(x[i] - y[i])
        error += e * e
        size += y[i] * y[i]
        worst = max(worst, e)
        largest = max(largest, abs(y[i]))
    return error, size, worst, largest


@compiled(f"{F4}, {F4}, {F3}")
def distance(X, S, out):
    """out [n, HV, 2]: ||X - S||_F / ||S||_F and max|X - S| / max|S| per head of X, S [n, HV, V, K].

    Absolute where S is 0.
    """
    n, HV, V, K = S.shape
    for s in range(n):
        for h in range(HV):
            error, size, worst, largest = 0.0, 0.0, 0.0, 0.0
            for i in range(V):
                e, z, a, b = _row(X[s, h, i], S[s, h, i], K)
                error += e
                size += z
                # a comparison with NaN is false: written so that NaN stays
                worst = a if not (a <= worst) else worst
                largest = b if not (b <= largest) else largest
                if math.isnan(e):
                    worst = np.nan
            out[s, h, 0] = math.sqrt(error) / (math.sqrt(size) if size > 0 else 1.0)
            out[s, h, 1] = worst / (largest if largest > 0 else 1.0)


@compiled(f"{F4}, {F4}, {I1}, {I1}")
def write_rows(ring, values, first, live):
    """Lane t < live[b] of values [B, heads, m, width] to row first[b] + t of ring [B, heads, L, width]."""
    B, heads, L, width = ring.shape
    for b in range(B):
        for h in range(heads):
            for t in range(live[b]):
                row = (first[b] + t) & (L - 1)
                for i in range(width):
                    ring[b, h, row, i] = values[b, h, t, i]


@compiled(f"{F4}, {F4}, {F4}, {I1}, {I1}, {F2}")
def write_d(ring, ring_lo, d, first, live, c):
    """The writes d [B, HV, V, m] as the ring stores them, in one part or in two."""
    B, HV, L, V = ring.shape
    two = ring_lo.shape[2] > 0
    for b in range(B):
        for h in range(HV):
            for t in range(live[b]):
                row = (first[b] + t) & (L - 1)
                for i in range(V):
                    x = d[b, h, i, t]
                    high = round_one(x, c[STORE_D])
                    ring[b, h, row, i] = high
                    if two:
                        ring_lo[b, h, row, i] = round_one(x - high, c[STORE_D])


@compiled(f"{F2}, {F1}, {F1}")
def round_all(x, first, second):
    """Two roundings of every row of x [rows, n], in place."""
    for i in range(x.shape[0]):
        round_row(x[i], x.shape[1], first)
        round_row(x[i], x.shape[1], second)
