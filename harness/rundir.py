"""One run, one directory: `<results_dir>/<experiment>/<content hash>/`, complete or absent.

Beside it lies `<content hash>.status.json`: running, finished or failed, and whose it is. A run is written
to a hidden sibling and renamed at the end, so the final name never holds half a run; a `running` status
whose process is gone reads as killed. Who owns a hash is decided under a file lock held for an instant,
never during the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.config import Config
from harness.errors import ConfigError, HarnessError
from harness.provenance import (
    checksums,
    content_hash,
    damaged,
    manifest_of,
    now,
    read_json,
    source_digest,
    write_json,
)

# the disk's or the administrator's doing; anything else is a fault of the program
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


class RunBusyError(HarnessError):
    """Another live process owns the run of this hash; `host` is where."""

    def __init__(self, text: str, host: str = "") -> None:
        super().__init__(text)
        self.host = host


class DamagedError(HarnessError):
    """A file of a finished run is gone, or is not what was written."""


def process_start(pid: int) -> str | None:
    """Start of a live process in kernel ticks, "" where the system does not tell; None for a dead one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    # a zombie is dead, only not yet reaped
    return None if state in "ZX" else rest[18]


def read_status(path: Path) -> dict[str, Any]:
    """The status record, {} if there is none; `running` is `killed` when its process on this host is gone."""
    status = read_json(path) or {}
    if status.get("state") == "running" and status.get("host") == platform.node():
        # a recycled pid has another start time
        if process_start(status["pid"]) != status["process_start"]:
            status |= {"state": "killed", "error": f"process {status['pid']} ended without a word"}
    return status


def _complete(directory: Path) -> bool:
    return (directory / "manifest.json").is_file()


@contextlib.contextmanager
def _writing(results_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"results_dir: cannot write to {results_dir} ({error.strerror or error})") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # closing is not enough: a process forked meanwhile shares this lock
            fcntl.flock(file, fcntl.LOCK_UN)


