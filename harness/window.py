"""Everything about a window that depends on its inputs alone, for a batch of W steps at once.

  A_ij = beta_i e^{G_i-G_j} k_hat_i . k_hat_j  (i > j)      F_ij = e^{G_i-G_j} q_hat_i . k_hat_j  (i >= j)

Verify, conditioning and oracle read the same quantities; designs whose arithmetic agrees on one share it. Axes are
[W, B, heads, ...] for steps, slots and heads; in the per-step views B and heads are merged, N = B*HV and M = B*H, so
that one batched product serves all of them. Lanes behind a window's length are zeroed on entry (k, q, v, beta = 0,
g = 0): they leave A, T and every sum as if they were not there, whatever the caller had in them.

Source: Yang et al., arXiv 2412.06464 (gated delta rule), 2406.06484 (the parallel form).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Conventions, Operand
from harness.reference.inverse import INVERSES
from harness.tokens import Shape, Tokens


def normalise(x: Tensor, conventions: Conventions) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in the form the conventions name."""
    square = x.square().sum(-1, keepdim=True)
    if conventions.eps_at == "outside":
        return x / (square.sqrt() + conventions.eps)
    return x / (square + conventions.eps * (x.shape[-1] if conventions.eps_at == "mean" else 1)).sqrt()


def segment_sums(g: Tensor) -> Tensor:
    """[..., m] -> [..., m, m]: sum of g over (j, i] for i >= j, -inf above the diagonal. Exact for resets."""
    m = g.shape[-1]
    lower = torch.ones(m, m, dtype=torch.bool, device=g.device).tril(-1)
    sums = torch.where(lower, g[..., None], 0.0).cumsum(-2)
    return sums.masked_fill(~lower.logical_or(torch.eye(m, dtype=torch.bool, device=g.device)), -torch.inf)


class WindowStep(NamedTuple):
    """What a chunked verify reads; products' operands are read already (harness.arithmetic.Dot.read)."""

    kq: Operand  # [M, K, 2m] k_hat then q_hat, for the checkpoint
    kq_score: Operand  # the same for the ring's k_hat
    v: Tensor  # [N, V, m]
    beta: Tensor  # [N, 1, m]
    eR: Tensor  # [N, 1, m] what the right-hand side takes S0 with: e^{G_i}, unless conventions.decay is "after"
    eG: Tensor  # [N, 1, m]
    X: Operand  # [N, m, m] what the inverse formed of A
    F: Operand  # [N, m, m] transposed: F_ji


class TokenStep(NamedTuple):
    """What a token-by-token pass reads, one entry per lane."""

    qk: list[Operand]  # m+1 of [M, K, 2]: q_hat of the lane before, k_hat of this one
    k: list[Tensor]  # [M, 1, K] k_hat
    v: list[Tensor]  # [N, V, 1] beta v
    gain: list[Tensor]  # [N, 1, 1] beta e^g, what the old state's prediction is taken off with
    eg: list[Tensor]  # [N, 1, 1]


class Step:
    """One step of a batch of windows: what a design's verify is handed.

    slots    [n] the slots in the step; others are idle and must not be touched
    lengths  [n] their window lengths, the bonus token at lane 0 included
    """

    def __init__(self, windows: Windows, index: int):
        self.windows, self.index = windows, index
        active = np.flatnonzero(windows.lengths[index])
        self.slots: list[int] = active.tolist()
        self.lengths: list[int] = windows.lengths[index][active].tolist()


