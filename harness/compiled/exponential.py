"""e^x of a log decay as a scalar function, rounded or fast: the same bits as harness.exponential."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from harness.compiled.rounding import KIND, round_one
from harness.exponential import CUT, LOG2E, POINT, TABLE

FAST = -1.0  # a kind of rounding of its own, as e^x is not formed before it is rounded
C0, C1, C2 = TABLE


@njit("float64(float64, float64[::1])", cache=True, error_model="numpy", nogil=True)
def exp_one(x, c):
    """e^x rounded by one code, or as the fast exponential has it."""
    if c[KIND] != FAST:
        return round_one(math.exp(x), c)
    y = np.float64(np.float32(x) * np.float32(LOG2E))
    if np.isnan(y):
        return y
    t = np.int64(np.trunc(min(max(y, -256.0), 256.0) * 2.0**23))
    f = t & ((1 << 23) - 1)
    k, z = f >> CUT, f & ((1 << CUT) - 1)
    p = (C0[k] + C1[k] * z + C2[k] * z * z) >> POINT
    return np.float64(np.float32(np.ldexp(np.float64(p), (t >> 23) - 23)))
