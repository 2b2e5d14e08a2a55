"""The emulated fp32 recurrence is a plain loop in float32, bit for bit, with a rounding after the decay and one after
the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bf16, decode, design, draw, engine, start, unit, windows

from harness.arithmetic import Conventions, Rounding
from harness.config import PrecisionConfig, RingConfig
from harness.tokens import Shape, Tokens
from harness.variants import load
from harness.window import Step

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("engine")
F32, F64 = np.float32, np.float64
SHAPE = Shape(2, 4, 5, 70)  # an odd number of rows, more columns than a product sums at once
DECAYED = ("fp32", "exact", "bf16")


def precision(decayed: str, decay: str = "fp32") -> PrecisionConfig:
    return PrecisionConfig(exp="rounded", sites={"decayed": decayed, "decay": decay, "output": "fp32"})


def rounding(decayed: str) -> Callable[[Any], Any]:
    """x of fp64, exact products of float32 numbers, rounded; float32 where that is the format."""
    if decayed == "fp32":
        return lambda x: x.astype(F32)
    return lambda x: Rounding.parse("decayed", decayed)(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def loop(
    S: Any, tokens: Tokens, how: str, decayed: Callable[[Any], Any], blocks: list[Any]
) -> tuple[list[Any], list[Any]]:
    """States and outputs of tokens [T, ...] on S [HV, V, K]: float32 values, sums over each of `blocks` from fp64.

    d k_hat' is added as a fused multiply-add does it: a product of two float32 numbers is exact in fp64.
    """
    q, k, v, g, beta = (np.asarray(getattr(tokens, name)) for name in ("q", "k", "v", "g", "beta"))
    S, heads, c = S.astype(F32), np.arange(SHAPE.HV) // SHAPE.group, Conventions()
    eg, beta = np.exp(g.astype(F32).astype(F64)), beta.astype(F32).astype(F64)
    eg = eg if how == "exact e^g" else eg.astype(F32).astype(F64)
    states, outputs = [], []

    def seen(X: Any, x: Any) -> Any:
        X, x = X.astype(F32).astype(F64), x.astype(F64)
        return sum(np.einsum("hvk,hk->hv", X[..., block], x[..., block]).astype(F32) for block in blocks)

    for t in range(len(g)):
        k_hat, q_hat = (x.astype(F32)[heads] for x in (unit(k[t], c), unit(q[t], c) * SHAPE.K**-0.5))
        X = decayed(eg[t][:, None, None] * S.astype(F64))
        d = (beta[t][:, None] * (v[t] - seen(S if how == "decay after" else X, k_hat))).astype(F32)
        S = (X.astype(F64) + d.astype(F64)[:, :, None] * k_hat.astype(F64)[:, None, :]).astype(F32)
        states.append(S)
        outputs.append(seen(S, q_hat))
    return states, outputs


@pytest.mark.parametrize("how", ["decay before", "decay after", "exact e^g"])
@pytest.mark.parametrize("decayed", DECAYED)
@pytest.mark.parametrize("name", ["exact_recurrent", "null_arm", "kv_replay", "exact_fold"])
def test_the_recurrence_rounds_after_the_decay_and_after_the_update(name: str, decayed: str, how: str) -> None:
    """Faults: a state rounded once a token where registers hold e^g S; S k_hat of another state than the update is
    added to, or with decay=after of that one; a token decayed twice or not at all, an odd last row twice; an e^g that
    no site rounds cut to fp32."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 5, (14, 2))
    lengths[lengths.sum(1) == 0, 0] = 1
    accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
    tokens, initial = bf16(draw(rng, 14, 2, 4, shape=SHAPE, resets=(-160.0,))), start(rng, 2, SHAPE)
    spec, every = load(name), np.arange(SHAPE.K)
    blocks = [every[::2], every[1::2]] if name == "null_arm" else [every[:64], every[64:]]
    spec.conventions["decay"] = "after" if how == "decay after" else "before"
    maker = design(spec, RingConfig(16, 4), precision(decayed, "exact" if how == "exact e^g" else "fp32"))
    found = decode(maker, initial, windows(tokens, lengths, SHAPE), accepted)
    for b in range(2):
        at = [(i, t) for i in range(14) for t in range(accepted[i, b])]
        mine = tokens.map(lambda x, at=at, b=b: torch.stack([x[i, b, t] for i, t in at]))
        states, outputs = loop(initial[b].numpy(), mine, how, rounding(decayed), blocks)
        ends = np.cumsum(accepted[lengths[:, b] > 0, b])
        kept = np.stack([states[n - 1] for n in ends])
        assert np.array_equal(torch.stack(found[b][2::3]), kept)
        if spec.verify == "tokens":
            assert np.array_equal(torch.cat(found[b][0::3], -1).permute(2, 0, 1), np.stack(outputs))
        for other in set(DECAYED) - {decayed}:
            # or the comparison could not tell them apart
            apart, _ = loop(initial[b].numpy(), mine, how, rounding(other), blocks)
            assert not np.array_equal(np.stack([apart[n - 1] for n in ends]), kept)


@pytest.mark.parametrize("decayed", DECAYED)
def test_a_token_at_hand_is_folded_onto_the_rounded_decay(decayed: str) -> None:
    """Fault: the fold of a window of one token that rounds once, as the kernel rounds twice."""
    rng = np.random.default_rng(2)
    maker = design("replay_decode", None, precision(decayed))
    tokens, initial = bf16(draw(rng, 1, 2, 1, shape=SHAPE)), start(rng, 2, SHAPE)
    state = maker.create(SHAPE, 2, initial)
    state.cursors.force_flush([0, 1])
    step = Step(windows(tokens, np.ones((1, 2), dtype=int), SHAPE), 0)
    d = maker.verify(state, step).d
    assert d is not None
    eg = np.exp(tokens.g[0, :, 0].numpy().astype(F32).astype(F64)).astype(F32).astype(F64)
    k_hat = unit(tokens.k[0, :, 0].numpy(), Conventions()).astype(F32).astype(F64)[:, np.arange(4) // 2]
    X, write = eg[..., None, None] * initial.numpy(), d.numpy() * k_hat[:, :, None, :]
    made = {name: (rounding(name)(X).astype(F64) + write).astype(F32) for name in DECAYED}
    assert [name for name in DECAYED if np.array_equal(made[name], state.checkpoint)] == [decayed]
