"""The figures of the conditioning run: error of every method in every format, and error against powers of A."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from harness.figures.canvas import GREY, Sheet, note, sheet
from harness.safety import POWERS, joined

LOWEST, HIGHEST = -8.0, 2.0  # log10 of the errors that colours tell apart
# marker and colour, Okabe and Ito
MARKS = {
    "substitution": ("o", "#000000"),
    "horner": ("v", "#E69F00"),
    "block": ("s", "#56B4E9"),
    "block/16": ("D", "#009E73"),
    "doubling": ("^", "#0072B2"),
    "neumann": ("P", "#D55E00"),
    "newton": ("X", "#CC79A7"),
}


def error_map(inputs: pd.DataFrame, rows: pd.DataFrame) -> Sheet:
    """Methods down, windows of every format across; colour: log10 of the worst error of T over the inputs."""
    table = joined(inputs, rows)
    table = table[table["in_domain"]]
    panels = {"beta up to 1": table[~table["above_one"]], "beta above 1": table[table["above_one"]]}
    panels = {title: points for title, points in panels.items() if len(points)}
    methods, formats = list(rows["method"].unique()), list(rows["format"].unique())
    figure = sheet(12.5, 1.6 + 3.3 * max(1, len(panels)), dpi=110)
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False).ravel().tolist()
    image = None
    for axis, (title, points) in zip(axes, panels.items(), strict=False):
        image = _map(axis, points, methods, formats)
        axis.set_title(title, fontsize=10, loc="left", pad=18)
    figure.subplots_adjust(left=0.1, right=0.9, top=0.9, bottom=0.135, hspace=0.36)
    if image is not None:
        bar = figure.colorbar(image, cax=figure.add_axes((0.915, 0.135, 0.013, 0.765)), extend="both")
        bar.set_label("log10 of the worst error", fontsize=9)
    figure.text(0.1, 0.975, "Error of an inverse by method, format and window", fontsize=12, va="top", weight="bold")
    text = (
        "Largest error of a strictly lower entry of T, over max|T|, of all windows and inputs of the model; of "
        "rhs_solve, which forms no T, the error of D. Hatched: some window is not finite; grey: exact. White lines "
        f"part formats, stored/product; columns are windows. {len(table):,} points, {table['input'].nunique()} inputs."
    )
    note(figure, 0.1, 0.06, text, 155)
    return figure


def _map(axis: Axes, points: pd.DataFrame, methods: list[str], formats: list[str]):  # type: ignore[no-untyped-def]
    windows = sorted(points["window"].unique())
    groups = points.groupby(["method", "format", "window"], observed=True)
    worst, lost = groups["error"].max(), groups["nonfinite"].sum()
    cells = [(method, form, w) for method in methods for form in formats for w in windows]
    colours = matplotlib.colormaps["viridis"].with_extremes(under="#bbbbbb")
    errors = np.array([worst.get(cell, np.nan) for cell in cells]).reshape(len(methods), -1)
    with np.errstate(divide="ignore"):
        values = np.where(errors == 0, LOWEST - 1, np.log10(errors).clip(LOWEST))
    gone = np.array([lost.get(cell, 0) > 0 for cell in cells]).reshape(values.shape)
    image = axis.imshow(
        np.where(gone, HIGHEST, values),
        cmap=colours,
        vmin=LOWEST,
        vmax=HIGHEST,
        aspect="auto",
        interpolation="nearest",
    )
    for i, j in zip(*np.nonzero(gone), strict=True):
        axis.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", edgecolor="black", linewidth=0))
    for edge in range(1, len(formats)):
        axis.axvline(edge * len(windows) - 0.5, color="white", linewidth=2.5)
    axis.set_yticks(range(len(methods)), methods, fontsize=8.5)
    axis.set_xticks(range(values.shape[1]), [str(w) for w in windows] * len(formats), fontsize=6.5)
    axis.tick_params(length=0)
    for i, form in enumerate(formats):
        place = (i + 0.5) * len(windows) - 0.5
        axis.annotate(form, (place, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="center", va="bottom", fontsize=9)  # fmt: skip
    return image


def power_figure(inputs: pd.DataFrame, rows: pd.DataFrame) -> Sheet:
    """Error in units of u against max|A|^p: series collapse on a line, substitution stays flat."""
    table = joined(inputs, rows)
    table = table[table["in_domain"] & table["method"].isin(list(MARKS))]
    figure = sheet(10, 5.6)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    shown = table[(table["nonfinite"] == 0) & (table["error_T"] > 0)]
    for axis, title, chosen in (
        (left, "powers of A are formed", list(POWERS)),
        (right, "no power of A is formed", [name for name in MARKS if name not in POWERS]),
    ):
        # in this order the least error lies on top
        for name in reversed(chosen):
            points, (mark, colour) = shown[shown["method"] == name], MARKS[name]
            axis.plot(points["power"].clip(lower=0.05), points["error_T"] / points["u"], mark, color=colour,
                      markersize=3, alpha=0.35, markeredgewidth=0, label=name)  # fmt: skip
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("max over p of max |A|^p")
        lost = table[table["method"].isin(list(chosen)) & (table["nonfinite"] > 0)]
        axis.plot(lost["power"], np.full(len(lost), 0.975), "x", color="black", markersize=4,
                  transform=axis.get_xaxis_transform(), clip_on=False)  # fmt: skip
        axis.legend(fontsize=8, loc="center right", markerscale=2.2, framealpha=0.9)
    if len(shown):
        for axis in (left, right):
            axis.set(xscale="log", yscale="log")
            ends = np.array([1.0, shown["power"].max()])
            for factor, width in ((1, 1.2), (10, 0.6), (0.1, 0.6)):
                axis.plot(
                    ends, factor * ends, color=GREY, linewidth=width, linestyle="-" if factor == 1 else ":", zorder=0
                )
            axis.axhline(1, color=GREY, linewidth=0.6, zorder=0)
    left.set_ylabel("error of T in units of u")
    figure.text(0.075, 0.985, "A series loses what the powers of A reach", fontsize=12, va="top", weight="bold")
    text = (
        "Medians over the windows of an input of the model of one length, in one format. Line: error = "
        "u max|A|^p, dotted a factor 10 to either side; u is the coarsest in use, twice it where operands are "
        f"truncated. Crosses on top: {int((table['nonfinite'] > 0).sum()):,} of {len(table):,} points with windows not "
        "finite. Powers below 0.05 at 0.05."
    )
    note(figure, 0.075, 0.095, text, 150)
    figure.subplots_adjust(left=0.075, right=0.98, top=0.88, bottom=0.2, wspace=0.05)
    return figure
