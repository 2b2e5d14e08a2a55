"""Public disagreements between references (family G): padding, decay order, eps, roundings, orientation of S."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import EXACT, SHAPE, Beside, bf16, close, decode, design, draw, recurrence, start, windows

from harness.arithmetic import Arithmetic, Conventions
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError, HarnessError
from harness.gates import gate_map
from harness.reference.oracle import Oracle
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec, load
from harness.window import normalise


def followed(tokens: Tokens, count: int, g: float = 0.0) -> Tokens:
    """tokens [T, ...] and `count` pads: k = v = beta = 0 and a log gate of g, as lanes inside the window."""
    pad = [(0, 0, 0, 0, 0, count)] * 3 + [(0, 0, 0, count)] * 2
    values = (0.0, 0.0, 0.0, g, 0.0)
    parts = (getattr(tokens, n) for n in ("q", "k", "v", "g", "beta"))
    return Tokens(*(torch.nn.functional.pad(x, p, value=y) for x, p, y in zip(parts, pad, values, strict=True)))


def one_window(
    tokens: Tokens, initial: torch.Tensor, name: str, precision: PrecisionConfig = EXACT
) -> list[torch.Tensor]:
    """Output and states of tokens [T, ...] as one window, and as one of T-1 and one of 1 after it."""
    T = len(tokens.g)
    maker = design(name, RingConfig(2 << (T - 1).bit_length(), T), precision)
    whole = decode(maker, initial, windows(tokens.map(lambda x: x[None, None]), [[T]]), np.array([[T]]))[0]
    at = torch.tensor([list(range(T)), [T - 1] * T])[:, None]
    parted = np.array([[T - 1], [1]])
    split = decode(maker, initial, windows(tokens.map(lambda x: x[at]), parted), parted)[0]
    return [whole[0], whole[2], torch.cat(split[0::3], -1), split[-1]]


def test_g1_padding_is_refuted_as_a_cause() -> None:
    """Fault (transformers#46190): a gap blamed on zero padding to 64. Pads of k, beta, g = 0 are inert, 5 tokens are
    4 + 1; what differs in bf16 is rounding. A pad whose raw gate is 0 does decay, by -5.25 here, and is not inert."""
    rng = np.random.default_rng(1)
    tokens, initial = bf16(draw(rng, 5)), start(rng, 1)
    S = recurrence(initial[0], tokens)[0][-1]
    for name in ("chunked_fp32", "exact_fold", "exact_recurrent"):
        for padded in (tokens, followed(tokens, 59)):
            o, kept, o_split, kept_split = one_window(padded, initial, name)
            close("state", kept, S)
            close("state of the split", kept_split, S)
            close("o of the split", o_split[..., :5], o[..., :5])
    rounded = one_window(tokens, initial, "chunked_bf16", PrecisionConfig())
    assert 1e-4 < (rounded[1] - torch.from_numpy(S)).abs().max() < 0.1
    g, _ = gate_map(torch.zeros(1), torch.zeros(1), torch.tensor([np.log(4)]), torch.ones(1))
    close("gate of a pad", g, [-5.2530], 1e-4)
    decayed = one_window(followed(tokens, 1, g.item()), initial, "exact_fold")[1]
    close("decayed", decayed, S * np.exp(g.item()))


def order_gap(g: float) -> float:
    """Relative distance of the two decay orders after 512 tokens of keys with cosine about .5."""
    rng = np.random.default_rng(2)
    shape = Shape(1, 1, 8, 64)
    tokens = draw(rng, 512, shape=shape)
    tokens.k = np.sqrt(0.5) * torch.from_numpy(rng.standard_normal((1, 1, 64))) + np.sqrt(0.5) * tokens.k
    tokens.g, tokens.beta = torch.full_like(tokens.g, g), torch.full_like(tokens.beta, 0.6)
    ends = [recurrence(np.zeros((1, 8, 64)), tokens, Conventions(decay=d))[0][-1] for d in ("before", "after")]
    return float(np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[0]))


def test_g2_decay_order_shows_with_decay_only() -> None:
    """Fault (fla#885): an oracle without a stated order, or a test on g = 0, where both orders agree."""
    gaps = [order_gap(g) for g in (0.0, -1e-4, -0.02, -1.0)]
    assert gaps[0] == 0
    for gap, seen in zip(gaps[1:], (7e-5, 8e-3, 0.17), strict=True):
        assert seen / 3 < gap < seen * 3


@pytest.mark.parametrize(
    "keys", [{"verify": "tokens"}, {"verify": "tokens", "fold": "replay"}, {}, {"fold": "replay"}], ids=str
)
def test_g2_a_design_of_the_other_order(keys: dict[str, str]) -> None:
    """Fault: `decay: after` declared and not run, so that a difference of .2 is logged as none. Refusing is as good."""
    spec = VariantSpec(name="after", conventions={"decay": "after"}, **keys)
    try:
        maker = design(spec, RingConfig(16, 4))
    except ConfigError:
        return
    rng = np.random.default_rng(3)
    table = draw(rng, 6, 2, 4), rng.integers(1, 5, (6, 2))
    pair = Beside(maker, start(rng, 2))
    for i in range(6):
        pair.step(table, windows(*table), i, dict(enumerate(table[1][i].tolist())))


@pytest.mark.parametrize("field", [{"decay": "befor"}, {"eps_at": "men"}, {"eps": -1.0}, {"eps": "tiny"}], ids=str)
def test_a_misspelt_convention_is_refused(field: dict[str, object]) -> None:
    """Fault: a typing error in a variant file that silently means another convention."""
    with pytest.raises(ConfigError, match=next(iter(field))):
        VariantSpec(name="typo", conventions=field).arithmetic()


def test_an_eps_as_people_write_it(tmp_path: Path) -> None:
    """Fault (hydra#999): YAML reads 1e-5, without a point, as a string, and the norm adds a string to a number."""
    file = tmp_path / "mine.yaml"
    file.write_text("conventions: {eps: 1e-5}\n")
    try:
        eps = load(str(file)).arithmetic().conventions.eps
    except ConfigError:
        return
    assert eps == 1e-5 and isinstance(eps, float)


def test_g3_eps_on_the_mean_is_128_times_larger() -> None:
    """Fault (vmlx-swift#434): eps on the mean of squares: nothing at scale 1, a key of half its length at 1e-3."""
    k = torch.from_numpy(np.random.default_rng(4).standard_normal((200, 128)))
    expected = {1.0: (1.0, 1.0), 1e-2: (1.0, 0.995), 1e-3: (0.996, 0.70), 1e-4: (0.75, 0.10), 0.0: (0.0, 0.0)}
    for scale, lengths in expected.items():
        for where, length in zip(("sum", "mean"), lengths, strict=True):
            norms = normalise(scale * k, Conventions(eps_at=where)).norm(dim=-1)
            assert abs(norms.mean() - length) < 0.02, (scale, where)
    zero = draw(np.random.default_rng(5), 1, 1, 3)
    zero.k[0, 0, 1] = 0.0
    assert (windows(zero, [[3]]).keys(Arithmetic())[0][0, 0, :, 1] == 0).all()


@pytest.mark.parametrize("where", ["sum", "mean", "outside"])
def test_g3_every_form_of_the_norm_runs_through(where: str) -> None:
    """Fault: a fold or replay that normalises stored keys by another rule than the verify."""
    for keys in ({}, {"fold": "replay"}, {"verify": "tokens", "fold": "replay"}):
        rng = np.random.default_rng(6)
        maker = design(VariantSpec(name=where, conventions={"eps_at": where, "eps": 1e-4}, **keys), RingConfig(16, 4))
        table = draw(rng, 6, 1, 4), np.full((6, 1), 4)
        table[0].k *= 1e-2
        pair = Beside(maker, start(rng, 1))
        for i in range(6):
            pair.step(table, windows(*table), i, {0: 3})


def test_g4_four_references_are_four() -> None:
    """Fault (vllm#51779, #53877): one reference called the truth. Norm and beta each in fp32 or bf16 are four results;
    their distance from fp64 and from each other are different numbers."""
    rng = np.random.default_rng(7)
    tokens, initial, ends = bf16(draw(rng, 40)), start(rng, 1), {}
    tokens.g = tokens.g.clamp(min=-0.1)
    oracle = Oracle(SHAPE, initial)
    oracle.advance(windows(tokens.map(lambda x: x[None, None]), [[40]]))
    exact = oracle.S[0]
    for key in ("fp32", "bf16"):
        for beta in ("fp32", "bf16"):
            spec = VariantSpec(name=key + beta, verify="tokens", fold="replay", conventions={"beta": beta})
            maker = design(spec, RingConfig(64, 4), replace(PrecisionConfig(base="fp32"), sites={"key": key}))
            at = torch.arange(40).view(10, 1, 4)
            full = np.full((10, 1), 4)
            ends[key, beta] = decode(maker, initial, windows(tokens.map(lambda x, at=at: x[at]), full), full)[0][-1]
    error = {name: ((S - exact).norm() / exact.norm()).item() for name, S in ends.items()}
    assert error["fp32", "fp32"] < 1e-6
    assert all(1e-4 < error[name] < 1e-2 for name in list(error)[1:])
    for a, b in combinations(ends, 2):
        apart = ((ends[a] - ends[b]).norm() / exact.norm()).item()
        assert apart > 1e-4, (a, b)
    # two that share the rounded norm agree better than either is accurate, beta being the smaller of the two roundings
    assert min(error.values()) == error["fp32", "fp32"]


def test_g5_a_state_of_the_other_orientation_is_refused() -> None:
    """Fault (sgl-kernel-npu#640, sparkinfer#615): K-major read as V-major. With K and V unequal it cannot be run."""
    maker = design("exact_fold")
    initial = start(np.random.default_rng(8), 1)
    for wrong in (initial.transpose(2, 3), initial[:, :2], initial.to(torch.float32), torch.cat((initial, initial))):
        with pytest.raises(HarnessError, match="initial state"):
            maker.create(SHAPE, 1, wrong)


@pytest.mark.parametrize("name", ["chunked_fp32", "exact_fold", "exact_recurrent"])
def test_g5_a_transposed_load_shows_in_the_second_call_only(name: str) -> None:
    """Fault: a test of one call from a zero state with K = V, where a transposed store or load changes nothing."""
    shape = Shape(2, 6, 24, 24)
    rng = np.random.default_rng(9)
    table = draw(rng, 2, 1, 4, shape=shape), np.full((2, 1), 4)
    ready = windows(*table, shape=shape)
    for initial, caught in ((torch.zeros(1, 6, 24, 24, dtype=torch.float64), 1), (start(rng, 1, shape), 0)):
        maker = design(name, RingConfig(8, 4, 1, "commit"))
        pair = Beside(maker, initial, shape)
        for i in range(2):
            pair.state.checkpoint = pair.state.checkpoint.transpose(2, 3).contiguous()
            pair.state.operand = None
            if i == caught:
                with pytest.raises(AssertionError):
                    pair.step(table, ready, i, {0: 4})
                break
            pair.step(table, ready, i, {0: 4})
