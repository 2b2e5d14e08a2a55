"""Which route every slot takes next, decided on the device: slots that verify packed first, slots that flush behind."""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = 5  # of a plan: batch row, slot, records to read, base, first new record


@triton.jit
def route(
    slots, write_pos, cache_base, is_flush, plan, counts, B, CURRENT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """plan [FIELDS, B] int32: counts[0] batch rows that leave the state alone, then counts[1] that fold it.

    slots [B] int32, a negative one is in neither; cursors [slots] int32; CURRENT: a flag folds the token at hand, so an
    empty history does not spare it. One program.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen, others = 0, 0
    for FLUSH in tl.static_range(2):
        for first in range(0, B, BLOCK):
            b = first + tl.arange(0, BLOCK)
            slot = tl.load(slots + b, mask=b < B, other=-1)
            there = slot >= 0
            w = tl.load(write_pos + slot, mask=there, other=0)
            base = tl.load(cache_base + slot, mask=there, other=0)
            flag = tl.load(is_flush + slot, mask=there, other=0)
            mine = there & (((flag != 0) & ((w > 0) | CURRENT)) == (FLUSH == 1))
            at = seen + tl.cumsum(mine.to(tl.int32), axis=0) - 1
            tl.store(plan + at, b, mask=mine)
            tl.store(plan + B + at, slot, mask=mine)
            tl.store(plan + 2 * B + at, w, mask=mine)
            tl.store(plan + 3 * B + at, base, mask=mine)
            tl.store(plan + 4 * B + at, base + w, mask=mine)
            seen += tl.sum(mine.to(tl.int32), axis=0)
        if FLUSH == 0:
            others = seen
            tl.store(counts, seen)
    tl.store(counts + 1, seen - others)


@triton.jit
def planned(plan, B, i):
    """Batch row and slot (int64), records to read, base and first new record of the i-th planned row."""
    b, slot = tl.load(plan + i).to(tl.int64), tl.load(plan + B + i).to(tl.int64)
    return b, slot, tl.load(plan + 2 * B + i), tl.load(plan + 3 * B + i), tl.load(plan + 4 * B + i)
