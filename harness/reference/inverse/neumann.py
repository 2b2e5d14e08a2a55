"""Neumann series: I - A + A^2 - ... + (-A)^n, each power formed from the one before; exact for windows up to n + 1.

n - 1 products. Error about u * max|A^p| and, for a longer window, the powers left out. A series cut short is not the
inverse of anything near I+A: it can make the window operator expand.
Source: truncated series of arXiv 2606.06034; the expansion that sgl-project/sglang#28695 speaks of.
"""

from __future__ import annotations

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse.product import identity


def inverse(A: Tensor, a: Arithmetic, order: int | None = None) -> Tensor:
    """T from A [N, m, m] strictly lower, by powers up to `order`, None: m - 1. Rounded at site `inverse`."""
    r, dot, last = a.sites.inverse, a.dots.inverse, A.shape[-1] - 1
    power = r(-A)
    right = dot.rhs(power, r)
    T = r(identity(A) - A)
    # powers from m on are zero, whatever the arithmetic
    for _ in range(1, last if order is None else min(order, last)):
        power = r(dot(dot.lhs(power, r), right))
        T = r(T + power)
    return T
