"""How many cores this process may use: those it was given, or its share of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_share: int | None = None


def cores() -> int:
    """Cores that this process may use."""
    mine = len(os.sched_getaffinity(0))
    return mine if _share is None else min(mine, _share)


@contextmanager
def sharing(share: int | None) -> Iterator[None]:
    """Inside, this process uses so many cores at most: other jobs have the others. None: as before."""
    global _share
    before, _share = _share, _share if share is None else share
    try:
        yield
    finally:
        _share = before
