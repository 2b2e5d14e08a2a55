"""What a result depends on, as digests, and where it was made, as a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness.config import Config, leaves

launch: dict[str, Any] = {}  # how this process came to run a job; part of every manifest it writes

LAUNCHER_KEYS = ("results_dir", "workers", "progress")
LAUNCHER_GROUPS = ("objective.",)  # read off a finished run: a new budget finds the runs of an old one
PACKAGES = (
    *("torch", "triton", "numpy", "scipy", "pyarrow", "pandas", "matplotlib"),
    *("hydra-core", "omegaconf", "mpmath", "safetensors"),
)


def now() -> str:
    """The time, to the second, as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def launched(command: Sequence[str], **facts: Any) -> Iterator[None]:
    """Inside, manifests name this command, and these facts, instead of the process's own arguments."""
    before = dict(launch)
    launch.update(facts, command=list(command))
    try:
        yield
    finally:
        launch.clear()
        launch.update(before)


def plain(value: Any) -> Any:
    """JSON data of dataclasses, NumPy values and paths; NaN and infinities become strings: nan, inf, -inf."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    """Replace path by value as JSON, durably: a reader sees the old text or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in path, or None where it is absent or not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def digest(value: Any) -> str:
    """16 hex digits over value's canonical JSON; key order does not matter."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def source_digest(package: Path | None = None) -> str:
    """16 hex digits over the names and contents of the package's *.py and *.yaml files and of configs/.

    configs/ counts the same beside the package (a checkout) and inside it (installed). Read once per
    process: a file edited under a running sweep does not change what that sweep has imported.
    """
    package = package or Path(harness.__file__).parent
    files: dict[str, Path] = {}
    for prefix, top in (("", package), ("configs/", package.parent / "configs")):
        for kind in ("*.py", "*.yaml"):
            files |= {prefix + p.relative_to(top).as_posix(): p for p in top.rglob(kind)}
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]


@cache
def commit() -> str | None:
    """The commit of the checkout this package lies in, "+dirty" where its source differs; None outside one."""
    package = Path(harness.__file__).parent

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(package.parent), *words]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True)
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    if git("ls-files", "--error-unmatch", str(Path(harness.__file__))) is None:
        return None
    return (git("rev-parse", "HEAD") or "") + ("+dirty" if git("status", "--porcelain", "harness", "configs") else "")


def checksums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of every file in folder but the manifest, which holds them."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "manifest.json":
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def damaged(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files of a run that are gone or differ from the manifest's checksums, if it has any."""
    wanted = manifest.get("files") or {}
    found = checksums(folder) if wanted else {}
    return [name for name, digest in wanted.items() if found.get(name) != digest]


def identity_of(variants: Mapping[str, Any], definitions: Any) -> dict[str, Any]:
    """What a result depends on besides the config.

    variants: name -> resolved backend and device; definitions: the resolved variant definitions, any JSON
    data or dataclasses, kept as a digest.
    """
    return {"source": source_digest(), "variants": plain(variants), "definitions": digest(definitions)}


def content_hash(config: Config, identity: Mapping[str, Any]) -> str:
    """16 hex digits over the config without launcher keys, the identity, and the contents of a gates file.

    Equal numbers hash equally (0, 0.0 and -0.0; 1 and 1.0), so that the command line and Python agree.
    """
    keys: dict[str, Any] = {}
    for key, value in leaves(config):
        if key in LAUNCHER_KEYS or key.startswith(LAUNCHER_GROUPS):
            continue
        if key == "decode.gates" and value is not None and Path(value).is_file():
            value = hashlib.sha256(Path(value).read_bytes()).hexdigest()
        keys[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return digest({"config": keys, "identity": identity})


def manifest_of(config: Config, identity: Mapping[str, Any]) -> dict[str, Any]:
    """With what, and on what, this process runs; times and effective formats are added by `Run.finish`."""
    versions = {"replayssm-harness": harness.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if model := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            cpu = model[1]
    return {
        "config": asdict(config),
        "identity": dict(identity),
        "seeds": [config.decode.seed + i for i in range(config.decode.slots)],
        "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu,
        "cores": os.cpu_count(),
    } | launch
