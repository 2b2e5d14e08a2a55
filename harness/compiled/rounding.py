"""precision.round_to as a scalar function, and roundings as rows of numbers that a kernel can read."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import float64, int64, njit
from numba.extending import intrinsic

from harness.arithmetic import Rounding
from harness.precision import FORMATS

EXACT, FP32, NEAREST, ZERO = range(4)
INF, SATURATE, NAN = range(3)
KIND, P, EMIN, EMAX, MAX, OVERFLOW = range(6)
MAGNITUDE = 0x7FFFFFFFFFFFFFFF  # the pattern of a number without its sign: it orders as numbers do


def code(rounding: Rounding, of: Rounding | None = None) -> np.ndarray:
    """[6] what round_one reads; a rounding that keeps what `of` yields is no rounding. One part, not stochastic."""
    row = np.zeros(6)
    if rounding.exact or (of is not None and rounding.keeps(of)):
        return row
    f = FORMATS[rounding.format]
    # fp32 to nearest is the host's own cast
    kind = FP32 if rounding.native else {"nearest": NEAREST, "zero": ZERO}[rounding.mode]
    row[:] = (kind, f.p, f.emin, f.emax, f.max, ("inf", "saturate", "nan").index(f.overflow))
    return row


@intrinsic
def bits(typing, x):
    """The pattern of an fp64 number."""
    return int64(float64), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(64))


@intrinsic
def number(typing, i):
    """The fp64 number of a pattern."""
    return float64(int64), lambda context, builder, sig, args: builder.bitcast(args[0], ir.DoubleType())


@njit("float64(float64, float64[::1])", cache=True, error_model="numpy", nogil=True)
def round_one(x, c):
    """One number by one code; the arithmetic of precision.round_to."""
    kind = c[KIND]
    if kind == EXACT:
        return x
    if kind == FP32:
        return np.float64(np.float32(x))
    quantum = number(bits(x) & 0x7FF0000000000000)
    quantum = min(max(quantum, 2.0 ** c[EMIN]), 2.0**1000) * 2.0 ** (1.0 - c[P])
    y = x / quantum
    if kind == NEAREST:
        y = np.rint(y) * quantum
        if abs(y) > c[MAX]:
            if c[OVERFLOW] == INF:
                return np.copysign(np.inf, y)
            return np.copysign(c[MAX], y) if c[OVERFLOW] == SATURATE else np.nan
        return y
    if np.isinf(x):
        return x if c[OVERFLOW] == INF else np.copysign(c[MAX], x) if c[OVERFLOW] == SATURATE else np.nan
    y = np.trunc(y) * quantum
    return np.copysign(c[MAX], y) if abs(y) > c[MAX] else y


@njit("void(float64[:, ::1], int64, int64, float64[::1])", cache=True, error_model="numpy", nogil=True)
def round_rows(x, first, last, c):
    """Rows first..last - 1 of x, in place."""
    kind, n = c[KIND], x.shape[1]
    if kind == EXACT:
        return
    if kind == FP32:
        for i in range(first, last):
            for k in range(n):
                x[i, k] = np.float64(np.float32(x[i, k]))
        return
    low, unit = 2.0 ** c[EMIN], 2.0 ** (1.0 - c[P])
    largest, smallest = 0, MAGNITUDE
    for i in range(first, last):
        for k in range(n):
            m = bits(x[i, k]) & MAGNITUDE
            largest = max(largest, m)
            # zero is no small number: it wraps around
            smallest = min(smallest, (m - 1) & MAGNITUDE)
    if largest > bits(c[MAX]):
        # one may overflow, or is not finite: one at a time
        for i in range(first, last):
            for k in range(n):
                x[i, k] = round_one(x[i, k], c)
    elif smallest < bits(low) - 1:
        for i in range(first, last):
            for k in range(n):
                quantum = max(number(bits(x[i, k]) & 0x7FF0000000000000), low) * unit
                # the reciprocal of a power of two, by its pattern: a division would be the cost of the loop
                y = x[i, k] * number(0x7FE0000000000000 - bits(quantum))
                x[i, k] = (np.rint(y) if kind == NEAREST else np.trunc(y)) * quantum
    else:
        # normal numbers lose the last bits of their pattern, and carry into its exponent
        drop = 53 - int(c[P])
        keep, half = ~((1 << drop) - 1), (1 << (drop - 1)) - 1
        if kind == NEAREST:
            for i in range(first, last):
                for k in range(n):
                    m = bits(x[i, k])
                    x[i, k] = number((m + half + ((m >> drop) & 1)) & keep)
        else:
            for i in range(first, last):
                for k in range(n):
                    x[i, k] = number(bits(x[i, k]) & keep)


@njit("void(float64[:, ::1], float64[:, ::1], float64[::1])", cache=True, error_model="numpy", nogil=True)
def copy_rounded(x, out, c):
    """x rounded, into the first rows of out."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[i, k] = x[i, k]
    round_rows(out, 0, x.shape[0], c)
