"""The judge judged: the fp64 oracle against the plain loop and against 50-digit arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from helpers import SHAPE, close, draw, recurrence, start, windows

from harness.arithmetic import Conventions
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
from harness.families import FAMILIES
from harness.reference.oracle import PIECE, Oracle
from harness.ring import RingSpec
from harness.schedule import Schedule
from harness.tokens import Shape, Tokens

# a few hundred fp64 operations on numbers of size 1: an oracle looser than this would blur 1e-12 identities
TOL = 1e-13
RESETS = (-160.0, -np.inf)


@pytest.mark.parametrize("counts", [(1, 1), (5, 64), (64, 63), (65, 2), (130, 64), (128, 129)], ids=str)
def test_the_oracle_is_the_loop(counts: tuple[int, int]) -> None:
    """Faults: a piece's end taken for its length; the second piece started on the first one's base; padded gates."""
    rng = np.random.default_rng(sum(counts))
    tokens, initial = draw(rng, 2, max(counts), resets=RESETS), start(rng, 2)
    count = -(-max(counts) // PIECE)
    m = min(max(counts), PIECE)
    sizes = [min(max(n - p * PIECE, 0), PIECE) for p in range(count) for n in counts]
    at = torch.tensor([[min(p * PIECE + i, max(counts) - 1) for i in range(m)] for p in range(count)])
    laid = tokens.map(lambda x: torch.stack([x[slot, at[p]] for p in range(count) for slot in range(2)])[None])
    oracle = Oracle(SHAPE, initial)
    S, o, d = oracle.advance(windows(laid, [sizes]), 0, count, [0, 1])
    for slot, n in enumerate(counts):
        states, outputs, writes = recurrence(initial[slot], tokens.map(lambda x, slot=slot, n=n: x[slot, :n]))
        close("S", S[slot], states[-1], TOL)
        close("o", o[slot, :, :, :n].permute(2, 0, 1), outputs, TOL)
        close("d", d[slot, :, :, :n].permute(2, 0, 1), writes, TOL)


def test_slots_advance_on_their_own() -> None:
    """Faults: pieces laid piece-fastest; a slot that is not listed moved, or written to the wrong place."""
    rng = np.random.default_rng(1)
    initial, tokens = start(rng, 3), draw(rng, 1, 4, 9)
    oracle = Oracle(SHAPE, initial)
    pieces = windows(tokens, [[9, 4, 7, 2]])
    oracle.advance(pieces, 0, 1, [2])
    S, _, _ = oracle.advance(pieces, 1, 1, [0, 2])
    truth = [initial[0], initial[1], recurrence(initial[2], tokens.map(lambda x: x[0, 0]))[0][-1]]
    for slot, piece, n in ((0, 1, 4), (2, 2, 7)):
        truth[slot] = recurrence(truth[slot], tokens.map(lambda x, p=piece, n=n: x[0, p, :n]))[0][-1]
    close("S", oracle.S, np.stack(truth), TOL)
    close("returned", S, np.stack([truth[0], truth[2]]), TOL)


def exact(S: np.ndarray, t: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in 50 digits; S [HV, V, K] -> the last state and o [T, HV, V], rounded to fp64 at the end."""
    with mpmath.workdps(50):
        number = np.vectorize(mpmath.mpf, otypes=[object])
        S = number(S)
        HV, V, K = S.shape
        q, k, v, g, beta = (number(getattr(t, n).numpy()) for n in ("q", "k", "v", "g", "beta"))
        outputs, eps = [], mpmath.mpf(10) ** -6
        for i in range(len(g)):
            o = np.empty((HV, V), object)
            for h in range(HV):
                key = h // (HV // k.shape[1])
                k_hat = k[i, key] / mpmath.sqrt((k[i, key] ** 2).sum() + eps)
                q_hat = q[i, key] / mpmath.sqrt((q[i, key] ** 2).sum() + eps) / mpmath.sqrt(K)
                S[h] = S[h] * mpmath.exp(g[i, h])
                d = beta[i, h] * (v[i, h] - S[h] @ k_hat)
                S[h] = S[h] + np.outer(d, k_hat)
                o[h] = S[h] @ q_hat
            outputs.append(o)
        return S.astype(float), np.stack(outputs).astype(float)


