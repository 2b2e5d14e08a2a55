"""The kernel part of a benchmark as tables of 80 columns, and as the figure bench.png."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.contenders import RING, SNAPSHOT, STEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

# colour, dashes and marker of who is not a variant
PEERS = {
    "sglang": ("#E69F00", "-", "s"),
    "sglang raw": ("#E69F00", (0, (1.2, 1.2)), "s"),
    "sglang compact": ("#882255", (0, (5, 2)), "D"),
    "fla": ("#999933", "-", "^"),
}
Points = list[tuple[int, float]]
PANELS = ("share of read bandwidth", "times as fast as the snapshot verify")


def heads_of(result: Mapping[str, Any]) -> list[str]:
    """The head counts that were measured, in their order."""
    return list(dict.fromkeys(c["heads"] for c in result["cases"]))


def tables(result: Mapping[str, Any]) -> list[Table]:
    """A table per head count: median µs of every row, and the share of the read bandwidth its bytes come to."""
    from rich import box
    from rich.table import Table

    drawn = []
    for heads in heads_of(result):
        cases = [c for c in result["cases"] if c["heads"] == heads]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", title_style="")
        table.title = f"{heads} heads: median µs, bytes that must move in % of the read bandwidth"
        table.add_column("", no_wrap=True, max_width=32, overflow="ellipsis")
        for c in cases:
            table.add_column(f"batch {c['batch']}", justify="right", no_wrap=True)
        for what, who in dict.fromkeys((r["what"], r["who"]) for c in cases for r in c["rows"]):
            cells = []
            for c in cases:
                r = next((r for r in c["rows"] if (r["what"], r["who"]) == (what, who)), None)
                cells.append(cell(r))
            table.add_row(f"{what}, {who}", *cells)
        drawn.append(table)
    return drawn


def cell(row: Mapping[str, Any] | None) -> str:
    """A median and a share; ≠ in front where the output is not that of our designs."""
    if row is None:
        return "–"
    us = f"{row['us']:.0f}" if row["us"] >= 1000 else f"{row['us']:.3g}"
    return f"{'≠' * (not row.get('agrees', True))}{us} {row['share']:3.0%}"


def lines(result: Mapping[str, Any]) -> list[str]:
    """What stands under the tables: device, goals, peers, what failed."""
    rates = result["bytes_per_second"]
    found = [
        f"{result['device']}, torch {result['torch']}, Triton {result['triton']}: "
        f"read {rates['read'] / 1e12:.2f} TB/s, copy {rates['copy'] / 1e12:.2f} TB/s",
        f"window {result['window']}, ring {result['ring']}, accepts {result['accepts']}; {result['repeats']} rounds",
    ]
    for g in result["goals"]:
        value = "not measured" if g["value"] is None else f"{g['value']:.2f}"
        met = "met" if g["met"] else "open" if g["value"] is None else "missed"
        found.append(f"{met}: {g['goal']}, {g['heads']}, batch {g['batch']}: {value} (at least {g['at_least']:g})")
    for name, facts in result["peers"].items():
        if "missing" in facts:
            found.append(f"peer not measured: {facts['missing']}")
        else:
            found.append(f"peer {name} {facts['version']}")
    for c in result["cases"]:
        where = f"{c['heads']}, batch {c['batch']}"
        for r in c["rows"]:
            if not r.get("agrees", True):
                found.append(f"≠ {r['what']}, {r['who']}, {where}: output {r['error']:.1e} from {r['against']}")
        found += [f"failed: {name}, {where}: {why}" for name, why in c["failed"].items()]
    return found + [f"no kernel: {name} ({why})" for name, why in result["left_out"].items()]


def style_of(who: str) -> tuple[str, Any, str]:
    """Colour, dashes and marker of a design or a peer."""
    from harness.figures.canvas import style

    return PEERS.get(who) or (*style(who), "o")


def curves(result: Mapping[str, Any], heads: str) -> tuple[dict[str, Points], dict[tuple[str, str], Points]]:
    """Per batch: shares of every ring verify, by who; and ratios to the fastest snapshot verify, by what and who."""
    shares: dict[str, Points] = {}
    ratios: dict[tuple[str, str], Points] = {}
    for c in (c for c in result["cases"] if c["heads"] == heads):
        base = min((r["us"] for r in c["rows"] if r["what"] == SNAPSHOT and r.get("agrees", True)), default=None)
        for r in c["rows"]:
            if r["what"] == RING:
                shares.setdefault(r["who"], []).append((c["batch"], r["share"]))
            if base is not None and r["what"] in (RING, STEP):
                ratios.setdefault((r["what"], r["who"]), []).append((c["batch"], base / r["us"]))
    return shares, ratios


def figure(result: Mapping[str, Any]) -> Figure:
    """A column per head count: how near a ring verify is to the memory's limit, and how much a step saves."""
    from matplotlib.lines import Line2D

    from harness.figures.canvas import note, sheet

    columns = heads_of(result)
    drawn = sheet(10, 8)
    axes = drawn.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    seen: dict[str, None] = {}
    for i, heads in enumerate(columns):
        shares, ratios = curves(result, heads)
        for who, points in shares.items():
            draw(axes[0, i], points, who, False)
        for (what, who), points in ratios.items():
            draw(axes[1, i], points, who, what == RING)
        seen |= dict.fromkeys([*shares, *(who for _, who in ratios)])
        axes[0, i].set_title(f"{heads} key/value heads", fontsize=10, loc="left")
        axes[0, i].axhline(0.8, color="#666666", linewidth=0.7, linestyle=(0, (2, 3)))
        axes[1, i].axhline(1, color="#666666", linewidth=0.7)
        axes[1, i].axhline(2.5, color="#666666", linewidth=0.7, linestyle=(0, (2, 3)))
        axes[1, i].set_xlabel("batch, slots", fontsize=9)
    finish(axes, sorted({c["batch"] for c in result["cases"]}))
    handles = []
    for who in seen:
        colour, dashes, marker = style_of(who)
        handles.append(Line2D([], [], color=colour, linestyle=dashes, marker=marker, markersize=4, label=who))
    drawn.text(0.075, 0.985, "Speed of the kernels", fontsize=12, va="top", weight="bold")
    drawn.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.068, 0.965), ncols=4, fontsize=8.5, frameon=False)
    bottom = 0.085 + 0.0195 * len(textwrap.wrap(caption(result), 150))
    note(drawn, 0.075, bottom - 0.07, caption(result), 150)
    drawn.subplots_adjust(left=0.075, right=0.97, top=0.86, bottom=bottom, wspace=0.06, hspace=0.1)
    return drawn


