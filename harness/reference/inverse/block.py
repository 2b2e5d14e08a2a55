"""Blocks: (I+A)^-1 = [X11 0; -X22 A21 X11 X22], down to diagonal blocks of n rows, those by forward substitution.

n = 1 is recursion alone, with all the work in products; n = 16 is what most chunked kernels do. Error of T in
practice that of substitution, with u of the products: no power of A is formed.
Source: fla-org/flash-linear-attention fla/ops/utils/solve_tril.py (n = 16); Bunch & Hopcroft, Math. Comp. 28 (1974).
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse import substitution
from harness.reference.inverse.product import product


def inverse(A: Tensor, a: Arithmetic, size: int = 1) -> Tensor:
    """T from A [N, m, m] strictly lower; blocks begin at multiples of `size`. Rounded at site `inverse`."""
    m = A.shape[-1]
    if m <= size:
        return substitution.inverse(A, a)
    half = size
    while 2 * half < m:
        half *= 2
    upper, lower = inverse(A[:, :half, :half], a, size), inverse(A[:, half:, half:], a, size)
    corner = product(product(lower, a.sites.inverse(A[:, half:, :half]), a), upper, a)
    above = torch.zeros_like(A[:, :half, half:])
    return torch.cat((torch.cat((upper, above), -1), torch.cat((-corner, lower), -1)), -2)
