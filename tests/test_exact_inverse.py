"""T to a stated number of bits: by hand, against rationals, and refused where the bits are not there."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from harness.errors import ConfigError, HarnessError
from harness.reference import exact_inverse, rational


def lower(m: int, scale: float, seed: int = 0) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).uniform(-scale, scale, (m, m)), -1)


def test_by_hand() -> None:
    """Faults: a sign, an index or a scale wrong; the low half lost; a series one term short or long."""
    A = np.array([[0, 0, 0], [0.5, 0, 0], [0.25, 0.5, 0]])
    for order in (None, 2, 7):
        high, low = exact_inverse.inverse(A, 60, order).halves()
        assert high.tolist() == [[1, 0, 0], [-0.5, 1, 0], [0, -0.5, 1]] and not low.any()
    assert exact_inverse.inverse(A, 60, 1).halves()[0].tolist() == [[1, 0, 0], [-0.5, 1, 0], [-0.25, -0.5, 1]]
    # (1 - 2^-50)^2 takes more than one double
    A[1, 0] = A[2, 1] = 1 - 2.0**-50
    high, low = exact_inverse.inverse(A, 120).halves()
    assert (high[2][0], low[2][0]) == (0.75 - 2.0**-49, 2.0**-100)


@pytest.mark.parametrize("m", [1, 2, 9, 24])
def test_it_is_the_rational_one(m: int) -> None:
    """Fault: a unit of 2^-bits that is another one: entries near zero are off by all of it."""
    A = lower(m, 2.0)
    found, T = exact_inverse.inverse(torch.from_numpy(A), 200), rational.inverse(torch.from_numpy(A))
    largest = max(abs(x) for row in T for x in row)
    for i in range(m):
        for j in range(m):
            assert abs(Fraction(int(found.T[i, j]), 1 << found.bits) - T[i][j]) <= largest * Fraction(1, 1 << 200)


SCALES = 10.0 ** (2 * np.arange(12))
SCALED = {
    # determinants and pivots measured by the largest entry are zero here; every one of these has determinant 1
    "falling": lower(12, 1.0) / SCALES[:, None] * SCALES,
    "rising": lower(12, 1.0) * SCALES[:, None] / SCALES,
    "two, rising": np.array([[0, 0], [1e30, 0]]),
    "two, falling": np.array([[0, 0], [1e-30, 0]]),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_matrix_that_fp64_calls_singular_is_inverted(name: str) -> None:
    """Fault (H4, mpmath#269): a solver that takes what is small beside the norm for zero, or raises. Entries of 1e-22
    beside 1 are 73 bits down: asked for 60 of theirs, they are there."""
    A = SCALED[name]
    found, T = exact_inverse.inverse(A, 60 + 100), rational.inverse(A)
    for i, j in zip(*np.nonzero(A), strict=True):
        assert abs(Fraction(int(found.T[i, j]), 1 << found.bits) - T[i][j]) <= abs(T[i][j]) * Fraction(1, 1 << 60)


def test_it_checks_itself_by_another_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (H4): a check by more digits of the same formula, which any wrong one passes."""
    A, right = lower(9, 1.0), exact_inverse._formed

    def wrong(a: np.ndarray, w: int, order: int | None) -> np.ndarray:
        T = right(a, w, order)
        T[7, 2] += T[7, 3]
        return T

    monkeypatch.setattr(exact_inverse, "_formed", wrong)
    with pytest.raises(HarnessError, match=r"^A: T \(I\+A\) is not the identity to 60 bits"):
        exact_inverse.inverse(A, 60)


def test_bits_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: the second precision not compared, or compared by another scale; NaN turned into a number."""
    A = lower(24, 1.0)
    with monkeypatch.context() as patch:
        # rows of 24 products lose four or five bits
        patch.setattr(exact_inverse, "GUARD", 0)
        with pytest.raises(HarnessError, match=r"^A: its inverse does not have 60 bits"):
            exact_inverse.inverse(A, 60)
    assert exact_inverse.inverse(A, 60).bits >= 60
    for bad in (np.full((2, 2), np.nan), np.eye(2), np.array([[0, np.inf], [0, 0]])):
        with pytest.raises(HarnessError, match=r"^A: not finite, or not strictly lower"):
            exact_inverse.inverse(bad, 20)
    with pytest.raises(ConfigError, match=r"^bits: 0 "):
        exact_inverse.inverse(A, 0)
