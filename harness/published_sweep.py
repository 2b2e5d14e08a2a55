"""Copy a finished sweep to results/NAME, small and anonymous; part of `python -m harness.publish`.

  levels.parquet     a row per (run, variant): harness.results.levels, the varying keys before it, numbers rounded to
                     BITS significant bits
  quantiles.parquet  per configuration without its seed, and variant: the quantiles Q of the errors METRICS over all
                     seeds, slots and heads, in at most BINS bins equal in log tokens
  manifest.json      what the manifests of the runs have in common
  sweep.json         the command, how many jobs it had, and how they were launched

Runs are read one after the other, those of one configuration together. NaN ranks above inf, as in a published run.
Refused: a job that failed or is missing; a run of other source than this; a run without flushes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness import copied
from harness.copied import BITS, anonymous
from harness.errors import HarnessError
from harness.provenance import damaged, read_json, write_json
from harness.quantiles import Q, metric, read, save
from harness.records import ORACLE, TEXT, grouped
from harness.results.gather import Gathered, gather
from harness.results.holdings import Result, entries_of
from harness.results.keys import SEED, constant
from harness.sweeps import sweep
from harness.sweeps.sweep import DONE

METRICS = ("served_fro", "kept_fro", "o_med", "d_med")
BINS = 40
KINDS = {"tokens": pa.int64(), "rows": pa.int32(), "quantile": pa.float32()}
LAUNCH = ("launcher", "workers", "concurrent", "seconds")
# not the same in two runs, or nothing of theirs
OWN = ("config", "seeds", "command", "started", "ended", "seconds", "stages", "host", "files")


def write(folders: Sequence[Path], work: Path) -> None:
    """The files of the published sweep, or of several as one table, into work. Raises HarnessError."""
    # two jobs may have asked for one run
    results = list({result.hash: result for folder in folders for result in runs_of(folder)}.values())
    levels = gather(list(folders))
    _save(copied.rounded(_levels(levels, results)), work / "levels.parquet")
    _save(pooled(levels, results), work / "quantiles.parquet")
    launched = [_launched(folder) for folder in folders]
    manifest = common([{k: v for k, v in r.manifest.items() if k not in OWN} for r in results])
    manifest |= {key: launched[0].get(key) for key in ("launcher", "workers")}
    manifest["config"] = constant([result.config for result in results])
    manifest["runs"] = len(results)
    manifest["run_seconds"] = round(sum(result.manifest.get("seconds") or 0.0 for result in results), 1)
    how: dict[str, Any] = {"run": folders[0].resolve().name, "config": levels.keys, "metrics": METRICS}
    manifest["published"] = how | {"quantiles": Q, "bins": BINS, "bits": BITS}
    write_json(work / "manifest.json", anonymous(manifest))
    total = launched[0] | {"jobs": sum(each["jobs"] for each in launched)}
    # what was run beside the first, and is in the same tables
    write_json(work / "sweep.json", anonymous(total | ({"beside": launched[1:]} if launched[1:] else {})))


def _launched(folder: Path) -> dict[str, Any]:
    """The command of a sweep, how many jobs it had, and how they were launched."""
    asked = read_json(folder / "sweep.json") or {}
    counted = {"command": asked.get("command"), "jobs": len(sweep.rows(folder))}
    return counted | {key: asked[key] for key in LAUNCH if key in asked}


def runs_of(folder: Path) -> list[Result]:
    """The run of every job. Raises HarnessError unless all are finished, of this source, with flushes."""
    found: list[Result] = []
    refused: Counter[str] = Counter()
    for entry in entries_of(folder):
        result = entry.get("result")
        state = entry["state"] if result is None or result.state != "finished" else ""
        if result is not None and not state:
            state = _flaw(result)
        if state:
            refused["stale, made by other source than this" if state == "stale" else state] += 1
        elif result is not None:
            found.append(result)
    if refused:
        told = "; ".join(f"{n} {state}" for state, n in refused.items())
        raise HarnessError(f"{folder}: not every job is {' or '.join(DONE)}: {told}")
    if not found:
        raise HarnessError(f"{folder}: a sweep without jobs")
    return found


def _flaw(result: Result) -> str:
    if not (result.directory / "flushes.parquet").is_file():
        return "without flushes.parquet"
    return "damaged" if damaged(result.directory, result.manifest) else ""


def common(values: Sequence[Any]) -> Any:
    """What nested dictionaries agree in, key by key."""
    first, *others = values
    kept = {}
    for key, value in first.items():
        own = [value, *(other.get(key) for other in others)]
        if all(isinstance(x, dict) for x in own):
            kept[key] = common(own)
        elif all(x == value for x in own):
            kept[key] = value
    return kept


def _levels(levels: Gathered, results: Sequence[Result]) -> pa.Table:
    table = pa.Table.from_batches(levels.batches(), levels.schema).unify_dictionaries()
    if "run" not in table.column_names:
        one = pa.array([results[0].hash] * len(table)).dictionary_encode()
        table = table.add_column(0, pa.field("run", TEXT), one)
    return table


def pooled(levels: Gathered, results: Sequence[Result]) -> pa.Table:
    """quantiles.parquet of the results, one configuration after the other."""
    keys = [key for key in levels.keys if key != SEED]
    types = {key: levels.schema.field(key).type for key in keys}
    groups: dict[tuple, list[Result]] = {}
    for result in {result.hash: result for result in results}.values():
        groups.setdefault(tuple(result.config.get(key) for key in keys), []).append(result)
    tables = []
    for values, own in groups.items():
        body = _quantiles([read(r.directory / "flushes.parquet", _COLUMNS) for r in own])
        beside = [pa.array([x] * len(body), types[key]) for key, x in zip(keys, values, strict=True)]
        tables.append(pa.table([*beside, *body.columns], names=[*keys, *body.column_names]))
    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()


_COLUMNS = ["variant", "tokens", *METRICS]


def _quantiles(runs: Sequence[pa.Table]) -> pa.Table:
    """Q of METRICS per (variant, bin), of the rows of runs that differ in their seed only."""
    rows = pa.concat_tables(runs).unify_dictionaries()
    names = rows["variant"].combine_chunks().dictionary.to_pylist()
    codes = rows["variant"].combine_chunks().indices.to_numpy()
    rows = rows.filter(pa.array(codes != (names.index(ORACLE) if ORACLE in names else -1)))
    codes = rows["variant"].combine_chunks().indices.to_numpy()
    tokens = rows["tokens"].to_numpy()
    edges = bins(tokens)
    pairs, groups = grouped(codes.astype(np.int64) * len(edges) + np.searchsorted(edges, tokens))
    count = len(Q)
    columns = {"tokens": edges[pairs % len(edges)], "rows": np.bincount(groups)}
    columns = {name: np.repeat(x, count) for name, x in columns.items()}
    columns["quantile"] = np.tile(Q, len(pairs))
    variant = pa.DictionaryArray.from_arrays(np.repeat(pairs // len(edges), count).astype(np.int32), names)
    arrays = [variant, *(pa.array(columns[name], kind) for name, kind in KINDS.items())]
    arrays += [metric(rows[name], groups, len(pairs)) for name in METRICS]
    return pa.table(arrays, names=["variant", *KINDS, *METRICS])


def bins(tokens: np.ndarray) -> np.ndarray:
    """Upper edges, at most BINS whole token counts, of bins equal in log tokens; the last is the largest count."""
    low, high = (math.log(max(int(x), 1)) for x in (tokens.min(), tokens.max()))
    edges = np.exp(low + (high - low) * np.arange(1, BINS + 1) / BINS)
    # the exponential of a logarithm may lie a rounding below a whole count
    whole = np.floor(edges[:-1] * (1 + 1e-12)).astype(np.int64)
    return np.unique(np.append(whole, tokens.max()))


def _save(table: pa.Table, path: Path) -> None:
    save(table.replace_schema_metadata(None), path)
