"""The number that a search minimises: the error of one variant of a finished run, led back where it costs too much.

    value = e                         0 <= e <= 1, within every budget
            2 - 1/e                   e > 1: below 2 whatever e is
            2 + sum log2(cost/budget) of the budgets exceeded, at most 63
            64                        an error that is not finite, within the budgets or not

so that any design within its budgets comes before any that is not, the nearer one of these first, and a number goes
back to the sampler in every case. Samplers that rank, such as TPE, do not see the steps between these ranges.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from harness.config import Config
from harness.cost import of_manifest, us_token
from harness.errors import HarnessError
from harness.objective_config import BUDGETS, ObjectiveConfig
from harness.provenance import plain, read_json

OVER, WORST = 2.0, 64.0  # what is within its budgets lies below OVER, what is finite below WORST


def of(directory: str | Path, config: Config) -> dict[str, Any]:
    """The objective of the finished run in `directory`, as `config.objective` asks for it.

    {value, error, variant, metric, cost {bytes_held, bytes_token, us_token where a bandwidth is given}, over {budget:
    log2(cost/budget) of those exceeded}, feasible, note}, as JSON takes it: an error that is not finite is the text
    nan or inf. note is one line where the value is not the error, else None.

    Raises HarnessError for a run without a summary of variants, or one without the variant or the error.
    """
    wanted, where = config.objective, Path(directory)
    summary, manifest = read_json(where / "summary.json") or {}, read_json(where / "manifest.json") or {}
    variants = summary.get("variants")
    if not isinstance(variants, dict) or not variants or "config" not in manifest:
        raise HarnessError(f"objective: {where} has no errors of variants; experiment=drift leaves them")
    name = _variant(wanted, list(variants))
    if wanted.error not in variants[name]["end"]:
        raise HarnessError(f"objective.error: {name} has no error {wanted.error!r}")
    error = float(variants[name]["end"][wanted.error][wanted.statistic])
    cost = of_manifest(manifest | {"variants": {name: manifest["variants"][name]}})[name]
    if wanted.bandwidth is not None:
        cost["us_token"] = us_token(cost["bytes_token"], wanted.bandwidth)
    over = excess(cost, wanted)
    found = {
        "value": value(error, over),
        "error": error,
        "variant": name,
        "metric": f"{wanted.error} {wanted.statistic}",
        "cost": cost,
        "over": over,
        "feasible": not over and math.isfinite(error),
        "note": _note(error, over),
    }
    return dict(plain(found))


def value(error: float, over: dict[str, float]) -> float:
    """What is minimised, always finite; over: log2(cost/budget) of every budget exceeded."""
    if not math.isfinite(error):
        return WORST
    if over:
        return min(OVER + sum(over.values()), WORST - 1)
    return error if error <= 1 else OVER - 1 / error


def excess(cost: dict[str, Any], wanted: ObjectiveConfig) -> dict[str, float]:
    """Budget -> log2(cost/budget) > 0, of those exceeded."""
    limits = {key: getattr(wanted, key) for key in BUDGETS}
    return {key: math.log2(cost[key] / limit) for key, limit in limits.items() if limit and cost[key] > limit}


def _variant(wanted: ObjectiveConfig, have: list[str]) -> str:
    if wanted.variant is None:
        return next((name for name in have if name.partition("@")[0] != "null_arm"), have[0])
    if wanted.variant not in have:
        raise HarnessError(f"objective.variant: {wanted.variant!r} was not run; have {', '.join(have)}")
    return wanted.variant


def _note(error: float, over: dict[str, float]) -> str | None:
    notes = [] if math.isfinite(error) else [f"error is {error}"]
    notes += [f"{key} is {2**x:.3g} times its budget" for key, x in over.items()]
    if not notes and error > 1:
        notes = ["error above 1, compressed"]
    return "; ".join(notes) or None
