"""Shapes a drift may have: log error = log level + shape(x; t), one free number x each, fitted robustly.

    power           (t/T)^x
    floor_linear    1 + x t/T             linear growth above a constant floor
    floor_sqrt      sqrt(1 + x t/T)       independent errors above a floor; they add in square
    exponential     exp(x (t/T - 1))      x e-folds over the run
    saturating      1 - exp(-t/x)
    saturating_sqrt sqrt(1 - exp(-t/x))   independent errors under a contraction

T is the last token count. A fit is of least absolute deviations, its offset (the level) free: a median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from harness.records import group_quantiles

POINTS = 200  # medians a fit sees


@dataclass(frozen=True)
class Shape:
    """log(z, t) [n], z being x (power, exponential) or log x (others); `bounds` is searched in `cells`.

    kind is the name of the law; a power is renamed by its exponent.
    """

    kind: str
    log: Callable[[float, np.ndarray], np.ndarray]
    bounds: Callable[[np.ndarray], tuple[float, float]]
    cells: int = 1
    exponent: float | None = None

    def deviation(self, z: float, t: np.ndarray, y: np.ndarray) -> float:
        """Mean absolute deviation of y - log(z, t) from its median."""
        rest = y - self.log(z, t)
        return float(np.abs(rest - np.median(rest)).mean())

    def search(self, t: np.ndarray, y: np.ndarray) -> float:
        """The z of least deviation; t [n] rising, y [n] log errors."""
        low, high = self.bounds(t)
        if self.cells > 1:
            edges = np.linspace(low, high, self.cells + 1)
            best = int(np.argmin([self.deviation(z, t, y) for z in edges]))
            low, high = edges[max(best - 1, 0)], edges[min(best + 1, self.cells)]
        options = {"xatol": 1e-4 * (high - low)}
        found = minimize_scalar(self.deviation, bounds=(low, high), args=(t, y), method="bounded", options=options)
        return float(found.x)


def _saturating(power: float) -> Shape:
    # beyond T/2 a saturating law cannot be told from a growing one
    return Shape(
        "saturating",
        lambda z, t: power * np.log(-np.expm1(-t / np.exp(z))),
        lambda t: (float(np.log(t[0] / 4)), float(np.log(t[-1] / 2))),
        cells=12,
        exponent=power,
    )


def _above_floor(kind: str, power: float) -> Shape:
    return Shape(
        kind,
        lambda z, t: power * np.log1p(np.exp(z) * t / t[-1]),
        # the floor is never less than a third of the growth at the first token: lower ones cannot be seen
        lambda t: (-3.0, float(np.log(3 * t[-1] / t[0]))),
        cells=6,
        exponent=power,
    )


SHAPES = {
    "power": Shape("power", lambda z, t: z * np.log(t / t[-1]), lambda t: (-4.0, 4.0)),
    # below two e-folds an exponential cannot be told from a line above a floor, and is the graver claim
    "exponential": Shape("exponential", lambda z, t: z * (t / t[-1] - 1), lambda t: (2.0, 200.0)),
    "saturating": _saturating(1.0),
    "saturating_sqrt": _saturating(0.5),
    "floor_linear": _above_floor("linear", 1.0),
    "floor_sqrt": _above_floor("sqrt", 0.5),
}


def decimate(tokens: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most POINTS medians (tokens, error) of [F] positive values, in cells of equal width in log t."""
    if len(tokens) <= POINTS:
        order = np.argsort(tokens, kind="stable")
        return tokens[order], error[order]
    log = np.log(tokens)
    cell = POINTS * (log - log.min()) / max(float(np.ptp(log)), 1e-300)
    groups = np.unique(np.minimum(cell.astype(int), POINTS - 1), return_inverse=True)[1]
    return group_quantiles(tokens, groups, [0.5])[:, 0], group_quantiles(error, groups, [0.5])[:, 0]


def independent_points(rest: np.ndarray) -> float:
    """How many independent points residuals [n] are worth by their lag-one correlation, outliers clipped."""
    spread = float(np.abs(rest).mean())
    if spread == 0:
        return float(len(rest))
    rest = np.clip(rest, -4 * spread, 4 * spread)
    r = float((rest[1:] * rest[:-1]).sum() / (rest * rest).sum())
    r = min(max(r, 0.0), 0.999)
    return max(len(rest) * (1 - r) / (1 + r), 4.0)
