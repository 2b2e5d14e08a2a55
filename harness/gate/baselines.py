"""What a suite measured when someone last accepted it: results/baselines/SUITE.json.

{suite, accepted: [{date, reason, versions, device, seed, source, changed: [{case, variant, metric, old, new}]}, ...],
values: {case: {variant: {metric: value}}}}. Nothing is written but by `accept`, and never a number that is not finite.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.gate.rules import Measured, judge, sound
from harness.provenance import read_json, source_digest, write_json

FOLDER = Path("results/baselines")
VERSIONS = ("numpy", "numba", "torch", "triton")


def load(folder: Path, suite: str) -> dict[str, Any]:
    """The file of a suite, {"accepted": [], "values": {}} where there is none. Raises HarnessError for a broken one."""
    path = folder / f"{suite}.json"
    if not path.exists():
        return {"suite": suite, "accepted": [], "values": {}}
    found = read_json(path)
    if found is None or not isinstance(found.get("values"), dict) or not isinstance(found.get("accepted"), list):
        raise HarnessError(f"{path}: not a baseline")
    for case, variants in found["values"].items():
        for variant, metrics in variants.items():
            for metric, value in metrics.items():
                # provenance writes what is not finite as text
                if not sound(value) or (isinstance(value, str) and value in ("nan", "inf", "-inf")):
                    raise HarnessError(f"{path}: {case}, {variant}, {metric}: {value} can judge nothing")
    return found


def accept(folder: Path, suite: str, measured: Measured, reason: str, device: str, seed: int) -> tuple[Path, int]:
    """Make `measured` the baseline of what it holds; returns the file and how many values changed.

    Other cases and variants stay. Raises HarnessError for an empty reason, nothing measured, or a value that is not
    finite; nothing is written then, nor where nothing changed.
    """
    if not reason.strip():
        raise HarnessError("reason: empty; accept needs one, for whoever reads the change")
    if not any(measured.values()):
        raise HarnessError(f"suite {suite}: nothing was measured, so nothing can be accepted")
    for case, variants in measured.items():
        for variant, metrics in variants.items():
            for metric, value in metrics.items():
                if not sound(value):
                    raise HarnessError(f"{case}, {variant}, {metric}: {value} is not finite and cannot be accepted")
                if judge(metric, value, value)[0] != "pass":
                    raise HarnessError(f"{case}, {variant}, {metric}: {value} fails beside itself")
            if metrics.get("rows", 0) == 0:
                raise HarnessError(f"{case}, {variant}: no rows, so nothing can be accepted")
    found = load(folder, suite)
    changed = []
    for case, variants in measured.items():
        for variant, metrics in variants.items():
            old = found["values"].setdefault(case, {}).get(variant, {})
            for metric in dict.fromkeys([*old, *metrics]):
                if old.get(metric) != metrics.get(metric):
                    place = {"case": case, "variant": variant, "metric": metric}
                    changed.append(place | {"old": old.get(metric), "new": metrics.get(metric)})
            found["values"][case][variant] = metrics
    path = folder / f"{suite}.json"
    if changed:
        # a first baseline replaces nothing, and is itself the list of what it brings
        entry = {"date": datetime.now(UTC).date().isoformat(), "reason": reason.strip(), "device": device, "seed": seed}
        entry |= {"versions": _versions(), "source": source_digest(), "count": len(changed)}
        found["accepted"].append(entry | {"changed": [c for c in changed if c["old"] is not None]})
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return path, len(changed)


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
