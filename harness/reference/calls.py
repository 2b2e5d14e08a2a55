"""A block of steps through the calls every design answers: verify, commit, and read at the points of the grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.reference.state import EmulatedState
from harness.tokens import on_device
from harness.window import Step, Windows


class Course:
    """Steps whose outcome is known before: accepted tokens and grid point of each, -1 for none, [W, B] both."""

    accepted: Any
    points: Any

    @cached_property
    def most(self) -> int:
        """Grid points of the slot that has most."""
        return int(self.points.max(initial=-1)) + 1

    @cached_property
    def committed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Committed tokens per slot [B], and the step and lane of each of them, [B, T], zero behind a slot's last."""
        counts = self.accepted.sum(0)
        step, lane = (np.zeros((len(counts), counts.max()), dtype=np.int64) for _ in range(2))
        inside = np.arange(self.accepted.max()) < self.accepted.T[..., None]
        b, *found = np.nonzero(inside)
        t = within(counts)
        step[b, t], lane[b, t] = found
        return counts, step, lane


def within(sizes: np.ndarray) -> np.ndarray:
    """0..size-1 for every size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)


@dataclass
class Truth:
    """What the oracle says of a block. Where slots have fewer points or tokens than others, the rest holds anything."""

    S: Tensor  # [P, B, HV, V, K] state at every grid point
    o: Tensor  # [B, T, HV, V] outputs and writes of the committed tokens between them
    d: Tensor
    bound: np.ndarray  # [P, B, HV] at least ||S_hat - S||_F / ||S||_F of the states


@dataclass
class Seen:
    """What a design did over a block."""

    o: Tensor  # [B, T, HV, V] outputs and writes of the committed tokens
    d: Tensor | None  # None where a design does not show them
    errors: np.ndarray  # [B, P, HV, 4] relative error of the served state, Frobenius and max, then of the kept one
    history: np.ndarray  # [B, P] records behind the design's own checkpoint at every grid point
    folded: np.ndarray  # [B, P] whether it folds there


def by_calls(
    design: Any, state: EmulatedState, windows: Windows, block: Course, look: Callable[[int], None]
) -> tuple[Tensor, Tensor | None]:
    """(o, d) [B, T, HV, V] of the committed tokens; look(i) after every step i."""
    results = []
    for i, row in enumerate(block.accepted):
        step = Step(windows, i)
        results.append(design.verify(state, step))
        design.commit(state, step.slots, row[step.slots].tolist())
        look(i)
    d = None if any(r.d is None for r in results) else committed(results, "d", block)
    return committed(results, "o", block), d


def committed(results: list[Any], name: str, block: Course) -> Tensor:
    """o or d of the committed lanes of every step's result, [B, T, HV, V]."""
    parts = [getattr(r, name) for r in results]
    widest = max(x.shape[-1] for x in parts)
    # a token pass stops at the last accepted lane
    parts = [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in parts]
    _, step, lane = block.committed
    at = on_device(parts[0].device, step, np.arange(len(step))[:, None], lane)
    return torch.stack(parts).permute(0, 1, 4, 2, 3)[at[0], at[1], at[2]]
