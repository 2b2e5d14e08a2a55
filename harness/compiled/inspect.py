"""harness.conditioning matrix by matrix on the CPU: what is small is moved there from wherever it was formed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from harness import pool
from harness.arithmetic import Arithmetic, Dot
from harness.compiled import conditioning as kernels
from harness.compiled.operands import array, take_products
from harness.tokens import on_host
from harness.window import Windows


def conditioning(windows: Windows, a: Arithmetic, threads: bool = False) -> Callable[[], np.ndarray]:
    """As harness.conditioning.conditioning; what comes back waits for threads, which have begun."""
    if not threads:
        take_products(windows, a, a.dots.gram)
    A, T, g = windows.scores(a)[0], windows.formed(a, "substitution"), windows.gates(a)[0]
    return _spread(kernels.conditioning, (A, T, g), np.empty((*g.shape[:3], 5)), threads)


def inner(
    windows: Windows, a: Arithmetic, inverse: str, operator: bool, threads: bool = False
) -> Callable[[], np.ndarray]:
    """As harness.conditioning.inner, for windows no wider than a key."""
    if not threads:
        take_products(windows, a, Dot())
    parts = (
        windows.scores(a)[0], windows.formed(a, inverse), windows.products(a, Dot()), windows.gates(a)[1],
        windows.before(a)[0], *windows.decays(a),
    )  # fmt: skip
    compute = partial(_inner, windows.m < windows.shape.K, operator)
    found = _spread(compute, parts, np.empty((*windows.g.shape[:3], 3)), threads)
    return lambda: found() if operator else found()[..., :1]


def _inner(wide: bool, operator: bool, *arrays: np.ndarray) -> None:
    *parts, out = arrays
    m = parts[0].shape[-1]
    XP = np.zeros((*out.shape[:3], m, m))
    kernels.inner(*parts, wide, operator, out, XP)
    open_ = out[..., 2] == -1
    if open_.any():
        last = parts[5][..., -1][open_]
        found = np.abs(np.linalg.eigvals(last[:, None, None] * np.eye(m) - XP[open_])).max(-1)
        out[open_, 2] = np.maximum(found, last if wide else 0.0)


def _spread(
    compute: Callable[..., Any], parts: tuple[Tensor, ...], out: np.ndarray, threads: bool
) -> Callable[[], np.ndarray]:
    """compute(*parts, out) of [W, B, ...], some of the windows in each thread."""
    there, ready = on_host(*(x.contiguous() for x in parts))
    arrays = [x.reshape(-1, 1, *x.shape[2:]) for x in (*map(array, there), out)]

    def task(some: slice) -> None:
        ready()
        compute(*(x[some] for x in arrays))

    wait = pool.start([partial(task, some) for some in pool.shares(len(arrays[-1]), threads)], threads)

    def found() -> np.ndarray:
        wait()
        return out

    return found
