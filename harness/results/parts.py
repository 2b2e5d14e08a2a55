"""The rows of one run in one table, as record batches, before its configuration stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import HarnessError
from harness.results.holdings import Holdings, Result
from harness.results.keys import Flat, flat
from harness.results.levels import LEVELS, levels
from harness.rundir import DamagedError

BATCH = 1 << 16  # rows


class OtherError(HarnessError):
    """A sound run that has no such table, as one of another experiment."""


@dataclass(frozen=True)
class Part:
    """batches(names): its rows, those columns. inside: the columns of a published sweep that are config keys."""

    hash: str
    result: Result
    config: Flat
    schema: pa.Schema
    rows: int
    batches: Callable[[Sequence[str]], Iterator[pa.RecordBatch]] = field(repr=False)
    inside: tuple[str, ...] = ()


def parts_of(held: Holdings, table: str, whole: bool = False) -> list[Part]:
    """The parts of every result that has the table; what has none, or a torn one, goes to held.left_out.

    whole: the levels of a published sweep are one part, as its other tables are, instead of one per run.
    """
    found: list[Part] = []
    for result in held.results:
        try:
            if table != "levels" or (result.collected and whole):
                own = [_file(result, table)]
            elif result.collected:
                own = list(_published_levels(result))
            else:
                own = [_levels(result)]
            found += own
        except HarnessError as error:
            held.left_out.append((str(result.directory), str(error)))
            if isinstance(error, OtherError):
                held.other.add(str(result.directory))
    return found


def _levels(result: Result) -> Part:
    summary = result.summary()
    if "variants" not in summary:
        raise OtherError("no levels" if summary else "no summary.json")
    return _in_memory(result, result.hash, result.config, levels(result.manifest, summary))


def _in_memory(result: Result, name: str, config: Flat, rows: list[dict]) -> Part:
    def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([LEVELS.field(name) for name in names])
        yield pa.RecordBatch.from_pylist([{key: row.get(key) for key in names} for row in rows], schema=schema)

    return Part(name, result, config, LEVELS, len(rows), batches)


def _published_levels(result: Result) -> Iterator[Part]:
    """A part per run of a published sweep, so that it reads as the runs themselves do."""
    path = result.directory / "levels.parquet"
    try:
        rows = _opened(path).read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path.name, error) from None
    keys = result.manifest["published"]["config"]
    for name, own in groupby(rows, key=lambda row: row["run"]):
        block = list(own)
        yield _in_memory(result, name, flat(result.config | {key: block[0][key] for key in keys}), block)


def _file(result: Result, table: str) -> Part:
    path = result.directory / f"{table}.parquet"
    if not path.is_file():
        raise OtherError(f"no {table}.parquet")
    file = _opened(path)

    def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        try:
            yield from _opened(path).iter_batches(BATCH, columns=list(names))
        except (OSError, pa.ArrowException) as error:
            raise HarnessError(f"{result.directory}: {_unreadable(path.name, error)}") from None

    inside = tuple(result.manifest["published"]["config"]) if result.collected else ()
    there = tuple(key for key in inside if key in file.schema_arrow.names)
    return Part(result.hash, result, result.config, file.schema_arrow, file.metadata.num_rows, batches, there)


def _opened(path: Path) -> pq.ParquetFile:
    try:
        # a row group is read column by column: buffering it ahead would hold it twice
        return pq.ParquetFile(path, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path.name, error) from None


def _unreadable(name: str, error: Exception) -> DamagedError:
    return DamagedError(f"damaged, {name} is not readable as Parquet ({str(error).splitlines()[0]})")
