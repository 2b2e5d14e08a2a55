"""The drift figure: error against committed tokens, a panel per error kind, every variant in every panel.

Exact zeros lie on a marked row under the axis and non-finite values are crosses on a row above it; the
caption counts both. A log axis would drop them silently: an exact method and a diverged one would look like
missing data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

import harness
from harness.config import Config
from harness.figures.canvas import GREY, STRIP, UNITS, Sheet, legend, note, plain, room, sheet, strips, style
from harness.series import PANELS, TINY, Series, coincident, counts, drawable, drift_series, limits

if TYPE_CHECKING:
    import pandas as pd

EDGE = 1e100  # stands for infinity where a band has to be drawn


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


def drift_figure(rows: pd.DataFrame, meta: Mapping[str, Any]) -> Sheet:
    """The figure of one run: rows as `read_rows` gives them, meta {name: value} printed in the caption.

    Save it with `figure.savefig(path)`: 1200 pixels wide, some 1.3 times as wide as it is high.
    """
    series = drift_series(rows)
    figure = sheet(10, 8)
    axes = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(s.variant for group in series.values() for s in group))
    for key, axis in zip(PANELS, axes.ravel().tolist(), strict=True):
        axis.set_title(PANELS[key][0], fontsize=10, loc="left", pad=4)
        panel(axis, series.get(key, []), names)
    scales(axes, series)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative error", fontsize=9)
    figure.text(0.075, 0.985, "Drift per flush", fontsize=12, va="top", weight="bold")
    top = legend(figure, names)
    text = caption(series, meta)
    bottom = 0.085 + 0.0195 * len(textwrap.wrap(text, 150))
    note(figure, 0.075, bottom - 0.07, text, 150)
    figure.subplots_adjust(left=0.075, right=0.935, top=top, bottom=bottom, wspace=0.05, hspace=0.14)
    return figure


def panel(axis: Axes, group: Sequence[Series], names: Sequence[str], share: float = STRIP) -> None:
    """Every series of one panel; names: all variants of the figure, each with a lane on the strips of height share."""
    # the scales are set once, for all panels
    axis.set_autoscale_on(False)
    for s in group:
        colour, dashes = style(s.variant)
        # a band that reaches zero or infinity ends at the edge of the panel, not beside it
        lower = np.where(s.low < TINY, TINY, drawable(s.low))
        upper = np.where(np.isfinite(s.high), np.maximum(s.high, TINY), EDGE)
        axis.fill_between(s.tokens, lower, upper, color=colour, alpha=0.13, linewidth=0)
        axis.plot(s.tokens, drawable(s.top), color=colour, linewidth=0.6, linestyle=":", alpha=0.8)
        axis.plot(s.tokens, s.line, color=colour, linewidth=1.7, linestyle=dashes)
    # rows in axes heights, one lane per variant, so that two exact variants do not hide each other
    lanes = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    across = axis.get_xaxis_transform()
    for s in group:
        colour, _ = style(s.variant)
        lane = share * lanes[s.variant]
        exact, tiny = s.median == 0, s.floored & (s.median != 0)
        dots: dict[str, Any] = {"linestyle": "none", "color": colour, "transform": across, "clip_on": False}
        axis.plot(s.tokens[exact], np.full(exact.sum(), lane), marker="o", markersize=2.6, **dots)
        axis.plot(s.tokens[tiny], np.full(tiny.sum(), lane), marker="o", markersize=2.6, mfc="none", **dots)
        bad = s.bad > 0
        axis.plot(s.tokens[bad], np.full(bad.sum(), 1 - share + lane), marker="x", markersize=3.6, **dots)
    if not group:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)


def scales(axes: np.ndarray, series: Mapping[str, Sequence[Series]], share: float = STRIP) -> None:
    """Log axes [rows, columns] with room for the strips that are needed, and the unit roundoffs as guide lines."""
    low, high = limits(series)
    every = [s for group in series.values() for s in group]
    zeros, bad = any(s.floored.any() for s in every), any(s.bad.any() for s in every)
    # as high as a line of text, where a strip is
    apart = 0.85 * share * np.log10(high / low)
    tokens = np.concatenate([s.tokens for s in every] or [np.array([1.0, 10.0])])
    first, last = max(tokens.min(), 1.0), max(tokens.max(), 10.0)
    steps = (1, 2, 5) if last / first < 1e4 and axes.shape[1] < 3 else (1,)
    ticks = [m * 10.0**k for k in range(12) for m in steps if first / 1.05 <= m * 10.0**k <= last * 1.05]
    for (i, j), axis in np.ndenumerate(axes):
        axis.set_xscale("log")
        axis.set_yscale("log")
        # minor ticks cost most of the drawing time
        axis.minorticks_off()
        axis.set_ylim(*room(low, high, zeros, bad, share))
        axis.set_xlim(first / 1.05, last * 1.05)
        axis.set_xticks(ticks, [f"{x / 1000:g}k" if x >= 1000 else f"{x:g}" for x in ticks])
        plain(axis)
        labels = [(text, at, "axes fraction") for text, at in strips(axis, zeros, bad, share)]
        for name, unit in UNITS.items():
            if low <= unit <= high:
                axis.axhline(unit, color=GREY, linewidth=0.7, linestyle=(0, (2, 3)), zorder=1)
                if not labels or unit > 10**apart * labels[-1][1] or labels[-1][2] != "data":
                    labels.append((f"u({name})", unit, "data"))
        if j == axes.shape[1] - 1:
            for text, height, units in labels:
                at: Any = ("axes fraction", units)
                axis.annotate(text, (1.01, height), xycoords=at, fontsize=8, va="center", color=GREY)
        if i == axes.shape[0] - 1:
            axis.set_xlabel("committed tokens", fontsize=9)
