"""Who commits what when, against one slot followed by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.acceptance import accepted, lengths
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
from harness.ring import RingSpec
from harness.schedule import Schedule
from harness.tokens import Shape

KINDS = {
    "uniform": AcceptanceConfig("uniform"),
    "geometric": AcceptanceConfig("geometric", p=0.7),
    "fixed": AcceptanceConfig("fixed", sequence=[1, 4, 2]),
}


def alone(decode: DecodeConfig, acceptance: AcceptanceConfig, grid: RingSpec, b: int, first: int) -> tuple[Any, Any]:
    """One slot's steps (t, length, accepted) and grid points (step, flush, begin, tokens)."""
    t, w, flagged, begin, steps, points = first, 0, False, first, [], []
    while t < decode.tokens:
        m = int(lengths(decode, b, np.array(t)))
        n = min(int(accepted(acceptance, decode.seed, b, np.array(t), np.array(m), len(steps))), decode.tokens - t)
        steps.append((t, m, n))
        t += n
        w = n if flagged else w + n
        flagged = w >= grid.flush_at
        if flagged:
            points.append((len(steps) - 1, len(points), begin, t))
            begin = t
            if grid.fold_when == "commit":
                w, flagged = 0, False
    return steps, points


@pytest.mark.parametrize("fold_when", ["next", "commit"])
@pytest.mark.parametrize("steps", [1, 7, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_every_slot_is_itself_whatever_the_others_do(kind: str, steps: int, fold_when: str) -> None:
    """Faults: a count drawn at another slot's position, or at a place counted from the block; a fixed sequence that
    begins anew with a block; a flag or a grid point lost between two; a slot that ends before the others."""
    decode, grid = DecodeConfig(tokens=150, slots=5, seed=3, ragged=True), RingSpec(16, 4, 6, fold_when)
    blocks = list(Schedule(decode, KINDS[kind], grid, 0, decode.tokens).blocks(steps))
    table = np.concatenate([np.stack((block.t, block.lengths, block.accepted), -1) for block in blocks])
    before = np.cumsum([0, *(len(block.t) for block in blocks)])
    grids = [(b, block.grid) for b, block in zip(before, blocks, strict=False)]
    rows = np.concatenate([np.stack((b + g.step, g.slot, g.flush, g.begin, g.tokens), -1) for b, g in grids])
    for b in range(decode.slots):
        mine, ends = alone(decode, KINDS[kind], grid, b, 0)
        assert table[: len(mine), b].tolist() == [list(x) for x in mine]
        assert (table[len(mine) :, b, 1:] == 0).all()
        assert rows[rows[:, 1] == b][:, [0, 2, 3, 4]].tolist() == [list(x) for x in ends]
    assert (np.lexsort((rows[:, 1], rows[:, 0])) == np.arange(len(rows))).all()


def test_committed_tokens_are_found_where_they_were_made() -> None:
    """Faults: lanes of a slot under another's tokens, an idle step counted, rejected lanes taken for committed ones."""
    decode = DecodeConfig(tokens=40, slots=3, ragged=True)
    (block,) = Schedule(decode, AcceptanceConfig(), RingSpec(16, 4), 0, decode.tokens).blocks(100)
    counts, step, lane = block.committed
    assert counts.tolist() == [40, 40, 40]
    for b in range(3):
        expected = [(i, j) for i, n in enumerate(block.accepted[:, b]) for j in range(n)]
        assert list(zip(step[b].tolist(), lane[b].tolist(), strict=True)) == expected


def test_a_window_holds_its_tokens_and_the_junk_of_its_lanes() -> None:
    """Faults: a rejected lane that holds the token that is to come, or junk of another slot, window or lane."""
    decode, shape, rejected = DecodeConfig(tokens=60, slots=3, ragged=True), Shape(1, 2, 3, 4), 0
    stream = Stream(decode, shape)
    v = stream.tokens(torch.zeros(3, dtype=torch.int64), decode.tokens).v
    for block in Schedule(decode, AcceptanceConfig(), RingSpec(16, 4), 0, decode.tokens).blocks(9):
        found = block.windows(stream, shape).tokens.v
        for i, b in np.argwhere(block.lengths):
            for lane in range(block.lengths[i, b]):
                t = int(block.t[i, b])
                kept = lane < block.accepted[i, b]
                expected = v[b, t + lane] if kept else stream.junk(*map(torch.tensor, (b, t, lane))).v
                assert torch.equal(found[i, b, lane], expected), (t, b, lane)
                rejected += not kept
    assert rejected > 30


def test_nobody_asks_for_tokens_behind_the_decode() -> None:
    """Faults: a block of tokens drawn for a slot that has ended, or that is nearer to the end than others; a slot's
    run moved, and its tokens not with it."""
    decode = DecodeConfig(tokens=1024, slots=2, window=4)
    shape, asked = Shape(1, 2, 3, 4), []
    stream = Stream(decode, shape)
    whole = stream.block

    def block(b: int) -> Any:
        asked.append(b)
        return whole(b)

    stream.block = block  # type: ignore[method-assign]
    schedule = Schedule(decode, AcceptanceConfig(), RingSpec(16, 4), 0, decode.tokens)
    schedule.t[0] = schedule.begin[0] = 1000
    ended = False
    for block_ in schedule.blocks(4):
        ended |= bool((block_.lengths[:, 0] == 0).all())
        block_.windows(stream, shape)
        pieces = block_.pieces(stream, shape)
        if pieces is not None:
            v = stream.tokens(torch.zeros(2, dtype=torch.int64), 1024).v
            g = block_.grid
            for slot, point, begin, end in zip(g.slot, g.point, g.begin, g.tokens, strict=True):
                assert torch.equal(pieces.windows.v[point, slot, :, : end - begin].transpose(0, 1), v[slot, begin:end])
    assert ended and set(asked) == {0}
