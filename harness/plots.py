"""The drift figure: error against committed tokens, a panel per error kind, every variant in every panel.

Exact zeros lie on a marked row under the axis and non-finite values are crosses on a row above it; both are counted in
the caption. A log axis would drop them silently, so that an exact method and a diverged one look like missing data.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.series import PANELS, Series, counts, drawable, drift_series, limits

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32, fp16": 2.0**-11, "bf16": 2.0**-8}
# Okabe and Ito; a variant keeps its colour and dash in every figure
STYLES = {
    "exact_recurrent": ("#000000", "-"),
    "null_arm": ("#7f7f7f", (0, (1, 1))),
    "chunked_fp32": ("#0072B2", "-"),
    "chunked_tf32": ("#56B4E9", "-"),
    "chunked_bf16": ("#D55E00", "-"),
    "exact_fold": ("#009E73", (0, (5, 2))),
}
OTHERS = ("#CC79A7", "#E69F00", "#882255", "#332288", "#999933", "#661100", "#44AA99")
DASHES = ("-", (0, (5, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
STRIP = 0.055  # height of the rows for zeros and non-finite values, as a share of a panel
GREY = "#666666"


def style(variant: str) -> tuple[str, Any]:
    """(colour, dashes) of a variant, the same in every figure."""
    number = zlib.crc32(variant.encode())
    return STYLES.get(variant, (OTHERS[number % len(OTHERS)], DASHES[number // 7 % len(DASHES)]))


def caption(series: Mapping[str, Sequence[Series]], meta: Mapping[str, Any]) -> str:
    """The sentences under the figure: what is drawn, the counts, and every setting in `meta`, in its order."""
    every = [s for group in series.values() for s in group]
    text = (
        "Error against the fp64 oracle after each flush: median (line), 5–95 % (band) and maximum (dotted) "
    )
    text += "over slots and value heads"
    text += f", {max(s.values for s in every):,} rows per variant. " if every else ". "
    if found := counts(series):
        text += "Not on a log axis: " + "; ".join(found) + ". "
    return text + ", ".join(f"{key} {value}" for key, value in meta.items() if value is not None) + "."


def drift_figure(rows: pd.DataFrame, meta: Mapping[str, Any]) -> Figure:
    """The figure of one run: rows as `read_rows` gives them, meta {name: value} printed in the caption.

    Save it with `figure.savefig(path)`: 1200 pixels wide, some 1.3 times as wide as it is high.
    """
    series = drift_series(rows)
    figure = Figure(figsize=(10, 8), dpi=120)
    FigureCanvasAgg(figure)
    keys = list(PANELS)
    axes = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False).ravel()
    low, high = limits(series)
    zeros = any(s.floored.any() for group in series.values() for s in group)
    bad = any(s.bad.any() for group in series.values() for s in group)
    names = list(dict.fromkeys(s.variant for group in series.values() for s in group))
    for key, axis in zip(keys, axes, strict=True):
        _panel(axis, PANELS[key][0], series.get(key, []), names)
    _scales(axes, series, low, high, zeros, bad)
    figure.subplots_adjust(left=0.075, right=0.93, top=0.87, bottom=0.2, wspace=0.05, hspace=0.14)
    _legend(figure, names)
    text = "\n".join(textwrap.wrap(caption(series, meta), 150))
    figure.text(0.075, 0.125, text, fontsize=8, va="top", linespacing=1.35)
    return figure


def _panel(axis: Axes, title: str, group: Sequence[Series], names: Sequence[str]) -> None:
    axis.set_title(title, fontsize=10, loc="left", pad=4)
    for s in group:
        colour, dashes = style(s.variant)
        lower, upper = drawable(s.low), drawable(s.high)
        axis.fill_between(s.tokens, lower, upper, color=colour, alpha=0.13, linewidth=0)
        axis.plot(s.tokens, drawable(s.top), color=colour, linewidth=0.6, linestyle=":", alpha=0.8)
        axis.plot(s.tokens, s.line, color=colour, linewidth=1.7, linestyle=dashes)
    # rows in axes heights, one lane per variant, so that two exact variants do not hide each other
    lanes = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    across = axis.get_xaxis_transform()
    for s in group:
        colour, _ = style(s.variant)
        lane = STRIP * lanes[s.variant]
        exact, tiny = s.median == 0, s.floored & (s.median != 0)
        dots = {"linestyle": "none", "color": colour, "transform": across, "clip_on": False}
        axis.plot(s.tokens[exact], np.full(exact.sum(), lane), marker="o", markersize=2.6, **dots)
        axis.plot(s.tokens[tiny], np.full(tiny.sum(), lane), marker="o", markersize=2.6, mfc="none", **dots)
        bad = s.bad > 0
        axis.plot(s.tokens[bad], np.full(bad.sum(), 1 - STRIP + lane), marker="x", markersize=3.6, **dots)
    if not group:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)


def _scales(
    axes: Sequence[Axes],
    series: Mapping[str, Sequence[Series]],
    low: float,
    high: float,
    zeros: bool,
    bad: bool,
) -> None:
    """Log axes with room for the two rows where they are needed, and the unit roundoffs as guide lines."""
    decades = np.log10(high / low)
    bottom = low * 10 ** (-STRIP * 1.3 * decades * zeros)
    top = high * 10 ** (STRIP * 1.3 * decades * bad)
    tokens = np.concatenate([s.tokens for group in series.values() for s in group] or [np.array([1.0, 10.0])])
    for i, axis in enumerate(axes):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(bottom, top)
        axis.set_xlim(max(tokens.min(), 1) / 1.05, max(tokens.max(), 10) * 1.05)
        axis.tick_params(labelsize=8)
        axis.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        for drawn, edge, text in ((zeros, 0.0, "exact 0"), (bad, 1 - STRIP, "NaN, inf")):
            if drawn:
                axis.axhspan(edge, edge + STRIP, transform=axis.transAxes, color="#f2f2f2", zorder=0)
                if i % 2:
                    axis.annotate(
                        text,
                        (1.01, edge + STRIP / 2),
                        xycoords="axes fraction",
                        fontsize=8,
                        va="center",
                        color=GREY,
                    )
        for name, unit in UNITS.items():
            if low <= unit <= high:
                axis.axhline(unit, color=GREY, linewidth=0.7, linestyle=(0, (2, 3)), zorder=1)
                if i % 2:
                    axis.annotate(
                        f"u({name})",
                        (1.01, unit),
                        xycoords=("axes fraction", "data"),
                        fontsize=7.5,
                        va="center",
                        color=GREY,
                    )
        if i % 2 == 0:
            axis.set_ylabel("relative error", fontsize=9)
        if i > 1:
            axis.set_xlabel("committed tokens", fontsize=9)


def _legend(figure: Figure, names: Sequence[str]) -> None:
    handles = []
    for name in names:
        colour, dashes = style(name)
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.7, label=name))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.07, 0.985),
        ncols=min(max(len(names), 1), 6),
        fontsize=8.5,
        frameon=False,
        handlelength=2.4,
        columnspacing=1.4,
    )
