"""The certificate of the oracle: above the error against 120 bits, carried from piece to piece, not vacuous."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MAKERS, draw, start, windows

from harness.arithmetic import Conventions, Rounding
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.reference import exact
from harness.reference.certificate import relative
from harness.reference.oracle import Laid, Oracle, sizes
from harness.tokens import Shape, Tokens

F64 = torch.float64
SMALL = Shape(1, 2, 3, 4)


def followed(
    tokens: Tokens, initial: torch.Tensor, sizes: list[int], c: Conventions, maker: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The oracle over pieces of these sizes: relative errors and bounds [P, HV] after each, against 120 bits."""
    shape = Shape(tokens.k.shape[1], *initial.shape)
    ends = np.cumsum(sizes)
    gold = exact.decode(initial, tokens, 120, c, points=ends.tolist(), guard=300)
    oracle = Oracle(shape, initial[None], c, maker)
    errors, bounds = [], []
    for i, (n, end) in enumerate(zip(sizes, ends, strict=True)):
        piece = windows(tokens.map(lambda x, n=n, end=end: x[None, None, end - n : end]), [[n]], shape)
        truth = oracle.advance(piece, np.array([[0]]))
        S = gold.nearest("S")[i]
        off = np.linalg.norm((gold.error("S", np.stack([truth.S[0, 0]] * len(sizes)))[i]).reshape(len(S), -1), axis=1)
        size = np.linalg.norm(S.reshape(len(S), -1), axis=1)
        errors.append(off / np.where(size == 0, 1, size))
        bounds.append(truth.bound[0, 0])
    return np.stack(errors), np.stack(bounds)


@pytest.mark.parametrize("engine", MAKERS)
@pytest.mark.parametrize(
    "keys", [{}, {"eps_at": "mean"}, {"eps_at": "outside"}, {"decay": "after"}, {"beta": Rounding("bf16")}], ids=str
)
def test_the_oracle_lies_within_its_bound(keys: dict[str, Any], engine: str) -> None:
    """Faults: an error forgotten between two pieces, the size of a state taken from the wrong place, a convention the
    bound does not know. Not vacuous: relative, 200 tokens x (10 keys + 40 tokens) roundings of 1.1e-16 are 1e-12."""
    rng, shape = np.random.default_rng(6), Shape(1, 3, 4, 10)
    tokens, initial = draw(rng, 200, shape=shape, resets=(-160.0, -np.inf)), start(rng, 1, shape)[0]
    tokens.beta.clamp_(max=1.0)
    errors, bounds = followed(tokens, initial, [1, 40, 64, 3, 64, 28], Conventions(**keys), MAKERS[engine])
    assert (errors <= bounds).all(), (errors / bounds).max()
    assert errors.max() > 1e-17
    assert bounds.max() < (1e-11 if keys.get("decay") != "after" else 1e-6)


@pytest.mark.parametrize("family", ["beta_two", "zero_key", "wide_state", "resets", "decay_one", "identical"])
def test_families_lie_within_their_bounds(family: str) -> None:
    """Fault: a bound that holds for mild inputs only: beta near 2, keys of norm 0, five decades in one state."""
    shape = Shape(1, 4, 3, 16)
    stream = Stream(DecodeConfig(family=family, tokens=300), shape)
    tokens = stream.tokens(torch.zeros(1, dtype=torch.int64), 300).map(lambda x: x[0])
    errors, bounds = followed(tokens, stream.initial_state()[0], [60] * 5, Conventions(), MAKERS["compiled"])
    assert (errors <= bounds).all(), (errors / bounds).max()
    # T pieces' tokens, m^2 products in |A||T| each, of numbers up to 16 times the state's
    assert bounds.max() < 16 * 300 * 60**2 * 2.0**-53


def test_a_bound_is_carried_through_pieces_that_nobody_looks_at() -> None:
    """Faults: errors of pieces without a grid point lost, an idle slot's moved, a slot's laid to another."""
    rng, shape = np.random.default_rng(7), Shape(1, 1, 2, 4)
    tokens, initial = draw(rng, 3, 4, 5, shape=shape), start(rng, 4, shape)
    initial[:] = initial[0].clone()
    tokens = tokens.map(lambda x: x[:, :1].expand(x.shape).clone())
    # slot 1 is idle in the second piece, slot 2 is looked at on the way, slot 3 begins a piece later
    lengths = np.array([[5, 5, 5, 0], [5, 0, 5, 5], [5, 5, 5, 5]])
    points = np.array([[-1, -1, 0, -1], [-1, -1, 1, -1], [0, 0, 2, 0]])
    oracle = Oracle(shape, initial)
    bound = oracle.advance(windows(tokens, lengths, shape), points).bound[..., 0]
    alone = []
    for pieces in ([0, 1, 2], [0, 2], [0, 1, 2], [1, 2]):
        one = Oracle(shape, initial[:1])
        mine = windows(tokens.map(lambda x, pieces=pieces: x[pieces, :1]), [[5]] * len(pieces), shape)
        alone.append(one.advance(mine, np.array([[-1]] * (len(pieces) - 1) + [[0]])).bound[0, 0, 0])
    assert bound[0, [0, 1, 3]].tolist() == [alone[0], alone[1], alone[3]]
    # a size that is read is below one that is estimated
    assert bound[2, 2] <= bound[0, 0]


