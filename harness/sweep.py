"""What a sweep leaves behind: one record per job, written by the job itself, and the table made from them.

<results_dir>/sweeps/<name>/ holds sweep.json (the command and the overrides of every job, written before the
first one starts), NNNNN.json and NNNNN.log per job (state and failure text; what it printed), and Hydra's
multirun.yaml. A record says `running` from the start of its job, so a killed job is told from one that never
began; both count as failed. Records are files, so jobs may run in other processes, or on other machines that
share the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, HarnessError

DONE = {"finished": "finished", "skipped": "already done"}


def _write(path: Path, content: dict[str, Any]) -> None:
    # a reader sees the whole record or none
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


@contextmanager
def opened(results_dir: Path, command: list[str], jobs: list[list[str]] | None) -> Iterator[Path]:
    """The folder of a new sweep; jobs: the overrides of each, or None where the sweeper decides as it goes.

    A sweep that is refused before its first job leaves no folder.
    """
    folder = results_dir / "sweeps" / secrets.token_hex(4)
    fresh = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True)
        _write(folder / "sweep.json", {"command": command, "jobs": jobs})
    except OSError as error:
        raise ConfigError(f"results_dir: cannot write {folder}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        if not started(folder):
            for path in folder.iterdir():
                path.unlink()
            with suppress(OSError):
                for path in fresh:
                    path.rmdir()
        raise


def started(folder: Path) -> bool:
    """Whether any job of the sweep began."""
    return any(folder.glob("[0-9]*.json"))


def headline(error: BaseException) -> str:
    """The first paragraph of an error, on one line; with its type unless it was written for a person."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if isinstance(error, HarnessError) else f"{type(error).__name__}: {text}"


@contextmanager
def recorded(folder: Path, number: int, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """Keep one job's record; the body updates it with its outcome. Failures end here, Ctrl-C does not."""
    path = folder / f"{number:05d}.json"
    start = time.perf_counter()
    record: dict[str, Any] = {"job": number, "overrides": overrides, "state": "running", "directory": None}
    record |= {"error": None, "traceback": None, "host": socket.gethostname(), "pid": os.getpid()}
    _write(path, record)
    try:
        with path.with_suffix(".log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            yield record
        if record["state"] not in DONE:
            raise TypeError(f"the experiment returned the state {record['state']!r}")
    except (Exception, SystemExit) as error:
        record.update(state="failed", error=headline(error), traceback=traceback.format_exc())
    except BaseException:
        record.update(state="failed", error="interrupted")
        raise
    finally:
        record["seconds"] = round(time.perf_counter() - start, 3)
        _write(path, record)
        of = len(_planned(folder) or []) or "?"
        said = f"job {number} of {of}: {record['state']}, {record['seconds']:.1f} s"
        print(said, *overrides, file=sys.stderr)


def _planned(folder: Path) -> list[list[str]] | None:
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row per expected job: overrides, state, directory, error. A missing record is a failed job."""
    planned = _planned(folder)
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")}
    last = max(found, default=-1) + 1
    count = last if planned is None else len(planned)
    result = []
    for number in range(max(count, last)):
        asked = planned[number] if planned and number < count else []
        row: dict[str, Any] = {"overrides": asked} | found.get(number, {})
        if number not in found:
            row |= {"state": "failed", "error": "left no record"}
        elif row["state"] == "running":
            row |= {"state": "failed", "error": "died while running"}
        elif number >= count:
            row |= {"state": "failed", "error": "was not asked for"}
        result.append(row)
    return result


def report(folder: Path) -> int:
    """Print the table of a sweep; 1 if a job failed or is missing, else 0."""
    from rich.console import Console
    from rich.table import Table

    jobs, root = rows(folder), folder.parent.parent
    # what every job was given tells none of them apart
    first = jobs[0]["overrides"] if len(jobs) > 1 else []
    shared = [o for o in first if all(o in row["overrides"] for row in jobs)]
    count = Counter(row["state"] for row in jobs)
    title = ", ".join(f"{n} {state}" for state, n in count.items())
    title += "; all with " + " ".join(shared) if shared else ""
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("job", justify="right")
    table.add_column("overrides", overflow="fold", ratio=3)
    table.add_column("state")
    table.add_column(f"directory under {root}, or error", overflow="fold", ratio=4)
    for number, row in enumerate(jobs):
        own = " ".join(o for o in row["overrides"] if o not in shared)
        what = row.get("error") or _under(row, root)
        table.add_row(str(number), own, DONE.get(row["state"], "failed"), what)
    console = Console(width=80, markup=False, highlight=False)
    console.print(table)
    console.print(f"records: {folder}", soft_wrap=True)
    return 0 if jobs and set(count) <= set(DONE) else 1


def _under(row: dict[str, Any], root: Path) -> str:
    directory = str(row.get("directory") or "")
    inside = os.path.relpath(directory, root) if directory else ""
    return directory if inside.startswith("..") else inside
