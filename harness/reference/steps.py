"""One step of a batch of windows as the readable verifies read it.

Slots and heads are merged, N = B*HV and M = B*H, so that one batched product serves all of them; operands of products
are read already (harness.arithmetic.Dot.lhs and .rhs), for the whole batch at once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from harness.arithmetic import Arithmetic, Operand
from harness.reference.inverse import inverse_of
from harness.window import Windows


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

    key: list[Operand]  # [M, K, 1] k_hat as the product reads it
    query: list[Operand]  # [M, K, 1] q_hat likewise; none in a replay
    k: list[Tensor]  # [M, 1, K] k_hat
    v: list[Tensor]  # [N, V, 1] beta v
    beta: list[Tensor]  # [N, 1, 1]
    eg: list[Tensor]  # [N, 1, 1]


def window_steps(windows: Windows, a: Arithmetic, inverse: str) -> list[WindowStep]:
    """One WindowStep per step."""

    def compute() -> list[WindowStep]:
        s, of, W, m = windows.shape, a.sites.key, windows.W, windows.m
        N, M = windows.B * s.HV, windows.B * s.H
        kq = windows.memo(("columns", of, a.conventions), lambda: windows.both_keys(a).mT.contiguous())
        kq = kq.view(W, M, s.K, 2 * m)
        one, two = a.dots.state, a.dots.history_score
        # a dot in blocks spreads its right operand, so the key is more than the rounding
        state = windows.memo(("read kq", one, of, a.conventions), lambda: one.rhs(kq, of))
        score = windows.memo(("read kq", two, of, a.conventions), lambda: two.rhs(kq, of))
        formed = windows.formed(a, inverse)
        # a solve on the right-hand side has no product R T' to read operands for
        explicit = inverse_of(inverse).explicit
        X = a.dots.solve.rhs(formed.mT.contiguous(), a.sites.inverse) if explicit else (formed,)
        F = a.dots.output.rhs(windows.scores(a)[1].mT.contiguous(), a.sites.gram)
        columns = (
            _unbind(state),
            _unbind(score),
            windows.memo(("v columns",), lambda: windows.v.mT.contiguous()).view(W, N, s.V, m).unbind(0),
            windows.gates(a)[1].view(W, N, 1, m).unbind(0),
            windows.before(a)[0].view(W, N, 1, m).unbind(0),
            windows.decays(a)[0].view(W, N, 1, m).unbind(0),
            _unbind(tuple(x.view(W, N, m, -1) for x in X)),
            _unbind(tuple(x.view(W, N, m, -1) for x in F)),
        )
        return [WindowStep(*row) for row in zip(*columns, strict=True)]

    return windows.memo(("window", a, inverse), compute)


def token_steps(windows: Windows, a: Arithmetic) -> list[TokenStep]:
    """One TokenStep per step."""

    def compute() -> list[TokenStep]:
        k, q = windows.keys(a)
        return pass_steps(k, q, windows.v, windows.gates(a)[1], windows.token_decays(a), a)

    return windows.memo(("tokens", a), compute)


def pass_steps(k: Tensor, q: Tensor | None, v: Tensor, beta: Tensor, eg: Tensor, a: Arithmetic) -> list[TokenStep]:
    """Lane-major operands of a token-by-token pass over W windows of m lanes.

    k, q  [W, B, H, m, K] normalised and rounded; no q in a replay
    v     [W, B, HV, m, V]
    beta, eg  [W, B, HV, m]
    """
    W, B, H, m, K = k.shape
    M, N = B * H, B * v.shape[2]
    lanes = [x.permute(0, 3, 1, 2, 4).reshape(W, m, M, K) for x in ((k,) if q is None else (k, q))]
    reads = [_unbind(a.dots.recurrent.rhs(x[..., None], a.sites.key)) for x in lanes]
    k_steps = lanes[0].view(W, m, M, 1, K).unbind(0)
    v_steps = (v * beta[..., None]).reshape(W, N, m, -1, 1).transpose(1, 2).contiguous().unbind(0)
    scalars = [x.reshape(W, N, m).permute(0, 2, 1).contiguous().view(W, m, N, 1, 1).unbind(0) for x in (beta, eg)]
    return [
        TokenStep(
            _unbind(reads[0][i]),
            [] if q is None else _unbind(reads[1][i]),
            list(k_steps[i].unbind(0)),
            list(v_steps[i].unbind(0)),
            *(list(x[i].unbind(0)) for x in scalars),
        )
        for i in range(W)
    ]


def _unbind(read: Operand) -> list[Operand]:
    return list(zip(*(x.unbind(0) for x in read), strict=True))
