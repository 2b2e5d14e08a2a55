"""Enclosures of T: nothing exact lies outside, and nothing of fp64 fits between. Needs python-flint."""

from __future__ import annotations

import builtins
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import draw, windows

from harness.arithmetic import Arithmetic, Conventions
from harness.errors import ConfigError, HarnessError
from harness.reference import balls, exact, rational
from harness.tokens import Shape

U = 2.0**-53
FORMS = [{}, {"eps_at": "mean"}, {"eps_at": "outside"}, {"decay": "after"}]


@pytest.fixture
def flint() -> object:
    return pytest.importorskip("flint", reason="python-flint is not installed: no ball arithmetic")


def window(m: int, K: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k [m, K], g, beta [m] with resets among the gates."""
    t = draw(np.random.default_rng(m), m, shape=Shape(1, 1, 1, K), resets=(-160.0, -np.inf))
    # keys that share a direction, so that A has entries of size 1
    return t.k[:, 0] + 2.0, t.g[:, 0], t.beta[:, 0]


def narrow(low: np.ndarray, high: np.ndarray) -> bool:
    """Whether nothing but a last place lies between, or a radius of the 2^-60 that is promised."""
    return bool((high - low <= np.spacing(abs(low)) + 2.0**-59).all())


@pytest.mark.parametrize("keys", FORMS, ids=str)
def test_what_substitution_finds_lies_beside_the_enclosure(keys: dict[str, object], flint: object) -> None:
    """Faults: eps or the decay at another place than the oracle has it, a row for a column, a reset that is no 0."""
    (k, g, beta), c = window(40), Conventions(**keys)
    low, high = balls.inverse(k, g, beta, 120, c)
    assert (low <= high).all() and narrow(low, high)
    tokens = draw(np.random.default_rng(0), 40, shape=Shape(1, 1, 1, 16))
    tokens = replace(tokens, k=k[:, None], g=g[:, None], beta=beta[:, None])
    ready = windows(tokens.map(lambda x: x[None, None]), [[40]], Shape(1, 1, 1, 16))
    T = ready.formed(Arithmetic(conventions=c), "substitution")[0, 0, 0].numpy()
    # m sums of m + K products of numbers of size 1 and T up to 2
    assert np.abs(T - low).max() <= 4 * 40 * (40 + 16) * U
    assert np.abs(T - np.eye(40)).max() > 0.1


def test_the_rational_inverse_lies_within(flint: object) -> None:
    """Faults: a radius that does not cover what was rounded, ends rounded to the nearest number. Norms are rational:
    sum k^2 + eps is a square."""
    rng, m = np.random.default_rng(1), 9
    k = rng.permuted(np.tile([0.5, 0.5, 0.25, 0.25], (m, 1)), axis=-1)
    g, beta = np.where(np.arange(m) == 4, -np.inf, 0.0), rng.uniform(0, 2, m)
    for bits in (90, 200):
        low, high = balls.inverse(*map(torch.from_numpy, (k, g, beta)), bits, Conventions(eps=0.375))
        A = [
            [Fraction(beta[i]) * (0 if j < 4 <= i else 1) * sum(map(Fraction, k[i] * k[j])) for j in range(m)]
            for i in range(m)
        ]
        for i, row in enumerate(rational.inverse(A)):
            assert all(Fraction(low[i, j]) <= x <= Fraction(high[i, j]) for j, x in enumerate(row)), i


def test_a_decay_of_the_other_exact_reference_lies_within(flint: object) -> None:
    """Fault: an exponential that two references of the library share and have wrong."""
    g = torch.tensor([0.0, -0.1, -37.25], dtype=torch.float64)
    # two orthogonal keys and a third that is the first: T_20 = -beta e^{g_1+g_2}, but for eps
    k = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0]], dtype=torch.float64)
    low, high = balls.inverse(k, g, torch.ones(3, dtype=torch.float64), 120, Conventions(eps=0.0))
    e = Fraction(exact.decay(-0.1, 200) * exact.decay(-37.25, 200), 2**400)
    assert Fraction(low[2, 0]) <= -e <= Fraction(high[2, 0])


def test_a_window_of_a_hundred_tokens(flint: object) -> None:
    """Fault: balls that blow up with the window, so that an enclosure encloses everything."""
    low, high = balls.inverse(*window(128, 32), 160)
    assert narrow(low, high)


def test_too_few_bits_are_refused(flint: object) -> None:
    """Fault (H4): an enclosure wider than fp64 returned as a reference."""
    with pytest.raises(HarnessError, match=r"^bits: 53 do not enclose T at row 1"):
        balls.inverse(*window(40), 53)


def test_numbers_that_are_none_are_refused(flint: object) -> None:
    """Fault: NaN in, NaN out, and every comparison with it false."""
    for at, name, value in ((0, "k", np.nan), (1, "g", np.nan), (1, "g", 0.5), (2, "beta", np.inf)):
        inputs = [x.clone() for x in window(5)]
        inputs[at].view(-1)[3] = value
        with pytest.raises(HarnessError, match=f"^{name}: "):
            balls.inverse(*inputs, 120)


def test_without_flint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a traceback where an optional package is missing."""
    real = builtins.__import__

    def missing(name: str, *rest: object) -> object:
        if name == "flint":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"^balls: python-flint is not installed"):
        balls.inverse(*window(3), 120)


def test_an_inverse_of_another_matrix_is_refused(flint: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an enclosure returned unseen. Here T is that of a matrix off by 2^-70, which its radius does not cover."""
    right, calls = balls._one_plus_A, []

    def off(*given: object) -> object:
        found = right(*given)
        calls.append(found)
        if len(calls) == 2:
            found[3, 0] += 2.0**-70
        return found

    monkeypatch.setattr(balls, "_one_plus_A", off)
    with pytest.raises(HarnessError, match=r"^bits: 120 do not enclose T at row 3, column 0"):
        balls.inverse(*window(6), 120)
