"""Laws of drift: every kind is recognised from noisy series, and no failure is smoothed away."""

import numpy as np
import pandas as pd
import pytest

from harness.laws import fit, fit_slots

TOKENS = np.arange(10, 16400, 10)


def noisy(error: np.ndarray, seed: int = 0, sigma: float = 0.2, memory: float = 0.0) -> np.ndarray:
    """error [F] times log-normal noise whose neighbours are correlated by `memory`."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(len(error))
    for i in range(1, len(z)):
        z[i] = memory * z[i - 1] + np.sqrt(1 - memory**2) * z[i]
    return error * np.exp(sigma * z)


CASES = {
    "flat": (1e-3 + 0 * TOKENS, "none", None, None),
    "random walk": (1e-7 * TOKENS**0.5, "sqrt", 0.5, None),
    "steady drift": (1e-9 * TOKENS, "linear", 1.0, None),
    "slow": (1e-6 * TOKENS**0.25, "power", 0.25, None),
    "fast": (1e-12 * TOKENS**2.0, "power", 2.0, None),
    "forgetting": (1e-2 * TOKENS**-0.4, "falling", -0.4, None),
    "unstable": (1e-6 * np.exp(TOKENS / 2500), "exponential", None, 2500),
    "plateau": (1e-2 * (1 - np.exp(-TOKENS / 1500)), "saturating", 1.0, 1500),
    "contracting walk": (1e-2 * np.sqrt(1 - np.exp(-TOKENS / 1500)), "saturating", 0.5, 1500),
    "line above a floor": (1e-4 * (1 + TOKENS / 4000), "linear", 1.0, None),
}


@pytest.mark.parametrize("name", CASES)
def test_kind_and_parameters(name):
    """Fault: a law is misnamed, or its level, exponent or time constant is off."""
    error, kind, exponent, time_constant = CASES[name]
    law = fit(TOKENS, noisy(error))
    assert law.kind == kind, law.reason
    assert law.level == pytest.approx(error[-1], rel=0.15)
    if exponent is not None:
        assert law.exponent == pytest.approx(exponent, abs=0.06)
    if time_constant is not None:
        assert law.time_constant == pytest.approx(time_constant, rel=0.2)
    assert law.reason
    assert len(law.text()) <= 15


def test_correlated_noise_is_no_trend():
    """Fault: neighbouring flushes share their error; counted as independent they make a trend of noise."""
    flat = np.full(len(TOKENS), 1e-3)
    kinds = [fit(TOKENS, noisy(flat, seed, sigma=0.3, memory=0.97)).kind for seed in range(40)]
    assert kinds.count("none") >= 36


def test_a_line_above_a_floor_is_not_exponential():
    """Fault: slow growth above a noise floor is called exponential, as if the state diverged."""
    error = 1e-4 * (1 + TOKENS / 2000)
    assert fit(TOKENS, noisy(error, memory=0.9)).kind in ("linear", "sqrt")
    less_than_two_folds = 1e-6 * np.exp(TOKENS / 12000)
    assert fit(TOKENS, noisy(less_than_two_folds, sigma=0.05)).kind in ("linear", "sqrt")
    assert fit(TOKENS, noisy(error)).floor == pytest.approx(1e-4, rel=0.2)
    assert fit(TOKENS, noisy(1e-7 * TOKENS**0.5)).floor is None


def test_outliers_do_not_rule():
    """Fault: a handful of spikes, which medians ignore, change the law."""
    error = noisy(1e-7 * TOKENS**0.5)
    error[5::97] *= 1e4
    law = fit(TOKENS, error)
    assert law.kind == "sqrt"
    assert law.level == pytest.approx(1e-7 * TOKENS[-1] ** 0.5, rel=0.15)


def test_order_and_sampling_do_not_matter():
    """Fault: the law depends on the order of the rows, or on how densely a run was read."""
    error = noisy(CASES["plateau"][0])
    shuffled = np.random.default_rng(1).permutation(len(TOKENS))
    assert fit(TOKENS[shuffled], error[shuffled]) == fit(TOKENS, error)
    thinned = fit(TOKENS[::7], error[::7])
    assert thinned.kind == "saturating"
    assert thinned.time_constant == pytest.approx(fit(TOKENS, error).time_constant, rel=0.3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 700, -1])
def test_one_bad_value_is_a_divergence(value, where):
    """Fault (H5): NaN or inf is dropped by a median or a comparison, and the series passes as finite."""
    error = noisy(CASES["flat"][0])
    error[where] = value
    law = fit(TOKENS, error)
    assert (law.kind, law.nonfinite, law.first_nonfinite) == ("diverged", 1, TOKENS[where])
    assert law.level == pytest.approx(1e-3, rel=0.1)


def test_zeros_are_counted_not_fitted():
    """Fault: exact zeros vanish in the logarithm without a word, or drag the fit to -inf."""
    error = noisy(CASES["random walk"][0])
    error[::3] = 0
    law = fit(TOKENS, error)
    assert law.kind == "sqrt"
    assert law.zeros == len(error[::3])
    assert f"{law.zeros} of {len(error)}" in law.reason
    exact = fit(TOKENS, np.zeros(len(TOKENS)))
    assert (exact.kind, exact.level) == ("exact", 0.0)
    few = np.zeros(len(TOKENS))
    few[:3] = 1e-7
    assert fit(TOKENS, few).kind == "undecided"
    assert fit(TOKENS[:0], few[:0]).kind == "undecided"


def frame(slots: int, heads: int, level=lambda slot, head: 1.0, F: int = 400) -> pd.DataFrame:
    """Rows of one variant whose error is level(slot, head) · 1e-7 · √t."""
    t = TOKENS[:F]
    parts = []
    for slot in range(slots):
        for head in range(heads):
            error = level(slot, head) * noisy(1e-7 * t**0.5, 31 * slot + head)
            part = {"slot": slot, "head": head, "flush": np.arange(F), "tokens": t + slot}
            parts.append(pd.DataFrame(part | {"served_fro": error.astype(np.float32)}))
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    ("slots", "heads", "over"),
    [(4, 3, "4 slots"), (1, 8, "8 heads"), (1, 1, "block resamples of one slot")],
)
def test_interval_says_what_it_ranges_over(slots, heads, over):
    """Fault: a spread over heads is read as an uncertainty over seeds, or an interval misses its estimate."""
    law = fit_slots(frame(slots, heads))
    assert (law.kind, law.over) == ("sqrt", over)
    low, high = law.interval
    assert low <= law.exponent <= high
    assert high - low < 0.2
    assert law.level_interval[0] <= law.level * 1.05
    assert law.level_interval[1] >= law.level * 0.95


def test_interval_covers_unequal_slots():
    """Fault: the interval is that of the pooled series and hides how much seeds differ."""
    law = fit_slots(frame(6, 2, level=lambda slot, head: 10.0 ** (slot / 5)))
    low, high = law.level_interval
    assert high / low == pytest.approx(10, rel=0.3)


def test_one_bad_head_is_a_divergence():
    """Fault: one head of many diverges, and the median over heads stays finite and quiet."""
    rows = frame(2, 8)
    rows.loc[(rows["slot"] == 1) & (rows["head"] == 5) & (rows["flush"] >= 300), "served_fro"] = np.nan
    law = fit_slots(rows)
    assert law.kind == "diverged"
    assert law.first_nonfinite == TOKENS[300] + 1
    assert "1 of 16 (slot, head) pairs" in law.reason
