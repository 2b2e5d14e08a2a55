"""How long a value head remembers, memory = tokens / Σ|g|, and how large its error is.

The oracle's rows hold the sum of |g| over the tokens between two flushes (interval_gate_span), so a published run says
what its gates were without the trace that they came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.errors import HarnessError
from harness.records import ORACLE, quantiles_of
from harness.summary import at_end

if TYPE_CHECKING:
    import pandas as pd

SPAN = "interval_gate_span"
KEYS = ["slot", "head"]


def heads(rows: pd.DataFrame, error: str = "kept_fro", by: str | None = None) -> pd.DataFrame:
    """Columns `by`, slot, head, variant; memory in tokens (inf: never decays); decay_low, decay, decay_high: 5, 50 and
    95 % over the flushes of |g| per token; `error`: its median over the last tenth of the flushes, NaN above inf.

    rows: of `read_rows`, or table `flushes` of several runs told apart by the column `by`. Raises HarnessError for rows
    without gates or without that error.
    """
    for column in (SPAN, error, *([] if by is None else [by])):
        if column not in rows.columns:
            raise HarnessError(f"{column}: not a column of the rows")
    keys = KEYS if by is None else [by, *KEYS]
    found = []
    for place, part in rows.groupby(keys, sort=False, observed=True):
        oracle = part[part["variant"] == ORACLE].sort_values("flush")
        if oracle.empty or oracle[SPAN].isna().any():
            raise HarnessError(f"{SPAN}: head {place[-1]} has no oracle row, or one without its gates")
        gates = _gates(oracle["tokens"].to_numpy(float), oracle[SPAN].to_numpy(float))
        for variant, mine in part[part["variant"] != ORACLE].groupby("variant", sort=False, observed=True):
            last = at_end(mine["flush"].to_numpy())
            value = quantiles_of(mine[error].to_numpy(float)[last], [0.5])[0]
            found.append(dict(zip(keys, place, strict=True)) | {"variant": str(variant)} | gates | {error: value})
    return type(rows)(found)


def _gates(tokens: np.ndarray, span: np.ndarray) -> dict[str, float]:
    low, middle, high = quantiles_of(span / np.diff(tokens, prepend=0.0), [0.05, 0.5, 0.95])
    total = float(span.sum())
    memory = tokens[-1] / total if total else np.inf
    return {"memory": float(memory), "decay_low": low, "decay": middle, "decay_high": high}
