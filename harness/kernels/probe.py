"""One product of 16 x 16 tiles, and e^x of a row: what harness.experiments.probe asks the device."""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels.numbers import decay, dot


@triton.jit
def product(a, b, c, out, PRECISION: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr, N: tl.constexpr):
    """out[i] = c[i] + a[i] b[i] of fp32 tiles [N, N]; SPLIT: the product apart, c added to its result."""
    at = tl.program_id(0) * N * N + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y, start = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    if SPLIT:
        result = start + dot(x, y, PRECISION, INTERPRETED)
    elif PRECISION == "bf16":
        result = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), start)
    else:
        result = tl.dot(x, y, start, input_precision=PRECISION)
    tl.store(out + at, result)


@triton.jit
def exponential(x, out, N: tl.constexpr, EXP: tl.constexpr):
    """out = e^x of fp32 x, as the kernels take it."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, decay(tl.load(x + at), EXP))
