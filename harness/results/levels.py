"""summary.json as columns: one row per (run, variant).

A column is null where a variant has no such metric, its law no exponent, or its cost is not known. NaN and infinities
are results and stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from harness import cost
from harness.errors import HarnessError
from harness.records import TEXT
from harness.summary import ENDS, STATES

COUNTS = ("rows", "flushes", "nonfinite", "first_nonfinite_tokens")
LEVELS = pa.schema(
    [("variant", TEXT), ("backend", TEXT), *((name, pa.int64()) for name in COUNTS)]
    + [(f"{e}_{what}", pa.float64()) for e in ENDS for what in ("median", "max")]
    + [(f"{e}_zeros", pa.int64()) for e in ENDS]
    + [(f"{e}_law", TEXT) for e in STATES]
    + [(f"{e}_slope", pa.float64()) for e in STATES]
    + [(f"ratio_{e}", pa.float64()) for e in STATES]
    + [("bytes_held", pa.int64()), ("bytes_token", pa.float64()), ("cond2_max", pa.float64())]
)
# what one design is judged by against another
JUDGED = tuple(f"{e}_{what}" for e in ENDS for what in ("median", "max"))


def levels(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run, columns as LEVELS; an absent key is null."""
    costs = _costs(manifest)
    cond2 = summary.get("oracle", {}).get("cond2", {}).get("max")
    found = []
    for name, entry in summary["variants"].items():
        row: dict[str, Any] = {key: entry.get(key) for key in COUNTS} | {"variant": name}
        row["backend"] = manifest.get("variants", {}).get(name, {}).get("backend")
        row["first_nonfinite_tokens"] = entry.get("first_nonfinite", {}).get("tokens")
        for key in ENDS:
            end = entry["end"].get(key, {})
            row |= {f"{key}_{what}": number(end.get(what)) for what in ("median", "max")}
            row[f"{key}_zeros"] = entry["zeros"].get(key)
        for key in STATES:
            law = entry["law"].get(key, {})
            row |= {f"{key}_law": law.get("text"), f"{key}_slope": number(law.get("exponent"))}
            row[f"ratio_{key}"] = number(entry.get("ratio", {}).get(key))
        row |= costs.get(name, {}) | {"cond2_max": number(cond2)}
        found.append(row)
    return found


def _costs(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    try:
        return cost.of_manifest(manifest)
    except HarnessError:
        # a manifest of an earlier version, of a variant file that has changed since: nobody knows what it cost
        return {}


def number(x: Any) -> float | None:
    """A number of summary.json, where nan and inf are strings."""
    return None if x is None else float(x)
