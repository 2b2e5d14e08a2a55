"""Which of many designs nothing else beats: the front of two numbers, both to be small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


def pareto(frame: pd.DataFrame, x: str, y: str) -> NDArray[np.bool_]:
    """Mask [n] of the rows that no other row equals or beats in both columns and beats in one.

    Equal rows stand on the front together; a row with NaN in either column never does, nor does it beat another.
    """
    a, b = (frame[name].to_numpy(float, na_value=np.nan) for name in (x, y))
    front = np.zeros(len(frame), bool)
    valid = np.flatnonzero(~np.isnan(a) & ~np.isnan(b))
    order = valid[np.lexsort((b[valid], a[valid]))]
    best = np.inf
    start = 0
    while start < len(order):
        # all rows of one x; the least y leads, and only its equals may stand beside it
        stop = start + int(np.searchsorted(a[order[start:]], a[order[start]], side="right"))
        group = order[start:stop]
        if b[group[0]] < best or (start == 0 and np.isinf(b[group[0]])):
            best = b[group[0]]
            front[group[b[group] == best]] = True
        start = stop
    return front
