"""X Y inside an inverse: operands and sum as dots.inverse says, the result stored at site `inverse`."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Rounding


def product(X: Tensor, Y: Tensor, a: Arithmetic, of: Rounding | None = None) -> Tensor:
    """X Y [N, n, n'] rounded at site `inverse`. X lies on that site's grid, and Y too unless `of` says on which."""
    dot, r = a.dots.inverse, a.sites.inverse
    return r(dot(dot.lhs(X, r), dot.rhs(Y, r if of is None else of)))


def identity(A: Tensor) -> Tensor:
    """I [m, m] beside A [N, m, m]."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
