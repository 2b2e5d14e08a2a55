"""What figures share: the sheet, a look for every variant, strips for what no log axis can show, text under it.

Exact zeros lie on a strip at the low end of a log axis, NaN and infinity on one at its high end. A log axis would drop
both silently: an exact method and a diverged one would look like missing data.
"""

from __future__ import annotations

import io
import math
import textwrap
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

UNITS = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}
# Okabe and Ito; a variant keeps its colour, dash and marker in every figure
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
MARKERS = dict(zip(STYLES, "os^vDP", strict=True))
STRIP = 0.055  # height of the strips for zeros and non-finite values, as a share of a panel
GREY = "#666666"
PALE = "#f0f0f0"


class Sheet(Figure):
    """A figure without a window, which a notebook shows as it is."""

    def _repr_png_(self) -> bytes:
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png")
        _few_colours(Image.open(drawn).convert("RGB")).save(small, format="png", optimize=True)
        return small.getvalue()


def _few_colours(image: Image.Image) -> Image.Image:
    """With a palette of the commonest colours, which takes a third of the bytes, as a notebook holds its figures.

    White and the colours of variants stay exact: a palette by area gives them up where a line is thin.
    """
    colours = ["#FFFFFF", *(colour for colour, _ in STYLES.values())]
    own = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]
    common = image.quantize(256 - len(own), dither=Image.Dither.NONE).getpalette() or []
    wanted = Image.new("P", (1, 1))
    wanted.putpalette([*common, *(x for colour in own for x in colour)])
    few = image.quantize(palette=wanted, dither=Image.Dither.NONE)
    # the nearest colour is searched to a few bits only
    full, places, palette = np.asarray(image), np.asarray(few), few.getpalette() or []
    for colour in own:
        there = places[(full == colour).all(-1)]
        if there.size:
            place = 3 * int(np.bincount(there).argmax())
            palette[place : place + 3] = colour
    few.putpalette(palette)
    return few


def sheet(width: float, height: float, dpi: int = 120) -> Sheet:
    """An empty sheet, in inches."""
    drawn = Sheet(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(drawn)
    return drawn


def style(variant: str) -> tuple[str, Any]:
    """(colour, dashes) of a variant, the same in every figure."""
    number = zlib.crc32(variant.encode())
    return STYLES.get(variant, (OTHERS[number % len(OTHERS)], DASHES[number // 7 % len(DASHES)]))


def marker(variant: str) -> str:
    """The marker of a variant, the same in every figure."""
    return MARKERS.get(variant, "<>*hX"[zlib.crc32(variant.encode()) % 5])


def number(x: float) -> str:
    """Two digits, and whole numbers up to five."""
    if x == 0 or not math.isfinite(x) or 0.01 <= abs(x) < 10:
        return f"{float(x):.2g}"
    return f"{x:,.0f}" if 10 <= abs(x) < 1e5 else f"{x:.1e}"


def note(figure: Figure, x: float, y: float, text: str, width: int) -> None:
    """The sentences under a figure, from (x, y) downwards, wrapped at `width` characters."""
    figure.text(x, y, "\n".join(textwrap.wrap(text, width)), fontsize=8, va="top", linespacing=1.35)


def plain(axis: Axes) -> None:
    """Grid lines at the ticks, under everything; no frame on top and at the right."""
    axis.tick_params(labelsize=8)
    axis.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def room(low: float, high: float, zeros: bool, bad: bool, share: float = STRIP) -> tuple[float, float]:
    """Ends of a log axis for values in [low, high], with room for the strips that are needed."""
    ratio = high / low
    return low * ratio ** (-1.3 * share * zeros), high * ratio ** (1.3 * share * bad)


def strips(axis: Axes, zeros: bool, bad: bool, share: float = STRIP, along: str = "x") -> list[tuple[str, float]]:
    """Draw the strips that are needed; (label, middle as a share of the axis) of each.

    along: the axis that they are parallel to. The values, and so the strips' places, are on the other one.
    """
    labels = []
    for drawn, edge, text in ((zeros, 0.0, "exact 0"), (bad, 1 - share, "NaN, inf")):
        if drawn:
            corner, size = ((0, edge), (1, share)) if along == "x" else ((edge, 0), (share, 1))
            axis.add_patch(Rectangle(corner, *size, transform=axis.transAxes, color=PALE, lw=0, zorder=0))
            labels.append((text, edge + share / 2))
    return labels


def legend(figure: Figure, names: Sequence[str], marks: bool = False, top: float = 0.96) -> float:
    """Draw the variants' looks, as lines or as marks, and return the height left under them, a share of the figure."""
    fitting = min(6, max(1, 140 // (max((len(name) for name in names), default=0) + 8)))
    lines = max(-(-len(names) // fitting), 1)
    columns = max(-(-len(names) // lines), 1)
    handles = []
    for name in names:
        colour, dashes = style(name)
        look: dict[str, Any] = {"linestyle": dashes, "linewidth": 1.7}
        if marks:
            look = {"linestyle": "none", "marker": marker(name), "markersize": 6}
        handles.append(Line2D([], [], color=colour, label=name, **look))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.068, top),
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=1 if marks else 2.4,
        columnspacing=1.4,
    )
    inch = figure.get_size_inches()[1] / 8
    return top - (0.055 + 0.026 * lines) / inch
