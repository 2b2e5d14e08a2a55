"""Copy a finished run, or a finished sweep, to results/NAME, small and anonymous.

  python -m harness.publish RUN_DIR NAME [--heads 0,1,...] [--slots 0,...]
  python -m harness.publish SWEEP_DIR [SWEEP_DIR ...] NAME

  flushes.parquet    the rows of the named heads and slots, every column; harness.records.read_rows reads the folder
  quantiles.parquet  of all other rows: the quantiles Q of every metric over slots and heads, a row per
                     (variant, flush, quantile), rounded to BITS significant bits
  config.yaml, manifest.json, summary.json, drift.png
                     as in the run, without the host's name and with paths cut down to their last part

A run that has no flushes.parquet is copied whole, its tables rounded likewise (harness.copied). What is published of a
sweep says harness.published_sweep.

NaN ranks above inf, so a failure among many rows is the quantile 1; a metric that a row does not have takes no part.
Refused: a run that is unfinished, or was made by other source than this; a name that exists; more than LIMIT bytes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness import copied, published_sweep
from harness.commands import Parser, status
from harness.copied import BITS, anonymous
from harness.errors import HarnessError
from harness.provenance import checksums, damaged, read_json, source_digest, write_json
from harness.quantiles import Q, metric, read, save
from harness.records import METRICS, TEXT, group_quantiles, grouped

RESULTS = Path("results")
HEADS = tuple(range(8))
LIMIT = 5_000_000  # bytes of a published run
COPIED = ("config.yaml", "manifest.json", "summary.json", "drift.png")
KINDS = [("variant", TEXT), ("flush", pa.int32()), ("tokens", pa.int64()), ("rows", pa.int32())]
QUANTILES = pa.schema([*KINDS, ("quantile", pa.float32()), *((name, pa.float32()) for name in METRICS)])


def publish(
    run: Path,
    name: str,
    heads: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    beside: Sequence[Path] = (),
) -> Path:
    """Copy the finished run or sweep to results/name and return that. Raises HarnessError, leaving nothing behind.

    heads, slots: those kept in full; None: the first eight heads of the model, in every slot.
    beside: more sweeps, whose runs join the tables of the first.
    """
    if not re.fullmatch(r"\w[\w.-]*", name) or name in ("runs", "sweeps"):
        raise HarnessError(f"NAME: {name!r} cannot name a folder of {RESULTS}")
    target = RESULTS / name
    if target.exists():
        raise HarnessError(f"{target}: exists; nothing is overwritten")
    work = RESULTS / f".{name}.{os.getpid()}.partial"
    if beside or (run / "sweep.json").exists():
        if lost := [str(p) for p in (run, *beside) if not (p / "sweep.json").exists()]:
            raise HarnessError(f"{lost[0]}: no sweep; only sweeps are published together")
        if heads is not None or slots is not None:
            raise HarnessError(f"--heads, --slots: {run} is a sweep, whose heads and slots are pooled")
        return _moved(run, work, target, lambda: published_sweep.write([run, *beside], work))
    manifest = finished(run)
    if not (run / "flushes.parquet").exists():
        if heads is not None or slots is not None:
            raise HarnessError(f"--heads, --slots: {run} has no flushes.parquet to choose rows of")
        return _moved(run, work, target, lambda: _write_whole(run, work, manifest))
    rows = read(run / "flushes.parquet")
    there = set(np.unique(rows["head"].to_numpy()).tolist())
    named = sorted(set(there & set(HEADS) if heads is None else heads))
    if lost := [str(head) for head in named if head not in there]:
        raise HarnessError(f"--heads: {run} has no head {', '.join(lost)}; it has {min(there)}..{max(there)}")
    return _moved(run, work, target, lambda: _write(run, work, rows, named, slots, manifest))


def _moved(run: Path, work: Path, target: Path, write: Callable[[], None]) -> Path:
    try:
        work.mkdir(parents=True)
        write()
        manifest = read_json(work / "manifest.json") or {}
        write_json(work / "manifest.json", manifest | {"files": checksums(work)})
        if (size := sum(p.stat().st_size for p in work.iterdir())) > LIMIT:
            raise HarnessError(f"{run}: {size:,} bytes, above {LIMIT:,}; take fewer --heads, --slots or jobs")
        os.rename(work, target)
    except OSError as error:
        raise HarnessError(f"{target}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def finished(run: Path) -> dict[str, Any]:
    """The manifest of a finished run of this source. Raises HarnessError for anything else."""
    manifest = read_json(run / "manifest.json")
    if manifest is None:
        raise HarnessError(f"{run}: no finished run (it has no manifest.json)")
    wanted = COPIED if (run / "flushes.parquet").is_file() else ("config.yaml", "summary.json")
    if lost := [name for name in wanted if not (run / name).is_file()]:
        raise HarnessError(f"{run}: incomplete, it has no {', '.join(lost)}")
    if manifest.get("identity", {}).get("source") != source_digest():
        raise HarnessError(f"{run}: stale, made by other source than this; run it again")
    if changed := damaged(run, manifest):
        raise HarnessError(f"{run}: damaged, {', '.join(changed)}; run it again")
    return manifest


def _write(
    run: Path,
    work: Path,
    rows: pa.Table,
    named: list[int],
    slots: Sequence[int] | None,
    manifest: dict[str, Any],
) -> None:
    slot = rows["slot"].to_numpy()
    shown = sorted(set(np.unique(slot).tolist()) if slots is None else slots)
    inside = np.isin(rows["head"].to_numpy(), named) & np.isin(slot, shown)
    save(_sorted(rows.filter(pa.array(inside))), work / "flushes.parquet")
    save(quantiles(rows.filter(pa.array(~inside))), work / "quantiles.parquet")
    for name in ("summary.json", "drift.png"):
        shutil.copyfile(run / name, work / name)
    _describe(run, work, manifest, {"heads": named, "slots": shown, "quantiles": Q, "bits": BITS})


def _write_whole(run: Path, work: Path, manifest: dict[str, Any]) -> None:
    for path in sorted(run.glob("*.parquet")):
        save(copied.rounded(read(path)), work / path.name)
    copied.copy_others(run, work)
    _describe(run, work, manifest, {"bits": BITS})


def _describe(run: Path, work: Path, manifest: dict[str, Any], how: dict[str, Any]) -> None:
    # the checksums are those of the files before they were cut
    for key in ("host", "files"):
        manifest.pop(key, None)
    manifest["published"] = how | {"run": run.resolve().name}
    write_json(work / "manifest.json", anonymous(manifest))
    text = (run / "config.yaml").read_text(encoding="utf-8").splitlines()
    (work / "config.yaml").write_text("\n".join(anonymous(text)) + "\n", encoding="utf-8")


def _sorted(rows: pa.Table) -> pa.Table:
    """Series by series, variants in the order they have: neighbours vary least, which is what compression needs."""
    codes = rows["variant"].combine_chunks().indices.to_numpy()
    keys = [rows[name].to_numpy() for name in ("flush", "slot", "head")]
    return rows.take(np.lexsort((*keys, codes)))


def quantiles(rows: pa.Table) -> pa.Table:
    """Q of every metric over the slots and heads in rows, a row per (variant, flush, quantile); see QUANTILES.

    tokens is the median token count of the flush, rows how many rows were pooled. A metric is null where none has it.
    """
    variant = rows["variant"].combine_chunks()
    names, codes = variant.dictionary.to_pylist(), variant.indices.to_numpy()
    flush = rows["flush"].to_numpy()
    width = int(flush.max(initial=0)) + 1
    pairs, groups = grouped(codes.astype(np.int64) * width + flush)
    columns: dict[str, Any] = {
        "variant": np.array(names, object)[pairs // width] if len(pairs) else np.array([], object),
        "flush": pairs % width,
        "tokens": group_quantiles(rows["tokens"].to_numpy().astype(float), groups, [0.5])[:, 0].astype(int),
        "rows": np.bincount(groups),
    }
    columns = {name: np.repeat(x, len(Q)) for name, x in columns.items()}
    columns["quantile"] = np.tile(Q, len(pairs))
    arrays = [pa.array(columns[f.name], f.type) for f in list(QUANTILES)[: len(KINDS) + 1] if f.name != "variant"]
    arrays.insert(0, pa.array(columns["variant"].tolist(), pa.string()).dictionary_encode())
    arrays += [metric(rows[name], groups, len(pairs)) for name in METRICS]
    return pa.table(arrays, schema=QUANTILES)


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise HarnessError(f"--{option}: {text!r} is not a list of {option.removesuffix('s')} numbers like 0,1,5")
    return [int(x) for x in text.split(",")]


def main(argv: list[str]) -> int:
    """Run one command line: 0 published, 2 refused in one line."""
    parser = Parser("publish", __doc__)
    parser.add_argument("run", metavar="DIR", type=Path, help="a finished run directory or sweep folder")
    parser.add_argument("beside", metavar="DIR", type=Path, nargs="*", help="more sweeps, as one table with the first")
    parser.add_argument("name", metavar="NAME", help="folder of results/ to create")
    parser.add_argument("--heads", metavar="LIST", help="heads kept in full; default: the first eight")
    parser.add_argument("--slots", metavar="LIST", help="slots kept in full; default: every slot")

    def work() -> int:
        options = parser.parse_args(argv)
        heads, slots = _numbers("heads", options.heads), _numbers("slots", options.slots)
        print(f"published: {publish(options.run, options.name, heads, slots, options.beside)}")
        return 0

    return status(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
