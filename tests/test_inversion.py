"""The numbers that are asked of an inverse, against NumPy entry by entry, and what counts as an A of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_inverse import CASES, FP32, ROUNDED, TF32, batch, exact, inverted, largest_powers

from harness import inversion
from harness.arithmetic import Arithmetic, Rounding, Sites
from harness.errors import ConfigError
from harness.inverted import difficulties, inversions, parse_format
from harness.map_config import ConditioningConfig
from harness.points import NAMED, OUTSIDERS, Batch, Input, given
from harness.points import batch as points
from harness.reference.inverse import INVERSES, inverse_of

SMALL = ConditioningConfig(coherence=[0.31, 0.91], beta=[0.953], g=[-1.1e-3], inputs=["silu", "resets"], draws=4)


def numpys(A: np.ndarray, T: np.ndarray) -> dict[str, float]:
    """The same of one window, from the definitions."""
    m = len(A)
    L, lower = np.eye(m) + A, np.tril_indices(m, -1)
    powers = [np.linalg.matrix_power(np.abs(A), p).max() for p in range(1, m)]
    comparison = np.linalg.inv(np.eye(m) - np.abs(A))
    return {
        "cond_2": np.linalg.cond(L, 2),
        "cond_inf": np.linalg.cond(L, np.inf),
        "skeel": np.linalg.norm(np.abs(T) @ np.abs(L), np.inf),
        "power": max(powers),
        "growth": comparison.max() / np.abs(T).max(),
        "error_T": 0.0,
        "left": np.abs((T @ L - np.eye(m))[lower]).max(),
        "right": np.abs((L @ T - np.eye(m))[lower]).max(),
    }


@pytest.mark.parametrize("m", [2, 8, 16])
def test_every_number_is_its_definition(m: int) -> None:
    """Faults: a row norm for a column norm, |T| for T, a power left out, the diagonal in a residual, left for right."""
    (A, bound), T = batch(m), exact(m)[0]
    wrong = T + 1e-3 * torch.randn(T.shape, dtype=T.dtype, generator=torch.Generator().manual_seed(m)).tril(-1)
    hard, good = inversion.difficulty(A, T, bound), inversion.quality(wrong, A, T, bound)
    for i, case in enumerate(CASES):
        want = numpys(A[i].numpy(), T[i].numpy()) | {
            key: value for key, value in numpys(A[i].numpy(), wrong[i].numpy()).items() if key in ("left", "right")
        }
        want["error_T"] = float((wrong - T)[i].abs().max() / T[i].abs().max())
        want["structural"], want["excess"] = (
            max(abs(x[i, j, k].item()) - bound[i, j, k].item() for j in range(m) for k in range(j)) for x in (T, wrong)
        )
        for name, value in (hard | good).items():
            # condition numbers by singular values and inverses lose cond u, and cond stays below 2e4 here
            assert value[i].item() == pytest.approx(want[name], rel=1e-9, abs=1e-12), f"{case} {name}"


def test_left_and_right_residual_are_told_apart() -> None:
    """Fault: one of them computed twice. By rows T has a small right residual: L T - I is summed as it was solved."""
    A, T = batch(32)[0], exact(32)[0]
    found = inversion.quality(inverted("substitution", A, FP32), A, T, batch(32)[1])
    assert (found["left"] != found["right"]).any()
    # one rounding per term of a row, terms of size max|A| max|T| <= 2 * 2
    assert found["right"].max() <= 32 * 2.0**-24 * 4


@pytest.mark.parametrize("m", [2, 16, 128])
def test_the_structural_bound_holds_for_the_oracle(m: int) -> None:
    """Fault: a bound of another row, or a decay the wrong way round: |T_ij| <= beta_i e^{G_i-G_j} to m 2^-53."""
    b = points(ConditioningConfig(draws=2), m, 128, 5)
    for row in difficulties(b):
        # any one product below 1 is that of two keys
        outside = OUTSIDERS[:1] if m == 2 else OUTSIDERS
        assert row["in_domain"] is (row["input"] not in outside), row["input"]
        if row["in_domain"]:
            assert row["structural_max"] <= m * 2.0**-53, row["input"]
        elif m == 128:
            assert row["structural_max"] > 1e3


def test_what_is_no_gram_matrix_is_outside() -> None:
    """Faults: |A| above its bound, products no keys have, or a NaN taken for an A of the model; a legal one refused."""
    A, bound = batch(8)
    assert inversion.in_domain(A, bound).all()
    loud, apart, lost = A.clone(), A.clone(), A.clone()
    loud[:, 5, 2] = bound[:, 5, 2] * 1.01
    # k_0 = k_1 and k_1 = k_2, but k_0 . k_2 = -1
    apart[:, 1, 0], apart[:, 2, 1], apart[:, 2, 0] = bound[:, 1, 0], bound[:, 2, 1], -bound[:, 2, 0]
    lost[:, 3, 1] = torch.nan
    for wrong in (loud, apart, lost):
        assert not inversion.in_domain(wrong, bound).any()
    # behind a reset nothing is known of a key but its size
    wiped = bound.clone()
    wiped[:, 4:, :4] = 0
    assert inversion.in_domain(torch.where(wiped > 0, A, 0.0), wiped).all()
    assert not inversion.in_domain(A, wiped).all()


def test_a_random_triangular_matrix_is_measured_all_the_same() -> None:
    """Case A3. Faults: an input outside the model dropped, or held to belong to it; its residual not reported."""
    b = points(ConditioningConfig(coherence=[], inputs=["normal_triangular"], draws=4), 64, 128, 0)
    row = difficulties(b)[0]
    # three seeds there gave a largest entry of 4e6 to 2e7 and a condition number of 1e8 to 7e8
    assert not row["in_domain"] and row["max_T_max"] > 1e5 and row["cond_2_max"] > 1e6
    for found in inversions(b, ["substitution", "block/16"], "fp32/ieee", 0):
        # backward stable whatever the matrix is: residual to n u |L||T|
        assert 0 < found["right_max"] <= 64 * 2.0**-24 * row["max_T_max"] * 64
        assert found["nonfinite"] == 0


def test_a_condition_number_beyond_what_fp64_resolves() -> None:
    """Fault (H4, mpmath#269): a matrix that is numerically singular has the condition number of the rounding. Between
    the norms of 2 and of infinity lies a factor m; T is known entry by entry."""
    rising = torch.zeros(1, 2, 2, dtype=torch.float64)
    rising[0, 1, 0] = 1e30
    wild = 4 * torch.randn(2, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1)
    for A, least in ((rising, 1e59), (wild, 1e20)):
        found = inversion.condition(A, inverse_of("substitution").form(A, Arithmetic()))
        m = A.shape[-1]
        assert (found["cond_inf"] > least).all()
        assert (found["cond_2"] >= found["cond_inf"] / m).all() and (found["cond_2"] <= found["cond_inf"] * m).all()


def test_an_overflow_is_counted_and_its_stage_named() -> None:
    """Faults: a method that overflows dropped from the rows, read as error 0, or blamed on what comes after."""
    m, names = 32, ["substitution", "doubling", "horner"]
    A = torch.full((2, 2, m, m), 1.94, dtype=torch.float64).tril(-1)
    A[0] = 0.0
    b = Batch([Input("zeros"), Input("ones")], A, torch.ones_like(A))
    found = inversions(b, names, "fp16/fp16", 0)
    assert all(row["stage"] is None for row in found[::2])
    rows = {row["method"]: row for row in found[1::2]}
    assert list(rows) == names
    assert rows["substitution"]["nonfinite"] == 0 and rows["substitution"]["stage"] is None
    for name in ("doubling", "horner"):
        assert rows[name]["nonfinite"] == 2 and rows[name]["error_T"] == rows[name]["error_D_max"] == np.inf
    # A^2 is the 3rd thing rounded, A^4 the 7th: 1.94^4 C(31, 3) = 6e4, and A^8 overflows in the product's storage
    assert rows["doubling"]["stage"].split()[0] == "inverse"
    assert int(rows["doubling"]["stage"].split()[1]) < 14


def test_an_input_that_is_not_finite_is_measured(tmp_path) -> None:
    """Faults: a NaN that stops the run, is read as 0, or taken for a failure of the method."""
    A = np.tril(np.full((3, 8, 8), 0.3), -1)
    A[1, 5, 2] = np.nan
    np.save(tmp_path / "A.npy", A)
    b = given(str(tmp_path / "A.npy"))
    row = difficulties(b)[0]
    assert (row["in_domain"], row["draws"], row["input"]) == (False, 3, "A.npy") and row["cond_2"] < np.inf
    found = inversions(b, ["substitution"], "fp32/ieee", 0)[0]
    assert (found["nonfinite"], found["stage"]) == (1, "A") and found["error_T"] < 1e-6 < found["error_T_max"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not a readable .npy file"),
        (np.zeros(3), "no square matrices"),
        (np.zeros((2, 3, 4)), "no square matrices"),
        (np.zeros((0, 4, 4)), "no square matrices"),
        (np.zeros((2, 2), complex), "no real numbers"),
        (np.array([[0, 0], [1, 0.5]]), "matrix 0 has an entry at row 1, column 1"),
    ],
    ids=["text", "vector", "oblong", "empty", "complex", "diagonal"],
)
def test_a_file_that_holds_no_A(tmp_path, content, said: str) -> None:
    """Faults: a traceback, or a T with an upper part measured as if it were an A."""
    path = tmp_path / "A.npy"
    path.write_text("A") if content is None else np.save(path, content)
    with pytest.raises(ConfigError) as refused:
        given(str(path))
    message = str(refused.value)
    assert message.startswith(f"conditioning.matrices: {path}: ") and said in message and "\n" not in message


def test_errors_are_against_the_exact_inverse() -> None:
    """Faults: T_hat judged by another format's T, rows in another order than inputs, an error without its scale."""
    A, bound = batch(16)
    T, largest = exact(16)[0], list(largest_powers(16).values())
    b = Batch([Input(case) for case in CASES], A[:, None], bound[:, None])
    for text, a in (("fp32/ieee", FP32), ("fp32/tf32", TF32)):
        for n, row in enumerate(inversions(b, ["block", "doubling", "neumann/3"], text, 3)):
            i = n % len(CASES)
            wrong = inverted(row["method"], A[i : i + 1], a)[0] - T[i]
            want = (wrong.tril(-1).abs().max() / T[i].abs().max()).item()
            assert row["error_T"] == row["error_T_max"] == pytest.approx(want, rel=1e-6, abs=1e-16)
            u = {"fp32/ieee": 2.0**-24, "fp32/tf32": 2.0**-10}[row["format"]]
            assert row["u"] == u and row["per_power"] == pytest.approx(
                want / u / max(1.0, largest[i]), rel=1e-6, abs=1e-9
            )


@pytest.mark.parametrize("name", INVERSES)
def test_a_window_without_products_has_the_roundoff_of_its_site(name: str) -> None:
    """Fault: `alone` too long or too short: products in bf16 change nothing up to it, and something beyond."""
    coarse = parse_format("fp32/bf16")
    for m in (2, 4, 8, 16, 32):
        A = batch(m)[0]
        X, Y = (inverse_of(name).form(A, a) for a in (coarse, parse_format("fp32/ieee")))
        assert torch.equal(X, Y) is (m <= inverse_of(name).alone), m
    assert inversion.roundoff(coarse) == 2.0**-8 and inversion.roundoff(coarse, products=False) == 2.0**-24


def test_a_solve_has_no_T() -> None:
    """Fault: A itself, which a solve keeps, scored as its inverse."""
    b = points(SMALL, 8, 128, 0)
    rows = inversions(b, ["rhs_solve"], "fp32/ieee", 0)
    assert all(row["error_T"] is None and row["per_power"] is None and 0 < row["error_D"] < 1e-5 for row in rows)


def test_points_are_seeded_and_distinct() -> None:
    """Faults: the same draws for every input or window, draws that depend on what else is in the batch."""
    few, many = (points(c, 8, 128, 7) for c in (SMALL, ConditioningConfig(inputs=list(NAMED), draws=4)))
    assert torch.equal(few.A, points(SMALL, 8, 128, 7).A) and not torch.equal(few.A, points(SMALL, 8, 128, 8).A)
    assert many.A.shape == (36 + len(NAMED), 4, 8, 8) and len({x.name for x in many.inputs}) == 36 + len(NAMED)
    flat = few.A.flatten(0, 1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(len(flat)) for j in range(i))
    # mean cosine of the keys is what the input says: A / (beta e^{g (i-j)}) of cos .91, to 3 sd of 1 / sqrt(128)
    cosine = (few.A / few.bound)[1][:, 1:, 0].mean()
    assert abs(cosine - 0.91) < 3 * (1 - 0.91) / 128**0.5 + 0.02


@pytest.mark.parametrize("text", ["fp32", "fp31/ieee", "fp32/tf31", "fp32:stochastic/ieee", "fp32/"])
def test_a_format_that_is_none(text: str) -> None:
    """Fault: a pair with half of it missing taken for exact."""
    with pytest.raises(ConfigError, match=r"^conditioning.formats: ") as refused:
        parse_format(text)
    assert repr(text) in str(refused.value)


def test_roundoff_counts_what_is_coarsest() -> None:
    """Faults: u of nearest for a truncated operand, of one half for two, of the accumulator."""
    assert inversion.roundoff(ROUNDED["exact"]) == 2.0**-53
    for text, u in {"fp32/ieee": -24, "fp32/tf32": -10, "fp32/tf32x3": -22, "bf16/ieee": -8, "fp32/fp16": -11}.items():
        assert inversion.roundoff(parse_format(text)) == 2.0**u, text
    assert inversion.roundoff(Arithmetic(Sites(inverse=Rounding("bf16", parts=2)))) == 2.0**-16
