"""The error budget as points: a panel per variant, a line per rounding site, error to the right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.budget import Account, accounts
from harness.figures.canvas import GREY, Sheet, marker, note, plain, room, sheet, strips, style
from harness.figures.choice import constants, without

if TYPE_CHECKING:
    import pandas as pd

ACROSS = 3  # panels side by side
SHARE = 0.07  # of a panel for a strip


def error_budget(frame: pd.DataFrame, error: str = "kept_median") -> Sheet:
    """What each site alone does to `error` (harness.budget), beside the root of their squares and the whole.

    frame: table `levels` of a sweep over precision.keep. Raises HarnessError as `accounts` does.
    """
    found = accounts(frame, error)
    # one order in all panels: the site that matters most somewhere comes first
    weight: dict[str, float] = {}
    for account in found:
        for site, value in account.parts.items():
            share = value / account.whole if math.isfinite(value) and account.whole else value
            weight[site] = max(weight.get(site, 0.0), math.inf if math.isnan(share) else share)
    order = sorted(weight, key=lambda site: -weight[site])
    down = -(-len(found) // ACROSS)
    text = caption(found) + " " + without(frame, error) + constants(frame)
    lines = len(textwrap.wrap(text, 150))
    each = 0.155 * (len(order) + 1)
    height = 1.15 + down * (0.45 + each) + 0.16 * lines
    figure = sheet(10, height)
    across = min(ACROSS, len(found))
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    ends = _limits(found)
    for axis, account in zip(axes, found, strict=False):
        _panel(axis, account, order, ends)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    # the panel above an empty place has the last axis of its column
    for axis in axes[max(len(found) - across, 0) : len(found)]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel("relative error", fontsize=9)
    axes[0].set_yticks(range(len(order)), order, fontsize=8)
    axes[0].set_ylim(len(order) - 0.4, -1.6)
    title = f"Error budget: {error}, every site rounding alone"
    figure.text(0.02, 1 - 0.12 / height, title, fontsize=12, va="top", weight="bold")
    looks: dict[str, dict[str, Any]] = {
        "one site alone": {"linestyle": "none", "marker": "o", "markersize": 5},
        "whole, all sites round": {"linestyle": "-", "linewidth": 1.5},
        "root of the sum of squares": {"linestyle": (0, (4, 2)), "linewidth": 1.5},
        "floor, nothing rounds": {"linestyle": ":", "linewidth": 1.5},
    }
    handles = [Line2D([], [], color=GREY, label=label, **look) for label, look in looks.items()]
    place = (0.015, 1 - 0.34 / height)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, ncols=4, fontsize=8.5, frameon=False)
    bottom = (0.6 + 0.16 * lines) / height
    note(figure, 0.02, bottom - 0.45 / height, text, 155)
    figure.subplots_adjust(left=0.13, right=0.985, top=1 - 0.9 / height, bottom=bottom, wspace=0.05, hspace=0.36 / each)
    return figure


def _numbers(found: Sequence[Account]) -> list[float]:
    each = [[*a.parts.values(), a.whole, a.sum, *([] if a.floor is None else [a.floor])] for a in found]
    return [x for numbers in each for x in numbers]


def _limits(found: Sequence[Account]) -> tuple[float, float, bool, bool]:
    """Whole decades that hold all numbers, and whether some are zero or not finite."""
    every = _numbers(found)
    shown = [math.log10(x) for x in every if math.isfinite(x) and x > 0] or [-8.0, 0.0]
    low, high = math.floor(min(shown)), math.ceil(max(shown) + 1e-9)
    return 10.0**low, 10.0**high, any(x == 0 for x in every), any(not math.isfinite(x) for x in every)


def _panel(axis: Axes, account: Account, order: Sequence[str], ends: tuple[float, float, bool, bool]) -> None:
    low, high, zeros, bad = ends
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_xlim(*room(low, high, zeros, bad, SHARE))
    plain(axis)
    upright = axis.get_yaxis_transform()
    for text, place in strips(axis, zeros, bad, SHARE, along="y"):
        # at the outer edge of the strip, in the line that the sites leave free
        edge, side = (0.01, "left") if place < 0.5 else (0.99, "right")
        axis.text(edge, -1, text, transform=upright, fontsize=8, ha=side, va="center", color=GREY)
    colour, _ = style(account.variant)
    for height, site in enumerate(order):
        if site not in account.parts:
            continue
        value = account.parts[site]
        look: dict[str, Any] = {"linestyle": "none", "color": colour, "clip_on": False}
        if value == 0:
            axis.plot(SHARE / 2, height, marker="o", markersize=3.5, transform=upright, **look)
        elif not math.isfinite(value):
            axis.plot(1 - SHARE / 2, height, marker="x", markersize=5, transform=upright, **look)
        else:
            axis.plot(value, height, marker=marker(account.variant), markersize=5, **look)
    lines: dict[Any, float | None] = {":": account.floor, "-": account.whole, (0, (4, 2)): account.sum}
    for dashes, number in lines.items():
        if number is None:
            continue
        drawn: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.5, "alpha": 0.75, "zorder": 1}
        if number > 0 and math.isfinite(number):
            axis.axvline(number, **drawn)
        else:
            place = SHARE / 2 if number == 0 else 1 - SHARE / 2
            axis.plot([place, place], [0, 1], transform=axis.transAxes, **drawn)
    axis.set_title(f"{account.variant}: {told(account)}", fontsize=9, loc="left", pad=4)


def told(account: Account) -> str:
    """The account in a few words: how much of the square of the whole the sites do not explain."""
    if math.isfinite(account.residual):
        return f"{account.residual:+.0%} unexplained"
    return "whole 0, sum not" if account.residual == -math.inf else "not finite"


def caption(found: Sequence[Account]) -> str:
    """What the marks are, how many parts are zero or not finite, and the sites that no run tried."""
    text = "A mark: the error where that site alone rounds as in the variant and all else is exact, median over seeds. "
    text += "Unexplained: 1 - Σ part² / whole², in the title of a panel. "
    clauses = []
    for account in found:
        values = list(account.parts.values())
        for what, count in (
            ("exactly zero", sum(x == 0 for x in values)),
            ("NaN", sum(map(math.isnan, values))),
            ("inf", sum(map(math.isinf, values))),
        ):
            if count:
                clauses.append(f"{account.variant}: {count} of {len(values)} {what}")
    if clauses:
        text += "On the strips: " + "; ".join(clauses) + ". "
    if lacking := untried(found):
        text += f"No run keeps {', '.join(lacking)}. "
    return text.strip()


def untried(found: Sequence[Account]) -> list[str]:
    """Sites and products that no run of the sweep keeps."""
    from harness.arithmetic import PRODUCTS, SITES

    tried = {site for account in found for site in account.parts}
    return [name for name in dict.fromkeys((*SITES, *PRODUCTS)) if name not in tried]
