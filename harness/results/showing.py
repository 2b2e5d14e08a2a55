"""One run, or one sweep, on a screen."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.errors import HarnessError
from harness.provenance import damaged, read_json
from harness.records import quantiles_of
from harness.results.compared import level_text
from harness.results.holdings import Result, entries_of, holdings, is_collected, is_sweep, jobs_of
from harness.results.keys import SEED, Value, own, shown, telling, word
from harness.results.levels import LEVELS
from harness.results.parts import Part, parts_of
from harness.results.printing import grid, one_line, times
from harness.rundir import DamagedError
from harness.sweeps.sweep import DONE

ROWS = 60  # configurations of a sweep that are printed
WIDEST = 16  # characters of a key or its value that variants leave room for


def find(text: str, results_dir: Path) -> Path:
    """The run or sweep that text names: a path, or the first digits of a hash in results_dir. Raises HarnessError."""
    if Path(text).is_dir():
        return Path(text)
    begins = f"*/{glob.escape(text)}*"
    found = [p for p in results_dir.glob(begins) if p.is_dir()] if text and "/" not in text else []
    # a run that failed or is running has only its status
    found += [p.with_name(p.name.removesuffix(".status.json")) for p in results_dir.glob(f"{begins}.status.json")]
    places = sorted(set(found))
    if len(places) > 1:
        raise HarnessError(f"{text}: is the beginning of {', '.join(map(str, places[:5]))}")
    if not places:
        raise HarnessError(f"{text}: neither a folder nor the beginning of a hash in {results_dir}")
    return places[0]


def show(path: Path, level: str, console: Console) -> int:
    """Print what path holds; 1 where a file of a run is not what its manifest says, or a job failed or is damaged."""
    if is_sweep(path):
        return _sweep(path, level, console)
    if (path / "manifest.json").exists():
        (entry,) = entries_of(path)
    else:
        entry = next((e for e in entries_of(path.parent) if e["directory"] == path), {})
    if not entry:
        raise HarnessError(f"{path}: neither a run nor a sweep")
    if "result" not in entry:
        console.print(f"{path}: {entry['state']}", one_line(entry.get("error") or ""), soft_wrap=True)
        return 1
    return _run(entry["result"], console)


def _run(result: Result, console: Console) -> int:
    from harness.summary import table

    manifest, flaw = result.manifest, ""
    try:
        if "variants" in (summary := result.summary()):
            console.print(table(summary))
    except DamagedError as error:
        flaw = str(error)
        console.print(f"no levels: {flaw}", soft_wrap=True)
    changed = own(result.config)
    packages = " ".join(f"{name} {version}" for name, version in manifest.get("packages", {}).items())
    lines = {
        "run": f"{result.directory} ({result.hash})",
        "state": result.state,
        "not default": shown(changed, changed) or "nothing",
        "device": f"{manifest.get('device', '')} {manifest.get('cpu', '')}".strip(),
        "took": f"{times(manifest.get('seconds'))} from {manifest.get('started')}",
        "source": " ".join(filter(None, [result.source, manifest.get("commit")])),
        "versions": f"python {manifest.get('python')} {packages}",
    }
    for name, text in lines.items():
        console.print(f"{name}: {text}", soft_wrap=True)
    said, broken = checked(result)
    console.print(f"files: {said}", soft_wrap=True)
    return 1 if broken or flaw else 0


def checked(result: Result) -> tuple[str, bool]:
    """What can be said of the files of a run against the checksums in its manifest, and whether one is broken."""
    there = ", ".join(sorted(p.name for p in result.directory.iterdir() if p.is_file()))
    if not result.manifest.get("files"):
        return f"{there}; no checksums", False
    broken = damaged(result.directory, result.manifest)
    return f"{there}; {'changed since: ' + ', '.join(broken) if broken else 'all as written'}", bool(broken)


def _sweep(folder: Path, level: str, console: Console) -> int:
    asked = read_json(folder / "sweep.json") or {}
    console.print(f"sweep: {folder}", soft_wrap=True)
    for each in (asked, *asked.get("beside", ())):
        console.print("command:", " ".join(each.get("command") or ()), soft_wrap=True)
        ran = {"launcher": "", "workers": " workers", "concurrent": " at once"}
        if any(each.get(key) for key in ran):
            console.print("launched:", ", ".join(f"{each[key]}{unit}" for key, unit in ran.items() if each.get(key)))
    failed: list[dict[str, Any]] = []
    if is_collected(folder):
        console.print(f"jobs: {asked.get('jobs')} finished; published")
    else:
        jobs = jobs_of(folder)
        count = Counter(job["state"] for job in jobs)
        console.print("jobs: " + ", ".join(f"{n} {state}" for state, n in count.items()))
        failed = [job for job in jobs if job["state"] not in DONE]
    for job in failed:
        overrides = " ".join(job["overrides"])
        console.print(
            f"job {job['job']}: {job['state']}, {overrides}: {one_line(job.get('error') or '')}", soft_wrap=True
        )
    held = holdings([folder])
    parts = parts_of(held, "levels")
    unread = {}
    for directory, state in held.unread:
        numbers = [number for _, number in held.jobs.get(Path(directory).resolve(), ())]
        # a job that failed is named already, with its reason
        if not numbers or not {job["job"] for job in failed}.issuperset(numbers):
            unread[f"job {', '.join(map(str, numbers))}: {directory}" if numbers else directory] = state
    for name, state in unread.items():
        console.print(f"{name}: {state}", soft_wrap=True)
    if level not in LEVELS.names or str(LEVELS.field(level).type) not in ("double", "int64"):
        raise HarnessError(f"--level: {level!r} is no number of harness.results.levels")
    if rows := _rows(parts, level):
        console.print(f"{level}, {_pooled(level)} over seeds:")
        for block in pivot(rows, level, console.width):
            console.print(block)
    return 1 if failed or unread else 0


def _rows(parts: Sequence[Part], level: str) -> list[tuple[dict[str, Value], str, float | None]]:
    """(what tells its configuration apart, variant, level) of every run and variant."""
    keys = [key for key in telling([part.config for part in parts]) if key != SEED]
    return [
        ({key: part.config.get(key) for key in keys}, row["variant"], row[level])
        for part in parts
        for batch in part.batches(["variant", level])
        for row in batch.to_pylist()
    ]


def pivot(rows: Sequence[tuple[dict[str, Value], str, float | None]], level: str, width: int) -> list[Table]:
    """A line per configuration, a column per variant; over seeds the median, of a maximum the maximum; NaN wins.

    As many tables below each other as it takes for no number to break within width characters.
    """
    keys = list(rows[0][0])
    names = list(dict.fromkeys(variant for _, variant, _ in rows))
    groups: dict[tuple[Value, ...], dict[str, list[float]]] = {}
    for config, variant, x in rows:
        own = groups.setdefault(tuple(config[key] for key in keys), {})
        if x is not None:
            own.setdefault(variant, []).append(x)
    over, lines = _pooled(level), sorted(groups, key=_rank)[:ROWS]
    beside = {key: [word(values[i]) for values in lines] for i, key in enumerate(keys)}
    texts = {name: [level_text(_over(groups[values].get(name), over)) for values in lines] for name in names}
    heads = {key: key.replace(".", ".\n") for key in keys} | {name: name.replace("_", "_\n") for name in names}
    wide = {x: max(map(len, [*heads[x].split("\n"), *cells])) + 1 for x, cells in (beside | texts).items()}
    # behind the last column stands no space
    room = width + 1 - sum(min(wide[key], WIDEST + 1) for key in keys)
    tables = []
    for block in _blocks(names, wide, room):
        drawn = grid()
        for key in keys:
            drawn.add_column(heads[key], overflow="fold")
        for name in block:
            drawn.add_column(heads[name], overflow="fold", justify="right", no_wrap=True)
        for cells in zip(*(beside[key] for key in keys), *(texts[name] for name in block), strict=True):
            drawn.add_row(*cells)
        tables.append(drawn)
    if len(groups) > ROWS:
        tables[-1].caption = f"and {len(groups) - ROWS} more configurations: export them"
    return tables


def _blocks(names: Sequence[str], wide: dict[str, int], room: int) -> list[list[str]]:
    """The names in order, as many together as fit into room, one at least."""
    blocks: list[list[str]] = [[]]
    for name in names:
        if blocks[-1] and sum(wide[x] for x in [*blocks[-1], name]) > room:
            blocks.append([])
        blocks[-1].append(name)
    return blocks


def _rank(values: tuple[Value, ...]) -> list[tuple]:
    """Null first, then numbers by size, then texts."""
    return [(isinstance(x, str), -np.inf if x is None else x) for x in values]


def _pooled(level: str) -> str:
    return "maximum" if level.endswith("_max") else "median"


def _over(values: list[float] | None, over: str) -> float | None:
    if not values:
        return None
    q = [1.0 if over == "maximum" else 0.5]
    return quantiles_of(values, q)[0]
