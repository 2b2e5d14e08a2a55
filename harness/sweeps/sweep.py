"""What a sweep leaves behind: one record per job, written by the job itself, wherever it runs.

<results_dir>/sweeps/<name>/ holds sweep.json (the command and the overrides of every job, written before the
first one starts; at the end what really launched them), NNNNN.json and NNNNN.log per job (state and failure text; what
it printed), and Hydra's multirun.yaml. A record says `running` from the start of its job, so a killed job is told from
one that never began; both count as failed. Records are files, so jobs may run in other processes, or on other machines
that share the folder. While a job runs its log is locked: the same job started twice runs once.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, HarnessError
from harness.provenance import now, read_json, write_json
from harness.rundir import process_start

DONE = ("finished", "skipped")
ENDED = (*DONE, "failed")


@contextmanager
def opened(results_dir: Path, facts: dict[str, Any], jobs: list[list[str]] | None) -> Iterator[Path]:
    """The folder of a new sweep; jobs: the overrides of each, or None where the sweeper decides as it goes.

    A sweep that is refused before its first job leaves no folder. At its end sweep.json tells what launched the jobs.
    """
    folder = results_dir / "sweeps" / secrets.token_hex(4)
    fresh = [path for path in (folder, *folder.parents) if not path.exists()]
    owner = {"host": platform.node(), "pid": os.getpid(), "process_start": process_start(os.getpid())}
    try:
        folder.mkdir(parents=True)
        write_json(folder / "sweep.json", facts | {"started": now(), "ended": None} | owner | {"jobs": jobs})
    except OSError as error:
        raise ConfigError(f"results_dir: cannot write {folder}: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        if not started(folder):
            shutil.rmtree(folder)
            with suppress(OSError):
                for path in fresh[1:]:
                    path.rmdir()
        raise
    finally:
        if folder.exists():
            write_json(folder / "sweep.json", of(folder) | launched(folder) | {"ended": now()})


def of(folder: Path) -> dict[str, Any]:
    """sweep.json. Raises HarnessError where there is none."""
    found = read_json(folder / "sweep.json")
    if found is None:
        why = "unreadable sweep.json" if (folder / "sweep.json").exists() else "no sweep (it has no sweep.json)"
        raise HarnessError(f"{folder}: {why}")
    return found


def records(folder: Path, known: Container[int] = ()) -> dict[int, dict[str, Any]]:
    """Job number -> record, of every job that began, those known left out."""
    paths = {int(path.stem): path for path in folder.glob("[0-9]*.json")}
    found = {number: read_json(path) for number, path in paths.items() if number not in known}
    return {number: record for number, record in found.items() if record is not None}


def started(folder: Path) -> bool:
    """Whether any job of the sweep began."""
    return any(folder.glob("[0-9]*.json"))


def launched(folder: Path) -> dict[str, Any]:
    """What really ran the jobs: hosts, processes, how many jobs at one time at most, and seconds from first to last."""
    ran = [r for r in records(folder).values() if r.get("state") in ENDED and r.get("pid")]
    # at one instant an end counts before a start
    edges = sorted([(r["began"], 1) for r in ran] + [(r["began"] + r["seconds"], -1) for r in ran])
    at_once = most = 0
    for _, step in edges:
        at_once += step
        most = max(most, at_once)
    last = max((end for end, step in edges if step < 0), default=0.0)
    return {
        "hosts": len({r["host"] for r in ran}),
        "workers": len({(r["host"], r["pid"]) for r in ran}),
        "concurrent": most,
        "seconds": round(last - min((start for start, step in edges if step > 0), default=last), 1),
        "again": sum(r["attempt"] > 1 for r in ran),
    }


def headline(error: BaseException) -> str:
    """The first paragraph of an error, on one line; with its type unless it was written for a person."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if isinstance(error, HarnessError) else f"{type(error).__name__}: {text}"


def recorded(folder: Path, number: int, overrides: list[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one job, `work` returning its state and directory, and keep its record, which is returned.

    Failures end here, Ctrl-C does not. A job that has ended is not run again.
    """
    path = folder / f"{number:05d}.json"
    with _alone(path.with_suffix(".log")) as log:
        earlier = read_json(path) or {}
        if earlier.get("state") in ENDED:
            return earlier
        record = {"job": number, "overrides": overrides, "state": "running", "directory": None, "error": None}
        record |= {"traceback": None, "host": platform.node(), "pid": os.getpid()}
        record |= {"process_start": process_start(os.getpid()), "began": time.time()}
        record |= {"attempt": earlier.get("attempt", 0) + 1}
        write_json(path, record)
        start = time.perf_counter()
        try:
            with redirect_stdout(log), redirect_stderr(log):
                record.update(work())
            if record["state"] not in DONE:
                raise TypeError(f"the experiment returned the state {record['state']!r}")
        except (Exception, SystemExit) as error:
            record.update(state="failed", error=headline(error), traceback=traceback.format_exc())
        except BaseException:
            record.update(state="failed", error="interrupted")
            raise
        finally:
            record["seconds"] = round(time.perf_counter() - start, 3)
            write_json(path, record)
    return record


def failed(folder: Path, number: int, overrides: list[str], error: str) -> None:
    """The record of a job that cannot even begin."""
    record = {"job": number, "overrides": overrides, "state": "failed", "directory": None, "error": error}
    write_json(folder / f"{number:05d}.json", record)


@contextmanager
def _alone(path: Path) -> Iterator[Any]:
    """The job's log, emptied, once nobody else holds it."""
    with path.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        try:
            if not path.with_suffix(".json").exists():
                log.truncate(0)
            yield log
        finally:
            log.flush()
            # closing is not enough: a process forked meanwhile shares this lock
            fcntl.flock(log, fcntl.LOCK_UN)


def alive(record: dict[str, Any]) -> bool:
    """Whether a running job's process is there, as far as this host can tell."""
    return record.get("host") != platform.node() or process_start(record["pid"]) == record["process_start"]


def rows(folder: Path, numbers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """One row per expected job, or of `numbers`: overrides, state, directory, error. A job that left no record, or
    whose process is gone, has failed; in a sweep that is under way it may also be `running` or `waiting`.
    """
    whole = of(folder)
    planned, found = whole["jobs"], records(folder)
    last = max(found, default=-1) + 1
    count = last if planned is None else len(planned)
    live = whole.get("ended") is None and "host" in whole and alive(whole)
    result = []
    for number in range(max(count, last)) if numbers is None else numbers:
        asked = planned[number] if planned and number < count else []
        row: dict[str, Any] = {"job": number, "overrides": asked} | found.get(number, {})
        if number not in found:
            row |= {"state": "waiting"} if live else {"state": "failed", "error": "left no record"}
        elif row["state"] == "running" and not (live and alive(row)):
            row |= {"state": "failed", "error": "died while running"}
        elif number >= count:
            row |= {"state": "failed", "error": "was not asked for"}
        result.append(row)
    return result
