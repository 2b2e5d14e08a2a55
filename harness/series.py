"""The data of the drift figure, as plain arrays: what is on a log axis, and what has no place there.

Zeros, NaN and infinity are kept and counted here, and drawn by harness.plots on rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import HarnessError
from harness.records import ORACLE, group_quantiles, grouped, recorded

if TYPE_CHECKING:
    import pandas as pd

BINS = 120  # per variant and panel; fewer flushes are drawn one by one
APART = 0.006  # share of the height of a panel, some two pixels: lines nearer than that hide each other
TINY = 1e-18  # below this nonzero errors would stretch the axis: drawn on the row of zeros, hollow
# what has no place on a log axis: its words, the field of a Series that counts it
COUNTED = (("exact zeros", "zeros"), (f"below {TINY:g}", "tiny"), ("NaN", "nans"), ("inf", "infs"))
# panel: (title, column drawn as median and band, column whose maximum is dotted)
PANELS = {
    "served": ("served state, ‖Ŝ − S‖ / ‖S‖", "served_fro", "served_fro"),
    "kept": ("kept state (folded here), ‖Ŝ − S‖ / ‖S‖", "kept_fro", "kept_fro"),
    "o": ("output per token, ‖ô − o‖ / ‖o‖", "o_med", "o_max"),
    "d": ("written d per token, ‖d̂ − d‖ / ‖d‖", "d_med", "d_max"),
}


@dataclass(frozen=True)
class Series:
    """One variant in one panel: points [n] by rising token count, each over all slots and heads it covers."""

    variant: str
    tokens: np.ndarray  # [n] median token count of the bin
    median: np.ndarray  # [n], NaN above inf, as are the others
    low: np.ndarray  # [n] 5 %
    high: np.ndarray  # [n] 95 %
    top: np.ndarray  # [n] maximum
    bad: np.ndarray  # [n] values of the bin that are not finite
    values: int  # rows
    zeros: int  # of them exactly zero
    tiny: int  # in (0, TINY)
    nans: int
    infs: int

    @property
    def line(self) -> np.ndarray:
        """[n] the median where a log axis can show it, else NaN."""
        return drawable(self.median)

    @property
    def floored(self) -> np.ndarray:
        """[n] bins whose median is zero or below TINY."""
        return self.median < TINY


def drawable(x: np.ndarray) -> np.ndarray:
    """x [n] with NaN wherever a log axis would drop the value or be stretched by it."""
    return np.where(np.isfinite(x) & (x >= TINY), x, np.nan)


def drift_series(rows: pd.DataFrame, bins: int = BINS) -> dict[str, list[Series]]:
    """Panel key -> one Series per variant that has the metric; without the oracle and empty panels.

    Up to `bins` flushes are points of their own; more are pooled in bins of equal width in log tokens.
    """
    found: dict[str, list[Series]] = {}
    for name, part in rows.groupby("variant", observed=True, sort=False):
        if name == ORACLE:
            continue
        groups = _bins(part["flush"].to_numpy(), part["tokens"].to_numpy(float), bins)
        for key, (_, middle, top) in PANELS.items():
            if recorded(rows, str(name), middle):
                peak = top if recorded(rows, str(name), top) else middle
                found.setdefault(key, []).append(_series(str(name), part, groups, middle, peak))
    return {key: found[key] for key in PANELS if key in found}


def _bins(flush: np.ndarray, tokens: np.ndarray, bins: int) -> np.ndarray:
    unique, groups = grouped(flush)
    if len(unique) <= bins:
        return groups
    log = np.log(np.maximum(tokens, 1))
    cell = np.minimum(bins * (log - log.min()) / max(float(np.ptp(log)), 1e-300), bins - 1)
    return np.unique(cell.astype(int), return_inverse=True)[1]


def _series(name: str, rows: pd.DataFrame, groups: np.ndarray, middle: str, top: str) -> Series:
    values, peaks = rows[middle].to_numpy(float), rows[top].to_numpy(float)
    tokens = group_quantiles(rows["tokens"].to_numpy(float), groups, [0.5])[:, 0]
    low, median, high = group_quantiles(values, groups, [0.05, 0.5, 0.95]).T
    nans = np.isnan(values) | np.isnan(peaks)
    infs = ~nans & (np.isinf(values) | np.isinf(peaks))
    order = np.argsort(tokens, kind="stable")
    return Series(
        name,
        tokens[order],
        median[order],
        low[order],
        high[order],
        group_quantiles(peaks, groups, [1.0])[order, 0],
        np.bincount(groups, weights=nans | infs)[order].astype(int),
        values=len(values),
        zeros=int((values == 0).sum()),
        tiny=int(((values > 0) & (values < TINY)).sum()),
        nans=int(nans.sum()),
        infs=int(infs.sum()),
    )


def limits(series: Mapping[str, Sequence[Series]]) -> tuple[float, float]:
    """Decades that hold every drawable value of all panels; 1e-8..1 where there is none."""
    lists = [drawable(x) for group in series.values() for s in group for x in (s.median, s.low, s.high, s.top)]
    shown = np.concatenate([*lists, np.array([])])
    shown = shown[np.isfinite(shown)]
    if not shown.size:
        return 1e-8, 1.0
    return float(10 ** np.floor(np.log10(shown.min()))), float(10 ** np.ceil(np.log10(shown.max()) + 1e-9))


def counts(series: Mapping[str, Sequence[Series]]) -> list[str]:
    """A clause for each variant with zeros, tiny or non-finite values, of the panel where most are."""
    lines: dict[tuple[str, str], tuple[int, int, str]] = {}
    for what, field in COUNTED:
        for key, group in series.items():
            for s in group:
                n = getattr(s, field)
                if n and n > lines.get((s.variant, what), (0, 0, ""))[0]:
                    lines[s.variant, what] = (n, s.values, key)
    return [f"{name}: {n:,} of {total:,} {what} ({key})" for (name, what), (n, total, key) in lines.items()]


def coincident(series: Mapping[str, Sequence[Series]]) -> list[str]:
    """A clause for each set of variants whose medians no reader can tell apart, with the panels where that is so."""
    low, high = limits(series)
    together: dict[tuple[str, ...], list[str]] = {}
    for key, group in series.items():
        left = list(group)
        while left:
            first, *rest = left
            alike = [_overlap(first, s, APART * np.log10(high / low)) for s in rest]
            names = [s.variant for s, same in zip(rest, alike, strict=True) if same]
            if names:
                together.setdefault((first.variant, *names), []).append(key)
            left = [s for s, same in zip(rest, alike, strict=True) if not same]
    return [f"{', '.join(names)} ({', '.join(keys)})" for names, keys in together.items()]


def _overlap(a: Series, b: Series, decades: float) -> bool:
    """Whether nearly all medians of a and b lie within so many decades of each other."""
    if len(a.line) != len(b.line) or not (np.isfinite(a.line) & np.isfinite(b.line)).any():
        return False
    distance = np.abs(np.log10(a.line) - np.log10(b.line))
    near = (distance < decades) | (np.isnan(a.line) & np.isnan(b.line))
    return float(near.mean()) >= 0.95


def error_series(frame: pd.DataFrame, error: str, bins: int = BINS) -> list[Series]:
    """One Series per variant that has `error`, of rows or, where the frame has a column `quantile`, of quantiles."""
    found = []
    for name, part in frame.groupby("variant", observed=True, sort=False):
        if name == ORACLE or not recorded(frame, str(name), error):
            continue
        if "quantile" in frame.columns:
            found.append(_of_quantiles(str(name), part, error))
        else:
            groups = _bins(part["flush"].to_numpy(), part["tokens"].to_numpy(float), bins)
            found.append(_series(str(name), part, groups, error, error))
    return found


def _of_quantiles(name: str, part: pd.DataFrame, error: str) -> Series:
    """A bin of tokens is a value here: zero if any row of it is, NaN or inf if the largest is."""
    # 0.05 in float32 is another number
    share, found = part["quantile"].to_numpy(float).round(2), part[error].to_numpy(float)
    tokens, group = np.unique(part["tokens"].to_numpy(), return_inverse=True)
    wide = {q: np.full(len(tokens), np.nan) for q in (0.0, 0.05, 0.5, 0.95, 1.0)}
    for q, column in wide.items():
        inside = share == q
        if np.bincount(group[inside], minlength=1).max() > 1:
            raise HarnessError(
                f"variant {name}: quantiles of several runs in one panel; they cannot be pooled, rows can"
            )
        column[group[inside]] = found[inside]
    least, low, median, high, top = wide.values()
    bad = ~np.isfinite(top)
    return Series(
        name,
        tokens.astype(float),
        median,
        low,
        high,
        top,
        bad.astype(int),
        values=len(tokens),
        zeros=int((least == 0).sum()),
        tiny=int(((least > 0) & (least < TINY)).sum()),
        nans=int(np.isnan(top).sum()),
        infs=int(np.isinf(top).sum()),
    )


def totals(series: Mapping[str, Sequence[Series]]) -> list[str]:
    """A clause for each variant with zeros, tiny or non-finite values, summed over all panels."""
    found = []
    every = [s for group in series.values() for s in group]
    for name in dict.fromkeys(s.variant for s in every):
        mine = [s for s in every if s.variant == name]
        for what, field in COUNTED:
            if n := sum(getattr(s, field) for s in mine):
                found.append(f"{name}: {n:,} of {sum(s.values for s in mine):,} {what}")
    return found
