"""What the tables of `python -m harness.results` share: 80 columns, no borders, no cell wrapped unasked."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output, 80 columns wide; nothing in it is markup."""
    return Console(width=80, markup=False, highlight=False)


def grid(*names: str, fold: bool = False) -> Table:
    """An empty table; fold: long cells break, else they end in an ellipsis."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, collapse_padding=True)
    drawn.caption_justify, drawn.caption_style = "left", ""
    for name in names:
        drawn.add_column(name, overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    return drawn


def one_line(text: Any) -> str:
    return " ".join(str(text).split())


def times(seconds: Any) -> str:
    """12.3 s, or nothing for a run that does not say."""
    return f"{float(seconds):.1f} s" if isinstance(seconds, int | float) else ""
