"""Every inverse on every named hard input against T in rationals, with gates of c n u and c u max|A|^p.

Scores look at the strictly lower part alone: beside a unit diagonal a lost T may seem right to three digits.
"""

from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot, Dots, Rounding, Sites
from harness.reference import rational
from harness.reference.inverse import INVERSES

F64 = torch.float64
WINDOWS = (2, 4, 8, 16, 32)
U64, U32 = 2.0**-53, 2.0**-24
IN_FP32 = Sites(inverse=Rounding.parse("inverse", "fp32"))
FP32 = Arithmetic(IN_FP32, Dots(inverse=Dot.parse("inverse", "ieee")))
TF32 = Arithmetic(IN_FP32, Dots(inverse=Dot.parse("inverse", "tf32")))
ROUNDED = {"exact": Arithmetic(), "fp32": FP32, "tf32": TF32}
# solved row by row, error independent of the powers of A; any other method is gated by those
DIRECT = ("substitution", "rhs_solve")

# keys, beta, g: none of them dyadic, since integer arithmetic would hide what cancels
CASES = {
    "identical": ("identical", 0.835, -1e-3),
    "near_collinear": ("cosine .99", 0.95, -1e-3),
    "coherent": ("cosine .9", 0.95, -1e-3),
    "silu": ("silu", 0.95, -1e-3),
    "beta_two": ("silu", 1.97, -1e-3),
    "beta_two_identical": ("identical", 1.97, -1e-3),
    "random": ("random", 0.5, -1e-2),
    "reset": ("cosine .9", 0.95, -160.0),
}
COHERENT = ("identical", "near_collinear", "coherent")


def unit_keys(kind: str, m: int) -> Tensor:
    """[m, 128] unit keys, of bf16 numbers before the norm."""
    draw = torch.Generator().manual_seed(len(kind) + m)
    noise, common = (torch.randn(n, 128, dtype=F64, generator=draw) for n in (m, 1))
    if kind == "identical":
        noise = common.expand(m, -1)
    elif kind.startswith("cosine"):
        rho = float(kind.removeprefix("cosine "))
        noise = rho**0.5 * common + (1 - rho) ** 0.5 * noise
    elif kind == "silu":
        noise = torch.nn.functional.silu(noise)
    k = noise.to(torch.bfloat16).to(F64)
    return k / k.norm(dim=-1, keepdim=True)


