"""A table of runs as a file: CSV, Parquet, JSON, Markdown or LaTeX, by its suffix, written row by row.

Null is an empty cell, or null in JSON; NaN and infinities are nan, inf and -inf everywhere (in JSON as strings, as
harness.provenance writes them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from harness.errors import HarnessError
from harness.provenance import plain
from harness.results.gather import Gathered
from harness.results.keys import word

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
TEX |= {c: f"\\{c}" for c in "&%$#_{}"}


def export(gathered: Gathered, path: Path, force: bool = False) -> int:
    """Write every row to path and return how many. Raises HarnessError: an unknown suffix, an existing file."""
    write = WRITERS.get(path.suffix)
    if write is None:
        raise HarnessError(f"{path}: suffix {path.suffix!r} is not one of {', '.join(WRITERS)}")
    if path.exists() and not force:
        raise HarnessError(f"{path}: exists; --force overwrites it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    schema = pa.schema([pa.field(f.name, _plain_type(f.type)) for f in gathered.schema])
    count = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for batch in gathered.batches():
            count += batch.num_rows
            columns = [c.cast(f.type) for c, f in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    try:
        write(partial, schema, batches())
        os.replace(partial, path)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _csv(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    with pa.csv.CSVWriter(str(path), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _parquet(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    with pq.ParquetWriter(str(path), schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)


def _lines(head: str, line: Callable[[dict[str, Any]], str], between: str, end: str) -> Callable:
    """A writer of one text per row; head and end stand around them, `between` between two."""

    def write(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(head)
            first = True
            for batch in batches:
                for row in batch.to_pylist():
                    file.write(("" if first else between) + line(row))
                    first = False
            file.write(end)

    return write


def _json(row: dict[str, Any]) -> str:
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False)


def _markdown(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    head = f"| {' | '.join(schema.names)} |\n|{'---|' * len(schema.names)}\n"

    def line(row: dict[str, Any]) -> str:
        return "| " + " | ".join(_cell(x).replace("|", r"\|") for x in row.values()) + " |\n"

    _lines(head, line, "", "")(path, schema, batches)


def _tex(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    kinds = "".join("l" if pa.types.is_string(f.type) else "r" for f in schema)
    head = f"\\begin{{tabular}}{{{kinds}}}\n\\hline\n{' & '.join(map(_escaped, schema.names))} \\\\\n\\hline\n"

    def line(row: dict[str, Any]) -> str:
        return " & ".join(_escaped(_cell(x)) for x in row.values()) + " \\\\\n"

    _lines(head, line, "", "\\hline\n\\end{tabular}\n")(path, schema, batches)


def _escaped(text: str) -> str:
    return "".join(TEX.get(c, c) for c in text)


def _cell(x: Any) -> str:
    if x is None:
        return ""
    # nan is a result here, and word would take it for null
    return f"{x:.4g}" if isinstance(x, float) else word(x)


WRITERS: dict[str, Callable[[Path, pa.Schema, Iterator[pa.RecordBatch]], None]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".json": _lines("[\n", _json, ",\n", "\n]\n"),
    ".jsonl": _lines("", lambda row: _json(row) + "\n", "", ""),
    ".md": _markdown,
    ".tex": _tex,
}
