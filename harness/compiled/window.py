"""One chunked window of one key head and the records it leaves, compiled. Formulas: harness.reference.verify.

Lanes lead: v, d and o are [m, V], so that a lane is a row and every sum over lanes adds rows.
"""

from __future__ import annotations

import numpy as np

from harness.compiled.common import (
    CUMULATE,
    CUMULATIVE,
    EXPLICIT,
    F1,
    F2,
    F3,
    HISTORY_ACC,
    I1,
    INVERSE,
    LOW_D,
    LOW_K,
    OUTPUT,
    OUTPUT_ACC,
    OUTPUT_LEFT,
    READ_LOW,
    RHS,
    SCORE,
    SCORE_ACC,
    SCORE_KEY,
    SCORE_LEFT,
    SCORE_RIGHT,
    SOLVE_ACC,
    SOLVE_LEFT,
    STATE_ACC,
    STATE_LEFT,
    STATE_OPERAND,
    STATE_RIGHT,
    STORE_D,
    STORE_G,
    STORE_K_HAT,
    TWO_PARTS,
    D,
    compiled,
)
from harness.compiled.fold import decayed_writes, gather
from harness.compiled.rounding import EXACT, KIND, copy_rounded, round_one, round_rows


@compiled(f"{F2}, {I1}, {F2}, {F2}")
def read_checkpoint(C, flags, c, out):
    """out [rows, K]: C as products read it."""
    rows, K = C.shape
    copy_rounded(C, out, c[STATE_OPERAND])
    if flags[TWO_PARTS]:
        high = out.copy()
        round_rows(high, 0, rows, c[STATE_LEFT])
        for i in range(rows):
            for k in range(K):
                out[i, k] -= high[i, k]
        round_rows(out, 0, rows, c[STATE_LEFT])
        for i in range(rows):
            for k in range(K):
                out[i, k] += high[i, k]
    else:
        round_rows(out, 0, rows, c[STATE_LEFT])


@compiled(f"{F2}, {F1}, {F2}", F2)
def read_keys(kq, c, out):
    """kq as a product reads it: itself where that rounds nothing, else in out."""
    if c[KIND] == EXACT:
        return kq
    copy_rounded(kq, out, c)
    return out


@compiled(f"{F2}, {F2}, {F2}")
def add_products(x, y, out):
    """out[t] += sum_j x[t, j] y[j], with the few lanes of a window as the contracted axis."""
    for t in range(x.shape[0]):
        for j in range(x.shape[1]):
            for i in range(y.shape[1]):
                out[t, i] += x[t, j] * y[j, i]


