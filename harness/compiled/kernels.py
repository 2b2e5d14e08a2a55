"""Verify and fold of one step for every (slot, head), compiled. Formulas: harness.reference.verify and .fold.

Arrays are contiguous fp64 with the shapes of the shared state; `c` holds one row per rounding (compiled.rounding), in
the order of CODES. Sums run in fp64 in any order and are rounded where the accumulator is.
"""

from __future__ import annotations

import math

import numpy as np

from harness.compiled.common import (
    CHECKPOINT,
    DECAY,
    F1,
    F2,
    F3,
    F4,
    FOLD_ACC,
    FOLD_D,
    FOLD_K,
    FOLD_LEFT,
    FOLD_RIGHT,
    HISTORY_ACC,
    HISTORY_D,
    HISTORY_LEFT,
    I1,
    INVERSE,
    OUTPUT,
    OUTPUT_ACC,
    OUTPUT_LEFT,
    RHS,
    SCORE,
    SCORE_ACC,
    SCORE_LEFT,
    SCORE_RIGHT,
    SOLVE_ACC,
    SOLVE_LEFT,
    STATE_ACC,
    D,
    compiled,
    summing,
)
from harness.compiled.rounding import round_block, round_one, round_row


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


@summing(f"{F2}, {F2}, {F2}, boolean", "void")
def times_transposed(x, y, out, add):
    """out = x y' or out += x y', with the few lanes of a window as the contracted axis."""
    for i in range(x.shape[0]):
        for t in range(y.shape[0]):
            total = out[i, t] if add else 0.0
            for j in range(y.shape[1]):
                total += x[i, j] * y[t, j]
            out[i, t] = total


@compiled(f"{F2}, {F2}, boolean, int64, int64, {F1}, {F2}")
def gather(ring, ring_lo, has_lo, base, n, W, out):
    """out[:, j] = W_j d_j over n records of ring [L, V], in logical order; zero behind them."""
    L, V = ring.shape
    for i in range(V):
        for j in range(L):
            out[i, j] = 0.0
    for j in range(n):
        row = (base + j) & (L - 1)
        if has_lo:
            for i in range(V):
                out[i, j] = W[j] * (ring[row, i] + ring_lo[row, i])
        else:
            for i in range(V):
                out[i, j] = W[j] * ring[row, i]


@compiled(
    f"{F4}, {F4}, {F4}, {F4}, {F3}, {F3}, {F3}, {F4}, {F4}, boolean, {F4}, {F4}, {F4}, {F4}, {F3}, "
    f"boolean, boolean, boolean, boolean, {I1}, {I1}, {I1}, {F2}, {F4}, {F4}"
)
def verify_window(C, kq, kq_score, v, beta, eR, eG, X, F, explicit, ring_k, ring_k_lo, ring_d, ring_d_lo, ring_g,
                  low_k, low_d, cumulative, exact, base, w, live, c, o, d):  # fmt: skip
    """o and d [B, HV, V, m] of one window per live slot.

    C [B, HV, V, K] as read; kq, kq_score [B, H, K, 2m] as read; v [B, HV, V, m]; beta, eR, eG [B, HV, m];
    X, F [B, HV, m, m]; ring_* [B, heads, L, width], *_lo with L = 0 where there is none; base, w, live [B]
    """
    B, HV, V, K = C.shape
    H, m2 = kq.shape[1], kq.shape[3]
    m, L, group = m2 // 2, ring_d.shape[2], HV // H
    keys, scores = np.empty((L, K)), np.empty((L, m2))
    W, Wd = np.empty(L), np.empty((V, L))
    hw, R = np.empty((group * V, m2)), np.empty((V, m))
    for b in range(B):
        if live[b] == 0:
            continue
        n = w[b]
        for h in range(H):
            for j in range(n):
                row = (base[b] + j) & (L - 1)
                for k in range(K):
                    keys[j, k] = ring_k[b, h, row, k]
                if low_k:
                    for k in range(K):
                        keys[j, k] += ring_k_lo[b, h, row, k]
            round_block(keys, n, c[SCORE_LEFT])
            if n:
                np.dot(keys[:n], kq_score[b, h], scores[:n])
                round_block(scores, n, c[SCORE_ACC])
                round_block(scores, n, c[SCORE])
                round_block(scores, n, c[SCORE_RIGHT])
            # the value heads of a key head share its product with the checkpoint
            np.dot(C[b, h * group : (h + 1) * group].reshape(group * V, K), kq[b, h], hw)
            round_row(hw.reshape(1, hw.size), 0, c[STATE_ACC])
            for hv in range(h * group, (h + 1) * group):
                mine = hw[(hv - h * group) * V : (hv - h * group + 1) * V]
                if n:
                    total = history_decays(ring_g[b, hv], base[b], n, L, cumulative, exact, c, W)
                    low = ring_d_lo[b if low_d else 0, hv if low_d else 0]
                    gather(ring_d[b, hv], low, low_d, base[b], n, W, Wd)
                    round_block(Wd, V, c[HISTORY_D])
                    round_block(Wd, V, c[HISTORY_LEFT])
                    for i in range(V):
                        for t in range(m2):
                            mine[i, t] *= total
                    round_row(mine.reshape(1, V * m2), 0, c[HISTORY_ACC])
                    for i in range(V):
                        for j in range(n):
                            for t in range(m2):
                                mine[i, t] += Wd[i, j] * scores[j, t]
                    round_row(mine.reshape(1, V * m2), 0, c[HISTORY_ACC])
                for i in range(V):
                    for t in range(m):
                        R[i, t] = (v[b, hv, i, t] - eR[b, hv, t] * mine[i, t]) * beta[b, hv, t]
                flat = R.reshape(1, V * m)
                round_row(flat, 0, c[RHS])
                out = d[b, hv]
                if explicit:
                    round_row(flat, 0, c[SOLVE_LEFT])
                    times_transposed(R, X[b, hv], out, False)
                    round_row(out.reshape(1, V * m), 0, c[SOLVE_ACC])
                else:
                    for i in range(V):
                        for t in range(m):
                            out[i, t] = R[i, t]
                            for j in range(t):
                                out[i, t] = round_one(out[i, t] - X[b, hv, t, j] * out[i, j], c[INVERSE])
                round_row(out.reshape(1, V * m), 0, c[D])
                for i in range(V):
                    for t in range(m):
                        R[i, t] = out[i, t]
                round_row(flat, 0, c[OUTPUT_LEFT])
                out = o[b, hv]
                for i in range(V):
                    for t in range(m):
                        out[i, t] = eG[b, hv, t] * mine[i, m + t]
                whole = out.reshape(1, V * m)
                round_row(whole, 0, c[OUTPUT_ACC])
                times_transposed(R, F[b, hv], out, True)
                round_row(whole, 0, c[OUTPUT_ACC])
                round_row(whole, 0, c[OUTPUT])


