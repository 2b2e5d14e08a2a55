"""The three cursors on the device, moved as harness.ring.Cursors moves them; nothing is read back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance_cursors(
    slots, accepted, write_pos, cache_base, is_flush, folded, n, flush_at,
    L: tl.constexpr, ON_COMMIT: tl.constexpr, CURRENT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Commit accepted[i] tokens on slots[i], -1: the slot is not in the step. ON_COMMIT: folded [n], what folds now.

    CURRENT: a flag has folded the token at hand too, which leaves no record behind
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    taken = tl.load(accepted + i, mask=i < n, other=-1)
    there = (slot >= 0) & (taken >= 0)
    w = tl.load(write_pos + slot, mask=there, other=0)
    base = tl.load(cache_base + slot, mask=there, other=0)
    flag = tl.load(is_flush + slot, mask=there, other=0)
    base = tl.where((flag != 0) & (taken > 0), (base + w) & (L - 1), base)
    if CURRENT:
        base = tl.where(flag != 0, (base + taken) & (L - 1), base)
        w = tl.where(flag != 0, 0, w + taken)
    else:
        w = tl.where(flag != 0, taken, w + taken)
    full = w >= flush_at
    if ON_COMMIT:
        tl.store(folded + i, tl.where(full & there, w, 0), mask=i < n)
        tl.store(is_flush + slot, tl.zeros_like(flag), mask=there)
    else:
        tl.store(is_flush + slot, full.to(tl.int32), mask=there)
    tl.store(write_pos + slot, w, mask=there)
    tl.store(cache_base + slot, base, mask=there)


@triton.jit
def absorb(slots, folded, write_pos, cache_base, n, L: tl.constexpr, BLOCK: tl.constexpr):
    """Move histories that have just been folded behind the base."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    w = tl.load(folded + i, mask=i < n, other=0)
    there = (slot >= 0) & (w > 0)
    base = tl.load(cache_base + slot, mask=there, other=0)
    tl.store(cache_base + slot, (base + w) & (L - 1), mask=there)
    tl.store(write_pos + slot, tl.zeros_like(w), mask=there)


@triton.jit
def reset_cursors(slots, write_pos, cache_base, is_flush, n, BLOCK: tl.constexpr):
    """An empty history."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    there = slot >= 0
    zero = tl.zeros((BLOCK,), tl.int32)
    tl.store(write_pos + slot, zero, mask=there)
    tl.store(cache_base + slot, zero, mask=there)
    tl.store(is_flush + slot, zero, mask=there)
