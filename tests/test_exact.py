"""The exact references judged: fixed point against rationals, rationals against each other, and what both refuse.

Case H4 (mpmath 608, 636) is in here: a precision that was set and had no effect, digits that end where a Python
literal ends.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from helpers import MAKERS, draw, start
from helpers import windows as laid

from harness.arithmetic import Conventions
from harness.errors import ConfigError, HarnessError, InputError
from harness.reference import exact, rational
from harness.reference.oracle import Oracle
from harness.tokens import Shape, Tokens

SHAPE, BITS = Shape(1, 2, 3, 4), 80
F64 = torch.float64
# sum k^2 + eps = 1 for keys of 1/2, 1/2, 1/4, 1/4 in any order and sign: the norm is rational
DYADIC = Conventions(eps=0.375)


def dyadic(m: int, seed: int) -> tuple[torch.Tensor, Tokens]:
    """S0 [HV, V, K] and m tokens on which the recurrence is dyadic: norms are 1, gates 0 or a reset."""
    rng = np.random.default_rng(seed)

    def keys() -> np.ndarray:
        return rng.permuted(np.tile([0.5, 0.5, 0.25, 0.25], (m, 1, 1)), axis=-1) * rng.choice([-1.0, 1.0], (m, 1, 4))

    g = np.where(rng.random((m, 2)) < 0.2, -np.inf, 0.0)
    beta, v, S = (
        rng.choice([0.25, 0.75, 1.5], (m, 2)),
        rng.integers(-8, 9, (m, 2, 3)) / 4,
        rng.integers(-8, 9, (2, 3, 4)),
    )
    return torch.from_numpy(S / 2), Tokens(*(torch.from_numpy(x) for x in (keys(), keys(), v, g, beta)))


def windows(S: torch.Tensor, t: Tokens) -> list[rational.Window]:
    """The window of every value head in rationals; K^-1/2 of q_hat is 1/2."""
    k, q, eg = t.k[:, 0], t.q[:, 0] / 2, t.g.exp()
    return [rational.window(S[h], k, q, t.v[:, h], t.beta[:, h].tolist(), eg[:, h].tolist()) for h in range(len(S))]


@pytest.mark.parametrize("seed", range(4))
def test_two_exact_references_agree_in_every_bit(seed: int) -> None:
    """Faults: beta or a decay at the wrong place, a head's keys taken for another's, o read before the update; a
    rational window whose A, T or fold has an index wrong."""
    S, tokens = dyadic(7, seed)
    found = exact.decode(S, tokens, BITS, DYADIC)
    for h, gold in enumerate(windows(S, tokens)):
        for name, mine, theirs in (
            ("S", found.S[0, h], gold.S),
            ("o", found.o[:, h], gold.o),
            ("d", found.d[:, h], gold.D),
        ):
            assert mine.tolist() == [[x * 2**found.bits for x in row] for row in theirs], name


@pytest.mark.parametrize("engine", MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_is_exact_where_fp64_is(seed: int, engine: str) -> None:
    """Fault: an oracle that is off where no rounding is to blame. Five tokens need some forty of the 53 bits."""
    S, tokens = dyadic(5, seed)
    oracle = Oracle(SHAPE, S[None], DYADIC, MAKERS[engine])
    truth = oracle.advance(laid(tokens.map(lambda x: x[None, None]), [[5]], SHAPE))
    for h, gold in enumerate(windows(S, tokens)):
        for mine, theirs in ((oracle.S[0, h], gold.S), (truth.o[0, :, h], gold.o), (truth.d[0, :, h], gold.D)):
            assert mine.tolist() == [[float(x) for x in row] for row in theirs]


def test_states_are_kept_where_asked() -> None:
    """Fault: a point off by one, or one object for all points, so that every state is the last."""
    S, tokens = dyadic(7, 9)
    found = exact.decode(S, tokens, BITS, DYADIC, points=(1, 4, 7))
    for i, n in enumerate(found.points):
        alone = exact.decode(S, tokens.map(lambda x, n=n: x[:n]), BITS, DYADIC)
        assert (found.S[i] == alone.S[0] << (found.bits - alone.bits)).all(), n


def test_more_tokens_than_are_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a second stretch of tokens read from the first one's place."""
    S, tokens = dyadic(7, 3)
    whole = exact.decode(S, tokens, BITS, DYADIC)
    monkeypatch.setattr(exact, "AT_ONCE", 3)
    parts = exact.decode(S, tokens, BITS, DYADIC)
    assert all((getattr(whole, name) == getattr(parts, name)).all() for name in ("S", "o", "d"))


