"""Who commits what when: the steps of a decode in blocks, and the run's grid of flushes.

The grid belongs to the decode, not to a design: flush f of a slot is the token count at which a ring of the run's
length and max_window folds under that slot's accepts. Every design is read there, whatever it does itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.acceptance import accepted, lengths
from harness.compiled.course import course, positions
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
from harness.reference.calls import Course, within
from harness.reference.oracle import PIECE
from harness.ring import Cursors, RingSpec
from harness.tokens import Shape, Tokens, on_device
from harness.window import Windows


class Grid(NamedTuple):
    """The grid points of a block, [n] each, by steps and then by slots: the order of its rows."""

    step: np.ndarray
    slot: np.ndarray
    point: np.ndarray  # which of its slot's it is
    flush: np.ndarray
    begin: np.ndarray  # committed tokens at the slot's grid point before
    tokens: np.ndarray

    @staticmethod
    def of(at: np.ndarray, reached: np.ndarray, begin: np.ndarray, flush: np.ndarray) -> Grid:
        """Points where `at` [W, B], with `reached` [W, B] tokens committed; each slot's first is its flush [B]-th, and
        begin [B] the point before that."""
        (step, slot), count = np.nonzero(at), at.sum(0)
        point, tokens = at.cumsum(0)[step, slot] - 1, reached[step, slot]
        ends = np.empty((len(count), count.max(initial=0) + 1), dtype=np.int64)
        ends[:, 0], ends[slot, point + 1] = begin, tokens
        return Grid(step, slot, point, flush[slot] + point, ends[slot, point], tokens)


@dataclass
class Pieces:
    """The committed tokens between a block's grid points, slot by slot, for the oracle."""

    windows: Windows  # [P, B]: the p-th piece of every slot, of at most PIECE tokens; none is left out between two
    points: np.ndarray  # [P, B] the slot's grid point that the piece ends at, or -1


@dataclass
class Block(Course):
    """W steps: t, lengths and accepted [W, B]; idle slots have length 0. Token counts include the prefill."""

    t: np.ndarray
    lengths: np.ndarray
    accepted: np.ndarray
    grid: Grid
    memo: dict[Any, Any] = field(default_factory=dict)  # what designs on equal rings share

    @cached_property
    def points(self) -> np.ndarray:
        """[W, B] which of its slot's grid points in this block a step ends at, or -1."""
        points = np.full(self.t.shape, -1)
        points[self.grid.step, self.grid.slot] = self.grid.point
        return points

    def windows(self, stream: Stream, shape: Shape) -> Windows:
        """The windows of every step: committed tokens of the stream, then junk in the rejected lanes."""
        W, B = self.t.shape
        m = int(self.lengths.max())
        lane = np.arange(m)
        t = self.t[..., None] + lane
        kept = lane < self.accepted[..., None]
        first, run = run_of(stream, self.t[0], np.where(kept, t + 1, 0).max((0, 2)))
        rejected = np.nonzero((lane < self.lengths[..., None]) & ~kept)
        at, slot, *lost, begin = on_device(
            stream.device, np.where(kept, t - first[None, :, None], 0), np.arange(B)[None, :, None], *rejected,
            self.t[rejected[0], rejected[1]],
        )  # fmt: skip
        tokens = run.map(lambda x: x[slot, at])
        if len(begin):
            junk = stream.junk(lost[1], begin, lost[2])
            for name in ("q", "k", "v", "g", "beta"):
                getattr(tokens, name)[tuple(lost)] = getattr(junk, name)
        return Windows(tokens, self.lengths, shape)

    def pieces(self, stream: Stream, shape: Shape) -> Pieces | None:
        """None where the block has no grid point."""
        if not len(self.grid.step):
            return None
        B, grid = self.t.shape[1], self.grid
        # slot by slot, each interval in its cuts
        order = np.argsort(grid.slot, kind="stable")
        first = grid.point == 0
        origin = self.t[0].copy()
        origin[grid.slot[first]] = grid.begin[first]
        count = -(-(grid.tokens - grid.begin) // PIECE)[order]
        of, cut = np.repeat(order, count), within(count)
        owner, begin = grid.slot[of], grid.begin[of] + cut * PIECE
        piece = within(np.bincount(owner, minlength=B))
        begins, sizes, points = (np.full((piece.max() + 1, B), empty) for empty in (0, 0, -1))
        begins[piece, owner], sizes[piece, owner] = begin, np.minimum(grid.tokens[of] - begin, PIECE)
        points[piece, owner] = np.where(grid.tokens[of] - begin <= PIECE, grid.point[of], -1)
        origin, run = run_of(stream, origin, (begins + sizes).max(0))
        lane = np.arange(sizes.max())
        offset = (begins - origin)[..., None] + lane
        at, slot = on_device(stream.device, np.where(lane < sizes[..., None], offset, 0), np.arange(B)[None, :, None])
        return Pieces(Windows(run.map(lambda x: x[slot, at]), sizes, shape), points)


def run_of(stream: Stream, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, Tokens]:
    """One run of tokens per slot that holds begin[b] .. end[b]-1, and where each starts; end 0: the slot needs none."""
    count = int((end - begin).max())
    # runs are equally long, and none reaches beyond what some slot needs: a decode has no tokens behind its last
    begin = np.minimum(begin, end.max() - count)
    return begin, stream.tokens(torch.from_numpy(begin), count)


class Schedule:
    """Iterates over Blocks of at most `steps` steps until every slot has committed `tokens` tokens."""

    def __init__(self, decode: DecodeConfig, acceptance: AcceptanceConfig, grid: RingSpec, first: int, tokens: int):
        self.decode, self.acceptance, self.grid = decode, acceptance, grid
        self.end, self.fixed = first + tokens, acceptance.kind == "fixed"
        B = decode.slots
        self.cursors = Cursors(grid, B)
        self.t, self.begin = (np.full(B, first, dtype=np.int64) for _ in range(2))
        self.step, self.flush = (np.zeros(B, dtype=np.int64) for _ in range(2))

    def blocks(self, steps: int) -> Iterator[Block]:
        while (self.t < self.end).any():
            yield self._block(steps)

    def _block(self, W: int) -> Block:
        sizes, counts = self._draws(W)
        t, m, n = steps = np.empty((3, W, len(self.t)), dtype=np.int64)
        positions(self.t, self.end, sizes, counts, self.step if self.fixed else np.full_like(self.step, -1), steps)
        used = int((m > 0).any(1).sum())
        t, m, n = steps[:, :used]
        path, self.cursors = course(self.cursors, m, n)
        at = (m > 0) & ((path.last_flag > 0) | (path.folded > 0))
        self.t, self.step = t[-1] + n[-1], self.step + W
        grid = Grid.of(at, t + n, self.begin, self.flush)
        self.begin, self.flush = np.where(at, t + n, self.begin).max(0), self.flush + at.sum(0)
        return Block(t, m, n, grid)

    def _draws(self, W: int) -> tuple[np.ndarray, np.ndarray]:
        """Window lengths and accepted tokens of every slot at its every token that W steps could begin at.

        A count depends on its position alone, so all are drawn at once; a fixed acceptance goes by steps instead.
        """
        most = min(W * self.decode.window, self.end - int(self.t.min()))
        span, slot = self.t[:, None] + np.arange(most + 1), np.arange(len(self.t))[:, None]
        sizes = lengths(self.decode, slot, span)
        if self.fixed:
            return sizes, np.tile(np.array(self.acceptance.sequence or [1], dtype=np.int64), (len(self.t), 1))
        return sizes, accepted(self.acceptance, self.decode.seed, slot, span, sizes)
