"""One row per (variant, slot, value head, flush): the schema, a streaming writer and a reader.

A metric that a variant does not have is null in the file. NaN there means computed, and not a number; the
two are never mixed, because a mean or a maximum that skips NaN hides exactly the runs that failed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import HarnessError

if TYPE_CHECKING:
    import pandas as pd

ORACLE = "oracle"
KEYS = {"slot": pa.int32(), "head": pa.int32(), "flush": pa.int32(), "tokens": pa.int64()}
OWN = {"history": pa.int32(), "folded": pa.bool_(), "zero_state": pa.bool_()}
ERRORS = (
    "served_fro",  # ||S_hat - S||_F / ||S||_F of the served state
    "served_max",  # max|S_hat - S| / max|S|
    "kept_fro",
    "kept_max",
    "d_med",  # per-token ||d_hat - d|| / ||d|| over the tokens since the last row
    "d_max",
    "o_med",
    "o_max",
    "inverse_residual",  # strictly lower part of (I + A_hat) T_hat - I
    "operator_norm",
    "operator_radius",
)
CONDITIONING = (
    ("cond2", "condinf", "skeel", "max_power", "gate_span")
    + tuple(f"interval_{name}" for name in ("cond2", "condinf", "skeel", "max_power"))
    + ("interval_gate_span",)
)
BOUND = "oracle_bound"  # at least ||S_hat - S||_F / ||S||_F of the oracle itself
METRICS = (*ERRORS, *CONDITIONING, BOUND)
ROWS = ""  # no name of a column
PENDING = 16  # blocks of one variant between the decode and the disk

TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("variant", TEXT), ("backend", TEXT)]
    + list(KEYS.items())
    + list(OWN.items())
    + [(name, pa.float32()) for name in METRICS]
    + [("nonfinite_stage", TEXT)]
)


def to_float32(x: np.ndarray) -> np.ndarray:
    """fp64 [...] to float32 [...] such that finite stays finite and nonzero stays nonzero.

    A plain cast would log a power of 1e59 as inf (a divergence) and an error of 1e-50 as 0 (an exact result).
    """
    wide = np.asarray(x, np.float64)
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float32)
    overflowed = np.isinf(narrow) & np.isfinite(wide)
    vanished = (narrow == 0) & (wide != 0)
    narrow = np.where(overflowed, np.copysign(limits.max, wide).astype(np.float32), narrow)
    return np.where(vanished, np.copysign(limits.smallest_subnormal, wide).astype(np.float32), narrow)


class RowWriter:
    """Streams rows to Parquet: a row group leaves memory as soon as `group` rows are buffered.

    A thread of its own compresses and writes, at most PENDING blocks behind. Use as a context manager, or call
    `close`; without either the file has no footer and cannot be read. What the disk refuses is raised by either, or by
    a later `append`.
    """

    def __init__(self, path: str | Path, schema: pa.Schema = SCHEMA, group: int = 1 << 16) -> None:
        self.schema, self.group, self.rows = schema, group, 0
        self._buffer: list[pa.RecordBatch] = []
        self._buffered = 0
        self._columns: dict[str, frozenset[str]] = {}
        self._thread = ThreadPoolExecutor(1, "rows")
        self._pending: deque[Future[None]] = deque()
        floats = [f.name for f in schema if pa.types.is_floating(f.type)]
        self._writer = pq.ParquetWriter(
            str(path),
            schema,
            compression="zstd",
            use_dictionary=[f.name for f in schema if f.name not in floats],
            use_byte_stream_split=floats,
        )

    def append(self, variant: str, block: Mapping[str, Any]) -> None:
        """One variant's rows: column name -> array [n], masked where single values are null, or a scalar.

        The four keys (slot, head, flush, tokens) are required, any other column may be left out and is then
        null. nonfinite_stage takes strings and None. Raises ValueError for an unknown column, a missing
        key, lengths that differ, or a variant that brings other columns than in its first block.
        """
        given = frozenset(block)
        if unknown := sorted(given - set(self.schema.names) | given & {"variant"}):
            raise ValueError(f"{variant}: unknown columns {', '.join(unknown)}")
        if absent := [name for name in KEYS if name not in given]:
            raise ValueError(f"{variant}: key columns {', '.join(absent)} are missing")
        if given != self._columns.setdefault(variant, given):
            changed = ", ".join(sorted(given ^ self._columns[variant]))
            raise ValueError(f"{variant}: columns {changed} come in some blocks only")
        arrays = {name: np.ma.asanyarray(x) for name, x in block.items()}
        sizes = {len(x) for x in arrays.values() if x.ndim}
        if len(sizes) != 1 or any(x.ndim > 1 for x in arrays.values()):
            raise ValueError(f"{variant}: columns must be [n] of one length, got {sorted(sizes)}")
        n = sizes.pop()
        self.rows += n
        self._settle(PENDING)
        self._pending.append(self._thread.submit(self._take, variant, arrays, n))

    def _take(self, variant: str, arrays: dict[str, np.ma.MaskedArray], n: int) -> None:
        columns = [self._column(variant, field, arrays.get(field.name), n) for field in self.schema]
        self._buffer.append(pa.record_batch(columns, schema=self.schema))
        self._buffered += n
        if self._buffered >= self.group:
            self._flush()

    def _settle(self, left: int) -> None:
        """Wait until no more than `left` blocks are on their way."""
        while len(self._pending) > left:
            self._pending.popleft().result()

    @staticmethod
    def _column(variant: str, field: pa.Field, x: np.ndarray | None, n: int) -> pa.Array:
        if field.name == "variant":
            return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([variant]))
        if x is None:
            return pa.nulls(n, field.type)
        nulls = np.broadcast_to(np.ma.getmaskarray(x), (n,))
        x = np.broadcast_to(np.ma.getdata(x), (n,))
        if pa.types.is_dictionary(field.type):
            return pa.array(x.tolist(), pa.string(), mask=nulls).dictionary_encode()
        if pa.types.is_floating(field.type):
            # from_pandas would turn NaN into null
            return pa.array(to_float32(x), field.type, mask=nulls, from_pandas=False)
        return pa.array(x, field.type, mask=nulls)

    def _flush(self) -> None:
        """Write what is buffered as one row group."""
        if self._buffered:
            table = pa.Table.from_batches(self._buffer, self.schema).unify_dictionaries()
            self._writer.write_table(table, row_group_size=max(self._buffered, 1))
        self._buffer, self._buffered = [], 0

    def close(self) -> None:
        try:
            self._settle(0)
            self._flush()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The rows of a run directory or a Parquet file; `variant` is categorical, metrics are float32.

    pandas has one NaN for null and for not-a-number, so `attrs["missing"]` maps each variant to the columns
    it never had; see `recorded`. Raises HarnessError for a file that is absent, truncated or lacks a
    column.
    """
    path = Path(path)
    path = path / "flushes.parquet" if path.is_dir() else path
    wanted = None if columns is None else list(dict.fromkeys(["variant", *columns]))
    try:
        if lost := sorted(set(wanted or ()) - set(pq.read_schema(path).names)):
            raise HarnessError(f"{path}: has no column {', '.join(lost)}")
        table = pq.read_table(path, columns=wanted)
    except (OSError, pa.ArrowInvalid) as error:
        raise HarnessError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None
    table = table.unify_dictionaries()
    counts: dict[str, Counter[str]] = {}
    for batch in table.to_batches():
        count_nulls(batch, counts)
    frame = table.to_pandas()
    frame.attrs["missing"] = missing_of(counts)
    return frame if columns is None else frame[list(columns)]


