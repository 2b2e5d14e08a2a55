"""The data handed to the drift figure: zeros, NaN and infinity are kept, counted and given a place (case I1)."""

import numpy as np
import pandas as pd
import pytest

from harness.config import AcceptanceConfig, Config, DecodeConfig
from harness.figures.canvas import STYLES, style
from harness.plots import caption, drift_figure, settings
from harness.series import TINY, coincident, counts, drift_series, limits

F = 40
SERIES = {
    "exact": np.zeros(F),
    "late": np.where(np.arange(F) < 10, 0.0, 1e-8),
    "hole": np.where(np.arange(F) == 20, np.nan, 1e-5),
    "burst": np.where(np.arange(F) >= 35, np.inf, 1e-3),
    "subnormal": np.full(F, 1e-320),
}


def rows(series: dict[str, np.ndarray], heads: int = 1, slots: int = 1) -> pd.DataFrame:
    """One row per (variant, slot, head, flush) with the same error everywhere, and an oracle without errors."""
    parts = []
    for name, error in series.items():
        for slot in range(slots):
            for head in range(heads):
                flush = np.arange(len(error))
                part = {
                    "variant": name,
                    "slot": slot,
                    "head": head,
                    "flush": flush,
                    "tokens": 10 * (flush + 1),
                }
                parts.append(pd.DataFrame(part | dict.fromkeys(("served_fro", "o_med", "o_max"), error)))
    parts.append(parts[0].assign(variant="oracle", cond2=3.0, served_fro=np.nan, o_med=np.nan, o_max=np.nan))
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def served():
    return {s.variant: s for s in drift_series(rows(SERIES))["served"]}


@pytest.mark.parametrize(
    ("name", "zeros", "tiny", "nans", "infs", "drawn"),
    [
        ("exact", F, 0, 0, 0, 0),
        ("late", 10, 0, 0, 0, F - 10),
        ("hole", 0, 0, 1, 0, F - 1),
        ("burst", 0, 0, 0, 5, F - 5),
        ("subnormal", 0, F, 0, 0, 0),
    ],
)
def test_nothing_is_dropped(served, name, zeros, tiny, nans, infs, drawn):
    """Fault (I1): a log axis drops zeros and inf without a word; one subnormal stretches it to 1e-320."""
    s = served[name]
    assert (s.zeros, s.tiny, s.nans, s.infs) == (zeros, tiny, nans, infs)
    assert np.isfinite(s.line).sum() == drawn
    assert s.floored.sum() == zeros + tiny
    assert (s.bad > 0).sum() == nans + infs
    # every point has exactly one place
    np.testing.assert_array_equal(np.isfinite(s.line).astype(int) + s.floored + (s.bad > 0), 1)
    np.testing.assert_array_equal(s.median, SERIES[name])


def test_axis_is_set_by_what_it_can_show(served):
    """Fault (I1): an all-zero or all-NaN figure gets an arbitrary axis, or a subnormal sets the axis."""
    low, high = limits({"served": list(served.values())})
    assert low <= 1e-8 < low * 10.001
    assert high / 10.001 <= 1e-3 < high
    assert limits({"served": [served["exact"], served["subnormal"]]}) == (1e-8, 1.0)
    assert limits({}) == (1e-8, 1.0)


def test_the_caption_counts(served):
    """Fault: the reader cannot tell an exact method from missing data."""
    text = caption({"served": list(served.values())}, {"family": "silu"})
    for clause in (
        "exact: 40 of 40 exact zeros (served)",
        "late: 10 of 40 exact zeros (served)",
        "hole: 1 of 40 NaN (served)",
        "burst: 5 of 40 inf (served)",
        f"subnormal: 40 of 40 below {TINY:g} (served)",
    ):
        assert clause in text
    assert text.endswith("Settings: family silu.")
    assert counts({"served": [served["late"]]}) == ["late: 10 of 40 exact zeros (served)"]


def test_one_bad_head_shows():
    """Fault: medians over heads hide a head that has failed."""
    frame = rows({"a": np.full(F, 1e-3)}, heads=16, slots=2)
    frame.loc[(frame["head"] == 7) & (frame["slot"] == 1) & (frame["flush"] == 30), "served_fro"] = np.nan
    (s,) = drift_series(frame)["served"]
    assert np.flatnonzero(s.bad).tolist() == [30]
    assert (s.nans, s.values) == (1, F * 32)
    assert s.median[30] == 1e-3
    assert np.isnan(s.top[30])
    np.testing.assert_array_equal(np.delete(s.top, 30), 1e-3)