@compiled(
    f"{F2}, {F2}, {F3}, {F2}, {F2}, {F2}, {F3}, {F3}, {F2}, {F2}, {F3}, {F3}, {F3}, int64, int64, {I1}, {F2}, "
    f"{F2}, {F2}, {F2}, {F1}, {F2}, {F2}, {F2}, {F2}, {F3}, {F3}"
)
def window_head(C, kq, v, beta, eR, eG, X, F, ring_k, low_k, ring_d, low_d, g, base, n, flags, c,
                read, keys, scores, W, Wd, hw, mine, R, o, d):  # fmt: skip
    """o and d [r, m, V] of one window, for the r value heads of one key head, on C and a history of n records.

    C [r*V, K] as read; kq [2m, K] k_hat then q_hat, rounded as keys; v [r, m, V]; beta, eR, eG [r, m]; X, F [r, m, m]
    as read; ring_k [L, K], ring_d [r, L, V], g [r, L, 1]; the rest is scratch
    """
    group, m, V = v.shape
    # value heads of a key head share its product with the checkpoint
    np.dot(read_keys(kq, c[STATE_RIGHT], read), C.T, hw)
    round_rows(hw, 0, 2 * m, c[STATE_ACC])
    if n:
        gather(ring_k, low_k, flags[READ_LOW] != 0 and flags[LOW_K] != 0, base, n, keys)
        round_rows(keys, 0, n, c[SCORE_LEFT])
        np.dot(keys[:n], read_keys(kq, c[SCORE_KEY], read).T, scores[:n])
        round_rows(scores, 0, n, c[SCORE_ACC])
        round_rows(scores, 0, n, c[SCORE])
        round_rows(scores, 0, n, c[SCORE_RIGHT])
    for r in range(group):
        total = 1.0
        if n:
            two = flags[READ_LOW] != 0 and flags[LOW_D] != 0
            total = decayed_writes(ring_d[r], low_d[r], two, g[r], base, n, flags, c, False, W, Wd)
        for t in range(2 * m):
            for i in range(V):
                mine[t, i] = hw[t, r * V + i] * total
        if n:
            round_rows(mine, 0, 2 * m, c[HISTORY_ACC])
            for t in range(2 * m):
                for j in range(n):
                    for i in range(V):
                        mine[t, i] += scores[j, t] * Wd[j, i]
            round_rows(mine, 0, 2 * m, c[HISTORY_ACC])
        for t in range(m):
            for i in range(V):
                R[t, i] = (v[r, t, i] - eR[r, t] * mine[t, i]) * beta[r, t]
        round_rows(R, 0, m, c[RHS])
        out = d[r]
        if flags[EXPLICIT]:
            round_rows(R, 0, m, c[SOLVE_LEFT])
            for t in range(m):
                for i in range(V):
                    out[t, i] = 0.0
            add_products(X[r], R, out)
            round_rows(out, 0, m, c[SOLVE_ACC])
        else:
            for t in range(m):
                for i in range(V):
                    out[t, i] = R[t, i]
                for j in range(t):
                    for i in range(V):
                        out[t, i] -= X[r, t, j] * out[j, i]
                    round_rows(out, t, t + 1, c[INVERSE])
        round_rows(out, 0, m, c[D])
        for t in range(m):
            for i in range(V):
                R[t, i] = out[t, i]
        round_rows(R, 0, m, c[OUTPUT_LEFT])
        out = o[r]
        for t in range(m):
            for i in range(V):
                out[t, i] = eG[r, t] * mine[m + t, i]
        round_rows(out, 0, m, c[OUTPUT_ACC])
        add_products(F[r], R, out)
        round_rows(out, 0, m, c[OUTPUT_ACC])
        round_rows(out, 0, m, c[OUTPUT])


@compiled(f"{F2}, int64, int64, {F2}, {F2}, {F1}")
def write_parts(x, n, first, ring, low, c):
    """n rows of x from row `first` of a ring on, of a field of one part or two: rounded, and what that leaves over."""
    mask, width = ring.shape[0] - 1, ring.shape[1]
    for t in range(n):
        row = (first + t) & mask
        for i in range(width):
            ring[row, i] = x[t, i]
        if c[KIND] != EXACT:
            round_rows(ring, row, row + 1, c)
        if low.shape[0]:
            for i in range(width):
                low[row, i] = x[t, i] - ring[row, i]
            round_rows(low, row, row + 1, c)


@compiled(f"{F2}, {F3}, {F2}, int64, int64, int64, int64, {I1}, {F2}, {F2}, {F2}, {F3}, {F3}, {F3}")
def write_head(kq, d, g, live, base, end, n, flags, c, ring_k, low_k, ring_d, low_d, ring_g):
    """k_hat, d and g of `live` lanes of a window behind a history that ends at base + end, n of it read.

    d [r, m, V]; g [r, m] as the ring keeps it, or as it enters where the record is cumulative
    """
    L = ring_k.shape[0]
    write_parts(kq, live, base + end, ring_k, low_k, c[STORE_K_HAT])
    for r in range(d.shape[0]):
        write_parts(d[r], live, base + end, ring_d[r], low_d[r], c[STORE_D])
        total = ring_g[r, (base + n - 1) & (L - 1), 0] if n else 0.0
        for t in range(live):
            row = (base + end + t) & (L - 1)
            total += g[r, t]
            ring_g[r, row, 0] = round_one(round_one(total, c[CUMULATIVE]), c[STORE_G]) if flags[CUMULATE] else g[r, t]
