"""Error against cost, a point per variant and run, and the front that no other point beats."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from harness.errors import HarnessError
from harness.figures.canvas import GREY, Sheet, legend, marker, note, number, plain, room, sheet, strips, style
from harness.figures.choice import chosen, constants, light, telling, without
from harness.pareto import pareto

if TYPE_CHECKING:
    import pandas as pd

SHARE = 0.06  # of the panel for a strip
TOLD = 12  # points of a front that the caption names
TOUCH = 14.0  # pixels between points whose labels would lie on each other
COSTS = {"bytes_held": "bytes held by a slot and layer", "bytes_token": "bytes moved per token and layer"}


def pareto_figure(
    frame: pd.DataFrame, x: str = "bytes_token", y: str = "kept_max", front: Sequence[bool] | np.ndarray | None = None
) -> Sheet:
    """Error y against cost x of a table `levels`, both logarithmic, the oracle left out.

    front [n]: the rows of `frame` joined by the line and numbered; None: those of harness.pareto. Points without cost
    lie on a strip at the right. Raises HarnessError for a column that is not there.
    """
    if x not in frame.columns:
        raise HarnessError(f"{x}: not a column of the table")
    frame = light(frame)
    names = chosen(frame, None, y)
    told = without(frame, y)
    on = np.asarray(pareto(frame, x, y) if front is None else front, bool)
    inside = frame["variant"].isin(names).to_numpy()
    frame, on = frame[inside], on[inside]
    cost, error = (frame[key].astype(float).to_numpy() for key in (x, y))
    order = np.flatnonzero(on)[np.lexsort((error[on], cost[on]))]
    text = caption(frame, x, y, order) + " " + told
    lines = len(textwrap.wrap(text, 150))
    height = 6.6 + 0.16 * lines
    figure = sheet(10, height)
    axis = figure.subplots()
    _scales(axis, cost, error)
    for name in names:
        mine = (frame["variant"] == name).to_numpy()
        _points(axis, cost[mine], error[mine], name)
    places = coincident(cost, error, order)
    _front(axis, cost[order], error[order], [(cost[p[0]], error[p[0]]) for p in places])
    axis.set_xlabel(COSTS.get(x, x), fontsize=9)
    axis.set_ylabel(f"error {y}", fontsize=9)
    figure.text(0.075, 1 - 0.12 / height, "Error against cost", fontsize=12, va="top", weight="bold")
    top = legend(figure, names, marks=True, top=1 - 0.34 / height)
    bottom = (0.62 + 0.16 * lines) / height
    note(figure, 0.075, bottom - 0.5 / height, text, 150)
    figure.subplots_adjust(left=0.075, right=0.935, top=top + 0.08 / height, bottom=bottom)
    return figure


def _places(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Masks [n] of what is off a log axis: no cost, cost 0, error 0, error not finite."""
    return ~np.isfinite(x), x == 0, y == 0, ~np.isfinite(y)


def _scales(axis: Axes, x: np.ndarray, y: np.ndarray) -> None:
    lost, free, zeros, bad = _places(x, y)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for values, put, low_end, high_end in ((x, axis.set_xlim, free, lost), (y, axis.set_ylim, zeros, bad)):
        shown = values[np.isfinite(values) & (values > 0)]
        low, high = (shown.min() / 1.3, shown.max() * 1.3) if shown.size else (1e-8, 1.0)
        put(*room(low, high, bool(low_end.any()), bool(high_end.any()), SHARE))
    plain(axis)
    # within a decade of cost the minor ticks are the ones with numbers
    axis.tick_params(which="minor", labelsize=8)
    for text, height in strips(axis, bool(zeros.any()), bool(bad.any()), SHARE):
        axis.text(1.01, height, text, transform=axis.transAxes, fontsize=8, va="center", color=GREY)
    for text, place in strips(axis, bool(free.any()), bool(lost.any()), SHARE, along="y"):
        label = {"exact 0": "no bytes"}.get(text, "no cost")
        axis.text(place, 1.01, label, transform=axis.transAxes, fontsize=8, ha="center", color=GREY)


