"""One refinement of an inverse: X <- X + X (I - L X), L = I+A, the residual in a higher precision than X has.

E = I - L X becomes E^2, beside u |E| of the correction's own product and the rounding of the residual times the
condition of L: it repairs an X with |E| < 1 and spoils any other. X is as precise as its site and the products it was
made by; where either is coarser than fp32 the residual is an fp32 (ieee) product, otherwise it is not rounded. The
product with X is one of dots.inverse.
Source: Carson & Higham, SISC 40 (2018); Higham & Mary, Acta Numerica 31 (2022).
"""

from __future__ import annotations

from torch import Tensor

from harness.arithmetic import DOTS, EXACT, Arithmetic, Rounding
from harness.precision import FORMATS
from harness.reference.inverse.product import identity, product


def refined(X: Tensor, A: Tensor, a: Arithmetic) -> Tensor:
    """X [N, m, m] after one step; A [N, m, m] strictly lower. Rounded at site `inverse`."""
    r, dot, eye = a.sites.inverse, a.dots.inverse, identity(A)
    coarse = any(_bits(x) < FORMATS["fp32"].p for x in (r, dot.left, dot.right))
    residual = DOTS["ieee" if coarse else "exact"]
    E = eye - residual(residual.lhs(eye + A), residual.rhs(X, r))
    return r(X + product(X, E, a, of=EXACT))


def _bits(x: Rounding) -> int:
    return FORMATS["fp64"].p if x.exact else x.parts * FORMATS[x.format].p
