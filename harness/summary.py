"""What one run says, on one screen: summary.json and the table printed at its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.laws import fit_slots
from harness.provenance import plain
from harness.records import BOUND, CONDITIONING, ORACLE, quantiles_of, recorded

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

STATES = {"served": "served_fro", "kept": "kept_fro"}
# name: per-row column whose median and whose maximum are quoted
ENDS = {name: (column, column) for name, column in STATES.items()} | {
    "o": ("o_med", "o_max"),
    "d": ("d_med", "d_max"),
}
TAIL = 0.1  # share of the flushes, the last ones, that `end` is taken over


def variants_of(rows: pd.DataFrame) -> list[str]:
    """Names in order of first appearance, the oracle left out."""
    return [str(name) for name in rows["variant"].unique() if name != ORACLE]


def summarise(rows: pd.DataFrame, null: str = "null_arm") -> dict[str, Any]:
    """summary.json of rows [n] of one run; NaN and infinities are the strings nan, inf.

    Per variant: rows, flushes, nonfinite (rows with a served, kept, d or o error that is not finite) with
    the first token count and stage, zeros per error, `end` {median, max} over slots, heads and the last
    tenth of the flushes, `law` of the served and the kept error, the head that is worst at the end, and
    `ratio`, end median over that of the `null` variant. NaN ranks above inf. `oracle` holds, per condition
    measure, the largest number and the count of NaN; `oracle_bound` the largest certified relative error of the
    oracle itself {max, slot, head, tokens}, None in rows without it.
    """
    parts = {str(name): part for name, part in rows.groupby("variant", observed=True, sort=False)}
    for part in parts.values():
        part.attrs = rows.attrs
    variants = {name: _variant(parts[name], name) for name in variants_of(rows)}
    floor = variants.get(null)
    for entry in variants.values():
        entry["ratio"] = {
            key: _ratio(end["median"], floor["end"][key]["median"])
            for key, end in entry["end"].items()
            if floor is not None and key in floor["end"]
        }
    oracle = {}
    if ORACLE in parts:
        for column in CONDITIONING:
            if recorded(parts[ORACLE], ORACLE, column):
                values = parts[ORACLE][column].to_numpy(float)
                nan = np.isnan(values)
                top = _highest(values[~nan]) if not nan.all() else float("nan")
                oracle[column] = {"max": top, "nan": int(nan.sum())}
    return plain(
        {
            "null": null if floor is not None else None,
            "variants": variants,
            "oracle": oracle,
            "oracle_bound": _bound(parts.get(ORACLE)),
        }
    )


def at_end(flush: np.ndarray) -> np.ndarray:
    """Mask [n] of the rows in the last TAIL of the flushes, flush [n] being the number of each row's."""
    return np.asarray(flush >= np.quantile(np.unique(flush), 1 - TAIL, method="lower"))


def _variant(rows: pd.DataFrame, name: str) -> dict[str, Any]:
    flush = rows["flush"].to_numpy()
    last = at_end(flush)
    bad = np.zeros(len(rows), bool)
    entry: dict[str, Any] = {"rows": len(rows), "flushes": int(np.unique(flush).size)}
    entry |= {"nonfinite": 0, "zeros": {}, "end": {}, "law": {}}
    for key, (middle, top) in ENDS.items():
        if not recorded(rows, name, middle):
            continue
        values = rows[middle].to_numpy(float)
        peaks = rows[top].to_numpy(float) if recorded(rows, name, top) else values
        bad |= ~np.isfinite(values) | ~np.isfinite(peaks)
        entry["zeros"][key] = int((values == 0).sum())
        entry["end"][key] = {"median": _middle(values[last]), "max": _highest(peaks[last])}
    for key, column in STATES.items():
        if recorded(rows, name, column):
            law = fit_slots(rows, column)
            entry["law"][key] = asdict(law) | {"text": law.text()}
    entry["nonfinite"] = int(bad.sum())
    if bad.any():
        first = rows.iloc[np.flatnonzero(bad)[rows["tokens"].to_numpy()[bad].argmin()]]
        stage = first.get("nonfinite_stage")
        entry["first_nonfinite"] = {key: int(first[key]) for key in ("tokens", "slot", "head")}
        entry["first_nonfinite"]["stage"] = stage if isinstance(stage, str) else None
    if "served" in entry["end"]:
        tail = rows["served_fro"].to_numpy(float)[last]
        # NaN sorts last, above inf
        worst = rows.iloc[np.flatnonzero(last)[np.argsort(tail, kind="stable")[-1]]]
        entry["worst"] = {key: int(worst[key]) for key in ("slot", "head", "tokens")}
    return entry


