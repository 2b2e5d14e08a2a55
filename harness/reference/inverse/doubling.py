"""Doubling: (I+A)^-1 = (I-A)(I+A^2)(I+A^4)..., exact once the exponent reaches the window because A^m = 0.

ceil(log2 m) rounds of two products each. Error about u * max|A^p|: fine for a window of 4 to 8, meaningless for
coherent keys from 32 on, where powers of A reach 1e8 and must cancel.
Source: arXiv 2505.19488; failures in tenstorrent/tt-metal#54813, MoonshotAI/FlashKDA#34.
"""

from __future__ import annotations

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse.product import identity, product


def inverse(A: Tensor, a: Arithmetic) -> Tensor:
    """T from A [N, m, m] strictly lower; products as dots.inverse, each stored at site `inverse`."""
    r = a.sites.inverse
    power, T, reached = r(A), r(identity(A) - A), 2
    while reached < A.shape[-1]:
        power = product(power, power, a)
        T = r(T + product(T, power, a))
        reached *= 2
    return T
