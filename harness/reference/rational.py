"""T = (I+A)^-1, D, o and the folded S of a window in rational numbers: no rounding, for windows of a dozen tokens.

Every fp64 number is a rational, so an A in fp64 is inverted exactly as it is. Norms and exponentials are not rational:
a whole window therefore begins at k_hat, q_hat and e^g, which a test chooses dyadic, unit or not. Numerators grow with
the window, by some 53 bits a token and factor; T of 32 x 32 fp64 numbers takes a tenth of a second.

What is returned has been held to another formula: T to (I+A) T = I, a window to its recurrence, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from harness.errors import HarnessError

Matrix = list[list[Fraction]]
Numbers = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True)
class Window:
    """T [m][m]; D and o [m][V], a row per token; S [V][K] after the window."""

    T: Matrix
    D: Matrix
    o: Matrix
    S: Matrix


def matrix(name: str, x: Numbers) -> Matrix:
    """x [n, ...] of rank two as rationals, fp64 numbers exactly. Raises HarnessError naming x for NaN and infinity."""
    try:
        return [[Fraction(v) for v in row] for row in (x.tolist() if hasattr(x, "tolist") else x)]
    except (ValueError, OverflowError):
        raise HarnessError(f"{name}: holds a number that is not finite, which no rational is") from None


def inverse(A: Numbers) -> Matrix:
    """T = (I+A)^-1 of one A [m, m], whose strictly lower part is read, column by column."""
    a = matrix("A", A)
    m = len(a)
    T = [[Fraction(int(i == j)) for j in range(m)] for i in range(m)]
    for j in range(m):
        for i in range(j + 1, m):
            T[i][j] = -sum((a[i][l] * T[l][j] for l in range(j, i)), Fraction(0))
    hold_inverse(T, a)
    return T


def window(S: Numbers, k_hat: Numbers, q_hat: Numbers, v: Numbers, beta: Sequence[Any], eg: Sequence[Any]) -> Window:
    """A window of m tokens on S0 by the formulas of a chunked verify and fold, decay before the delta.

    S [V, K]; k_hat, q_hat [m, K] as they are, unit or not; v [m, V]; beta, eg [m], eg the factor e^g: all dyadic, or
    rationals
    """
    S0, k, q, v = (matrix(n, x) for n, x in (("S", S), ("k_hat", k_hat), ("q_hat", q_hat), ("v", v)))
    (b,), (e,) = matrix("beta", [beta]), matrix("eg", [eg])
    m = len(k)
    # E[i][j]: the decay over (j, i], and j = -1 for all of them
    E = [[_product(e[j + 1 : i + 1]) for j in range(-1, i + 1)] for i in range(m)]
    A = [[b[i] * E[i][j + 1] * _dot(k[i], k[j]) if j < i else Fraction(0) for j in range(m)] for i in range(m)]
    T = inverse(A)
    R = [[b[i] * (x - E[i][0] * _dot(row, k[i])) for x, row in zip(v[i], S0, strict=True)] for i in range(m)]
    D = [[sum((T[i][l] * R[l][r] for l in range(i + 1)), Fraction(0)) for r in range(len(S0))] for i in range(m)]
    o = [[_read(S0, D, E[i], k, q[i], r) for r in range(len(S0))] for i in range(m)]
    columns = [[Fraction(int(c == l)) for c in range(len(k[0]))] for l in range(len(k[0]))]
    folded = [[_read(S0, D, E[-1], k, column, r) for column in columns] for r in range(len(S0))]
    found = Window(T, D, o, folded)
    _hold(found, S0, k, q, v, b, e)
    return found


def hold_inverse(T: Matrix, a: Matrix) -> None:
    """Refuse a T for which T (I+A) is not I: from the other side, no sum is one of the substitution."""
    for i in range(len(a)):
        for j in range(i):
            if T[i][j] + sum((T[i][l] * a[l][j] for l in range(j + 1, i + 1)), Fraction(0)):
                raise HarnessError(f"T: T (I+A) is not the identity at row {i}, column {j}")


def _hold(found: Window, S: Matrix, k: Matrix, q: Matrix, v: Matrix, b: list[Fraction], e: list[Fraction]) -> None:
    """The window token by token."""
    for i in range(len(k)):
        S = [[e[i] * x for x in row] for row in S]
        d = [b[i] * (x - _dot(row, k[i])) for x, row in zip(v[i], S, strict=True)]
        S = [[x + y * z for x, z in zip(row, k[i], strict=True)] for row, y in zip(S, d, strict=True)]
        for name, x, y in (("D", d, found.D[i]), ("o", [_dot(row, q[i]) for row in S], found.o[i])):
            if x != y:
                raise HarnessError(f"{name}: token {i} of the window is not that of the recurrence")
    if S != found.S:
        raise HarnessError("S: the fold of the window is not the state of the recurrence")


def _read(S0: Matrix, D: Matrix, E: list[Fraction], k: Matrix, x: list[Fraction], r: int) -> Fraction:
    """Row r of e^G S0 + sum_j E_j d_j k_j' times x."""
    return E[0] * _dot(S0[r], x) + sum((E[j + 1] * D[j][r] * _dot(k[j], x) for j in range(len(E) - 1)), Fraction(0))


def _dot(x: Sequence[Fraction], y: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def _product(x: Sequence[Fraction]) -> Fraction:
    total = Fraction(1)
    for factor in x:
        total *= factor
    return total