def test_binning_keeps_extremes_and_counts():
    """Fault: pooling flushes into bins loses a spike, a zero, a NaN or a row."""
    error = np.full(5000, 1e-6)
    error[[17, 3210]], error[1234], error[4321] = 1e-2, np.nan, 0.0
    (s,) = drift_series(rows({"a": error}), bins=100)["served"]
    assert len(s.tokens) <= 100
    assert np.all(np.diff(s.tokens) > 0)
    assert (s.values, s.zeros, s.nans, s.bad.sum()) == (5000, 1, 1, 1)
    assert (s.top == 1e-2).sum() == 2
    assert np.isfinite(s.line).all()


def test_oracle_and_absent_metrics_are_no_series():
    """Fault: conditioning rows, or a metric that a variant never had, are drawn as failures."""
    frame = rows(SERIES)
    frame.attrs["missing"] = {"exact": ["o_med", "o_max"]}
    found = drift_series(frame)
    assert list(found) == ["served", "o"]
    assert [s.variant for s in found["served"]] == list(SERIES)
    assert [s.variant for s in found["o"]] == list(SERIES)[1:]


def test_a_variant_keeps_its_colour():
    """Fault: colours depend on the company a variant is in, or two default arms look alike."""
    assert len({str(style(name)) for name in STYLES}) == len(STYLES)
    assert len({style(name)[0] for name in STYLES}) == len(STYLES)
    assert style("snapshot") == style("snapshot")
    assert style("snapshot")[0] not in {colour for colour, _ in STYLES.values()}


@pytest.mark.parametrize("names", [list(SERIES), ["exact"], ["hole", "late"], []])
def test_the_figure_draws_them(tmp_path, names):
    """Fault: a figure of zeros, failures or nothing raises or warns; markers lie outside their rows."""
    figure = drift_figure(rows({name: SERIES[name] for name in names} or {"oracle": SERIES["hole"]}), {"seed": 0})
    figure.savefig(tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    axis = figure.axes[0]
    drawn = [line for line in axis.get_lines() if line.get_marker() in ("o", "x")]
    for marker, low, high in (("o", 0, 0.1), ("x", 0.9, 1)):
        heights = np.concatenate([line.get_ydata() for line in drawn if line.get_marker() == marker] + [[]])
        assert np.all((heights > low) & (heights < high))
    crosses = sum(len(line.get_xdata()) for line in drawn if line.get_marker() == "x")
    assert crosses == ("hole" in names) + 5 * ("burst" in names)


def test_settings_name_what_was_run():
    """Fault: the figure cannot be reproduced from its caption."""
    config = Config(decode=DecodeConfig(slots=8, gates="x", prefill=64))
    config.acceptance = AcceptanceConfig(kind="geometric", p=0.7)
    found = settings(config, "cpu")
    assert found["model"] == "default (8/16 heads, K=128, V=128, 32 value rows)"
    assert found["family"] == "silu with captured gates"
    assert found["tokens"] == "16,384 after a prefill of 64"
    assert found["acceptance"] == "geometric p=0.7"
    assert found["seed"] == "0..7, one per slot"
    assert (found["L"], found["window"], found["device"]) == ("16", "4", "cpu")


def test_lines_that_hide_each_other_are_named():
    """Fault: of three equal variants the reader sees the last one drawn and takes the others for missing."""
    error = 10.0 ** np.linspace(-7, -3, F)
    mixed = np.where(np.arange(F) < F // 2, error, 2 * error)
    found = drift_series(rows({"first": error, "second": 1.001 * error, "third": 2 * error, "mixed": mixed}))
    assert coincident(found) == ["first, second (served, o)"]
    text = caption(found, {})
    assert "Lines that hide each other: first, second (served, o)." in text
    # exact zeros have a lane each on the strip, so they hide nothing
    assert coincident(drift_series(rows({"zero": np.zeros(F), "nought": np.zeros(F)}))) == []
