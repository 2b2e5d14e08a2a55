"""A search as a table: one row per trial, from the records that its jobs left in the folder of a sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from harness.errors import HarnessError
from harness.objective_config import BUDGETS
from harness.sweeps.sweep import rows

NUMBERS = ("value", "error", *BUDGETS, "seconds")


def trials(folder: str | Path) -> pd.DataFrame:
    """One row per trial, in the order in which they were asked for; failed ones have NaN for every number.

    trial, state (finished, skipped: found done before, failed), a column per parameter that the trials differ in,
    value, error, bytes_held, bytes_token, us_token, feasible, seconds, run (hash), note (or why it failed). Parameters
    are numbers where every trial has one, else as they were spelled; attrs["fixed"] holds those that all share.
    attrs["metric"] says which error is minimised.

    Raises HarnessError for a folder without records, or one of a sweep that minimised nothing.
    """
    where = Path(folder)
    jobs = rows(where)
    if not any(job.get("objective") for job in jobs):
        raise HarnessError(
            f"{where}: no job has an objective; a search is made by -m sweep=least_error, or hydra/sweeper=optuna"
        )
    given = [dict(_parameter(o) for o in job["overrides"]) for job in jobs]
    names = list(dict.fromkeys(name for params in given for name in params))
    columns = {name: [params.get(name) for params in given] for name in names}
    fixed = {name: values[0] for name, values in columns.items() if len(set(values)) == 1}
    table: dict[str, Any] = {"trial": range(len(jobs)), "state": [job["state"] for job in jobs]}
    table |= {name: _typed(values) for name, values in columns.items() if name not in fixed}
    found = [_numbers(job) for job in jobs]
    table |= {key: [n[key] for n in found] for key in NUMBERS}
    goals = [job.get("objective") or {} for job in jobs]
    table["feasible"] = [bool(goal.get("feasible")) for goal in goals]
    table["run"] = [Path(job["directory"]).name if job.get("directory") else None for job in jobs]
    table["note"] = [job.get("error") or goal.get("note") for job, goal in zip(jobs, goals, strict=True)]
    frame = pd.DataFrame(table)
    frame.attrs = {"fixed": fixed, "metric": next(goal["metric"] for goal in goals if goal)}
    return frame


def best(frame: pd.DataFrame) -> pd.Series | None:
    """The feasible trial of least value, the first of equals; None where no trial is feasible."""
    inside = frame[frame["feasible"]]
    return None if inside.empty else inside.loc[inside["value"].idxmin()]


def _parameter(override: str) -> tuple[str, str]:
    name, _, value = override.partition("=")
    return name.lstrip("+"), value


def _typed(values: list[str | None]) -> list[Any]:
    try:
        return [int(v) for v in values]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    try:
        return [float(v) for v in values]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return values


def _numbers(job: dict[str, Any]) -> dict[str, float]:
    goal = job.get("objective") or {}
    flat = goal | goal.get("cost", {}) | {"seconds": job.get("seconds")}
    return {key: math.nan if flat.get(key) is None else float(flat[key]) for key in NUMBERS}
