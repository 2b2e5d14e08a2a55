"""What lies in a results_dir, or among published runs: runs with what tells them apart, and sweeps."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.errors import HarnessError
from harness.results.holdings import USED, entries_of, is_collected, jobs_of
from harness.results.keys import shown, telling, word
from harness.results.printing import one_line, times
from harness.rundir import DamagedError
from harness.sweeps import sweep

DIGITS = 8  # of a content hash: enough to find it again
NARROW, INDENT = 24, 4  # characters: less is no column, so that the text goes below
LONGEST = 27  # characters of a name that others stand beside
STATES = (*USED, "failed", "damaged", "killed", "missing", "running", "waiting")


def find(
    path: Path, states: Sequence[str] = (), experiment: str | None = None, filters: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The runs under path as harness.results.holdings.entries_of has them, those that fit.

    filters: key -> value as YAML writes it; a run that never finished has no known configuration, and fits none.
    Raises HarnessError for a key or an experiment that no run has, and for a state that there is not.
    """
    if lost := [state for state in states if state not in STATES]:
        raise HarnessError(f"--state: {', '.join(lost)}: not one of {', '.join(STATES)}")
    every = list(entries_of(path))
    there = sorted({entry["experiment"] for entry in every} - {""})
    if experiment is not None and experiment not in there:
        raise HarnessError(f"--experiment: {experiment}: not in {path}, which has {', '.join(there) or 'no runs'}")
    found = [_checked(e) for e in every if not is_collected(Path(e["directory"]))]
    wanted = dict(filters or {})
    known = {key for e in found if "result" in e for key in e["result"].config}
    if lost := [key for key in wanted if key not in known]:
        raise HarnessError(f"{', '.join(lost)}: no key of the runs in {path}")
    return [e for e in found if _fits(e, states, experiment, wanted)]


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of a run, damaged where its summary is."""
    try:
        if "result" in entry:
            entry["result"].summary()
    except DamagedError as error:
        return entry | {"state": "damaged", "error": str(error)}
    return entry


def _fits(entry: dict[str, Any], states: Sequence[str], experiment: str | None, wanted: Mapping[str, str]) -> bool:
    if (states and entry["state"] not in states) or experiment not in (None, entry["experiment"]):
        return False
    config = entry["result"].config if "result" in entry else None
    return not wanted or (config is not None and all(word(config.get(k)) == v for k, v in wanted.items()))


def show(path: Path, entries: Sequence[dict[str, Any]], sweeps: Sequence[Path], console: Console) -> None:
    """Print the runs, and the sweeps of path."""
    if entries:
        count = Counter(entry["state"] for entry in entries)
        console.print(f"runs in {path}: " + ", ".join(f"{n} {state}" for state, n in count.items()), soft_wrap=True)
        _runs(entries, console)
    if sweeps:
        console.print(f"sweeps in {path}: {len(sweeps)}", soft_wrap=True)
        _sweeps(sweeps, console)
    if not entries and not sweeps:
        console.print(f"{path}: nothing that fits", soft_wrap=True)


def _runs(entries: Sequence[dict[str, Any]], console: Console) -> None:
    keys = telling([e["result"].config for e in entries if "result" in e])
    keys = [key for key in keys if key != "experiment"]
    several = len({entry["experiment"] for entry in entries} - {""}) > 1
    lines = [["run", "experiment", "state", "started", "seconds", "what differs, or the error"]]
    for entry in entries:
        error = one_line(entry.get("error") or "")
        lines.append(
            [
                Path(entry["directory"]).name if entry["state"] == "published" else entry["hash"][:DIGITS],
                entry["experiment"],
                entry["state"],
                str(entry.get("started") or "")[:16].replace("T", " "),
                times(entry.get("seconds")),
                error or (shown(entry["result"].config, keys) if "result" in entry else ""),
            ]
        )
    _print(lines if several else [[line[0], *line[2:]] for line in lines], console)


def _print(lines: Sequence[Sequence[str]], console: Console) -> None:
    """Columns side by side and the last one wrapped, beside or below; a long first one has a line of its own."""
    widths = [max(len(line[i]) for line in lines if i or len(line[0]) <= LONGEST) for i in range(len(lines[0]) - 1)]
    start = sum(widths) + len(widths)
    for line in lines:
        name, *others = line[:-1]
        if len(name) > LONGEST:
            console.print(name, soft_wrap=True)
            name = ""
        head = " ".join(text.ljust(n) for text, n in zip([name, *others], widths, strict=True))
        beside = console.width - start >= NARROW
        room = console.width - (start if beside else INDENT)
        what = textwrap.wrap(line[-1], room, break_on_hyphens=False)
        if beside:
            head = f"{head} {what[0] if what else ''}"
            what = what[1:]
        # names of published runs leave no room beside them
        console.print("\n".join([head.rstrip(), *(" " * (start if beside else INDENT) + text for text in what)]))


def _sweeps(folders: Sequence[Path], console: Console) -> None:
    lines = [["sweep", "jobs", "done", "failed", "running", "launcher", "command"]]
    for folder in folders:
        try:
            count, asked = _count(folder), sweep.of(folder)
        except HarnessError as error:
            lines.append([folder.name, "", "", "", "", "", str(error).removeprefix(f"{folder}: ")])
            continue
        numbers = [str(count.get(name) or "") for name in ("done", "failed", "running")]
        command = " ".join(asked.get("command") or ())
        lines.append([folder.name, str(count.total()), *numbers, str(asked.get("launcher") or ""), command])
    _print(lines, console)


def _count(folder: Path) -> Counter[str]:
    """How many jobs of a sweep are done, and in which state the others are. Raises HarnessError."""
    if not is_collected(folder):
        return Counter("done" if row["state"] in sweep.DONE else row["state"] for row in jobs_of(folder))
    return Counter(done=int(sweep.of(folder).get("jobs") or 0))
