"""Products of small square matrices on CUDA cores, and the inverse that is made of them.

Tensor cores would want 16 rows, and a window has 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import operand


@triton.jit
def product(x, y, BS: tl.constexpr, PRECISION: tl.constexpr):
    """x y of [G, BS, BS]; operands as PRECISION reads them, sums in fp32."""
    x, y = operand(x, PRECISION), operand(y, PRECISION, True)
    i = tl.arange(0, BS)
    z = tl.zeros_like(x)
    for t in tl.static_range(BS):
        column = tl.sum(tl.where(i[None, None, :] == t, x, 0.0), axis=2)
        row = tl.sum(tl.where(i[None, :, None] == t, y, 0.0), axis=1)
        z += column[:, :, None] * row[:, None, :]
    return z


@triton.jit
def doubling(A, BS: tl.constexpr, PRECISION: tl.constexpr):
    """(I+A)^-1 = (I-A)(I+A^2)(I+A^4)... of A [G, BS, BS] strictly lower, until the power is zero."""
    i = tl.arange(0, BS)
    T = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) - A
    power = A
    for reached in tl.static_range(2, BS):
        if reached & (reached - 1) == 0:
            power = product(power, power, BS, PRECISION)
            T += product(T, power, BS, PRECISION)
    return T
