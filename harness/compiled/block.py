"""A whole block of steps of one design, compiled: verify, commit, fold and comparison of one head after the other.

Heads never meet, so one key head and its value heads pass every step of the block while their state is in cache. The
cursors have been moved before (harness.compiled.lockstep): what they say of each step lies in a plan, [W, B, PLAN].
A fused step calls the same functions in the same order as verify, commit and read do one by one.
"""

from __future__ import annotations

import numpy as np

from harness.compiled.common import (
    AFTER,
    AT,
    BASE,
    BEFORE,
    END,
    F1,
    F2,
    F3,
    F4,
    F5,
    HISTORY,
    I1,
    I3,
    KEEP,
    KEY,
    LIVE,
    NEW_BASE,
    NEW_END,
    POINT,
    RAW,
    REPLAY,
    REPLAYED,
    STATE_LEFT,
    STATE_OPERAND,
    TWO_PARTS,
    compiled,
)
from harness.compiled.fold import fold_head
from harness.compiled.measure import distance_of
from harness.compiled.passes import back_in_place, in_order, pass_rows
from harness.compiled.rounding import EXACT, copy_rounded, round_rows
from harness.compiled.window import read_checkpoint, window_head, write_head

RING, GIVEN = f"UniTuple({F4}, 11)", f"Tuple(({F5}, {F5}, {F4}, {F4}, {F4}, {F5}, {F5}))"
STORED = f"Tuple(({F4}, {F5}, {F5}, {F4}, {F5}, {F5}, {F4}))"
SCRATCH = f"Tuple(({F2}, {F2}, {F2}, {F1}))"


@compiled(f"{F2}, {RING}, int64, int64, int64, int64, {I1}, {I1}, {I1}, {F2}, {F2}")
def replay_head(C, ring, b, h, base, n, flags, order, edges, c, out):
    """out [r*V, K]: the checkpoint C after a history of n raw records, as a replay reads them."""
    betas, keys, v, decays = ring[7], ring[8][b, h], ring[9], ring[10]
    L, K, V = keys.shape[0], keys.shape[1], v.shape[3]
    group = C.shape[0] // V
    k, writes, d = np.empty((n, K)), np.empty((n, V)), np.empty((n, V))
    none, state = np.empty((0, K)), np.empty((V, K))
    beta, decay = np.empty(n), np.empty(n)
    for t in range(n):
        row = (base + t) & (L - 1)
        in_order(keys[row : row + 1], order, k[t : t + 1])
    for r in range(group):
        hv = h * group + r
        for t in range(n):
            row = (base + t) & (L - 1)
            beta[t], decay[t] = betas[b, hv, row, 0], decays[b, hv, row, 0]
            for i in range(V):
                writes[t, i] = v[b, hv, row, i]
        in_order(C[r * V : (r + 1) * V], order, state)
        pass_rows(state, k, none, writes, beta, decay, n, edges, flags, c, d, d)
        back_in_place(state, order, out[r * V : (r + 1) * V])
    round_rows(out, 0, out.shape[0], c[REPLAYED])


@compiled(f"{F2}, {RING}, int64, int64, int64, int64, {I1}, {I1}, {I1}, {F2}, boolean, {SCRATCH}, {F2}")
def fold_history(C, ring, b, h, base, n, flags, order, edges, c, kept, scratch, out):
    """out [r*V, K]: C and a history of n records, as the design folds them or, not kept, as its verify reads them."""
    if kept and flags[REPLAY]:
        replay_head(C, ring, b, h, base, n, flags, order, edges, c, out)
        return
    group = ring[2].shape[1] // ring[0].shape[1]
    first, last = h * group, (h + 1) * group
    keys, Wd, writes, W = scratch
    fold_head(C, ring[0][b, h], ring[1][b, h], ring[2][b, first:last], ring[3][b, first:last], ring[4][b, first:last],
              base, n, flags, c, kept, keys, W, Wd, writes, out)  # fmt: skip


@compiled(f"{RING}, {STORED}, {F3}, {F2}, int64, int64, int64, {I1}, {I1}, {F2}")
def write_window(ring, stored, d, kq, i, b, h, now, flags, c):
    """The records of one window: k_hat, d and g, then what is kept raw and what a replay makes of that."""
    group = d.shape[0]
    first, last = h * group, (h + 1) * group
    write_head(kq, d, stored[0][i, b, first:last], now[LIVE], now[BASE], now[END], now[HISTORY], flags, c,
               ring[0][b, h], ring[1][b, h], ring[2][b, first:last], ring[3][b, first:last],
               ring[4][b, first:last])  # fmt: skip
    if flags[RAW] == 0:
        return
    L = ring[2].shape[2]
    for t in range(now[LIVE]):
        row = (now[BASE] + now[END] + t) & (L - 1)
        for k in range(stored[2].shape[4]):
            ring[6][b, h, row, k] = stored[2][i, b, h, t, k]
        if flags[REPLAY]:
            copy_rounded(stored[4][i, b, h, t : t + 1], ring[8][b, h, row : row + 1], c[KEY])
        for hv in range(first, last):
            ring[7][b, hv, row, 0] = stored[3][i, b, hv, t]
            for x in range(stored[1].shape[4]):
                ring[5][b, hv, row, x] = stored[1][i, b, hv, t, x]
            if flags[REPLAY]:
                ring[10][b, hv, row, 0] = stored[6][i, b, hv, t]
                for x in range(stored[5].shape[4]):
                    ring[9][b, hv, row, x] = stored[5][i, b, hv, t, x]


