"""The two folds: how a ring's history becomes part of the checkpoint.

product  C <- e^{G_w} C + sum_j e^{G_w-G_j} d_j k_hat_j'    open loop, from the stored writes d
replay   C <- the recurrence over the stored raw v, k, g, beta    closed loop: every d is formed again

Both are exact in exact arithmetic. Rows behind a slot's history arrive as zeros with g = 0 and change nothing.
Source: sgl-project/sglang gdn_replayssm_spec_decode.py: its flush row (product) and exact fold kernel (replay).
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.reference.steps import pass_steps
from harness.reference.verify import TokenPass
from harness.window import normalise


def record_decays(g: Tensor, last: Tensor | None, a: Arithmetic) -> tuple[Tensor, Tensor]:
    """W [.., w] = e^{G_w-G_j} and e^{G_w} [.., 1] from the g record [.., w] of a history.

    last [.., 1] where the record is cumulative, G_j since the last fold: it is G_w.
    """
    r = a.sites.decay
    if last is None and r.exact:
        # suffix sums, so that a reset inside the history never meets another one in a difference
        after = g.flip(-1).cumsum(-1).flip(-1)
        spans = torch.cat((after[..., 1:], torch.zeros_like(g[..., :1]), after[..., :1]), -1)
    else:
        G = r(g.cumsum(-1)) if last is None else g
        last = G[..., -1:] if last is None else last
        spans = torch.cat((r(last - G), last), -1)
    decays = a.exponential(spans)
    return decays[..., :-1], decays[..., -1:]


def product(C: Tensor, d: Tensor, k_hat: Tensor, W: Tensor, total: Tensor, a: Arithmetic) -> Tensor:
    """Open-loop fold before the checkpoint rounding.

    C [n, HV, V, K]; d [n, HV, w, V]; k_hat [n, H, w, K]; W [n, HV, w]; total [n, HV, 1]
    """
    n, HV, V, K = C.shape
    H, w = k_hat.shape[1:3]
    dot, s = a.dots.fold, a.sites
    Wd = s.fold_d((d * W[..., None]).transpose(-1, -2)).reshape(n * H, -1, w)
    keys = s.fold_k(k_hat).reshape(n * H, w, K)
    start = (C * total[..., None]).view(n * H, -1, K)
    return dot(dot.lhs(Wd, s.fold_d), dot.rhs(keys, s.fold_k), start).view(n, HV, V, K)


def replay(
    C: Tensor,
    v: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    a: Arithmetic,
    *,
    lengths: Tensor | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Closed-loop fold before the checkpoint rounding, by the verify's own token pass.

    C [n, HV, V, K]; v [n, HV, w, V]; k [n, H, w, K]; g, beta [n, HV, w]; key [n*HV] as in verify.tokens;
    lengths [n] where slots differ: each stops at its own, since a rounded step is not the identity.
    """
    n, HV, V, K = C.shape
    k_hat = a.sites.key(normalise(k, a.conventions))
    step = pass_steps(k_hat[None], None, v[None], beta[None], a.exponential(g)[None], a)[0]
    live = None
    if lengths is not None:
        heads = lengths[:, None].expand(-1, HV).reshape(-1, 1, 1)
        live = [heads > i for i in range(v.shape[2])]
    run = TokenPass(C.reshape(n * HV, V, K), step, a, of=a.sites.checkpoint, key=key, live=live)
    return run.advance(v.shape[2]).view(n, HV, V, K)
