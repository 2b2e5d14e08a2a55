"""c = ||fold - exact|| / (u ||exact||), u = 2^-24: what one fp32 fold of w records costs, by product and by replay.

The product fold adds w products to e^{G_w} C. However they are added, the error of an entry is at most
gamma_{w+2} (|e^{G_w} C| + sum_j |W_j d_j k_j|), gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability, ch. 3): so
c <= (w + 2) s, s the norm of that sum of magnitudes over the norm of the state. A replay rounds the state w times.
Both start from one fp32 checkpoint; each is held against the exact fold of what it reads: d, k_hat and g as stored, or
v, k, g and beta.

  once    the sum is kept wider and rounded once: what harness.arithmetic emulates of an `ieee` product
  chain   every product is added by a fused multiply-add: an fp32 loop
  replay  the recurrence in fp32, `ieee` products, the state rounded after every token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.closed_runs import Point, stream
from harness.config import Config, PrecisionConfig
from harness.metrics import norms, state_errors
from harness.operator_config import gate_point
from harness.reference.fold import product, record_decays, replay
from harness.tokens import Shape
from harness.variants import load
from harness.window import normalise

HEADS, ROWS = 8, 32
U = 2.0**-24


def constants(config: Config) -> Iterator[dict[str, Any]]:
    """One row per (ring, cosine, head), at the first of operator.gates."""
    beta, g = gate_point(config.operator.gates[0])
    shape = Shape(HEADS, HEADS, ROWS, config.model.key_dim)
    for w in config.operator.rings:
        for cosine in config.operator.cosines:
            decode = replace(config.decode, slots=1, tokens=max(w, 1), prefill=0, window=1)
            drawn = stream(config, decode, shape, Point(w, cosine, beta, g))
            tokens = drawn.tokens(torch.zeros(1, dtype=torch.int64), w)
            k, v = tokens.k.transpose(1, 2), tokens.v.transpose(1, 2)
            gates = tokens.g.transpose(1, 2), tokens.beta.transpose(1, 2)
            found = folds(drawn.initial_state(), k, v, *gates)
            for head in range(HEADS):
                yield {"ring": w, "cosine": cosine, "head": head} | {name: c[head] for name, c in found.items()}


def folds(C: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> dict[str, list[float]]:
    """c of the three folds and s, of every head. C [1, H, V, K] fp32 numbers; k, v [1, H, w, ..]; g, beta [1, H, w]."""
    exact = Arithmetic()
    fp32, chain = (
        load("chunked_fp32").arithmetic(PrecisionConfig(products={"fold": dot}, exp="rounded"))
        for dot in ("ieee", "ieee/1")
    )
    token = load("exact_recurrent").arithmetic()
    g, beta = fp32.sites.gate(g), fp32.sites.gate(beta)
    d = fp32.sites.store_d(writes(C, k, v, g, beta))
    k_hat = fp32.sites.store_k_hat(normalise(k, exact.conventions))
    decays = record_decays(g, None, exact)
    want = product(C, d, k_hat, *decays, exact)
    magnitudes = product(C.abs(), d.abs(), k_hat.abs(), *decays, exact)
    by_product = {
        name: error(a.sites.checkpoint(product(C, d, k_hat, *record_decays(g, None, a), a)), want)
        for name, a in (("once", fp32), ("chain", chain))
    }
    again = token.sites.checkpoint(replay(C, v, k, g, beta, token))
    scale = norms(magnitudes)[0] / norms(want)[0]
    return by_product | {"replay": error(again, replay(C, v, k, g, beta, exact)), "scale": scale[0].tolist()}


def writes(C: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """d of every token [1, H, w, V] in fp64, from differences of states that are one token apart."""
    S, found = C, []
    k_hat = normalise(k, Arithmetic().conventions)
    for t in range(k.shape[2]):
        S = S * g[..., t, None, None].exp()
        d = beta[..., t, None] * (v[:, :, t] - (S @ k_hat[:, :, t, :, None])[..., 0])
        S = S + d[..., None] * k_hat[:, :, t, None, :]
        found.append(d)
    return torch.stack(found, 2)


def error(found: Tensor, want: Tensor) -> list[float]:
    """c of every head."""
    return [c / U for c in state_errors(found, want)[0, :, 0].tolist()]
