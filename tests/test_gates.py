"""The gate map at its limits, the gate space, and the trained head classes."""

import math
from itertools import product

import pytest
import torch

from harness.errors import InputError
from harness.gates import TRAINED, HeadClass, gate_map, head_class, log_decay, require_log, softplus

F64 = torch.float64


def one(a: float, b: float = 0.3, A_log: float = 0.0, dt: float = 0.0) -> tuple[float, float]:
    g, beta = gate_map(*(torch.tensor([x], dtype=F64) for x in (a, b, A_log, dt)))
    return g.item(), beta.item()


def quantiles(n: int) -> torch.Tensor:
    return torch.special.ndtri((torch.arange(n, dtype=F64) + 0.5) / n)


@pytest.mark.parametrize(("A_log", "dt"), list(product([-5.0, 0.0, 5.0, 100.0], [-200.0, 0.0, 100.0, 1e4])))
def test_an_extreme_gate_is_finite_or_a_reset_and_touches_no_other_token(A_log: float, dt: float) -> None:
    """Faults: softplus overflow, inf * 0 or -inf - -inf spreading NaN from one token to its chunk."""
    a = torch.linspace(-2.0, 2.0, 16, dtype=F64)[:, None].repeat(1, 2)
    plain = gate_map(a, a, torch.tensor([0.1, A_log]), torch.tensor([0.2, 0.0]))
    a[7, 1] = dt
    g, beta = gate_map(a, a, torch.tensor([0.1, A_log]), torch.tensor([0.2, 0.0]))
    assert not g.isnan().any()
    assert not beta.isnan().any()
    assert (g <= 0).all()
    assert (beta >= 0).all()
    assert (beta <= 1).all()
    others = torch.ones_like(g, dtype=torch.bool)
    others[7, 1] = False
    assert torch.equal(g[others], plain[0][others])
    decay = torch.exp(g[7, 1]).item()
    if A_log == 100.0 and dt >= 0:
        assert decay == 0.0  # a full reset
    if dt == -200.0:
        assert decay == pytest.approx(1.0, abs=1e-12)  # exp(A_log - 200) <= exp(-100)


@pytest.mark.parametrize(
    ("a", "A_log", "expected"),
    [
        (-800.0, 800.0, -1.0),  # exp(800) = inf times softplus(-800) = 0: the limit is exp(0)
        (-900.0, 895.0, -math.exp(-5.0)),
        (0.0, 800.0, -math.inf),
        (-1e4, 5.0, 0.0),
        (50.0, -math.inf, 0.0),  # A = 0 in half precision: a head that never decays
        (math.inf, -math.inf, 0.0),
        (math.inf, 0.0, -math.inf),
    ],
)
def test_infinite_times_zero_is_its_limit(a: float, A_log: float, expected: float) -> None:
    """Fault: exp(A_log) = inf times softplus = 0 left as NaN."""
    g, _ = one(a, A_log=A_log)
    assert g == pytest.approx(expected, rel=1e-12)  # the exponent, up to 900, carries 1 ulp


def test_the_map_is_the_formula() -> None:
    """Fault: a sign, log base or threshold off; eps of fp64 times a few operations is 1e-15."""
    a, b, A_log, dt = -0.7, 0.5, 1.3, 0.4
    g, beta = one(a, b, A_log, dt)
    assert g == pytest.approx(-math.exp(A_log) * math.log(1 + math.exp(a + dt)), rel=1e-14)
    assert beta == pytest.approx(1 / (1 + math.exp(-b)), rel=1e-15)
    assert softplus(torch.tensor([20.5, 1e4], dtype=F64)).tolist() == [20.5, 1e4]
    assert one(1.0, b=-1e4)[1] == 0.0


@pytest.mark.parametrize(("a", "A_log", "dt"), [(math.inf, 0.0, -math.inf), (-math.inf, math.inf, 0.0)])
def test_opposite_infinities_are_refused(a: float, A_log: float, dt: float) -> None:
    """Fault: a NaN gate from inputs none of which is NaN."""
    with pytest.raises(InputError, match="opposite infinities at head 0"):
        one(a, A_log=A_log, dt=dt)


@pytest.mark.parametrize("name", ["a", "b"])
def test_nan_names_token_and_head(name: str) -> None:
    """Fault: a NaN activation passing silently into the state."""
    x = {"a": torch.zeros(2, 5, 3), "b": torch.zeros(2, 5, 3)}
    x[name][1, 3, 2] = math.nan
    with pytest.raises(InputError, match=rf"^{name}: NaN at token 3, head 2$"):
        gate_map(x["a"], x["b"], torch.zeros(3), torch.zeros(3))
    with pytest.raises(InputError, match=r"^A_log: NaN at head 1$"):
        gate_map(torch.zeros(5, 3), torch.zeros(5, 3), torch.tensor([0.0, math.nan, 0.0]), torch.zeros(3))


def test_gates_of_the_other_space_are_refused() -> None:
    """Fault: linear gates run as log gates (growth), log gates as linear ones (NaN)."""
    alpha = torch.tensor([[0.9, 0.3], [0.97, 1.0]], dtype=F64)
    with pytest.raises(InputError, match=r"0\.9 at token 4, head 0 .*log gate space.*linear gates\?"):
        require_log(alpha, first=4)
    with pytest.raises(InputError, match=r"-0\.105\d* at token 0, head 0 .*linear gate space.*log gates\?"):
        log_decay(torch.log(alpha))
    with pytest.raises(InputError, match=r"176 at token 1, head 0 is outside the log gate space \[-inf, 0\]$"):
        require_log(torch.tensor([[-0.1], [176.0]]))
    require_log(torch.tensor([[-math.inf], [0.0]]))
    assert log_decay(torch.tensor([[1.0, 0.0]], dtype=F64)).tolist() == [[0.0, -math.inf]]


@pytest.mark.parametrize("c", TRAINED, ids=lambda c: c.name)
def test_a_class_has_its_median_spread_and_beta(c: HeadClass) -> None:
    """Fault: A_log, dt_bias or the slope of softplus wrong, so that a long head forgets like a fast one."""
    z = quantiles(4096)
    A_log, dt = torch.tensor(c.A_log, dtype=F64), torch.tensor(c.dt_bias, dtype=F64)
    g, beta = gate_map(c.a_sd * z[:, None], (c.b + c.b_sd * z)[:, None], A_log[None], dt[None])
    # a is 0 at the median: only the two middle quantiles blur it
    assert g.median().item() == pytest.approx(c.g, rel=2e-3)
    # softplus bends, more so where a head sits off its exponential part
    assert torch.log(-g).std().item() == pytest.approx(c.spread, rel=0.1)
    assert torch.logit(beta).mean().item() == pytest.approx(c.b, abs=1e-6)
    assert head_class(8 + TRAINED.index(c)) is c


def test_the_memory_of_a_class_is_the_captured_one() -> None:
    """Fault: medians right but means off; drift follows 1 / mean(-g), which the names state."""
    z = quantiles(65536)
    for c in TRAINED:
        # named in whole tokens; spreads of three digits move a mean by a percent or two
        if c.name[-1].isdigit():
            g, _ = gate_map(c.a_sd * z[:, None], z[:, None], torch.tensor([c.A_log]), torch.tensor([c.dt_bias]))
            assert -1 / g.mean().item() == pytest.approx(float(c.name.rpartition("_")[2]), rel=0.03, abs=0.5)
