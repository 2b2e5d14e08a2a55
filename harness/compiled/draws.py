"""Many streams of harness.families at once: uniform 16-bit places, and the tokens that a table has there.

A stream is numpy's SFC64, seeded by SeedSequence of its key; harness.families._sample says which key that is.
Source: numpy/random, bit_generator.pyx (after M. E. O'Neill's seed_seq) and src/sfc64/sfc64.h (after C. Doty-Humphrey).
"""

from __future__ import annotations

import numpy as np

from harness.compiled.common import F1, compiled

KEYS = "uint32[:, ::1]"  # [streams, 1 + words] how many words of a key follow, then those
STATE, WORDS = "uint64[::1]", "uint32[::1]"
PLACE = np.uint64(0xFFFF)
ROWS = 8  # rows of a stream drawn before they are put in place; a multiple of four, and a cache line of a token


@compiled("uint32, uint32, uint32", "UniTuple(uint32, 2)")
def hashed(value, factor, multiplier):
    """value scrambled by a running factor, and the factor after it."""
    value = np.uint32(value ^ factor)
    factor = np.uint32(factor * multiplier)
    value = np.uint32(value * factor)
    return np.uint32(value ^ (value >> np.uint32(16))), factor


@compiled("uint32, uint32", "uint32")
def mixed(x, y):
    z = np.uint32(np.uint32(np.uint32(0xCA01F9DD) * x) - np.uint32(np.uint32(0x4973F715) * y))
    return np.uint32(z ^ (z >> np.uint32(16)))


@compiled(f"{STATE}", "uint64")
def following(s):
    """The next 64 bits of a generator at state s [4], which moves on."""
    out = s[0] + s[1] + s[3]
    s[3] += np.uint64(1)
    s[0] = s[1] ^ (s[1] >> np.uint64(11))
    s[1] = s[2] + (s[2] << np.uint64(3))
    s[2] = ((s[2] << np.uint64(24)) | (s[2] >> np.uint64(40))) + out
    return out


@compiled(f"{WORDS}, {STATE}")
def seed(key, s):
    """The state s [4] of the generator that belongs to a key [1 + words]."""
    n, pool = np.int64(key[0]), np.zeros(4, np.uint32)
    factor, step = np.uint32(0x43B0D7E5), np.uint32(0x931E8875)
    for i in range(4):
        pool[i], factor = hashed(key[1 + i] if i < n else np.uint32(0), factor, step)
    for i in range(4):
        for j in range(4):
            if i != j:
                value, factor = hashed(pool[i], factor, step)
                pool[j] = mixed(pool[j], value)
    for i in range(4, n):
        for j in range(4):
            value, factor = hashed(key[1 + i], factor, step)
            pool[j] = mixed(pool[j], value)
    factor, step = np.uint32(0x8B51F9DD), np.uint32(0x58F38DED)
    for i in range(3):
        low, factor = hashed(pool[(2 * i) & 3], factor, step)
        high, factor = hashed(pool[(2 * i + 1) & 3], factor, step)
        s[i] = np.uint64(low) | (np.uint64(high) << np.uint64(32))
    s[3] = np.uint64(1)
    for _ in range(12):
        following(s)


@compiled(f"{KEYS}, uint64[:, ::1]")
def places(keys, out):
    """out [streams, n]: four places in each number, the first one lowest."""
    s = np.empty(4, np.uint64)
    for i in range(len(keys)):
        seed(keys[i], s)
        for j in range(out.shape[1]):
            out[i, j] = following(s)


@compiled(f"{STATE}, {F1}, {F1}, int64")
def look_up(s, table, out, n):
    """The next n entries of a stream; places behind the last are lost unless n is a multiple of four."""
    for i in range(0, n - 3, 4):
        now = following(s)
        out[i] = table[now & PLACE]
        out[i + 1] = table[(now >> np.uint64(16)) & PLACE]
        out[i + 2] = table[(now >> np.uint64(32)) & PLACE]
        out[i + 3] = table[now >> np.uint64(48)]
    if n & 3:
        now = following(s)
        for i in range(n - (n & 3), n):
            out[i] = table[now & PLACE]
            now >>= np.uint64(16)


@compiled(f"{KEYS}, {F1}, float64[:, :, :, ::1]")
def keys_of(keys, table, out):
    """out [slots, T, heads, K]: a stream of every slot and head goes through its tokens, K entries each."""
    s = np.empty(4, np.uint64)
    B, T, H, K = out.shape
    drawn = np.empty(ROWS * K)
    for i in range(len(keys)):
        seed(keys[i], s)
        b, h = i // H, i % H
        for first in range(0, T, ROWS):
            rows = min(ROWS, T - first)
            look_up(s, table, drawn, rows * K)
            for r in range(rows):
                for x in range(K):
                    out[b, first + r, h, x] = drawn[r * K + x]


@compiled(f"{KEYS}, {F1}, float64[:, :, :, ::1]")
def values_of(keys, table, out):
    """out [slots, T, heads, V]: a stream goes through its value rows, T entries each."""
    s = np.empty(4, np.uint64)
    B, T, H, V = out.shape
    drawn = np.empty(ROWS * T)
    for i in range(len(keys)):
        seed(keys[i], s)
        b, h = i // H, i % H
        for first in range(0, V, ROWS):
            rows = min(ROWS, V - first)
            look_up(s, table, drawn, rows * T)
            # tokens lie far apart: every one is reached once for all of these rows
            for t in range(T):
                for r in range(rows):
                    out[b, t, h, first + r] = drawn[r * T + t]