@compiled(f"{F4}, {RING}, {GIVEN}, {STORED}, {I3}, {I1}, {I1}, {I1}, {F2}, boolean, {F5}, {F4}, {F4}, {F4}")
def decode_windows(C, ring, given, stored, plan, flags, order, edges, c, emit, truth, o, d, errors):
    """Windows of a design that keeps records, on checkpoints C [B, HV, V, K], in place.

    given: unit [W, B, H, 2m, K] k_hat then q_hat, v [W, B, HV, m, V], beta, eR, eG [W, B, HV, m], X, F [W, B, HV, m, m]
    stored: the fields as the ring keeps them, g first; see write_window
    truth [P, B, HV, V, K] is what grid points are compared with, errors [B, P, HV, 4] served and kept; emit: nothing
    is compared, and truth receives the kept states. o, d [B, T, HV, V]
    """
    unit, v, beta, eR, eG, X, F = given
    B, HV, V, K = C.shape
    W, H, m2 = unit.shape[0], unit.shape[2], unit.shape[3]
    group, m, L = HV // H, m2 // 2, ring[2].shape[2]
    rows = group * V
    kq, read, scores = np.empty((m2, K)), np.empty((m2, K)), np.empty((L, m2))
    keys, Wd, writes, weights = np.empty((L, K)), np.empty((L, V)), np.empty((V, K)), np.empty(L)
    scratch = (keys, Wd, writes, weights)
    hw, mine, R = np.empty((m2, rows)), np.empty((m2, V)), np.empty((m, V))
    o_now, d_now = np.empty((group, m, V)), np.empty((group, m, V))
    rounded, served, spare = np.empty((rows, K)), np.empty((rows, K)), np.empty((rows, K))
    rounds = flags[TWO_PARTS] != 0 or c[STATE_OPERAND, 0] != EXACT or c[STATE_LEFT, 0] != EXACT
    for b in range(B):
        for h in range(H):
            first, last = h * group, (h + 1) * group
            S, kept = C[b, first:last].reshape(rows, K), spare
            operand = rounded if rounds else S
            if rounds:
                read_checkpoint(S, flags, c, rounded)
            ready = False
            for i in range(W):
                now = plan[i, b]
                if now[LIVE] == 0:
                    continue
                if now[BEFORE]:
                    if not ready:
                        fold_history(S, ring, b, h, now[BASE], now[BEFORE], flags, order, edges, c, True, scratch, kept)
                    S, kept = kept, S
                    operand = rounded if rounds else S
                    if rounds:
                        read_checkpoint(S, flags, c, rounded)
                copy_rounded(unit[i, b, h], kq, c[KEY])
                window_head(operand, kq, v[i, b, first:last], beta[i, b, first:last], eR[i, b, first:last],
                            eG[i, b, first:last], X[i, b, first:last], F[i, b, first:last], ring[0][b, h],
                            ring[1][b, h], ring[2][b, first:last], ring[3][b, first:last], ring[4][b, first:last],
                            now[BASE], now[HISTORY], flags, c, read, keys, scores, weights, Wd, hw, mine, R,
                            o_now, d_now)  # fmt: skip
                write_window(ring, stored, d_now, kq, i, b, h, now, flags, c)
                ready = False
                for r in range(group):
                    for t in range(now[KEEP]):
                        for x in range(V):
                            o[b, now[AT] + t, first + r, x] = o_now[r, t, x]
                            d[b, now[AT] + t, first + r, x] = d_now[r, t, x]
                if now[AFTER]:
                    fold_history(S, ring, b, h, now[NEW_BASE], now[AFTER], flags, order, edges, c, True, scratch, kept)
                    S, kept = kept, S
                    operand = rounded if rounds else S
                    if rounds:
                        read_checkpoint(S, flags, c, rounded)
                point, n = now[POINT], now[NEW_END]
                if point < 0:
                    continue
                if n:
                    fold_history(S, ring, b, h, now[NEW_BASE], n, flags, order, edges, c, True, scratch, kept)
                    ready = True
                if emit:
                    truth[point, b, first:last].reshape(rows, K)[:] = kept if n else S
                    continue
                if n:
                    fold_history(operand, ring, b, h, now[NEW_BASE], n, flags, order, edges, c, False, scratch, served)
                for r in range(group):
                    mine_now, fold_now = (served, kept) if n else (operand, S)
                    exact, lo, hi = truth[point, b, first + r], r * V, (r + 1) * V
                    error = distance_of(mine_now[lo:hi], exact)
                    errors[b, point, first + r, 0], errors[b, point, first + r, 1] = error
                    if n or rounds:
                        error = distance_of(fold_now[lo:hi], exact)
                    errors[b, point, first + r, 2], errors[b, point, first + r, 3] = error
            C[b, first:last].reshape(rows, K)[:] = S


@compiled(f"{F4}, {RING}, {I1}, {I1}, {I1}, {I1}, {I1}, {I1}, {F2}, boolean, {F4}")
def fold_slots(C, ring, slots, bases, lengths, flags, order, edges, c, kept, out):
    """out [n, HV, V, K]: the states of slots[i] after the first lengths[i] records of their histories."""
    B, HV, V, K = C.shape
    H, L = ring[0].shape[1] if flags[REPLAY] == 0 else ring[8].shape[1], max(ring[2].shape[2], ring[9].shape[2])
    rows = HV // H * V
    scratch = np.empty((L, K)), np.empty((L, V)), np.empty((V, K)), np.empty(L)
    for s in range(out.shape[0]):
        for h in range(H):
            S = C[slots[s], h * (HV // H) : (h + 1) * (HV // H)].reshape(rows, K)
            into = out[s, h * (HV // H) : (h + 1) * (HV // H)].reshape(rows, K)
            if lengths[s]:
                fold_history(S, ring, slots[s], h, bases[s], lengths[s], flags, order, edges, c, kept, scratch, into)
            else:
                into[:] = S
