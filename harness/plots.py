"""The drift figure: error against committed tokens, a panel per error kind, every variant in every panel.

Exact zeros lie on a marked row under the axis and non-finite values are crosses on a row above it; the
caption counts both. A log axis would drop them silently: an exact method and a diverged one would look like
missing data.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

import harness
from harness.config import Config
from harness.series import PANELS, Series, coincident, counts, drawable, drift_series, limits

if TYPE_CHECKING:
    import pandas as pd

UNITS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}
# Okabe and Ito; a variant keeps its colour and dash in every figure
STYLES = {
    "exact_recurrent": ("#000000", "-"),
    "null_arm": ("#CC79A7", (0, (1.2, 1.2))),
    "chunked_fp32": ("#0072B2", "-"),
    "chunked_tf32": ("#56B4E9", "-"),
    "chunked_bf16": ("#D55E00", "-"),
    "exact_fold": ("#009E73", (0, (5, 2))),
}
OTHERS = ("#E69F00", "#882255", "#332288", "#999933", "#661100", "#44AA99", "#AA4499")
DASHES = ("-", (0, (5, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
STRIP = 0.055  # height of the rows for zeros and non-finite values, as a share of a panel
GREY = "#666666"


def style(variant: str) -> tuple[str, Any]:
    """(colour, dashes) of a variant, the same in every figure."""
    number = zlib.crc32(variant.encode())
    return STYLES.get(variant, (OTHERS[number % len(OTHERS)], DASHES[number // 7 % len(DASHES)]))


def caption(series: Mapping[str, Sequence[Series]], meta: Mapping[str, Any]) -> str:
    """The sentences under the figure: what is drawn, the counts, and all of `meta` in its order."""
    every = [s for group in series.values() for s in group]
    text = "Error against the fp64 oracle after each flush: median (line), 5–95 % (band) and maximum "
    text += "(dotted) over slots and value heads"
    text += f", {max(s.values for s in every):,} rows per variant. " if every else ". "
    if found := counts(series):
        text += "Not on a log axis: " + "; ".join(found) + ". "
    if found := coincident(series):
        text += "Lines that hide each other: " + "; ".join(found) + ". "
    settings = [f"{key} {value}" for key, value in meta.items() if value is not None]
    return text + ("Settings: " + ", ".join(settings) + "." if settings else "")


def settings(config: Config, device: str) -> dict[str, str]:
    """What a reader of the figure has to know of a run, as `meta` of `drift_figure`."""
    model, decode, ring, accept = config.model, config.decode, config.ring, config.acceptance
    rows = "" if model.rows is None else f", {model.rows} value rows"
    size = f"{model.key_heads}/{model.value_heads} heads, K={model.key_dim}, V={model.value_dim}{rows}"
    last = decode.seed + decode.slots - 1
    more = {"geometric": f" p={accept.p}", "fixed": f" {accept.sequence}"}.get(accept.kind, "")
    found = {
        "model": f"{config.model.name} ({size})",
        "family": decode.family + (" with captured gates" if decode.gates else ""),
        "tokens": f"{decode.tokens:,}" + (f" after a prefill of {decode.prefill:,}" if decode.prefill else ""),
        "L": f"{ring.length}",
        "window": f"1..{decode.window}" if decode.ragged else f"{decode.window}",
        "acceptance": accept.kind + more,
        "seed": f"{decode.seed}" if last == decode.seed else f"{decode.seed}..{last}, one per slot",
        "precision": config.precision.name,
        "device": device,
    }
    return found | {"harness": harness.__version__, "torch": metadata.version("torch")}


def drift_figure(rows: pd.DataFrame, meta: Mapping[str, Any]) -> Figure:
    """The figure of one run: rows as `read_rows` gives them, meta {name: value} printed in the caption.

    Save it with `figure.savefig(path)`: 1200 pixels wide, some 1.3 times as wide as it is high.
    """
    series = drift_series(rows)
    figure = Figure(figsize=(10, 8), dpi=120)
    FigureCanvasAgg(figure)
    keys = list(PANELS)
    axes = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    low, high = limits(series)
    zeros = any(s.floored.any() for group in series.values() for s in group)
    bad = any(s.bad.any() for group in series.values() for s in group)
    names = list(dict.fromkeys(s.variant for group in series.values() for s in group))
    for key, axis in zip(keys, axes, strict=True):
        _panel(axis, PANELS[key][0], series.get(key, []), names)
    _scales(axes, series, low, high, zeros, bad)
    figure.text(0.075, 0.985, "Drift per flush", fontsize=12, va="top", weight="bold")
    top = _legend(figure, names)
    lines = textwrap.wrap(caption(series, meta), 150)
    bottom = 0.085 + 0.0195 * len(lines)
    figure.text(0.075, bottom - 0.07, "\n".join(lines), fontsize=8, va="top", linespacing=1.35)
    figure.subplots_adjust(left=0.075, right=0.935, top=top, bottom=bottom, wspace=0.05, hspace=0.14)
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
        dots: dict[str, Any] = {"linestyle": "none", "color": colour, "transform": across, "clip_on": False}
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
    first, last = max(tokens.min(), 1.0), max(tokens.max(), 10.0)
    steps = (1, 2, 5) if last / first < 1e4 else (1,)
    ticks = [m * 10.0**k for k in range(12) for m in steps if first / 1.05 <= m * 10.0**k <= last * 1.05]
    for i, axis in enumerate(axes):
        labels: list[tuple[str, float, str]] = []
        axis.set_xscale("log")
        axis.set_yscale("log")
        # minor ticks cost most of the drawing time
        axis.minorticks_off()
        axis.set_ylim(bottom, top)
        axis.set_xlim(first / 1.05, last * 1.05)
        axis.set_xticks(ticks, [f"{x / 1000:g}k" if x >= 1000 else f"{x:g}" for x in ticks])
        axis.tick_params(labelsize=8)
        axis.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        for drawn, edge, text in ((zeros, 0.0, "exact 0"), (bad, 1 - STRIP, "NaN, inf")):
            if drawn:
                row = Rectangle((0, edge), 1, STRIP, transform=axis.transAxes, color="#f0f0f0", lw=0, zorder=0)
                axis.add_patch(row)
                labels.append((text, edge + STRIP / 2, "axes fraction"))
        for name, unit in UNITS.items():
            if low <= unit <= high:
                axis.axhline(unit, color=GREY, linewidth=0.7, linestyle=(0, (2, 3)), zorder=1)
                if not labels or unit > 10 ** (0.04 * decades) * labels[-1][1] or labels[-1][2] != "data":
                    labels.append((f"u({name})", unit, "data"))
        if i % 2:
            for text, height, units in labels:
                at: Any = ("axes fraction", units)
                axis.annotate(text, (1.01, height), xycoords=at, fontsize=8, va="center", color=GREY)
        else:
            axis.set_ylabel("relative error", fontsize=9)
        if i > 1:
            axis.set_xlabel("committed tokens", fontsize=9)


def _legend(figure: Figure, names: Sequence[str]) -> float:
    """Draws the legend and returns the height left under it, as a share of the figure."""
    fitting = min(6, max(1, 140 // (max((len(name) for name in names), default=0) + 8)))
    lines = max(-(-len(names) // fitting), 1)
    columns = max(-(-len(names) // lines), 1)
    handles = []
    for name in names:
        colour, dashes = style(name)
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.7, label=name))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.068, 0.96),
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=2.4,
        columnspacing=1.4,
    )
    return 0.905 - 0.026 * lines
