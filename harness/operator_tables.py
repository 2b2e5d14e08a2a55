"""The tables that experiment=window_operator prints, in 80 columns, from its summary."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.operator_summary import short

COSINES = ("0", "0.9", "1")  # of the table of folds
PREDICTED = ("both", "neither", "predicted only", "diverged only", "near")


def report(summary: dict[str, Any], paths: dict[str, Any]) -> None:
    """Print all tables and where things lie."""
    console = Console(markup=False, highlight=False, width=80)
    for table in (safe(summary), radii(summary), agreement(summary), rates(summary), gains(summary), folds(summary)):
        console.print(table)
        console.print()
    for name, path in paths.items():
        console.print(f"{name}: {path}", soft_wrap=True)


def made(title: str, *columns: str) -> Table:
    """A plain table whose columns but the first are numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.title_style = ""
    for i, name in enumerate(columns):
        table.add_column(name, no_wrap=i > 0, justify="right" if i else "left", overflow="fold")
    return table


def noted(table: Table, text: str) -> Table:
    """The table with a note under it."""
    table.caption, table.caption_justify, table.caption_style = text, "left", ""
    return table


def safe(summary: dict[str, Any]) -> Table:
    """Methods that behave alike share a line."""
    cosines = [name for name in summary["safe_windows"][0] if name not in ("inverse", "format")]
    title = f"widest window with radius ≤ 1 : with no diverging run; beta/g {summary['gate']}"
    table = made(title, "by key cosine", *cosines)
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in summary["safe_windows"]:
        cells = tuple(f"{row[c][0]}:{row[c][1]}" for c in cosines)
        alike.setdefault(cells, {}).setdefault(row["inverse"], []).append(short(row["format"]))
    every = len({row["format"] for row in summary["safe_windows"]})
    for cells, names in alike.items():
        shown = [name if len(kinds) == every else f"{name} {' '.join(kinds)}" for name, kinds in names.items()]
        table.add_row(", ".join(shown), *cells)
    return table


def radii(summary: dict[str, Any]) -> Table:
    """Those that exceed 1 at some window; formats that agree to a percent share a line."""
    here = summary["operators"]
    cosine = here[0]["cosine"]
    windows = sorted({row["window"] for row in here})
    title = f"radius (measured growth factor) of a window, key cosine {cosine:g}, beta/g {summary['gate']}"
    table = made(title, "inverse and formats", *map(str, windows))
    methods: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in here:
        methods.setdefault((row["inverse"], short(row["format"])), {})[row["window"]] = row
    quiet: dict[str, list[str]] = {}
    alike: dict[tuple[Any, ...], list[str]] = {}
    for (inverse, kind), rows in methods.items():
        found = [number(rows[w]["radius"]) for w in windows]
        if all(x <= 1 + 1e-6 for x in found):
            quiet.setdefault(inverse, []).append(kind)
        else:
            # to a percent
            alike.setdefault((inverse, *(f"{math.log(x):.2f}" for x in found)), []).append(kind)
    for (inverse, *_), kinds in alike.items():
        table.add_row(f"{inverse} {' '.join(kinds)}", *(radius(methods[inverse, kinds[0]][w]) for w in windows))
    return noted(table, "never above 1: " + ", ".join(f"{name} {' '.join(kinds)}" for name, kinds in quiet.items()))


def radius(row: dict[str, Any]) -> str:
    """A radius, and beside it what a run grew by, where either says growth."""
    found, grown = number(row["radius"]), number(row["growth"])
    if found != found:
        return "not finite"
    return text(found) + (f" ({text(grown)})" if found > 1 + 1e-6 or grown > 1.1 else "")


