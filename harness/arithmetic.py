"""Where a design rounds: named sites for values, dot precisions for products, conventions for the rest.

Everything runs on fp64; a site rounds a value at the moment it is produced, a product rounds its operands as they
are read and its result as it is accumulated. A site or product that is `exact` leaves the carrier alone, so that any
single rounding can be switched off, or be the only one left on.

Spelling in configuration files:
  rounding  format[x2][:mode]   bf16   tf32:zero   bf16x2 (a high and a low part)   bf16:stochastic   exact
  dot       precision[/n[s]]    ieee   tf32   tf32x3   bf16   bf16x2   bf16x4   fp16   exact; /32 accumulates in
                                blocks of 32 products in order, /32s in as many interleaved strides; ieee/1 is a chain
                                of fused multiply-adds
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from harness.errors import ConfigError
from harness.exponential import fast_exp
from harness.precision import FORMATS, MODES, narrow, round_to


@dataclass(frozen=True)
class Rounding:
    """A rounding of values. parts=2 keeps hi + lo, both in `format`."""

    format: str = "exact"
    mode: str = "nearest"
    parts: int = 1

    @staticmethod
    def parse(key: str, text: str) -> Rounding:
        """Read `format[x2][:mode]`; ConfigError naming `key` otherwise."""
        name, colon, mode = str(text).partition(":")
        base = name.removesuffix("x2")
        if base not in FORMATS and name != "exact":
            raise ConfigError(f"{key}: {text!r} names no format; have exact, {', '.join(FORMATS)}")
        if colon and mode not in MODES:
            raise ConfigError(f"{key}: {text!r} names no rounding mode; have {', '.join(MODES)}")
        if base in ("exact", "fp64"):
            return EXACT
        return Rounding(base, mode or "nearest", 1 if name == base else 2)

    def __str__(self) -> str:
        double = "x2" if self.parts == 2 else ""
        return self.format + double + ("" if self.mode == "nearest" else f":{self.mode}")

    @property
    def exact(self) -> bool:
        return self.format == "exact"

    def __call__(self, x: Tensor, key: Tensor | None = None, of: Rounding | None = None) -> Tensor:
        """x rounded, hi + lo for two parts. key [B] as in precision.round_to; of: what x was rounded to before."""
        if self.format == "exact":
            return x
        if self.parts == 1 and of is not None and of.within_fp32 and self.mode != "stochastic":
            return x if self.keeps(of) else narrow(x, FORMATS[self.format], self.mode)
        hi = round_to(x, FORMATS[self.format], self.mode, key)
        return hi if self.parts == 1 else hi + round_to(x - hi, FORMATS[self.format], self.mode, key)

    @property
    def nbytes(self) -> int:
        """Bytes a stored number takes, both parts of it; an exact one is an fp64 number."""
        return self.parts * FORMATS["fp64" if self.exact else self.format].nbytes

    @property
    def native(self) -> bool:
        """Whether fp32 operations of the host round this way."""
        return self.format == "fp32" and self.mode == "nearest" and self.parts == 1

    @property
    def high(self) -> Rounding:
        """The rounding of the high part alone."""
        return self if self.parts == 1 else replace(self, parts=1)

    def into(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """x rounded in place, for large states that nobody else holds."""
        if self.native:
            return x.copy_(x.to(torch.float32))
        return self(x, key)

    def pair(self, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(hi, lo): what a store of two parts writes."""
        hi = replace(self, parts=1)(x, key)
        return hi, replace(self, parts=1)(x - hi, key)

    @property
    def within_fp32(self) -> bool:
        """Whether every value it yields is an fp32 number, so that fp32 casts lose nothing."""
        return self.parts == 1 and self.format in ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e4m3_nan")

    @lru_cache  # noqa: B019 (roundings are few and live as long as the program)
    def keeps(self, source: Rounding) -> bool:
        """Whether every value that `source` yields passes through unchanged."""
        if self.exact or (self == source and self.parts == 1):
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
    decayed: Rounding = EXACT  # e^g S before a token's write is added, in recurrence, replay and fold_current
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
        if not found or found[1] not in DOTS or (found[2] and int(found[2]) == 0):
            raise ConfigError(f"{key}: {text!r} is no dot precision; have {', '.join(DOTS)}, each with /n or /ns")
        return replace(DOTS[found[1]], block=int(found[2] or 0), strided=bool(found[3]))

    def lhs(self, x: Tensor, of: Rounding = EXACT) -> Operand:
        """The left operand as the unit reads it; `of` says what it was rounded to before."""
        return _read(x, self.left, of, self.x3)

    def rhs(self, y: Tensor, of: Rounding = EXACT) -> Operand:
        """The right operand [..., n, C] as the unit reads it: in blocks, C columns for each of them."""
        read = _read(y, self.right, of, self.x3)
        if not self.blocked(y.shape[-2]):
            return read
        # masked copies side by side, so that one product yields every block's sum
        masks = block_masks(y.shape[-2], self.block, self.strided, y.device)
        return tuple((part[..., None, :] * masks[:, :, None]).flatten(-2) for part in read)

    def blocked(self, n: int) -> bool:
        """Whether a sum of n products is rounded on the way."""
        return 0 < self.block < n

    def __call__(self, x: Operand, y: Operand, init: Tensor | None = None) -> Tensor:
        """init + x @ y over read operands; x [N, R, n], y [N, n, C or blocks*C], init [N, R, C]."""
        acc = self.accumulate
        blocked = self.blocked(x[0].shape[-1])
        if init is not None:
            init = acc(init)
        total = torch.bmm(x[0], y[0]) if init is None or blocked or self.x3 else torch.baddbmm(init, x[0], y[0])
        if self.x3 and len(x) == 2 and len(y) == 2:
            total = total.baddbmm_(x[1], y[1], alpha=-1)
        if self.x3 and init is not None and not blocked:
            # the three products share an accumulator; what was there before is added to it in fp32
            return _F32(init + acc(total))
        return self.chain(total, -(-x[0].shape[-1] // self.block), init) if blocked else acc(total)

    def chain(self, sums: Tensor, blocks: int, total: Tensor | None) -> Tensor:
        """Add the sums of the blocks, [N, R, blocks*C], one after the other, rounding each time.

        Onto a total each is added as it is, as a fused unit does; without one they are partial sums, rounded too.
        """
        if total is not None:
            for part in sums.chunk(blocks, -1):
                total = self.accumulate(total + part)
            return total
        if self.accumulate.native:
            # adding fp32 numbers in fp32 is that rounding
            first, *parts = sums.to(torch.float32).chunk(blocks, -1)
            for part in parts:
                first = first + part
            return first.to(torch.float64)
        first, *parts = self.accumulate(sums).chunk(blocks, -1)
        for part in parts:
            first = self.accumulate(first + part)
        return first


def _read(x: Tensor, how: Rounding, of: Rounding, x3: bool = False) -> Operand:
    if how.keeps(of):
        return (x,)
    if how.parts == 1:
        return (how(x, of=of),)
    hi, lo = how.pair(x)
    if x3:
        # the high part is converted, the low part is what the tensor core reads of the rest
        lo = replace(how.high, mode="zero")(x - hi)
    return (hi + lo, lo)


@lru_cache
def block_masks(n: int, block: int, strided: bool, device: torch.device) -> Tensor:
    """[n, blocks] fp64 indicator of the block that takes each of n products."""
    blocks = -(-n // block)
    index = torch.arange(n, device=device)
    owner = index % blocks if strided else index // block
    return (owner[:, None] == torch.arange(blocks, device=device)).to(torch.float64)


_F32, _F32Z = Rounding("fp32"), Rounding("fp32", "zero")
_TF32, _TF32X2 = Rounding("tf32", "zero"), Rounding("tf32", parts=2)
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
    # both operands in two halves, all four products kept
    "bf16x4": Dot(Rounding("bf16", parts=2), Rounding("bf16", parts=2), _F32Z),
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
    exp: str = "rounded"  # e^x of log decays in fp32: rounded once, or fast, as a GPU has it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.sites, self.dots, self.conventions, self.exp)))

    def __hash__(self) -> int:
        # asked for at every step: the parts are hashed once
        return self._hash  # type: ignore[attr-defined]

    @property
    def fast(self) -> bool:
        """Whether e^x is the fast exponential: where decays are fp32, as that has no other format."""
        return self.exp == "fast" and self.sites.decay.native

    @property
    def decay(self) -> tuple[Rounding, bool]:
        """All that e^x of a log decay depends on."""
        return self.sites.decay, self.fast

    def exponential(self, x: Tensor) -> Tensor:
        """e^x of log decays at site `decay`."""
        return self.sites.decay(fast_exp(x) if self.fast else x.exp())

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
