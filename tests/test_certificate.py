"""The certificate of the oracle: above every error that its units allow, near the largest, and far from vacuous."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MAKERS, draw, start, windows

from harness.arithmetic import Arithmetic, Conventions, Rounding
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.reference import exact
from harness.reference.certificate import Units, local, relative
from harness.reference.oracle import Laid, Oracle, sizes
from harness.tokens import Shape, Tokens

F64 = torch.float64
NONE = Units(*[0.0] * 6)
OFF = 1e-7  # the one error that is put in: far above fp64, and its square far below
SITES = (
    "key",
    "key_gram",
    "key_fold",
    "state",
    "gram",
    "before",
    "within",
    "total",
    "tail",
    "T",
    "solve",
    "rhs",
    "fold",
    "writes",
)
DECAYS = ("before", "after")
SMALL = Shape(1, 2, 3, 4)


def computed(
    C: np.ndarray, t: dict[str, np.ndarray], c: Conventions, u: Units, sign: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """A piece by the oracle's formulas with every part off by its unit, at each site up or down. Returns S and d."""
    v, beta, g = t["v"], t["beta"], t["g"]
    # one and the same k_hat is read by three products, and the bound grants each its own worst
    k, k_gram, k_fold = (t["k"] * (1 + sign[site] * u.key) for site in ("key", "key_gram", "key_fold"))
    m, n = len(k), np.arange(len(k))
    G = g.cumsum()
    span = np.where(n[:, None] >= n, G[:, None] - G, -np.inf)

    def decay(x: np.ndarray, site: str) -> np.ndarray:
        return np.exp(x) * (1 + sign[site] * (u.exp - m * u.gate * np.maximum(x, -700)))

    eG, E = decay(G, "total"), decay(span, "within")
    eR, Eb = decay(G, "before"), E
    if c.decay == "after":
        eR, Eb = np.append(1.0, eR[:-1]), np.roll(E, 1, 0)
    hw = C @ k.T + sign["state"] * u.dot * (abs(C) @ abs(k).T)
    P = k_gram @ k_gram.T + sign["gram"] * u.dot * (abs(k_gram) @ abs(k_gram).T)
    A = np.tril(beta[:, None] * Eb * P, -1) * (1 + sign["gram"] * 2 * u.one)
    prediction = eR * hw * (1 + sign["state"] * u.one)
    R = beta * (v.T - prediction) * (1 + sign["rhs"] * u.one) ** 2
    T = np.linalg.inv(np.eye(m) + A)
    T = T + sign["T"] * m * u.token * (abs(A) @ abs(T))
    d = R @ T.T + sign["solve"] * m * u.token * (abs(R) @ abs(T).T)
    Wd = d * decay(span[-1], "tail") * (1 + sign["writes"] * u.one) ** 2
    kept = eG[-1] * C * (1 + sign["fold"] * u.one) ** 2
    return kept + Wd @ k_fold + m * u.token * (sign["fold"] * abs(kept) + sign["writes"] * Wd @ k_fold), d


def one_piece(kind: str, m: int, beta: float, g: float) -> tuple[np.ndarray, Tokens]:
    """C [1, K] and a piece of m tokens of one head and row, made so that magnitudes are what really arrives."""
    rng, K = np.random.default_rng(m), 4
    k = np.tile(rng.uniform(0.5, 1, (1, K)), (m, 1))
    if kind == "turning":
        k = rng.standard_normal((m, K))
    C = k[:1] / np.linalg.norm(k[0]) if kind != "values" else np.zeros((1, K))
    v = np.zeros((m, 1)) if kind == "state" else rng.choice([-1.0, 1.0], (m, 1))
    parts = k[:, None], k[:, None], v[:, None], np.full((m, 1), g), np.full((m, 1), beta)
    return C, Tokens(*(torch.from_numpy(np.ascontiguousarray(x)) for x in parts))


def shares(unit: str, decay: str) -> dict[tuple[Any, ...], float]:
    """Error over bound for every case and choice of signs, with no other unit than this."""
    u, c, found = NONE._replace(**{unit: OFF}), Conventions(eps=1e-30, decay=decay), {}
    for case in product(("state", "values", "both", "turning"), (1, 3), (0.3, 1.9), (0.0, -0.7)):
        C, tokens = one_piece(*case)
        pieces = windows(tokens.map(lambda x: x[None, None]), [[len(tokens.g)]], Shape(1, 1, 1, 4))
        raw = {"k": pieces.keys(Arithmetic(conventions=c))[0][0, 0, 0], "v": tokens.v[:, 0]}
        raw |= {"beta": tokens.beta[:, 0], "g": tokens.g[:, 0]}
        t = {name: x.numpy() for name, x in raw.items()}
        S, _ = computed(C, t, c, NONE, dict.fromkeys(SITES, 1))
        for s in product((1, -1), repeat=4):
            # sites err together or against each other: neighbours in SITES are of one product or one exponential
            sign = {site: s[i % 4] for i, site in enumerate(SITES)}
            S_hat, d = computed(C, t, c, u, sign)
            piece = local(pieces, torch.from_numpy(abs(d))[None, None], Arithmetic(conventions=c), u)
            bound = float(piece.fixed + piece.scaled * np.linalg.norm(C))
            error = float(np.linalg.norm(S_hat - S))
            found[*case, *s] = error / bound
    return found


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("unit", Units._fields)
def test_no_error_of_a_part_is_above_its_bound(unit: str, decay: str) -> None:
    """Faults: a rounding left out of the bound, one of its factors below what it bounds. And the other way round: a
    bound that nothing comes near. Signs are chosen so that errors add up."""
    found = shares(unit, decay)
    worst = max(found, key=lambda case: found[case])
    # second-order terms are 1e-7 of the first, the fp64 of this test 1e-9
    assert found[worst] <= 1 + 1e-6, (worst, found[worst])
    assert found[worst] >= 0.3, (worst, found[worst])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("beta", [0.3, 1.0, 1.9, 2.0, 2.5])
def test_contraction_is_that_of_the_tokens(beta: float, decay: str) -> None:
    """Faults: e^g where a token expands (decay after, beta above 2), a factor too few or many.
    A difference along the keys, or across them, is mapped with the whole norm: by no more than is said, and no less."""
    found, c = [], Conventions(eps=1e-30, decay=decay)
    for m, g in product((1, 3), (0.0, -0.7)):
        C, tokens = one_piece("state", m, beta, g)
        pieces = windows(tokens.map(lambda x: x[None, None]), [[m]], Shape(1, 1, 1, 4))
        t = {"k": pieces.keys(Arithmetic(conventions=c))[0][0, 0, 0].numpy(), "v": tokens.v[:, 0].numpy()}
        t |= {"beta": tokens.beta[:, 0].numpy(), "g": tokens.g[:, 0].numpy()}
        across = np.eye(1, 4) - (t["k"][0, 0] * t["k"][:1])
        said = float(local(pieces, torch.zeros(1, 1, 1, m), Arithmetic(conventions=c), NONE).contraction)
        for E in (C, across):
            apart = computed(C + E, t, c, NONE, dict.fromkeys(SITES, 1))[0]
            apart -= computed(C, t, c, NONE, dict.fromkeys(SITES, 1))[0]
            found.append(np.linalg.norm(apart) / np.linalg.norm(E) / said)
        assert max(found[-2:]) == pytest.approx(1, rel=1e-8)


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
