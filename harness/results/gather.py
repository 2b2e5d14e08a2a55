"""Any table of many runs as a stream of record batches, with the configuration beside the rows.

Nothing is held but the batch at hand, so what is made of the stream decides how much memory it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.errors import HarnessError
from harness.records import TEXT
from harness.results.holdings import Holdings, Result, holdings
from harness.results.keys import Value, alike, constant, ordered, varying, word
from harness.results.parts import Part, parts_of

NUMBERS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


@dataclass(frozen=True)
class Gathered:
    """schema: of every batch. count: at most as many rows. batches(): the rows, from the start at every call."""

    schema: pa.Schema
    count: int
    batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)
    attrs: dict[str, Any]
    keys: list[str]
    held: Holdings


def gather(
    paths: Sequence[Path],
    table: str = "levels",
    config: str | Sequence[str] = "varying",
    columns: str | Sequence[str] | None = None,
    variants: str | Sequence[str] | None = None,
) -> Gathered:
    """The table of every run under paths; the arguments are those of harness.results.load."""
    if not paths:
        raise HarnessError("path: an empty list, where runs, sweeps or folders are named")
    columns, variants = ([x] if isinstance(x, str) else x for x in (columns, variants))
    held = holdings(paths)
    # a published sweep that stands alone is a table already; beside others its runs have to be runs
    parts = parts_of(held, table, whole=len(held.results) == 1)
    empty = [path for path in paths if not any(_within(part.result, path, held) for part in parts)]
    if empty:
        told = "; ".join(f"{where}: {state}" for where, state in held.left_out[:3])
        raise HarnessError(f"{_named(empty)}: no finished run with {table} ({told})")
    if table != "levels" and len({part.result.collected for part in parts}) > 1:
        raise HarnessError(f"{table}: of a published sweep and of single runs in one table; load them one by one")
    schema = _unified(parts, table)
    inside = {key for part in parts for key in part.inside}
    keys = [k for k in _keys(config, parts, inside) if k in inside or k not in schema.names]
    own = _identity(parts, schema)
    names = (
        [n for n in schema.names if n not in inside and n not in own]
        if columns is None
        else list(dict.fromkeys(columns))
    )
    if lost := [name for name in names if name not in schema.names]:
        raise HarnessError(f"columns: {', '.join(lost)}: not in {table}, which has {', '.join(schema.names)}")
    plain = table == "levels" or parts[0].result.collected
    fields = [pa.field(key, _type(key, parts, schema, plain)) for key in (*own, *keys)]
    whole = pa.schema([*fields, *(schema.field(name) for name in names if name not in own and name not in keys)])
    every = set(variants) if variants is not None else None
    if every is not None and "variant" not in schema.names:
        raise HarnessError(f"variants: {table} has no column variant")

    def batches() -> Iterator[pa.RecordBatch]:
        seen: set[str] = set()
        for part in parts:
            beside: dict[str, Value] = {**part.config, "run": part.hash, "source": part.result.source}
            read = [n for n in part.schema.names if n in whole.names or n == "variant"]
            for batch in part.batches(read):
                rows = batch if every is None else _kept(batch, every, seen)
                if rows.num_rows:
                    yield _beside(rows, beside, whole)
        if every is not None and (lost := sorted(every - seen)):
            raise HarnessError(f"variants: {', '.join(lost)}: in no run of {_named(paths)}")

    return Gathered(whole, sum(part.rows for part in parts), batches, _attrs(parts, inside, held), keys, held)


def _within(result: Result, path: Path, held: Holdings) -> bool:
    return result.directory.resolve() in held.under[path]


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _attrs(parts: Sequence[Part], inside: set[str], held: Holdings) -> dict[str, Any]:
    shared = {k: v for k, v in constant([part.config for part in parts]).items() if k not in inside}
    sources = sorted({part.result.source for part in parts})
    directories = {part.hash: str(part.result.directory) for part in parts}
    return {"config": shared, "sources": sources, "directories": directories, "left_out": list(held.left_out)}


def _unified(parts: Sequence[Part], table: str) -> pa.Schema:
    try:
        return pa.unify_schemas([part.schema.remove_metadata() for part in parts], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise HarnessError(f"{table}: the runs disagree about a column ({str(error).splitlines()[0]})") from None


def _identity(parts: Sequence[Part], schema: pa.Schema) -> list[str]:
    """run and source, where there are several; the rows of a published sweep may bring run themselves."""
    runs, sources = {part.hash for part in parts}, {part.result.source for part in parts}
    several = "run" in schema.names or (len(runs) > 1 and not any(part.inside for part in parts))
    return ["run"] * several + ["source"] * (len(sources) > 1)


def _keys(config: str | Sequence[str], parts: Sequence[Part], inside: set[str]) -> list[str]:
    configs = [part.config for part in parts]
    if config == "varying":
        return ordered(inside.union(varying(configs)))
    every = inside.union(*configs)
    if config == "all":
        return ordered(every)
    if isinstance(config, str):
        raise HarnessError(f"config: {config!r} is neither varying nor all nor a list of keys")
    if lost := [key for key in config if key not in every]:
        raise HarnessError(f"config: {', '.join(lost)}: no key of these runs")
    return list(dict.fromkeys(config))


def _type(key: str, parts: Sequence[Part], schema: pa.Schema, plain: bool) -> pa.DataType:
    """Text as codes; numbers too where there is a row per flush, as eight bytes each are too many there."""
    if key in schema.names:
        return schema.field(key).type
    kind = str if key in ("run", "source") else alike(part.config.get(key) for part in parts)
    if kind is str:
        return TEXT
    return NUMBERS[kind] if plain else pa.dictionary(pa.int32(), NUMBERS[kind])


def _kept(batch: pa.RecordBatch, every: set[str], seen: set[str]) -> pa.RecordBatch:
    """The rows of the named variants; adds to seen those that there are."""
    column = batch.column(batch.schema.get_field_index("variant"))
    codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    there = codes.dictionary.to_pylist()
    found = np.isin(codes.indices.to_numpy(zero_copy_only=False), [i for i, name in enumerate(there) if name in every])
    seen |= every & set(there) if found.any() else set()
    return batch.filter(pa.array(found))


def _beside(batch: pa.RecordBatch, values: dict[str, Value], whole: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for f in whole:
        at = batch.schema.get_field_index(f.name)
        if at >= 0:
            column = batch.column(at)
            arrays.append(column if column.type == f.type else column.cast(f.type))
        else:
            arrays.append(_filled(values.get(f.name), f.type, batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=whole)


def _filled(value: Value, kind: pa.DataType, n: int) -> pa.Array:
    if value is None:
        return pa.nulls(n, kind)
    if not pa.types.is_dictionary(kind):
        return pa.repeat(pa.scalar(value, kind), n)
    one = word(value) if kind == TEXT else value
    return pa.DictionaryArray.from_arrays(np.zeros(n, np.int32), pa.array([one], kind.value_type))
