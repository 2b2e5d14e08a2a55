"""What the inputs do to (I+A)^-1, and what a design's inverse does to the state.

Conditioning belongs to the inputs and is taken from the exact A. The residual and the window operator belong to a
design: with an inexact T a window maps a state error E to E M, M = e^{G_m} I - K' X K with
X = diag(beta e^G) T' diag(e^{G_m-G}); for T = (I+A)^-1 that is the product of the tokens' own maps, norm <= e^{G_m}.
M differs from e^{G_m} I only on the span of the keys, so m x m problems decide: with Gram matrix P = K K',
||M||^2 is the larger of e^{2G_m} and e^{2G_m} + lambda_max(P^{1/2} Z P^{1/2}), Z = X'PX - e^{G_m}(X + X'), and the
spectral radius is the larger of e^{G_m} and that of e^{G_m} I - X P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot
from harness.inversion import condition
from harness.reference.inverse import inverse_of
from harness.tokens import on_cpu
from harness.window import Windows

EXACT = Arithmetic()
Found = Callable[[], np.ndarray]  # has it, waits for it or computes it


def conditioning(windows: Windows, a: Arithmetic = EXACT) -> np.ndarray:
    """[W, B, HV, 5]: cond_2, cond_inf, Skeel || |T||I+A| ||_inf, max_p max (|A|^p)_ij, gate span max G - min G."""
    return begin_conditioning(windows, a)()


def inner(windows: Windows, a: Arithmetic, inverse: str, operator: bool) -> np.ndarray:
    """[W, B, HV, 1 or 3]: residual, and with `operator` norm and spectral radius of the window operator."""
    return begin_inner(windows, a, inverse, operator)()


def begin_conditioning(windows: Windows, a: Arithmetic = EXACT) -> Found:
    """Begin `conditioning`: on a device at once, so that it decodes while the CPU computes; else when asked for."""
    from harness.compiled import inspect

    if on_cpu(windows.g):
        return lambda: inspect.conditioning(windows, a)()
    return inspect.conditioning(windows, a, threads=True)


def begin_inner(windows: Windows, a: Arithmetic, inverse: str, operator: bool) -> Found:
    """Begin `inner`, likewise."""
    from harness.compiled import inspect

    if windows.m > windows.shape.K:
        return lambda: inner_numbers(windows, a, inverse, operator).cpu().numpy()
    if on_cpu(windows.g):
        return lambda: inspect.inner(windows, a, inverse, operator)()
    return inspect.inner(windows, a, inverse, operator, threads=True)


def inner_numbers(windows: Windows, a: Arithmetic, inverse: str, operator: bool) -> Tensor:
    """inner by batched operations."""
    return torch.stack([residual(windows, a, inverse), *(window_operator(windows, a, inverse) if operator else ())], -1)


def condition_numbers(windows: Windows, a: Arithmetic = EXACT) -> Tensor:
    """conditioning by batched operations."""
    found = condition(windows.scores(a)[0], windows.formed(a, "substitution"))
    G = windows.gates(a)[0].cumsum(-1)
    G = torch.cat((torch.zeros_like(G[..., :1]), G), -1)
    # a padded lane repeats the G before it and cannot widen the span
    span = G.amax(-1) - G.amin(-1)
    return torch.stack((*found.values(), span), -1)


def residual(windows: Windows, a: Arithmetic, inverse: str) -> Tensor:
    """max |strictly lower part of (I+A)T - I| [W, B, HV], with the design's own A and T, evaluated in fp64."""
    A, T = windows.scores(a)[0], windows.formed(a, inverse)
    return (A @ T + T).tril(-1).abs().amax((-1, -2))


def between_keys(windows: Windows, a: Arithmetic, inverse: str) -> Tensor:
    """X = diag(beta e^G) T' diag(e^{G_m-G}) of M = e^{G_m} I - K' X K, [W, B, HV, m, m]."""
    row = windows.gates(a)[1] * windows.before(a)[0]
    return row[..., None] * windows.formed(a, inverse).transpose(-1, -2) * windows.decays(a)[1][..., -1:, :]


def window_operator(windows: Windows, a: Arithmetic, inverse: str) -> tuple[Tensor, Tensor]:
    """Norm and spectral radius of the window operator, [W, B, HV] each. NaN where T is not finite."""
    group, m = windows.shape.group, windows.m
    P = windows.products(a, Dot())[..., : windows.m, :]
    P = P.repeat_interleave(group, 2) if group > 1 else P
    X, last = between_keys(windows, a, inverse), windows.decays(a)[0][..., -1]
    Z = X.transpose(-1, -2) @ P @ X - last[..., None, None] * (X + X.transpose(-1, -2))
    finite = torch.isfinite(X).all(-1).all(-1)
    if m > windows.shape.K:
        # fewer dimensions than keys: the span is everything, and M itself is the smaller matrix
        k = windows.keys(a)[0]
        keys = k.repeat_interleave(group, 2) if group > 1 else k
        M = last[..., None, None] * torch.eye(windows.shape.K, dtype=P.dtype, device=P.device)
        M = torch.where(finite[..., None, None], M - keys.mT @ X @ keys, 0.0)
        found = torch.linalg.matrix_norm(M, 2), torch.linalg.eigvals(M).abs().amax(-1)
        return found[0].masked_fill(~finite, torch.nan), found[1].masked_fill(~finite, torch.nan)
    Z, XP = (torch.where(finite[..., None, None], x, 0.0) for x in (Z, X @ P))
    # rounding can push a Gram matrix of repeated keys below zero by its own size; 1e-13 is above that
    root = torch.linalg.cholesky_ex(P + 1e-13 * torch.eye(m, dtype=P.dtype, device=P.device))[0]
    excess = torch.linalg.eigvalsh(root.transpose(-1, -2) @ Z @ root)[..., -1]
    wide = m < windows.shape.K
    outside = last if wide else torch.zeros_like(last)
    norm = torch.maximum((last.square() + excess).clamp_min(0).sqrt(), outside)
    radius = outside.clone()
    # below e^{G_m} the norm already settles the radius
    open_ = finite & ((norm > last * (1 + 1e-12)) | ~torch.tensor(wide, device=P.device))
    if open_.any():
        eye = torch.eye(m, dtype=P.dtype, device=P.device)
        inner = torch.linalg.eigvals(last[open_][:, None, None] * eye - XP[open_]).abs().amax(-1)
        radius[open_] = torch.maximum(radius[open_], inner)
    return norm.masked_fill(~finite, torch.nan), radius.masked_fill(~finite, torch.nan)


def has_operator(verify: str, fold: str, inverse: str) -> bool:
    """Whether a design's checkpoint passes through an inverse that can be looked at."""
    return verify == "window" and fold == "product" and inverse_of(inverse).explicit
