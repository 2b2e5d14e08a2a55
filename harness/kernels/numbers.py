"""Roundings and products that are the same on a GPU and in Triton's interpreter.

The interpreter truncates where hardware rounds fp32 to bf16, multiplies the bit patterns of bf16 operands, and ignores
input_precision. So a value is rounded here by its pattern before it is converted or stored, which is then exact in both
worlds, and in the interpreter a product takes fp32 operands that hold what the tensor core would read.
Measured on an H200 (Triton 3.6): a tf32 product truncates its operands to 10 fraction bits.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = tl.constexpr(INTERPRETED)


class Choices:
    """A design's options as a kernel takes them: one argument, every attribute a constant of its compiler."""

    def __init__(self, **given: Any):
        self._shown = ", ".join(f"{name}={value!r}" for name, value in sorted(given.items()))
        # asked for at every launch
        self._hash = hash(self._shown)
        for name, value in given.items():
            setattr(self, name, tl.constexpr(value))

    def __repr__(self) -> str:
        return self._shown

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choices) and self._shown == other._shown


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
def rest(x, high):
    """x - high of fp32, of the number that x is: a compiler would fuse it with the product that made x."""
    if HERE:
        y = x - high
    else:
        y = tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, high], tl.float32, True, 1)
    return y


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """fp32 x to the nearest number of FORMAT, fp32 or bf16, as fp32."""
    if FORMAT == "bf16":
        y = round_bf16(x)
    else:
        y = x
    return y


@triton.jit
def operand(x, PRECISION: tl.constexpr, RIGHT: tl.constexpr = False):
    """fp32 x as the left (RIGHT: right) operand of a product of PRECISION, fp32; the sum where two parts are read.

    NaN stays NaN
    """
    if PRECISION == "ieee":
        y = x
    else:
        if PRECISION == "tf32":
            y = truncate_tf32(x)
        elif PRECISION == "tf32x3":
            i = x.to(tl.int32, bitcast=True)
            high = ((i + 0xFFF + ((i >> 13) & 1)) & -8192).to(tl.float32, bitcast=True)
            y = high + truncate_tf32(rest(x, high))
        elif PRECISION == "bf16x4" or (PRECISION == "bf16x2" and not RIGHT):
            high = round_bf16(x)
            y = high + round_bf16(rest(x, high))
        else:
            y = round_bf16(x)
        y = tl.where(x != x, x, y)
    return y


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
def columns(BK: tl.constexpr):
    """Columns of a key as a recurrence reads it, [BK / 32, 32]; a tile of its state is [BK / 32, BV, 32]."""
    J: tl.constexpr = min(BK, 32)
    return tl.arange(0, BK // J)[:, None] * J + tl.arange(0, J)[None, :]


@triton.jit
def folded_tile(head, first, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """tile_of for BV rows from `first` on, a row in pieces of 32 columns below each other, [BK / 32 BV, 32].

    As they lie so, 8 threads of a warp have a row and not 32, and a sum over K takes 3 exchanges between them, not 5.
    Loaded like this and unfolded after, as compilers differ in how they share out three axes.
    """
    J: tl.constexpr = min(BK, 32)
    at = tl.arange(0, BK // J * BV)
    rows, keys = first + at % BV, (at // BV)[:, None] * J + tl.arange(0, J)[None, :]
    return (head * V + rows)[:, None] * K + keys, (rows < V)[:, None] & (keys < K)


@triton.jit
def unfolded(x, BK: tl.constexpr, BV: tl.constexpr):
    """A tile as a recurrence holds it, [BK / 32, BV, 32]."""
    J: tl.constexpr = min(BK, 32)
    return tl.reshape(x, (BK // J, BV, J))


@triton.jit
def over_columns(x, STRIDED: tl.constexpr):
    """Sum of x [I, BV, J] over the columns of every row, [BV]; STRIDED: of the even and the odd ones, then of both."""
    if STRIDED:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
        total = tl.sum(tl.sum(even, axis=0), axis=1) + tl.sum(tl.sum(odd, axis=0), axis=1)
    else:
        total = tl.sum(tl.sum(x, axis=0), axis=1)
    return total


@triton.jit
def norm(square, eps, OUTSIDE: tl.constexpr):
    """The root of a sum of squares, with eps inside it or OUTSIDE."""
    if OUTSIDE:
        y = tl.sqrt(square) + eps
    else:
        y = tl.sqrt(square + eps)
    return y


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
def add_write(S, d, k_hat):
    """S + d k_hat of fp32, S a decayed state: a compiler could fuse the decay's product with this sum instead."""
    return tl.fma(d, k_hat, S)


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
    """a @ b of fp32 tiles with operands as PRECISION reads them, fp32 accumulator.

    PRECISION: ieee, tf32, tf32x3, bf16; bf16x2: a in two bf16 halves; bf16x4: both, and all four products
    """
    if INTERPRETED:
        product = tl.dot(operand(a, PRECISION), operand(b, PRECISION, True), input_precision="ieee")
    elif PRECISION == "bf16":
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "bf16x2" or PRECISION == "bf16x4":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low = rest(a, a_high.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(a_low, b_high)
        if PRECISION == "bf16x4":
            b_low = rest(b, b_high.to(tl.float32)).to(tl.bfloat16)
            product = tl.dot(a_high, b_low, tl.dot(a_low, b_low, product))
        product = tl.dot(a_high, b_high, product)
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
