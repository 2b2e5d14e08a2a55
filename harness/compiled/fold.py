"""The history of one key head and its product fold, compiled. Formulas: harness.reference.fold.

A ring is (k_hat, its low part, d, its low part, g, v, k, beta), each [B, heads, L, width] with L = 0 where the design
does not keep the field, then the keys and e^g that a replay makes of the raw records. Sums run in fp64 in any order
and are rounded where the accumulator is.
"""

from __future__ import annotations

import math

import numpy as np

from harness.compiled.common import (
    CHECKPOINT,
    CUMULATE,
    DECAY,
    EXACT_DECAYS,
    EXP,
    F1,
    F2,
    F3,
    FOLD_ACC,
    FOLD_D,
    FOLD_K,
    FOLD_LEFT,
    FOLD_RIGHT,
    HISTORY_D,
    HISTORY_LEFT,
    I1,
    IN_TURN,
    LOW_D,
    LOW_K,
    READ_LOW,
    SCORE_LEFT,
    compiled,
)
from harness.compiled.exponential import exp_one
from harness.compiled.rounding import EXACT, FP32, round_one, round_rows

FEW = 4  # rows of a state that pass all roundings of a fold while they are in cache


@compiled(f"{F2}, int64, int64, {I1}, {F2}, {F1}", "float64")
def history_decays(g, base, n, flags, c, W):
    """W[:n] and the total decay of a history of n records whose g is g [L, 1]."""
    mask = g.shape[0] - 1
    if n == 0:
        return 1.0
    if flags[CUMULATE]:
        last = g[(base + n - 1) & mask, 0]
        for j in range(n):
            W[j] = exp_one(round_one(last - g[(base + j) & mask, 0], c[DECAY]), c[EXP])
        return exp_one(last, c[EXP])
    if flags[EXACT_DECAYS]:
        after = 0.0
        for j in range(n - 1, -1, -1):
            W[j] = math.exp(after)
            after += g[(base + j) & mask, 0]
        return math.exp(after)
    total = 0.0
    for j in range(n):
        total += g[(base + j) & mask, 0]
        W[j] = round_one(total, c[DECAY])
    last = W[n - 1]
    for j in range(n):
        W[j] = exp_one(round_one(last - W[j], c[DECAY]), c[EXP])
    return exp_one(last, c[EXP])


@compiled(f"{F2}, {F2}, boolean, int64, int64, {F2}")
def gather(ring, low, two, base, n, out):
    """out[j] = record j of a history of n, of ring [L, width]; two: with its low part."""
    mask, width = ring.shape[0] - 1, ring.shape[1]
    for j in range(n):
        row = (base + j) & mask
        for i in range(width):
            out[j, i] = ring[row, i]
        if two:
            for i in range(width):
                out[j, i] += low[row, i]


@compiled(f"{F2}, {F2}, boolean, {F2}, int64, int64, {I1}, {F2}, boolean, {F1}, {F2}", "float64")
def decayed_writes(ring, low, two, g, base, n, flags, c, folding, W, out):
    """out[j] = W_j d_j of a history of n, as a fold or a verify reads it; returns the total decay."""
    total = history_decays(g, base, n, flags, c, W)
    gather(ring, low, two, base, n, out)
    for j in range(n):
        for i in range(out.shape[1]):
            out[j, i] *= W[j]
    round_rows(out, 0, n, c[FOLD_D] if folding else c[HISTORY_D])
    round_rows(out, 0, n, c[FOLD_LEFT] if folding else c[HISTORY_LEFT])
    return total


@compiled(f"{F2}, int64, float64, {F2}, {F2}, boolean, {F2}")
def accumulate(C, first, total, writes, c, kept, out):
    """Rows from `first` of out = total C + writes, as the fold's accumulator and the checkpoint round it if kept."""
    V, K = writes.shape
    for lo in range(0, V, FEW):
        hi = min(lo + FEW, V)
        # rows of C and out, then of writes
        a, b = first + lo, first + hi
        if not kept or c[FOLD_ACC, 0] == EXACT:
            for i in range(lo, hi):
                for k in range(K):
                    out[first + i, k] = C[first + i, k] * total + writes[i, k]
        elif c[FOLD_ACC, 0] == FP32:
            for i in range(lo, hi):
                for k in range(K):
                    x = np.float64(np.float32(C[first + i, k] * total))
                    out[first + i, k] = np.float64(np.float32(x + writes[i, k]))
        else:
            for i in range(lo, hi):
                for k in range(K):
                    out[first + i, k] = C[first + i, k] * total
            round_rows(out, a, b, c[FOLD_ACC])
            for i in range(lo, hi):
                for k in range(K):
                    out[first + i, k] += writes[i, k]
            round_rows(out, a, b, c[FOLD_ACC])
        if kept:
            round_rows(out, a, b, c[CHECKPOINT])


@compiled(f"{F2}, int64, float64, {F2}, {F2}, int64, {F2}, {F2}")
def accumulate_in_turn(C, first, total, Wd, keys, n, c, out):
    """The same with n records added one after the other in fp32, as units that are no tensor cores do."""
    for i in range(Wd.shape[1]):
        row = out[first + i]
        for k in range(row.shape[0]):
            row[k] = np.float64(np.float32(C[first + i, k] * total))
        for j in range(n):
            x = Wd[j, i]
            for k in range(row.shape[0]):
                row[k] = np.float64(np.float32(row[k] + x * keys[j, k]))
    round_rows(out, first, first + Wd.shape[1], c[CHECKPOINT])


@compiled(f"{F2}, {F2}, {F2}, {F3}, {F3}, {F3}, int64, int64, {I1}, {F2}, boolean, {F2}, {F1}, {F2}, {F2}, {F2}")
def fold_head(C, ring_k, low_k, ring_d, low_d, g, base, n, flags, c, kept, keys, W, Wd, writes, out):
    """out [r*V, K]: the state of C and a history of n records, for the r value heads of one key head.

    kept: as the fold forms and stores it; otherwise as a verify reads it, C being the operand then. ring_k [L, K];
    ring_d [r, L, V]; g [r, L, 1]; the rest is scratch, keys [L, K], W [L], Wd [L, V], writes [V, K]
    """
    V, K = writes.shape
    reads = kept or flags[READ_LOW] != 0
    gather(ring_k, low_k, reads and flags[LOW_K] != 0, base, n, keys)
    if kept:
        round_rows(keys, 0, n, c[FOLD_K])
        round_rows(keys, 0, n, c[FOLD_RIGHT])
    else:
        round_rows(keys, 0, n, c[SCORE_LEFT])
    for r in range(ring_d.shape[0]):
        two = reads and flags[LOW_D] != 0
        total = decayed_writes(ring_d[r], low_d[r], two, g[r], base, n, flags, c, kept, W, Wd)
        if kept and flags[IN_TURN]:
            accumulate_in_turn(C, r * V, total, Wd, keys, n, c, out)
        else:
            np.dot(Wd[:n].T, keys[:n], writes)
            accumulate(C, r * V, total, writes, c, kept, out)
