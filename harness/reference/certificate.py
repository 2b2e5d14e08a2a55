"""||S_hat - S||_F <= sum_p c_p eps_p: what the fp64 oracle may be off by, from what it really computed.

A piece takes S_hat exactly to some state of its own tokens, plus eps_p; every token contracts what was there before,
by e^g where beta lies in [0, 2], as |k_hat| <= 1. So errors only add up, however long the decode. eps_p is a running
bound on the rounding of one piece: n u times the magnitudes at hand for a sum of n terms, which holds for any order of
them, fused or not. README.md of this folder derives it.

Rounded are the norm, the exponentials (granted 4 u, two units in the last place), A, T, R, D and the fold. Exact are
q, k, v, g and beta as they arrive, and eps as the binary number it is. For decay "after" a token may expand, by
|e^g - beta|; the bound then says so by growing.

Source: running error analysis, Higham, Accuracy and Stability of Numerical Algorithms, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.tokens import on_device
from harness.window import Windows

U = 2.0**-53
TINY = 1e-300  # above anything that underflow takes away in a piece
SLACK = 1.01  # second-order terms, n u for n u / (1 - n u), and the rounding of the bound itself
LOOSE = 1 + 2.0**-33  # the rounding of one norm, of one factor of contraction


class Units(NamedTuple):
    """Relative errors that the parts of a piece are granted."""

    key: float  # every entry of k_hat
    dot: float  # a sum of K products
    exp: float  # e^x
    gate: float  # each gate of an exponent
    token: float  # each token of a sum over tokens
    one: float  # a single operation

    @staticmethod
    def fp64(K: int) -> Units:
        """Those of fp64 with K keys, whatever the order of sums."""
        # of k_hat: half of the K products under the root, and what follows
        return Units((K / 2 + 5) * U, K * U, 4 * U, U, U, U)


class Piece(NamedTuple):
    """Of every piece, [P, B, HV]: eps = fixed + scaled |S|; the contraction; and |S| after it <= kept |S| + written."""

    fixed: Tensor
    scaled: Tensor
    contraction: Tensor
    kept: Tensor
    written: Tensor


class Certificate:
    """Bounds of all slots of an oracle, carried from call to call. S [B, HV, V, K]: the states at the start, exact."""

    def __init__(self, S: Tensor, arithmetic: Arithmetic):
        self.arithmetic = arithmetic
        self.size = norm(S) * LOOSE  # [B, HV] at least |S_hat|_F
        self.bound = np.zeros_like(self.size)  # [B, HV] at least |S_hat - S|_F

    def advance(self, pieces: Windows, writes: Tensor, S: Tensor, points: np.ndarray) -> np.ndarray:
        """Bounds at the grid points of a block, relative to |S|_F, absolute where that is 0: [points, B, HV].

        writes [P, B, HV, m] the norms of d; S [points, B, HV, V, K] the states there; points [P, B] which of them a
        piece ends at, -1 for none. inf where nothing is certain.
        """
        found = torch.stack(local(pieces, writes, self.arithmetic, Units.fp64(pieces.shape.K)))
        fixed, scaled, contraction, kept, written = found.cpu().numpy()
        sizes = norm(S)
        bounds = np.full(sizes.shape, np.inf)
        for p, lengths in enumerate(pieces.lengths):
            live = (lengths > 0)[:, None]
            self.bound = np.where(live, contraction[p] * self.bound + fixed[p] + scaled[p] * self.size, self.bound)
            self.size = kept[p] * self.size + written[p]
            (at,) = np.nonzero(points[p] >= 0)
            bounds[points[p, at], at] = self.bound[at]
            self.size[at] = sizes[points[p, at], at] * LOOSE
        return relative(bounds, sizes)


def relative(bound: np.ndarray, size: np.ndarray) -> np.ndarray:
    """bound over what |S| is at least, size being |S_hat|: inf where that may be nothing; bound itself for a zero."""
    # a state that nobody asked for may hold anything
    with np.errstate(invalid="ignore"):
        least = np.where(size == 0, 1.0, size / LOOSE - bound)
    sure = least > 0
    ratio = np.where(sure, bound, np.inf) / np.where(sure, least, 1.0)
    # three digits, rounded up: the rest hangs on the order of sums, which a block's size must not show in
    fraction, exponent = np.frexp(ratio)
    return np.asarray(np.ldexp(np.ceil(fraction * 1024) / 1024, exponent))


def norm(S: Tensor) -> np.ndarray:
    """|S|_F of states [..., V, K]."""
    return np.asarray(torch.linalg.vector_norm(S.flatten(-2), dim=-1).cpu())


def local(pieces: Windows, writes: Tensor, a: Arithmetic, u: Units) -> Piece:
    """What one piece adds and what it keeps, from magnitudes alone: nothing of the size of a state is read."""
    (lengths,) = on_device(pieces.g.device, pieces.lengths.astype(np.float64))
    m = lengths[:, :, None, None]  # a lane behind the piece's last adds nothing, whatever the widest piece has
    g, beta = pieces.gates(a)
    eG, E = pieces.decays(a)
    eR, total, W = pieces.before(a)[0], eG[..., -1:], E[..., -1, :]
    v = torch.linalg.vector_norm(pieces.v, dim=-1)

    # columns: what is there without a state, and what every unit of |S| adds
    R = torch.stack((beta * v, beta * eR), -1)
    R_off = torch.stack((2 * u.one * beta * v, beta * (slip(eR, m, u) + eR * (u.dot + u.key + 3 * u.one))), -1)
    through_T = pieces.formed(a, "substitution").abs() @ R
    again_A = pieces.scores(a)[0].abs() @ through_T
    residual = R_off + (m * u.token)[..., None] * (through_T + 2 * again_A)
    # e^x |x| is at most 1/e
    A_off = u.dot + 2.1 * u.key + u.exp + 2 * u.one + 0.4 * m * u.gate
    residual[..., 0] += beta * A_off * (writes.cumsum(-1) - writes)

    before = a.conventions.decay == "before"
    factor = g.exp() * (1 - beta).abs().clamp(min=1.0) if before else torch.maximum(g.exp(), (g.exp() - beta).abs())
    # from each token on, and from behind it
    after = (factor * LOOSE).clamp(min=TINY).flip(-1).cumprod(-1).flip(-1)
    behind = torch.cat((after[..., 1:], torch.ones_like(after[..., :1])), -1)
    grown = (behind[..., None] * residual).sum(-2)
    fold = m * u.token + 2 * u.one
    fixed = grown[..., 0] + (writes * (slip(W, m, u) + W * (fold + u.key))).sum(-1)
    scaled = grown[..., 1] + (slip(total, m, u) + fold * total)[..., 0]
    return Piece(
        fixed * SLACK + TINY, scaled * SLACK, after[..., 0], total[..., 0] * LOOSE, (W * writes).sum(-1) * LOOSE
    )


def slip(e: Tensor, m: Tensor, u: Units) -> Tensor:
    """At least |e_hat - e^x| of a computed e_hat, the exponent x <= 0 being a sum of up to m gates."""
    return e * (u.exp - 1.1 * m * u.gate * e.clamp(min=TINY).log()) + TINY
