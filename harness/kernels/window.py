"""Ring verify: a window's outputs from checkpoint, history and window, in one read of the state.

ring_verify leaves the state alone, ring_flush folds the history in the same pass: the state is read once, folded,
stored and used. What no row of the state enters comes from prepare.py, and who takes which route from route.py.
Formulas: README.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import as_stored, dot, tile_of
from harness.kernels.route import planned


@triton.jit
def writes(ring_d, d_lo, row, valid, head, v, V: tl.constexpr, L: tl.constexpr, LOW: tl.constexpr):
    """d [BV, BC] of a history whose j-th record lies in row[j], zero behind it; v [BV] the rows of the state."""
    at = (head * L + row)[None, :] * V + v[:, None]
    inside = valid[None, :] & (v < V)[:, None]
    d = tl.load(ring_d + at, mask=inside, other=0.0).to(tl.float32)
    if LOW:
        d += tl.load(d_lo + at, mask=inside, other=0.0).to(tl.float32)
    return d


@triton.jit
def located(
    i, plan, lengths, B, HV, V: tl.constexpr, L: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The i-th tile of the planned rows: batch row, slot, value head and length; rows [BV] of its state; which records
    [BC] its history has and their ring rows; its first new record.
    """
    TV: tl.constexpr = (V + BV - 1) // BV
    b, slot, past, base, first = planned(plan, B, i // TV // HV)
    record = tl.arange(0, BC)
    row = (base + tl.minimum(record, tl.maximum(past - 1, 0))) & (L - 1)
    rows = (i % TV) * BV + tl.arange(0, BV)
    return b, slot, (i // TV) % HV, tl.load(lengths + b), rows, record < past, row, first


@triton.jit
def prepared(
    kq_in, W_in, total_in, eG_in, v, beta, b, hv, n, rows, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of a window: k_hat and q_hat [2 BS, BK], history weights [BC] and total decay, e^G and beta [BS], v [BV, BS]."""
    keys, lane, both = tl.arange(0, BK), tl.arange(0, BS), tl.arange(0, 2 * BS)
    window, mine = b * H + hv // (HV // H), b * HV + hv
    kq = tl.load(kq_in + (window * 2 * BS + both)[:, None] * K + keys[None, :], mask=(keys < K)[None, :], other=0.0)
    W, total = tl.load(W_in + mine * BC + tl.arange(0, BC)), tl.load(total_in + mine)
    at, live = tl.minimum(lane, tl.maximum(n - 1, 0)), lane < n
    eG, gain = tl.load(eG_in + mine * BS + lane), tl.where(live, tl.load(beta + mine * m + at), 0.0)
    values = tl.load(v + (mine * m + at)[None, :] * V + rows[:, None], mask=(rows < V)[:, None], other=0.0)
    return kq, W, total, eG, gain, values.to(tl.float32) * live.to(tl.float32)[None, :]


@triton.jit
def finish(
    on, values, gain, eG, A_in, F_in, mine, head, n, first, m, rows, out, d_out, ring_d, d_lo, raw_v,
    V: tl.constexpr, L: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, INVERSE: tl.constexpr, LOW: tl.constexpr,
    RAW: tl.constexpr, KEEP_D: tl.constexpr,
):  # fmt: skip
    """D and o [BV, BS] from on = S [k_hat q_hat]' of the state before the window, and the records that hold D."""
    on_k, on_q = tl.split(tl.reshape(on, (BV, BS, 2)))
    R = (values - eG[None, :] * on_k) * gain[None, :]
    lane = tl.arange(0, BS)
    j = lane[None, :]
    if INVERSE == "rhs_solve":
        D = R
        for t in tl.static_range(1, BS):
            row_A = tl.load(A_in + (mine * BS + t) * BS + lane)
            taken = tl.sum(D * row_A[None, :], axis=1)
            D = tl.where(j == t, D - taken[:, None], D)
    else:
        D = tl.zeros((BV, BS), tl.float32)
        for t in tl.static_range(BS):
            column = tl.sum(tl.where(j == t, R, 0.0), axis=1)
            D += column[:, None] * tl.load(A_in + (mine * BS + lane) * BS + t)[None, :]
    o = eG[None, :] * on_q
    for t in tl.static_range(BS):
        column = tl.sum(tl.where(j == t, D, 0.0), axis=1)
        o += column[:, None] * tl.load(F_in + (mine * BS + lane) * BS + t)[None, :]

    to = (mine * m + lane)[None, :] * V + rows[:, None]
    put = (lane < n)[None, :] & (rows < V)[:, None]
    tl.store(out + to, as_stored(o, out), mask=put)
    if KEEP_D:
        tl.store(d_out + to, D, mask=put)
    record_place = (head * L + ((first + lane) & (L - 1)))[None, :] * V + rows[:, None]
    high = as_stored(D, ring_d)
    tl.store(ring_d + record_place, high, mask=put)
    if LOW:
        tl.store(d_lo + record_place, as_stored(D - high.to(tl.float32), d_lo), mask=put)
    if RAW:
        tl.store(raw_v + record_place, as_stored(values, raw_v), mask=put)


@triton.jit
def ring_verify(
    v, beta, lengths, plan, counts, out, d_out, C, ring_d, d_lo, raw_v, kq_in, scores_in, W_in, total_in, A_in, F_in,
    eG_in, B, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, DOT: tl.constexpr, INVERSE: tl.constexpr, LOW: tl.constexpr, READ_LOW: tl.constexpr,
    RAW: tl.constexpr, KEEP_D: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs share out the tiles of BV rows of the windows that leave the state alone.

    v, out, d_out [B, HV, m, V]; beta [B, HV, m] fp32; C [slots, HV, V, K]; rings [slots, heads, L, width]; plan, counts
    as route made them, *_in what prepare wrote
    """
    TV: tl.constexpr = (V + BV - 1) // BV
    record, both = tl.arange(0, BC), tl.arange(0, 2 * BS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # nobody folds what this reads, so the flush may run beside it
        tl.extra.cuda.gdc_launch_dependents()
    for i in range(tl.program_id(0), tl.load(counts) * HV * TV, tl.num_programs(0)):
        b, slot, hv, n, rows, valid, row, first = located(i, plan, lengths, B, HV, V, L, BV, BC)
        head, window = slot * HV + hv, b * H + hv // (HV // H)
        place, inside = tile_of(head, rows, tl.arange(0, BK), V, K)
        S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
        kq, W, total, eG, gain, values = prepared(
            kq_in, W_in, total_in, eG_in, v, beta, b, hv, n, rows, m, H, HV, K, V, BK, BS, BC
        )
        d = writes(ring_d, d_lo, row, valid, head, rows, V, L, READ_LOW)
        scores = tl.load(scores_in + (window * BC + record)[:, None] * (2 * BS) + both[None, :])
        on = dot(S, tl.trans(kq), DOT, INTERPRETED) * total
        on += dot(d * W[None, :], scores, DOT, INTERPRETED)
        finish(
            on, values, gain, eG, A_in, F_in, b * HV + hv, head, n, first, m, rows, out, d_out, ring_d, d_lo, raw_v,
            V, L, BV, BS, INVERSE, LOW, RAW, KEEP_D,
        )  # fmt: skip


@triton.jit
def ring_flush(
    v, beta, lengths, plan, counts, out, d_out, C, ring_k, ring_d, d_lo, raw_v, kq_in, W_in, total_in, A_in, F_in,
    eG_in, B, m, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr, DOT: tl.constexpr, FOLD: tl.constexpr, INVERSE: tl.constexpr, LOW: tl.constexpr,
    RAW: tl.constexpr, KEEP_D: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The windows that fold first: S = e^G C + (W d) K_hist, stored, and the outputs on what was stored."""
    TV: tl.constexpr = (V + BV - 1) // BV
    keys, verified = tl.arange(0, BK), tl.load(counts)
    end = (verified + tl.load(counts + 1)) * HV * TV
    for i in range(verified * HV * TV + tl.program_id(0), end, tl.num_programs(0)):
        b, slot, hv, n, rows, valid, row, first = located(i, plan, lengths, B, HV, V, L, BV, BC)
        head, key_head = slot * HV + hv, slot * H + hv // (HV // H)
        place, inside = tile_of(head, rows, keys, V, K)
        inside = inside & (n > 0)
        S = tl.load(C + place, mask=inside, other=0.0).to(tl.float32)
        kq, W, total, eG, gain, values = prepared(
            kq_in, W_in, total_in, eG_in, v, beta, b, hv, n, rows, m, H, HV, K, V, BK, BS, BC
        )
        d = writes(ring_d, d_lo, row, valid, head, rows, V, L, LOW)
        from_k = ring_k + (key_head * L + row)[:, None] * K + keys[None, :]
        hist = tl.load(from_k, mask=valid[:, None] & (keys < K)[None, :], other=0.0).to(tl.float32)
        folded = as_stored(S * total + dot(d * W[None, :], hist, FOLD, INTERPRETED), C)
        tl.store(C + place, folded, mask=inside)
        on = dot(folded.to(tl.float32), tl.trans(kq), DOT, INTERPRETED)
        finish(
            on, values, gain, eG, A_in, F_in, b * HV + hv, head, n, first, m, rows, out, d_out, ring_d, d_lo, raw_v,
            V, L, BV, BS, INVERSE, LOW, RAW, KEEP_D,
        )  # fmt: skip
    if PDL:
        # whoever waits for this kernel waits for ring_verify too
        tl.extra.cuda.gdc_wait()
