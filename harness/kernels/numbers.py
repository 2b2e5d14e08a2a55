"""Roundings and products that are the same on a GPU and in Triton's interpreter.

The interpreter truncates where hardware rounds fp32 to bf16, multiplies the bit patterns of bf16 operands, and ignores
input_precision. So a value is rounded here by its pattern before it is converted or stored, which is then exact in both
worlds, and in the interpreter a product takes fp32 operands that hold what the tensor core would read.
Measured on an H200 (Triton 3.6): a tf32 product truncates its operands to 10 fraction bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def round_bf16(x):
    """fp32 x to the nearest bf16 number, ties to even, as fp32."""
    i = x.to(tl.int32, bitcast=True)
    rounded = (i + 0x7FFF + ((i >> 16) & 1)) & -65536
    # infinities stay, and a NaN keeps its quiet bit
    special = tl.where((i & 0x007FFFFF) != 0, (i | 0x00400000) & -65536, i)
    kept = tl.where((i & 0x7F800000) == 0x7F800000, special, rounded)
    return kept.to(tl.float32, bitcast=True)


@triton.jit
def truncate_tf32(x):
    """fp32 x as a tf32 product reads it."""
    i = x.to(tl.int32, bitcast=True)
    return (i & -8192).to(tl.float32, bitcast=True)


@triton.jit
def as_stored(x, to):
    """fp32 x in the element type of pointer `to`, rounded to nearest even."""
    if to.dtype.element_ty == tl.bfloat16:
        x = round_bf16(x)
    return x.to(to.dtype.element_ty)


@triton.jit
def tile_of(head, rows, keys, V: tl.constexpr, K: tl.constexpr):
    """Where `rows` of the state of a (slot, value head) lie, [BV, BK], and which of them exist."""
    return (head * V + rows)[:, None] * K + keys[None, :], (rows < V)[:, None] & (keys < K)[None, :]


@triton.jit
def quotient(x, y, INTERPRETED: tl.constexpr):
    """x / y of fp32, y far from the ends of the format, to half a unit and a little."""
    if INTERPRETED:
        z = x / y
    else:
        # one reciprocal for all x that share a y, and its error put right by what is left of x
        inverse = 1.0 / y
        z = x * inverse
        z = tl.fma(tl.fma(-z, y, x), inverse, z)
    return z


@triton.jit
def row_sums(x, STRIDED: tl.constexpr):
    """Sums over the columns of x [R, C], C even: all at once, or those of even and of odd columns, then of both."""
    if STRIDED:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        total = tl.sum(even, axis=1) + tl.sum(odd, axis=1)
    else:
        total = tl.sum(x, axis=1)
    return total


@triton.jit
def decay(x, EXP: tl.constexpr):
    """e^x of fp32 log decays: fast, as tl.exp makes it, or rounded once from fp64."""
    if EXP == "rounded":
        y = tl.exp(x.to(tl.float64)).to(tl.float32)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """a @ b of fp32 tiles with operands as PRECISION reads them (ieee, tf32, tf32x3, bf16), fp32 accumulator."""
    if PRECISION == "bf16":
        if INTERPRETED:
            product = tl.dot(round_bf16(a), round_bf16(b), input_precision="ieee")
        else:
            product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "tf32":
        if INTERPRETED:
            product = tl.dot(truncate_tf32(a), truncate_tf32(b), input_precision="ieee")
        else:
            product = tl.dot(a, b, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
