"""A block of steps as launches: what the host knows beforehand goes up at once, and errors come down at once.

Cursors, committed counts and grid points depend on no number the device makes, so they are planned for the whole block
before its first launch; designs on equal rings share a plan. The launches of a block read and write the same memory as
those of the block before, so a GPU repeats them. A step's outputs and writes stay in the kernels' formats until the
block's committed tokens are gathered.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.compiled.course import course
from harness.kernels.measure import Measure, relative
from harness.kernels.steps import Inputs, Steps
from harness.reference.calls import Seen, within
from harness.repeated import Repeated
from harness.ring import Cursors
from harness.tokens import on_device
from harness.window import Windows

if TYPE_CHECKING:
    from harness.kernels.design import Triton, TritonState

ALIGN = 4  # int32 to 16 bytes: a pointer so aligned is what kernels are compiled for


@dataclass
class Plan:
    """What a block does to the cursors of a ring, and what of that the launches need."""

    table: Tensor  # [4, W, B'] int32: accepted tokens, -1 for a slot not in the step; slots looked at, -1 behind the
    # last, their points and history lengths
    live: int  # steps that any slot is in
    slot: np.ndarray  # [N] of every look, in order
    point: np.ndarray
    look: Tensor  # [N] which look of all B' a step that is
    history: np.ndarray  # [B, P] of harness.reference.calls.Seen
    folded: np.ndarray
    after: Cursors
    at: list[Tensor]  # step, slot and lane of every committed token, [B, T]


def plan_of(cursors: Cursors, windows: Windows, block: Any, device: Any, fold_current: bool = False) -> Plan:
    """Move a copy of the cursors through a block. Raises RingError as they do, before anything is launched."""
    W, B = windows.lengths.shape
    path, after = course(cursors, windows.lengths, block.accepted, fold_current)
    history, folded = (np.zeros((B, block.most), dtype=kind) for kind in (np.int64, bool))
    table = np.full((4, W, -(-B // ALIGN) * ALIGN), -1, dtype=np.int32)
    table[0, :, :B] = np.where(windows.lengths > 0, block.accepted, -1)
    i, here = np.nonzero(block.points >= 0)
    reached, w = block.points[i, here], path.last_end[i, here]
    table[1:, i, within(np.bincount(i, minlength=W))] = here, reached, w
    history[here, reached] = w
    folded[here, reached] = (path.last_flag[i, here] > 0) | (w == 0)
    looked = table[1] >= 0
    _, step, lane = block.committed
    rows, look, *at = on_device(
        device, table, np.flatnonzero(looked), step, np.arange(B)[:, None], lane
    )  # fmt: skip
    return Plan(
        rows,
        int((windows.lengths > 0).any(1).sum()),
        table[1][looked],
        table[2][looked],
        look,
        history,
        folded,
        after,
        at,
    )


def planned(state: TritonState, windows: Windows, block: Any, fold_current: bool) -> Plan:
    """The block's plan, made once for all designs whose rings are alike."""
    c = state.cursors
    at = tuple(c.write_pos), tuple(c.cache_base), tuple(c.is_flush), tuple(c.window)
    key = "launches", c.spec, fold_current, at, state.device
    if key not in block.memo:
        block.memo[key] = plan_of(c, windows, block, state.device, fold_current)
    plan: Plan = block.memo[key]
    return plan


class Tape:
    """The launches of a block of W steps, on inputs, tables and outputs of their own.

    exact [P, B, HV, V, K] fp64 is read where it lies.
    """

    def __init__(self, steps: Steps, inputs: Inputs, exact: Tensor):
        self.steps, self.exact = steps, exact
        state, s = steps.state, steps.state.shape
        self.inputs = Inputs(*(torch.empty_like(x) for x in inputs))
        W, B = inputs.lengths.shape
        self.table = torch.empty(4, W, -(-B // ALIGN) * ALIGN, dtype=torch.int32, device=state.device)
        size = W, B, s.HV, steps.m, s.V
        self.o = torch.empty(size, dtype=steps.out.dtype, device=state.device)
        self.d = torch.empty(size, device=state.device)
        self.measure = Measure(steps, exact, self.table.shape[2])
        self.found = self.measure.room(W, self.table.shape[2])
        self.checkpoint = state.checkpoint.data_ptr()
        self.again = Repeated(self._launch, self.table.is_cuda)

    def fits(self, inputs: Inputs, exact: Tensor) -> bool:
        """Whether a block can take the same launches."""
        alike = all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(self.inputs, inputs, strict=True))
        there = self.exact.data_ptr(), self.checkpoint
        return alike and there == (exact.data_ptr(), self.steps.state.checkpoint.data_ptr())

    def run(self, inputs: Inputs, plan: Plan) -> None:
        """A block's steps: outputs in o, writes in d, errors in found."""
        for mine, new in zip((*self.inputs, self.table), (*inputs, plan.table), strict=True):
            mine.copy_(new)
        self.again()

    def _launch(self) -> None:
        steps, counts = self.steps, self.table[0, :, : self.steps.state.slots]
        own = steps.out, steps.d
        for i in range(len(counts)):
            steps.out, steps.d = self.o[i], self.d[i]
            steps.verify(self.inputs.step(i))
            steps.commit(counts[i])
            slots, points, lengths = self.table[1:, i]
            self.measure.look(slots, points, lengths, self.found[i])
        steps.out, steps.d = own


def decode(design: Triton, state: TritonState, windows: Windows, block: Any, S: Tensor) -> Seen:
    """A block of steps of a design, read against the exact states S [P, B, HV, V, K] fp64. The device is read once."""
    inputs = design.ready(state, windows)
    plan = planned(state, windows, block, design.spec.fold_current)
    state.sync()
    s, steps, exact = state.shape, design._steps(state, windows.m), S.contiguous()
    if not state.routed:
        steps.route()
    if steps.tape is None or not steps.tape.fits(inputs, exact):
        steps.tape = Tape(steps, inputs, exact)
    tape = steps.tape
    tape.run(inputs, plan)
    _moved(state, plan, windows, block)
    errors = np.empty((state.slots, block.most, s.HV, 4))
    errors[plan.slot, plan.point] = relative(tape.found.flatten(0, 1)[plan.look]).cpu().numpy()
    step, slot, lane = plan.at
    o, d = (x.permute(0, 1, 3, 2, 4)[step, slot, lane].double() for x in (tape.o, tape.d))
    return Seen(o, d, errors, plan.history.copy(), plan.folded.copy())


def _moved(state: TritonState, plan: Plan, windows: Windows, block: Any) -> None:
    """Leave the host where the device is."""
    state.cursors = copy.deepcopy(plan.after)
    for slot, n in enumerate(np.where(windows.lengths > 0, block.accepted, 0).sum(0).tolist()):
        state.tokens[slot] += n
    # a verify and a commit each
    state.version += 2 * plan.live
    state.folded = None
    state.moved()
