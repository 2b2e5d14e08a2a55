"""What the kernels read of a batch of windows: reference operands as arrays, heads leading, one entry a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Rounding
from harness.reference.inverse import INVERSES
from harness.window import Windows


class WindowRows(NamedTuple):
    """reference.WindowStep with slots and heads apart, X and F not transposed."""

    kq: np.ndarray  # [B, H, K, 2m]
    kq_score: np.ndarray
    v: np.ndarray  # [B, HV, V, m]
    beta: np.ndarray  # [B, HV, m]
    eR: np.ndarray
    eG: np.ndarray
    X: np.ndarray  # [B, HV, m, m]
    F: np.ndarray


class TokenRows(NamedTuple):
    """reference.TokenStep with lanes inside."""

    k: np.ndarray  # [B, H, m, K]
    q: np.ndarray
    v: np.ndarray  # [B, HV, m, V] beta v
    gain: np.ndarray  # [B, HV, m]
    eg: np.ndarray


def window_rows(windows: Windows, a: Arithmetic, inverse: str) -> list[WindowRows]:
    """The operands of every step, as the products read them."""

    def compute() -> list[WindowRows]:
        of = a.sites.key
        kq = windows.memo(("kq rows", of, a.conventions), lambda: torch.cat(windows.keys(a), -2).mT.contiguous())

        def read(how: Rounding) -> Tensor:
            return windows.memo(
                ("read kq rows", how, of, a.conventions), lambda: kq if how.keeps(of) else how(kq, of=of)
            )

        state, score = read(a.dots.state.right), read(a.dots.history_score.right)
        X = windows.formed(a, inverse)
        if INVERSES[inverse].explicit and not a.dots.solve.right.keeps(a.sites.inverse):
            X = a.dots.solve.right(X, of=a.sites.inverse)
        F = windows.scores(a)[1]
        F = F if a.dots.output.right.keeps(a.sites.gram) else a.dots.output.right(F, of=a.sites.gram)
        parts = (state, score, windows.v, windows.gates(a)[1], windows.before(a)[0], windows.decays(a)[0], X, F)
        return [WindowRows(*row) for row in zip(*(p.contiguous().numpy() for p in parts), strict=True)]

    return windows.memo(("window rows", a, inverse), compute)


def token_rows(windows: Windows, a: Arithmetic) -> list[TokenRows]:
    """The operands of every step of a token pass."""

    def compute() -> list[TokenRows]:
        k, q = windows.keys(a)
        beta, eg = windows.gates(a)[1], windows.token_decays(a)
        parts = (k, q, *token_scalars(windows.v.transpose(-1, -2), beta, eg, a))
        return [TokenRows(*row) for row in zip(*(p.contiguous().numpy() for p in parts), strict=True)]

    return windows.memo(("token rows", a), compute)


def stored_rows(windows: Windows, a: Arithmetic, names: tuple[str, ...]) -> list[tuple[np.ndarray, ...]]:
    """The record fields of every step as the ring keeps them, [B, heads, m, width] each."""

    def compute() -> list[tuple[np.ndarray, ...]]:
        return list(zip(*(windows.stored(a, name).contiguous().numpy() for name in names), strict=True))

    return windows.memo(("stored rows", a, names), compute)


def token_scalars(v: Tensor, beta: Tensor, eg: Tensor, a: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
    """beta v [.., m, V], what the prediction is taken off with, and e^g [.., m]."""
    return v * beta[..., None], beta * eg if a.conventions.decay == "before" else beta, eg


def array(x: Tensor) -> np.ndarray:
    """x as numpy sees it, the same memory; kept with the tensor, since asking anew costs more than a kernel call."""
    if "array" not in x.__dict__:
        x.array = x.numpy()  # type: ignore[attr-defined]
    return x.array  # type: ignore[attr-defined]


def empty(*size: int) -> Tensor:
    """An fp64 tensor that knows its array."""
    made = np.empty(size)
    x = torch.from_numpy(made)
    x.array = made  # type: ignore[attr-defined]
    return x
