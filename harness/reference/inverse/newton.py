"""Newton-Schulz: X <- X (2I - L X) with L = I+A, from X = I - A; n rounds are the series up to A^(2^(n+1) - 1).

Two products a round, ceil(log2 m) - 1 rounds for a window of m. Each round corrects the rounding errors of those before
it, but only once |I - L X| < 1: the first residual is A^2, so coherent keys lose as many bits as doubling does.
Source: vllm-project/vllm#53864 (bf16, three rounds).
"""

from __future__ import annotations

from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.inverse.product import identity, product


def inverse(A: Tensor, a: Arithmetic, rounds: int | None = None) -> Tensor:
    """T from A [N, m, m] strictly lower after `rounds`, None: as many as reach A^(m-1). Rounded at site `inverse`."""
    r, eye = a.sites.inverse, identity(A)
    L, X = r(eye + A), r(eye - A)
    for _ in range(max(0, (A.shape[-1] - 1).bit_length() - 1) if rounds is None else rounds):
        X = product(X, r(2 * eye - product(L, X, a)), a)
    return X
