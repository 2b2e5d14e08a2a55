"""A design's block of steps in one call: cursors first, which no number moves, then every head through all steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from harness.compiled import block as kernels
from harness.compiled import passes
from harness.compiled.common import (
    AFTER,
    AT,
    BASE,
    BEFORE,
    END,
    HISTORY,
    KEEP,
    LIVE,
    NEW_BASE,
    NEW_END,
    PLAN,
    POINT,
    SNAPSHOT,
    TAKEN,
)
from harness.compiled.course import course
from harness.compiled.design import Compiled
from harness.compiled.operands import array, empty, token_operands
from harness.compiled.rounding import EXACT
from harness.reference.calls import Seen
from harness.reference.state import EmulatedState
from harness.ring import Cursors
from harness.window import Windows


def fused(design: Compiled) -> Callable[..., Seen] | None:
    """block(state, windows, block, S, emit=False) -> Seen, or None for a design whose steps go one by one."""
    if design.spec.fold == "snapshot":
        return partial(_tokens, design)
    if design.spec.verify == "window" and not design.spec.fold_current:
        return partial(_windows, design)
    return None


def plan_of(cursors: Cursors, block: Any) -> tuple[np.ndarray, np.ndarray, Cursors]:
    """Plan [W, B, len(PLAN)] and flags [W, B] of every step, and the cursors after. Raises RingError as they do."""
    path, after = course(cursors, block.lengths, block.accepted)
    live, done = block.lengths > 0, block.accepted.cumsum(0) - block.accepted
    seen = np.where(path.flag > 0, 0, path.end)
    plan = np.zeros((*live.shape, len(PLAN)), dtype=np.int64)
    columns = LIVE, BEFORE, BASE, END, HISTORY, KEEP, AT, AFTER, NEW_BASE, NEW_END
    values = (block.lengths, path.end - seen, path.base, path.end, seen, block.accepted, done, path.folded,
              path.new_base, path.last_end)  # fmt: skip
    for column, value in zip(columns, values, strict=True):
        plan[..., column] = np.where(live, value, 0)
    plan[..., POINT] = block.points
    return plan, live & (path.last_flag > 0), after


def _moved(design: Compiled, state: EmulatedState, block: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan; history and folded of every grid point, [B, P]. Moves the state's cursors to the end of the block."""
    c = state.cursors
    key = "plan", design.ring, tuple(c.write_pos), tuple(c.cache_base), tuple(c.is_flush), tuple(c.window)
    if key not in block.memo:
        block.memo[key] = plan_of(c, block)
    plan, folds, after = block.memo[key]
    state.cursors = copy.deepcopy(after)
    for slot, n in enumerate(block.committed[0].tolist()):
        state.tokens[slot] += n
    state.version += 1
    state.operand = state.folded = None
    history, folded = (np.zeros((plan.shape[1], block.most), dtype=kind) for kind in (np.int64, bool))
    i, b = np.nonzero(block.points >= 0)
    at = b, block.points[i, b]
    history[at] = plan[i, b, NEW_END]
    folded[at] = folds[i, b] | (history[at] == 0)
    return plan, history, folded


def _outputs(state: EmulatedState, block: Any) -> tuple[Tensor, Tensor, np.ndarray]:
    s, (counts, _, _) = state.shape, block.committed
    o, d = (empty(state.slots, int(counts.max()), s.HV, s.V) for _ in range(2))
    return o, d, np.empty((state.slots, block.most, s.HV, 4))


def _windows(
    design: Compiled, state: EmulatedState, windows: Windows, block: Any, S: Tensor, emit: bool = False
) -> Seen:
    derived = design.derived(state)
    ring = design.ring_of(state, derived)
    given, stored = design.operands(windows, slice(None), replay=derived is not None)
    plan, history, folded = _moved(design, state, block)
    o, d, errors = _outputs(state, block)
    kernels.decode_windows(
        array(state.checkpoint), ring, given, stored, plan, design.flags, *design.order(state.shape.K), design.codes,
        emit, array(S), array(o), array(d), errors,
    )  # fmt: skip
    return Seen(o, d, errors, history, folded)


def _tokens(
    design: Compiled, state: EmulatedState, windows: Windows, block: Any, S: Tensor, emit: bool = False
) -> Seen:
    assert not emit
    a, c = design.arithmetic, design.codes
    plan, history, folded = _moved(design, state, block)
    o, d, errors = _outputs(state, block)
    _, step, lane = block.committed
    rounded = c[SNAPSHOT, 0] != EXACT or c[TAKEN, 0] != EXACT
    # where a state is looked at, and, where taking it rounds it, wherever it is taken
    W, B = block.points.shape
    last = np.arange(W)[:, None] == (W - 1)
    marks = (plan[..., LIVE] > 0) & (rounded | (block.points >= 0)) | last
    most = int(marks.sum(0).max())
    ends, points = np.zeros((B, most), dtype=np.int64), np.full((B, most), -1)
    reached = block.accepted.cumsum(0)
    for b in range(B):
        at = np.flatnonzero(marks[:, b])
        # an idle end repeats the token count before it
        at = at[np.diff(reached[at, b], prepend=0) > 0]
        ends[b, : len(at)], points[b, : len(at)] = reached[at, b], block.points[at, b]
    operands = token_operands(windows, a)
    passes.decode_tokens(
        array(state.checkpoint), array(windows.unit(a.conventions)), *operands[1:], step, lane, ends, points,
        *design.order(state.shape.K), design.flags, c, array(S), array(o), array(d), errors,
    )  # fmt: skip
    return Seen(o, d, errors, history, folded)
