"""What the kernels should reach, as ratios within one run: value, goal, and whether it is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.contenders import RING, SNAPSHOT, STEP
from harness.rivals import REPLAY

AGREE = 2.0**-6  # outputs are bf16 numbers, at most two roundings apart, or of bf16 operands
VERIFIES = ("chunked_tf32", REPLAY)  # our ring verifies that are held to a goal: fp32 records, and raw ones
LARGE, LARGEST = 64, 256  # slots from which memory decides, and from which flushes are judged
FASTER, SHARE, LOSSLESS = 1.6, 0.8, 2.5


def time_of(rows: Sequence[dict[str, Any]], what: str, who: str) -> float | None:
    """Median µs of one row."""
    return next((r["us"] for r in rows if (r["what"], r["who"]) == (what, who)), None)


def fastest(rows: Sequence[dict[str, Any]], what: str, start: str = "") -> tuple[str, float] | None:
    """Who does it fastest, of those whose name begins with `start` and whose output agrees; and its median µs."""
    found = [
        (r["who"], r["us"]) for r in rows if r["what"] == what and r["who"].startswith(start) and r.get("agrees", True)
    ]
    return min(found, key=lambda x: x[1], default=None)


def goals(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per goal and case; value None: not measured."""
    found: list[dict[str, Any]] = []
    for c in cases:
        rows, large = c["rows"], c["batch"] >= LARGE
        where = {"heads": c["heads"], "batch": c["batch"]}
        theirs = fastest(rows, RING, "sglang")
        for name in VERIFIES:
            mine = time_of(rows, RING, name)
            if mine is None:
                continue
            least = FASTER if large else 1.0
            text = f"ring verify of {name}: times as fast as {theirs[0] if theirs else 'sglang'}"
            found.append(line(where, text, theirs[1] / mine if theirs else None, least))
            if large:
                share = next(r["share"] for r in rows if (r["what"], r["who"]) == (RING, name))
                found.append(line(where, f"ring verify of {name}: share of the read bandwidth", share, SHARE))
        step, snapshot = time_of(rows, STEP, REPLAY), fastest(rows, SNAPSHOT)
        if c["batch"] >= LARGEST and step is not None and snapshot is not None:
            text = f"step of {REPLAY}: times as fast as a snapshot verify of {snapshot[0]}"
            found.append(line(where, text, snapshot[1] / step, LOSSLESS))
    return found


def line(where: dict[str, Any], text: str, value: float | None, least: float) -> dict[str, Any]:
    """One goal of one case."""
    return {**where, "goal": text, "value": value, "at_least": least, "met": value is not None and value >= least}
