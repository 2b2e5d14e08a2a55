"""Every inverse on every named hard input against T in integers, with gates of c n u and c u max|A|^p.

Scores look at the strictly lower part alone: beside a unit diagonal a lost T may seem right to three digits.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot, Dots, Rounding, Sites
from harness.errors import ConfigError
from harness.kernels.options import unsupported
from harness.reference import exact_inverse
from harness.reference.inverse import INVERSES, METHODS, inverse_of, parse
from harness.variants import VariantSpec

F64 = torch.float64
WINDOWS = (2, 4, 8, 16, 32, 64, 128)
BITS = 300  # of T, at least: A, whose least entries are 2^-231, is exact in 64 more
U64, U32, U_TF32 = 2.0**-53, 2.0**-24, 2.0**-11
IN_FP32 = Sites(inverse=Rounding.parse("inverse", "fp32"))
FP32 = Arithmetic(IN_FP32, Dots(inverse=Dot.parse("inverse", "ieee")))
TF32 = Arithmetic(IN_FP32, Dots(inverse=Dot.parse("inverse", "tf32")))
ROUNDED = {"exact": Arithmetic(), "fp32": FP32, "tf32": TF32}
# solved row by row
DIRECT = ("substitution", "rhs_solve")
# error independent of the powers of A; any other method is gated by those
STABLE = (*DIRECT, "horner", "block", "block/4", "block/16")
# in units of u max|A|^p; the powers of a Neumann series are added one by one, each sum with its own rounding
SERIES = {"doubling": 10, "newton": 10, "neumann": 20}
CUT = [name for name, inverse in INVERSES.items() if inverse.order < math.inf]
WHOLE = [name for name in INVERSES if name not in CUT]

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
def exact(m: int, order: float = math.inf) -> tuple[Tensor, Tensor]:
    """T of every case, or the series up to `order`, as the sum of two doubles [N, m, m]."""
    ones = [exact_inverse.inverse(A, BITS, None if order == math.inf else int(order)) for A in batch(m)[0]]
    high, low = zip(*(x.halves() for x in ones), strict=True)
    return torch.tensor(np.array(high)), torch.tensor(np.array(low))


def inverted(name: str, A: Tensor, a: Arithmetic) -> Tensor:
    """T [N, m, m] by the method `name`; a solve yields it from unit right-hand sides."""
    method = inverse_of(name)
    X = method.form(A, a)
    if method.solve is None:
        return X
    eye = torch.eye(A.shape[-1], dtype=F64).expand_as(A).clone()
    return method.solve(eye, X, a).transpose(-1, -2)


def score(T_hat: Tensor, m: int, order: float = math.inf) -> dict[str, float]:
    """Largest error of a strictly lower entry, of every case; NaN if one is not finite."""
    high, low = exact(m, order)
    return dict(zip(CASES, ((T_hat - high) - low).tril(-1).abs().amax((-1, -2)).tolist(), strict=True))


def largest_powers(m: int) -> dict[str, float]:
    """max_p max_ij (|A|^p)_ij of every case, 1 at least."""
    A = batch(m)[0].abs()
    power, largest = A, A.amax((-1, -2)).clamp_min(1.0)
    for _ in range(m - 2):
        power = power @ A
        largest = torch.maximum(largest, power.amax((-1, -2)))
    return dict(zip(CASES, largest.tolist(), strict=True))


def test_every_method_by_hand() -> None:
    """Faults: a sign, an index or a scale that all methods share with what they are held against."""
    A = torch.tensor([[0, 0, 0], [0.5, 0, 0], [0.25, 0.5, 0]], dtype=F64)
    for name in INVERSES:
        assert inverted(name, A[None], FP32).tolist() == [[[1, 0, 0], [-0.5, 1, 0], [0, -0.5, 1]]]


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("name", WHOLE)
def test_without_rounding(name: str, m: int) -> None:
    """Faults: a term left out, a series one round short, a block at the wrong place or with the wrong sign, T
    transposed, one window's A used for another."""
    largest = largest_powers(m)
    for case, error in score(inverted(name, batch(m)[0], ROUNDED["exact"]), m).items():
        gate = 1e-12 if name in STABLE else SERIES[name] * U64 * largest[case]
        assert error <= gate, f"{name} {case} m={m}: error {error:.2e}, {error / (m * U64):.3g} n u"


@pytest.mark.parametrize("m", WINDOWS[:5])
@pytest.mark.parametrize("name", CUT)
def test_a_truncated_series_is_that_sum_of_powers(name: str, m: int) -> None:
    """Faults: a power more or less than the order says, a refinement that adds none, an order that says too much."""
    order, largest = INVERSES[name].order, largest_powers(m)
    X = inverted(name, batch(m)[0], ROUNDED["exact"])
    for case, error in score(X, m, order).items():
        # partial sums reach what the series itself reaches, m entries of it in each product
        scale = max(largest[case], exact(m, order)[0][list(CASES).index(case)].abs().max().item())
        assert error <= m * U64 * scale, f"{name} {case} m={m}: error {error:.2e}"
    errors = score(X, m)
    for case in COHERENT:
        assert (errors[case] > 1) is (m > order + 1), f"{name} {case} m={m}: error {errors[case]:.2e}"


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("name", WHOLE)
def test_in_fp32(name: str, m: int) -> None:
    """Faults: a rounding too many inside a row, a product in another precision; predictions: 4 n u row by row, by
    Horner and in blocks, 10 u max|A|^p for a series."""
    largest = largest_powers(m)
    for case, error in score(inverted(name, batch(m)[0], FP32), m).items():
        if largest[case] > 2.0**128 and (name in SERIES or name == "horner"):
            # no power survives fp32, and rows of Horner that are not settled yet hold some
            assert math.isnan(error), f"{name} {case} m={m}"
            continue
        gate = 4 * m * U32 if name in STABLE else 10 * U32 * largest[case]
        assert error <= gate, f"{name} {case} m={m}: error {error:.2e}, {error / (m * U32):.3g} n u"