@pytest.mark.parametrize("looked", [True, False])
def test_a_state_that_is_only_kept(looked: bool) -> None:
    """Faults: the size of a state left out, estimated without what it was, or taken from another slot. Without writes
    and decay a piece of m tokens adds the exponential (4 u) and the fold (m + 2 u) of |S|, and that is all."""
    rng, shape, m, P = np.random.default_rng(9), Shape(1, 1, 2, 4), 5, 3
    tokens = draw(rng, P, 3, m, shape=shape)
    tokens.beta[:], tokens.g[:] = 0.0, 0.0
    initial = start(rng, 3, shape) * torch.tensor([1.0, 1e3, 1e-6], dtype=F64).view(3, 1, 1, 1)
    points = np.arange(P)[:, None] if looked else np.array([[-1]] * (P - 1) + [[0]])
    truth = Oracle(shape, initial).advance(windows(tokens, np.full((P, 3), m), shape), np.tile(points, 3))
    per_piece = truth.bound[-1, :, 0] / (P * (m + 6) * 2.0**-53)
    # the slack of a hundredth, and three digits
    assert ((per_piece >= 1) & (per_piece <= 1.015)).all(), per_piece


def test_a_size_that_nobody_read_is_estimated_from_above() -> None:
    """Fault: a state that grows between two grid points taken for as small as it was."""
    rng, shape = np.random.default_rng(10), Shape(1, 2, 3, 6)
    tokens, P = draw(rng, 8, 1, 4, shape=shape), 8
    ends = []
    for points in (np.arange(P)[:, None], np.array([[-1]] * (P - 1) + [[0]])):
        oracle = Oracle(shape, torch.zeros(1, 2, 3, 6, dtype=F64))
        ends.append(oracle.advance(windows(tokens, [[4]] * P, shape), points).bound[-1, 0])
    assert (ends[1] >= ends[0]).all() and (ends[1] > ends[0]).any()


def test_writes_are_found_where_they_were_made() -> None:
    """Fault: the norm of a write laid to another lane, piece or slot."""
    lengths = np.array([[3, 1], [0, 2], [2, 0]])
    tokens = draw(np.random.default_rng(11), 3, 2, 3, shape=SMALL)
    d = torch.arange(1.0, 1 + 2 * 5 * 2 * 3, dtype=F64).view(2, 5, 2, 3)
    found = sizes(d, windows(tokens, lengths, SMALL), Laid(lengths, lengths * 0 - 1))
    t = [0, 0]
    for p, b in product(range(3), range(2)):
        for i in range(3):
            inside = i < lengths[p, b]
            expected = d[b, t[b]].norm(dim=-1) if inside else torch.zeros(2, dtype=F64)
            assert torch.equal(found[p, b, :, i], expected), (p, b, i)
            t[b] += int(inside)


def test_a_bound_grows_with_the_decode_and_forgets_with_the_state() -> None:
    """Fault: a bound per piece reported as that of the decode, or one that ignores what has decayed."""
    rng, shape = np.random.default_rng(8), Shape(1, 2, 2, 8)
    tokens, initial = draw(rng, 320, shape=shape), start(rng, 1, shape)[0]
    tokens.beta.fill_(0.05)
    tokens.g[:, 0], tokens.g[:, 1] = 0.0, -3.0
    _, bounds = followed(tokens, initial, [64] * 5, Conventions(), MAKERS["torch"])
    assert bounds[-1, 0] > 3 * bounds[0, 0]
    assert bounds[-1, 1] < 2 * bounds[0, 1]


def test_where_nothing_is_certain() -> None:
    """Faults: NaN taken for certainty, a bound above the state divided by a negative, a zero state divided by 0."""
    bound, size = np.array([1e-9, 2.0, np.nan, 1e-300, np.inf, 0.0]), np.array([2.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    found = relative(bound, size)
    assert found[0] == pytest.approx(5e-10, rel=2e-3) and found[0] >= 5e-10
    assert found[1:3].tolist() == [np.inf, np.inf] and found[4] == np.inf
    assert 1e-300 <= found[3] <= 1.01e-300 and found[5] == 0