def agreement(summary: dict[str, Any]) -> Table:
    """The two by two of every predictor, and the growth that single windows hide best."""
    title = "predicted growth (above 1, or T not finite) against divergence of the closed run"
    table = made(title, "predicted by", "keys", *(name.replace("predicted", "pred.") for name in PREDICTED))
    for row in summary["agreement"]:
        table.add_row(row["by"], row["keys"], *(f"{row[name]:,}" for name in PREDICTED))
    note = "near: predicted to grow by less than a run can tell, and not seen to"
    if (row := summary["hidden"]) is not None:
        note += (
            f". Fastest growth that no window looked at shows: {row['inverse']} {short(row['format'])}, window "
            f"{row['window']}, cosine {row['cosine']:g}, beta/g {row['beta']:g}/{row['g']:g}: radius at most "
            f"{row['radius_max']:.3f}, norm {row['norm_max']:.3f}, product {math.exp(row['joint']):.3f}, decode "
            f"{math.exp(row['growth']):.3f}"
        )
    return noted(table, note)


def rates(summary: dict[str, Any]) -> Table:
    """How far both predicted rates are from the measured ones."""
    title = "measured / predicted rate of the runs that diverged: 5, 50, 95 %"
    table = made(title, "key cosine", "runs", "by the product", "within 5 %", "by one window's radius")
    for row in summary["rates"]:
        product, single = (" ".join(f"{x:.3g}" for x in row[name]) for name in ("growth/joint", "growth/log radius"))
        table.add_row(f"{row['cosine']:g}", f"{row['runs']:,}", product, f"{row['within']:.1%}", single)
    return table


def gains(summary: dict[str, Any]) -> Table:
    """After 10, 100 and all flushes."""
    flushes = list(dict.fromkeys(row["flush"] for row in summary["gains"]))[-3:]
    title = "gain of a perturbation (in exact arithmetic, where it differs)"
    table = made(title, "after flushes", "", *map(str, flushes), "of e^G", "left")
    table.columns[0].no_wrap = True
    table.columns[1].min_width = 1
    for column in table.columns[2:5]:
        # a gain that two decodes differ in takes two numbers, on two lines where there is no room
        column.no_wrap = False
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in summary["gains"]:
        rows.setdefault((row["variant"], row["what"]), []).append(row)
    for (variant, what), some in rows.items():
        cells = (told(text(row["gain"]), text(row["exact"])) for row in some[-3:])
        last = some[-1]
        of_bound = f"{number(last['of_bound']):.3f}"
        table.add_row(variant, what.replace("checkpoint", "C"), *cells, of_bound, text(last["left_max"]))
    return noted(
        table,
        "C: the checkpoint perturbed; d, v: one record. Medians over the heads whose gates alone keep more than half "
        "to the end, or longest; of e^G: their largest gain / e^G after any flush, 1 being the most that exact "
        "arithmetic allows. left: ||delta|| / ||S|| after the last flush, worst of all heads",
    )


def told(found: str, exact: str) -> str:
    return found if found == exact else f"{found} ({exact})"


def folds(summary: dict[str, Any]) -> Table:
    title = "error of one fp32 fold in units of u of the state: product once, chained; replay; s"
    shown = [c for c in COSINES if any(f"{row['cosine']:g}" == c for row in summary["folds"])]
    table = made(title, "records", *(f"cosine {c}" for c in shown))
    for ring in dict.fromkeys(row["ring"] for row in summary["folds"]):
        cells = []
        for c in shown:
            row = next(r for r in summary["folds"] if r["ring"] == ring and f"{r['cosine']:g}" == c)
            cells.append(" ".join(f"{row[name]:.2f}" for name in ("once", "chain", "replay", "scale")))
        table.add_row(str(ring), *cells)
    return table


def number(x: Any) -> float:
    """What summary.json may hold as a string."""
    return float(x)


def text(x: Any) -> str:
    """Three digits at most."""
    value = number(x)
    if value != value or value > 1e99:
        return "–" if value != value else "inf"
    if 0 < abs(value) < 1e-6:
        return "<1e-6"
    return f"{value:.2g}" if abs(value) < 10 or abs(value) >= 1e4 else f"{value:.0f}"
