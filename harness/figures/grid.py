"""Small multiples of drift: a row per ring length, a column per precision, or any other two config columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.figures.canvas import Sheet, legend, note, sheet
from harness.figures.choice import chosen, constants, light, require_alike, values, without
from harness.plots import panel, scales
from harness.series import PANELS, Series, coincident, error_series, totals

if TYPE_CHECKING:
    import pandas as pd

STRIP = 0.15  # inches of a strip, whose lanes must be told apart in a panel of any height


def drift_grid(
    frame: pd.DataFrame,
    rows: str | None = "ring.length",
    columns: str | None = "precision.name",
    error: str = "kept_fro",
    variants: Sequence[str] | None = None,
) -> Sheet:
    """Drift of `error` over tokens, a panel per value of the config columns `rows` and `columns`; None: no such axis.

    frame: table `quantiles` or `flushes` of several runs with config columns. error: a metric per row, as served_fro.
    Seeds, slots and value heads are pooled. Raises HarnessError for a column or a variant that is not there, and where
    other config columns differ within a panel.
    """
    frame = light(frame)
    names = chosen(frame, variants, error)
    down, across = values(frame, rows), values(frame, columns)
    found: dict[str, list[Series]] = {}
    for row in down:
        for column in across:
            where = "/".join(str(x) for x in (row, column) if x is not None) or "all"
            part = frame
            for key, value in ((rows, row), (columns, column)):
                part = part if key is None else part[part[key] == value]
            require_alike(part, f"panel {where}")
            series = {s.variant: s for s in error_series(part, error)}
            found[where] = [series[name] for name in names if name in series]
    return _draw(frame, found, [rows, columns], [down, across], error, names)


def _draw(
    frame: pd.DataFrame,
    found: Mapping[str, Sequence[Series]],
    keys: Sequence[str | None],
    sides: Sequence[Sequence[object]],
    error: str,
    names: Sequence[str],
) -> Sheet:
    (down, across), (row_key, column_key) = sides, keys
    text = caption(frame, found, error)
    lines = len(textwrap.wrap(text, 150))
    tall = min(max(7 / len(down), 1.2), 4.2)
    height = 1.35 + tall * len(down) + 0.16 * lines
    figure = sheet(10, height)
    axes = figure.subplots(len(down), len(across), sharex=True, sharey=True, squeeze=False)
    for axis, series in zip(axes.ravel().tolist(), found.values(), strict=True):
        panel(axis, series, names, STRIP / tall)
    scales(axes, found, STRIP / tall)
    for axis, value in zip(axes[0], across, strict=True):
        if column_key is not None:
            axis.set_title(f"{column_key} {value}", fontsize=9, loc="left", pad=4)
    for axis, value in zip(axes[:, 0], down, strict=True):
        axis.set_ylabel("relative error" if row_key is None else f"{row_key}\n{value}", fontsize=8.5, labelpad=2)
    title = f"Drift per flush: {title_of(error)}"
    figure.text(0.075, 1 - 0.12 / height, title, fontsize=12, va="top", weight="bold")
    top = legend(figure, names, top=1 - 0.34 / height)
    bottom = (0.62 + 0.16 * lines) / height
    note(figure, 0.075, bottom - 0.5 / height, text, 150)
    figure.subplots_adjust(left=0.09, right=0.935, top=top + 0.08 / height, bottom=bottom, wspace=0.06, hspace=0.12)
    return figure


def title_of(error: str) -> str:
    """What a metric is, in words; its name where no panel of the drift figure shows it."""
    return next((title for title, middle, _ in PANELS.values() if middle == error), error)


def caption(frame: pd.DataFrame, found: Mapping[str, Sequence[Series]], error: str) -> str:
    """What is drawn, how often it is zero or not finite over all panels, and what all runs share."""
    of = "bins" if "quantile" in frame.columns else "rows"
    text = (
        f"Error {error} against the fp64 oracle: median (line), 5–95 % (band) and maximum (dotted) over seeds, slots "
    )
    text += f"and value heads; all panels share their axes. {len(found)} panels, "
    text += f"{max((s.values for group in found.values() for s in group), default=0):,} {of} per line at most. "
    if clauses := totals(found):
        text += f"Not on a log axis, of the {of} in all panels: " + "; ".join(clauses) + ". "
    if hidden := coincident(found):
        text += "Lines that hide each other: " + "; ".join(hidden) + ". "
    return text + without(frame, error) + constants(frame)
