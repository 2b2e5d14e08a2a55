"""A case run and reduced to the numbers that are gated: level, slope and tail of every error, and what must be equal.

level   median over slots, heads and the last half of the flushes
slope   of log10 of each flush's median over log10 tokens, least squares over the same flushes
tail    maximum over every row
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch

from harness.cores import cores
from harness.designs import designs
from harness.experiments.drift import formats_of
from harness.gate.rules import Measured, Value
from harness.gate.suite import Case
from harness.provenance import digest
from harness.records import ORACLE
from harness.runner import Runner

UNIT = 2.0**-53
# name: column of its level and slope, and of its tail
ERRORS = {
    "served": ("served_fro", "served_max"),
    "kept": ("kept_fro", "kept_max"),
    "o": ("o_med", "o_max"),
    "d": ("d_med", "d_max"),
}
COURSE = ("slot", "head", "flush", "tokens", "history", "folded")
DIGITS = 4  # significant ones of a measured number: a thousandth of any allowance
FLATTEST = 1e-12  # below which an error has no slope to speak of

Columns = dict[str, np.ndarray]


def measure(cases: list[Case], device: str, progress: Callable[[Case], None] = lambda case: None) -> Measured:
    """Every case; on the CPU in as many processes as there are cores."""
    if device == "cuda":
        found = {}
        for case in cases:
            found[case.name] = measure_case(case, device)
            progress(case)
        return found
    import harness.compiled.inspect
    import harness.compiled.lockstep  # noqa: F401

    with ProcessPoolExecutor(cores(), multiprocessing.get_context("fork")) as processes:
        waiting = {processes.submit(_single, case): case for case in cases}
        done = {}
        for future in as_completed(waiting):
            case = waiting[future]
            done[case.name] = future.result()
            progress(case)
    return {case.name: done[case.name] for case in cases}


def _single(case: Case) -> dict[str, dict[str, Value]]:
    torch.set_num_threads(1)
    return measure_case(case, "cpu")


def measure_case(case: Case, device: str) -> dict[str, dict[str, Value]]:
    """Variant -> metric -> value."""
    parts: dict[str, list[Columns]] = {}
    with torch.inference_mode():
        for rows in Runner(case.config, slice(None), device).run():
            for variant, columns in rows:
                parts.setdefault(variant, []).append(columns)
    found = {}
    for design in designs(case.config, device):
        name = design.spec.name
        columns = joined(parts.get(name, []))
        found[name] = reduce_exact(columns) if case.exact else reduce_rows(columns)
        shown = formats_of(design, device)
        kept = ("records", "conventions", "exp", "effective", "ring")
        found[name] |= {"formats": digest({key: shown[key] for key in kept}), "backend": str(design.backend)}
    assert ORACLE not in found
    return found


def joined(parts: list[Columns]) -> Columns:
    """Blocks one after the other; empty where there are none."""
    return {name: np.ma.concatenate([np.ma.asanyarray(p[name]) for p in parts]) for name in (parts[0] if parts else ())}


def reduce_rows(columns: Columns) -> dict[str, Value]:
    """The metrics of one variant's rows."""
    found = _equal(columns)
    if not columns:
        return found
    flush, tokens = (np.asarray(columns[name]) for name in ("flush", "tokens"))
    late = flush >= np.median(np.unique(flush))
    for key, (middle, top) in ERRORS.items():
        if not _recorded(columns, middle):
            continue
        values, peaks = (np.ma.getdata(columns[name]).astype(float) for name in (middle, top))
        # NaN sorts last: a maximum never skips one, and half of the rows must be broken to hide in a median
        found[f"level.{key}"] = _digits(np.sort(values[late])[late.sum() // 2])
        found[f"tail.{key}"] = _digits(np.sort(peaks)[-1] if np.isfinite(values).all() else np.nan)
        found[f"slope.{key}"] = slope(flush[late], tokens[late], values[late])
    if _recorded(columns, "inverse_residual"):
        found["residual"] = _digits(np.sort(np.ma.getdata(columns["inverse_residual"]))[-1])
    return found


def reduce_exact(columns: Columns) -> dict[str, Value]:
    """Largest errors of a variant in exact arithmetic, in units of 2^-53."""
    found = _equal(columns)
    for key, (_, top) in ERRORS.items():
        if _recorded(columns, top):
            found[f"identity.{key}"] = _digits(np.sort(np.ma.getdata(columns[top]))[-1] / UNIT)
    return found


def slope(flush: Any, tokens: Any, values: np.ndarray) -> float:
    """Of log10 of the flushes' medians over log10 of their median tokens; 0 for errors of nothing, NaN if one is."""
    at, error = [], []
    for f in np.unique(flush):
        mine = np.sort(values[flush == f])
        at.append(np.median(tokens[flush == f]))
        error.append(mine[len(mine) // 2])
    x, y = np.log10(at), np.log10(np.maximum(error, FLATTEST))
    if len(x) < 2 or np.ptp(x) == 0:
        return 0.0
    return round(float(np.polyfit(x, y, 1)[0]), 3) if np.isfinite(y).all() else float("nan")


def _equal(columns: Columns) -> dict[str, Value]:
    """What has to be equal: the number of rows, and where each lies and folds."""
    if not columns:
        return {"rows": 0.0}
    order = np.lexsort([np.asarray(columns[name]) for name in ("head", "slot", "flush")])
    table = np.stack([np.asarray(columns[name]).astype(np.int64)[order] for name in COURSE])
    return {"rows": float(table.shape[1]), "course": hashlib.sha256(table.tobytes()).hexdigest()[:16]}


def _recorded(columns: Columns, name: str) -> bool:
    """Whether a variant has a metric: absent, and masked throughout, mean that it has not."""
    return name in columns and not np.ma.getmaskarray(columns[name]).all()


def _digits(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")
