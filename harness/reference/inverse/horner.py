"""Horner: X <- I - A X, n times from X = I, which is I - A + ... + (-A)^n without forming a power of A.

n - 1 products, all of them with A itself; exact for windows up to n + 1. The full series is forward substitution with
all rows at once, and its error is substitution's, about n u.
Source: tenstorrent/tt-metal#54839.
"""

from __future__ import annotations

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse.product import identity


def inverse(A: Tensor, a: Arithmetic, order: int | None = None) -> Tensor:
    """T from A [N, m, m] strictly lower, of degree `order` in A, None: m - 1. Rounded at site `inverse`."""
    r, dot, eye, last = a.sites.inverse, a.dots.inverse, identity(A), A.shape[-1] - 1
    left = dot.lhs(r(A), r)
    X = r(eye - A)
    # further rounds would repeat the last one
    for _ in range(1, last if order is None else min(order, last)):
        X = r(eye - r(dot(left, dot.rhs(X, r))))
    return X