@pytest.mark.parametrize("g", [-0.1, -1e-9, -7.25, -40.0, 0.0])
def test_the_exponential_is_that_of_the_binary_number(g: float) -> None:
    """Fault (H4, mpmath#636): e^-0.1 of the decimal -0.1, which differs from the double at the seventeenth digit."""

    def series(x: Fraction) -> Fraction:
        term = total = Fraction(1)
        for n in range(1, 300):
            term = term * x / n
            total += term
        return total

    found = Fraction(exact.decay(g, 200), 2**200)
    # one unit of the last place, as it is cut off; 300 terms leave 40^300/300! = 1e-134
    assert abs(found - series(Fraction(g))) <= Fraction(1, 2**199)
    if g == -0.1:
        assert abs(found - series(Fraction(-1, 10))) > Fraction(1, 2**60)
    assert exact.decay(-np.inf, 200) == 0


@pytest.mark.parametrize("where", ["sum", "mean", "outside"])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-30])
def test_norms_to_the_last_bit(scale: float, where: str) -> None:
    """Faults: eps at another place than the conventions say, or as a decimal; a small norm with fewer bits."""
    x = scale * np.random.default_rng(5).standard_normal((1, 6))
    bits, c = 150, Conventions(eps_at=where)
    found, raw = exact.unit(x, bits, c)[0], [Fraction(v) for v in x[0]]
    eps, square = Fraction(c.eps), sum(v * v for v in raw)
    with mpmath.workprec(400):
        norm = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator + 0)
        outside = norm + mpmath.mpf(c.eps)
        inside = mpmath.sqrt(norm**2 + mpmath.mpf(c.eps) * (6 if where == "mean" else 1))
        for mine, v in zip(found, x[0], strict=True):
            unit = mpmath.mpf(v) / (outside if where == "outside" else inside)
            # an input cut off at 2^-bits, over a norm of eps at least, and the quotient cut off
            assert abs(mpmath.ldexp(mine, -bits) - unit) <= mpmath.ldexp(2 / c.eps, -bits)
    assert eps != Fraction(1, 10**6)


