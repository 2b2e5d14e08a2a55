"""A declared design as the numbers that kernels read: one rounding per site and operand, flags, orders of columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from harness.arithmetic import DOTS, EXACT, PRODUCTS, SITES, Arithmetic, Dot
from harness.compiled.common import CODES, FLAGS
from harness.compiled.exponential import FAST
from harness.compiled.rounding import code
from harness.reference.inverse import inverse_of
from harness.variants import VariantSpec


def unsupported(spec: VariantSpec, a: Arithmetic) -> str | None:
    """Why a design cannot be compiled, or None."""
    for name in SITES:
        r = getattr(a.sites, name)
        if r.mode == "stochastic":
            return f"site {name} is stochastic"
        if r.parts == 2 and name not in ("store_d", "store_k_hat"):
            return f"site {name} keeps two parts"
    for name in PRODUCTS:
        dot = getattr(a.dots, name)
        if dot.x3 or dot.right.parts == 2 or (dot.left.parts == 2 and name != "state"):
            return f"product {name} reads two parts"
        # of blocks, a fold knows those of one record, as fp32 units add
        turns = name == "fold" and replace(dot, block=0) == DOTS["ieee"] and dot.block == 1
        if dot.block and name not in ("recurrent", "inverse", "gram") and not turns:
            return f"product {name} accumulates in blocks"
    recurs = spec.verify == "tokens" or spec.fold == "replay" or spec.fold_current
    if recurs and not a.dots.recurrent.right.keeps(a.sites.key):
        return "the recurrence reads its keys rounded"
    return None


def codes(a: Arithmetic) -> np.ndarray:
    """[len(CODES), 6] the roundings of a step, each left out where the value already has its format."""
    s, d = a.sites, a.dots
    high = s.store_k_hat if s.store_k_hat.parts == 1 else EXACT
    operand = s.checkpoint if s.state_operand.keeps(s.checkpoint) else s.state_operand
    fast = np.array([FAST, 0, 0, 0, 0, 0])
    kept = s.step if s.snapshot.keeps(s.step) else s.snapshot
    table = {
        "key": code(s.key),
        "state_operand": code(s.state_operand, s.checkpoint),
        "state_left": code(d.state.left.high, operand),
        "state_right": code(d.state.right, s.key),
        "state_acc": code(d.state.accumulate),
        "decay": code(s.decay),
        "exp": fast if a.fast else code(s.decay),
        "score_left": code(d.history_score.left, high),
        "score_key": code(d.history_score.right, s.key),
        "score_acc": code(d.history_score.accumulate),
        "score": code(s.history_score, d.history_score.accumulate),
        "score_right": code(d.history.right, s.history_score),
        "history_d": code(s.history_d),
        "history_left": code(d.history.left, s.history_d),
        "history_acc": code(d.history.accumulate),
        "rhs": code(s.rhs),
        "solve_left": code(d.solve.left, s.rhs),
        "solve_acc": code(d.solve.accumulate),
        "inverse": code(s.inverse),
        "d": code(s.d),
        "output_left": code(d.output.left, s.d),
        "output_acc": code(d.output.accumulate),
        "output": code(s.output),
        "store_k_hat": code(s.store_k_hat.high, s.key if s.store_k_hat.parts == 1 else None),
        "store_d": code(s.store_d.high, s.d if s.store_d.parts == 1 else None),
        "cumulative": code(s.decay),
        "store_g": code(s.store_g, s.decay),
        "fold_d": code(s.fold_d),
        "fold_left": code(d.fold.left, s.fold_d),
        "fold_k": code(s.fold_k, high),
        "fold_right": code(d.fold.right, s.fold_k),
        "fold_acc": code(d.fold.accumulate),
        "checkpoint": code(s.checkpoint, d.fold.accumulate),
        "replayed": code(s.checkpoint, s.step),
        "decayed": code(s.decayed),
        "step": code(s.step),
        "seen_left": code(d.recurrent.left, s.decayed if a.conventions.decay == "before" else s.step),
        "recurrent_left": code(d.recurrent.left, s.step),
        "recurrent_acc": code(d.recurrent.accumulate),
        "snapshot": code(s.snapshot, s.step),
        "taken": code(s.checkpoint, kept),
    }
    return np.stack([table[name] for name in CODES])


def flags(spec: VariantSpec, a: Arithmetic) -> np.ndarray:
    """[len(FLAGS)] what a design is, for the kernels."""
    table = {
        "low_k": a.sites.store_k_hat.parts == 2,
        "low_d": a.sites.store_d.parts == 2,
        "read_low": spec.history_read == "sum",
        "cumulative": spec.gate_record == "cumulative",
        "exact": a.sites.decay.exact,
        "explicit": inverse_of(spec.inverse).explicit,
        "two_parts": a.dots.state.left.parts == 2,
        "raw": spec.fold == "replay",
        "replay": spec.fold == "replay",
        "in_turn": a.dots.fold.block == 1,
        "late": a.conventions.decay == "after",
    }
    return np.array([table[name] for name in FLAGS], dtype=np.int64)


def column_order(dot: Dot, n: int) -> tuple[np.ndarray, np.ndarray]:
    """An order of n columns in which each block of the dot's accumulator is a run, and where the runs end, from 0."""
    if not dot.blocked(n):
        return np.arange(n), np.array([0, n])
    blocks = -(-n // dot.block)
    owner = np.arange(n) % blocks if dot.strided else np.arange(n) // dot.block
    return np.argsort(owner, kind="stable"), np.cumsum([0, *np.bincount(owner)])
