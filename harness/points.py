"""The windows that inverses are tried on: a grid of coherence, beta and decay, the named families, and two outsiders.

Every input gives `draws` windows of m tokens, from a seed; A and its bound beta_i e^{G_i-G_j} are exact but for fp64.
Grid keys are sqrt(rho) c + sqrt(1-rho) x with one direction c per window, so rho is their mean cosine; its numbers are
off the dyadic grid, where integer arithmetic hides what cancels. Outside the model's domain lie
  normal_triangular  strictly lower N(0, 1) entries (fla-org/flash-linear-attention#537): |A| > 1
  unit_entries       A_ij = +-0.97 at random: small entries, but no keys have such products
and whatever a file of matrices holds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness import inversion
from harness.arithmetic import Arithmetic
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.errors import ConfigError
from harness.families import FAMILIES
from harness.map_config import ConditioningConfig
from harness.reference.inverse import substitution
from harness.tokens import Shape, Tokens
from harness.window import Windows

OUTSIDERS = ("normal_triangular", "unit_entries")
NAMED = (*FAMILIES, *OUTSIDERS)
HEADS = 8  # of a family, one per trained class of gates
FULL = 32  # the longest window with all draws; longer ones have fewer, as cost grows with the cube


@dataclass(frozen=True)
class Input:
    """One named input; coherence, beta and g where all its windows share them."""

    name: str
    coherence: float | None = None
    beta: float | None = None
    g: float | None = None


@dataclass
class Batch:
    """Windows of one length: A and beta_i e^{G_i-G_j}, [inputs, draws, m, m] fp64, strictly lower."""

    inputs: list[Input]
    A: Tensor
    bound: Tensor

    @property
    def m(self) -> int:
        return self.A.shape[-1]

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """A and bound of all windows, [inputs * draws, m, m]."""
        return self.A.flatten(0, 1), self.bound.flatten(0, 1)

    @cached_property
    def T(self) -> Tensor:
        """(I+A)^-1 in fp64, [inputs * draws, m, m]."""
        return substitution.inverse(self.flat[0], inversion.EXACT)

    @cached_property
    def difficulty(self) -> inversion.Numbers:
        """harness.inversion.difficulty of every window."""
        return inversion.difficulty(self.flat[0], self.T, self.flat[1])


def grid(config: ConditioningConfig) -> list[Input]:
    """Every combination of coherence, beta and g."""
    axes = itertools.product(config.coherence, config.beta, config.g)
    return [Input(f"cos {rho:g}, beta {beta:g}, g {g:g}", rho, beta, g) for rho, beta, g in axes]


def batch(config: ConditioningConfig, m: int, K: int, seed: int) -> Batch:
    """All inputs of the grid and all named ones, windows of m tokens with keys of K numbers."""
    draws = max(1, config.draws * FULL**2 // max(m, FULL) ** 2)
    inputs = grid(config) + [Input(name) for name in names(config)]
    if not inputs:
        raise ConfigError("conditioning.inputs: none, and the grid of coherence, beta and g is empty")
    parts = [_drawn(x, m, K, draws, seed + i) for i, x in enumerate(inputs)]
    A, bound = (torch.stack(list(x)) for x in zip(*parts, strict=True))
    return Batch(inputs, A, bound)


def _drawn(x: Input, m: int, K: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    if x.name in OUTSIDERS:
        return _outside(x.name, m, draws, seed)
    return scores(_family(x.name, m, K, draws, seed) if x.beta is None else _coherent(x, m, K, draws, seed), draws)


def scores(windows: Windows, draws: int) -> tuple[Tensor, Tensor]:
    """A and bound of the first `draws` windows, [draws, m, m]."""
    exact, m = Arithmetic(), windows.m
    E, beta = windows.before(exact)[1], windows.gates(exact)[1]
    both = windows.scores(exact)[0], (beta[..., None] * E).tril(-1)
    A, bound = (x.reshape(-1, m, m)[:draws].clone() for x in both)
    return A, bound


def _coherent(x: Input, m: int, K: int, draws: int, seed: int) -> Windows:
    draw = torch.Generator().manual_seed(seed)
    noise, common = (torch.randn(1, draws, n, 1, K, dtype=torch.float64, generator=draw) for n in (m, 1))
    rho = x.coherence or 0.0
    k = (rho**0.5 * common + (1 - rho) ** 0.5 * noise).to(torch.bfloat16).double()
    gates = torch.ones(1, draws, m, 1, dtype=torch.float64)
    tokens = Tokens(torch.zeros_like(k), k, torch.zeros_like(k[..., :1]), gates * (x.g or 0.0), gates * (x.beta or 0.0))
    return Windows(tokens, np.full((1, draws), m), Shape(1, 1, 1, K))


def _family(name: str, m: int, K: int, draws: int, seed: int) -> Windows:
    """Windows of the last quarter of a run, where a looping text loops; one head per class of gates."""
    heads = min(HEADS, draws)
    count = -(-draws // heads)
    shape = Shape(heads, heads, 1, K)
    stream = Stream(DecodeConfig(family=name, tokens=4 * count * m, seed=seed), shape)
    tokens = stream.tokens(torch.tensor([3 * count * m]), count * m)
    tokens = tokens.map(lambda t: t.view(count, 1, m, *t.shape[2:]))
    return Windows(tokens, np.full((count, 1), m), shape)


def _outside(name: str, m: int, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(draws, m, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    A = x if name == "normal_triangular" else 0.97 * x.sign()
    return A.tril(-1), torch.ones_like(A).tril(-1)


def given(path: str) -> Batch:
    """The matrices of a .npy file, [N, m, m] or [m, m], as one input, judged as if beta were 1 and nothing decayed.

    Values that are not finite are allowed: they are measured like any other. Raises ConfigError naming the file.
    """
    where = f"conditioning.matrices: {path}"
    try:
        x = np.load(Path(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{where}: not a readable .npy file ({str(error).splitlines()[0]})") from None
    if not isinstance(x, np.ndarray) or x.ndim not in (2, 3) or x.shape[-1] != x.shape[-2] or not x.size:
        raise ConfigError(f"{where}: holds no square matrices [N, m, m]")
    if x.dtype.kind not in "fiu":
        raise ConfigError(f"{where}: holds {x.dtype}, no real numbers")
    A = torch.from_numpy(x.astype(np.float64)).reshape(1, -1, *x.shape[-2:])
    if (upper := A.triu()).ne(0).any():
        n, i, j = upper[0].ne(0).nonzero()[0].tolist()
        raise ConfigError(f"{where}: matrix {n} has an entry at row {i}, column {j}; A is strictly lower triangular")
    return Batch([Input(Path(path).name)], A, torch.ones_like(A).tril(-1))


def names(config: ConditioningConfig) -> list[str]:
    """The named inputs of a run. Raises ConfigError for one that has no name here."""
    for name in config.inputs or ():
        if name not in NAMED:
            raise ConfigError(f"conditioning.inputs: {name!r} is not one of {', '.join(NAMED)}")
    return list(NAMED if config.inputs is None else config.inputs)
