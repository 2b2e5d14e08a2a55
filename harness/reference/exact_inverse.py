"""T = (I+A)^-1, or its series up to A^p, to a stated number of bits: integers in units of 2^-w, every product a shift.

Row by row, T_i = e_i - sum_{l<i} A_il T_l, or Horner's X <- I - A X. A row loses m units of the last place, and later
rows multiply that, so w has guard bits; and as in harness.reference.exact all is computed a second time with MORE bits
and refused where the two differ. A fault that both have is seen by what is left of T (I+A) - I, none of whose sums is
one of the substitution. For windows of a dozen tokens harness.reference.rational needs no bits at all, and with
python-flint harness.reference.balls has an enclosure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from harness.errors import ConfigError, HarnessError
from harness.reference.exact import MORE, fixed

GUARD = 64  # bits beyond those asked for


@dataclass(frozen=True)
class ExactInverse:
    """T [m, m]: Python integers, in units of 2^-bits."""

    T: np.ndarray
    bits: int

    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """T as the sum of two fp64 numbers, the nearest one and the rest: fp64 errors of an fp64 T are seen whole."""
        high = np.asarray(self.T / (1 << self.bits), np.float64)
        return high, np.asarray((self.T - fixed(high, self.bits)) / (1 << self.bits), np.float64)


def inverse(A: np.ndarray | Tensor, bits: int, order: int | None = None) -> ExactInverse:
    """T of one A [m, m], strictly lower, to 2^-bits of its largest entry; order: sum_{p <= order} (-A)^p instead.

    Raises ConfigError for a wrong count of bits, and HarnessError for an A that is not finite or not strictly lower,
    where two precisions differ by more than 2^-bits, or where T is no inverse to that.
    """
    a = np.asarray(A, np.float64)
    if bits < 1:
        raise ConfigError(f"bits: {bits} is below 1")
    if not np.isfinite(a).all() or np.triu(a).any():
        raise HarnessError("A: not finite, or not strictly lower")
    first, second = (_formed(a, bits + GUARD + extra, order) for extra in (0, MORE))
    apart, largest = np.abs((first << MORE) - second).max(), np.abs(second).max()
    if apart << bits > largest:
        raise HarnessError(f"A: its inverse does not have {bits} bits: two precisions differ by {apart} of {largest}")
    found = ExactInverse(second, bits + GUARD + MORE)
    if order is None:
        _hold(found, a, bits)
    return found


def _hold(found: ExactInverse, a: np.ndarray, bits: int) -> None:
    """Refuse a T for which T (I+A) is not I to what T is known to, at twice its digits: no product is rounded."""
    w, eye = found.bits, fixed(np.eye(len(a)), found.bits)
    I_A = eye + fixed(a, w)
    left = np.abs(found.T @ I_A - (eye << w)).max()
    # an entry of T may be off by 2^-bits max|T|
    if left << bits > np.abs(found.T).max() * np.abs(I_A).sum(0).max():
        raise HarnessError(f"A: T (I+A) is not the identity to {bits} bits: {left} units of 2^-{2 * w} are left")


def _formed(a: np.ndarray, w: int, order: int | None) -> np.ndarray:
    n, m = fixed(a, w), len(a)
    eye = fixed(np.eye(m), w)
    if order is None or order >= m - 1:
        T = eye.copy()
        for i in range(1, m):
            T[i, :i] = -(n[i, :i] @ T[:i, :i]) >> w
        return T
    X = eye
    for _ in range(order):
        X = eye - (n @ X >> w)
    return X
