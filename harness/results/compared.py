"""A comparison, printed in 80 columns: what differs, the levels and their ratios, and what found no partner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.records import quantiles_of
from harness.results.comparing import Comparison, Pair
from harness.results.printing import grid, one_line
from harness.summary import error_text

WORST = 10
NAMED = 20  # rows without a partner that are printed


def show(found: Comparison, tolerance: float, console: Console) -> None:
    """Print everything that `compare` found."""
    console.print(f"A: {found.a.name}", soft_wrap=True)
    console.print(f"B: {found.b.name}", soft_wrap=True)
    if found.differ:
        differ = grid("differs", "A", "B", fold=True)
        for key, (a, b) in found.differ.items():
            differ.add_row(key, a, b)
        console.print(differ)
    for text, rows in (("only in A", found.only_a), ("only in B", found.only_b), ("twice, last taken", found.doubled)):
        if rows:
            more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            console.print(f"{text}, {len(rows)}: " + "; ".join(rows[:NAMED]) + more, soft_wrap=True)
    for text, side in (("A", found.a), ("B", found.b)):
        for directory, state in side.unread:
            console.print(f"left out of {text}: {directory}: {state}", soft_wrap=True)
    flagged = [pair for pair in found.pairs if pair.differs(tolerance)]
    alike = sum(pair.failed_alike for pair in found.pairs)
    if found.matched:
        single = len({pair.where for pair in found.pairs}) == 1
        console.print(_levels(found.pairs, tolerance) if single else _ratios(found.pairs, tolerance))
        if not single and flagged:
            console.print(_worst(flagged))
    console.print(
        f"{found.matched} rows matched, {len(found.only_a) + len(found.only_b)} not; {len(flagged)} of "
        f"{len(found.pairs)} levels outside {1 / (1 + tolerance):.3g}..{1 + tolerance:.3g}",
        soft_wrap=True,
    )
    if alike:
        console.print(f"{alike} levels not finite on both sides")


def ratio_text(ratio: float) -> str:
    return "–" if math.isnan(ratio) else f"{ratio:.3g}"


def level_text(x: float | None) -> str:
    return error_text(-math.inf if x is None else x)


def _levels(pairs: Sequence[Pair], tolerance: float) -> Table:
    drawn = grid("variant", "level", "A", "B", "B/A", "")
    for pair in pairs:
        mark = "not finite" if pair.failed_alike else "differs" if pair.differs(tolerance) else ""
        drawn.add_row(pair.variant, pair.metric, level_text(pair.a), level_text(pair.b), ratio_text(pair.ratio), mark)
    return drawn


def _ratios(pairs: Sequence[Pair], tolerance: float) -> Table:
    """The ratios of each variant and level over all rows; NaN ranks above inf, as everywhere."""
    drawn = grid("variant", "level", "rows", "least B/A", "median", "largest", "differ")
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.variant, pair.metric), []).append(pair)
    same = 0
    for (variant, metric), own in groups.items():
        ratios = np.array([pair.ratio for pair in own])
        if (ratios == 1).all():
            same += 1
            continue
        least, middle, largest = quantiles_of(ratios, [0, 0.5, 1])
        bad = sum(pair.differs(tolerance) for pair in own)
        drawn.add_row(variant, metric, str(len(own)), *map(ratio_text, (least, middle, largest)), str(bad or ""))
    if same:
        drawn.caption = f"{same} of {len(groups)} levels are the same in every row"
    return drawn


def _worst(flagged: Sequence[Pair]) -> Group:
    drawn = grid("", "variant", "level", "A", "B", "B/A")
    worst = sorted(flagged, key=lambda pair: -pair.distance)[:WORST]
    for i, pair in enumerate(worst, 1):
        drawn.add_row(str(i), pair.variant, pair.metric, level_text(pair.a), level_text(pair.b), ratio_text(pair.ratio))
    where = Text("\n".join(f"{i}: {one_line(pair.where)}" for i, pair in enumerate(worst, 1)), no_wrap=False)
    return Group(Text(f"furthest apart, {len(worst)} of {len(flagged)}:"), drawn, where)
