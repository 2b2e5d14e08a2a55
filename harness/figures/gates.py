"""What captured gates look like and what they do: decay per head, and error against the memory that follows from it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.figures.canvas import GREY, Sheet, legend, marker, note, plain, room, sheet, strips, style
from harness.figures.choice import values

if TYPE_CHECKING:
    import pandas as pd

SHARE = 0.06  # of a panel for a strip


def gate_figure(table: pd.DataFrame, by: str, error: str = "kept_fro") -> Sheet:
    """table: of harness.memory.heads. Left: |g| per token of every head, sorted; right: `error` against memory.

    by: the column that tells runs apart; the first has full marks, later ones have hollow ones.
    """
    groups = values(table, by)
    names = [str(name) for name in table["variant"].drop_duplicates()]
    text = caption(table, by, error)
    lines = len(textwrap.wrap(text, 150))
    height = 5.6 + 0.16 * lines
    figure = sheet(10, height)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _decays(left, table, by, groups)
    _errors(right, table, by, groups, error, names)
    figure.text(0.075, 1 - 0.12 / height, "Gates of a head and its error", fontsize=12, va="top", weight="bold")
    top = legend(figure, names, marks=True, top=1 - 0.34 / height)
    bottom = (0.62 + 0.16 * lines) / height
    note(figure, 0.075, bottom - 0.5 / height, text, 150)
    figure.subplots_adjust(left=0.075, right=0.935, top=top - 0.02 / height, bottom=bottom, wspace=0.2)
    return figure


def _ends(x: np.ndarray, low_strip: bool, high_strip: bool) -> tuple[float, float]:
    shown = x[np.isfinite(x) & (x > 0)]
    low, high = (shown.min() / 1.5, shown.max() * 1.5) if shown.size else (1e-8, 1.0)
    return room(low, high, low_strip, high_strip, SHARE)


def _decays(axis: Axes, table: pd.DataFrame, by: str, groups: list[Any]) -> None:
    lists = table[["decay_low", "decay", "decay_high"]].to_numpy(float)
    zeros, bad = bool((lists == 0).any()), bool((~np.isfinite(lists)).any())
    axis.set_yscale("log")
    axis.minorticks_off()
    low, high = _ends(lists, zeros, bad)
    axis.set_ylim(low, high)
    plain(axis)
    for text, height in strips(axis, zeros, bad, SHARE):
        axis.text(0.01, height, text, transform=axis.transAxes, fontsize=8, va="center", color=GREY)
    start = 0
    places, labels = [], []
    for number, group in enumerate(groups):
        mine = table[table[by] == group].drop_duplicates(["slot", "head"]).sort_values("memory")
        at = start + np.arange(len(mine))
        # values off the axis lie in the middle of their strip
        ratio = np.log(high / low)
        inside = [_placed(mine[key].to_numpy(float), low, ratio) for key in ("decay_low", "decay", "decay_high")]
        axis.vlines(at, inside[0], inside[2], color=GREY, linewidth=1.2)
        fill = "black" if number == 0 else "white"
        axis.plot(at, inside[1], linestyle="none", marker="o", markersize=4.5, mfc=fill, mec="black", clip_on=False)
        places += at.tolist()
        labels += [str(head) for head in mine["head"]]
        axis.text(at.mean(), 1.02, str(group), transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
        start += len(mine) + 1
    axis.set_xticks(places, labels, fontsize=8)
    axis.set_xlabel("value head, shortest memory first", fontsize=9)
    axis.set_ylabel("|g| per token", fontsize=9)


def _placed(x: np.ndarray, low: float, ratio: float) -> np.ndarray:
    """x [n], zeros and non-finite values at the middle of the strips of an axis of that log length."""
    at_zero, at_bad = low * np.exp(ratio * SHARE / 2), low * np.exp(ratio * (1 - SHARE / 2))
    return np.where(x == 0, at_zero, np.where(np.isfinite(x), x, at_bad))


def _errors(axis: Axes, table: pd.DataFrame, by: str, groups: list[Any], error: str, names: list[str]) -> None:
    x, y = table["memory"].to_numpy(float), table[error].to_numpy(float)
    never, zeros, bad = bool(np.isinf(x).any()), bool((y == 0).any()), bool((~np.isfinite(y)).any())
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.minorticks_off()
    x_ends, y_ends = _ends(x, False, never), _ends(y, zeros, bad)
    axis.set_xlim(*x_ends)
    axis.set_ylim(*y_ends)
    plain(axis)
    for text, height in strips(axis, zeros, bad, SHARE):
        axis.text(1.01, height, text, transform=axis.transAxes, fontsize=8, va="center", color=GREY)
    for _, place in strips(axis, False, never, SHARE, along="y"):
        axis.text(place, 1.01, "never", transform=axis.transAxes, fontsize=8, ha="center", color=GREY)
    for number, group in enumerate(groups):
        for name in names:
            mine = table[(table[by] == group) & (table["variant"] == name)].sort_values("memory")
            across = _placed(mine["memory"].to_numpy(float), x_ends[0], float(np.log(x_ends[1] / x_ends[0])))
            value = mine[error].to_numpy(float)
            up = _placed(value, y_ends[0], float(np.log(y_ends[1] / y_ends[0])))
            look: dict[str, Any] = {"linestyle": "none", "markersize": 6, "clip_on": False}
            colour = style(name)[0]
            fill = colour if number == 0 else "none"
            some = np.isfinite(value)
            axis.plot(across[some], up[some], marker=marker(name), mfc=fill, mec=colour, **look)
            axis.plot(across[~some], up[~some], marker="x", color=colour, **look)
    marks = [
        Line2D([], [], linestyle="none", marker="o", color=GREY, mfc=GREY if i == 0 else "none", label=str(group))
        for i, group in enumerate(groups)
    ]
    axis.legend(handles=marks, fontsize=8.5, loc="upper left", frameon=False)
    axis.set_xlabel("memory of the head, tokens", fontsize=9)
    axis.set_title(f"error {error} at the end", fontsize=9, loc="left", pad=12)


def caption(table: pd.DataFrame, by: str, error: str) -> str:
    """What the marks are, and how many of them are on strips."""
    counts = [
        f"{group}: {len(mine.drop_duplicates(['slot', 'head']))}" for group, mine in table.groupby(by, sort=False)
    ]
    text = (
        "Left: |g| per token between two flushes, median (mark) and 5–95 % (line) over the flushes of a head. Right: "
    )
    text += f"median of {error} over the last tenth of the flushes against the memory tokens / Σ|g|, a mark per head "
    text += f"and variant; filled for the first run, hollow for others. Heads: {', '.join(counts)}. "
    y = table[error].to_numpy(float)
    told = {
        "exact zeros": int((y == 0).sum()),
        "NaN": int(np.isnan(y).sum()),
        "inf": int(np.isinf(y).sum()),
        "heads that never decay": len(table[np.isinf(table["memory"])].drop_duplicates([by, "slot", "head"])),
    }
    if found := [f"{n} {what}" for what, n in told.items() if n]:
        text += f"On the strips, of {len(table)} marks: {', '.join(found)}."
    return text
