"""Errors of states and tokens against the oracle. Zero and non-finite values stay what they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def state_errors(S_hat: Tensor, S: Tensor) -> Tensor:
    """||S_hat - S||_F / ||S||_F and max|S_hat - S| / max|S| of [n, HV, V, K], [n, HV, 2]; absolute where S is 0."""
    if S.device.type == "cpu":
        from harness.compiled.design import distance

        return distance(S_hat, S)
    return torch.stack([e / torch.where(s == 0, 1.0, s) for e, s in zip(norms(S_hat - S), norms(S), strict=True)], -1)


def norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Frobenius and max norm over the last two axes."""
    flat = x.flatten(-2)
    return torch.linalg.vector_norm(flat, dim=-1), flat.abs().amax(-1)


def token_errors(x_hat: Tensor, x: Tensor) -> np.ndarray:
    """||x_hat - x|| / ||x|| of every token, [HV, T], from [T, HV, V]; absolute where x is 0."""
    if x.device.type == "cpu":
        from harness.compiled.design import token_distances

        return token_distances(x_hat, x)
    scale = torch.linalg.vector_norm(x, dim=-1)
    error = torch.linalg.vector_norm(x_hat - x, dim=-1) / torch.where(scale == 0, 1.0, scale)
    return error.cpu().numpy().T


def per_interval(errors: np.ndarray, ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Median and maximum over each interval, [intervals, HV], of errors [HV, T]; interval i ends before ends[i].

    NaN sorts above everything, so a token that is not a number can raise both and never lowers either.
    """
    begins = [0, *ends[:-1]]
    widest = max(e - b for b, e in zip(begins, ends, strict=True))
    padded = np.full((len(ends), widest, errors.shape[0]), -1.0)
    for i, (b, e) in enumerate(zip(begins, ends, strict=True)):
        padded[i, widest - (e - b) :] = errors[:, b:e].T
    size = np.array(ends) - begins
    # padding is smallest: the last `size` places of the sorted column are the interval's own
    padded.sort(axis=1)
    at = np.arange(len(ends))
    low, high = padded[at, widest - 1 - size // 2], padded[at, widest - 1 - (size - 1) // 2]
    return (low + high) / 2, padded[:, -1]


class SinceLast:
    """Maxima over the windows since the last grid point, per slot, across blocks."""

    def __init__(self, slots: int):
        self.carry: list[np.ndarray | None] = [None] * slots

    def add(self, values: np.ndarray, live: np.ndarray, ends: list[list[int]]) -> list[np.ndarray]:
        """values [W, B, HV, Q], live [W, B]; slot b has grid points after steps ends[b]. Returns [points, HV, Q] of
        every slot. NaN wins over any number."""
        values = np.where(live[:, :, None, None], values, -np.inf)
        found = []
        for b, steps in enumerate(ends):
            mine, carry = values[:, b], self.carry[b]
            if carry is not None:
                mine = mine.copy()
                mine[0] = np.maximum(mine[0], carry)
            bounds = [0, *(s + 1 for s in steps)]
            tail = bounds[-1] < len(mine)
            maxima = np.maximum.reduceat(mine, bounds if tail else bounds[:-1], axis=0)
            self.carry[b] = maxima[-1] if tail else None
            found.append(maxima[: len(steps)])
        return found
