"""Condition numbers, residuals and window operators against explicit matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import SHAPE, close, draw, unit, windows

from harness import pool
from harness.arithmetic import Arithmetic, Conventions, Rounding, Sites
from harness.compiled import inspect
from harness.conditioning import condition_numbers, conditioning, has_operator, inner, residual, window_operator
from harness.reference import inverse
from harness.tokens import Shape, Tokens
from harness.window import Windows

EXACT = Arithmetic()


def coherent(tokens: Tokens, share: float, beta: float, g: float) -> Tokens:
    """The same tokens with keys drawn to the first one's direction, and fixed gates."""
    k = share * tokens.k[..., :1, :, :] + (1 - share) * tokens.k
    return replace(tokens, k=k, g=torch.full_like(tokens.g, g), beta=torch.full_like(tokens.beta, beta))


CASES = {
    "random": lambda t: t,
    "coherent": lambda t: coherent(t, 0.8, 0.9, -1e-3),
    "one key": lambda t: coherent(t, 1.0, 0.9997, -1e-5),
    "beta two": lambda t: coherent(t, 0.9, 1.97, -1e-2),
    "fast decay": lambda t: coherent(t, 0.8, 0.9, -4.0),
}


def matrix(tokens: Tokens, w: int, b: int, head: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A [m, m], keys [m, K], beta and cumulative g [m] of one window, from the formula, entry by entry."""
    k = unit(tokens.k[w, b, :m, head // SHAPE.group].numpy(), Conventions())
    beta, g = tokens.beta[w, b, :m, head].numpy(), tokens.g[w, b, :m, head].numpy()
    A = np.zeros((m, m))
    for i in range(m):
        for j in range(i):
            A[i, j] = beta[i] * np.exp(g[j + 1 : i + 1].sum()) * (k[i] @ k[j])
    return A, k, beta, np.cumsum(g)


def table(kind: str, m: int) -> tuple[Tokens, np.ndarray, Windows]:
    lengths = np.array([[m, m], [1, 0], [m - 1, m]])
    tokens = CASES[kind](draw(np.random.default_rng(m), 3, 2, m))
    return tokens, lengths, windows(tokens, lengths)


# of three tokens with beta near 2 the last power is the largest
@pytest.mark.parametrize("m", [2, 3, 4, 9])
@pytest.mark.parametrize("kind", CASES)
def test_condition_numbers_are_numpys(kind: str, m: int) -> None:
    """Faults: a norm of rows for one of columns, padding that raises a number, a power of A left out."""
    tokens, lengths, ready = table(kind, m)
    found = conditioning(ready)
    for w, b in np.argwhere(lengths):
        for h in range(SHAPE.HV):
            n = lengths[w, b]
            A, _, _, G = matrix(tokens, w, b, h, n)
            L = np.eye(n) + A
            T = np.linalg.inv(L)
            powers = [np.linalg.matrix_power(np.abs(A), p).max() for p in range(1, max(n, 2))]
            skeel = np.linalg.norm(np.abs(T) @ np.abs(L), np.inf)
            span = max(0, *G) - min(0, *G)
            expected = [np.linalg.cond(L, 2), np.linalg.cond(L, np.inf), skeel, max(powers), span]
            # cond_2 by singular values loses cond * u, and cond stays below 1e3 here
            np.testing.assert_allclose(found[w, b, h], expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", inverse.INVERSES)
def test_the_residual_is_that_of_the_designs_own_matrices(name: str) -> None:
    """Faults: the residual of an exact A; the diagonal, which is 1, or the upper part counted."""
    if not inverse.INVERSES[name].explicit:
        return
    _, _, ready = table("coherent", 9)
    low = Arithmetic(Sites(gram=Rounding("bf16"), inverse=Rounding("bf16")))
    A, T = ready.scores(low)[0].numpy(), ready.formed(low, name).numpy()
    expected = np.abs(np.tril((np.eye(9) + A) @ T - np.eye(9), -1)).max((-1, -2))
    close("residual", residual(ready, low, name), expected, 1e-15)
    assert expected.max() > 1e-4
    # a truncated series is seen for what it is
    assert (residual(ready, EXACT, name).max().item() < 1e-13) is (inverse.INVERSES[name].order >= 8)


def operator(A: np.ndarray, k: np.ndarray, beta: np.ndarray, G: np.ndarray, T: np.ndarray) -> np.ndarray:
    """M [K, K] with S0 M the part of the window's last state that comes from S0: unit vectors sent through it."""
    m, K = k.shape
    M = np.zeros((K, K))
    for row in range(K):
        S0 = np.eye(K)[row]
        R = np.array([-beta[i] * np.exp(G[i]) * (S0 @ k[i]) for i in range(m)])
        D = T @ R
        M[row] = np.exp(G[-1]) * S0 + sum(np.exp(G[-1] - G[j]) * D[j] * k[j] for j in range(m))
    return M


@pytest.mark.parametrize("shape", [SHAPE, Shape(2, 6, 3, 5)], ids=["K > m", "K < m"])
@pytest.mark.parametrize("kind", CASES)
def test_the_window_operator_is_the_matrix(kind: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: T for its transpose, a decay to the wrong end, the part outside the keys' span, which only decays."""
    m = 8
    tokens = CASES[kind](draw(np.random.default_rng(m), 1, 2, m, shape=shape))
    for terms in (m, 3):

        def truncated(A: torch.Tensor, a: Arithmetic, terms: int = terms) -> torch.Tensor:
            eye = torch.eye(m, dtype=A.dtype)
            return sum((torch.linalg.matrix_power(-A, p) for p in range(terms)), torch.zeros_like(eye))

        monkeypatch.setitem(inverse.INVERSES, "test", inverse.Inverse(truncated))
        norm, radius = window_operator(windows(tokens, [[m, m]], shape), EXACT, "test")
        for b in range(2):
            for h in range(shape.HV):
                A, k, beta, G = matrix(tokens, 0, b, h, m)
                T = sum(np.linalg.matrix_power(-A, p) for p in range(terms))
                M = operator(A, k, beta, G, T)
                # the square root of a Gram matrix that is singular for one key: half the digits
                close("norm", norm[0, b, h], np.linalg.norm(M, 2), 1e-6)
                close("radius", radius[0, b, h], np.abs(np.linalg.eigvals(M)).max(), 1e-6)
                if terms == m:
                    assert norm[0, b, h] <= np.exp(G[-1]) + 1e-6
                    assert radius[0, b, h] <= norm[0, b, h] + 1e-6


def test_a_truncated_series_amplifies() -> None:
    """Fault: an inverse that is not one reported as a contraction: on one key, 3 terms of 8 expand the state."""
    tokens = CASES["one key"](draw(np.random.default_rng(8), 1, 1, 8))
    A, k, beta, G = matrix(tokens, 0, 0, 0, 8)
    M = operator(A, k, beta, G, sum(np.linalg.matrix_power(-A, p) for p in range(3)))
    assert np.abs(np.linalg.eigvals(M)).max() > 10
    exact = operator(A, k, beta, G, np.linalg.inv(np.eye(8) + A))
    assert np.linalg.norm(exact, 2) <= 1 + 1e-12


def test_padding_is_no_part_of_the_operator() -> None:
    """Fault: a window of 3 in a batch of 8 measured as one of 8."""
    tokens = draw(np.random.default_rng(9), 1, 1, 8)
    short = window_operator(windows(tokens.map(lambda x: x[:, :, :3]), [[3]]), EXACT, "substitution")
    long = window_operator(windows(tokens, [[3]]), EXACT, "substitution")
    for x, y in zip(short, long, strict=True):
        close("operator", x, y, 1e-7)


def test_an_inverse_that_is_not_finite_has_no_norm() -> None:
    """Fault: NaN turned into 0 on the way to an eigenvalue routine and reported as a contraction."""
    tokens = draw(np.random.default_rng(10), 1, 2, 4)
    tokens.beta[0, 1, 2, 3] = float("nan")
    norm, radius = window_operator(Windows(tokens, np.array([[4, 4]]), SHAPE), EXACT, "substitution")
    for x in (norm, radius):
        assert torch.isnan(x).nonzero().tolist() == [[0, 1, 3]]


def test_designs_without_an_inverse_have_no_operator() -> None:
    """Fault: a column for a closed loop, whose state passes through no inverse."""
    assert has_operator("window", "product", "substitution") and has_operator("window", "product", "doubling")
    assert not has_operator("window", "replay", "substitution")
    assert not has_operator("tokens", "snapshot", "substitution")
    assert not has_operator("window", "product", "rhs_solve")


@pytest.mark.parametrize("m", [1, 2, 4, 9])
@pytest.mark.parametrize("kind", CASES)
def test_matrix_by_matrix_is_batch_by_batch(kind: str, m: int) -> None:
    """Faults: rotations that stop early or turn the wrong way, a root of the wrong triangle, a radius left open."""
    _, _, ready = table(kind, m)
    found = conditioning(ready)
    # both lose cond_2 u
    np.testing.assert_allclose(found, condition_numbers(ready), rtol=1e-13 * found[..., 0].max(), atol=1e-14)
    low = Arithmetic(Sites(gram=Rounding("bf16"), inverse=Rounding("bf16")))
    for name in inverse.INVERSES:
        for a in (EXACT, low) if inverse.INVERSES[name].explicit else ():
            values = inner(ready, a, name, True)
            parts = [residual(ready, a, name), *window_operator(ready, a, name)]
            close("residual", values[..., 0], parts[0], 1e-15)
            # a singular Gram matrix costs half the digits, as above
            close("norm", values[..., 1], parts[1], 1e-6)
            close("radius", values[..., 2], parts[2], 1e-6)
            assert (inner(ready, a, name, False) == values[..., :1]).all()


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("kind", CASES)
def test_threads_find_what_one_finds(kind: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a share of the windows put in another's place or left out, a radius left open beside its own decay, the
    keys of another slot; a result handed out before it is there."""
    monkeypatch.setattr(pool, "cores", lambda: 4)
    ready, single = table(kind, m)[2], table(kind, m)[2]
    low = Arithmetic(Sites(gram=Rounding("bf16"), inverse=Rounding("bf16")))
    # products are formed as a device forms them, and not in the compiled order
    np.testing.assert_allclose(
        inspect.conditioning(ready, EXACT, threads=True)(), conditioning(single), rtol=1e-11, atol=1e-14
    )
    for operator in (True, False):
        found = inspect.inner(ready, low, "doubling", operator, threads=True)()
        # a singular Gram matrix costs half the digits
        close("inner", found, inner(single, low, "doubling", operator), 1e-6)


def test_a_matrix_that_is_no_number_says_so() -> None:
    """Faults: NaN passed over by a maximum, or a rotation that never ends on it."""
    _, _, ready = table("random", 4)
    ready.g[0, 0, 1, 2], ready.beta[0, 1, 0, 1] = -torch.inf, torch.nan
    values, numbers = inner(ready, Arithmetic(Sites(decay=Rounding("fp32"))), "substitution", True), conditioning(ready)
    assert np.isnan(values[0, 0, 1]).all() and np.isnan(values[0, 1, 0]).all() and np.isfinite(values[1, 0]).all()
    assert np.isnan(numbers[0, 1, 0, 0]) and np.isfinite(numbers[0, 0, 1, :4]).all()