@compiled(
    f"{F4}, {F4}, {F4}, {F4}, {F4}, {F3}, boolean, boolean, boolean, boolean, {I1}, {I1}, {I1}, {F2}, boolean, {F4}"
)
def fold_product(C, ring_k, ring_k_lo, ring_d, ring_d_lo, ring_g, low_k, low_d, cumulative, exact, slots, base, w, c,
                 kept, out):  # fmt: skip
    """out [n, HV, V, K]: the state of C and the first w[i] records of slots[i].

    kept: as the fold forms and stores it; otherwise as a verify reads it, C being the operand then.
    """
    n, HV, V, K = out.shape
    H, L = ring_k.shape[1], ring_k.shape[2]
    group = HV // H
    first_d, second_d = (FOLD_D, FOLD_LEFT) if kept else (HISTORY_D, HISTORY_LEFT)
    keys, W, Wd, writes = np.empty((L, K)), np.empty(L), np.empty((V, L)), np.empty((V, K))
    for s in range(n):
        b, count = slots[s], w[s]
        for h in range(H):
            # rows behind the history are zero, in d and here: they add nothing
            for j in range(L):
                row = (base[s] + j) & (L - 1)
                for k in range(K):
                    keys[j, k] = ring_k[b, h, row, k] if j < count else 0.0
                if low_k and j < count:
                    for k in range(K):
                        keys[j, k] += ring_k_lo[b, h, row, k]
            if kept:
                round_block(keys, count, c[FOLD_K])
                round_block(keys, count, c[FOLD_RIGHT])
            else:
                round_block(keys, count, c[SCORE_LEFT])
            for hv in range(h * group, (h + 1) * group):
                into = out[s, hv]
                for i in range(V):
                    for k in range(K):
                        into[i, k] = C[b, hv, i, k]
                if count == 0:
                    continue
                total = history_decays(ring_g[b, hv], base[s], count, L, cumulative, exact, c, W)
                low = ring_d_lo[b if low_d else 0, hv if low_d else 0]
                gather(ring_d[b, hv], low, low_d, base[s], count, W, Wd)
                round_block(Wd, V, c[first_d])
                round_block(Wd, V, c[second_d])
                np.dot(Wd, keys, writes)
                whole = into.reshape(1, V * K)
                for i in range(V):
                    for k in range(K):
                        into[i, k] *= total
                if kept:
                    round_row(whole, 0, c[FOLD_ACC])
                for i in range(V):
                    for k in range(K):
                        into[i, k] += writes[i, k]
                if kept:
                    round_row(whole, 0, c[FOLD_ACC])
                    round_row(whole, 0, c[CHECKPOINT])