def test_no_global_precision_reaches_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (H4, mpmath#608): a reference whose digits follow mpmath's context, or an attribute somebody assigned."""
    shape = Shape(1, 2, 2, 3)
    tokens, S = draw(np.random.default_rng(2), 9, shape=shape), start(np.random.default_rng(3), 1, shape)[0]
    before = exact.decode(S, tokens, BITS)
    monkeypatch.setattr(mpmath.mp, "prec", 20)
    monkeypatch.setattr(mpmath, "workdps", 4)
    after = exact.decode(S, tokens, BITS)
    assert before.bits == after.bits and (before.S == after.S).all() and (before.o == after.o).all()


def misused(tree: ast.AST) -> list[int]:
    """Lines that set a precision for everybody, or make a number of many digits out of a decimal."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Attribute) and t.attr in ("prec", "dps", "workprec", "workdps") for t in targets):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("mpf", "arb"):
            value = getattr(node.args[0], "value", None) if node.args else None
            if isinstance(value, str) or (isinstance(value, float) and value * 2**20 % 1):
                found.append(node.lineno)
    return found


def test_precision_comes_from_a_context_and_numbers_from_binary_ones() -> None:
    """Fault (H4, mpmath#608, #636): `mp.prec = 100` in one file that changes every other, an attribute of a module that
    was set and does nothing, the double nearest to 0.1 taken for 0.1."""
    for bad in ("mpmath.mp.dps = 50", "mpmath.workdps = 50", "mp.prec += 10", "x = mpf(0.1)", "mpmath.mpf('0.1')"):
        assert misused(ast.parse(bad)) == [1], bad
    assert not misused(ast.parse("with mpmath.workprec(400):\n    x = mpmath.mpf(0.375) + mpmath.mpf(v)"))
    root = Path(exact.__file__).parents[2]
    files = [p for folder in ("harness", "tests") for p in (root / folder).rglob("*.py")]
    assert len(files) > 100
    wrong = {p.name: lines for p in files if (lines := misused(ast.parse(p.read_text())))}
    assert not wrong


def test_bits_that_are_not_there_are_refused() -> None:
    """Fault (H4): a state far below the units it is counted in, returned as if it had the bits asked for."""
    S, tokens = start(np.random.default_rng(4), 1, SHAPE)[0], dyadic(3, 0)[1]
    tokens = replace(tokens, g=torch.full_like(tokens.g, -40.0), beta=torch.zeros_like(tokens.beta))
    with pytest.raises(HarnessError, match=r"^S: value head 0 after 3 tokens does not have 60 bits"):
        exact.decode(S, tokens, 60)
    # e^-120 is 173 bits down: with that many more below, they are there
    found = exact.decode(S, tokens, 60, guard=200)
    assert np.abs(found.nearest("S")[0] / (S.numpy() * np.exp(-120.0)) - 1).max() <= 4 * 2.0**-53


def test_a_wrong_sum_in_one_of_the_two_precisions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check that compares a result with itself."""
    S, tokens = dyadic(5, 1)
    right = exact.decay
    monkeypatch.setattr(exact, "decay", lambda g, bits: right(g, bits) + (1 << 40))
    with pytest.raises(HarnessError, match="does not have 80 bits"):
        exact.decode(S, tokens, BITS, DYADIC)


def test_an_error_is_a_difference_before_it_is_rounded() -> None:
    """Fault: an error of 1e-30 that reads 0, as both numbers were rounded to fp64 first."""
    S, tokens = dyadic(3, 2)
    tokens.g[:] = -0.1
    found = exact.decode(S, tokens, BITS, DYADIC)
    near = found.nearest("S")
    error = found.error("S", near)
    assert (np.abs(error) <= 2.0**-53 * np.abs(near)).all() and np.count_nonzero(error) > error.size // 2
    for x, e, exactly in zip(near.flat, error.flat, found.S.flat, strict=True):
        assert e == float(Fraction(x) - Fraction(exactly, 2**found.bits))


BAD = {
    "k": lambda t: t.k.view(-1)[0:1].fill_(np.nan),
    "g": lambda t: t.g.view(-1)[0:1].fill_(0.1),
    "beta": lambda t: t.beta.view(-1)[0:1].fill_(2.5),
}


@pytest.mark.parametrize("field", BAD)
def test_tokens_that_no_kernel_may_be_fed(field: str) -> None:
    """Fault: NaN converted to an integer, or a reference outside the domain of what it judges."""
    S, tokens = dyadic(3, 2)
    BAD[field](tokens)
    with pytest.raises(InputError, match=f"^{field}: .*token 0, head 0"):
        exact.decode(S, tokens, BITS)


def test_what_else_is_refused() -> None:
    """Faults: no bits at all, points outside the decode, a state that is not finite, a zero key without eps."""
    S, tokens = dyadic(3, 2)
    for bits, points in ((0, None), (BITS, (4,)), (BITS, (2, 1)), (BITS, ())):
        with pytest.raises(ConfigError, match=r"^bits|^points"):
            exact.decode(S, tokens, bits, DYADIC, points)
    with pytest.raises(HarnessError, match=r"^S: "):
        exact.decode(S / 0, tokens, BITS)
    with pytest.raises(ConfigError, match=r"^v: "):
        exact.decode(S[:, :2], tokens, BITS)
    tokens.k[1] = 0
    with pytest.raises(HarnessError, match=r"^conventions\.eps: 0"):
        exact.decode(S, tokens, BITS, Conventions(eps=0.0))