def _bound(rows: pd.DataFrame | None) -> dict[str, Any] | None:
    if rows is None or not recorded(rows, ORACLE, BOUND):
        return None
    worst = rows.iloc[np.argsort(rows[BOUND].to_numpy(float), kind="stable")[-1]]
    return {"max": float(worst[BOUND])} | {key: int(worst[key]) for key in ("slot", "head", "tokens")}


def _middle(values: np.ndarray) -> float:
    return quantiles_of(values, [0.5])[0]


def _highest(values: np.ndarray) -> float:
    return float(np.sort(values)[-1])


def _ratio(a: float, b: float) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(a) / np.float64(b))


def table(summary: dict[str, Any], where: str = "") -> Table:
    """The variants of a summary, worst served error first, in 80 columns; `where` is the last line."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption_justify="left", caption_style="")
    drawn.add_column("variant", no_wrap=True, max_width=19, overflow="ellipsis")
    for name in ("served", "max", "kept", "output", "× null"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("served: law", no_wrap=True)
    variants = summary["variants"]
    for name in sorted(variants, key=lambda v: _rank(_end(variants[v], "served", "max")), reverse=True):
        entry = variants[name]
        cells = [_end(entry, *at) for at in (("served", "median"), ("served", "max"), ("kept", "median"))]
        cells += [_end(entry, "o", "median")]
        ratio = entry["ratio"].get("served")
        drawn.add_row(
            name,
            *(error_text(x) for x in cells),
            "" if ratio is None else f"{float(ratio):.3g}",
            entry["law"].get("served", {}).get("text", ""),
        )
    lines = ["medians and max over slots, heads and the last tenth of the flushes"]
    lines += [_bad_line(name, entry) for name, entry in variants.items() if entry["nonfinite"]]
    if summary["oracle"]:
        pairs = [("cond₂", "cond2"), ("Skeel", "skeel"), ("max|A|^p", "max_power")]
        found = [f"{text} {float(summary['oracle'][k]['max']):.3g}" for text, k in pairs if k in summary["oracle"]]
        lines.append(f"I+A of the windows, at most: {', '.join(found)}")
    if (bound := summary.get("oracle_bound")) is not None:
        lines.append(f"the oracle itself is within {float(bound['max']):.1e} of the exact state, certified")
    drawn.caption = "\n".join(lines + ([where] if where else []))
    return drawn


def _end(entry: dict[str, Any], key: str, which: str) -> float:
    return float(entry["end"][key][which]) if key in entry["end"] else float("-inf")


def _rank(x: float) -> float:
    return float("inf") if np.isnan(x) else min(x, np.finfo(float).max)


def error_text(x: float) -> str:
    """1.2e-07, 0, inf, nan; a dash for a metric that the variant does not have."""
    return "–" if x == float("-inf") else "0" if x == 0 else f"{x:.1e}"


def _bad_line(name: str, entry: dict[str, Any]) -> str:
    first = entry["first_nonfinite"]
    stage = f", stage {first['stage']}" if first["stage"] else ""
    return (
        f"{name}: {entry['nonfinite']} of {entry['rows']} rows not finite, first at token {first['tokens']} "
        f"(slot {first['slot']}, head {first['head']}{stage})"
    )
