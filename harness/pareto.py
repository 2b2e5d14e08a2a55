"""Which points no other beats: the front of a table in two columns, both the smaller the better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def pareto(frame: pd.DataFrame, x: str, y: str) -> np.ndarray:
    """[n] whether no row has a smaller or equal x and y, one of them smaller. NaN and inf are on no front."""
    a, b = (frame[key].astype(float).to_numpy() for key in (x, y))
    finite = np.isfinite(a) & np.isfinite(b)
    beaten = (a[None] <= a[:, None]) & (b[None] <= b[:, None]) & ((a[None] < a[:, None]) | (b[None] < b[:, None]))
    return finite & ~(beaten & finite[None]).any(1)
