"""Tokens one after the other over the rows of a state, compiled. Formulas: harness.reference.verify.TokenPass.

Rows of S are independent: each passes all its tokens in cache. Where the accumulator is rounded after every n
products, the columns of S, k and q come in an order in which each block is a run, edges[b] to edges[b + 1].
"""

from __future__ import annotations

import numpy as np

from harness.compiled.common import (
    DECAY,
    DECAYED,
    F1,
    F2,
    F3,
    F4,
    F5,
    I1,
    KEY,
    LATE,
    OUTPUT,
    RECURRENT_ACC,
    RECURRENT_LEFT,
    SEEN_LEFT,
    SNAPSHOT,
    STEP,
    TAKEN,
    D,
    compiled,
    summing,
)
from harness.compiled.measure import distance_of
from harness.compiled.rounding import EXACT, FP32, copy_rounded, round_one, round_rows

I2 = "int64[:, ::1]"


@summing(f"{F2}, int64, {F2}, int64, {I1}, {F1}", "float64")
def product(x, i, y, t, edges, acc):
    """x[i] . y[t], rounded after every block."""
    total = 0.0
    for b in range(edges.shape[0] - 1):
        left, right = x[i, edges[b] : edges[b + 1]], y[t, edges[b] : edges[b + 1]]
        part = 0.0
        for j in range(left.shape[0]):
            part += left[j] * right[j]
        part = round_one(part, acc)
        total = part if b == 0 else round_one(total + part, acc)
    return total


@summing(f"{F2}, int64, int64, {F2}, float64, {I1}, {F1}", "UniTuple(float64, 2)")
def begin_fp32(S, i, j, k, decay, edges, acc):
    """S[i] and S[j] decayed in fp32; returns their products with k[0]."""
    first, second = 0.0, 0.0
    for b in range(edges.shape[0] - 1):
        lo, hi = edges[b], edges[b + 1]
        upper, lower, key = S[i, lo:hi], S[j, lo:hi], k[0, lo:hi]
        c, d = 0.0, 0.0
        for n in range(key.shape[0]):
            s, u = np.float64(np.float32(decay * upper[n])), np.float64(np.float32(decay * lower[n]))
            upper[n] = s
            lower[n] = u
            c += s * key[n]
            d += u * key[n]
        c, d = round_one(c, acc), round_one(d, acc)
        first, second = (c, d) if b == 0 else (round_one(first + c, acc), round_one(second + d, acc))
    return first, second


@summing(f"{F2}, int64, int64, {F2}, int64, int64, {F2}, float64, float64, float64, {I1}, {F1}", "UniTuple(float64, 4)")
def step_fp32(S, i, j, k, t, after, q, x, y, decay, edges, acc):
    """Decayed rows S[i] + x k[t] and S[j] + y k[t] in fp32 times q[t]; then decayed for the next token, times k[after].

    Two rows at a time, as each of their sums has to wait for itself. The decay is an fp32 number.
    """
    eg = np.float32(decay)
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    for b in range(edges.shape[0] - 1):
        lo, hi = edges[b], edges[b + 1]
        upper, lower, key, later, query = S[i, lo:hi], S[j, lo:hi], k[t, lo:hi], k[after, lo:hi], q[t, lo:hi]
        a, b_, c, d = 0.0, 0.0, 0.0, 0.0
        for n in range(key.shape[0]):
            s, u = np.float32(upper[n] + x * key[n]), np.float32(lower[n] + y * key[n])
            a += np.float64(s) * query[n]
            b_ += np.float64(u) * query[n]
            s, u = eg * s, eg * u
            upper[n] = s
            lower[n] = u
            c += np.float64(s) * later[n]
            d += np.float64(u) * later[n]
        a, b_, c, d = round_one(a, acc), round_one(b_, acc), round_one(c, acc), round_one(d, acc)
        if b == 0:
            first, second, third, fourth = a, b_, c, d
        else:
            first, second = round_one(first + a, acc), round_one(second + b_, acc)
            third, fourth = round_one(third + c, acc), round_one(fourth + d, acc)
    return first, second, third, fourth


@summing(f"{F2}, {F2}, {F2}, {F2}, {F1}, {F1}, int64, {I1}, {I1}, {F2}, {F2}, {F2}", "void")
def pass_rows(S, k, q, v, beta, eg, n, edges, flags, c, o, d):
    """S [V, K] after n tokens, in place; o and d [n, V] of those tokens.

    k, q [n, K] as the product reads them, q without rows in a replay; v [n, V] is beta v, eg [n] the decay
    """
    V, K = S.shape
    acc, outputs, late = c[RECURRENT_ACC], q.shape[0] > 0, flags[LATE] != 0
    queries, read = q if outputs else k, np.empty((1, K))
    reads = c[SEEN_LEFT, 0] == EXACT and c[RECURRENT_LEFT, 0] == EXACT
    if reads and not late and c[DECAY, 0] == FP32 and c[DECAYED, 0] == FP32 and c[STEP, 0] == FP32:
        for i in range(0, V, 2):
            # an odd last row goes with itself
            j = min(i + 1, V - 1)
            one, two = begin_fp32(S, i, j, k, eg[0], edges, acc)
            for t in range(n):
                x, y = round_one(v[t, i] - beta[t] * one, c[D]), round_one(v[t, j] - beta[t] * two, c[D])
                d[t, i], d[t, j] = x, y
                # behind the last token S stays as it is
                after, decay = (t + 1, eg[t + 1]) if t + 1 < n else (t, 1.0)
                put, out, one, two = step_fp32(S, i, j, k, t, after, queries, x, y, decay, edges, acc)
                if outputs:
                    o[t, i], o[t, j] = put, out
    else:
        for i in range(V):
            for t in range(n):
                if late:
                    copy_rounded(S[i : i + 1], read, c[SEEN_LEFT])
                for j in range(K):
                    S[i, j] *= eg[t]
                round_rows(S, i, i + 1, c[DECAYED])
                if not late:
                    copy_rounded(S[i : i + 1], read, c[SEEN_LEFT])
                x = round_one(v[t, i] - beta[t] * product(read, 0, k, t, edges, acc), c[D])
                for j in range(K):
                    S[i, j] += x * k[t, j]
                round_rows(S, i, i + 1, c[STEP])
                d[t, i] = x
                if outputs:
                    copy_rounded(S[i : i + 1], read, c[RECURRENT_LEFT])
                    o[t, i] = product(read, 0, queries, t, edges, acc)
    if outputs:
        round_rows(o, 0, n, c[OUTPUT])


