"""The fp64 oracle: exact states, outputs and writes of the committed tokens, in pieces of up to 64 tokens.

In fp64 the chunked form with substitution and decays summed over (j, i] is as exact as the token loop (1e-15, held by
the tests against the loop and against mpmath), so the oracle is a design like any other: exact arithmetic, one window
per piece, folded as it is committed. Its idle slots stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from harness.arithmetic import Arithmetic, Conventions
from harness.reference.calls import Course, Truth, by_calls
from harness.reference.emulated import Emulated
from harness.ring import RingSpec
from harness.tokens import Shape, on_device
from harness.variants import VariantSpec
from harness.window import Windows

PIECE = 64
MORE = 2  # grid points that a block may have above the most so far, before its states need another place


@dataclass
class Laid(Course):
    """Pieces of which every token is committed, as a block of steps."""

    lengths: np.ndarray  # [P, B]
    points: np.ndarray
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> np.ndarray:
        return self.lengths


class Oracle:
    """States of all slots, advanced piece by piece. `conventions` say which function is exact."""

    def __init__(
        self, shape: Shape, initial: Tensor, conventions: Conventions | None = None, maker: type[Emulated] = Emulated
    ):
        arithmetic = Arithmetic(conventions=conventions or Conventions())
        self.design = maker(VariantSpec("oracle"), RingSpec(PIECE, PIECE, 1, "commit"), arithmetic)
        self.state = self.design.create(shape, len(initial), initial, device=initial.device)
        self._exact = self.S.new_empty(0, *self.S.shape)

    @property
    def S(self) -> Tensor:
        """States after the tokens so far, [B, HV, V, K]."""
        return self.state.checkpoint

    def advance(self, pieces: Windows, points: np.ndarray | None = None) -> Truth:
        """Advance every slot by its pieces, [P, B]; points [P, B]: the place of a state in Truth.S, -1 for none.

        Truth.S lies where that of the call before lay, which is lost.
        """
        block = Laid(pieces.lengths, np.full(pieces.lengths.shape, -1) if points is None else points)
        if len(self._exact) < block.most:
            self._exact = self.S.new_empty(block.most + MORE, *self.S.shape)
        exact = self._exact[: block.most]
        if self.design.fused:
            seen = self.design.fused(self.state, pieces, block, exact, emit=True)
            return Truth(exact, seen.o, seen.d)

        def keep(p: int) -> None:
            slots = np.flatnonzero(block.points[p] >= 0)
            point, slot = on_device(exact.device, block.points[p, slots], slots)
            exact[point, slot] = self.S[slot]

        return Truth(exact, *by_calls(self.design, self.state, pieces, block, keep))
