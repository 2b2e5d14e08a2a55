"""What the certificate grants the parts of a piece: every error that its units allow, and hardly more.

Errors of a chosen size are put into the oracle's formulas part by part, with signs that make them add up.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import windows

from harness.arithmetic import Arithmetic, Conventions
from harness.reference.certificate import Units, local
from harness.tokens import Shape, Tokens

NONE = Units(*[0.0] * 6)
OFF = 1e-7  # the one error that is put in: far above fp64, and its square far below
SITES = "key key_gram key_fold state gram before within total tail T solve rhs fold writes".split()
DECAYS = ("before", "after")


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
