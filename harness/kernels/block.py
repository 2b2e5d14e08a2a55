"""A block of steps as launches: what the host knows beforehand goes up at once, and errors come down at once.

Cursors, committed counts and grid points depend on no number the device makes, so they are planned for the whole block
before its first launch; designs on equal rings share a plan. A step's outputs and writes stay in the kernels' formats
until the block's committed tokens are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.errors import RingError
from harness.kernels.measure import Measure, relative
from harness.reference.calls import Seen
from harness.ring import Cursors
from harness.window import Windows

if TYPE_CHECKING:
    from harness.kernels.design import Triton, TritonState

ALIGN = 4  # int32 to 16 bytes: a pointer so aligned is what kernels are compiled for


@dataclass
class Plan:
    """What a block does to the cursors of a ring, and what of that the launches need."""

    counts: list[Tensor | None]  # of every step [B] int32: accepted tokens, -1 for a slot not in it; None: nobody is
    looks: list[tuple[Tensor, Tensor, Tensor] | None]  # slots, their points and history lengths, [n] int32 each
    most: int  # slots of the step that is looked at for most
    slot: np.ndarray  # [N] of every look, in order
    point: np.ndarray
    history: np.ndarray  # [B, P] of harness.reference.calls.Seen
    folded: np.ndarray
    after: Cursors
    at: tuple[Tensor, ...]  # step, slot and lane of every committed token, [B, T]


def commit(cursors: Cursors, slots: Sequence[int], accepted: Sequence[int], fold_current: bool) -> None:
    """Move cursors as a commit and the folds that belong to it do; fold_current: as Emulated.commit has it."""
    current = [s for s in slots if cursors.flushed[s]] if fold_current else []
    for slot, n in zip(slots, accepted, strict=True):
        if slot in current and n == 0:
            raise RingError(f"slot {slot}: its token is folded already and cannot be refused")
    full = cursors.commit(slots, accepted)
    cursors.absorb(current)
    cursors.absorb(full)


def plan_of(cursors: Cursors, windows: Windows, block: Any, device: Any, fold_current: bool = False) -> Plan:
    """Move a copy of the cursors through a block. Raises RingError as they do, before anything is launched."""
    cursors = copy.deepcopy(cursors)
    W, B = windows.lengths.shape
    history, folded = (np.zeros((B, block.most), dtype=kind) for kind in (np.int64, bool))
    table = np.zeros((3, W, -(-B // ALIGN) * ALIGN), dtype=np.int32)
    live, looks = [], []
    steps = zip(windows.lengths.tolist(), block.accepted.tolist(), block.points.tolist(), strict=True)
    for i, (lengths, accepted, points) in enumerate(steps):
        slots = [b for b, m in enumerate(lengths) if m]
        cursors.verify(slots, [lengths[b] for b in slots])
        commit(cursors, slots, [accepted[b] for b in slots], fold_current)
        live.append(bool(slots))
        here = [b for b, p in enumerate(points) if p >= 0]
        looks.append(len(here))
        if here:
            reached, w = [points[b] for b in here], [cursors.write_pos[b] for b in here]
            table[:, i, : len(here)] = here, reached, w
            history[here, reached] = w
            folded[here, reached] = [cursors.is_flush[b] or cursors.write_pos[b] == 0 for b in here]
    counts = torch.from_numpy(np.where(windows.lengths > 0, block.accepted, -1).astype(np.int32)).to(device)
    rows = torch.from_numpy(table).to(device)
    at = np.arange(table.shape[2]) < np.array(looks)[:, None]
    _, step, lane = block.committed
    return Plan(
        [x if there else None for x, there in zip(counts, live, strict=True)],
        [(rows[0, i, :n], rows[1, i, :n], rows[2, i, :n]) if n else None for i, n in enumerate(looks)],
        max(looks, default=0), table[0][at], table[1][at], history, folded, cursors,
        tuple(torch.from_numpy(x).to(device) for x in (step, np.arange(B)[:, None], lane)),
    )  # fmt: skip


def planned(state: TritonState, windows: Windows, block: Any, fold_current: bool) -> Plan:
    """The block's plan, made once for all designs whose rings are alike."""
    c = state.cursors
    at = tuple(c.write_pos), tuple(c.cache_base), tuple(c.is_flush), tuple(c.window)
    key = "launches", c.spec, fold_current, at, state.device
    if key not in block.memo:
        block.memo[key] = plan_of(c, windows, block, state.device, fold_current)
    plan: Plan = block.memo[key]
    return plan


def decode(design: Triton, state: TritonState, windows: Windows, block: Any, S: Tensor) -> Seen:
    """A block of steps of a design, read against the exact states S [P, B, HV, V, K] fp64. The device is read once."""
    inputs = design.ready(state, windows)
    plan = planned(state, windows, block, design.spec.fold_current)
    state.sync()
    s, steps = state.shape, design._steps(state, windows.m)
    size = windows.W, state.slots, s.HV, windows.m, s.V
    o, d = torch.empty(size, dtype=steps.out.dtype, device=state.device), torch.empty(size, device=state.device)
    measure = Measure(steps, S, plan.most)
    found = measure.room(len(plan.slot))
    own, seen = (steps.out, steps.d), 0
    for x, counts, look, *to in zip(inputs, plan.counts, plan.looks, o, d, strict=True):
        if counts is not None:
            steps.out, steps.d = to
            steps.verify(x)
            steps.commit(counts)
        if look is not None:
            measure.look(*look, found[seen : seen + len(look[0])])
            seen += len(look[0])
    steps.out, steps.d = own
    _moved(state, plan, windows, block)
    errors = np.empty((state.slots, block.most, s.HV, 4))
    errors[plan.slot, plan.point] = relative(found).cpu().numpy()
    o, d = (x.permute(0, 1, 3, 2, 4)[plan.at].double() for x in (o, d))
    return Seen(o, d, errors, plan.history.copy(), plan.folded.copy())


def _moved(state: TritonState, plan: Plan, windows: Windows, block: Any) -> None:
    """Leave the host where the device is."""
    state.cursors = copy.deepcopy(plan.after)
    for slot, n in enumerate(np.where(windows.lengths > 0, block.accepted, 0).sum(0).tolist()):
        state.tokens[slot] += n
    # a verify and a commit each
    state.version += 2 * sum(x is not None for x in plan.counts)
    state.folded = None
    state.moved()