class Run:
    """A run that is being written, or one found finished (`finished`, then nothing is written).

    with Run.open(config, identity) as run:
        if not run.finished:
            ...  # write run.path("flushes.parquet") and the other files
            run.write_json("summary.json", summary)
            run.finish(variants=formats, device=device)

    Leaving the block by an exception, or without `finish`, records a failure and removes what was written.
    """

    def __init__(self, config: Config, identity: Mapping[str, Any]) -> None:
        self.config, self.identity = config, dict(identity)
        self.hash = content_hash(config, identity)
        self.folder = Path(config.results_dir) / config.experiment
        self.directory = self.folder / self.hash
        self.work = self.folder / f".{self.hash}.{os.getpid()}.partial"
        self.status_path = self.folder / f"{self.hash}.status.json"
        self.status: dict[str, Any] = {}
        self.finished = False
        self._clock = time.monotonic()

    @classmethod
    def open(cls, config: Config, identity: Mapping[str, Any]) -> Run:
        """Claim the hash, or find it finished; what an unfinished or failed earlier run left is removed.

        Raises ConfigError where results_dir cannot be written to, RunBusyError where a live process owns it,
        DamagedError where a file of the finished run has changed.
        """
        if not re.fullmatch(r"\w[\w.-]*", config.experiment):
            raise ConfigError(f"experiment: {config.experiment!r} cannot name a directory")
        run = cls(config, identity)
        with _writing(config.results_dir):
            run.folder.mkdir(parents=True, exist_ok=True)
            with _locked(run.folder):
                run.finished = _complete(run.directory)
                if not run.finished:
                    run._claim()
        if run.finished:
            check(run.directory)
        return run

    def _claim(self) -> None:
        status = read_status(self.status_path)
        if status.get("state") == "running":
            raise RunBusyError(
                f"{self.directory} is being run by pid {status['pid']} on {status['host']} since "
                f"{status['started']}; if that machine is gone, delete {self.status_path}",
                status["host"],
            )
        self.status = {
            "state": "running",
            "experiment": self.config.experiment,
            "hash": self.hash,
            "source": self.identity.get("source"),
            "host": platform.node(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "started": now(),
        }
        for left in self.folder.glob(".*.partial"):
            owner = read_status(self.folder / f"{left.name.split('.')[1]}.status.json")
            if owner.get("state") != "running":
                shutil.rmtree(left, ignore_errors=True)
        self.work.mkdir()
        from omegaconf import OmegaConf

        self.path("config.yaml").write_text(OmegaConf.to_yaml(asdict(self.config)), encoding="utf-8")
        write_json(self.status_path, self.status)

    def path(self, name: str) -> Path:
        """Where the file of this name is, or is to be written."""
        return (self.directory if self.finished else self.work) / name

    def write_json(self, name: str, value: Any) -> None:
        """Write value as name; NaN and infinities become strings."""
        write_json(self.path(name), value)

    def finish(self, **facts: Any) -> Path:
        """Write manifest.json (facts are added to it), move the run to its final name and return that."""
        seconds = time.monotonic() - self._clock
        times = {"started": self.status["started"], "ended": now(), "seconds": round(seconds, 3)}
        with _writing(self.config.results_dir):
            manifest = manifest_of(self.config, self.identity) | times | facts
            self.write_json("manifest.json", manifest | {"files": checksums(self.work)})
            for file in [*self.work.iterdir(), self.work]:
                handle = os.open(file, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
            with _locked(self.folder):
                if self.directory.exists() and not _complete(self.directory):
                    shutil.rmtree(self.directory)
                os.rename(self.work, self.directory)
            self.finished = True
            self._write_status(state="finished", ended=times["ended"], seconds=times["seconds"])
        return self.directory

    def fail(self, error: BaseException | str) -> None:
        """Record why the run failed, one line and the traceback, and remove what it wrote."""
        text = str(error) or type(error).__name__
        if isinstance(error, BaseException) and not isinstance(error, HarnessError):
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            self.status["traceback"] = "".join(traceback.format_exception(error))
        shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._write_status(state="failed", ended=now(), error=" ".join(text.split()))

    def _write_status(self, **changes: Any) -> None:
        self.status |= changes
        write_json(self.status_path, self.status)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished or self.status.get("pid") != os.getpid():
            return
        if error is None:
            error = HarnessError(f"{self.directory}: ended without a result")
            self.fail(error)
            raise error
        self.fail(error)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            with _writing(self.config.results_dir):
                raise error


def check(directory: Path) -> dict[str, Any]:
    """The manifest of a finished run, {} without one. Raises DamagedError where a file has changed."""
    manifest = read_json(directory / "manifest.json") or {}
    if lost := damaged(directory, manifest):
        raise DamagedError(f"{directory}: damaged, {', '.join(lost)}; delete the directory to run it again")
    return manifest


def list_runs(results_dir: str | Path) -> list[dict[str, Any]]:
    """Every run under results_dir, by experiment and start, as {experiment, hash, state, directory, ...}.

    state: finished; stale (finished by other source than this); running; failed; killed; missing (said to be
    finished, but its directory is gone). Failed and killed runs have `error`, one line.
    """
    found = []
    for folder in sorted(p for p in Path(results_dir).glob("*") if p.is_dir()):
        hashes = {p.name.removesuffix(".status.json") for p in folder.glob("*.status.json")}
        hashes |= {p.parent.name for p in folder.glob("*/manifest.json")}
        for name in hashes:
            entry = read_status(folder / f"{name}.status.json")
            entry |= {"experiment": folder.name, "hash": name, "directory": folder / name}
            if _complete(folder / name):
                manifest = read_json(folder / name / "manifest.json") or {}
                source = manifest.get("identity", {}).get("source")
                entry |= {key: manifest.get(key) for key in ("started", "ended", "seconds")}
                entry |= {"source": source, "state": "finished" if source == source_digest() else "stale"}
            elif entry.get("state") in (None, "finished"):
                entry["state"] = "missing"
            found.append(entry)
    return sorted(found, key=lambda e: (e["experiment"], str(e.get("started")), e["hash"]))
