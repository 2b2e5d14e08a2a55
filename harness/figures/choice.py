"""Which rows of a table of several runs belong in which panel, and what must not differ inside one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.records import ORACLE, recorded
from harness.results import keys

if TYPE_CHECKING:
    import pandas as pd

# constants that a reader of a figure has to know, in this order
SETTINGS = (
    *("model.name", "decode.family", "decode.gates", "decode.tokens", "decode.slots", "decode.window"),
    *("acceptance.kind", "ring.length", "precision.name", "device"),
)


def light(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame without what it knows of single runs: every slice copies attrs, long ones where runs are many."""
    bare = frame.copy(deep=False)
    bare.attrs = {key: frame.attrs[key] for key in ("missing", "config") if key in frame.attrs}
    return bare


def values(frame: pd.DataFrame, key: str | None) -> list[Any]:
    """The values of a config column: numbers by size, else in the order of its categories or of appearance.

    [None] where key is None: one panel for all. Raises HarnessError for a key that is no column.
    """
    if key is None:
        return [None]
    if key not in frame.columns:
        raise HarnessError(f"{key}: not a column of the table; config columns there: {', '.join(config(frame)) or '-'}")
    column = frame[key]
    if hasattr(column, "cat"):
        return [x for x in column.cat.categories if (column == x).any()]
    found = list(column.drop_duplicates())
    return sorted(found) if column.dtype.kind in "iuf" else found


def config(frame: pd.DataFrame) -> list[str]:
    """Config columns, by their dotted keys."""
    return [str(name) for name in frame.columns if "." in str(name)]


def telling(frame: pd.DataFrame) -> list[str]:
    """Config columns in which rows differ, without those that the name or family of their group settles."""
    # as text, in which null equals null
    return keys.telling(frame[config(frame)].astype(str).drop_duplicates().to_dict("records"))


def require_alike(part: pd.DataFrame, where: str, but: Sequence[str] = (keys.SEED,)) -> None:
    """Raises HarnessError if rows that are drawn as one differ in a config column other than those of `but`."""
    for key in config(part):
        if key in but:
            continue
        if len(found := list(dict.fromkeys(map(str, part[key])))) > 1:
            told = ", ".join(found[:4])
            raise HarnessError(f"{key}: {told} would be drawn as one in {where}; choose one, or make it an axis")


def chosen(frame: pd.DataFrame, variants: Sequence[str] | None, error: str) -> list[str]:
    """The variants to draw: those asked for, else all that have `error`, the oracle left out.

    Raises HarnessError for a column or a variant that is not there.
    """
    if error not in frame.columns:
        raise HarnessError(f"{error}: not a column of the table")
    every = [str(name) for name in frame["variant"].drop_duplicates() if name != ORACLE]
    there = [name for name in every if recorded(frame, name, error)]
    for name in variants or ():
        if name not in there:
            raise HarnessError(f"variants: {name!r} has no {error} in the table; have {', '.join(there)}")
    return there if variants is None else list(variants)


def without(frame: pd.DataFrame, error: str) -> str:
    """The sentence on the variants that have no such error, empty where all have it."""
    lost = [str(name) for name in frame["variant"].drop_duplicates() if not recorded(frame, str(name), error)]
    told = ", ".join(name for name in lost if name != ORACLE)
    return f"Without {error}: {told}. " if told else ""


def constants(frame: pd.DataFrame) -> str:
    """The sentence on what all runs of the table share, empty where it does not say."""
    shared = frame.attrs.get("config", {})
    told = [f"{key} {shared[key]}" for key in SETTINGS if shared.get(key) is not None]
    return "Of all runs: " + ", ".join(told) + "." if told else ""
