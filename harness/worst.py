"""A design is as good as its worst input: levels of many seeds and token streams, one row per design."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import HarnessError
from harness.objective_config import BUDGETS

if TYPE_CHECKING:
    import pandas as pd

INPUT = ("decode.", "acceptance.")  # config keys that are what a design is given, not what it is


def designs(levels: pd.DataFrame, error: str = "kept_max") -> pd.DataFrame:
    """Columns variant, the config keys that make a design, its costs, `error`, and `runs`, how many it is the worst of.

    levels: table `levels` of a sweep. The worst is NaN if any is. Costs depend on accepts a little, so the largest
    counts. Raises HarnessError for a column that is not there.
    """
    if error not in levels.columns:
        raise HarnessError(f"{error}: not a column of the table")
    keys = ["variant", *(key for key in levels.columns if "." in key and not key.startswith(INPUT))]
    costs = [name for name in BUDGETS if name in levels.columns]
    groups = levels.groupby(keys, sort=False, observed=True, dropna=False)
    found = groups[costs].max()
    # the largest of a group would pass over NaN
    found[error] = groups[error].agg(lambda x: x.astype(float).max(skipna=False))
    found["runs"] = groups.size()
    found = found.reset_index()
    found.attrs = levels.attrs
    return found
