"""Ring verify: a window's outputs from checkpoint, history and window, in one read of the state.

A flagged slot's history is folded in the same pass: its state is read once, folded, stored and used. What no row of the
state enters comes from prepare.py, and who takes which route from route.py. Formulas: README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.fold import replayed
from harness.kernels.numbers import add_write, as_stored, dot, folded_tile, operand, rest, rounded, tile_of, unfolded
from harness.kernels.prepare import past_rows, prepare, writes
from harness.kernels.route import planned


@triton.jit
def prepared(
    W_in, total_in, eG_in, v, beta, b, hv, n, rows, m, HV, V: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    O: tl.constexpr,
):  # fmt: skip
    """Of a window and value head: history weights [BC] and total decay, e^G, the same as R takes it and beta [BS],
    v [BV, BS]."""
    lane, mine = tl.arange(0, BS), b * HV + hv
    W, total = tl.load(W_in + mine * BC + tl.arange(0, BC)), tl.load(total_in + mine)
    at, live = tl.minimum(lane, n - 1), lane < n
    eG, gain = tl.load(eG_in + mine * BS + lane), tl.where(live, rounded(tl.load(beta + mine * m + at), O.beta), 0.0)
    if O.after:
        eR = tl.where(lane == 0, 1.0, tl.load(eG_in + mine * BS + tl.maximum(lane - 1, 0)))
    else:
        eR = eG
    values = tl.load(v + (mine * m + at)[None, :] * V + rows[:, None], mask=(rows < V)[:, None], other=0.0)
    return W, total, eG, eR, gain, values.to(tl.float32) * live.to(tl.float32)[None, :]


@triton.jit
def finish(
    on, values, gain, eG, eR, A_in, F_in, mine, head, n, first, m, rows, out, d_out, ring_d, d_lo, raw_v,
    V: tl.constexpr, L: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, O: tl.constexpr, KEEP_D: tl.constexpr,
):  # fmt: skip
    """o and D [BV, BS] from on = S [k_hat q_hat]' of the state before the window, and the records that hold D.

    Returns D
    """
    on_k, on_q = tl.split(tl.reshape(on, (BV, BS, 2)))
    R = rounded((values - eR[None, :] * on_k) * gain[None, :], O.rhs)
    lane = tl.arange(0, BS)
    j = lane[None, :]
    if O.inverse == "rhs_solve":
        D = R
        for t in tl.static_range(1, BS):
            row_A = tl.load(A_in + (mine * BS + t) * BS + lane)
            taken = tl.sum(D * row_A[None, :], axis=1)
            D = tl.where(j == t, D - taken[:, None], D)
    else:
        D, R = tl.zeros((BV, BS), tl.float32), operand(R, O.solve)
        for t in tl.static_range(BS):
            column = tl.sum(tl.where(j == t, R, 0.0), axis=1)
            D += column[:, None] * tl.load(A_in + (mine * BS + lane) * BS + t)[None, :]
    o, read = eG[None, :] * on_q, operand(D, O.output)
    for t in tl.static_range(BS):
        column = tl.sum(tl.where(j == t, read, 0.0), axis=1)
        o += column[:, None] * tl.load(F_in + (mine * BS + lane) * BS + t)[None, :]

    to = (mine * m + lane)[None, :] * V + rows[:, None]
    put = (lane < n)[None, :] & (rows < V)[:, None]
    tl.store(out + to, as_stored(o, out), mask=put)
    if KEEP_D:
        tl.store(d_out + to, D, mask=put)
    record_place = (head * L + ((first + lane) & (L - 1)))[None, :] * V + rows[:, None]
    high = as_stored(D, ring_d)
    tl.store(ring_d + record_place, high, mask=put)
    if O.low_d:
        tl.store(d_lo + record_place, as_stored(rest(D, high.to(tl.float32)), d_lo), mask=put)
    if O.raw:
        tl.store(raw_v + record_place, as_stored(values, raw_v), mask=put)
    return D


@triton.jit
def ring_verify(
    q, k, v, g, beta, lengths, plan, counts, out, d_out, C, ring_k, k_lo, ring_d, d_lo, ring_g, raw_k, raw_v, raw_beta,
    W, total, A, F, eG, eps, scale, B, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, BG: tl.constexpr, SHARES: tl.constexpr, O: tl.constexpr, KEEP_D: tl.constexpr,
    FLUSH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The windows that leave the state alone, or with FLUSH those that fold their history first, O.raw by its replay;
    O.current: that verify and then fold their history and their one token.

    Of a window and key head, SHARES programs have every SHARES-th tile of BV rows each.
    q, k [B, H, m, K]; v, out, d_out [B, HV, m, V]; g, beta [B, HV, m] fp32; C [slots, HV, V, K];
    rings [slots, heads, L, width]; plan, counts as route made them; W to eG: scratch, as in prepare
    """
    TV: tl.constexpr = (V + BV - 1) // BV
    FIRST: tl.constexpr = FLUSH and not O.current
    if PDL and not FLUSH:
        tl.extra.cuda.gdc_wait()
        # no slot both folds and does not, so the flush may run beside this
        tl.extra.cuda.gdc_launch_dependents()
    before, count, item = 0, tl.load(counts), tl.program_id(0)
    if FLUSH:
        before, count = count, tl.load(counts + 1)
    h, share = (item // SHARES) % H, item % SHARES
    # read beside the counts: a place behind the planned ones holds what an earlier step planned
    b, slot, past, base, first = planned(plan, B, tl.minimum(before + item // SHARES // H, B - 1))
    n = tl.load(lengths + b)
    if item < count * H * SHARES and n > 0:
        kq, hist = prepare(
            q, k, g, beta, ring_k, k_lo, ring_g, raw_k, raw_beta, W, total, A, F, eG, eps, scale,
            b, slot, past, base, first, n, h, m, H, HV, share == 0, K, L, BK, BS, BC, BG,
            O, O.low_k and (FIRST or O.read_low), FIRST,
        )  # fmt: skip
        asked = tl.trans(kq)
        scores = dot(hist, asked, O.score, O.interpreted)
        # what prepare has stored is read back
        tl.debug_barrier()
        row, valid = past_rows(base, past, L, BC)
        for j in range(share, HV // H * TV, SHARES):
            hv, rows = h * (HV // H) + j // TV, (j % TV) * BV + tl.arange(0, BV)
            head = slot * HV + hv
            of_history, past_decay, to_now, to_error, gain, values = prepared(
                W, total, eG, v, beta, b, hv, n, rows, m, HV, V, BS, BC, O
            )
            if FLUSH and O.raw:
                place, inside = folded_tile(head, (j % TV) * BV, V, K, BK, BV)
                S = unfolded(tl.load(C + place, mask=inside, other=0.0).to(tl.float32), BK, BV)
                S = replayed(
                    S, raw_k, raw_v, ring_g, raw_beta, slot * H + h, head, rows, past, base, eps,
                    K, V, L, BK, O,
                )  # fmt: skip
                folded = as_stored(S, C)
                tl.store(C + place, tl.reshape(folded, place.shape), mask=inside)
                S = tl.reshape(tl.permute(folded, (1, 0, 2)), (BV, BK)).to(tl.float32)
                on = dot(S, asked, O.state, O.interpreted)
            else:
                place, inside = tile_of(head, rows, tl.arange(0, BK), V, K)
                S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
                Wd = writes(ring_d, d_lo, row, valid, head, rows, V, L, O.low_d and (FIRST or O.read_low))
                Wd *= of_history[None, :]
                if FIRST:
                    folded = as_stored(S * past_decay + dot(Wd, hist, O.fold, O.interpreted), C)
                    tl.store(C + place, folded, mask=inside)
                    on = dot(folded.to(tl.float32), asked, O.state, O.interpreted)
                else:
                    on = dot(S, asked, O.state, O.interpreted) * past_decay
                    on += dot(Wd, scores, O.history, O.interpreted)
            D = finish(
                on, values, gain, to_now, to_error, A, F, b * HV + hv, head, n, first, m, rows, out, d_out, ring_d,
                d_lo, raw_v, V, L, BV, BS, O, KEEP_D,
            )  # fmt: skip
            if FLUSH and O.current:
                S = S * past_decay + dot(Wd, hist, O.fold, O.interpreted)
                lane = tl.arange(0, BS)
                d, now = tl.sum(tl.where(lane[None, :] == 0, D, 0.0), axis=1), tl.sum(tl.where(lane == 0, to_now, 0.0))
                k_hat = tl.sum(tl.where((tl.arange(0, 2 * BS) == 0)[:, None], kq, 0.0), axis=0)
                tl.store(C + place, as_stored(add_write(S * now, d[:, None], k_hat[None, :]), C), mask=inside)
    if PDL and FLUSH and item == 0:
        # whoever waits for this kernel waits for the windows that do not fold, too
        tl.extra.cuda.gdc_wait()
