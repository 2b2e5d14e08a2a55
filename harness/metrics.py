"""Errors of states and tokens against the oracle. Zero and non-finite values stay what they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from harness.tokens import on_cpu


def state_errors(S_hat: Tensor, S: Tensor) -> Tensor:
    """||S_hat - S||_F / ||S||_F and max|S_hat - S| / max|S| of [n, HV, V, K], [n, HV, 2]; absolute where S is 0."""
    if on_cpu(S):
        from harness.compiled.design import distance

        return distance(S_hat, S)
    return torch.stack([e / torch.where(s == 0, 1.0, s) for e, s in zip(norms(S_hat - S), norms(S), strict=True)], -1)


def norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Frobenius and max norm over the last two axes."""
    flat = x.flatten(-2)
    return torch.linalg.vector_norm(flat, dim=-1), flat.abs().amax(-1)


def token_errors(x_hat: Tensor, x: Tensor, at: Tensor, of: Tensor) -> Tensor:
    """||x_hat - x|| / ||x|| of tokens x_hat[at] and x[of], [.., HV, V] both: [HV, N]; absolute where x is 0."""
    if on_cpu(x):
        from harness.compiled.design import token_distances

        return token_distances(x_hat, x, at, of)
    x = x[of]
    scale = torch.linalg.vector_norm(x, dim=-1)
    error = torch.linalg.vector_norm(x_hat[at] - x, dim=-1) / torch.where(scale == 0, 1.0, scale)
    # NaN without its sign: a sort may look at that
    return error.abs().mT


def per_interval(errors: Tensor, places: Tensor, size: Tensor) -> Tensor:
    """Median and maximum over each interval, [2, ..., n], of errors [..., N].

    places [n, widest], size [n]: an interval's tokens among the N are the last `size` of its places.
    NaN sorts above everything, so a token that is not a number can raise both and never lowers either.
    """
    n, widest = places.shape
    lane = torch.arange(widest, device=places.device)
    # padding is smallest: the last `size` places of the sorted row are the interval's own
    padded = errors[..., places].masked_fill_(lane < widest - size[:, None], -1.0).sort(-1)[0]
    row = torch.arange(n, device=places.device)
    low, high = (padded[..., row, widest - 1 - half] for half in (size // 2, (size - 1) // 2))
    return torch.stack(((low + high) / 2, padded[..., -1]))


class SinceLast:
    """Maxima over the windows since the last grid point, per slot, across blocks."""

    def __init__(self, slots: int):
        self.slots = slots
        self.carry: np.ndarray | None = None  # [slots, HV, Q]

    def add(self, values: np.ndarray, live: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Maxima at every grid point, by steps and then by slots, [n, HV, Q].

        values [W, B, HV, Q], live [W, B]; points [W, B]: a slot's how manieth a step ends at, or -1. NaN wins over any
        number.
        """
        from harness.compiled.measure import maxima

        if self.carry is None:
            self.carry = np.full(values.shape[1:], -np.inf)
        found = np.empty((int((points >= 0).sum()), *values.shape[2:]))
        maxima(np.ascontiguousarray(values), live.astype(np.int64), points, self.carry, found)
        return found
