"""S <- e^g S;  d = beta (v - S k_hat);  S <- S + d k_hat';  o = S q_hat, to a stated number of bits, token by token.

Every number is an integer multiple of 2^-w, so a product is one of integers and every rounding is a shift: no context
and no global precision is there to be wrong. The inputs are taken as the binary numbers they are, eps of the
conventions among them; norm, square root and exponential are rounded at 2^-w too. Rows of S never meet, so a few value
rows cost what they are: 16,384 tokens x 128 keys x 2 rows take some twenty seconds.

The tokens contract what rounding leaves in S (for decay "before"; "after" may not), so w lies some guard bits and those
of T K above what is asked for. That is not taken on trust: everything is computed a second time with MORE bits, where
every rounding is another one, and refused where the two differ.

Source: the recurrence is that of harness.reference.verify; e^x is mpmath's (libmp.mpf_exp, which takes its precision
as an argument).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import libmp
from torch import Tensor

from harness.arithmetic import Conventions
from harness.errors import ConfigError, HarnessError
from harness.tokens import Tokens

MORE = 37  # bits of the second computation above those of the first
AT_ONCE = 256  # tokens whose keys are integers at a time: they take ten times the memory of numbers

_isqrt = np.frompyfunc(math.isqrt, 1, 1)


@dataclass(frozen=True)
class Exact:
    """S [P, HV, V, K] after the token counts points [P], o and d [T, HV, V]: Python integers, in units of 2^-bits."""

    points: tuple[int, ...]
    S: np.ndarray
    o: np.ndarray
    d: np.ndarray
    bits: int

    def nearest(self, name: str) -> np.ndarray:
        """S, o or d as the nearest fp64 numbers."""
        return np.asarray(getattr(self, name) / (1 << self.bits), np.float64)

    def error(self, name: str, x: np.ndarray | Tensor) -> np.ndarray:
        """x - S, o or d, fp64: the difference is taken before it is rounded."""
        return np.asarray((fixed(np.asarray(x), self.bits) - getattr(self, name)) / (1 << self.bits), np.float64)


def decode(
    S: Tensor,
    tokens: Tokens,
    bits: int,
    conventions: Conventions | None = None,
    points: Sequence[int] | None = None,
    guard: int = 24,
) -> Exact:
    """States, outputs and writes of T tokens to 2^-bits of the largest entry of their head.

    S       [HV, V, K] fp64, the state before the first token; V counts the rows that are followed
    tokens  [T, ...], v with those rows
    points  token counts 1..T at which S is kept, rising; None: T alone
    guard   bits computed beyond those asked for; a state of 2^-n needs n more

    Raises InputError for tokens no kernel may be fed, ConfigError for a wrong count of bits or points, and HarnessError
    where two precisions differ by more than 2^-bits.
    """
    c, T, K = conventions or Conventions(), len(tokens.g), S.shape[-1]
    kept = (T,) if points is None else tuple(points)
    if bits < 1:
        raise ConfigError(f"bits: {bits} is below 1")
    if list(kept) != sorted(set(kept) & set(range(1, T + 1))) or not kept:
        raise ConfigError(f"points: {list(kept)} are not rising token counts in 1..{T}")
    if tokens.v.shape[1:] != S.shape[:2]:
        raise ConfigError(f"v: {list(tokens.v.shape[1:])} heads and rows, and the state has {list(S.shape[:2])}")
    if not S.isfinite().all():
        raise HarnessError("S: the initial state is not finite")
    tokens.validate()
    work = bits + guard + (T * K).bit_length()
    first, second = (_decode(S.numpy(), tokens, w, c, kept) for w in (work, work + MORE))
    _agree(first, second, bits)
    return second


def fixed(x: np.ndarray, bits: int) -> np.ndarray:
    """x, finite, as integers in units of 2^-bits, what lies below cut off."""
    m, e = np.frexp(np.asarray(x, np.float64))
    n, up = np.ldexp(m, 53).astype(np.int64).astype(object), e.astype(np.int64) + (bits - 53)
    return (n << np.maximum(up, 0).astype(object)) >> np.maximum(-up, 0).astype(object)


def unit(x: np.ndarray, bits: int, c: Conventions) -> np.ndarray:
    """x [..., K] over its norm, in units of 2^-bits, eps where the conventions have it."""
    n = fixed(x, bits)
    # the norm itself has twice the bits, so that a small one is as good as any
    square, eps = (n * n).sum(-1, keepdims=True) << 2 * bits, int(fixed(np.array(c.eps), 4 * bits))
    if c.eps_at == "outside":
        norm = _isqrt(square) + int(fixed(np.array(c.eps), 2 * bits))
    else:
        norm = _isqrt(square + eps * (x.shape[-1] if c.eps_at == "mean" else 1))
    if not norm.all():
        raise HarnessError("conventions.eps: 0, and there is a key or a query of norm 0")
    return (n << 2 * bits) // norm


def decay(g: float, bits: int) -> int:
    """e^g in units of 2^-bits; 0 for -inf."""
    return int(libmp.to_fixed(libmp.mpf_exp(libmp.from_float(g), bits + 8), bits))


def _decode(S0: np.ndarray, tokens: Tokens, w: int, c: Conventions, points: tuple[int, ...]) -> Exact:
    HV, V, K = S0.shape
    T, group = len(tokens.g), HV // tokens.k.shape[1]
    q, k, v, g = (np.asarray(x) for x in (tokens.q, tokens.k, tokens.v, tokens.g))
    beta = fixed(np.asarray(c.beta(tokens.beta)), w)
    S, kept = fixed(S0, w), np.empty((len(points), HV, V, K), object)
    o, d = (np.empty((T, HV, V), object) for _ in range(2))
    root = math.isqrt((1 << 2 * w) // K)  # K^-1/2
    for begin in range(0, T, AT_ONCE):
        here = range(begin, min(begin + AT_ONCE, T))
        some = slice(here.start, here.stop)
        k_hat, q_hat, v_now = unit(k[some], w, c), unit(q[some], w, c) * root >> w, fixed(v[some], w)
        for i, t in enumerate(here):
            for h in range(HV):
                eg, read = decay(float(g[t, h]), w), k_hat[i, h // group]
                seen = S[h] @ read >> w
                if c.decay == "before":
                    seen = seen * eg >> w
                d[t, h] = (v_now[i, h] - seen) * beta[t, h] >> w
                S[h] = (S[h] * eg + d[t, h][:, None] * read) >> w
                o[t, h] = S[h] @ q_hat[i, h // group] >> w
            if t + 1 in points:
                kept[points.index(t + 1)] = S
    return Exact(points, kept, o, d, w)


def _agree(x: Exact, y: Exact, bits: int) -> None:
    """Refuse x and y that differ by more than 2^-bits of the largest entry of a head."""
    for name, axes in (("S", (2, 3)), ("o", (0, 2)), ("d", (0, 2))):
        a, b = getattr(x, name) << (y.bits - x.bits), getattr(y, name)
        apart, largest = (_largest(z, axes) for z in (a - b, b))
        wrong = np.argwhere(apart << bits > largest)
        if len(wrong):
            at = tuple(wrong[0])
            where = f"value head {at[-1]}" + (f" after {x.points[at[0]]} tokens" if name == "S" else "")
            share = f"{apart[at]} of {largest[at]} units of 2^-{y.bits}"
            raise HarnessError(
                f"{name}: {where} does not have {bits} bits: two precisions differ by {share}; more guard?"
            )


def _largest(x: np.ndarray, axes: tuple[int, ...]) -> Any:
    return np.abs(x).max(axis=axes)