@pytest.mark.parametrize("kind", ["ordinary", "small keys", "resets", "one key"])
def test_oracle_and_loop_against_fifty_digits(kind: str) -> None:
    """Faults that loop and oracle share: a cancellation of fp64, a gate summed over a reset, eps where it matters."""
    rng, shape = np.random.default_rng(2), Shape(1, 2, 2, 3)
    tokens = draw(rng, PIECE + 5, shape=shape, resets=(-160.0,) if kind == "resets" else ())
    if kind == "small keys":
        tokens.k *= 10.0 ** torch.from_numpy(rng.integers(-5, 1, (PIECE + 5, 1, 1)))
    if kind == "one key":
        tokens.k[:] = tokens.k[0].clone()
        tokens.g[:], tokens.beta[:] = -1e-5, 0.9997
    initial = start(rng, 1, shape)
    S, o = exact(initial[0].numpy(), tokens)
    states, outputs, _ = recurrence(initial[0], tokens)
    close("S of the loop", states[-1], S, TOL)
    close("o of the loop", outputs, o, TOL)
    laid = tokens.map(lambda x: torch.cat((x, x[-1:].expand(PIECE - 5, *x.shape[1:]))).view(1, 2, PIECE, *x.shape[1:]))
    mine, o_hat, _ = Oracle(shape, initial).advance(windows(laid, [[PIECE, 5]], shape), 0, 2, [0])
    close("S of the oracle", mine[0], S, TOL)
    close("o of the oracle", o_hat[0, :, :, : PIECE + 5].permute(2, 0, 1), o, TOL)


@pytest.mark.parametrize(
    "keys", [{"eps_at": "mean"}, {"eps_at": "outside"}, {"eps": 1e-2}, {"decay": "after"}], ids=str
)
def test_an_oracle_of_other_conventions(keys: dict[str, object]) -> None:
    """Fault: `reference=own` judging a design by a function that is not its own."""
    rng = np.random.default_rng(3)
    c = Conventions(**keys)
    tokens, initial = draw(rng, 12), start(rng, 1)
    tokens.k *= 1e-2
    states, outputs, _ = recurrence(initial[0], tokens, c)
    S, o, _ = Oracle(SHAPE, initial, c).advance(windows(tokens.map(lambda x: x[None, None]), [[12]]), 0, 1, [0])
    close("S", S[0], states[-1], TOL)
    close("o", o[0].permute(2, 0, 1), outputs, TOL)
    other = recurrence(initial[0], tokens)[0][-1]
    assert np.abs(other - states[-1]).max() > 1e-3


@pytest.mark.parametrize("family", ["silu", "resets", "zero_key", "beta_two", "wide_state"])
def test_intervals_of_a_schedule_longer_than_a_piece(family: str) -> None:
    """Faults: pieces of an interval cut at the wrong token, slots of an event mixed up, a second block's offset."""
    assert family in FAMILIES
    shape = Shape(1, 2, 3, 8)
    decode = DecodeConfig(family=family, tokens=900, slots=2, window=4, ragged=True)
    stream = Stream(decode, shape)
    oracle = Oracle(shape, stream.initial_state())
    schedule = Schedule(decode, AcceptanceConfig(), RingSpec(256, 4), 0, decode.tokens)
    whole = stream.tokens(torch.zeros(2, dtype=torch.int64), decode.tokens)
    truth = [recurrence(stream.initial_state()[b], whole.map(lambda x, b=b: x[b])) for b in range(2)]
    lengths = []
    for block in schedule.blocks(50):
        pieces = block.pieces(stream, shape)
        for event, (first, count) in zip(block.events, pieces[1] if pieces else (), strict=True):
            S, o, d = oracle.advance(pieces[0], first, count, event.slots)
            for i, (slot, b, e) in enumerate(zip(event.slots, event.begin, event.tokens, strict=True)):
                states, outputs, writes = truth[slot]
                # errors grow with the values: wide_state has five decades of them
                close("S", S[i] / max(1, np.abs(states[e]).max()), states[e] / max(1, np.abs(states[e]).max()), TOL)
                close("o", o[i, :, :, : e - b].permute(2, 0, 1), outputs[b:e], TOL)
                close("d", d[i, :, :, : e - b].permute(2, 0, 1), writes[b:e], TOL)
                lengths.append(e - b)
    assert len(lengths) == 6 and min(lengths) > 3 * PIECE
