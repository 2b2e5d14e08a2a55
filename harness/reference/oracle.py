"""The fp64 oracle: exact states, outputs and writes of the committed tokens, in pieces of up to 64 tokens.

In fp64 the chunked form with substitution and decays summed over (j, i] is as exact as the token loop (1e-15, held by
the tests against the loop and against mpmath), so the oracle is a design like any other: exact arithmetic, one window
per piece, folded as it is committed. What is folded at once needs neither ring nor cursors, so tensors do without.
Idle slots have lanes of zeros, which leave them where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Conventions
from harness.reference.calls import Course, Seen, Truth, committed
from harness.reference.certificate import Certificate
from harness.reference.emulated import Emulated
from harness.reference.fold import product
from harness.reference.state import Verified
from harness.reference.steps import window_steps
from harness.reference.verify import window
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
        self.certificate = Certificate(initial, arithmetic)

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
            seen: Seen = self.design.fused(self.state, pieces, block, exact, emit=True)
            o, d = seen.o, seen.d
        else:
            o, d = self._pieces(pieces, block, exact)
        return Truth(exact, o, d, self.certificate.advance(pieces, sizes(d, pieces, block), exact, block.points))

    def _pieces(self, pieces: Windows, block: Laid, exact: Tensor) -> tuple[Tensor, Tensor]:
        a, s, m, inverse = self.design.arithmetic, pieces.shape, pieces.m, self.design.spec.inverse
        eG, E = pieces.decays(a)
        total, W = eG[..., -1:], E[..., -1, :]
        k_hat, results = pieces.keys(a)[0], []
        piece, ended = np.nonzero(block.points >= 0)
        ends = np.searchsorted(piece, np.arange(pieces.W + 1)).tolist()
        points, slots = on_device(exact.device, block.points[piece, ended], ended)
        for p, step in enumerate(window_steps(pieces, a, inverse)):
            C = a.dots.state.lhs(self.S.view(-1, s.group * s.V, s.K), a.sites.checkpoint)
            o, d = (x.view(-1, s.HV, s.V, m) for x in window(C, None, step, inverse, a))
            results.append(Verified(o, d))
            self.state.checkpoint = product(self.S, d.mT, k_hat[p], W[p], total[p], a)
            here = slice(ends[p], ends[p + 1])
            exact[points[here], slots[here]] = self.S[slots[here]]
        return committed(results, "o", block), committed(results, "d", block)


def sizes(d: Tensor, pieces: Windows, block: Laid) -> Tensor:
    """Norms of the writes d [B, T, HV, V] by pieces, [P, B, HV, m]; zero in lanes that hold no token."""
    counts, step, lane = block.committed
    slot, t = np.nonzero(np.arange(step.shape[1]) < counts[:, None])
    to, b, at, of = on_device(d.device, step[slot, t], slot, lane[slot, t], t)
    found = d.new_zeros(pieces.W, pieces.B, pieces.m, pieces.shape.HV)
    found[to, b, at] = torch.linalg.vector_norm(d, dim=-1)[b, of]
    return found.transpose(-1, -2)
