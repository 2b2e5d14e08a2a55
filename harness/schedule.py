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
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
from harness.reference.calls import Course
from harness.reference.oracle import PIECE
from harness.ring import RingSpec
from harness.tokens import Shape
from harness.window import Windows


@dataclass
class Event:
    """Grid points of one step: after its commit, slots[i] has reached its flush[i] with tokens[i] committed."""

    step: int
    slots: list[int]
    flush: list[int]
    begin: list[int]  # committed tokens at the grid point before
    tokens: list[int]


class Grid(NamedTuple):
    """The grid points of a block, [n] each, by steps and then by slots: the order of its rows."""

    step: np.ndarray
    slot: np.ndarray
    point: np.ndarray  # which of its slot's it is
    flush: np.ndarray
    begin: np.ndarray  # committed tokens at the slot's grid point before
    tokens: np.ndarray


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
    events: list[Event]
    memo: dict[Any, Any] = field(default_factory=dict)  # what designs on equal rings share

    @cached_property
    def points(self) -> np.ndarray:
        """[W, B] which of its slot's grid points in this block a step ends at, or -1."""
        at = np.zeros(self.t.shape, dtype=bool)
        for event in self.events:
            at[event.step, event.slots] = True
        return np.where(at, at.cumsum(0) - 1, -1)

    @cached_property
    def grid(self) -> Grid:
        step, slot = np.nonzero(self.points >= 0)
        rest = ([x for e in self.events for x in getattr(e, name)] for name in ("flush", "begin", "tokens"))
        return Grid(step, slot, self.points[step, slot], *(np.array(x, dtype=np.int64) for x in rest))

    def windows(self, stream: Stream, shape: Shape) -> Windows:
        """The windows of every step: committed tokens of the stream, then junk in the rejected lanes."""
        W, B = self.t.shape
        m = int(self.lengths.max())
        lane = np.arange(m)
        t = self.t[..., None] + lane
        inside = lane < self.lengths[..., None]
        first = self.t[0]
        last = int((np.where(inside, t, 0).max((0, 2)) - first).max()) + 1
        run = stream.tokens(torch.from_numpy(first), last)
        at = torch.from_numpy(np.where(inside, t - first[None, :, None], 0))
        slot = torch.arange(B)[None, :, None]
        tokens = run.map(lambda x: x[slot, at])
        rejected = np.nonzero(inside & (lane >= self.accepted[..., None]))
        if len(rejected[0]):
            step, b, j = (torch.from_numpy(i) for i in rejected)
            junk = stream.junk(b, torch.from_numpy(self.t)[step, b], j)
            for name in ("q", "k", "v", "g", "beta"):
                getattr(tokens, name)[step, b, j] = getattr(junk, name)
        return Windows(tokens, self.lengths, shape)

    def pieces(self, stream: Stream, shape: Shape) -> Pieces | None:
        """None where the block has no grid point."""
        if not self.events:
            return None
        B, grid = self.t.shape[1], self.grid
        # slot by slot, each interval in its cuts
        order = np.argsort(grid.slot, kind="stable")
        first = grid.point == 0
        # a slot without a piece asks for no tokens that the others do not
        origin = np.full(B, grid.begin[first].min())
        origin[grid.slot[first]] = grid.begin[first]
        count = -(-(grid.tokens - grid.begin) // PIECE)[order]
        of, cut = np.repeat(order, count), within(count)
        owner, begin = grid.slot[of], grid.begin[of] + cut * PIECE
        piece = within(np.bincount(owner, minlength=B))
        begins, sizes, points = (np.full((piece.max() + 1, B), empty) for empty in (0, 0, -1))
        begins[piece, owner], sizes[piece, owner] = begin, np.minimum(grid.tokens[of] - begin, PIECE)
        points[piece, owner] = np.where(grid.tokens[of] - begin <= PIECE, grid.point[of], -1)
        run = stream.tokens(torch.from_numpy(origin), int((begins + sizes - origin).max()))
        lane = np.arange(sizes.max())
        offset = (begins - origin)[..., None] + lane
        at = torch.from_numpy(np.where(lane < sizes[..., None], offset, 0))
        slot = torch.arange(B)[None, :, None]
        return Pieces(Windows(run.map(lambda x: x[slot, at]), sizes, shape), points)


def within(sizes: np.ndarray) -> np.ndarray:
    """0..size-1 for every size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)


class Schedule:
    """Iterates over Blocks of at most `steps` steps until every slot has committed `tokens` tokens."""

    def __init__(self, decode: DecodeConfig, acceptance: AcceptanceConfig, grid: RingSpec, first: int, tokens: int):
        self.decode, self.acceptance, self.grid = decode, acceptance, grid
        assert grid.flush_at is not None
        self.full, self.end = grid.flush_at, first + tokens
        B = decode.slots
        self.t, self.w, self.step = [first] * B, [0] * B, [0] * B
        self.flagged, self.flush, self.begin = [False] * B, [0] * B, [first] * B

    def blocks(self, steps: int) -> Iterator[Block]:
        while any(t < self.end for t in self.t):
            yield self._block(steps)

    def _block(self, W: int) -> Block:
        B = len(self.t)
        t, m, n = (np.zeros((W, B), dtype=np.int64) for _ in range(3))
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for b in range(B):
            # every draw of the block at once: a count depends on its position alone
            span = np.arange(self.t[b], min(self.t[b] + W * self.decode.window, self.end) + 1)
            sizes = lengths(self.decode, b, span)
            kind = self.acceptance.kind
            counts = None if kind == "fixed" else accepted(self.acceptance, self.decode.seed, b, span, sizes)
            origin = self.t[b]
            for i in range(W):
                t[i, b] = now = self.t[b]
                if now >= self.end:
                    continue
                m[i, b] = size = int(sizes[now - origin])
                if counts is None:
                    sequence = self.acceptance.sequence or [1]
                    count = min(sequence[self.step[b] % len(sequence)], size)
                else:
                    count = int(counts[now - origin])
                n[i, b] = count = min(count, self.end - now)
                self.t[b] += count
                self.step[b] += 1
                self.w[b] = count if self.flagged[b] else self.w[b] + count
                full = self.w[b] >= self.full
                self.flagged[b] = full and self.grid.fold_when == "next"
                if full:
                    found.setdefault(i, []).append((b, self.flush[b], self.begin[b], self.t[b]))
                    self.flush[b] += 1
                    self.begin[b] = self.t[b]
                    if self.grid.fold_when == "commit":
                        self.w[b] = 0
        used = int((m > 0).any(1).sum())
        events = [Event(i, *(list(x) for x in zip(*rows, strict=True))) for i, rows in sorted(found.items())]
        return Block(t[:used], m[:used], n[:used], events)
