"""Distances and products that the bookkeeping of a block asks for, compiled."""

from __future__ import annotations

import math

import numpy as np

from harness.compiled.common import F1, F2, F3, F4, F5, I1, I2, compiled, summing
from harness.compiled.rounding import MAGNITUDE, bits, copy_rounded, number, round_rows


@summing(f"{F1}, {F1}", "Tuple((float64, float64, int64, int64))")
def sums_and_maxima(x, y):
    """Sum of (x - y)^2 and of y^2; max|x - y| and max|y| as patterns, which order as numbers do, NaN on top."""
    error, size, worst, largest = 0.0, 0.0, 0, 0
    for k in range(x.shape[0]):
        e = x[k] - y[k]
        error += e * e
        size += y[k] * y[k]
        worst = max(worst, bits(e) & MAGNITUDE)
        largest = max(largest, bits(y[k]) & MAGNITUDE)
    return error, size, worst, largest


@compiled(f"{F2}, {F2}", "UniTuple(float64, 2)")
def distance_of(X, S):
    """||X - S||_F / ||S||_F and max|X - S| / max|S| of [V, K]; absolute where S is 0."""
    error, size, worst, largest = sums_and_maxima(X.reshape(X.size), S.reshape(S.size))
    scale, most = math.sqrt(size), number(largest)
    return math.sqrt(error) / (scale if scale != 0 else 1.0), number(worst) / (most if most != 0 else 1.0)


@compiled(f"{F4}, {F4}, {F3}")
def distance(X, S, out):
    """out [n, HV, 2]: distance_of per head of X, S [n, HV, V, K]."""
    for s in range(S.shape[0]):
        for h in range(S.shape[1]):
            out[s, h, 0], out[s, h, 1] = distance_of(X[s, h], S[s, h])


@compiled(f"{F3}, {F3}, {I1}, {I1}, {F2}")
def token_distance(x, y, at, of, out):
    """out [HV, N]: ||x - y|| / ||y|| of tokens x[at] and y[of], [.., HV, V] both; absolute where y is 0."""
    for t in range(at.shape[0]):
        for h in range(y.shape[1]):
            error, size, _, _ = sums_and_maxima(x[at[t], h], y[of[t], h])
            scale = math.sqrt(size)
            out[h, t] = math.sqrt(error) / (scale if scale != 0 else 1.0)


@compiled(f"{F4}, {I2}, {I2}, {F3}, {F3}")
def maxima(values, live, points, carry, out):
    """out [n, HV, Q]: maxima of values [W, B, HV, Q] over live [W, B] windows since each slot's last point [W, B],
    by steps and then by slots; carry [B, HV, Q] those before the first step, then those left. NaN wins."""
    W, B, HV, Q = values.shape
    n = 0
    for i in range(W):
        for b in range(B):
            if live[i, b]:
                for h in range(HV):
                    for q in range(Q):
                        x = values[i, b, h, q]
                        # false for a carry that is not a number, which stays
                        if x > carry[b, h, q] or x != x:
                            carry[b, h, q] = x
            if points[i, b] >= 0:
                out[n] = carry[b]
                carry[b] = -np.inf
                n += 1


@compiled(f"{F5}, {F1}, {F1}, {F1}, {F1}, {F5}")
def products(unit, key, left, right, acc, out):
    """out [W, B, H, 2m, m]: k_hat then q_hat times k_hat' of every window, from unit [W, B, H, 2m, K]."""
    W, B, H, m2, K = unit.shape
    m = m2 // 2
    first, second = np.empty((m2, K)), np.empty((m, K))
    for i in range(W):
        for b in range(B):
            for h in range(H):
                copy_rounded(unit[i, b, h], first, key)
                copy_rounded(first[:m], second, right)
                round_rows(first, 0, m2, left)
                into = out[i, b, h]
                np.dot(first, second.T, into)
                round_rows(into, 0, m2, acc)
