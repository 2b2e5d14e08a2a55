"""harness.conditioning for windows on the CPU."""

from __future__ import annotations

import numpy as np

from harness.arithmetic import Arithmetic, Dot
from harness.compiled import conditioning as kernels
from harness.compiled.operands import array, take_products
from harness.window import Windows


def conditioning(windows: Windows, a: Arithmetic) -> np.ndarray:
    """As harness.conditioning.conditioning."""
    take_products(windows, a, a.dots.gram)
    A, T, g = windows.scores(a)[0], windows.formed(a, "substitution"), windows.gates(a)[0]
    out = np.empty((*g.shape[:3], 5))
    kernels.conditioning(array(A.contiguous()), array(T.contiguous()), array(g.contiguous()), out)
    return out


def inner(windows: Windows, a: Arithmetic, inverse: str, operator: bool) -> np.ndarray:
    """As harness.conditioning.inner, for windows no wider than a key."""
    take_products(windows, a, Dot())
    eG, E = windows.decays(a)
    parts = (
        windows.scores(a)[0], windows.formed(a, inverse), windows.products(a, Dot()), windows.gates(a)[1],
        windows.before(a)[0], eG, E,
    )  # fmt: skip
    out, XP = np.empty((*windows.g.shape[:3], 3)), np.zeros((*windows.g.shape[:3], windows.m, windows.m))
    kernels.inner(*(array(x.contiguous()) for x in parts), windows.m < windows.shape.K, operator, out, XP)
    open_ = out[..., 2] == -1
    if open_.any():
        last = eG[..., -1].numpy()[open_]
        found = np.abs(np.linalg.eigvals(last[:, None, None] * np.eye(windows.m) - XP[open_])).max(-1)
        out[open_, 2] = np.maximum(found, last if windows.m < windows.shape.K else 0.0)
    return out if operator else out[..., :1]
