"""What the kernels read of a batch of windows, as contiguous arrays of every step at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot
from harness.compiled.measure import products
from harness.compiled.rounding import code
from harness.reference.inverse import inverse_of
from harness.window import Windows, normalise, products_key


class Given(NamedTuple):
    """What a chunked window reads; keys are rounded by the kernel."""

    unit: np.ndarray  # [W, B, H, 2m, K] k_hat then q_hat
    v: np.ndarray  # [W, B, HV, m, V]
    beta: np.ndarray  # [W, B, HV, m]
    eR: np.ndarray
    eG: np.ndarray
    X: np.ndarray  # [W, B, HV, m, m] as the solve reads it
    F: np.ndarray


class Tokens(NamedTuple):
    """What a token pass reads; columns follow one another."""

    k: np.ndarray  # [..., H, m, K]
    v: np.ndarray  # [..., HV, m, V] beta v
    beta: np.ndarray  # [..., HV, m]
    eg: np.ndarray


class Stored(NamedTuple):
    """The fields of every lane as the ring keeps them, then what a replay makes of them; empty where not kept."""

    g: np.ndarray  # [W, B, HV, m], as it enters where the record is cumulative
    v: np.ndarray  # [W, B, HV, m, V]
    k: np.ndarray  # [W, B, H, m, K]
    beta: np.ndarray  # [W, B, HV, m]
    replay_k: np.ndarray
    replay_v: np.ndarray
    eg: np.ndarray


def given(windows: Windows, a: Arithmetic, inverse: str) -> Given:
    """The operands of every step of a design."""

    def compute() -> Given:
        take_products(windows, a, a.dots.gram)
        X = windows.formed(a, inverse)
        if inverse_of(inverse).explicit and not a.dots.solve.right.keeps(a.sites.inverse):
            X = a.dots.solve.right(X, of=a.sites.inverse)
        F = windows.scores(a)[1]
        F = F if a.dots.output.right.keeps(a.sites.gram) else a.dots.output.right(F, of=a.sites.gram)
        parts = windows.gates(a)[1], windows.before(a)[0], windows.decays(a)[0], X, F
        unit = array(windows.unit(a.conventions))
        return Given(unit, array(windows.v), *(array(x.contiguous()) for x in parts))

    return windows.memo(("given", a, inverse), compute)


def take_products(windows: Windows, a: Arithmetic, dot: Dot) -> None:
    """Compute windows.products here, in cache, and leave it where Windows looks for it."""
    if dot.blocked(windows.shape.K):
        return

    def compute() -> Tensor:
        unit, of = windows.unit(a.conventions), a.sites.key
        out = empty(*unit.shape[:3], 2 * windows.m, windows.m)
        products(array(unit), code(of), code(dot.left, of), code(dot.right, of), code(dot.accumulate), array(out))
        return out

    windows.memo(products_key(a, dot), compute)


def pass_tokens(k: Tensor, v: Tensor, beta: Tensor, eg: Tensor) -> Tokens:
    """Operands of a token pass from keys k, v [..., m, V] and beta, eg [..., m]."""
    return Tokens(*(array(x.contiguous()) for x in (k, v * beta[..., None], beta, eg)))


def token_operands(windows: Windows, a: Arithmetic) -> Tokens:
    """The operands of every step of a token pass; k is left out, it comes rounded from windows.unit."""

    def compute() -> Tokens:
        return pass_tokens(torch.empty(0), windows.v, windows.gates(a)[1], windows.token_decays(a))

    return windows.memo(("token operands", a.sites.gate, a.decay, a.conventions), compute)


def replay_operands(v: Tensor, k: Tensor, g: Tensor, beta: Tensor, a: Arithmetic) -> Tokens:
    """What a replay makes of raw records: keys normalised and not yet rounded."""
    return pass_tokens(normalise(k, a.conventions), v, beta, a.exponential(g))


def stored(windows: Windows, a: Arithmetic, records: tuple[str, ...], cumulative: bool, replay: bool) -> Stored:
    """The fields of every step of a design that keeps `records`; with what a replay needs if replay."""

    def compute() -> Stored:
        W, B, s = windows.W, windows.B, windows.shape
        none = np.empty((W, B, s.HV, 0)), np.empty((W, B, s.HV, 0, 0))
        g = windows.gates(a)[0] if cumulative else windows.stored(a, "g")
        if "v" not in records:
            return Stored(array(g.contiguous()), none[1], none[1], none[0], none[1], none[1], none[0])
        v, k, beta = (windows.stored(a, name).contiguous() for name in ("v", "k", "beta"))
        raw = array(g.contiguous()), array(v), array(k), array(beta)
        if not replay:
            return Stored(*raw, none[1], none[1], none[0])
        made = replay_operands(v, k, g, beta, a)
        return Stored(*raw, made.k, made.v, made.eg)

    return windows.memo(("stored", a, records, cumulative, replay), compute)


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