@cache
def batch(m: int) -> tuple[Tensor, Tensor]:
    """A [N, m, m] of every case, and beta_i e^{G_i-G_j}, strictly lower. Gates and beta differ from row to row."""
    A, bounds, lane = [], [], torch.arange(m)
    for kind, beta, g in CASES.values():
        k = unit_keys(kind, m)
        b = beta - 0.003 * (lane % 3)
        # a reset happens once, in the middle
        gates = g * (1 + lane % 4) if g > -1 else torch.where(lane == m // 2, g, -1e-3)
        G = gates.to(F64).cumsum(0)
        bound = (b[:, None] * (G[:, None] - G[None]).exp()).tril(-1)
        A.append(bound * (k @ k.T))
        bounds.append(bound)
    return torch.stack(A), torch.stack(bounds)


@cache
def exact(m: int) -> tuple[list[list[list[Fraction]]], Tensor]:
    """T of every case in rationals, and the same rounded once [N, m, m]."""
    T = [rational.inverse(A) for A in batch(m)[0]]
    return T, torch.tensor([[[float(x) for x in row] for row in one] for one in T], dtype=F64)


def inverted(name: str, A: Tensor, a: Arithmetic) -> Tensor:
    """T [N, m, m] by the method `name`; a solve yields it from unit right-hand sides."""
    method = INVERSES[name]
    X = method.form(A, a)
    if method.solve is None:
        return X
    eye = torch.eye(A.shape[-1], dtype=F64).expand_as(A).clone()
    return method.solve(eye, X, a).transpose(-1, -2)


def score(T_hat: Tensor, m: int) -> dict[str, float]:
    """Largest error of a strictly lower entry, of every case; the difference is taken in rationals."""
    errors = {}
    for case, ours, T in zip(CASES, T_hat.tolist(), exact(m)[0], strict=True):
        errors[case] = max(float(abs(Fraction(ours[i][j]) - T[i][j])) for i in range(m) for j in range(i))
    return errors


def largest_powers(m: int) -> dict[str, float]:
    """max_p max_ij (|A|^p)_ij of every case, 1 at least."""
    A = batch(m)[0].abs()
    power, largest = A, A.amax((-1, -2)).clamp_min(1.0)
    for _ in range(m - 2):
        power = power @ A
        largest = torch.maximum(largest, power.amax((-1, -2)))
    return dict(zip(CASES, largest.tolist(), strict=True))


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("name", INVERSES)
def test_without_rounding(name: str, m: int) -> None:
    """Faults: a term left out, a series one round short, T transposed, one window's A used for another."""
    largest = largest_powers(m)
    for case, error in score(inverted(name, batch(m)[0], ROUNDED["exact"]), m).items():
        gate = 1e-12 if name in DIRECT else 10 * U64 * largest[case]
        assert error <= gate, f"{name} {case} m={m}: error {error:.2e}, {error / (m * U64):.3g} n u"


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("name", INVERSES)
def test_in_fp32(name: str, m: int) -> None:
    """Faults: a rounding too many inside a row; predictions: 4 n u row by row, 10 u max|A|^p for a series."""
    largest = largest_powers(m)
    for case, error in score(inverted(name, batch(m)[0], FP32), m).items():
        gate = 4 * m * U32 if name in DIRECT else 10 * U32 * largest[case]
        assert error <= gate, f"{name} {case} m={m}: error {error:.2e}, {error / (m * U32):.3g} n u"


@pytest.mark.parametrize("case", COHERENT)
def test_doubling_must_fail_for_coherent_keys(case: str) -> None:
    """Fault: inputs or scores so mild that a method known to fail passes; it cancels powers of A above 1e6."""
    assert largest_powers(32)[case] > 1e6
    assert score(inverted("doubling", batch(32)[0], FP32), 32)[case] > 1e-3
    assert score(inverted("doubling", batch(16)[0], TF32), 16)[case] > 1e-2
    # at a draft window of four it is as good as any
    assert score(inverted("doubling", batch(4)[0], FP32), 4)[case] < 4 * 4 * U32


def test_every_accumulation_is_rounded_once_and_in_order() -> None:
    """Fault: sums kept wider than the site says, or taken in another order, which the gates above cannot see."""

    def r(x: Tensor) -> Tensor:
        return x.float().double()

    A = r(batch(8)[0])  # fp32 numbers: their products are exact, so that each step rounds in one way only
    T = torch.eye(8, dtype=F64).expand_as(A).clone()
    for i in range(8):
        for j in range(i):
            total = r(-A[:, i, j])
            for l in range(j + 1, i):
                total = r(total - A[:, i, l] * T[:, l, j])
            T[:, i, j] = total
    for name in DIRECT:
        assert torch.equal(inverted(name, A, FP32), T), name
    A, eye = batch(8)[0], torch.eye(8, dtype=F64)
    square = r(r(A) @ r(A))
    T = r(eye - A)
    for power in (square, r(square @ square)):
        T = r(T + r(T @ power))
    assert torch.equal(inverted("doubling", A, Arithmetic(IN_FP32)), T)


def test_dyadic_inputs_would_hide_the_failure() -> None:
    """Fault: a hard case made of integers, on which unstable methods are exact up to a window of 16."""
    for m, bad in ((16, False), (32, True)):
        A = torch.ones(1, m, m, dtype=F64).tril(-1)
        want = torch.eye(m, dtype=F64) - torch.diag(torch.ones(m - 1, dtype=F64), -1)
        assert torch.equal(inverted("substitution", A, FP32)[0], want)
        assert torch.equal(inverted("doubling", A, FP32)[0], want) is not bad


def test_scores_see_a_lost_inverse() -> None:
    """Faults: identity, transpose, a series cut after I - A, a last row of zeros: each scores far above any gate."""
    m = 8
    T, A = exact(m)[1], batch(m)[0]
    eye = torch.eye(m, dtype=F64).expand_as(T)
    cut_row = T.clone()
    cut_row[:, -1, :-1] = 0
    for fault in (eye, T.transpose(-1, -2), eye - A, cut_row, T.roll(1, 0)):
        errors = score(fault, m)
        assert min(errors.values()) > 1e-3, errors
    assert max(score(T, m).values()) <= U64


@pytest.mark.parametrize("arithmetic", ROUNDED)
@pytest.mark.parametrize("m", WINDOWS)
def test_the_structural_bound(m: int, arithmetic: str) -> None:
    """|T_ij| <= beta_i e^{G_i-G_j}, whatever the keys. Fault: a T that amplifies, or is not unit lower triangular."""
    bound = batch(m)[1]
    assert (exact(m)[1].tril(-1).abs() <= bound * (1 + 1e-12)).all()
    for name in INVERSES:
        T = inverted(name, batch(m)[0], ROUNDED[arithmetic])
        assert torch.equal(T.triu(), torch.eye(m, dtype=F64).expand_as(T)), name
        if name in DIRECT:
            assert (T.tril(-1).abs() <= bound + 4 * m * (U64 if arithmetic == "exact" else U32)).all(), name


@pytest.mark.parametrize("m", [2, 8, 32])
@pytest.mark.parametrize("name", DIRECT)
def test_on_a_right_hand_side(name: str, m: int) -> None:
    """D = R T'. Faults: a solve with the transpose, rows of R mixed up, R overwritten."""
    R = torch.randn(len(CASES), 3, m, dtype=F64, generator=torch.Generator().manual_seed(m))
    A, before, method = batch(m)[0], R.clone(), INVERSES[name]
    X = method.form(A, Arithmetic())
    D = R @ X.transpose(-1, -2) if method.solve is None else method.solve(R, X, Arithmetic())
    assert torch.equal(R, before)
    want = R @ exact(m)[1].transpose(-1, -2)
    assert (D - want).abs().max() <= 1e-12 * want.abs().max()
    residual = D + D @ A.transpose(-1, -2) - R
    assert residual.abs().max() <= 1e-12
