"""The account of an error budget: squares add up, failures stay, and what is no budget is refused."""

import math

import numpy as np
import pandas as pd
import pytest
import tables

from harness.budget import accounts, sites
from harness.errors import HarnessError


def test_squares_of_the_parts_add_up():
    """Faults: parts added as they are, the floor counted as a part, the residual of the wrong sign."""
    levels = tables.budget_levels({"a": {"step": 3.0, "gate": 4.0}}, {"a": 10.0})
    (a,) = accounts(levels)
    assert (a.whole, a.sum, a.floor) == (10.0, 5.0, 1e-15)
    assert a.residual == 0.75 and list(a.parts) == ["gate", "step"] and a.share("gate") == (4 / 5) ** 2


def test_a_value_rounded_again_to_its_format_counts_once():
    """Faults: three sites that round k_hat to bf16 counted three times; the finest of them counted."""
    parts = {"key": 3.0, "store_k_hat": 3.0, "fold_k": 2.0, "store_d": 0.0, "fold_d": 4.0, "step": 12.0}
    (a,) = accounts(tables.budget_levels({"a": parts}, {"a": 13.0}))
    assert set(a.counted.values()) == {3.0, 4.0, 12.0} and len(a.counted) == 3
    assert a.sum == 13.0 and a.residual == 0.0 and sum(a.share(site) for site in parts) == pytest.approx(1)


@pytest.mark.parametrize(
    ("parts", "whole", "total", "residual"),
    [
        ({"step": np.nan, "gate": np.inf}, 1.0, math.nan, math.nan),
        ({"step": 1.0, "gate": np.inf}, 1.0, math.inf, math.nan),
        ({"step": 0.0}, 0.0, 0.0, 0.0),
        ({"step": 1.0}, 0.0, 1.0, -math.inf),
        ({"step": 1.0}, np.nan, 1.0, math.nan),
    ],
)
def test_a_failure_is_no_number(parts, whole, total, residual):
    """Fault: NaN skipped, so that a broken site explains everything; a division by a whole of zero."""
    (a,) = accounts(tables.budget_levels({"a": parts}, {"a": whole}))
    np.testing.assert_equal([a.sum, a.residual], [total, residual])


def test_the_worst_site_stands_first():
    """Fault: NaN, which compares with nothing, sorted below the sites that are fine."""
    (a,) = accounts(tables.budget_levels({"a": {"d": 1.0, "key": np.inf, "step": np.nan, "gate": 2.0}}, {"a": 1.0}))
    assert list(a.parts) == ["step", "key", "gate", "d"]


def test_seeds_are_taken_by_their_median_and_a_failure_moves_it():
    """Faults: the last seed counts alone; of three seeds two that fail leave the third one's number."""
    runs = [
        tables.budget_levels({"a": {"step": x}}, {"a": x}).assign(**{"decode.seed": i}) for i, x in enumerate((1, 2, 9))
    ]
    (a,) = accounts(pd.concat(runs))
    assert (a.whole, a.parts["step"]) == (2.0, 2.0)
    runs[0]["kept_median"] = runs[2]["kept_median"] = np.nan
    (a,) = accounts(pd.concat(runs))
    assert math.isnan(a.whole) and math.isnan(a.parts["step"])


def test_a_list_and_its_text_name_the_same_site():
    """Fault: a sweep read from Parquet has text where a run has a list, and keeps a site [gate] that none has."""
    for kept in ("gate", "[gate]", ["gate"], ("gate",), np.array(["gate"])):
        assert sites(kept) == ("gate",)
    assert sites("") == sites("[]") == sites([]) == sites(None) == sites(math.nan) == ()
    assert sites("gate,key") == ("gate", "key")


def test_the_oracle_and_variants_without_the_error_have_no_account():
    """Fault: a row of the oracle, which has no error, makes an account of NaN."""
    levels = tables.budget_levels({"a": {"step": 1.0}, "oracle": {"step": np.nan}}, {"a": 1.0, "oracle": np.nan})
    assert [a.variant for a in accounts(levels)] == ["a"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop(columns="precision.keep"), "precision.keep: not a column"),
        (lambda t: t.assign(**{"precision.keep": "step,gate"}), "precision.keep: step, gate with precision=own"),
        (lambda t: t[t["precision.name"] != "own"], "variant a: the table has no run with precision=own"),
        (lambda t: t[t["precision.keep"] == ""], "variant a: the table has no run with precision=exact with one site"),
        (lambda t: t.assign(**{"ring.length": [16, 16, 32]}), "ring.length: 16, 32 in one budget"),
        (lambda t: t.assign(**{"precision.name": "bf16"}), "precision.keep: nothing with precision=bf16"),
    ],
)
def test_what_is_no_budget_is_refused(change, says):
    """Faults: runs that keep two sites counted for one, a missing whole, runs of two rings in one sum."""
    levels = change(tables.budget_levels({"a": {"step": 1.0}}, {"a": 1.0}))
    with pytest.raises(HarnessError, match="^" + says):
        accounts(levels)