def _points(axis: Axes, x: np.ndarray, y: np.ndarray, name: str) -> None:
    lost, free, zeros, bad = _places(x, y)
    # both in shares of the panel, as a point may be off either axis
    to_axes = axis.transData + axis.transAxes.inverted()
    usable = np.column_stack(
        [np.where(lost | free, axis.get_xlim()[0], x), np.where(zeros | bad, axis.get_ylim()[0], y)]
    )
    across, up = to_axes.transform(usable).T
    across = np.where(lost, 1 - SHARE / 2, np.where(free, SHARE / 2, across))
    up = np.where(bad, 1 - SHARE / 2, np.where(zeros, SHARE / 2, up))
    look: dict[str, Any] = {"linestyle": "none", "color": style(name)[0], "transform": axis.transAxes, "clip_on": False}
    axis.plot(across[~bad], up[~bad], marker=marker(name), markersize=6, alpha=0.8, markeredgewidth=0, **look)
    axis.plot(across[bad], up[bad], marker="x", markersize=6, **look)


def coincident(x: np.ndarray, y: np.ndarray, order: Sequence[int] | np.ndarray) -> list[list[int]]:
    """The points of `order`, those of equal x and y together: one design under several names."""
    found: dict[tuple[float, float], list[int]] = {}
    for i in order:
        found.setdefault((float(x[i]), float(y[i])), []).append(int(i))
    return list(found.values())


def _front(axis: Axes, x: np.ndarray, y: np.ndarray, numbered: Sequence[tuple[float, float]]) -> None:
    """Steps from point to point: nothing known lies below them. Numbers of points that touch share a label."""
    shown = (y > 0) & (x > 0) & np.isfinite(y)
    axis.plot(x[shown], y[shown], drawstyle="steps-post", color=GREY, linewidth=1, zorder=1)
    labels: list[tuple[list[str], Any, tuple[float, float], np.ndarray]] = []
    for i, (cost, error) in enumerate(numbered, 1):
        if cost > 0:
            drawn = error > 0 and np.isfinite(error)
            at: Any = ("data", "data" if drawn else "axes fraction")
            where = (cost, error if drawn else SHARE / 2 if error == 0 else 1 - SHARE / 2)
            place = axis.transData.transform(where) if drawn else np.full(2, np.inf)
            if labels and np.abs(place - labels[-1][3]).max() < TOUCH:
                labels[-1][0].append(str(i))
            else:
                labels.append(([str(i)], at, where, place))
    for numbers, at, where, _ in labels:
        text = ", ".join(numbers)
        axis.annotate(text, where, (6, 6), xycoords=at, textcoords="offset points", fontsize=8, weight="bold")


def caption(frame: pd.DataFrame, x: str, y: str, order: np.ndarray) -> str:
    """The front by its numbers, and how many points have no place on the axes."""
    lost, free, zeros, bad = _places(*(frame[key].astype(float).to_numpy() for key in (x, y)))
    text = f"{len(frame):,} points; {len(order)} on the front (line, numbered): no other point "
    text += "has at most their cost and at most their error. "
    told = []
    places = coincident(frame[x].astype(float).to_numpy(), frame[y].astype(float).to_numpy(), order)
    for i, place in enumerate(places[:TOLD], 1):
        row = frame.iloc[place[0]]
        told.append(f"{i} {name(frame.iloc[place], frame)}, {float(row[x]):,.0f} bytes, {number(row[y])}")
    text += "; ".join(told) + (f"; and {len(places) - TOLD} more. " if len(places) > TOLD else ". ")
    for what, mask in (("exact zeros", zeros), ("NaN or inf", bad), (f"no {x}", lost), (f"{x} 0", free)):
        if mask.any():
            mine = frame["variant"][mask].astype(str).value_counts(sort=False)
            text += (
                f"On a strip, {what}: {int(mask.sum())} (" + ", ".join(f"{k} {n}" for k, n in mine.items() if n) + "). "
            )
    return text + constants(frame)


def name(rows: pd.DataFrame, frame: pd.DataFrame) -> str:
    """A point, or several in one place, by variants and the config columns in which the points of frame differ."""
    found: dict[str, list[str]] = {}
    for _, row in rows.iterrows():
        own = ", ".join(f"{key} {row[key]}" for key in telling(frame))
        found.setdefault(own, []).append(str(row["variant"]))
    return "; ".join(", ".join(names) + (f" ({own})" if own else "") for own, names in found.items())
