"""Where a design rounds: named sites for values, dot precisions for products, conventions for the rest.

Everything runs on fp64; a site rounds a value at the moment it is produced, a product rounds its operands as they
are read and its result as it is accumulated. A site or product that is `exact` leaves the carrier alone, so that any
single rounding can be switched off, or be the only one left on.

Spelling in configuration files:
  rounding  format[x2][:mode]   bf16   tf32:zero   bf16x2 (a high and a low part)   bf16:stochastic   exact
  dot       precision[/n[s]]    ieee   tf32   tf32x3   bf16   bf16x2   fp16   exact; /32 accumulates in blocks of
                                32 products in order, /32s in as many interleaved strides
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from harness.errors import ConfigError
from harness.precision import FORMATS, MODES, round_to


@dataclass(frozen=True)
class Rounding:
    """A rounding of values. parts=2 keeps hi + lo, both in `format`."""

    format: str = "exact"
    mode: str = "nearest"
    parts: int = 1

    @staticmethod
    def parse(key: str, text: str) -> Rounding:
        """Read `format[x2][:mode]`; ConfigError naming `key` otherwise."""
        name, _, mode = str(text).partition(":")
        base, double, _ = name.partition("x2")
        if base not in FORMATS and base != "exact":
            raise ConfigError(f"{key}: {text!r} names no format; have exact, {', '.join(FORMATS)}")
        if mode and mode not in MODES:
            raise ConfigError(f"{key}: {text!r} names no rounding mode; have {', '.join(MODES)}")
        return Rounding("exact" if base == "fp64" else base, mode or "nearest", 2 if double else 1)

    def __str__(self) -> str:
        double = "x2" if self.parts == 2 else ""
        return self.format + double + ("" if self.mode == "nearest" else f":{self.mode}")

    @property
    def exact(self) -> bool:
        return self.format == "exact"

    def __call__(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """x rounded, hi + lo for two parts. key [B] as in precision.round_to."""
        if self.format == "exact":
            return x
        hi = round_to(x, FORMATS[self.format], self.mode, key)
        return hi if self.parts == 1 else hi + round_to(x - hi, FORMATS[self.format], self.mode, key)

    def pair(self, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(hi, lo): what a store of two parts writes."""
        hi = replace(self, parts=1)(x, key)
        return hi, replace(self, parts=1)(x - hi, key)

    def keeps(self, source: Rounding) -> bool:
        """Whether every value that `source` yields passes through unchanged."""
        if self.exact or self == source:
            return True
        if source.exact or source.parts > 1 or self.parts > 1:
            return False
        mine, theirs = FORMATS[self.format], FORMATS[source.format]
        deepest = theirs.emin - theirs.p >= mine.emin - mine.p
        return mine.p >= theirs.p and mine.emax >= theirs.emax and mine.max >= theirs.max and deepest


EXACT = Rounding()


@dataclass(frozen=True)
class Sites:
    """Every value that may be rounded, in the order in which a step meets them."""

    gate: Rounding = EXACT  # g and beta as they enter
    decay: Rounding = EXACT  # cumulative sums, their differences and exp; exact: each (j, i] is summed by itself
    key: Rounding = EXACT  # k_hat and q_hat after the norm
    state_operand: Rounding = EXACT  # the checkpoint as it enters a product
    gram: Rounding = EXACT  # A and the causal scores of the window
    history_score: Rounding = EXACT  # k_hat of the ring times k_hat, q_hat of the window
    history_d: Rounding = EXACT  # W d, the decayed writes of the ring
    rhs: Rounding = EXACT  # R
    inverse: Rounding = EXACT  # every accumulation inside the inverse, or inside the solve
    d: Rounding = EXACT  # D as used for outputs
    store_v: Rounding = EXACT
    store_k: Rounding = EXACT
    store_k_hat: Rounding = EXACT
    store_d: Rounding = EXACT
    store_g: Rounding = EXACT
    store_beta: Rounding = EXACT
    fold_d: Rounding = EXACT  # W d as the fold reads it
    fold_k: Rounding = EXACT  # k_hat as the fold reads it
    step: Rounding = EXACT  # the running state after each token, in recurrence and replay
    checkpoint: Rounding = EXACT
    snapshot: Rounding = EXACT  # a state kept per draft token
    output: Rounding = EXACT


Operand = tuple[Tensor, ...]  # (value,), or (hi + lo, lo) where two parts are read

SITES = tuple(f.name for f in fields(Sites))


