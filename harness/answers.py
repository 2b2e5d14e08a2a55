"""The last line of each notebook: what the data says, as Markdown whose every number and name is computed from it.

No outcome is written down here. A sentence names what is on either side of a limit, and says so where one side is
empty. NaN is worse than infinity and infinity than any number; neither is ever skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness import budget, safety
from harness.figures.canvas import number
from harness.figures.choice import chosen, light, values
from harness.figures.front import coincident, name
from harness.pareto import pareto
from harness.wording import Found, grid, named, percent, ratio, span, worst

if TYPE_CHECKING:
    import pandas as pd

# two orders of one sum were predicted to differ by less, so no smaller change counts (harness.experiments.drift)
FACTOR = 2.0
APART = 10.0  # a drift, not a level: levels of one design differed less over all inputs
INPUT = "decode.family"
UNEXPLAINED = 0.2  # share of the square of the whole that a budget may leave open
BOUNDED = ("none", "sat", "exact", "t^-")  # laws, by the start of their text, that end at a level


@dataclass(frozen=True)
class Answer:
    """Markdown, which a notebook renders."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


def drift(levels: pd.DataFrame, error: str = "kept", columns: str = "precision.name") -> Answer:
    """Table: the largest error at the shortest and the longest ring, by variant and precision, over seeds and inputs;
    then what a longer ring changes by more than FACTOR, and where most runs have a law that grows to the end.

    levels: table `levels` of a sweep over ring.length and `columns`. An input on which a cell is not finite is named.
    """
    levels = light(levels)
    if INPUT not in levels.columns:
        levels = levels.assign(**{INPUT: ""})
    lengths, across, streams = (values(levels, key) for key in ("ring.length", columns, INPUT))
    names = chosen(levels, None, f"{error}_max")
    short, long = lengths[0], lengths[-1]
    keys = ["variant", columns, INPUT, "ring.length"]
    largest = levels.groupby(keys, observed=True)[f"{error}_max"].agg(worst).to_dict()
    body: list[list[str]] = []
    better, worse, lost = Found(), Found(), Found()
    for variant in names:
        row = [variant]
        for column in across:
            ends = {s: [largest.get((variant, column, s, L), math.nan) for L in (short, long)] for s in streams}
            finite = {stream: x for stream, x in ends.items() if np.isfinite(x).all()}
            lost.add(variant, column, {s: math.nan for s in streams if s not in finite})
            better.add(variant, column, {s: ratio(x, y) for s, (x, y) in finite.items() if y * FACTOR < x})
            worse.add(variant, column, {s: ratio(y, x) for s, (x, y) in finite.items() if x * FACTOR < y})
            cell = " → ".join(number(worst(x[i] for x in finite.values())) for i in (0, 1)) if finite else "not finite"
            row.append(cell + (" *" if 0 < len(finite) < len(streams) else ""))
        body.append(row)
    head = f"Largest error {error}_max over all seeds and inputs, ring.length {short} → {long}, by {columns}"
    head += " (*: not finite on some input, and the largest of the others):" if lost.told() != "none" else ":"
    grows = _growing(levels, names, error, columns)
    told = [
        f"A longer ring lowers it by more than a factor {FACTOR:g}: {better.told('up to {} times')}.",
        f"It raises it by more: {worse.told('up to {} times')}.",
        f"Still growing at the end, in most runs of an input: {grows.told('up to {} runs')}.",
        f"Not finite: {lost.told()}.",
    ]
    return Answer(head + "\n\n" + grid(["variant", *map(str, across)], body) + "\n\n" + " ".join(told))


def _growing(levels: pd.DataFrame, names: Sequence[str], error: str, columns: str) -> Found:
    """Variant with precision where the law does not end at a level in most runs of an input; how many of them."""
    found = Found()
    for (variant, column), part in levels.groupby(["variant", columns], sort=False, observed=True):
        # what has failed has no law
        part = part[np.isfinite(part[f"{error}_max"].to_numpy(float))]
        law = part[f"{error}_law"].dropna().astype(str)
        grows = part.loc[law.index[~law.str.startswith(BOUNDED)]]
        runs = part[INPUT].value_counts()
        most = {s: float(n) for s, n in grows[INPUT].value_counts(sort=False).items() if 2 * n > runs[s]}
        if str(variant) in names:
            found.add(str(variant), column, most)
    return found


def conditioning(inputs: pd.DataFrame, points: pd.DataFrame, safe: float = 4.0) -> Answer:
    """Longest safe windows (harness.safety) over formats, which methods are safe throughout, which predictions hold."""
    found = safety.summarise(inputs, points, safe)
    longest = max(found["windows"])
    one, any_beta = found["safe_beta_one"], found["safe_any_beta"]
    body = [[m, span(one[m].values()), span(any_beta.get(m, {}).values())] for m in one]
    throughout = [m for m in one if {*one[m].values(), *any_beta.get(m, {}).values()} == {longest}]
    beyond = [f"{m} ({min(any_beta[m].values())})" for m in any_beta if m not in throughout]
    # the name of a check ends with its inequality
    checks = {name: check for name, check in found["checks"].items() if check is not None}
    holds = [name.split(":")[0] for name, check in checks.items() if check["holds"]]
    fails = [
        f"{name} (worst {number(float(check['worst']))}, {check.get('method')} in {check.get('format')})"
        for name, check in checks.items()
        if not check["holds"]
    ]
    formats = len(set(points["format"]))
    head = f"Longest safe window of {longest}, least and most over {formats} formats; safe: error at most {safe:g} n u:"
    collapse = {m: f["fp32/ieee"]["median"] for m, f in found["collapse"].items() if "fp32/ieee" in f}
    decides = [f"{m} {number(x)}" for m, x in collapse.items()]
    told = [
        f"Safe up to {longest} in every format and for any beta: {named(throughout)}.",
        f"Not so, with the longest window that is safe in all formats: {named(beyond)}.",
        f"Error over u max|A|^p where that power is 1,000 or more, median in fp32/ieee: {named(decides)}.",
        f"Predictions that hold: {'; '.join(holds) or 'none'}.",
        f"That fail, for all they name: {'; '.join(fails) or 'none'}.",
    ]
    return Answer(f"{head}\n\n{grid(['inverse', 'beta up to 1', 'any beta'], body)}\n\n{' '.join(told)}")


