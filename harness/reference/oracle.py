"""The fp64 oracle: exact states, outputs and writes of the committed tokens, in pieces of up to 64 tokens.

In fp64 the chunked form with substitution and decays summed over (j, i] is as exact as the token loop (1e-15, held by
the tests against the loop and against mpmath), so the oracle is one window per piece and one fold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Conventions
from harness.reference import fold, verify
from harness.tokens import Shape
from harness.window import Windows, WindowStep

PIECE = 64


class Oracle:
    """States of all slots, advanced interval by interval. `conventions` say which function is exact."""

    def __init__(self, shape: Shape, initial: Tensor, conventions: Conventions | None = None):
        self.shape, self.S = shape, initial.clone()
        self.arithmetic = Arithmetic(conventions=conventions or Conventions())

    def advance(self, pieces: Windows, first: int, count: int, slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Advance slots by `count` pieces each, which lie at pieces[0, first:first + count*n], slot fastest.

        Returns S [n, HV, V, K] after them and o, d [n, HV, V, count*m] of their tokens; padded lanes come along.
        """
        s, a, n = self.shape, self.arithmetic, len(slots)
        steps, k = pieces.window_steps(a, "substitution")[0], pieces.keys(a)[0][0]
        g = pieces.gates(a)[0][0]
        whole = n == self.S.shape[0]
        S = self.S if whole else self.S[slots]
        outputs, writes = [], []
        for at in range(first, first + count * n, n):
            wide, narrow = slice(at * s.HV, (at + n) * s.HV), slice(at * s.H, (at + n) * s.H)
            step = WindowStep(
                (steps.kq[0][narrow],),
                (),
                steps.v[wide],
                steps.beta[wide],
                steps.eR[wide],
                steps.eG[wide],
                (steps.X[0][wide],),
                (steps.F[0][wide],),
            )
            o, d = verify.window((S.reshape(n * s.H, -1, s.K),), None, step, "substitution", a)
            d = d.view(n, s.HV, s.V, -1)
            W, total = fold.record_decays(g[at : at + n], None, a)
            S = fold.product(S, d.transpose(-1, -2), k[at : at + n], W, total, a)
            outputs.append(o.view(n, s.HV, s.V, -1))
            writes.append(d)
        if whole:
            self.S = S
        else:
            self.S[slots] = S
        return S, torch.cat(outputs, -1), torch.cat(writes, -1)