class Windows:
    """W steps of windows over all B slots. tokens [W, B, m, ...]; lengths [W, B], 0 where a slot is idle."""

    def __init__(self, tokens: Tokens, lengths: np.ndarray, shape: Shape):
        self.shape, self.lengths = shape, lengths
        self.W, self.B, self.m = tokens.g.shape[:3]
        lanes = np.arange(self.m)[None, None, :] >= lengths[..., None]
        if lanes.any():
            padded = torch.from_numpy(lanes).to(tokens.g.device)
            tokens = tokens.map(lambda x: x.masked_fill(padded.view(*lanes.shape, *(1,) * (x.ndim - 3)), 0.0))
        self.q, self.k = (x.transpose(2, 3).contiguous() for x in (tokens.q, tokens.k))  # [W, B, H, m, K]
        self.v = tokens.v.permute(0, 1, 3, 4, 2).contiguous()  # [W, B, HV, V, m]
        self.g, self.beta = (x.transpose(2, 3).contiguous() for x in (tokens.g, tokens.beta))  # [W, B, HV, m]
        self._memo: dict[tuple[Any, ...], Any] = {}

    def only(self, lengths: np.ndarray) -> Windows:
        """The same windows cut to shorter lengths [W, B], nothing computed yet."""
        tokens = Tokens(
            self.q.transpose(2, 3),
            self.k.transpose(2, 3),
            self.v.permute(0, 1, 4, 2, 3),
            self.g.transpose(2, 3),
            self.beta.transpose(2, 3),
        )
        return Windows(tokens, lengths, self.shape)

    def memo(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Compute once per batch and key; the key names every part of the arithmetic that the value depends on."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def keys(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """k_hat and q_hat, [W, B, H, m, K] each; q_hat carries K^-1/2."""

        def compute() -> tuple[Tensor, Tensor]:
            scale = self.shape.K**-0.5
            k, q = (normalise(x, a.conventions) for x in (self.k, self.q))
            return a.sites.key(k), a.sites.key(q.mul_(scale))

        c = a.conventions
        return self.memo(("keys", a.sites.key, c.eps, c.eps_at), compute)

    def gates(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """g and beta as the design takes them, [W, B, HV, m] each."""
        key = ("gates", a.sites.gate, a.conventions.beta)
        return self.memo(key, lambda: (a.sites.gate(self.g), a.conventions.beta(a.sites.gate(self.beta))))

    def token_decays(self, a: Arithmetic) -> Tensor:
        """e^{g_i}, [W, B, HV, m]."""
        return self.memo(("eg", a.sites.gate, a.sites.decay), lambda: a.sites.decay(self.gates(a)[0].exp()))

    def decays(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """e^{G_i} [.., m] and e^{G_i-G_j} [.., m, m], zero above the diagonal."""

        def compute() -> tuple[Tensor, Tensor]:
            g, r = self.gates(a)[0], a.sites.decay
            G = r(g.cumsum(-1))
            if r.exact:
                E = segment_sums(g)
            else:
                # as kernels do: the difference of two rounded sums, masked before exp
                above = torch.ones(self.m, self.m, dtype=torch.bool, device=g.device).triu(1)
                E = r(G[..., :, None] - G[..., None, :]).masked_fill(above, -torch.inf)
            return r(G.exp()), r(E.exp())

        return self.memo(("decays", a.sites.gate, a.sites.decay), compute)

    def before(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """Decays of what token i's error is taken against: e^{G_i} [.., m] and e^{G_i-G_j} [.., m, m].

        With conventions.decay "after" the error sees the state before this token's own decay: row i-1 of both.
        """

        def compute() -> tuple[Tensor, Tensor]:
            eG, E = self.decays(a)
            if a.conventions.decay == "before":
                return eG, E
            return torch.cat((torch.ones_like(eG[..., :1]), eG[..., :-1]), -1), E.roll(1, -2)

        return self.memo(("before", a.sites.gate, a.sites.decay, a.conventions), compute)

    def scores(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """A and F of every window, [W, B, HV, m, m] each, in the design's own arithmetic."""

        def compute() -> tuple[Tensor, Tensor]:
            k, q = self.keys(a)
            dot, of = a.dots.gram, a.sites.key
            flat = (self.W * self.B * self.shape.H, self.m, self.shape.K)
            left = dot.lhs(torch.cat((k, q), -2).view(-1, 2 * self.m, flat[2]), of)
            right = tuple(x.transpose(1, 2) for x in dot.rhs(k.view(flat), of))
            both = dot(left, right).view(self.W, self.B, self.shape.H, 1, 2 * self.m, self.m)
            both = both.expand(-1, -1, -1, self.shape.group, -1, -1).reshape(*self.g.shape[:3], 2 * self.m, self.m)
            E = self.decays(a)[1]
            A = (self.gates(a)[1][..., None] * self.before(a)[1] * both[..., : self.m, :]).tril(-1)
            return a.sites.gram(A), a.sites.gram(E * both[..., self.m :, :])

        s, c = a.sites, a.conventions
        return self.memo(("scores", s.gate, s.decay, s.key, s.gram, a.dots.gram, c), compute)

    def formed(self, a: Arithmetic, inverse: str) -> Tensor:
        """What the inverse makes of A before the right-hand side is known, [W, B, HV, m, m]."""

        def compute() -> Tensor:
            A = self.scores(a)[0]
            return INVERSES[inverse].form(A.view(-1, self.m, self.m), a).view(A.shape)

        s = a.sites
        key = ("formed", inverse, s.gate, s.decay, s.key, s.gram, s.inverse, a.dots.gram, a.dots.inverse, a.conventions)
        return self.memo(key, compute)

    def window_steps(self, a: Arithmetic, inverse: str) -> list[WindowStep]:
        """One WindowStep per step."""

        def compute() -> list[WindowStep]:
            k, q = self.keys(a)
            s, of = self.shape, a.sites.key
            N, M = self.B * s.HV, self.B * s.H
            kq = self.memo(("kq", of, a.conventions), lambda: torch.cat((k, q), -2).transpose(-1, -2).contiguous())
            kq = kq.view(self.W, M, s.K, 2 * self.m)
            one, two = a.dots.state, a.dots.history_score
            # a dot in blocks spreads its right operand, so the key is more than the rounding
            state = self.memo(("read kq", one, of, a.conventions), lambda: one.rhs(kq, of))
            score = self.memo(("read kq", two, of, a.conventions), lambda: two.rhs(kq, of))
            formed = self.formed(a, inverse)
            # a solve on the right-hand side has no product R T' to read operands for
            explicit = INVERSES[inverse].explicit
            X = a.dots.solve.rhs(formed.mT.contiguous(), a.sites.inverse) if explicit else (formed,)
            F = a.dots.output.rhs(self.scores(a)[1].mT.contiguous(), a.sites.gram)
            square = (self.W, N, self.m, self.m)
            columns = (
                _unbind(state),
                _unbind(score),
                self.v.view(self.W, N, s.V, self.m).unbind(0),
                self.gates(a)[1].view(self.W, N, 1, self.m).unbind(0),
                self.before(a)[0].view(self.W, N, 1, self.m).unbind(0),
                self.decays(a)[0].view(self.W, N, 1, self.m).unbind(0),
                _unbind(tuple(x.view(square) for x in X)),
                _unbind(tuple(x.view(square) for x in F)),
            )
            return [WindowStep(*row) for row in zip(*columns, strict=True)]

        return self.memo(("window", a, inverse), compute)

    def token_steps(self, a: Arithmetic) -> list[TokenStep]:
        """One TokenStep per step."""

        def compute() -> list[TokenStep]:
            k, q = self.keys(a)
            return token_steps(k, q, self.v, self.gates(a)[1], self.token_decays(a), a)

        return self.memo(("tokens", a), compute)

    def stored(self, a: Arithmetic, name: str) -> Tensor:
        """The record field `name` of every lane as the ring keeps it, [W, B, heads, m, width]."""

        def compute() -> Tensor:
            value, r = {
                "v": lambda: (self.v.transpose(-1, -2), a.sites.store_v),
                "k": lambda: (self.k, a.sites.store_k),
                "k_hat": lambda: (self.keys(a)[0], a.sites.store_k_hat),
                "g": lambda: (self.gates(a)[0], a.sites.store_g),
                "beta": lambda: (self.gates(a)[1], a.sites.store_beta),
            }[name.removesuffix("_lo")]()
            return r(value) if r.parts == 1 else r.pair(value)[name.endswith("_lo")]

        return self.memo(("stored", name, a), compute)


def token_steps(k: Tensor, q: Tensor | None, v: Tensor, beta: Tensor, eg: Tensor, a: Arithmetic) -> list[TokenStep]:
    """Lane-major operands of a token-by-token pass over W windows of m lanes.

    k, q  [W, B, H, m, K] normalised and rounded; no q: zeros, as a replay has no queries
    v     [W, B, HV, V, m]
    beta, eg  [W, B, HV, m]
    """
    W, B, H, m, K = k.shape
    M, N = B * H, B * v.shape[2]
    lanes = k.permute(0, 3, 1, 2, 4).reshape(W, m, M, K)
    qk = torch.zeros(W, m + 1, M, K, 2, dtype=k.dtype, device=k.device)
    qk[:, :m, ..., 1] = lanes
    if q is not None:
        qk[:, 1:, ..., 0] = q.permute(0, 3, 1, 2, 4).reshape(W, m, M, K)
    read = a.dots.recurrent.rhs(qk, a.sites.key)
    pairs = [x.unbind(0) for x in read]
    k_steps = lanes.view(W, m, M, 1, K).unbind(0)
    v_steps = (v * beta[..., None, :]).reshape(W, N, -1, m).permute(0, 3, 1, 2).unsqueeze(-1).contiguous().unbind(0)
    gain = beta * eg if a.conventions.decay == "before" else beta
    scalars = [x.reshape(W, N, m).permute(0, 2, 1).contiguous().view(W, m, N, 1, 1).unbind(0) for x in (gain, eg)]
    return [
        TokenStep(
            list(zip(*(p[i].unbind(0) for p in pairs), strict=True)),
            list(k_steps[i].unbind(0)),
            list(v_steps[i].unbind(0)),
            *(list(x[i].unbind(0)) for x in scalars),
        )
        for i in range(W)
    ]


def _unbind(read: Operand) -> list[Operand]:
    return list(zip(*(x.unbind(0) for x in read), strict=True))