@dataclass(frozen=True)
class Dot:
    """How one product is computed: operands as read, and the accumulator."""

    left: Rounding = EXACT
    right: Rounding = EXACT
    accumulate: Rounding = EXACT
    x3: bool = False  # both operands in two parts, the product of the low parts left out
    block: int = 0  # products summed between two roundings of the accumulator; 0: all
    strided: bool = False  # blocks interleave instead of following each other

    @staticmethod
    def parse(key: str, text: str) -> Dot:
        """Read `precision[/n[s]]`; ConfigError naming `key` otherwise."""
        found = re.fullmatch(r"(\w+)(?:/(\d+)(s?))?", str(text))
        if not found or found[1] not in DOTS or found[2] == "0":
            raise ConfigError(f"{key}: {text!r} is no dot precision; have {', '.join(DOTS)}, each with /n or /ns")
        return replace(DOTS[found[1]], block=int(found[2] or 0), strided=bool(found[3]))

    def lhs(self, x: Tensor, of: Rounding = EXACT) -> Operand:
        """The left operand as the unit reads it; `of` says what it was rounded to before."""
        return _read(x, self.left, of)

    def rhs(self, y: Tensor, of: Rounding = EXACT) -> Operand:
        """The right operand as the unit reads it."""
        return _read(y, self.right, of)

    def __call__(self, x: Operand, y: Operand, init: Tensor | None = None) -> Tensor:
        """init + x @ y over read operands; x [N, R, n], y [N, n, C], init [N, R, C]."""
        acc = self.accumulate
        if init is not None:
            init = acc(init)
        if self.block and self.block < x[0].shape[-1]:
            return self._blocked(x, y, init)
        total = torch.bmm(x[0], y[0]) if init is None else torch.baddbmm(init, x[0], y[0])
        if self.x3 and len(x) == 2 and len(y) == 2:
            total = total.baddbmm_(x[1], y[1], alpha=-1)
        return acc(total)

    def _blocked(self, x: Operand, y: Operand, init: Tensor | None) -> Tensor:
        # masked copies of the right operand side by side: one product yields every block's sum
        masks = _masks(x[0].shape[-1], self.block, self.strided, x[0].device)
        n, _, columns = y[0].shape
        spread = [(part[..., None] * masks[:, None, :]).flatten(2) for part in y]
        sums = torch.bmm(x[0], spread[0])
        if self.x3 and len(x) == 2 and len(y) == 2:
            sums = sums.baddbmm_(x[1], spread[1], alpha=-1)
        sums = self.accumulate(sums).view(n, -1, columns, masks.shape[1])
        total = init
        for part in sums.unbind(-1):
            total = part if total is None else self.accumulate(total + part)
        assert total is not None
        return total


def _read(x: Tensor, how: Rounding, of: Rounding) -> Operand:
    if how.keeps(of):
        return (x,)
    if how.parts == 1:
        return (how(x),)
    hi, lo = how.pair(x)
    return (hi + lo, lo)


@lru_cache
def _masks(n: int, block: int, strided: bool, device: torch.device) -> Tensor:
    """[n, blocks] fp64 indicator of the block that takes each of n products."""
    blocks = -(-n // block)
    index = torch.arange(n, device=device)
    owner = index % blocks if strided else index // block
    return (owner[:, None] == torch.arange(blocks, device=device)).to(torch.float64)


_F32, _F32Z = Rounding("fp32"), Rounding("fp32", "zero")
_TF32, _TF32X2 = Rounding("tf32", "zero"), Rounding("tf32", "zero", 2)
DOTS: dict[str, Dot] = {
    "exact": Dot(),
    "ieee": Dot(_F32, _F32, _F32),
    # tensor cores: tf32 operands are truncated and every accumulator truncates, as measured on an H200
    "tf32": Dot(_TF32, _TF32, _F32Z),
    "tf32x3": Dot(_TF32X2, _TF32X2, _F32Z, x3=True),
    "bf16": Dot(Rounding("bf16"), Rounding("bf16"), _F32Z),
    "fp16": Dot(Rounding("fp16"), Rounding("fp16"), _F32Z),
    # an fp32 left operand in two bf16 halves against a bf16 right one
    "bf16x2": Dot(Rounding("bf16", parts=2), Rounding("bf16"), _F32Z),
}


@dataclass(frozen=True)
class Dots:
    """Every product of a step."""

    gram: Dot = Dot()  # k_hat k_hat', q_hat k_hat'
    inverse: Dot = Dot()  # products inside a series inverse
    state: Dot = Dot()  # checkpoint times k_hat, q_hat
    history_score: Dot = Dot()  # ring k_hat times k_hat, q_hat
    history: Dot = Dot()  # W d times those scores
    solve: Dot = Dot()  # R T'
    output: Dot = Dot()  # D times the causal scores
    fold: Dot = Dot()  # W d times k_hat, onto the checkpoint
    recurrent: Dot = Dot()  # S k_hat and S q_hat of one token


PRODUCTS = tuple(f.name for f in fields(Dots))


@dataclass(frozen=True)
class Conventions:
    """What "exact" means where projects differ; the defaults are the oracle's (peers.md: reference semantics)."""

    eps: float = 1e-6
    eps_at: str = "sum"  # sum: x / sqrt(sum x^2 + eps); mean: eps on the mean; outside: x / (sqrt(sum x^2) + eps)
    beta: Rounding = EXACT  # beta once more, after the sigmoid
    decay: str = "before"  # before: S decays, then the error is taken; after: the error sees the undecayed S


@dataclass(frozen=True)
class Arithmetic:
    """Sites, products and conventions of one design. Hashable: equal arithmetic shares derived quantities."""

    sites: Sites = Sites()
    dots: Dots = Dots()
    conventions: Conventions = Conventions()

    def shown(self) -> dict[str, str]:
        """Site and product -> spelling, for manifests."""
        return {s: str(getattr(self.sites, s)) for s in SITES} | {
            f"dot.{p}": dot_name(getattr(self.dots, p)) for p in PRODUCTS
        }


def dot_name(dot: Dot) -> str:
    """The spelling that Dot.parse reads."""
    plain = replace(dot, block=0, strided=False)
    name = next(n for n, d in DOTS.items() if d == plain)
    return name + (f"/{dot.block}{'s' if dot.strided else ''}" if dot.block else "")
