"""Two sides side by side: where their configurations differ, and every level of every variant as a ratio B/A.

Rows are joined on what varies within either side, and on the variant; rows without a partner are named. NaN and
infinities equal nothing, least of all themselves: two runs that both failed have no level to agree in. Where they
failed alike, that is no difference either; such levels are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.results.keys import Flat, ordered, own, shown, varying, word
from harness.results.levels import JUDGED
from harness.results.sides import Row, Side

TOLERANCE = 0.1  # ratios within 1/(1 + TOLERANCE) .. 1 + TOLERANCE are equal


@dataclass(frozen=True)
class Pair:
    """One level on both sides; None: the variant has no such metric there."""

    where: str
    variant: str
    metric: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float:
        """B/A; 1 where both are exactly zero, NaN where either is absent or not finite."""
        if self.a is None or self.b is None or not (math.isfinite(self.a) and math.isfinite(self.b)):
            return math.nan
        if self.a == 0:
            return 1.0 if self.b == 0 else math.inf
        return self.b / self.a

    @property
    def distance(self) -> float:
        """|log ratio|, inf where there is none."""
        return abs(math.log(self.ratio)) if 0 < self.ratio < math.inf else math.inf

    @property
    def failed_alike(self) -> bool:
        """Whether both are NaN, or the same infinity."""
        if self.a is None or self.b is None or math.isfinite(self.a):
            return False
        return self.a == self.b or (math.isnan(self.a) and math.isnan(self.b))

    def equal(self, tolerance: float) -> bool:
        return self.distance <= math.log1p(tolerance)

    def differs(self, tolerance: float) -> bool:
        return not (self.equal(tolerance) or self.failed_alike)


@dataclass
class Comparison:
    """differ: key -> its two values; keys: what rows are joined on; matched: rows with a partner.

    only_a, only_b: rows without one. doubled: rows whose configuration came several times on a side; the run that was
    started last is compared.
    """

    a: Side
    b: Side
    keys: list[str]
    differ: dict[str, tuple[str, str]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    matched: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    def same(self, tolerance: float) -> bool:
        """Whether all was read, every row has a partner, and no level differs."""
        lacking = self.only_a or self.only_b or not self.pairs or self.a.unread or self.b.unread
        return not lacking and not any(pair.differs(tolerance) for pair in self.pairs)


def compare(a: Side, b: Side, whole: bool = False) -> Comparison:
    """Every row of a beside its partner in b. whole: joined on all that differs from the defaults, as commits are."""
    keys = ordered({*varying([row.config for row in a.rows]), *varying([row.config for row in b.rows])})
    found = Comparison(a, b, keys)

    def place(config: Flat) -> str:
        # a key that one source lacks and the other has at its default is no difference
        return shown(own(config), own(config)) if whole else shown(config, keys)

    left, right = (_indexed(side, place, found.doubled) for side in (a, b))
    for at, row in left.items():
        if at not in right:
            found.only_a.append(" ".join(at).strip())
            continue
        found.matched += 1
        for metric in JUDGED:
            pair = Pair(at[0], at[1], metric, row.levels[metric], right[at].levels[metric])
            if not (pair.a is None and pair.b is None):
                found.pairs.append(pair)
    found.only_b = [" ".join(at).strip() for at in right if at not in left]
    found.differ = _differ(a, b, [] if whole else keys)
    return found


def _indexed(side: Side, place: Callable[[Flat], str], doubled: list[str]) -> dict[tuple[str, str], Row]:
    found: dict[tuple[str, str], Row] = {}
    for row in side.rows:
        at = place(row.config), row.variant
        if at in found:
            doubled.append(f"{side.name}: {' '.join(at).strip()}")
            if row.started < found[at].started:
                continue
        found[at] = row
    return found


def _differ(a: Side, b: Side, joined: list[str]) -> dict[str, tuple[str, str]]:
    """What the sides do not share and are not joined on: configuration first, then source, versions, machines."""
    found = {}
    for key in varying([row.config for side in (a, b) for row in side.rows]):
        values = [list(dict.fromkeys(word(r.config[key]) for r in side.rows if key in r.config)) for side in (a, b)]
        if key not in joined and values[0] != values[1]:
            found[key] = " ".join(values[0]), " ".join(values[1])
    for key in dict.fromkeys([*a.facts, *b.facts]):
        texts = [" ".join(side.facts.get(key, ())) for side in (a, b)]
        if texts[0] != texts[1]:
            found[key] = texts[0] or "unknown", texts[1] or "unknown"
    return found
