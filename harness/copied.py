"""What is published of a run without flushes: all of it, numbers of its tables rounded, paths cut to their last part.

A table of a map has no rows to leave out, and half a part in a thousand says all that an error has to say.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from harness.precision import Format, round_to

BITS = 11
# the exponents of fp64: an error of 1e58 stays one
SHORT = Format("short", BITS, -1022, 1023, (2 - 2.0 ** (1 - BITS)) * 2.0**1023)


def rounded(table: pa.Table) -> pa.Table:
    """The table with every fp64 number rounded to nearest; nulls, NaN, infinities and other columns as they are."""
    for i, field in enumerate(table.schema):
        if pa.types.is_float64(field.type):
            column = table[field.name].combine_chunks()
            values = torch.from_numpy(column.fill_null(0.0).to_numpy(zero_copy_only=False).copy())
            short = pa.array(round_to(values, SHORT).numpy(), field.type, mask=column.is_null().to_numpy(False))
            table = table.set_column(i, field, short)
    return table


def copy_others(run: Path, work: Path) -> None:
    """Summary and figures: what is neither table nor manifest nor configuration."""
    for path in sorted(run.iterdir()):
        if path.name not in ("manifest.json", "config.yaml") and path.suffix != ".parquet":
            shutil.copyfile(path, work / path.name)


def anonymous(value: Any) -> Any:
    """value with every absolute path in it cut to its last part: results_dir=/a/b becomes results_dir=b."""
    if isinstance(value, dict):
        return {key: anonymous(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [anonymous(x) for x in value]
    if not isinstance(value, str):
        return value
    # a path begins the string, or follows what can stand before one in an argument or a line of YAML
    return re.sub(r"(^|[\s=\[,'\"])~?/(?=[^\s/])(?:[^/,'\"\]]+/)*([^/,'\"\]]*)/?", r"\1\2", value)
