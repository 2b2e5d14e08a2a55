"""Published tables: quantiles of what cannot be published in full, few bits a number, files as small as they get."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.copied import BITS
from harness.errors import HarnessError
from harness.records import group_quantiles, grouped, to_float32

Q = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def read(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The rows of a Parquet file. Raises HarnessError where it cannot be read."""
    try:
        return pq.read_table(path, columns=columns).unify_dictionaries()
    except (OSError, pa.ArrowInvalid) as error:
        raise HarnessError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]})") from None


def save(table: pa.Table, path: Path) -> None:
    """Write a table as small as it gets."""
    floats = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in table.column_names if name not in floats],
        use_byte_stream_split=floats,
        write_statistics=False,
    )


def metric(column: pa.ChunkedArray, groups: np.ndarray, count: int) -> pa.Array:
    """The quantiles [count * len(Q)] of the values that are there, null in groups without any."""
    there = column.is_valid().to_numpy()
    inside = groups[there]
    some, own = grouped(inside)
    found = np.zeros((count, len(Q)))
    absent = np.ones((count, len(Q)), bool)
    if len(some):
        found[some] = group_quantiles(column.drop_null().to_numpy(), own, Q)
        absent[some] = False
    return pa.array(shortened(to_float32(found.ravel())), pa.float32(), mask=absent.ravel(), from_pandas=False)


def shortened(x: np.ndarray) -> np.ndarray:
    """float32 x [n] rounded to BITS significant bits, ties to even; what is finite and nonzero stays so."""
    shift = np.uint32(24 - BITS)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> shift) & np.uint32(1)
    kept = (bits + (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1) + odd) >> shift << shift
    rounded = kept.view(np.float32)
    # the largest number must not become inf, nor the smallest zero: both would say something else
    return np.where(np.isfinite(rounded) & ((rounded != 0) | (x == 0)), rounded, x)
