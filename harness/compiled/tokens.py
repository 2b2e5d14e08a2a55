"""The token pass, the writes of a step and the distance of two states, compiled."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from harness.compiled.common import (
    F1,
    F2,
    F3,
    F4,
    I1,
    OUTPUT,
    RECURRENT_ACC,
    RECURRENT_LEFT,
    STEP,
    STORE_D,
    D,
    compiled,
    summing,
)
from harness.compiled.rounding import FP32, round_one, round_row


@summing(f"{F4}, {F4}, {F4}, {F4}, {F3}, {F3}, {I1}, {F2}, {F2}, {F4}, {F4}, {F4}", "void")
def token_pass(S, k, q, v, gain, eg, lengths, masks, c, out, o, d):
    """out [n, HV, V, K]: S after lengths[s] tokens of slot s; o and d [n, HV, V, m] of those tokens.

    k, q [n, H, m, K] as the product reads them, q empty in a replay; v [n, HV, m, V] and gain, eg [n, HV, m] as
    window.token_steps prepares them; masks [blocks, K]: the products each rounding of the accumulator takes. Rows
    of S are independent: each passes all its tokens in cache.
    """
    n, HV, V, K = S.shape
    group, blocks = HV // k.shape[1], masks.shape[0]
    lanes = 2 if q.shape[2] > 0 else 1
    read, acc = np.empty((1, K)), c[RECURRENT_ACC]
    reads = c[RECURRENT_LEFT, 0] != 0
    for s in range(n):
        for hv in range(HV):
            state, keys = out[s, hv], k[s, hv // group]
            queries = q[s, hv // group] if lanes == 2 else keys
            for i in range(V):
                for j in range(K):
                    state[i, j] = S[s, hv, i, j]
                for t in range(lengths[s]):
                    for lane in range(lanes):
                        # first what the old state predicts, then what the new one puts out
                        other = keys if lane == 0 else queries
                        total = 0.0
                        if blocks == 2 and not reads:
                            first, second = 0.0, 0.0
                            for j in range(K):
                                z = state[i, j] * other[t, j]
                                first += z * masks[0, j]
                                second += z * masks[1, j]
                            total = round_one(round_one(first, acc) + round_one(second, acc), acc)
                        else:
                            for j in range(K):
                                read[0, j] = state[i, j]
                            if reads:
                                round_row(read, 0, c[RECURRENT_LEFT])
                            for b in range(blocks):
                                part = 0.0
                                for j in range(K):
                                    part += read[0, j] * other[t, j] * masks[b, j]
                                part = round_one(part, acc)
                                total = part if b == 0 else round_one(total + part, acc)
                        if lane == 1:
                            o[s, hv, i, t] = round_one(total, c[OUTPUT])
                            continue
                        x = round_one(v[s, hv, t, i] - gain[s, hv, t] * total, c[D])
                        decay = eg[s, hv, t]
                        if c[STEP, 0] == FP32:
                            for j in range(K):
                                state[i, j] = np.float64(np.float32(decay * state[i, j] + x * keys[t, j]))
                        else:
                            for j in range(K):
                                state[i, j] = decay * state[i, j] + x * keys[t, j]
                            round_row(state, i, c[STEP])
                        d[s, hv, i, t] = x


@summing(f"{F2}, {F2}", "UniTuple(float64, 2)")
def square_sums(x, y):
    """Sum of (x - y)^2 and of y^2."""
    error, size = 0.0, 0.0
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            e = x[i, k] - y[i, k]
            error += e * e
            size += y[i, k] * y[i, k]
    return error, size


@njit(f"UniTuple(float64, 2)({F2}, {F2})", cache=True, error_model="numpy", nogil=True, fastmath={"nnan", "nsz"})
def maxima(x, y):
    """max|x - y| and max|y| of numbers; what it says of NaN means nothing."""
    worst, largest = 0.0, 0.0
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            worst = max(worst, abs(x[i, k] - y[i, k]))
            largest = max(largest, abs(y[i, k]))
    return worst, largest


@compiled(f"{F4}, {F4}, {F3}")
def distance(X, S, out):
    """out [n, HV, 2]: ||X - S||_F / ||S||_F and max|X - S| / max|S| per head of X, S [n, HV, V, K].

    Absolute where S is 0.
    """
    n, HV, V, K = S.shape
    for s in range(n):
        for h in range(HV):
            error, size = square_sums(X[s, h], S[s, h])
            worst, largest = maxima(X[s, h], S[s, h])
            # a maximum may pass over a NaN, a sum does not
            out[s, h, 0] = math.sqrt(error) / (math.sqrt(size) if size > 0 else 1.0)
            out[s, h, 1] = np.nan if math.isnan(error) else worst / (largest if largest > 0 else 1.0)


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


@compiled(f"{F4}, {F4}, {F3}, {F4}, {F3}, {F4}, {I1}, {I1}, {F2}")
def write_window(ring_k, ring_d, ring_g, k_hat, g, d, first, live, c):
    """The three fields every chunked window leaves: k_hat [B, H, m, K] and g [B, HV, m] as stored, d [B, HV, V, m]."""
    B, HV, L, V = ring_d.shape
    write_rows(ring_k, k_hat, first, live)
    for b in range(B):
        for h in range(HV):
            for t in range(live[b]):
                row = (first[b] + t) & (L - 1)
                ring_g[b, h, row] = g[b, h, t]
                for i in range(V):
                    ring_d[b, h, row, i] = round_one(d[b, h, i, t], c[STORE_D])


@compiled(f"{F4}, {F4}, {F4}, {I1}, {I1}, {F2}")
def write_low(ring, ring_lo, d, first, live, c):
    """The low part of d, what its stored high part leaves over."""
    B, HV, L, V = ring.shape
    for b in range(B):
        for h in range(HV):
            for t in range(live[b]):
                row = (first[b] + t) & (L - 1)
                for i in range(V):
                    ring_lo[b, h, row, i] = round_one(d[b, h, i, t] - ring[b, h, row, i], c[STORE_D])


@compiled(f"{F2}, {F1}, {F1}")
def round_all(x, first, second):
    """Two roundings of every row of x [rows, n], in place."""
    for i in range(x.shape[0]):
        round_row(x, i, first)
        round_row(x, i, second)