def caption(result: Mapping[str, Any]) -> str:
    """The sentences under the figure."""
    return (
        "Above: bytes that a ring verify must move, over its median time, as a share of the read bandwidth measured in "
        "the same run; dotted: the goal of 80 %. Below: time of the fastest snapshot verify over that of an amortised "
        "step (thick) and of a ring verify alone (thin, faint); dotted: the goal of 2.5 for exact_fold at 256 slots. "
        f"{result['device']}, window {result['window']}, ring {result['ring']}, accepts {result['accepts']}, "
        f"torch {result['torch']}, Triton {result['triton']}, medians of {result['repeats']} rounds."
    )


def draw(axis: Axes, points: Sequence[tuple[int, float]], who: str, faint: bool) -> None:
    """One line over batches."""
    colour, dashes, marker = style_of(who)
    x, y = zip(*points, strict=True)
    look: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.55, "markersize": 3} if faint else {"linewidth": 1.8}
    axis.plot(x, y, color=colour, linestyle=dashes, marker=marker, **({"markersize": 4.5} | look))


def finish(axes: Any, batches: Sequence[int]) -> None:
    """Scales, ticks and labels."""
    from harness.figures.canvas import plain

    for i, row in enumerate(axes):
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(batches), [str(b) for b in batches])
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            plain(axis)
        row[0].set_ylabel(PANELS[i], fontsize=9)
    for axis in axes[0]:
        ticks = axis.get_yticks()
        axis.set_yticks(ticks, [f"{t:.0%}" for t in ticks])
        axis.set_ylim(0, max(1.0, axis.get_ylim()[1]))