@compiled(f"{F2}, {I1}, {F2}")
def in_order(x, order, out):
    """Columns of x as `order` has them, into the first rows of out."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, order[j]]


@compiled(f"{F2}, {I1}, {F2}")
def back_in_place(x, order, out):
    """What undoes in_order."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, order[j]] = x[i, j]


@compiled(f"{F4}, {F4}, {F4}, {F4}, {F3}, {F3}, {I1}, {I1}, {I1}, {I1}, {F2}, {F4}, {F4}, {F4}")
def token_pass(S, k, q, v, beta, eg, lengths, order, edges, flags, c, out, o, d):
    """out [n, HV, V, K]: S after lengths[s] tokens of slot s; o and d [n, HV, m, V] of those tokens.

    k, q [n, H, m, K]; v [n, HV, m, V]; beta, eg [n, HV, m]; as pass_rows reads them, columns not yet in order
    """
    n, HV, V, K = S.shape
    m, group, queries = k.shape[2], HV // k.shape[1], q.shape[2]
    state, keys, asked = np.empty((V, K)), np.empty((m, K)), np.empty((queries, K))
    for s in range(n):
        for h in range(HV):
            in_order(S[s, h], order, state)
            if lengths[s]:
                in_order(k[s, h // group], order, keys)
                if queries:
                    in_order(q[s, h // group], order, asked)
                where = o[s, h] if queries else d[s, h]
                pass_rows(state, keys, asked, v[s, h], beta[s, h], eg[s, h], lengths[s], edges, flags, c, where,
                          d[s, h])  # fmt: skip
            back_in_place(state, order, out[s, h])


@compiled(f"{F4}, {F5}, {F5}, {F4}, {F4}, {I2}, {I2}, {I2}, {I2}, {I1}, {I1}, {I1}, {F2}, {F5}, {F4}, {F4}, {F4}")
def decode_tokens(C, unit, v, beta, eg, step, lane, ends, points, order, edges, flags, c, truth, o, d, errors):
    """Committed tokens on states C [B, HV, V, K], in place: what a design that keeps its drafts' states does.

    unit [W, B, H, 2m, K] k_hat then q_hat; v [W, B, HV, m, V] is beta v; beta, eg [W, B, HV, m]; step, lane [B, T] of
    every committed token; ends [B, n] the tokens after which a state is taken, 0 behind the last, points [B, n] the
    grid point reached there or -1; truth [P, B, HV, V, K]; o, d [B, T, HV, V]; errors [B, P, HV, 4]
    """
    B, HV, V, K = C.shape
    group, m, T = HV // unit.shape[2], v.shape[3], step.shape[1]
    straight = True
    for k in range(K):
        straight &= order[k] == k
    state, moved = np.empty((group, V, K)), np.empty((V, K))
    keys, asked, writes = np.empty((T, K)), np.empty((T, K)), np.empty((T, V))
    a, decay, outs, ds = np.empty(T), np.empty(T), np.empty((T, V)), np.empty((T, V))
    one = np.empty((1, K))
    for b in range(B):
        for h in range(unit.shape[2]):
            for r in range(group):
                in_order(C[b, h * group + r], order, state[r])
            begin = 0
            for s in range(ends.shape[1]):
                if ends[b, s] == 0:
                    break
                n, point = ends[b, s] - begin, points[b, s]
                for t in range(n):
                    i, j = step[b, begin + t], lane[b, begin + t]
                    for x in range(2):
                        copy_rounded(unit[i, b, h, j + x * m : j + x * m + 1], one, c[KEY])
                        in_order(one, order, (asked if x else keys)[t : t + 1])
                for r in range(group):
                    hv = h * group + r
                    for t in range(n):
                        i, j = step[b, begin + t], lane[b, begin + t]
                        a[t], decay[t] = beta[i, b, hv, j], eg[i, b, hv, j]
                        for x in range(V):
                            writes[t, x] = v[i, b, hv, j, x]
                    pass_rows(state[r], keys, asked, writes, a, decay, n, edges, flags, c, outs, ds)
                    for t in range(n):
                        for x in range(V):
                            o[b, begin + t, hv, x], d[b, begin + t, hv, x] = outs[t, x], ds[t, x]
                    round_rows(state[r], 0, V, c[SNAPSHOT])
                    round_rows(state[r], 0, V, c[TAKEN])
                    if point >= 0:
                        if not straight:
                            back_in_place(state[r], order, moved)
                        fro, worst = distance_of(state[r] if straight else moved, truth[point, b, hv])
                        errors[b, point, hv, 0] = errors[b, point, hv, 2] = fro
                        errors[b, point, hv, 1] = errors[b, point, hv, 3] = worst
                begin = ends[b, s]
            for r in range(group):
                back_in_place(state[r], order, C[b, h * group + r])
