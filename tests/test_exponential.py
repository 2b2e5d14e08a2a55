"""The fast exponential of a GPU: its table, its two implementations, and where designs take it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import MAKERS, bf16, decode, draw, start, windows

from harness.arithmetic import Arithmetic, Rounding, Sites
from harness.compiled.exponential import FAST, exp_one
from harness.config import PrecisionConfig, RingConfig
from harness.exponential import CUT, LOG2E, POINT, TABLE, fast_exp
from harness.variants import load

F64 = torch.float64
UNIT = 2.0**-24
EDGES = (0.0, -0.0, -1e-9, -87.3, -87.4, -103.0, -104.0, -1e30, 1.0, 88.7, 88.8, float("inf"), -float("inf"))
# of an H200: mean error of tl.exp in units of 2^-24, of 16,384 arguments each (results/probe_h200.json)
MEASURED = {(-1e-4, 0.0): -0.124, (-1e-2, -1e-4): -0.339, (-1.0, -1e-2): -0.422, (-20.0, -1.0): 1.559}


def spread(low: float, high: float, count: int = 1 << 16) -> torch.Tensor:
    """fp32 arguments, as fp64."""
    draws = torch.rand(count, dtype=F64, generator=torch.Generator().manual_seed(3))
    return (low + (high - low) * draws).float().double()


def test_the_table_is_two_to_the_power() -> None:
    """Fault: C1 off by one or C2 by two, which moves a parabola's end by 4 or 2 units of 2^-23; C0 off by two units.

    Parabolas are 2^y to a unit, and meet to 0.8 of one: found of the device, so that less is no bound.
    """
    k, z = torch.arange(64)[:, None], torch.arange(0, (1 << CUT) + 1, 1 << 9)
    c0, c1, c2 = torch.from_numpy(TABLE)[..., None]
    found = (c0 + c1 * z + c2 * z * z).double() * 2.0**-POINT
    exact = torch.exp2((k + z.double() / 2.0**CUT) / 64) * 2.0**23
    assert ((found - exact).abs() < 1).all()
    next_one = torch.cat((found[1:, 0], 2 * found[:1, 0]))
    assert ((found[:, -1] - next_one).abs() < 0.8).all()


@pytest.mark.parametrize(("low", "high"), MEASURED)
def test_its_bias_is_the_one_measured(low: float, high: float) -> None:
    """Faults: y rounded to 23 bits instead of cut; a product with log2 e in fp64; tables half a unit up or down.

    0.05 units: what the circuit drops beyond the table is 0.04 where all arguments lie in a hundredth of one parabola.
    """
    x = spread(low, high)
    error = (fast_exp(x) - x.exp()) / x.exp() / UNIT
    assert abs(error.mean() - MEASURED[low, high]) < 0.05


def test_both_implementations_have_the_same_bits() -> None:
    """Faults: a scalar twin that rounds its product in fp64, or shifts a negative exponent towards zero."""
    x = torch.cat((spread(-110.0, 1.0), spread(-1.0, 0.0), torch.tensor(EDGES, dtype=F64)))
    code = np.array([FAST, 0, 0, 0, 0, 0])
    twin = torch.tensor([exp_one(value, code) for value in x.tolist()], dtype=F64)
    assert torch.equal(twin, fast_exp(x))
    assert np.isnan(exp_one(float("nan"), code))
    assert fast_exp(torch.tensor([float("nan")], dtype=F64)).isnan().all()


def test_the_ends_are_those_of_an_exponential() -> None:
    """Faults: a reset that leaves something behind; a decay of 1 that is not; an index beyond the table."""
    x = torch.tensor([0.0, -1e-9, -float("inf"), -200.0, 100.0], dtype=F64)
    assert fast_exp(x).tolist() == [1.0, 1.0, 0.0, 0.0, float("inf")]
    # y cut to 23 bits: the first argument below zero that is seen
    assert fast_exp(torch.tensor([-1.01 * 2.0**-23 / LOG2E], dtype=F64)) < 1


def test_a_run_says_which_exponential() -> None:
    """Faults: the run's choice lost on its way to a design (a bench timed the other one); one for a bf16 decay."""
    spec = load("chunked_tf32")
    assert spec.arithmetic(PrecisionConfig()).fast
    assert not spec.arithmetic(PrecisionConfig(exp="rounded")).fast
    assert not spec.arithmetic(PrecisionConfig(base="bf16")).fast
    assert spec.arithmetic(PrecisionConfig(base="exact")) == Arithmetic()


def test_only_fp32_decays_are_fast() -> None:
    """Fault: a run in another precision, or an oracle, that takes the exponential of fp32."""
    x = spread(-1.0, 0.0)
    for name in ("exact", "fp64", "bf16"):
        site = Rounding.parse("decay", name)
        assert torch.equal(Arithmetic(Sites(decay=site), exp="fast").exponential(x), site(x.exp()))
    fp32 = Rounding("fp32")
    assert torch.equal(Arithmetic(Sites(decay=fp32), exp="fast").exponential(x), fast_exp(x))
    assert torch.equal(Arithmetic(Sites(decay=fp32)).exponential(x), fp32(x.exp()))


CUMULATIVE = replace(load("chunked_fp32"), name="cumulative", gate_record="cumulative")


@pytest.mark.parametrize(
    "spec",
    [*map(load, ("exact_recurrent", "chunked_fp32", "chunked_tf32", "exact_fold")), CUMULATIVE],
    ids=lambda spec: spec.name,
)
def test_both_engines_take_it_everywhere(spec) -> None:
    """Faults: a decay of history, window, replay or token that one engine still rounds; a memo shared by both kinds."""
    rng, ring = np.random.default_rng(5), RingConfig(16, 4)
    lengths = rng.integers(1, 5, (24, 2))
    accepted = 1 + np.floor(rng.random(lengths.shape) * lengths).astype(int)
    initial, ready = start(rng, 2), windows(bf16(draw(rng, 24, 2, 4, resets=(-160.0,))), lengths)
    kinds = {}
    for exp in ("rounded", "fast"):
        a = spec.arithmetic(PrecisionConfig(exp=exp))
        torch_, compiled = (
            decode(maker(spec, spec.ring(ring), a), initial, ready, accepted) for maker in MAKERS.values()
        )
        for x, y in zip(torch_, compiled, strict=True):
            # what is served is read unrounded, and fp64 sums may be taken in any order
            assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)) if i % 3 != 1)
        kinds[exp] = torch_
    moved = [not torch.equal(x, y) for a, b in zip(*kinds.values(), strict=True) for x, y in zip(a, b, strict=True)]
    assert any(moved)