@pytest.mark.parametrize("m", WINDOWS)
@pytest.mark.parametrize("name", ["block", "block/16", "horner"])
def test_products_in_tf32(name: str, m: int) -> None:
    """Fault: products that ignore dots.inverse. A truncated operand is off by 2u; as in fp32, 4 n u with that."""
    errors = score(inverted(name, batch(m)[0], TF32), m)
    assert max(errors.values()) <= 4 * m * 2 * U_TF32, errors
    if m > 16:
        assert min(errors[case] for case in COHERENT) > U_TF32 / 4, errors


@pytest.mark.parametrize("dot", ["tf32", "bf16"])
def test_a_refinement_repairs_what_is_near(dot: str) -> None:
    """Faults: a residual as coarse as X, or of another matrix; a correction subtracted. An error e below 1 becomes e^2
    and the rounding of the residual, 4 n u."""
    A = batch(32)[0]
    a = Arithmetic(IN_FP32, Dots(inverse=Dot.parse("inverse", dot)))
    before, after = (score(inverted(name, A, a), 32) for name in ("block/16", "block/16r"))
    for case in CASES:
        # |I - L X| is at most m max|A| times the largest error, and the correction is one coarse product
        square = 32 * before[case] ** 2 + 32 * 2.0**-8 * before[case]
        assert after[case] <= square + 4 * 32 * U32, f"{case}: {before[case]:.2e} to {after[case]:.2e}"
    for case in COHERENT:
        assert after[case] < before[case] / 8, f"{case}: {before[case]:.2e} to {after[case]:.2e}"


def test_a_refinement_spoils_what_is_far() -> None:
    """Fault: a step that is quietly left out where it does harm: E of 3 terms on coherent keys is squared."""
    near, far = (score(inverted(name, batch(16)[0], FP32), 16)["coherent"] for name in ("newton/1", "newton/1r"))
    assert far > near > 1


@pytest.mark.parametrize("name", [*INVERSES, "newton/3r"])
def test_no_kernel_pretends_to_compute_an_inverse(name: str) -> None:
    """Fault: an inverse without a Triton kernel run as another one, or refused without its name."""
    spec = VariantSpec(name="x", inverse=name, sites={"default": "fp32"}, dots={"default": "ieee"})
    why = unsupported(spec, spec.arithmetic())
    has = ("substitution", "rhs_solve", "doubling")
    assert why == (None if name in has else f"inverse {name} has no kernel")


SPELLED = "neumann/0 neumann/-1 neumann/03 neumann/ neumann/r3 neumann/3rr doubling/3 rhs_solve/r cramer Neumann/3"


@pytest.mark.parametrize("text", [*SPELLED.split(), "", None, 3, ["doubling"]], ids=str)
def test_a_spelling_that_names_no_inverse(text: Any) -> None:
    """Faults: a number read as none, a refinement of a solve, a second spelling of one method."""
    with pytest.raises(ConfigError) as refused:
        parse("variant x: inverse", text)
    message = str(refused.value)
    assert message.startswith(f"variant x: inverse: {text!r} ") and "\n" not in message
    assert all(name in message for name in METHODS)


def test_spellings() -> None:
    """Fault: a number or a refinement that is read and then dropped."""
    A = batch(16)[0]
    X = {
        name: inverted(name, A, FP32)
        for name in ("neumann/2", "neumann/3", "newton/2", "newton/2r", "block/r", "block")
    }
    assert all(not torch.equal(X[x], X[y]) for x in X for y in X if x != y)
    assert torch.equal(inverted("neumann/15", A, FP32), inverted("neumann", A, FP32))
    assert torch.equal(inverted("newton/3", A, FP32), inverted("newton", A, FP32))


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
    T, A = exact(m)[0], batch(m)[0]
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
    assert (exact(m)[0].tril(-1).abs() <= bound * (1 + 1e-12)).all()
    for name in INVERSES:
        T = inverted(name, batch(m)[0], ROUNDED[arithmetic])
        finite = T.isfinite().all(-1).all(-1)
        assert finite.all() or (arithmetic != "exact" and m == 128 and name not in DIRECT), name
        assert torch.equal(T[finite].triu(), torch.eye(m, dtype=F64).expand_as(T[finite])), name
        if name in DIRECT:
            assert (T.tril(-1).abs() <= bound + 4 * m * (U64 if arithmetic == "exact" else U32)).all(), name


@pytest.mark.parametrize("m", [2, 8, 32])
@pytest.mark.parametrize("name", ["substitution", "rhs_solve", "block/4"])
def test_on_a_right_hand_side(name: str, m: int) -> None:
    """D = R T'. Faults: a solve with the transpose, rows of R mixed up, R overwritten."""
    R = torch.randn(len(CASES), 3, m, dtype=F64, generator=torch.Generator().manual_seed(m))
    A, before, method = batch(m)[0], R.clone(), INVERSES[name]
    X = method.form(A, Arithmetic())
    D = R @ X.transpose(-1, -2) if method.solve is None else method.solve(R, X, Arithmetic())
    assert torch.equal(R, before)
    want = R @ exact(m)[0].transpose(-1, -2)
    assert (D - want).abs().max() <= 1e-12 * want.abs().max()
    residual = D + D @ A.transpose(-1, -2) - R
    assert residual.abs().max() <= 1e-12
