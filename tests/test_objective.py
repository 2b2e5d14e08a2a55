"""What a search minimises: always a number, in an order that leads back within the budgets."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from harness.config import Config, validate
from harness.cost import of_config
from harness.designs import designs
from harness.errors import ConfigError, HarnessError
from harness.experiments.drift import formats_of
from harness.objective_config import ObjectiveConfig
from harness.pareto import pareto
from harness.provenance import plain
from harness.sweeps import objective
from harness.sweeps.objective import OVER, WORST, value

VARIANTS = ["null_arm", "chunked_bf16", "exact_fold"]


@pytest.fixture
def finished(tmp_path):
    """finished(kept max of chunked_bf16, objective keys) -> objective of a run without its decode."""
    config = Config(variants=VARIANTS)
    entries = {d.spec.name: formats_of(d, "cpu") for d in designs(config)}
    (tmp_path / "manifest.json").write_text(json.dumps(plain({"config": config, "variants": entries})))

    def judge(worst=0.5, **keys):
        ends = {name: {"kept": {"median": 1e-3, "max": 0.25}} for name in VARIANTS}
        ends["chunked_bf16"]["kept"]["max"] = worst
        summary = {"variants": {name: {"end": end} for name, end in ends.items()}}
        (tmp_path / "summary.json").write_text(json.dumps(plain(summary)))
        return objective.of(tmp_path, replace(config, objective=ObjectiveConfig(**keys)))

    judge.costs = of_config(config)
    return judge


def test_feasible_before_infeasible_before_not_finite():
    """Fault: an infeasible design with a small error, or a diverging one, wins."""
    rng = np.random.default_rng(0)
    errors = np.sort(10 ** rng.uniform(-9, 12, 400))
    inside = [value(e, {}) for e in errors]
    over = np.sort(10 ** rng.uniform(-6, 2, 400))
    outside = [value(float(e), {"bytes_token": x}) for e, x in zip(rng.permutation(errors), over, strict=True)]
    # above 1e16 the compressed errors meet; below, every step up is one
    assert (np.diff(inside) > 0).all() and max(inside) < OVER
    assert (np.diff(outside) >= 0).all() and min(outside) > OVER and max(outside) < WORST
    for bad in (math.nan, math.inf):
        assert value(bad, {}) == value(bad, {"bytes_held": 1.0}) == WORST
    assert value(1e300, {}) <= OVER and value(0.0, {}) == 0


def test_excesses_add_up():
    """Fault: a design beyond two budgets is no worse than one beyond the larger."""
    assert value(0.1, {"a": 1.0, "b": 0.5}) > value(0.1, {"a": 1.0}) > OVER


def test_the_objective_is_the_error_and_the_cost_of_the_first_variant_that_is_no_floor(finished):
    """Fault: the null arm is minimised; the cost of one variant beside the error of another."""
    found = finished()
    assert (found["variant"], found["metric"], found["error"]) == ("chunked_bf16", "kept max", 0.5)
    assert found["value"] == 0.5 and found["feasible"] and found["note"] is None
    assert found["cost"] == finished.costs["chunked_bf16"]
    named = finished(variant="exact_fold", statistic="median")
    assert (named["error"], named["cost"]) == (1e-3, finished.costs["exact_fold"])


@pytest.mark.parametrize("key", ["bytes_held", "bytes_token", "us_token"])
def test_no_trial_slips_past_a_budget(finished, key):
    """Fault: a budget that is not looked at; one missed by a byte, or met exactly and refused."""
    cost = finished(bandwidth=4.4e12)["cost"]
    assert set(cost) == {"bytes_held", "bytes_token", "us_token"}
    met = finished(bandwidth=4.4e12, **{key: cost[key]})
    assert met["feasible"] and not met["over"] and met["value"] == 0.5
    missed = finished(bandwidth=4.4e12, **{key: cost[key] * (1 - 1e-9)})
    assert not missed["feasible"] and set(missed["over"]) == {key} and OVER < missed["value"] < OVER + 1e-6
    half = finished(bandwidth=4.4e12, **{key: cost[key] / 2})
    assert half["value"] == pytest.approx(OVER + 1) and half["note"] == f"{key} is 2 times its budget"


@pytest.mark.parametrize("text", [math.nan, math.inf])
def test_an_error_that_is_not_finite_becomes_the_worst_number_and_says_so(finished, text):
    """Fault: NaN handed to the sampler, which ends the study."""
    found = finished(text)
    assert found["value"] == WORST and not found["feasible"] and found["note"] == f"error is {text}"
    # a record of a job is JSON
    assert found["error"] == str(text) and json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_error_above_one_stays_below_every_infeasible_one(finished):
    """Fault: a useless design within its budget is left for one beyond it."""
    found = finished(1e9)
    assert 1 < found["value"] < OVER and found["feasible"] and found["note"] == "error above 1, compressed"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"variant": "exact_folds"}, "objective.variant: 'exact_folds' was not run; have null_arm"),
        ({"error": "o"}, "objective.error: chunked_bf16 has no error 'o'"),
    ],
)
def test_what_a_run_does_not_have_is_refused_by_name(finished, keys, message):
    """Fault: a misspelt variant is minimised as the first one."""
    with pytest.raises(HarnessError, match=message):
        finished(**keys)


def test_an_experiment_without_errors_of_variants_is_refused(tmp_path):
    """Fault: a KeyError instead of a line."""
    with pytest.raises(HarnessError, match="has no errors of variants"):
        objective.of(tmp_path, Config())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"error": "kep"}, "objective.error: 'kep' is not one of served, kept, o, d"),
        ({"statistic": "mean"}, "objective.statistic: 'mean' is not one of"),
        ({"bytes_held": 0.0}, "objective.bytes_held: 0.0 is not a positive number"),
        ({"us_token": 1.0}, "objective.us_token: needs objective.bandwidth"),
    ],
)
def test_keys_are_checked_before_anything_is_run(keys, message):
    """Fault: an hour of trials, and then a typing error."""
    with pytest.raises(ConfigError, match=message):
        validate(Config(objective=ObjectiveConfig(**keys)))


def test_a_front_is_what_nothing_beats():
    """Fault: NaN on the front or beating everything; one of two equal designs dropped; a tie in one column kept."""
    nan, inf = math.nan, math.inf
    rows = [(1, 5), (2, 5), (2, 3), (2, 3), (3, 4), (4, nan), (nan, 0), (0, inf), (5, 3), (6, 1), (inf, 0.5)]
    frame = pd.DataFrame(rows, columns=["x", "y"])
    assert pareto(frame, "x", "y").tolist() == [True, False, True, True, False, False, False, True, False, True, True]
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.integers(0, 12, (60, 2)).astype(float), columns=["x", "y"])
    a = frame.to_numpy()
    beaten = [((a <= row).all(1) & (a < row).any(1)).any() for row in a]
    assert pareto(frame, "x", "y").tolist() == [not b for b in beaten]
    assert pareto(frame.iloc[:0], "x", "y").shape == (0,)
