"""Who commits what when: the steps of a decode in blocks, and the run's grid of flushes.

The grid belongs to the decode, not to a design: flush f of a slot is the token count at which a ring of the run's
length and max_window folds under that slot's accepts. Every design is read there, whatever it does itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from harness.acceptance import accepted, lengths
from harness.config import AcceptanceConfig, DecodeConfig
from harness.decode import Stream
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


@dataclass
class Block:
    """W steps: t, lengths and accepted [W, B]; idle slots have length 0. Token counts include the prefill."""

    t: np.ndarray
    lengths: np.ndarray
    accepted: np.ndarray
    events: list[Event]

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

    def pieces(self, stream: Stream, shape: Shape) -> tuple[Windows, list[tuple[int, int]]] | None:
        """The committed tokens between grid points, for the oracle: windows and (first, count) of every event."""
        if not self.events:
            return None
        spans: list[tuple[int, int]] = []
        starts: list[int] = []
        sizes: list[int] = []
        for event in self.events:
            count = -(-max(e - b for b, e in zip(event.begin, event.tokens, strict=True)) // PIECE)
            spans.append((len(starts), count))
            for p in range(count):
                for b, e in zip(event.begin, event.tokens, strict=True):
                    starts.append(b + p * PIECE)
                    sizes.append(min(max(e - b - p * PIECE, 0), PIECE))
        owners = [s for e, (_, count) in zip(self.events, spans, strict=True) for s in e.slots * count]
        owner = torch.tensor(owners)
        m, B = max(sizes), self.t.shape[1]
        begin = np.full(B, np.iinfo(np.int64).max)
        end = np.zeros(B, dtype=np.int64)
        np.minimum.at(begin, owner.numpy(), starts)
        np.maximum.at(end, owner.numpy(), np.array(starts) + sizes)
        begin = np.where(end > 0, begin, 0)
        run = stream.tokens(torch.from_numpy(begin), int((end - begin).max()))
        lane = np.arange(m)
        offset = np.array(starts) - begin[owner]
        at = np.where(lane < np.array(sizes)[:, None], offset[:, None] + lane, 0)
        tokens = run.map(lambda x: x[owner[:, None], torch.from_numpy(at)][None])
        return Windows(tokens, np.array(sizes)[None], shape), spans


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
