"""Cases of public reports on the inverse and on its products: what must hold on them, whatever the method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hard_windows import F64, IN, SIGMOID_8, U, error, exact, keys, matrix

from harness.arithmetic import Arithmetic, Dot, Dots, Sites
from harness.inversion import in_domain
from harness.reference.inverse import inverse_of


@pytest.mark.parametrize("m", [16, 32, 64, 128])
def test_a1_the_inverse_of_a_repeated_token_is_known(m: int) -> None:
    """Fault: the yardstick. With one key and no decay T_ij = -beta (1-beta)^(i-j-1)."""
    lag = torch.arange(m)[:, None] - torch.arange(m)
    want = torch.where(lag > 0, -SIGMOID_8 * (1 - SIGMOID_8) ** (lag - 1).clamp_min(0).to(F64), 0.0)
    A = matrix(keys(1.0, m), SIGMOID_8, 0.0)
    # n u of the Gram matrix of equal keys
    assert (exact(A).tril(-1) - want).abs().max() <= m * 2.0**-52
    for form in ("fp32", "bf16", "fp16"):
        # below 3e-4 at every size in half precision: the error does not grow with the window
        assert error(A, "substitution", form) <= (2 * 2.0**-24 if form == "fp32" else 4e-4)


@pytest.mark.parametrize("method", ["substitution", "block", "block/16", "horner"])
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_a2_the_error_of_a_direct_method_does_not_see_the_decay(method: str, form: str) -> None:
    """Fault (tt-metal#54813): a method passed at one decay. Relative to max|T| below the diagonal: within 10 of each
    other from g = -8 to -1e-3, where doubling, as good at -8, is off by its own size."""
    at: dict[float, dict[str, float]] = {}
    for g in (-8.0, -1.0, -0.05, -1e-3):
        A = matrix(keys(0.9, 32), 0.9, g)
        size = exact(A).tril(-1).abs().max().item()
        at[g] = {name: error(A, name, form) / size for name in (method, "doubling")}
    mine = [x[method] for x in at.values()]
    assert max(mine) <= 10 * min(mine)
    assert at[-8.0]["doubling"] <= 10 * at[-8.0][method]
    assert at[-1e-3]["doubling"] >= 0.1


def test_a3_a_random_triangle_is_no_input_of_the_model() -> None:
    """Fault (fla#537): a solver blamed for N(0,1) below a unit diagonal. Its inverse reaches 1e6, where every A of the
    model keeps |T| <= beta; the hardest legal one, identical keys at beta 2, has cond_2 of 6.6e3 at 64."""
    draw = torch.Generator().manual_seed(0)
    L = torch.randn(3, 64, 64, dtype=F64, generator=draw).tril(-1)
    assert (exact(L).abs().amax((-1, -2)) > 1e6).all()
    assert not in_domain(L, torch.ones_like(L).tril(-1)).any()
    # still solved: what is left of (I+A) T - I is n u |I+A| |T|
    T = inverse_of("substitution").form(L, IN["fp32"])
    eye = torch.eye(64, dtype=F64)
    assert ((L @ T + T - eye).abs() <= 64 * 2.0**-24 * ((L.abs() + eye) @ T.abs()) + 2.0**-24).all()
    legal = matrix(keys(1.0, 64), 2.0, 0.0)
    assert in_domain(legal, torch.full_like(legal, 2.0).tril(-1)).all()
    assert torch.linalg.cond(legal + eye)[0] == pytest.approx(6.6e3, rel=0.01)
    assert exact(legal).tril(-1).abs().max() <= 2 + 64 * 64 * 2.0**-52


COSINES, BETAS = (0.0, 0.5, 0.9, 1.0), (0.5, 1.0, 1.9)


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("beta", BETAS)
def test_f1_merges_in_tf32_cost_what_tf32_costs(cosine: float, beta: float) -> None:
    """Fault (fla#1205): a mode of the merges chosen because it exists. Blocks of 16 rows in fp32, merged by ieee, tf32
    and bf16 products: each within u |T| |I+A| |T| of T, so that tf32 loses 2^14 of what ieee keeps."""
    A = matrix(keys(cosine, 64), beta, -1e-3)
    T, eye = exact(A), torch.eye(64, dtype=F64)
    condition = (T.abs() @ (A.abs() + eye) @ T.abs()).amax().item()
    found = {
        form: error(A, "block/16", form) for form in ("fp32", "tf32", "fp32, bf16 products", "fp32, tf32 to nearest")
    }
    for form in ("fp32", "tf32", "fp32, bf16 products"):
        assert found[form] <= 2 * U[form] * condition, (form, found[form], condition)
    assert found["fp32"] < 1e-5 and 300 * found["fp32"] < found["tf32"]
    assert found["fp32, bf16 products"] < 0.5


def test_f1_levels_that_were_reported() -> None:
    """Fault: levels of another norm or another rounding. With tf32 rounded to nearest, as the check that found them
    did, relative Frobenius errors of 6e-5 (cosine 0, beta .5) and 1.2e-2 (identical keys, beta 1.9), within 3."""
    for cosine, beta, level in ((0.0, 0.5, 6e-5), (1.0, 1.9, 1.2e-2)):
        A = matrix(keys(cosine, 64), beta, -1e-3)
        T = exact(A)
        X = inverse_of("block/16").form(A, IN["fp32, tf32 to nearest"])
        assert level / 3 <= ((X - T).norm() / T.norm()).item() <= 3 * level


@pytest.mark.parametrize("n", [256, 1024, 4096])
def test_f2_parts_of_a_split_product_are_summed_apart(n: int) -> None:
    """Fault (triton#4603): three tf32 products chained through an accumulator that is large already, where each small
    one is lost. Apart, and added once, the sum is within 2^-24; a chain of blocks truncates n / 32 times."""
    draw = torch.Generator().manual_seed(n)
    x, y = (
        torch.rand(1, 4, n, dtype=F64, generator=draw).float().double(),
        torch.rand(1, n, 4, dtype=F64, generator=draw),
    )
    y = y.float().double()
    start = torch.full((1, 4, 4), 2.0**20, dtype=F64)
    want = start + x @ y
    found = {}
    for name in ("tf32", "tf32x3", "tf32x3/32"):
        dot = Dot.parse("dot", name)
        found[name] = ((dot(dot.lhs(x), dot.rhs(y), start) - want).abs() / want).max().item() / 2.0**-24
    # one rounding to nearest, and the product of the low parts, which is left out: 2^-22 of a sum below 2^-10
    assert found["tf32x3"] <= 1 + 2.0**-8
    assert found["tf32x3/32"] > 2 * found["tf32x3"] and found["tf32x3/32"] <= 2 * n / 32 + 2
    assert found["tf32x3"] < found["tf32"]


def test_f2_a_result_names_the_mode_of_every_product() -> None:
    """Fault (triton#9080): a default that changes under a result which does not say what it was made with."""
    shown: dict[str, Any] = Arithmetic(Sites(), Dots(inverse=Dot.parse("dot", "tf32x3/32"))).shown()
    assert shown["dot.inverse"] == "tf32x3/32" and shown["dot.fold"] == "exact"
