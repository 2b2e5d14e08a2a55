"""What a path holds: a run, an experiment's folder, a sweep, a whole results_dir, or what was published of them.

Finished runs are used, and stale ones, which other source than this has made; everything else is left out and named,
with its state, so that an absence is seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.provenance import read_json, source_digest
from harness.results.keys import Flat, flat
from harness.rundir import DamagedError, list_runs
from harness.sweeps import sweep

USED = ("finished", "stale", "published")


@dataclass(frozen=True)
class Result:
    """A finished run, or (`collected`) a published sweep, whose config is what its runs share."""

    directory: Path
    manifest: dict[str, Any] = field(repr=False)
    collected: bool = False

    @property
    def hash(self) -> str:
        """The content hash; that of a published run is in its manifest, as its folder has a name."""
        return str(self.manifest.get("published", {}).get("run", self.directory.name))

    @property
    def source(self) -> str:
        return str(self.manifest.get("identity", {}).get("source", ""))

    @property
    def state(self) -> str:
        """published; else finished, or stale where the source is not this one."""
        return state_of(self.manifest)

    @cached_property
    def config(self) -> Flat:
        return flat(self.manifest["config"])

    def summary(self) -> dict[str, Any]:
        """summary.json, {} where there is none. Raises DamagedError: not JSON, or not what the manifest says."""
        path = self.directory / "summary.json"
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DamagedError(f"damaged, summary.json cannot be read ({error.strerror or error})") from None
        wanted = (self.manifest.get("files") or {}).get(path.name)
        try:
            found = json.loads(raw)
        except ValueError:
            raise DamagedError("damaged, summary.json is not JSON") from None
        if wanted not in (None, hashlib.sha256(raw).hexdigest()) or not isinstance(found, dict):
            raise DamagedError("damaged, summary.json is not as it was written")
        return found


@dataclass
class Holdings:
    """What some paths hold together, each run once.

    left_out: (directory, state) of what is not finished, is damaged, or has no such table. other: those of it that
    are sound and have other tables. under: the directories, resolved, that each path led to. jobs: directory, resolved
    -> (path of the sweep, number) of each job that led to it.
    """

    results: list[Result] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    other: set[str] = field(default_factory=set)
    under: dict[Path, set[Path]] = field(default_factory=dict)
    jobs: dict[Path, list[tuple[str, int]]] = field(default_factory=dict)

    @property
    def unread(self) -> list[tuple[str, str]]:
        """left_out without other: what there should be and is not."""
        return [(directory, state) for directory, state in self.left_out if directory not in self.other]

    @property
    def lost(self) -> dict[str, dict[int, str]]:
        """Path of a sweep -> the state of each of its jobs that is unread."""
        found: dict[str, dict[int, str]] = {}
        for directory, state in self.unread:
            for path, number in self.jobs.get(Path(directory).resolve(), ()):
                found.setdefault(path, {})[number] = state
        return found


def state_of(manifest: dict[str, Any]) -> str:
    if "published" in manifest:
        return "published"
    return "finished" if manifest.get("identity", {}).get("source") == source_digest() else "stale"


def holdings(paths: Iterable[Path]) -> Holdings:
    """Everything under the paths. Raises HarnessError naming a path that is absent or holds nothing."""
    found = Holdings()
    seen: set[Path] = set()
    for path in paths:
        entries = list(entries_of(path))
        if not entries:
            raise HarnessError(f"{path}: holds neither runs nor sweeps")
        found.under[path] = {Path(entry["directory"]).resolve() for entry in entries}
        for entry in entries:
            directory = Path(entry["directory"])
            if "job" in entry:
                found.jobs.setdefault(directory.resolve(), []).append((str(path), entry["job"]))
            if directory.resolve() in seen:
                continue
            seen.add(directory.resolve())
            if (result := entry.get("result")) is not None:
                found.results.append(result)
            else:
                found.left_out.append((str(directory), entry["state"]))
    return found


def is_sweep(path: Path) -> bool:
    return (path / "sweep.json").is_file()


def is_collected(path: Path) -> bool:
    """Whether path is a published sweep."""
    return is_sweep(path) and (path / "levels.parquet").is_file()


def entries_of(path: Path) -> Iterator[dict[str, Any]]:
    """Every run under path as {directory, state, experiment, hash, ...}, with `result` where it is finished.

    The jobs of a sweep have `job` too; one without a run has its number for a hash. A published sweep is one
    entry. Raises HarnessError where path is no folder.
    """
    if not path.is_dir():
        raise HarnessError(f"{path}: no such folder")
    if is_sweep(path) and not is_collected(path):
        yield from _jobs(path)
    elif (path / "manifest.json").exists():
        yield _entry(path)
    elif any(path.glob("*.status.json")):
        yield from (_entry(e["directory"], e) for e in list_runs(path.parent) if e["directory"].parent == path)
    elif inside := sorted(p.parent for p in path.glob("[!.]*/manifest.json")):
        yield from map(_entry, inside)
    else:
        yield from (_entry(e["directory"], e) for e in list_runs(path))


def _entry(directory: Path, known: dict[str, Any] | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {"hash": directory.name, "experiment": directory.parent.name, **(known or {})}
    entry |= {"directory": directory}
    if known is not None and known["state"] not in USED:
        return entry
    manifest = read_json(directory / "manifest.json")
    if manifest is None or not isinstance(manifest.get("config"), dict) or _torn(directory, manifest):
        return entry | {"state": "damaged"}
    result = Result(directory, manifest, is_collected(directory))
    experiment = manifest["config"].get("experiment", entry["experiment"])
    times = {key: manifest.get(key) for key in ("started", "ended", "seconds")}
    return entry | times | {"result": result, "state": result.state, "experiment": experiment}


def _torn(directory: Path, manifest: dict[str, Any]) -> bool:
    """Whether a file that the manifest lists is gone; its checksum is another question, see harness.results show."""
    return any(not (directory / name).is_file() for name in manifest.get("files") or ())


def _jobs(folder: Path) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(jobs_of(folder)):
        said = {"job": number, "overrides": row["overrides"], "error": row.get("error")}
        if row["state"] not in sweep.DONE or not row.get("directory"):
            directory = folder / f"{number:05d}"
            yield said | {"directory": directory, "hash": directory.name, "experiment": "", "state": row["state"]}
            continue
        # a results_dir may have been moved, or be read from another working directory
        directory = folder.parent.parent.joinpath(*Path(row["directory"]).parts[-2:])
        if not (directory / "manifest.json").exists():
            where = {"directory": directory, "hash": directory.name, "experiment": directory.parent.name}
            yield said | where | {"state": "missing"}
            continue
        yield said | _entry(directory)


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    """harness.sweeps.sweep.rows, refused in one line where sweep.json or the records cannot be read."""
    try:
        return sweep.rows(folder)
    except HarnessError:
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise HarnessError(f"{folder}: unreadable records of a sweep ({error})") from None


def sweeps_of(path: Path) -> list[Path]:
    """The sweep folders of a results_dir, oldest first, the published sweeps among published runs, or one itself."""
    if is_collected(path):
        return [path]
    found: list[Path] = [p.parent for p in path.glob("sweeps/*/sweep.json")]
    found += [p.parent for p in path.glob("*/sweep.json") if is_collected(p.parent)]
    return sorted(found, key=lambda p: ((p / "sweep.json").stat().st_mtime, p.name))
