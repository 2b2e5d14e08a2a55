"""Finished runs and sweeps written as files, so that reading them can be tested without a decode."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import Config
from harness.provenance import checksums, plain, source_digest, write_json
from harness.records import RowWriter, read_rows
from harness.summary import summarise
from harness.traffic import STORED
from harness.variants import DECLARED, VariantSpec

F, HEADS = 20, 2
LEVELS = {"exact_fold": 1e-6, "null_arm": 1e-7}
SPEC = VariantSpec("any")
DESIGN = {
    "backend": "emulated",
    "ring": {"length": 16, "max_window": 4, "flush_at": 9, "fold_when": "next"},
    "records": ["d", "k_hat", "g"],
    "effective": dict.fromkeys(STORED, "fp32"),
    "declared": {key: getattr(SPEC, key) for key in DECLARED},
}
# fitting laws takes longer than all the rest
SUMMARIES: dict[str, dict[str, Any]] = {}


def configured(**keys: Any) -> dict[str, Any]:
    """The default configuration as a manifest has it; keys: group__key=value."""
    config = plain(asdict(Config()))
    for key, value in keys.items():
        group, _, name = key.rpartition("__")
        (config[group] if group else config)[name] = value
    return config


def make(
    root: Path,
    name: str,
    levels: dict[str, Any] | None = None,
    source: str | None = None,
    more: dict[str, Any] | None = None,
    seconds: float = 1.0,
    **keys: Any,
) -> Path:
    """A finished run: root/drift/<name, filled up to a hash>. levels: variant -> its served error, one or [F] of them;
    the kept one is half of it. exact_fold has no d."""
    directory = root / "drift" / name.ljust(16, "0")
    directory.mkdir(parents=True)
    flush, head = (x.ravel() for x in np.meshgrid(np.arange(F), np.arange(HEADS), indexing="ij"))
    block = {"slot": 0, "head": head, "flush": flush, "tokens": 10 * (flush + 1), "backend": "emulated"}
    levels = levels or LEVELS
    with RowWriter(directory / "flushes.parquet") as writer:
        writer.append("oracle", block | {"cond2": 1 + head})
        for variant, level in levels.items():
            error = np.broadcast_to(np.asarray(level, float), (F,))[flush]
            errors = {"served_fro": error, "kept_fro": error / 2, "o_med": error, "o_max": 2 * error}
            errors |= {} if variant == "exact_fold" else {"d_med": error, "d_max": error}
            writer.append(variant, block | errors | {"history": flush % 16, "folded": flush % 2 == 0})
    key = repr([(variant, np.asarray(level).tolist()) for variant, level in levels.items()])
    if key not in SUMMARIES:
        SUMMARIES[key] = summarise(read_rows(directory))
    write_json(directory / "summary.json", SUMMARIES[key])
    manifest = {"config": configured(**keys), "identity": {"source": source or source_digest()}, "seconds": seconds}
    manifest |= {"variants": dict.fromkeys(levels, DESIGN), "packages": {"torch": "2.11.0"}}
    manifest |= {"python": "3.12.3", "host": "somewhere", "started": f"2026-01-01T00:00:{len(name):02d}+00:00"}
    (directory / "config.yaml").write_text("experiment: drift\n")
    (directory / "drift.png").write_bytes(b"\x89PNG")
    write_json(directory / "manifest.json", manifest | {"files": checksums(directory)} | (more or {}))
    return directory


def resummarised(directory: Path, summary: dict[str, Any]) -> None:
    """Make it the summary that a finished run was written with."""
    write_json(directory / "summary.json", summary)
    manifest = json.loads((directory / "manifest.json").read_text())
    write_json(directory / "manifest.json", manifest | {"files": checksums(directory)})


def truncated(path: Path) -> None:
    """Keep the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swept(root: Path, jobs: list[tuple[str, Path | None]], name: str = "abcdef01") -> Path:
    """The folder of a sweep; jobs: (state, directory of its run) each, "absent" for one that left no record."""
    folder = root / "sweeps" / name
    folder.mkdir(parents=True)
    overrides = [[f"decode.seed={i}"] for i in range(len(jobs))]
    write_json(
        folder / "sweep.json", {"command": ["decode.seed=range(9)", "results_dir=/home/me/runs"], "jobs": overrides}
    )
    for i, (state, directory) in enumerate(jobs):
        if state != "absent":
            error = None if directory else "ZeroDivisionError: planted"
            record = {"job": i, "overrides": overrides[i], "state": state, "error": error}
            record["directory"] = directory and str(directory)
            (folder / f"{i:05d}.json").write_text(json.dumps(record))
    return folder
