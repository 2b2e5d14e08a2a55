"""The judge judged: the fp64 oracle against the plain loop and against 50-digit arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import MAKERS, SHAPE, close, draw, recurrence, start, windows

from harness.arithmetic import Conventions
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
from harness.families import FAMILIES
from harness.reference import exact
from harness.reference.oracle import PIECE, Oracle
from harness.ring import RingSpec
from harness.schedule import Schedule
from harness.tokens import Shape, Tokens

# a few hundred fp64 operations on numbers of size 1: an oracle looser than this would blur 1e-12 identities
TOL = 1e-13
RESETS = (-160.0, -np.inf)
FIFTY = 166  # bits of fifty digits
ENGINES = pytest.mark.parametrize("engine", MAKERS)


def laid(tokens: Tokens, counts: tuple[int, ...]) -> tuple[Tokens, np.ndarray]:
    """tokens [B, T, ...] in pieces [P, B, m, ...], and the pieces' lengths for counts[b] tokens of slot b."""
    m, P = min(max(counts), PIECE), -(-max(counts) // PIECE)
    sizes = np.array([[min(max(n - p * PIECE, 0), PIECE) for n in counts] for p in range(P)])
    at = torch.tensor([[min(p * PIECE + i, max(counts) - 1) for i in range(m)] for p in range(P)])
    return tokens.map(lambda x: torch.stack([x[:, at[p]] for p in range(P)])), sizes


@ENGINES
@pytest.mark.parametrize("counts", [(1, 1), (5, 64), (64, 63), (65, 2), (130, 64), (128, 129)], ids=str)
def test_the_oracle_is_the_loop(counts: tuple[int, int], engine: str) -> None:
    """Faults: a piece's end taken for its length; the second piece started on the first one's base; padded gates;
    outputs of one slot laid behind another's; a slot of no piece moved."""
    rng = np.random.default_rng(sum(counts))
    tokens, initial = draw(rng, 2, max(counts), resets=RESETS), start(rng, 2)
    pieces, sizes = laid(tokens, counts)
    oracle = Oracle(SHAPE, initial, maker=MAKERS[engine])
    points = np.where(sizes > 0, np.arange(len(sizes))[:, None], -1)
    truth = oracle.advance(windows(pieces, sizes), points)
    for slot, n in enumerate(counts):
        states, outputs, writes = recurrence(initial[slot], tokens.map(lambda x, slot=slot, n=n: x[slot, :n]))
        close("S", oracle.S[slot], states[-1], TOL)
        for p in range(-(-n // PIECE)):
            close(f"S after piece {p}", truth.S[p, slot], states[min((p + 1) * PIECE, n)], TOL)
        close("o", truth.o[slot, :n], outputs, TOL)
        close("d", truth.d[slot, :n], writes, TOL)


def test_pieces_made_up_to_a_tape_are_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: what the block before left behind in lanes and pieces that this one has not; a state that is put where a
    point is when none was asked for; windows of the block before, remembered."""
    monkeypatch.setattr("harness.reference.oracle.on_cpu", lambda x: False)
    rng = np.random.default_rng(4)
    tokens, initial = draw(rng, 2, 60), start(rng, 2)
    oracle = Oracle(SHAPE, initial, maker=MAKERS["torch"])
    loops = [recurrence(initial[b], tokens.map(lambda x, b=b: x[b])) for b in range(2)]
    done, tapes = np.zeros(2, dtype=int), set()
    for cuts in (((7, 6), (0, 5), (8, 0)), ((3, 5),), ((6, 2), (1, 6), (0, 3), (5, 5)), ((7, 1),)):
        sizes = np.array(cuts)
        begins = done + sizes.cumsum(0) - sizes
        at = torch.from_numpy(np.minimum(begins[..., None] + np.arange(sizes.max()), 59))
        pieces = tokens.map(lambda x, at=at: x[torch.arange(2)[None, :, None], at])
        points = np.where(sizes > 0, (sizes > 0).cumsum(0) - 1, -1)
        truth = oracle.advance(windows(pieces, sizes), points)
        for p, b in zip(*np.nonzero(sizes), strict=True):
            end = begins[p, b] + sizes[p, b]
            close(f"S of {b} at {end}", truth.S[points[p, b], b], loops[b][0][end], TOL)
        for b, n in enumerate(sizes.sum(0)):
            close("o", truth.o[b, :n], loops[b][1][done[b] : done[b] + n], TOL)
            close("d", truth.d[b, :n], loops[b][2][done[b] : done[b] + n], TOL)
        done += sizes.sum(0)
        tapes.add(id(oracle._tape))
    # 1 to 4 pieces of 5 to 8 lanes share one
    assert len(tapes) == 1


@ENGINES
def test_slots_advance_on_their_own(engine: str) -> None:
    """Faults: a slot without a piece moved, or its state put in another's place; a second call on old states."""
    rng = np.random.default_rng(1)
    initial, tokens = start(rng, 3), draw(rng, 2, 3, 9)
    oracle = Oracle(SHAPE, initial, maker=MAKERS[engine])
    truth = [S.numpy() for S in initial]
    for i, sizes in enumerate(([0, 0, 9], [4, 0, 7])):
        found = oracle.advance(windows(tokens.map(lambda x, i=i: x[i : i + 1]), [sizes]), np.array([[0, -1, 0]]))
        for b, n in enumerate(sizes):
            if n:
                truth[b] = recurrence(truth[b], tokens.map(lambda x, i=i, b=b, n=n: x[i, b, :n]))[0][-1]
        close("returned", found.S[0, 2], truth[2], TOL)
        close("S", oracle.S, np.stack(truth), TOL)


@ENGINES
@pytest.mark.parametrize("kind", ["ordinary", "small keys", "resets", "one key"])
def test_oracle_and_loop_against_fifty_digits(kind: str, engine: str) -> None:
    """Faults that loop and oracle share: a cancellation of fp64, a gate summed over a reset, eps where it matters."""
    rng, shape = np.random.default_rng(2), Shape(1, 2, 2, 3)
    tokens = draw(rng, PIECE + 5, shape=shape, resets=(-160.0,) if kind == "resets" else ())
    if kind == "small keys":
        tokens.k *= 10.0 ** torch.from_numpy(rng.integers(-5, 1, (PIECE + 5, 1, 1)))
    if kind == "one key":
        tokens.k[:] = tokens.k[0].clone()
        tokens.g[:], tokens.beta[:] = -1e-5, 0.9997
    initial = start(rng, 1, shape)
    gold = exact.decode(initial[0], tokens, FIFTY)
    S, o = gold.nearest("S")[0], gold.nearest("o")
    states, outputs, _ = recurrence(initial[0], tokens)
    close("S of the loop", states[-1], S, TOL)
    close("o of the loop", outputs, o, TOL)
    pieces, sizes = laid(tokens.map(lambda x: x[None]), (PIECE + 5,))
    oracle = Oracle(shape, initial, maker=MAKERS[engine])
    truth = oracle.advance(windows(pieces, sizes, shape))
    close("S of the oracle", oracle.S[0], S, TOL)
    close("o of the oracle", truth.o[0], o, TOL)


@ENGINES
@pytest.mark.parametrize(
    "keys", [{"eps_at": "mean"}, {"eps_at": "outside"}, {"eps": 1e-2}, {"decay": "after"}], ids=str
)
def test_an_oracle_of_other_conventions(keys: dict[str, object], engine: str) -> None:
    """Fault: `reference=own` judging a design by a function that is not its own."""
    rng = np.random.default_rng(3)
    c = Conventions(**keys)
    tokens, initial = draw(rng, 12), start(rng, 1)
    tokens.k *= 1e-2
    states, outputs, _ = recurrence(initial[0], tokens, c)
    oracle = Oracle(SHAPE, initial, c, MAKERS[engine])
    truth = oracle.advance(windows(tokens.map(lambda x: x[None, None]), [[12]]))
    close("S", oracle.S[0], states[-1], TOL)
    close("o", truth.o[0], outputs, TOL)
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
        if pieces is None:
            continue
        found = oracle.advance(pieces.windows, pieces.points)
        seen, origin = [0, 0], {}
        for slot, b, e in zip(
            *(x.tolist() for x in (block.grid.slot, block.grid.begin, block.grid.tokens)), strict=True
        ):
            states, outputs, writes = truth[slot]
            S = found.S[seen[slot], slot]
            # errors grow with the values: wide_state has five decades of them
            close("S", S / max(1, np.abs(states[e]).max()), states[e] / max(1, np.abs(states[e]).max()), TOL)
            first, last = (t - origin.setdefault(slot, b) for t in (b, e))
            close("o", found.o[slot, first:last], outputs[b:e], TOL)
            close("d", found.d[slot, first:last], writes[b:e], TOL)
            seen[slot] += 1
            lengths.append(e - b)
    assert len(lengths) == 6 and min(lengths) > 3 * PIECE
