"""operator.png: radius against window, growth measured against predicted, and what is left of a perturbation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from harness.config import Config
from harness.figures.canvas import GREY, Sheet, note, plain, sheet, style
from harness.operator_summary import SHOWN, first_gate, remembering, short

if TYPE_CHECKING:
    import pandas as pd

# Okabe and Ito
COLOURS = {
    "substitution": "#000000",
    "block": "#009E73",
    "block/16": "#009E73",
    "horner": "#56B4E9",
    "doubling": "#D55E00",
    "newton": "#E69F00",
    "neumann": "#CC79A7",
    "neumann/1": "#0072B2",
    "neumann/2": "#332288",
    "neumann/3": "#882255",
}
DASHES = {"fp32/ieee": "-", "fp32/tf32": (0, (5, 2)), "bf16/bf16": (0, (1.5, 1.5)), "fp16/fp16": (0, (3, 1, 1, 1))}
TOP = 1e8


def figure(config: Config, closed: pd.DataFrame, injected: pd.DataFrame, folds: pd.DataFrame) -> Sheet:
    """The three panels; folds have a table and no panel."""
    drawn = sheet(13, 5.6, dpi=110)
    left, middle, right = drawn.subplots(1, 3)
    cosine = min(config.operator.cosines, key=lambda x: abs(x - SHOWN))
    _operators(left, first_gate(config, closed), cosine)
    _growth(middle, closed)
    _gains(right, injected)
    for axis in (left, middle, right):
        plain(axis)
    gate = config.operator.gates[0]
    text = (
        f"Left: beta/g {gate}, key cosine {cosine:g}, median over windows and draws of keys; thick lines radius, thin "
        "lines norm, crosses T that are not finite. Methods that stay on the black line are not drawn. "
        f"Middle: runs that diverged and stayed finite for four windows, of {len(closed):,} in all. "
        f"Right: a checkpoint perturbed by {config.operator.perturbation:g} of its rms; thick, its gain, median over "
        "the value heads whose gates alone keep more than half to the end (grey: e^G, the most that may be left); "
        "thin, what is left relative to the state, median over all heads. Lines of designs that round alike hide each "
        "other."
    )
    note(drawn, 0.05, 0.13, text, 195)
    drawn.subplots_adjust(left=0.05, right=0.985, top=0.93, bottom=0.235, wspace=0.22)
    return drawn


def _operators(axis: Axes, closed: pd.DataFrame, cosine: float) -> None:
    here = closed[closed["cosine"] == cosine]
    # formats that a method does not feel share a line
    lines: dict[tuple[str, tuple[float, ...]], tuple[list[str], pd.DataFrame]] = {}
    for (inverse, kind), part in here.groupby(["inverse", "format"], sort=False):
        by = part.groupby("window")[["radius", "norm"]].median()
        contracts = bool((by["radius"] <= 1 + 1e-6).all())
        if inverse not in COLOURS or (contracts and (inverse, kind) != ("substitution", "fp32/ieee")):
            continue
        curve = tuple(np.round(np.log10(by["radius"]), 1).fillna(np.inf))
        lines.setdefault((str(inverse), curve), ([], by))[0].append(str(kind))
    windows = np.array(sorted(here["window"].unique()))
    for n, ((inverse, _), (kinds, by)) in enumerate(lines.items()):
        colour, dashes = COLOURS[inverse], DASHES.get(kinds[0], "-")
        label = f"{inverse} {' '.join(map(short, kinds))}"
        axis.plot(by.index, by["radius"], color=colour, linestyle=dashes, linewidth=1.6, label=label)
        axis.plot(by.index, by["norm"], color=colour, linestyle=dashes, linewidth=0.6)
        lost = by.index[~np.isfinite(by["radius"])].to_numpy(float)
        # side by side, so that none hides another
        axis.plot(
            lost * 1.03 ** (n - len(lines) / 2), np.full(len(lost), TOP / 3), marker="x", color=colour, linestyle="none"
        )
    axis.axhline(1, color=GREY, linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(0.5, TOP)
    axis.set_xticks(windows, [str(w) for w in windows])
    axis.minorticks_off()
    axis.set_xlabel("window, tokens", fontsize=9)
    axis.set_title("radius of the window operator", fontsize=10, loc="left")
    axis.legend(fontsize=7, frameon=False, loc="upper left")


def _growth(axis: Axes, closed: pd.DataFrame) -> None:
    grown = closed[closed["diverged"] & np.isfinite(closed["growth"]) & np.isfinite(closed["joint"])]
    by_radius, by_joint = np.log(grown["radius"]), grown["joint"]
    axis.plot(by_radius, grown["growth"], linestyle="none", marker=".", markersize=3, color="#D55E00", alpha=0.5)
    axis.plot(by_joint, grown["growth"], linestyle="none", marker=".", markersize=3, color="#0072B2", alpha=0.5)
    low = max(1e-3, 0.5 * float(grown["growth"].min())) if len(grown) else 1e-2
    high = 2 * float(max(grown["growth"].max(), by_radius.max())) if len(grown) else 1.0
    axis.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_xlabel("predicted growth, log per window", fontsize=9)
    axis.set_title("measured growth of the state error, log per window", fontsize=10, loc="left")
    for label, colour, height in (
        ("radius of one window", "#D55E00", 0.95),
        ("product of all windows", "#0072B2", 0.9),
    ):
        axis.text(0.04, height, label, color=colour, fontsize=8, transform=axis.transAxes)


def _gains(axis: Axes, injected: pd.DataFrame) -> None:
    ours = injected[injected["what"] == "checkpoint"]
    long = remembering(ours)
    for variant, part in ours.groupby("variant", sort=False):
        colour, dashes = style(str(variant))
        line = part[part["head"].isin(long)].groupby("flush")["gain"].median()
        axis.plot(line.index, line, color=colour, linestyle=dashes, linewidth=1.5, label=str(variant))
        left = part.groupby("flush")["left"].median()
        axis.plot(left.index, left, color=colour, linestyle=dashes, linewidth=0.6)
    bound = ours[ours["head"].isin(long)].groupby("flush")["bound"].median()
    axis.plot(bound.index, bound, color=GREY, linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("flushes since", fontsize=9)
    axis.set_title("what is left of a perturbed checkpoint", fontsize=10, loc="left")
    axis.legend(fontsize=7, frameon=False, loc="lower left")
