"""Drift is a law, not a number: none, saturating, √t, linear, another power, exponential, or falling.

The law is the shape (harness.shapes) that explains the log errors best. It has to earn its one parameter:
its BIC, counted in independent points, must be STRONG below that of a constant, and it must change the
error by a factor SMALLEST over the run. Exact zeros have no logarithm: they are left out and counted. A
value that is not finite makes the series diverged, whatever the rest does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.records import group_quantiles, grouped
from harness.shapes import SHAPES, decimate, independent_points

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 8  # nonzero points that can carry a law
SMALLEST = 1.2  # factor over the run below which a trend is called none
STRONG = 6  # BIC a trend has to gain over none: strong evidence in the scale of Kass and Raftery (1995)
ROUNDING = 1e-7  # float32 rows cannot tell smaller deviations of log error apart
NAMED = {"sqrt": (0.5, 0.1), "linear": (1.0, 0.15)}  # name of a power: exponent, largest distance from it
RESAMPLES = 40


@dataclass(frozen=True)
class Law:
    """kind is none, saturating, sqrt, linear, power, exponential or falling (a power below 0).

    Or exact: all is zero; diverged: a value is not finite; undecided: fewer than FEWEST values are nonzero.
    """

    kind: str
    level: float  # error the law gives at the last token count; of a diverged series, the median of the finite
    shape: str = ""  # key of SHAPES
    exponent: float | None = None  # p of t^p; of a saturating law, that of its early growth
    time_constant: float | None = None  # τ in tokens, of a saturating or exponential law
    floor: float | None = None  # error at t = 0, where growth starts from a floor
    score: float = 0.0  # share of the spread about the median, in log error, that the law explains; 0..1
    points: int = 0  # values given
    zeros: int = 0  # of them exactly zero
    nonfinite: int = 0
    first_nonfinite: int | None = None  # token count of the first
    reason: str = ""
    level_interval: tuple[float, float] | None = None  # 2.5 and 97.5 % of the level over `over`
    interval: tuple[float, float] | None = None  # the same of τ where there is one, else of p
    over: str = ""

    def text(self) -> str:
        """The law in at most 15 characters."""
        if self.kind == "diverged":
            return f"diverged @{_short(self.first_nonfinite or 0)}"
        if self.time_constant is not None:
            return f"{self.kind[:3]}. τ={_short(self.time_constant)}"
        if self.kind in ("power", "falling"):
            return f"t^{self.exponent:.2f}"
        return {"sqrt": "√t"}.get(self.kind, self.kind) + ("+floor" if self.floor is not None else "")


def _short(n: float) -> str:
    return f"{n:.3g}" if n < 1000 else f"{n / 1000:.3g}k" if n < 1e6 else f"{n:.0e}"


def fit(tokens: np.ndarray, error: np.ndarray) -> Law:
    """The law of one series: tokens [F] > 0, error [F] >= 0 or not finite, in any order."""
    tokens, error = np.asarray(tokens, float), np.asarray(error, float)
    finite, some = np.isfinite(error), np.isfinite(error) & (error > 0)
    zeros, bad = int((error == 0).sum()), int((~finite).sum())
    level = float(np.median(error[finite])) if finite.any() else float("nan")
    if bad:
        law = Law("diverged", level, reason=f"{bad} of {len(error)} values are not finite")
        law = replace(law, first_nonfinite=int(tokens[~finite].min()))
    elif zeros and zeros == len(error):
        law = Law("exact", 0.0, score=1.0, reason="every value is exactly zero")
    elif some.sum() < FEWEST or np.ptp(tokens[some]) == 0:
        law = Law("undecided", level, reason=f"{some.sum()} nonzero points are too few")
    else:
        order = np.argsort(tokens[some], kind="stable")
        law = _choose(tokens[some][order], np.log(error[some][order]))
        if zeros:
            law = replace(law, reason=f"{law.reason}; {zeros} of {len(error)} values, exactly zero, left out")
    return replace(law, points=len(error), zeros=zeros, nonfinite=bad)


def _choose(tokens: np.ndarray, log_error: np.ndarray) -> Law:
    t, e = decimate(tokens, np.exp(log_error))
    y = np.log(e)
    spread = max(float(np.abs(y - np.median(y)).mean()), ROUNDING)
    fits = {name: shape.search(t, y) for name, shape in SHAPES.items()}
    deviations = {name: max(SHAPES[name].deviation(z, t, y), ROUNDING) for name, z in fits.items()}
    name = min(deviations, key=lambda k: deviations[k])
    law = _law(name, fits[name], t, y)
    log = SHAPES[name].log(fits[name], t)
    # cells hide correlation late, and the whole series has few early points: believe the smaller count
    rests = (y - log, log_error - SHAPES[name].log(fits[name], tokens))
    n = min(independent_points(rest - np.median(rest)) for rest in rests)
    gain = 2 * n * np.log(spread / deviations[name]) - np.log(n)
    factor = float(np.exp(min(np.abs(log[-1] - log[0]), 700.0)))
    flat = Law("none", float(np.exp(np.median(y))))
    if factor < SMALLEST:
        return replace(flat, reason=f"the best trend ({law.kind}) changes it by a factor {factor:.2f} only")
    if gain < STRONG:
        return replace(flat, reason=f"the best trend ({law.kind}) gains {gain:.1f} in BIC, not {STRONG}")
    rivals = {"none": float(gain)}
    for other, deviation in deviations.items():
        kind = _law(other, fits[other], t, y).kind
        if kind != law.kind:
            rivals[kind] = min(rivals.get(kind, np.inf), 2 * n * float(np.log(deviation / deviations[name])))
    rival = min(rivals, key=lambda k: rivals[k])
    reason = f"BIC {rivals[rival]:.1f} below {rival}, the next best"
    return replace(law, score=1 - deviations[name] / spread, reason=reason)


def _law(name: str, z: float, t: np.ndarray, y: np.ndarray) -> Law:
    """The law of shape `name` at z, its level fitted to log errors y at t."""
    shape = SHAPES[name]
    log = shape.log(z, t)
    offset = float(np.median(y - log))
    law = Law(shape.kind, float(np.exp(offset + log[-1])), shape=name, exponent=shape.exponent)
    if name == "power":
        near = [kind for kind, (p, width) in NAMED.items() if abs(z - p) <= width]
        return replace(law, kind=near[0] if near else "falling" if z < 0 else "power", exponent=z)
    if name == "exponential":
        return replace(law, time_constant=float(t[-1] / z))
    if shape.kind == "saturating":
        return replace(law, time_constant=float(np.exp(z)))
    return replace(law, floor=float(np.exp(offset)))


def fit_slots(rows: pd.DataFrame, column: str = "served_fro") -> Law:
    """The law of one variant's rows: of the median over slots and heads at each flush, with an interval.

    The interval is that of the same shape fitted to each slot's median over heads; with one slot, to each
    head; with fewer than three heads, to block resamples of the residuals. `over` says which. Heads differ
    in their gates, so an interval over heads is their spread, not an uncertainty.
    """
    slot, head, flush = (rows[name].to_numpy() for name in ("slot", "head", "flush"))
    tokens, error = rows["tokens"].to_numpy(float), rows[column].to_numpy(float)
    bad = ~np.isfinite(error)
    if bad.any():
        sick = np.unique(np.stack([slot, head])[:, bad], axis=1).shape[1]
        all_series = np.unique(np.stack([slot, head]), axis=1).shape[1]
        law = fit(tokens, error)
        return replace(law, reason=f"{law.reason}, in {sick} of {all_series} (slot, head) pairs")
    law = fit(*_median_series(flush, tokens, error))
    zeros = int((error == 0).sum())
    law = replace(law, points=len(error), zeros=zeros)
    if law.kind in ("exact", "undecided"):
        return law
    slots, heads = np.unique(slot), np.unique(head)
    by, names = (slot, slots) if len(slots) > 1 else (head, heads)
    if len(names) > 1 and (len(slots) > 1 or len(heads) > 2):
        kind = "slots" if by is slot else "heads"
        series = (_median_series(flush[by == i], tokens[by == i], error[by == i]) for i in names)
        return _with_intervals(law, series, f"{len(names)} {kind}")
    t, e = _median_series(flush, tokens, error)
    t, e = decimate(t[e > 0], e[e > 0])
    return _with_intervals(law, _resamples(law, t, e), "block resamples of one slot")


def _median_series(flush: np.ndarray, tokens: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = grouped(flush)[1]
    return group_quantiles(tokens, groups, [0.5])[:, 0], group_quantiles(error, groups, [0.5])[:, 0]


def _resamples(law: Law, t: np.ndarray, e: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    y = np.log(e)
    shape = SHAPES.get(law.shape)
    curve = shape.log(shape.search(t, y), t) if shape else np.zeros_like(y)
    curve = curve + np.median(y - curve)
    block = max(len(t) // 10, 1)
    for _ in range(RESAMPLES):
        starts = rng.integers(0, len(t) - block + 1, len(t) // block + 1)
        picked = (starts[:, None] + np.arange(block)).ravel()[: len(t)]
        yield t, np.exp(curve + (y - curve)[picked])


def _with_intervals(law: Law, series: Iterable[tuple[np.ndarray, np.ndarray]], over: str) -> Law:
    """law with the 2.5 and 97.5 % of its level and parameter over fits of its shape to each series."""
    levels, parameters = [], []
    for tokens, error in series:
        if (error > 0).sum() < FEWEST:
            continue
        t, e = decimate(tokens[error > 0], error[error > 0])
        y = np.log(e)
        if law.kind == "none":
            levels.append(float(np.median(e)))
            continue
        one = _law(law.shape, SHAPES[law.shape].search(t, y), t, y)
        levels.append(one.level)
        parameters.append(one.time_constant or one.exponent)
    if len(levels) < 2:
        return law
    low, high = np.quantile(levels, [0.025, 0.975])
    law = replace(law, level_interval=(float(low), float(high)), over=over)
    if law.kind == "none" or law.floor is not None:
        return law
    low, high = np.quantile(np.array(parameters, float), [0.025, 0.975])
    return replace(law, interval=(float(low), float(high)))
