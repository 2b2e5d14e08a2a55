"""`load`: a table of many runs as one tidy data frame, filled batch by batch into columns of their final size.

Concatenating a frame per run would hold every row twice; ten million rows with all their columns would not fit into
two gigabytes.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from harness.results.gather import Gathered

Paths = str | os.PathLike | Iterable[str | os.PathLike]


def load(
    path: Paths,
    table: str = "levels",
    config: str | Sequence[str] = "varying",
    columns: str | Sequence[str] | None = None,
    variants: str | Sequence[str] | None = None,
) -> pd.DataFrame:
    """One row per (run, variant), or every row of another table, with what tells the runs apart beside it.

    path: a run directory, an experiment's folder, a sweep folder, a results_dir, a published run or sweep, or several
    of these; relative to the working directory.
    table: levels; or the stem of a Parquet file of the runs: flushes, quantiles, points, ...
    config: varying, the keys that differ among the runs; all; or a list of keys. Dotted keys name the columns.
    columns: of the table's own columns, those wanted. variants: those kept; the oracle is one, in flushes. Each may be
    one name.

    Text is categorical; so are the configuration's numbers beside rows of flushes. `run`, the content hash, is a column
    where there are several runs, `source` where there are several sources. Null and NaN are one in pandas:
    attrs["missing"] maps each variant to the metrics that no run has of it (see harness.records.recorded),
    attrs["missing_in"] each run to those that only it lacks. attrs["config"] holds the keys that are the same in all
    runs, attrs["directories"] where each run lies, attrs["left_out"] what was not loaded, as (directory, state).

    summary.json, which levels come from, is held against its checksum in the manifest; the large tables are not, as
    that would read them whole: `python -m harness.results show` does. Warns in one line of a sweep whose jobs are not
    all there or are damaged. Raises HarnessError for a path that holds nothing of the table, for a table that breaks
    off while it is read, and for a column, key or variant that is not there.
    """
    from harness.results.gather import gather

    several = [path] if isinstance(path, str | os.PathLike) else list(path)
    gathered = gather([Path(p) for p in several], table, config, columns, variants)
    for folder, states in gathered.held.lost.items():
        lost = [f"{number:05d} {state}" for number, state in sorted(states.items())]
        named = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
        warnings.warn(f"{folder}: {len(lost)} jobs are not there ({named})", stacklevel=2)
    return frame_of(gathered)


def frame_of(gathered: Gathered) -> pd.DataFrame:
    """The frame of all batches, attrs included."""
    import pandas as pd

    from harness.results.columns import column_of

    filled = {f.name: column_of(f.type, gathered.count) for f in gathered.schema}
    counts: dict[str, dict[str, Counter[str]]] = {}
    at = 0
    for batch in gathered.batches():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            filled[name].take(column, at)
        _count(batch, set(gathered.keys), counts)
        at += batch.num_rows
    # without a copy each column stays where it was filled
    frame = pd.DataFrame({name: filled.pop(name).values(at) for name in list(filled)}, copy=False)
    frame.attrs |= gathered.attrs | _missing(counts)
    return frame


def _count(batch: pa.RecordBatch, beside: set[str], counts: dict[str, dict[str, Counter[str]]]) -> None:
    from harness.records import count_nulls

    if "variant" not in batch.schema.names:
        return
    own = batch.select([name for name in batch.schema.names if name not in beside])
    for run, start, end in _runs(batch):
        count_nulls(own.slice(start, end - start), counts.setdefault(run, {}))


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[str, int, int]]:
    """(run, first row, row behind the last) of the runs that follow each other in a batch."""
    import numpy as np

    at = batch.schema.get_field_index("run")
    if at < 0:
        yield "", 0, batch.num_rows
        return
    codes = batch.column(at).indices.to_numpy()
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, end in pairwise(edges):
        yield batch.column(at)[start].as_py(), start, end


def _missing(counts: dict[str, dict[str, Counter[str]]]) -> dict[str, Any]:
    from harness.records import missing_of

    total: dict[str, Counter[str]] = {}
    for own in counts.values():
        for variant, found in own.items():
            total.setdefault(variant, Counter()).update(found)
    missing = missing_of(total)
    partly = {}
    for run, own in counts.items():
        more = {v: [c for c in names if c not in missing[v]] for v, names in missing_of(own).items()}
        if more := {v: names for v, names in more.items() if names}:
            partly[run] = more
    return {"missing": missing, "missing_in": partly}
