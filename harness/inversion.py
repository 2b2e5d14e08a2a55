"""What is asked of one window's inverse: how hard A is, and how far T_hat is from T. Batched over [N, m, m].

A is taken as exact, L = I + A, T = L^-1 by forward substitution in fp64, whose own error is about m * 2^-53. Errors and
residuals are of strictly lower entries: beside a unit diagonal a lost T looks right to three digits.

Of A     cond_2, cond_inf; Skeel || |T||L| ||_inf; power, max_p max_ij (|A|^p)_ij, the size of what a series cancels;
         growth, max_ij (I-|A|)^-1 over max_ij |T|, what any bound through the comparison matrix overstates T by;
         structural, max_ij |T_ij| - beta_i e^{G_i-G_j}, which no keys can raise above 0
Of T_hat error of T over max(1, max|T|), of D = R T' over max|D|, left residual T_hat L - I, right residual L T_hat - I,
         excess, max_ij |T_hat_ij| - beta_i e^{G_i-G_j}

Sources: Higham, Accuracy and Stability of Numerical Algorithms, ch. 8 (Skeel, comparison matrix); Du Croz & Higham,
IMA J. Numer. Anal. 12 (1992): an inverse has a small left or a small right residual, rarely both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Rounding
from harness.precision import FORMATS
from harness.reference.inverse import Inverse, substitution

EXACT = Arithmetic()
Numbers = dict[str, Tensor]  # [N] each
TINY = 1e-290  # a decay below it has lost digits to underflow


def largest(x: Tensor) -> Tensor:
    """max |x| of every matrix [..., m, m]; NaN where one holds a NaN."""
    return x.abs().amax((-1, -2))


def power(A: Tensor) -> Tensor:
    """max_p max_ij (|A|^p)_ij of A [..., m, m]."""
    a = A.abs()
    p, found = a, largest(a)
    for _ in range(A.shape[-1] - 2):
        p = p @ a
        found = torch.maximum(found, largest(p))
    return found


def condition(A: Tensor, T: Tensor) -> Numbers:
    """cond_2, cond_inf, skeel and power of A [..., m, m]; T its inverse."""
    L = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # the least singular value of L is lost below u times its largest; T has it as its largest
    largest_of = [finite_only(torch.linalg.svdvals, x)[..., 0] for x in (L, T)]
    rows = L.abs().sum(-1).amax(-1) * T.abs().sum(-1).amax(-1)
    return {
        "cond_2": largest_of[0] * largest_of[1],
        "cond_inf": rows,
        "skeel": (T.abs() @ L.abs()).sum(-1).amax(-1),
        "power": power(A),
    }


def difficulty(A: Tensor, T: Tensor, bound: Tensor) -> Numbers:
    """All that is asked of A [N, m, m]. T its inverse; bound: beta_i e^{G_i-G_j}, strictly lower."""
    return condition(A, T) | {
        "growth": largest(substitution.inverse(-A.abs(), EXACT)) / largest(T),
        "structural": above(T, bound),
    }


def quality(T_hat: Tensor, A: Tensor, T: Tensor, bound: Tensor) -> Numbers:
    """How good T_hat [N, m, m] is. A value that is not finite is worse than any: NaN or inf."""
    L = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    eye = L - A
    return {
        "error_T": largest((T_hat - T).tril(-1)) / largest(T),
        "left": largest((T_hat @ L - eye).tril(-1)),
        "right": largest((L @ T_hat - eye).tril(-1)),
        "excess": above(T_hat, bound),
    }


def above(T: Tensor, bound: Tensor) -> Tensor:
    """max |T_ij| - beta_i e^{G_i-G_j} over the strictly lower part, -inf for a window of 1."""
    lower = torch.ones(T.shape[-2:], dtype=torch.bool, device=T.device).tril(-1)
    return (T.abs() - bound).masked_fill(~lower, -torch.inf).amax((-1, -2))


def writes(method: Inverse, X: Tensor, R: Tensor, a: Arithmetic) -> Tensor:
    """D_hat [N, V, m] of right-hand sides R as a chunked verify takes it, X being what the inverse formed."""
    if method.solve is not None:
        return method.solve(R, X, a)
    dot = a.dots.solve
    return dot(dot.lhs(R), dot.rhs(X.mT.contiguous(), a.sites.inverse))


def error_of_writes(D_hat: Tensor, D: Tensor) -> Tensor:
    """max |D_hat - D| over max |D|, [N]."""
    return largest(D_hat - D) / largest(D)


def in_domain(A: Tensor, bound: Tensor) -> Tensor:
    """[N] bool: whether A_ij = bound_ij k_i.k_j for keys of norm 1 or less, beta_i e^{G_i-G_j} = bound_ij.

    That is so if no |A_ij| exceeds bound_ij and the matrix of A_ij / bound_ij with a unit diagonal has no eigenvalue
    below 0. What a reset has wiped out, bound below TINY, says nothing of its keys: a window with such entries is
    judged by the first condition alone. Slack: rounding, m^2 2^-50.
    """
    m = A.shape[-1]
    slack = m * m * 2.0**-50
    small = (A.abs() <= bound * (1 + slack)).all(-1).all(-1)
    known = (bound >= TINY) | ~torch.ones_like(bound).tril(-1).bool()
    P = torch.where(known, A / bound.clamp_min(TINY), 0.0).tril(-1)
    P = P + P.mT + torch.eye(m, dtype=A.dtype, device=A.device)
    least = finite_only(torch.linalg.eigvalsh, P)[..., 0]
    return small & ((least >= -slack) | ~known.all(-1).all(-1))


def finite_only(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of every matrix, NaN for those that hold a value LAPACK would refuse."""
    good = x.isfinite().all(-1).all(-1)
    found = f(torch.where(good[..., None, None], x, 0.0))
    return torch.where(good[..., None], found, torch.nan)


def roundoff(a: Arithmetic, products: bool = True) -> float:
    """u of an inverse: the coarsest of its site and of the operands of its products; 2u where those are truncated."""
    operands = (a.dots.inverse.left, a.dots.inverse.right) if products else ()
    return max(_unit(r) for r in (a.sites.inverse, *operands))


def _unit(r: Rounding) -> float:
    if r.exact:
        return FORMATS["fp64"].u
    return float(FORMATS[r.format].u ** r.parts * (1 if r.mode == "nearest" else 2))
