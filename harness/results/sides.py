"""One side of a comparison: the levels of a run, of a sweep, or of everything that a commit has run.

A run is held to a commit by manifest["commit"], the tree it was made from; one that had changes belongs to
COMMIT+dirty, and only to that. The digest of the source names runs, too, and works in a copy without history. What
cannot be read of a run stands beside the levels, so that two sides are not called equal that were not read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.provenance import read_json
from harness.results.holdings import Result, holdings
from harness.results.keys import Flat
from harness.results.levels import JUDGED
from harness.results.parts import Part, parts_of

CHANGED = "+dirty"  # behind a commit whose tree had changes
SHORTEST = 4  # digits that name a commit
FACTS = ("source", "commit", "python", "cpu", "device")


@dataclass(frozen=True)
class Row:
    """One variant of one run. levels: name -> number, None where the variant has no such metric."""

    variant: str
    config: Flat
    levels: dict[str, float | None]
    started: str


@dataclass(frozen=True)
class Side:
    """name, as asked for; facts: source, commit, versions and machines, each as often as they differ.

    unread: (directory, state) of the runs that are not finished, or are damaged.
    """

    name: str
    rows: list[Row]
    facts: dict[str, list[str]]
    unread: list[tuple[str, str]]


def side_of(path: Path) -> Side:
    """Every run under path. Raises HarnessError."""
    found, unread = _parts(path)
    return _side(str(path), found, unread)


def side_at(text: str, results_dir: Path) -> Side:
    """The runs of a commit, or of a source digest, by its first digits. Raises HarnessError where there are none."""
    if len(text.removesuffix(CHANGED)) < SHORTEST:
        raise HarnessError(f"--commits: {text!r} is too short; give {SHORTEST} digits or more")
    parts, unread = _parts(results_dir)
    found = [part for part in parts if made_by(part.result, text)]
    if not found:
        raise HarnessError(f"--commits: {text}: no run of it in {results_dir}")
    made = {part.result.source for part in found}
    # of a run without levels no more is known than its source; one that does not say may be of this commit
    side = _side(text, found, [(directory, state) for directory, state in unread if _source(directory) in {"", *made}])
    commits, sources = side.facts["commit"], side.facts["source"]
    if len(commits) > 1 or (len(sources) > 1 and not text.endswith(CHANGED)):
        raise HarnessError(f"--commits: {text!r} names several: {', '.join(commits if len(commits) > 1 else sources)}")
    return side


def made_by(result: Result, text: str) -> bool:
    """Whether text is the beginning of the run's commit, or of its source digest."""
    commit = str(result.manifest.get("commit") or "")
    if result.source.startswith(text):
        return True
    same = commit.endswith(CHANGED) == text.endswith(CHANGED)
    return bool(commit) and same and commit.startswith(text.removesuffix(CHANGED))


def _source(directory: str) -> str:
    """The source digest of a run that was not read, by its manifest or its status; "" where neither says."""
    manifest = read_json(Path(directory, "manifest.json")) or {}
    status = read_json(Path(f"{directory}.status.json")) or {}
    return str(manifest.get("identity", {}).get("source") or status.get("source") or "")


def _parts(path: Path) -> tuple[list[Part], list[tuple[str, str]]]:
    """The levels under path, and what could not be read."""
    held = holdings([path])
    found = parts_of(held, "levels")
    if not found:
        told = "; ".join(f"{directory}: {state}" for directory, state in held.left_out[:3])
        raise HarnessError(f"{path}: no finished run with levels ({told})")
    return found, held.unread


def _side(name: str, parts: Sequence[Part], unread: list[tuple[str, str]]) -> Side:
    rows = []
    for part in parts:
        started = str(part.result.manifest.get("started") or "")
        for batch in part.batches(["variant", *JUDGED]):
            for row in batch.to_pylist():
                rows.append(Row(row.pop("variant"), part.config, row, started))
    return Side(name, rows, _facts([part.result.manifest for part in parts]), unread)


def _facts(manifests: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {key: set() for key in FACTS}
    for manifest in manifests:
        known = manifest | {"source": manifest.get("identity", {}).get("source")} | manifest.get("packages", {})
        for key in (*FACTS, *manifest.get("packages", {})):
            if known.get(key):
                found.setdefault(key, set()).add(str(known[key]))
    return {key: sorted(values) for key, values in found.items()}
