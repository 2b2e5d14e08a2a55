"""Everything about a window that depends on its inputs alone, for a batch of W steps at once.

  A_ij = beta_i e^{G_i-G_j} k_hat_i . k_hat_j  (i > j)      F_ij = e^{G_i-G_j} q_hat_i . k_hat_j  (i >= j)

Verify, conditioning and oracle read the same quantities; designs whose arithmetic agrees on one share it. Axes are
[W, B, heads, ...] for steps, slots and heads. Lanes behind a window's length are zeroed on entry (k, q, v, beta = 0,
g = 0): they leave A, T and every sum as if they were not there, whatever the caller had in them.

Source: Yang et al., arXiv 2412.06464 (gated delta rule), 2406.06484 (the parallel form).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Conventions, Dot
from harness.reference.inverse import inverse_of
from harness.tokens import Shape, Tokens, on_device


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

        def lanes_inside(x: Tensor) -> Tensor:
            y = x.transpose(2, 3)
            return torch.empty(y.shape, dtype=x.dtype, device=x.device).copy_(y)

        size = (self.W, self.B, shape.H, 2 * self.m, shape.K)
        # k then q: normalised, rounded and multiplied together
        self.kq = torch.empty(size, dtype=tokens.k.dtype, device=tokens.k.device)
        self.k, self.q = self._halves(self.kq)  # [W, B, H, m, K] each
        self.k.copy_(tokens.k.transpose(2, 3))
        self.q.copy_(tokens.q.transpose(2, 3))
        self.v = lanes_inside(tokens.v)  # [W, B, HV, m, V]
        self.g, self.beta = lanes_inside(tokens.g), lanes_inside(tokens.beta)  # [W, B, HV, m]
        lanes = np.arange(self.m)[None, None, :] >= lengths[..., None]
        if lanes.any():
            padded = on_device(tokens.g.device, lanes)[0][:, :, None]
            for x in self._lanes():
                x.masked_fill_(padded if x.ndim == 4 else padded[..., None], 0.0)
        self._memo: dict[tuple[Any, ...], Any] = {}

    def _halves(self, kq: Tensor) -> tuple[Tensor, Tensor]:
        return kq[..., : self.m, :], kq[..., self.m :, :]

    def only(self, lengths: np.ndarray) -> Windows:
        """The same windows cut to shorter lengths [W, B], nothing computed yet."""
        return Windows(self.tokens, lengths, self.shape)

    @property
    def tokens(self) -> Tokens:
        """What the windows hold, [W, B, m, ...]."""
        return Tokens(*(x.transpose(2, 3) for x in self._lanes()))

    def room(self, W: int, m: int) -> Windows:
        """Windows of the same slots with room for W steps of m lanes, all idle."""
        parts = (x.new_zeros(W, self.B, m, *x.shape[2:3], *x.shape[4:]) for x in self._lanes())
        return Windows(Tokens(*parts), np.zeros((W, self.B), dtype=self.lengths.dtype), self.shape)

    def take(self, other: Windows) -> None:
        """Hold the windows of another with no more steps and lanes; nothing computed yet, the rest idle."""
        for mine, new in zip(self._lanes(), other._lanes(), strict=True):
            mine.zero_()[: other.W, :, :, : other.m] = new
        self.lengths = np.zeros_like(self.lengths)
        self.lengths[: other.W] = other.lengths
        self._memo.clear()

    def _lanes(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta as a kernel is handed them, [W, B, heads, m, ..]: q, k, v in bf16 where that holds every
        number, and in fp32 otherwise; g and beta in fp32."""

        def compute() -> tuple[Tensor, ...]:
            exact = all(bool(((x.bfloat16() == x) | x.isnan()).all()) for x in (self.q, self.k, self.v))
            kind = torch.bfloat16 if exact else torch.float32
            return (*(x.to(kind).contiguous() for x in (self.q, self.k, self.v)), self.g.float(), self.beta.float())

        return self.memo(("given",), compute)

    def memo(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Compute once per batch and key; the key names every part of the arithmetic that the value depends on."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def unit(self, c: Conventions) -> Tensor:
        """k_hat then q_hat before any rounding, [W, B, H, 2m, K]; q_hat carries K^-1/2."""

        def compute() -> Tensor:
            kq = normalise(self.kq, c)
            self._halves(kq)[1].mul_(self.shape.K**-0.5)
            return kq

        return self.memo(("unit", c.eps, c.eps_at), compute)

    def keys(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """k_hat and q_hat, [W, B, H, m, K] each."""
        return self._halves(self.both_keys(a))

    def both_keys(self, a: Arithmetic) -> Tensor:
        """k_hat then q_hat, [W, B, H, 2m, K]."""
        c = a.conventions
        return self.memo(("keys", a.sites.key, c.eps, c.eps_at), lambda: a.sites.key(self.unit(c)))

    def gates(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """g and beta as the design takes them, [W, B, HV, m] each."""
        key = ("gates", a.sites.gate, a.conventions.beta)
        return self.memo(key, lambda: (a.sites.gate(self.g), a.conventions.beta(a.sites.gate(self.beta))))

    def token_decays(self, a: Arithmetic) -> Tensor:
        """e^{g_i}, [W, B, HV, m]."""
        return self.memo(("eg", a.sites.gate, a.decay), lambda: a.exponential(self.gates(a)[0]))

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
            return a.exponential(G), a.exponential(E)

        return self.memo(("decays", a.sites.gate, a.decay), compute)

    def before(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """Decays of what token i's error is taken against: e^{G_i} [.., m] and e^{G_i-G_j} [.., m, m].

        With conventions.decay "after" the error sees the state before this token's own decay: row i-1 of both.
        """

        def compute() -> tuple[Tensor, Tensor]:
            eG, E = self.decays(a)
            if a.conventions.decay == "before":
                return eG, E
            return torch.cat((torch.ones_like(eG[..., :1]), eG[..., :-1]), -1), E.roll(1, -2)

        return self.memo(("before", a.sites.gate, a.decay, a.conventions), compute)

    def products(self, a: Arithmetic, dot: Dot) -> Tensor:
        """k_hat_i . k_hat_j, then q_hat_i . k_hat_j, [W, B, H, 2m, m], as `dot` computes them."""

        def compute() -> Tensor:
            flat, of = self.both_keys(a).view(-1, 2 * self.m, self.shape.K), a.sites.key
            return dot(dot.lhs(flat, of), dot.rhs(flat[:, : self.m].transpose(1, 2), of)).view(
                self.W, self.B, self.shape.H, 2 * self.m, self.m
            )

        return self.memo(products_key(a, dot), compute)

    def scores(self, a: Arithmetic) -> tuple[Tensor, Tensor]:
        """A and F of every window, [W, B, HV, m, m] each, in the design's own arithmetic."""

        def compute() -> tuple[Tensor, Tensor]:
            both = self.products(a, a.dots.gram)[:, :, :, None]
            both = both.expand(-1, -1, -1, self.shape.group, -1, -1).reshape(*self.g.shape[:3], 2 * self.m, self.m)
            E = self.decays(a)[1]
            A = (self.gates(a)[1][..., None] * self.before(a)[1] * both[..., : self.m, :]).tril(-1)
            return a.sites.gram(A), a.sites.gram(E * both[..., self.m :, :])

        s, c = a.sites, a.conventions
        return self.memo(("scores", s.gate, a.decay, s.key, s.gram, a.dots.gram, c), compute)

    def formed(self, a: Arithmetic, inverse: str) -> Tensor:
        """What the inverse makes of A before the right-hand side is known, [W, B, HV, m, m]."""

        def compute() -> Tensor:
            A = self.scores(a)[0]
            return inverse_of(inverse).form(A.view(-1, self.m, self.m), a).view(A.shape)

        s = a.sites
        key = ("formed", inverse, s.gate, a.decay, s.key, s.gram, s.inverse, a.dots.gram, a.dots.inverse, a.conventions)
        return self.memo(key, compute)

    def stored(self, a: Arithmetic, name: str) -> Tensor:
        """The record field `name` of every lane as the ring keeps it, [W, B, heads, m, width]."""

        def compute() -> Tensor:
            value, r = {
                "v": lambda: (self.v, a.sites.store_v),
                "k": lambda: (self.k, a.sites.store_k),
                "k_hat": lambda: (self.keys(a)[0], a.sites.store_k_hat),
                "g": lambda: (self.gates(a)[0], a.sites.store_g),
                "beta": lambda: (self.gates(a)[1], a.sites.store_beta),
            }[name.removesuffix("_lo")]()
            return r(value) if r.parts == 1 else r.pair(value)[name.endswith("_lo")]

        return self.memo(("stored", name, a), compute)


def products_key(a: Arithmetic, dot: Dot) -> tuple[Any, ...]:
    """Under which Windows.products keeps its result: whoever computes it elsewhere puts it there."""
    return "products", a.sites.key, dot, a.conventions
