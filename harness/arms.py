"""One design of a run: a block of its steps, read at the points of the grid, and its tokens since the last of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Conventions
from harness.intervals import Intervals
from harness.metrics import SinceLast, state_errors
from harness.reference.calls import Seen, Truth, by_calls
from harness.reference.emulated import Emulated
from harness.reference.state import EmulatedState
from harness.schedule import Block
from harness.tokens import on_device
from harness.window import Windows


@dataclass
class Arm:
    """One design at work, and what it has produced since the last grid point."""

    design: Emulated
    reference: Conventions  # of the oracle it is read against
    state: EmulatedState
    since: SinceLast
    tokens: dict[str, Tensor] = field(default_factory=dict)  # o and d that wait for a grid point, [.., HV, V]
    stages: dict[tuple[int, int], str] = field(default_factory=dict)  # (slot, head) -> first non-finite site

    @property
    def name(self) -> str:
        return self.design.spec.name

    def token_errors(self, seen: Seen, truth: Truth, intervals: Intervals) -> dict[str, np.ndarray]:
        """d_med, d_max, o_med and o_max of every interval that ends in a block, [n, HV] each; no d, none of its."""
        names = [name for name in ("d", "o") if getattr(seen, name) is not None]
        found = []
        for name in names:
            tokens = intervals.joined(self.tokens.get(name), getattr(seen, name))
            self.tokens[name] = tokens[intervals.rest]
            if len(intervals.at):
                found.append(intervals.errors(tokens, getattr(truth, name)))
        if not found:
            return {}
        columns = [f"{name}_{which}" for name in names for which in ("med", "max")]
        return dict(zip(columns, torch.cat(found).mT.cpu().numpy(), strict=True))


def decode_block(design: Emulated, state: EmulatedState, windows: Windows, block: Block, S: Tensor) -> Seen:
    """One block of a design, read against the exact states S [P, B, HV, V, K]: at once where its engine can."""
    if design.fused:
        found: Seen = design.fused(state, windows, block, S)
        return found
    B = state.slots
    errors = np.empty((B, block.most, state.shape.HV, 4))
    history, folded = (np.zeros((B, block.most), dtype=kind) for kind in (np.int64, bool))
    looks: list[Tensor] = []

    def look(i: int) -> None:
        slots = np.flatnonzero(block.points[i] >= 0).tolist()
        if not slots:
            return
        points, cursors = block.points[i, slots], state.cursors
        point, slot = on_device(S.device, points, np.array(slots))
        exact = S[point, slot]
        served = design.read(state, "served", slots)
        first = state_errors(served, exact)
        kept = design.read(state, "kept", slots)
        looks.append(torch.cat((first, first if kept is served else state_errors(kept, exact)), -1))
        history[slots, points] = [cursors.write_pos[s] for s in slots]
        folded[slots, points] = [cursors.is_flush[s] or cursors.write_pos[s] == 0 for s in slots]

    o, d = by_calls(design, state, windows, block, look)
    if looks:
        step, slot = np.nonzero(block.points >= 0)
        errors[slot, block.points[step, slot]] = torch.cat(looks).cpu().numpy()
    return Seen(o, d, errors, history, folded)
