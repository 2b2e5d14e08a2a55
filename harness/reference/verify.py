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

    The read of S_t serves o_t and the next token's S_t k_hat together, so decay is applied to the product; on the
    carrier that is the same as decaying first.
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
        self.S, self.base = S, S
        self.kept: dict[int, Tensor] = {}
        self.writes: list[Tensor] = []
        self.N, self.V, self.K = S.shape
        self.M = step.k[0].shape[0]
        dot = a.dots.recurrent
        self.reads = [dot(dot.lhs(S.view(self.M, -1, self.K), of), step.qk[0]).view(self.N, self.V, 2)]

    def advance(self, lanes: int, keep: bool = False) -> Tensor:
        """The state after `lanes` lanes, [N, V, K]; keep=True also keeps every state on the way there.

        Without keep the state is advanced in place, so one returned earlier is gone.
        """
        dot, sites, step = self.a.dots.recurrent, self.a.sites, self.step
        for i in range(len(self.writes), lanes):
            S = self.S
            d = sites.d(torch.addcmul(step.v[i], step.gain[i], self.reads[-1][..., 1:], value=-1))
            if S is self.base or keep or self.live is not None:
                new = S * step.eg[i]
            else:
                new = S.mul_(step.eg[i])
            new.view(self.M, -1, self.K).baddbmm_(d.view(self.M, -1, 1), step.k[i])
            new = sites.step.into(new, None if self.key is None else self.key + i)
            self.S = new if self.live is None else torch.where(self.live[i], new, S)
            read = dot(dot.lhs(self.S.view(self.M, -1, self.K), sites.step), step.qk[i + 1])
            self.reads.append(read.view(self.N, self.V, 2))
            self.writes.append(d)
            if keep:
                self.kept[i + 1] = self.S
        if lanes == 0:
            return self.base
        return self.S if lanes == len(self.writes) else self.kept[lanes]

    def close(self) -> None:
        """Let the states go; outputs and writes of the lanes so far remain."""
        self.S = self.base = torch.empty(0)
        self.kept = {}

    @property
    def o(self) -> Tensor:
        """Outputs of the lanes so far, [N, V, lanes]."""
        a = self.a
        if not self.writes:
            return self.reads[0][..., :0]
        return a.sites.output(torch.stack([r[..., 0] for r in self.reads[1:]], -1), of=a.dots.recurrent.accumulate)

    @property
    def d(self) -> Tensor:
        """Writes of the lanes so far, [N, V, lanes]."""
        return torch.cat(self.writes, -1) if self.writes else self.reads[0][..., :0]