def count_nulls(batch: pa.RecordBatch, counts: dict[str, Counter[str]]) -> None:
    """Add to counts, per variant, its rows (under ROWS) and the nulls of every float column."""
    at = batch.schema.get_field_index("variant")
    variant = batch.column(at)
    if not pa.types.is_dictionary(variant.type):
        variant = variant.dictionary_encode()
    codes, names = variant.indices.to_numpy(), variant.dictionary.to_pylist()
    rows = np.bincount(codes, minlength=len(names))
    own = [counts.setdefault(name, Counter()) if n else Counter() for name, n in zip(names, rows, strict=True)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name != "variant" and not (column.null_count and pa.types.is_floating(column.type)):
            continue
        weights = np.ones(len(codes)) if name == "variant" else column.is_null().to_numpy(zero_copy_only=False)
        for total, n in zip(own, np.bincount(codes, weights=weights, minlength=len(names)), strict=True):
            total[ROWS if name == "variant" else name] += int(n)


def missing_of(counts: Mapping[str, Counter[str]]) -> dict[str, list[str]]:
    """The columns of each variant in which every row is null, of counts as count_nulls makes them."""
    return {
        variant: [name for name, n in found.items() if name != ROWS and n == found[ROWS]]
        for variant, found in counts.items()
    }


def recorded(rows: pd.DataFrame, variant: str, column: str) -> bool:
    """Whether this variant has this metric at all. In a frame of other origin it has: NaN fails."""
    return column in rows.columns and column not in rows.attrs.get("missing", {}).get(variant, ())


def grouped(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """np.unique(ids, return_inverse=True) of small integers from 0 on, without sorting them."""
    there = np.bincount(ids) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[ids]


def group_quantiles(values: np.ndarray, groups: np.ndarray, q: Sequence[float]) -> np.ndarray:
    """Quantiles [G, Q] of values [n] in each group [n] (ids 0..G-1, none empty), interpolated as NumPy does.

    NaN ranks above inf: a failure moves a quantile up, or is the quantile; it is never skipped.
    """
    ranked = _ranked(np.asarray(values), groups)
    size = np.bincount(groups)
    start = np.cumsum(size) - size
    at = (size - 1)[:, None] * np.asarray(q, float)
    low = np.floor(at).astype(int)
    share = at - low
    below = ranked[start[:, None] + low]
    above = ranked[start[:, None] + np.minimum(low + 1, size[:, None] - 1)]
    with np.errstate(invalid="ignore"):
        return np.where(share == 0, below, below * (1 - share) + above * share)


def quantiles_of(values: Sequence[float] | np.ndarray, q: Sequence[float]) -> list[float]:
    """group_quantiles of values [n > 0] that are one group."""
    x = np.asarray(values, float)
    return [float(value) for value in group_quantiles(x, np.zeros(len(x), int), q)[0]]


def _ranked(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """values [n] as fp64 by rising group, then value."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.array_equal(narrow, values, equal_nan=True):
        return np.asarray(values, np.float64)[np.lexsort((values, groups))]
    # group and value in one integer, which sorts several times faster than two keys
    bits, top = narrow.view(np.uint32), np.uint32(1 << 31)
    bits = np.where(np.isnan(narrow), ~np.uint32(0), np.where(bits & top, ~bits, bits | top))
    keys = np.asarray(groups).astype(np.uint64) << np.uint64(32) | bits
    keys.sort()
    bits = keys.astype(np.uint32)
    return np.where(bits & top, bits ^ top, ~bits).view(np.float32).astype(np.float64)
