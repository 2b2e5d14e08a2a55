"""The two verifies: outputs of a window from the checkpoint, the ring history and the window, state untouched.

tokens  S <- e^g S;  d = beta (v - S k_hat);  S <- S + d k_hat';  o = S q_hat, one token after the other
window  (I+A) D' = R',  R_i = beta_i (v_i - e^{G_i} S0 k_hat_i),  o_i = e^{G_i} S0 q_hat_i + sum_{j<=i} F_ij d_j,
        with S0 k_hat and S0 q_hat taken from the checkpoint and the history without forming S0

Value heads of one key head are stacked, so states appear both as [N, V, K] and as [M, r*V, K] with N = M*r.
Source: fla-org/flash-linear-attention fla/ops/gated_delta_rule/naive.py (recurrence); sgl-project/sglang
gdn_replayssm_spec_decode.py (window).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harness.arithmetic import EXACT, Arithmetic, Operand, Rounding
from harness.reference.inverse import inverse_of
from harness.reference.steps import TokenStep, WindowStep


class History(NamedTuple):
    """The w committed records a verify reads; None instead of a History where there are none."""

    k_hat: Operand  # [M, w, K] left operand of the history scores
    d: Tensor  # [N, V, w] as stored
    W: Tensor  # [N, 1, w] decay from each record to the end of the history
    total: Tensor  # [N, 1, 1] decay over the whole history


def window(C: Operand, history: History | None, step: WindowStep, inverse: str, a: Arithmetic) -> tuple[Tensor, Tensor]:
    """One chunked window. C [M, r*V, K] the checkpoint as read. Returns o and d, [N, V, m] each."""
    N, V, m = step.v.shape
    hw = a.dots.state(C, step.kq).view(N, V, 2 * m)
    if history is not None:
        hw = with_history(hw, history, step.kq_score, a)
    R = a.sites.rhs(torch.addcmul(step.v, step.eR, hw[..., :m], value=-1).mul_(step.beta))
    method = inverse_of(inverse)
    if method.solve is None:
        D = a.dots.solve(a.dots.solve.lhs(R, a.sites.rhs), step.X)
    else:
        D = method.solve(R, step.X[0], a)
    D = a.sites.d(D)
    o = a.dots.output(a.dots.output.lhs(D, a.sites.d), step.F, step.eG * hw[..., m:])
    return a.sites.output(o, of=a.dots.output.accumulate), D


def with_history(hw: Tensor, history: History, kq: Operand, a: Arithmetic) -> Tensor:
    """S0 times k_hat, q_hat from the checkpoint's part hw [N, V, 2m]: e^{G_w} hw + (W d)(k_hat_hist . kq)."""
    N, V, w = history.d.shape
    scores = a.sites.history_score(a.dots.history_score(history.k_hat, kq), of=a.dots.history_score.accumulate)
    Wd = a.sites.history_d(history.d * history.W)
    group = N // scores.shape[0]
    if group > 1:
        scores = scores[:, None].expand(-1, group, -1, -1).reshape(N, w, -1)
    dot = a.dots.history
    return dot(dot.lhs(Wd, a.sites.history_d), dot.rhs(scores, a.sites.history_score), history.total * hw)


class TokenPass:
    """One token after the other from S [N, V, K], evaluated as far as someone asks: lane i needs no later lane.

    of    what S was rounded to
    key   [N] int64, of the first token; stochastic rounding of S draws from key + lane
    live  per lane [N, 1, 1] bool: heads whose lane is dead keep their state; None: all live

    e^g S is a value of its own, as in a kernel's registers: S k_hat reads it, and d k_hat' is added to it.
    """

    def __init__(
        self,
        S: Tensor,
        step: TokenStep,
        a: Arithmetic,
        *,
        of: Rounding = EXACT,
        key: Tensor | None = None,
        live: list[Tensor] | None = None,
    ):
        self.step, self.a, self.key, self.live = step, a, key, live
        self.S, self.base, self.of = S, S, of
        self.kept: dict[int, Tensor] = {}
        self.writes: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.M = step.k[0].shape[0]

    def advance(self, lanes: int, keep: bool = False) -> Tensor:
        """The state after `lanes` lanes, [N, V, K]; keep=True also keeps every state on the way there.

        Without keep the state is advanced in place, so one returned earlier is gone.
        """
        sites, step, before = self.a.sites, self.step, self.a.conventions.decay == "before"
        for i in range(len(self.writes), lanes):
            S = self.S
            seen = None if before else self._product(S, self.of, step.key[i])
            held = S is self.base or keep or self.live is not None
            new = sites.decayed.into(S * step.eg[i] if held else S.mul_(step.eg[i]))
            if seen is None:
                seen = self._product(new, sites.decayed, step.key[i])
            d = sites.d(torch.addcmul(step.v[i], step.beta[i], seen, value=-1))
            new.view(self.M, -1, new.shape[-1]).baddbmm_(d.view(self.M, -1, 1), step.k[i])
            new = sites.step.into(new, None if self.key is None else self.key + i)
            self.S = new if self.live is None else torch.where(self.live[i], new, S)
            self.of = sites.step
            if step.query:
                self.outputs.append(self._product(self.S, sites.step, step.query[i]))
            self.writes.append(d)
            if keep:
                self.kept[i + 1] = self.S
        if lanes == 0:
            return self.base
        return self.S if lanes == len(self.writes) else self.kept[lanes]

    def _product(self, S: Tensor, of: Rounding, x: Operand) -> Tensor:
        """S x [N, V, 1], S rounded to `of`."""
        dot = self.a.dots.recurrent
        return dot(dot.lhs(S.view(self.M, -1, S.shape[-1]), of), x).view(*S.shape[:2], 1)

    def close(self) -> None:
        """Let the states go; outputs and writes of the lanes so far remain."""
        self.S = self.base = torch.empty(0)
        self.kept = {}

    @property
    def o(self) -> Tensor:
        """Outputs of the lanes so far, [N, V, lanes]."""
        return self.a.sites.output(self._lanes(self.outputs), of=self.a.dots.recurrent.accumulate)

    @property
    def d(self) -> Tensor:
        """Writes of the lanes so far, [N, V, lanes]."""
        return self._lanes(self.writes)

    def _lanes(self, found: list[Tensor]) -> Tensor:
        return torch.cat([self.step.v[0][..., :0], *found], -1)