def error_budget(frame: pd.DataFrame, error: str = "kept_median") -> Answer:
    """Per variant the whole, the root of the sum of squares and the three largest sites; then where the sum fails."""
    found = budget.accounts(frame, error)
    body = []
    for a in found:
        largest = [f"{site} {percent(a.share(site), '')}" for site in list(a.counted)[:3] if a.parts[site] != 0]
        body.append([a.variant, number(a.whole), number(a.sum), percent(a.residual), ", ".join(largest) or "-"])
    explained = [a.variant for a in found if abs(a.residual) <= UNEXPLAINED]
    open_ = [f"{a.variant} ({percent(a.residual)})" for a in found if not abs(a.residual) <= UNEXPLAINED]
    single = [f"{a.variant} ({site})" for a in found for site in list(a.counted)[:1] if a.share(site) > 0.5]
    titles = ["variant", "whole", "√Σ site²", "unexplained", "largest sites, share of Σ site²"]
    return Answer(
        f"{error}, a site alone against all sites:\n\n{grid(titles, body)}\n\n"
        f"The squares of single sites add up to that of the whole within {UNEXPLAINED:.0%} in {named(explained)}, and "
        f"miss it by more in {named(open_)}. One site makes more than half of the sum in {named(single)}."
    )


def front(frame: pd.DataFrame, x: str = "bytes_token", y: str = "kept_max") -> Answer:
    """The front as a table, its two ends, and the variants that are never on it."""
    frame = light(frame)
    names = chosen(frame, None, y)
    frame = frame[frame["variant"].isin(names)]
    best = frame[np.asarray(pareto(frame, x, y))].sort_values([x, y])
    costs, errors = (best[key].astype(float).to_numpy() for key in (x, y))
    body = [
        [name(best.iloc[place], frame), f"{costs[place[0]]:,.0f}", number(errors[place[0]])]
        for place in coincident(costs, errors, range(len(best)))
    ]
    never = [v for v in names if v not in set(best["variant"])]
    bad = int((~np.isfinite(frame[y].to_numpy(float, na_value=np.nan))).sum())
    table = grid(["design", x, y], body)
    if best.empty:
        return Answer(f"No point has a finite {x} and {y}: {len(frame)} rows, {bad} errors not finite.")
    cost = costs[-1] / costs[0]
    return Answer(
        f"{len(best)} of {len(frame)} points are on the front:\n\n{table}\n\n"
        f"From its cheap end, {body[0][0]}, to its exact end, {body[-1][0]}, the error falls from {body[0][2]} to "
        f"{body[-1][2]} for {cost:.3g} times the bytes. Never on it: {named(never)}. Errors that are not finite: {bad}."
    )


def gates(table: pd.DataFrame, by: str, error: str = "kept_fro") -> Answer:
    """Range of memories of each run, error of the head that remembers shortest and longest, and what differs by ten.

    table: of harness.memory.heads. The first run is the one that the others are held against.
    """
    groups = values(table, by)
    names = list(dict.fromkeys(map(str, table["variant"])))
    body = []
    for variant in names:
        row = [variant]
        for group in groups:
            mine = table[(table[by] == group) & (table["variant"] == variant)].sort_values("memory")
            first, last = mine[error].iloc[[0, -1]]
            row.append(f"{number(first)} → {number(last)}, {number(worst(mine[error]))}")
        body.append(row)
    ranges = []
    for group in groups:
        memory = table.loc[table[by] == group, "memory"]
        ranges.append(f"{group} from {number(memory.min())} to {number(memory.max())} tokens")
    told = [f"Heads remember, {'; '.join(ranges)}."]
    known = table.loc[table[by] == groups[0], "memory"].max()
    alike = table[table["memory"] <= known]
    for other in groups[1:]:
        count = len(alike[alike[by] == other].drop_duplicates(["slot", "head"]))
        told.append(f"With {other} the largest error is more than {APART:g} times that with {groups[0]} in")
        told.append(f"{named(_apart(table, by, error, groups[0], other))}. Among its {count} heads whose memory is")
        told.append(f"within the longest of {groups[0]}, so in {named(_apart(alike, by, error, groups[0], other))}.")
    titles = ["variant", *map(str, groups)]
    head = f"{error} at the end, of the head with the shortest → longest memory, and the largest of all heads:"
    return Answer(f"{head}\n\n{grid(titles, body)}\n\n" + " ".join(told))


def _apart(table: pd.DataFrame, by: str, error: str, group: object, other: object) -> list[str]:
    """Variants whose largest error in `other` is not within APART times that in `group`, with both numbers."""
    found = []
    for variant, mine in table.groupby("variant", sort=False, observed=True):
        ours, theirs = (worst(mine.loc[mine[by] == x, error]) for x in (group, other))
        if (mine[by] == other).any() and not theirs <= APART * ours:
            found.append(f"{variant} ({number(ours)}, {number(theirs)})")
    return found
