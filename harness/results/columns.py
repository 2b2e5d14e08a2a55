"""Columns of a frame that are filled piece by piece: memory is touched only where rows have come to lie.

A float column has NaN for null and for not-a-number, as everywhere in pandas; an integer or a truth value keeps its
null; text, and whatever Arrow keeps as a dictionary, becomes codes of as few bytes as its categories need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa


def column_of(kind: pa.DataType, count: int) -> Numbers | Codes:
    """An empty column of at most `count` rows for arrays of type `kind`."""
    if pa.types.is_dictionary(kind):
        return Codes(count, ordered=not pa.types.is_string(kind.value_type))
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return Numbers(kind, count)
    return Codes(count)


class Numbers:
    """Floats, integers or truth values, of the width that they have in the file."""

    def __init__(self, kind: pa.DataType, count: int) -> None:
        self.kind, self.count = kind, count
        self.data = np.empty(count, kind.to_pandas_dtype())
        self.null: np.ndarray | None = None

    def take(self, column: pa.Array, at: int) -> None:
        end = at + len(column)
        if column.null_count and not pa.types.is_floating(self.kind):
            if self.null is None:
                self.null = np.zeros(self.count, bool)
            self.null[at:end] = column.is_null().to_numpy(zero_copy_only=False)
            column = column.fill_null(False if pa.types.is_boolean(self.kind) else 0)
        self.data[at:end] = column.to_numpy(zero_copy_only=False)

    def values(self, n: int) -> Any:
        data = self.data[:n]
        if self.null is None:
            return data
        array = pd.arrays.BooleanArray if pa.types.is_boolean(self.kind) else pd.arrays.IntegerArray
        return array(data, self.null[:n])


class Codes:
    """Text, or numbers of few values (ordered): a code per row, and the categories in order of appearance or size."""

    def __init__(self, count: int, ordered: bool = False) -> None:
        self.codes, self.ordered = np.empty(count, np.int8), ordered
        self.code: dict[Any, int] = {}

    def take(self, column: pa.Array, at: int) -> None:
        column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        indices = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        values = column.dictionary.to_pylist()
        # only what rows have becomes a category; the last place is for null
        own = np.full(len(values) + 1, -1, np.int64)
        for i in np.flatnonzero(np.bincount(indices[indices >= 0], minlength=len(values))):
            own[i] = -1 if values[i] is None else self.code.setdefault(values[i], len(self.code))
        while len(self.code) > np.iinfo(self.codes.dtype).max:
            self.codes = self.codes.astype(f"i{2 * self.codes.itemsize}")
        self.codes[at : at + len(column)] = own[indices]

    def values(self, n: int) -> pd.Categorical:
        categories, codes = list(self.code), self.codes[:n]
        if self.ordered and categories:
            order = np.argsort(categories)
            place = np.append(np.argsort(order), -1).astype(codes.dtype)
            categories, codes = [categories[i] for i in order], place[codes]
        return pd.Categorical.from_codes(codes, pd.Index(categories), ordered=self.ordered)
