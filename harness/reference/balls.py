"""An interval around every entry of T = (I+A)^-1 of a window, from its raw k, g and beta, for up to 128 tokens.

Ball arithmetic carries a radius through norm, exponential, A and the inverse, so that nothing about their rounding is
assumed; at a hundred bits it stays far below the last place of fp64. It is not for whole decodes: a ball forgets which
way its error points, and a recurrence doubles it again and again (harness.reference.certificate is for those).

Optional: python-flint, `pip install replayssm-harness[balls]`. Source: Johansson, Arb, IEEE Trans. Comput. 66 (2017).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from harness.arithmetic import Conventions
from harness.errors import ConfigError, HarnessError


def inverse(
    k: Tensor, g: Tensor, beta: Tensor, bits: int, conventions: Conventions | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) [m, m] fp64 with low <= T <= high, neighbours but for 2^-59.

    k [m, K] before the norm; g, beta [m]: fp64, taken as they are. Raises ConfigError where python-flint is missing,
    HarnessError for numbers that are not finite (g = -inf is) and where `bits` leave a radius above 2^-60,
    or (I+A) T = I does not hold with A at twice the bits.
    """
    try:
        import flint
    except ModuleNotFoundError:
        raise ConfigError("balls: python-flint is not installed; pip install replayssm-harness[balls]") from None
    c = conventions or Conventions()
    for name, x in (("k", k), ("g", g.clamp(min=-1.0)), ("beta", beta)):
        if not x.isfinite().all():
            raise HarnessError(f"{name}: holds a number that is not finite")
    if (g > 0).any():
        raise HarnessError("g: holds a log decay above 0")
    beta = c.beta(beta)
    with flint.ctx.workprec(2 * bits):
        I_A = _one_plus_A(flint, k, g, beta, c)
    with flint.ctx.workprec(bits):
        T = _one_plus_A(flint, k, g, beta, c).inv()
        identity = I_A * T
        low, high = np.eye(len(g)), np.eye(len(g))
        for i, j in zip(*np.tril_indices(len(g), -1), strict=True):
            x, one = T[i, j], identity[i, j]
            if not (x.is_finite() and one.contains(0) and max(x.rad(), one.rad()) <= 2.0**-60):
                raise HarnessError(f"bits: {bits} do not enclose T at row {i}, column {j}: {x}")
            low[i, j], high[i, j] = _outward(x)
    return low, high


def _one_plus_A(flint: Any, k: Tensor, g: Tensor, beta: Tensor, c: Conventions) -> Any:
    """I + A in balls of the precision in force, by the conventions."""
    arb, m, K = flint.arb, len(g), k.shape[1]
    raw = [[arb(x) for x in row] for row in k.tolist()]
    eps = arb(c.eps) * (K if c.eps_at == "mean" else 1)
    square = [sum((x * x for x in row), arb(0)) for row in raw]
    size = [s.sqrt() + eps if c.eps_at == "outside" else (s + eps).sqrt() for s in square]
    k_hat = flint.arb_mat([[x / n for x in row] for row, n in zip(raw, size, strict=True)])
    P, gates, b = k_hat * k_hat.transpose(), g.tolist(), beta.tolist()
    rows = [[arb(int(i == j)) for j in range(m)] for i in range(m)]
    for i in range(m):
        # what token i's error is taken against has decayed up to i, or up to the token before
        last = i if c.decay == "before" else i - 1
        for j in range(i):
            span = gates[j + 1 : last + 1]
            E = arb(0) if -np.inf in span else sum(map(arb, span), arb(0)).exp()
            rows[i][j] = arb(b[i]) * E * P[i, j]
    return flint.arb_mat(rows)


def _outward(x: Any) -> tuple[float, float]:
    """The fp64 numbers next to a ball, from below and from above."""
    ends = []
    for end, outside in ((x.lower(), -np.inf), (x.upper(), np.inf)):
        mantissa, exponent = (int(part) for part in end.man_exp())
        exactly = Fraction(mantissa) * Fraction(2) ** exponent
        near = float(exactly)
        inward = Fraction(near) > exactly if outside < 0 else Fraction(near) < exactly
        ends.append(float(np.nextafter(near, outside)) if inward else near)
    return ends[0], ends[1]
