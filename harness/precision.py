"""One rounder: round_to(x, format, mode, key) on an fp64 carrier, exact from any fp64 value.

The value is divided by the quantum of its binade, rounded to an integer and multiplied back; every step but the
integer rounding is exact, so no format is reached through another one (torch and ml_dtypes go through fp32 and
round twice). Subnormals are gradual: below the smallest normal number the quantum stops shrinking.

Formats (significand bits with the hidden one, exponent range, what an overflow becomes):

1. fp64  53  the carrier itself; rounding to it does nothing
2. fp32  24  inf          3. tf32  11, exponent range of fp32, inf      4. bf16  8, exponent range of fp32, inf
5. fp16  11  inf          6. e5m2  3  inf
7. e4m3  4   saturates at 448, as torch's float8_e4m3fn cast does (2.13, infinities included)
8. e4m3_nan  the same grid, NaN beyond 448 as in ml_dtypes

Modes:

1. nearest     ties to even
2. zero        toward zero; never leaves the finite range
3. stochastic  up with probability equal to the distance from the lower neighbour; needs a key

Sources: Higham & Pranesh, SISC 41 (2019), for simulating formats on a wider carrier; Fasi & Mikaitis, ACM TOMS 49(2)
(2023), for the treatment of subnormals and overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import ConfigError


@dataclass(frozen=True)
class Format:
    """A binary format: p significand bits, exponents emin..emax, and its overflow rule."""

    name: str
    p: int
    emin: int
    emax: int
    max: float
    overflow: str = "inf"  # inf | saturate | nan

    @property
    def u(self) -> float:
        """Unit roundoff of rounding to nearest, 2^-p."""
        return 2.0**-self.p

    @property
    def nbytes(self) -> int:
        """Bytes a number takes in memory; tf32 is stored as fp32."""
        return {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}.get(self.name, 1)


def _ieee(name: str, p: int, emax: int) -> Format:
    return Format(name, p, 1 - emax, emax, (2 - 2.0 ** (1 - p)) * 2.0**emax)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _ieee("fp64", 53, 1023),
        _ieee("fp32", 24, 127),
        _ieee("tf32", 11, 127),
        _ieee("bf16", 8, 127),
        _ieee("fp16", 11, 15),
        _ieee("e5m2", 3, 15),
        Format("e4m3", 4, -6, 8, 448.0, "saturate"),
        Format("e4m3_nan", 4, -6, 8, 448.0, "nan"),
    )
}
MODES = ("nearest", "zero", "stochastic")

_EXPONENT = 0x7FF0000000000000


def round_to(x: Tensor, fmt: Format, mode: str = "nearest", key: Tensor | None = None) -> Tensor:
    """Round every element of x to `fmt`.

    x    fp64, any shape whose leading axes merge to B
    key  [B] int64, for the stochastic mode only: equal keys give equal draws, whatever the batch

    Raises ConfigError for an unknown mode, a carrier that is not fp64, or a stochastic rounding without a key.
    """
    if x.dtype != torch.float64:
        raise ConfigError(f"precision: the carrier is fp64, not {x.dtype}")
    if mode not in MODES:
        raise ConfigError(f"precision: mode {mode!r} is not one of {', '.join(MODES)}")
    if fmt.name == "fp64":
        return x
    if mode == "nearest" and fmt.name == "fp32":
        # one cast of the hardware: nearest-even from fp64, subnormals and overflow included
        return x.to(torch.float32).to(torch.float64)
    if mode == "zero" and fmt.name == "fp32":
        y = x.to(torch.float32)
        # one unit back wherever the cast went outward, which also turns its overflow into the largest number
        over = torch.gt(y.to(torch.float64).abs_(), x.abs()).view(torch.int8)
        return y.view(torch.int32).sub(over).view(torch.float32).to(torch.float64)
    quantum = x.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    # the upper clamp keeps inf / quantum an infinity
    quantum = quantum.clamp_(2.0**fmt.emin, 2.0**1000).mul_(2.0 ** (1 - fmt.p))
    y = x / quantum
    if mode == "nearest":
        y = y.round_().mul_(quantum)
    elif mode == "zero":
        y = y.trunc_().mul_(quantum).clamp_(-fmt.max, fmt.max)
        if fmt.overflow == "saturate":
            return y
        return torch.where(x.isinf(), x if fmt.overflow == "inf" else math.nan, y)
    else:
        if key is None:
            raise ConfigError("precision: stochastic rounding needs a key")
        low = y.floor()
        y = low.add_(uniform(key, x.numel() // len(key)).view_as(x) < y - low).mul_(quantum)
    if fmt.overflow == "inf":
        # scaled so that the carrier overflows exactly where the format does
        scale = 2.0 ** (1023 - fmt.emax)
        return y.mul_(scale).mul_(1 / scale)
    if fmt.overflow == "saturate":
        return y.clamp_(-fmt.max, fmt.max)
    return y.masked_fill_(y.abs() > fmt.max, math.nan)


def narrow(x: Tensor, fmt: Format, mode: str) -> Tensor:
    """round_to for x known to hold fp32 numbers: casts and masks of the fp32 pattern, the same bits for less work."""
    if fmt.name == "bf16" and mode == "nearest":
        return x.to(torch.bfloat16).to(torch.float64)
    if fmt.name == "tf32" and mode == "zero":
        # the format is a prefix of fp32, so dropping bits truncates subnormals too
        bits = x.to(torch.float32).view(torch.int32).bitwise_and(-0x2000)
        return bits.view(torch.float32).to(torch.float64)
    return round_to(x, fmt, mode)


def mix(z: Tensor) -> Tensor:
    """The 64-bit finaliser of splitmix (Steele, Lea & Flood, OOPSLA 2014), elementwise on int64."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def unit(bits: Tensor) -> Tensor:
    """The top 53 of 64 mixed bits as fp64 in [0, 1)."""
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(torch.float64).mul_(2.0**-53)


def uniform(key: Tensor, count: int) -> Tensor:
    """[B, count] fp64 draws in [0, 1), a function of (key, position) alone on every device. key [B] int64."""
    position = torch.arange(1, count + 1, device=key.device) * -0x61C8864680B583EB
    return unit(mix(mix(key)[:, None] + position))
