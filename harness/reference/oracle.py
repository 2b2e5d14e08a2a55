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
from harness.repeated import Repeated
from harness.ring import RingSpec
from harness.tokens import Shape, on_cpu, on_device
from harness.variants import VariantSpec
from harness.window import Windows

PIECE = 64
ALIKE = 16, 4  # pieces and lanes are made up to a multiple of these, so that launches can be repeated
MORE = 8  # grid points that a block may have above the most so far, before its states need another place


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
        self._tape: Tape | None = None
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
        if len(self._exact) <= block.most:
            # one more than asked for, where states go that nobody asked for
            self._exact = self.S.new_empty(block.most + MORE + 1, *self.S.shape)
        exact = self._exact[: block.most]
        if self.design.fused:
            seen: Seen = self.design.fused(self.state, pieces, block, exact, emit=True)
            assert seen.d is not None
            o, d = seen.o, seen.d
        else:
            results = self._pieces(pieces, block)
            o, d = committed(results, "o", block), committed(results, "d", block)
        return Truth(exact, o, d, self.certificate.advance(pieces, sizes(d, pieces, block), exact, block.points))

    def _pieces(self, pieces: Windows, block: Laid) -> list[Verified]:
        (points,) = on_device(self.S.device, np.where(block.points < 0, len(self._exact) - 1, block.points))
        if on_cpu(self.S):
            return self._launch(pieces, points)
        size = _above(pieces.W, ALIKE[0]), _above(pieces.m, ALIKE[1])
        if self._tape is None or not self._tape.fits(size, self._exact):
            self._tape = Tape(self, pieces.room(*size), self._exact)
        return self._tape.run(pieces, points)

    def _launch(self, pieces: Windows, points: Tensor) -> list[Verified]:
        a, s, m, inverse = self.design.arithmetic, pieces.shape, pieces.m, self.design.spec.inverse
        eG, E = pieces.decays(a)
        total, W = eG[..., -1:], E[..., -1, :]
        k_hat, results, S = pieces.keys(a)[0], [], self.S
        every = torch.arange(pieces.B, device=S.device)
        for p, step in enumerate(window_steps(pieces, a, inverse)):
            C = a.dots.state.lhs(S.view(-1, s.group * s.V, s.K), a.sites.checkpoint)
            o, d = (x.view(-1, s.HV, s.V, m) for x in window(C, None, step, inverse, a))
            results.append(Verified(o, d))
            S = product(S, d.mT, k_hat[p], W[p], total[p], a)
            self._exact[points[p], every] = S
        self.S.copy_(S)
        return results


class Tape:
    """The launches of so many pieces, on windows and points of their own; pieces behind the last are idle."""

    def __init__(self, oracle: Oracle, pieces: Windows, exact: Tensor):
        self.pieces, self.exact = pieces, exact
        self.points = torch.empty(pieces.W, pieces.B, dtype=torch.int64, device=exact.device)
        self.again = Repeated(lambda: oracle._launch(self.pieces, self.points), exact.is_cuda)

    def fits(self, size: tuple[int, int], exact: Tensor) -> bool:
        """Whether (pieces, lanes) can take the same launches: blocks differ by a few, and what is idle costs little."""
        room = size[0] <= self.pieces.W and size[1] <= self.pieces.m
        return room and self.exact.data_ptr() == exact.data_ptr()

    def run(self, pieces: Windows, points: Tensor) -> list[Verified]:
        """Outputs and writes of these pieces, until the next ones."""
        self.pieces.take(pieces)
        self.points.fill_(len(self.exact) - 1)[: len(points)] = points
        found: list[Verified] = self.again()
        return found[: pieces.W]


def _above(n: int, step: int) -> int:
    return -(-n // step) * step


def sizes(d: Tensor, pieces: Windows, block: Laid) -> Tensor:
    """Norms of the writes d [B, T, HV, V] by pieces, [P, B, HV, m]; zero in lanes that hold no token."""
    counts, step, lane = block.committed
    slot, t = np.nonzero(np.arange(step.shape[1]) < counts[:, None])
    to, b, at, of = on_device(d.device, step[slot, t], slot, lane[slot, t], t)
    found = d.new_zeros(pieces.W, pieces.B, pieces.m, pieces.shape.HV)
    found[to, b, at] = torch.linalg.vector_norm(d, dim=-1)[b, of]
    return found.transpose(-1, -2)
