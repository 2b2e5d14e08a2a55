"""How an answer words what it found: lists, shares, spans, a Markdown table, and like findings told together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from harness.figures.canvas import number


class Found:
    """What holds of a variant with a precision, on which inputs and how much; told with like ones taken together."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, list[str]]] = {}  # inputs -> variant -> precisions
        self.most: dict[str, float] = {}

    def add(self, variant: str, column: object, where: Mapping[object, float]) -> None:
        """where: input -> how much."""
        if where:
            key = named(where)
            self.all.setdefault(key, {}).setdefault(variant, []).append(str(column))
            self.most[key] = max(self.most.get(key, 0.0), *where.values())

    def told(self, much: str = "") -> str:
        """`on inputs: variants with precisions`; much: words around the largest number of a group."""
        parts = []
        for key, found in self.all.items():
            alike: dict[str, list[str]] = {}
            for variant, columns in found.items():
                alike.setdefault("/".join(columns), []).append(variant)
            text = ", ".join(f"{'/'.join(variants)} with {columns}" for columns, variants in alike.items())
            more = f" ({much.format(number(self.most[key]))})" if much else ""
            parts.append((f"on {key}, " if key else "") + text + more)
        return "; ".join(parts) or "none"


def worst(x: Iterable[float]) -> float:
    """The largest, NaN if any is; NaN of nothing."""
    found = np.asarray(list(x), float)
    return float(np.max(found)) if found.size else math.nan


def percent(x: float, sign: str = "+") -> str:
    return f"{x:{sign}.0%}" if math.isfinite(x) else "not finite"


def ratio(large: float, small: float) -> float:
    return large / small if small else math.inf


def span(x: Iterable[int]) -> str:
    found = sorted(set(x))
    return "-" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def named(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"


def grid(titles: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left."""
    rules = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rules, *body))
