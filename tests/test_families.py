"""Every family is what its name says."""

import math

import pytest
import torch

from harness.config import DecodeConfig
from harness.decode import Stream
from harness.families import FAMILIES
from harness.tokens import Shape, Tokens

SHAPE = Shape(2, 6, 5, 128)


def block(family: str, b: int = 0, **keys: object) -> Tokens:
    config = DecodeConfig(family=family, **keys)  # type: ignore[arg-type]
    return Stream(config, SHAPE).block(b).map(lambda x: x[0])


def unit(k: torch.Tensor) -> torch.Tensor:
    return k / (k * k).sum(-1, keepdim=True).add(1e-6).sqrt()


def cosines(k: torch.Tensor) -> torch.Tensor:
    """Pairwise cosines of 256 tokens of key head 0, the diagonal left out."""
    k = unit(k[:256, 0])
    return (k @ k.T)[~torch.eye(256, dtype=torch.bool)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_in_the_domain_and_documented(family: str) -> None:
    """Fault: NaN, a positive log gate or beta above 2 from a family, checked in a block off the first."""
    tokens = block(family, b=3)
    tokens.validate()
    assert FAMILIES[family].doc
    assert "\n" not in FAMILIES[family].doc
    assert tokens.v.abs().max() > 0


@pytest.mark.parametrize(
    ("family", "low", "high"),
    [("iid", -0.02, 0.02), ("silu", 0.09, 0.15), ("coherent", 0.54, 0.66), ("near_collinear", 0.985, 0.995)],
)
def test_median_cosine(family: str, low: float, high: float) -> None:
    """Fault: a weight applied to the variance, not the amplitude; one head's mean cosine varies by .03."""
    assert low < cosines(block(family).k).median() < high


def test_coherence_sweeps_the_cosine() -> None:
    """Fault: decode.coherence without effect, or AR(1) noise that grows the norm at weight 0."""
    low, mid, high = (cosines(block("coherent", coherence=w).k).median() for w in (0.0, 0.5, 0.97))
    assert low < 0.2 < mid < 0.6 < high
    assert (block("coherent", coherence=1.0).k == block("coherent", b=5, coherence=1.0).k).all()
    k = unit(block("coherent", coherence=0.0).k[:, 0])
    near, far = (k[1:] * k[:-1]).sum(-1).median(), (k[9:] * k[:-9]).sum(-1).median()
    assert near > far + 0.1  # neighbours share three taps of the AR(1)


@pytest.mark.parametrize(("family", "g", "beta"), [("identical", -1.03e-5, 0.9997), ("repeat16", -1e-3, 0.835)])
def test_one_key(family: str, g: float, beta: float) -> None:
    """Fault: a key redrawn per block, which would break the repetition every 1,024 tokens."""
    first, later = block(family), block(family, b=7)
    assert (first.k == first.k[0]).all()
    assert torch.equal(first.k, later.k)
    assert (first.g == g).all()
    assert (first.beta == beta).all()


def test_repeat16_repeats_values_and_queries() -> None:
    """Fault: period 16 broken at a block boundary, or values constant as well."""
    tokens = block("repeat16", b=2)
    assert torch.equal(tokens.v[16:], tokens.v[:-16])
    assert torch.equal(tokens.v, block("repeat16").v)
    assert (tokens.v[0] != tokens.v[8]).any()
    assert (tokens.q == tokens.q[0]).all()


@pytest.mark.parametrize(("family", "g"), [("decay_one", -1e-9), ("decay_stagnate", -1.5e-3)])
def test_fixed_decay_keeps_trained_betas(family: str, g: float) -> None:
    """Fault: beta fixed together with g."""
    tokens = block(family)
    assert (tokens.g == g).all()
    assert torch.equal(tokens.beta, block("silu").beta)


def test_decay_stagnate_is_lost_on_a_bf16_state() -> None:
    """Fault: a g for which rounding to nearest still forgets."""
    x = torch.tensor([1.0, 1.5, 1.9921875], dtype=torch.float64)
    assert torch.equal((x * math.exp(-1.5e-3)).to(torch.bfloat16).double(), x)


def test_strong_decay_spans_four_decades() -> None:
    """Fault: alpha uniform, so that small values never come."""
    alpha = block("strong_decay").g.exp()
    assert 0.99e-4 < alpha.min() < 2e-4
    assert 0.3 < alpha.max() < 0.4001
    assert alpha.log10().std() > 0.9  # log-uniform over 3.6 decades: 1.04


def test_resets_hold_both_kinds_among_ordinary_gates() -> None:
    """Fault: -inf mapped to a large finite number, or all tokens reset."""
    g, plain = block("resets").g, block("silu").g
    # 1024 * 6 / 48 = 128 of each expected, 11 the standard deviation
    assert 70 < (g == -160).sum() < 190
    assert 70 < torch.isneginf(g).sum() < 190
    rest = (g != -160) & ~torch.isneginf(g)
    assert torch.equal(g[rest], plain[rest])


def test_mixed_gates_mix_within_a_window() -> None:
    """Fault: levels drawn per head or per block, not per token; some windows of 4 must span from 0 to -60."""
    tokens = block("mixed_gates")
    windows = tokens.g.view(256, 4, 6)
    assert ((windows.amin(1) < -30) & (windows.amax(1) > -1e-8)).float().mean() > 0.1
    assert (tokens.g == 0).any()
    assert tokens.beta.unique().numel() == 4


def test_manifold_values_are_what_the_memory_holds() -> None:
    """Fault: map and initial state differ, or values read the wrong key head; bf16 of k and v adds .4 %."""
    stream = Stream(DecodeConfig(family="manifold"), SHAPE)
    tokens, S = stream.block(4), stream.initial_state()
    khat = unit(tokens.k[0]).repeat_interleave(SHAPE.group, dim=1)
    predicted = torch.einsum("hvk,thk->thv", S[0], khat)
    error = (tokens.v[0] - predicted).norm() / predicted.norm()
    assert 0.005 < error < 0.02


def test_wide_state_and_values_span_five_decades() -> None:
    """Fault: one sign only, or a range cut by a normal tail."""
    stream = Stream(DecodeConfig(family="wide_state"), SHAPE)
    for x in (stream.initial_state(), stream.block(0).v):
        size = x.abs()
        assert 0.9e-3 < size.min() < 2e-3
        assert 50 < size.max() < 100.5
        assert 0.45 < (x > 0).double().mean() < 0.55
        assert 0.9 < (size < 10**-0.5).double().mean() * 2 < 1.1


def test_zero_key_makes_the_eps_matter() -> None:
    """Fault: eps on the mean (128 times larger) would not show on keys of ordinary size; and 0 / 0."""
    tokens = block("zero_key", activation="exact")
    square = (tokens.k**2).sum(-1)
    norm = unit(tokens.k).norm(dim=-1)
    assert 0.15 < (square == 0).double().mean() < 0.25
    assert (norm[square == 0] == 0).all()
    assert not norm.isnan().any()
    tiny = norm[(square > 0) & (square < 2e-6)]
    assert tiny.numel() > 200
    assert (tiny < 0.9).all()
    assert (norm[square > 1] > 0.999999).all()
    assert ((tokens.q**2).sum(-1) > 0).all()


def test_beta_two_and_alternating() -> None:
    """Fault: beta left in (0, 1), or a write that the next token does not take back."""
    assert (block("beta_two").beta == 1.97).all()
    tokens = block("alternating")
    assert torch.equal(tokens.v[1::2], -tokens.v[::2])
    assert (tokens.k == tokens.k[0]).all()
    assert (tokens.v[0] != tokens.v[2]).any()


@pytest.mark.parametrize("family", ["silu", "identical", "manifold", "strong_decay"])
def test_junk_is_of_the_family(family: str) -> None:
    """Fault: junk of another scale or gate law, which would make rejected drafts a test of their own."""
    stream = Stream(DecodeConfig(family=family), SHAPE)
    n = torch.arange(4096)
    junk, true = stream.junk(torch.zeros_like(n), n // 4, n % 4), stream.block(0)
    assert junk.k.pow(2).mean().item() == pytest.approx(true.k.pow(2).mean().item(), rel=0.1)
    assert junk.v.std().item() == pytest.approx(true.v.std().item(), rel=0.1)
    low, high = true.g.quantile(0.25, dim=1)[0], true.g.quantile(0.75, dim=1)[0]
    inside = (junk.g >= low) & (junk.g <= high)
    assert (inside.double().mean(0) > 0.4).all()
