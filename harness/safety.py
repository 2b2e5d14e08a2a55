"""From the points of the map to verdicts: how long a window each inverse is safe for, and which predictions hold.

Safe at a window n: over all inputs of the model, at n and at every shorter window, nothing leaves the finite numbers
and the largest error of T is at most `safe` n u, u the roundoff of the format; of a solve, which forms no T, the error
of D.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

# what is exact but for rounding and forms powers of A, and what forms none
POWERS = ("doubling", "neumann", "newton")
STEADY = ("horner", "block", "block/16")
U32 = 2.0**-24


def joined(inputs: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Every row of a method beside what its input is, with `error`, the largest error of T or else of D."""
    known = ["input", "window", "coherence", "in_domain", "power", "power_max", "skeel_max", "bound_max"]
    table = rows.astype({"input": str}).merge(inputs.astype({"input": str})[known], on=["input", "window"])
    table["error"] = table["error_T_max"].fillna(table["error_D_max"])
    # by the input's longest window: one of 1 holds no beta
    table["above_one"] = table.groupby("input")["bound_max"].transform("max") > 1
    table["nu"] = table["window"] * table["u"]
    return table


def safe_windows(table: pd.DataFrame, safe: float) -> dict[str, dict[str, int]]:
    """method -> format -> longest safe window, 1 if none: a window of 1 needs no inverse."""
    bad = table.assign(bad=(table["error"] > safe * table["nu"]) | (table["nonfinite"] > 0))
    found: dict[str, dict[str, int]] = {}
    for (method, form), group in bad.groupby(["method", "format"], observed=True, sort=False):
        fails = group.groupby("window")["bad"].any().sort_index()
        good = fails.index[~fails.cummax()]
        found.setdefault(str(method), {})[str(form)] = int(good.max()) if len(good) else 1
    return found


def summarise(inputs: pd.DataFrame, rows: pd.DataFrame, safe: float) -> dict[str, Any]:
    """Safe windows and checks. `None` where a run has no point that a check speaks of."""
    table = joined(inputs, rows)
    model = table[table["in_domain"]]
    outside = inputs[~inputs["in_domain"]]
    return {
        "safe": safe,
        "windows": sorted({int(w) for w in table["window"]}),
        "safe_beta_one": safe_windows(model[~model["above_one"]], safe),
        "safe_any_beta": safe_windows(model, safe),
        "checks": checks(inputs[inputs["in_domain"]], model),
        "collapse": collapse(model),
        "outside": sorted(set(outside["input"].astype(str))),
    }


def collapse(model: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """method -> format -> error of T over u max|A|^p where that power is 1e3 or more and all windows are finite."""
    large = model[model["method"].isin(POWERS) & (model["power"] >= 1e3) & (model["nonfinite"] == 0)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (method, form), group in large.groupby(["method", "format"], observed=True, sort=False):
        ratio = group["per_power"]
        numbers = {"points": len(ratio), "median": ratio.median(), "least": ratio.min(), "most": ratio.max()}
        within = {"within_10": float(ratio.between(0.1, 10).mean())}
        found.setdefault(str(method), {})[str(form)] = numbers | within
    return found


def checks(inputs: pd.DataFrame, model: pd.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Prediction -> how far its worst point is from the limit, what that point is, and whether it holds."""
    ieee = model[model["format"] == "fp32/ieee"]
    finite = model[(model["nonfinite"] == 0) & model["error_T"].notna()]
    powers = finite[finite["method"].isin(POWERS)]
    large = powers[powers["power"] >= 1e3]
    steady = model[model["method"].isin(STEADY)]
    cut = model[model["method"].eq("neumann/3") & (model["window"] >= 8) & (model["coherence"] >= 0.63)]
    cut = cut[~cut["input"].str.contains("beta 0.47")] if len(cut) else cut
    repaired = model[model["method"].eq("block/16r") & model["format"].isin(["fp32/tf32", "fp32/bf16"])]
    lost = finite[finite["method"].eq("newton/r") & (finite["power"] * finite["u"] > 1)]
    ratio = {
        "P1 substitution, fp32: error / n u <= 4": (ieee[ieee["method"] == "substitution"], "error / nu", 4.0),
        "P2 series: error / u max|A|^p <= 10": (powers, "per_power_max", 10.0),
        "P2 series, max|A|^p >= 1e3: u max|A|^p / error <= 10": (large, "1 / per_power", 10.0),
        "P3 horner, blocks, any format: error / n u <= 4": (steady, "error / nu", 4.0),
        "P5 I-A+A^2-A^3, cos >= .63, n >= 8: 0.1 / error <= 1": (cut, "0.1 / error", 1.0),
        "P6 block/16r, tf32 and bf16 products: error / n u32 <= 4": (repaired, f"error / (window * {U32})", 4.0),
        "P6 newton/r, max|A|^p > 1/u: 4 n u / error <= 1": (lost, "4 * nu / error_T", 1.0),
        "P7 window 1: error of T <= 0": (model[(model["window"] == 1) & model["error_T"].notna()], "error_T_max", 0.0),
    }
    found = {name: _worst(points, value, limit) for name, (points, value, limit) in ratio.items()}
    name = "P4 (|T_ij| - beta_i e^{G_i-G_j}) / n 2^-53 <= 1"
    return found | {name: _worst(inputs, f"structural_max / (window * {2.0**-53})", 1.0)}


def _worst(points: pd.DataFrame, value: str, limit: float) -> dict[str, Any] | None:
    if not len(points):
        return None
    values = points.eval(value).fillna(np.inf)
    at = points.loc[values.idxmax()]
    where = {key: at[key] for key in ("input", "window", "method", "format") if key in at}
    return {
        "worst": float(values.max()),
        "limit": limit,
        "holds": bool(values.max() <= limit),
        "points": len(points),
    } | {key: int(x) if key == "window" else str(x) for key, x in where.items()}


def tables(summary: dict[str, Any]) -> list[Table]:
    """The longest safe windows, and the predictions, in 80 columns."""
    one, any_ = summary["safe_beta_one"], summary["safe_any_beta"]
    formats = list(dict.fromkeys(form for row in one.values() for form in row))
    title = f"longest safe window for beta <= 1 (for any beta); safe: error <= {summary['safe']:g} n u"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("inverse", no_wrap=True)
    for form in formats:
        table.add_column(form, justify="right", no_wrap=True)
    for method, row in one.items():
        cells = [_cell(row.get(form), any_.get(method, {}).get(form)) for form in formats]
        table.add_row(method, *cells)
    verdicts = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    verdicts.add_column("prediction", overflow="fold", ratio=3)
    verdicts.add_column("worst", justify="right", no_wrap=True)
    verdicts.add_column("holds", no_wrap=True)
    verdicts.add_column("at", overflow="fold", ratio=2)
    for name, check in summary["checks"].items():
        if check is None:
            verdicts.add_row(name, "-", "-", "no such point")
            continue
        where = [str(check.get(key, "")) for key in ("input", "method", "format") if check.get(key)]
        verdicts.add_row(
            name,
            f"{check['worst']:.3g}",
            "yes" if check["holds"] else "NO",
            ", ".join([*where, f"n {check['window']}"]),
        )
    return [table, verdicts]


def _cell(one: int | None, any_: int | None) -> str:
    return "-" if one is None else f"{one}" + (f" ({any_})" if any_ != one else "")
