"""Rationals: right by hand, badly scaled or not, and held to formulas of their own (case H4: mpmath 269)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_exact import dyadic

from harness.arithmetic import Arithmetic, Rounding
from harness.errors import HarnessError
from harness.reference import rational
from harness.reference.inverse import INVERSES

F64 = torch.float64


def test_a_badly_scaled_matrix_is_inverted() -> None:
    """Fault (H4, mpmath#269): a solver that takes entries of 1e-24 beside 1 for zero, silently or not."""
    m = 12
    A = torch.tensor([[10.0 ** (2 * j - 2 * i) if j < i else 0.0 for j in range(m)] for i in range(m)], dtype=F64)
    T = rational.inverse(A)
    for i in range(m):
        for j in range(i):
            total = sum((Fraction(A[i, l].item()) * T[l][j] for l in range(j, i)), Fraction(0))
            assert T[i][j] == -total
    assert T[m - 1][m - 2] == -Fraction(A[m - 1, m - 2].item())


def test_the_rational_inverse_by_hand() -> None:
    """Fault: the yardstick itself has a sign or an index wrong."""
    A = torch.tensor([[0, 0, 0], [0.5, 0, 0], [0.25, 0.5, 0]], dtype=F64)
    assert rational.inverse(A) == [[1, 0, 0], [Fraction(-1, 2), 1, 0], [0, Fraction(-1, 2), 1]]
    fp32 = Arithmetic(replace(Arithmetic().sites, inverse=Rounding("fp32")))
    for name, method in INVERSES.items():
        X = method.form(A[None], fp32)
        if method.solve is not None:
            X = method.solve(torch.eye(3, dtype=F64)[None], X, fp32).transpose(-1, -2)
        assert X[0].tolist() == [[1, 0, 0], [-0.5, 1, 0], [0, -0.5, 1]], name


def test_rationals_refuse_what_is_none() -> None:
    """Fault: a NaN or an infinity that ends in a traceback, or in a number."""
    S, t = dyadic(2, 0)
    for value in (np.nan, np.inf):
        with pytest.raises(HarnessError, match=r"^A: "):
            rational.inverse(torch.tensor([[0, 0], [value, 0]], dtype=F64))
        with pytest.raises(HarnessError, match=r"^beta: "):
            rational.window(S[0], t.k[:, 0], t.q[:, 0], t.v[:, 0], [1, value], [1, 1])


def test_rationals_check_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a gold standard returned without having been held to T (I+A) = I, a window to its recurrence."""
    S, t = dyadic(4, 0)
    inputs = S[0], t.k[:, 0], t.q[:, 0], t.v[:, 0], t.beta[:, 0].tolist(), [1, 1, 1, 1]
    good = rational.inverse

    def off(x: rational.Matrix) -> rational.Matrix:
        return [[y + (i == 2 and j == 0) for j, y in enumerate(row)] for i, row in enumerate(x)]

    A = torch.full((4, 4), 0.5, dtype=F64).tril(-1)
    rational.hold_inverse(good(A), A.tolist())
    with pytest.raises(HarnessError, match=r"^T: .* row 2, column 0"):
        rational.hold_inverse(off(good(A)), A.tolist())
    monkeypatch.setattr(rational, "inverse", lambda A: off(good(A)))
    with pytest.raises(HarnessError, match=r"^D: token 2"):
        rational.window(*inputs)
    monkeypatch.setattr(rational, "inverse", good)
    monkeypatch.setattr(rational, "hold_inverse", lambda T, a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rational.window(*inputs)
