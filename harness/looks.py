"""A design followed step by step, by its four calls alone: what it put out, and both its states behind every commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.reference.emulated import Emulated
from harness.tokens import on_device
from harness.window import Step, Windows

QUANTITIES = ("o", "d", "served", "kept")  # in the order in which a step has them


class Look(NamedTuple):
    """Behind one step; rows of slots and lanes that do not count are zero."""

    step: int
    o: Tensor  # [B, HV, V, m]
    d: Tensor | None
    served: Tensor | None  # [B, HV, V, K], None in a step that is not read
    kept: Tensor | None

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of what is there."""
        for name in QUANTITIES:
            if (x := getattr(self, name)) is not None:
                yield name, x


def looks(
    design: Emulated,
    state: Any,
    windows: Windows,
    accepted: np.ndarray,
    lanes: np.ndarray,
    *,
    steps: range | None = None,
    read: bool = True,
) -> Iterator[Look]:
    """A look per step, of those in `steps` or all. accepted [W, B]; lanes [W, B]: of o and d those before it count.

    read  every step's states; else the last step's alone
    """
    m, slots = windows.m, range(state.slots)
    steps = range(windows.W) if steps is None else steps
    for i in steps:
        step = Step(windows, i)
        result = design.verify(state, step)
        (live,) = on_device(windows.g.device, np.arange(m) < lanes[i][:, None])
        # before the commit, as a token pass then forgets the rejected lanes
        o, d = (None if x is None else _counted(x, live) for x in (result.o, result.d))
        assert o is not None
        design.commit(state, step.slots, accepted[i][step.slots].tolist())
        served = kept = None
        if read or i == steps[-1]:
            # the second read may work where the first result lies
            served = design.read(state, "served", slots).clone()
            kept = design.read(state, "kept", slots).clone()
        yield Look(i, o, d, served, kept)


def _counted(x: Tensor, live: Tensor) -> Tensor:
    """The first lanes of x [B, HV, V, m'], zero where not live [B, m]: a select, as the rest may hold NaN."""
    m = live.shape[-1]
    if x.shape[-1] < m:
        # a pass over tokens ends with the step's longest window
        x = torch.nn.functional.pad(x, (0, m - x.shape[-1]))
    return torch.where(live[:, None, None], x[..., :m], 0.0)
