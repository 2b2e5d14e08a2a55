"""The token stream of a run: the same tokens for every implementation, whatever its window, ring or device.

A head's tokens in block b of slot i are a function of (seed + i, head, b) and nothing else; junk tokens,
which stand for rejected drafts, are one of (seed + i, t, lane). q, k, v, a and b are rounded once, to the
activation format. Gates come from the family, unless decode.gates, and above it decode.g and decode.beta, say
otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from harness import traces
from harness.acceptance import JUNK, counter_hash
from harness.config import DecodeConfig
from harness.errors import ConfigError
from harness.families import FAMILIES, NORMAL, WIDE
from harness.generate import Generator, Host
from harness.precision import FORMATS
from harness.tokens import Shape, Tokens, on_device

BLOCK = 1024
AHEAD = 2  # blocks at least that are drawn on the CPU beside the one at work


class Stream:
    """The tokens of a layer of `shape`, or of some of its heads.

    heads selects key heads; the value heads that read them follow, and both keep the gates and values they
    have in the whole layer. Token 0 is the first of the prefill. The first value rows are the same whatever V
    is. Raises ConfigError for an unknown family or format, a coherence that the family has no use for, or a
    gate file that cannot be used; InputError for the gates in it. On a device the next block is drawn while this one
    is decoded; lookup as in Generator.
    """

    def __init__(
        self,
        config: DecodeConfig,
        shape: Shape,
        *,
        heads: slice = slice(None),
        device: str = "cpu",
        lookup: bool | None = None,
    ) -> None:
        if config.family not in FAMILIES:
            raise ConfigError(f"decode.family: {config.family!r} is not one of {', '.join(FAMILIES)}")
        self.family = FAMILIES[config.family]
        if config.coherence is not None and self.family.coherence is None:
            has = ", ".join(name for name, family in FAMILIES.items() if family.coherence is not None)
            raise ConfigError(f"decode.coherence: family {config.family!r} has none; {has} have")
        activation = "fp64" if config.activation == "exact" else config.activation
        if activation not in FORMATS:
            raise ConfigError(f"decode.activation: {activation!r} is not one of exact, {', '.join(FORMATS)}")
        self.config, self.shape, self.device = config, shape, torch.device(device)
        self.keys = list(range(*heads.indices(shape.H)))
        self.values = [h * shape.group + i for h in self.keys for i in range(shape.group)]
        if not self.keys:
            raise ConfigError(f"heads: {heads} selects none of {shape.H} key heads")
        w = self.family.coherence if config.coherence is None else config.coherence
        seeds = [config.seed + slot for slot in range(config.slots)]
        self.generator = Generator(
            self.family, shape, (self.keys, self.values), seeds, w or 0.0, FORMATS[activation], self.device, lookup
        )
        self.trace = traces.load(config.gates) if config.gates is not None else None
        self.loop_start = (config.prefill + config.tokens) // 4 if self.family.period else None
        self._recent: OrderedDict[int, Tokens] = OrderedDict()
        self._capacity = 2
        self._pool: Tokens | None = None
        self._loop: Tokens | None = None
        self._ahead: dict[int, Host] = {}

    def block(self, b: int) -> Tokens:
        """Tokens b*1024 .. b*1024+1023 of every slot, leading axes [slots, 1024]; shared: do not write to it.

        Raises InputError naming the token and the head if the activation format overflows.
        """
        if b in self._recent:
            self._recent.move_to_end(b)
        else:
            while len(self._recent) >= self._capacity:
                self._recent.popitem(last=False)
            self._recent[b] = self._finish(self._true(b), b * BLOCK)
            if self.generator.lookup:
                # as many as the next run of tokens may need
                for n in range(1, max(AHEAD, self._capacity + 1) + 1):
                    self._begin(b + n)
        return self._recent[b]

    def tokens(self, start: Tensor, count: int) -> Tokens:
        """`count` consecutive tokens of every slot, from start [slots] int64; leading axes [slots, count]."""
        starts = start.tolist()
        needed = sorted({b for s in starts for b in range(s // BLOCK, (s + max(count, 1) - 1) // BLOCK + 1)})
        self._capacity = max(2, len(needed))
        if self.generator.lookup:
            return self._gathered(np.array(starts), count, needed)
        parts: list[list[Tokens]] = [[] for _ in starts]
        for b in needed:
            block = self.block(b)
            for slot, s in enumerate(starts):
                span = slice(max(s - b * BLOCK, 0), min(s + count - b * BLOCK, BLOCK))
                if span.start <= span.stop:
                    parts[slot].append(block.map(itemgetter((slot, span))))
        return _stack([_join(part) for part in parts])

    def forget(self) -> None:
        """Let go of the blocks at hand, which would be given back to the stream of a device that they were made on."""
        self._recent.clear()

    def junk(self, slot: Tensor, t: Tensor, lane: Tensor) -> Tokens:
        """Rejected drafts of a slot at token t and window position lane; int64, broadcasting to [...].

        One of 1,024 tokens of the slot, drawn as a block of the family, by a hash of (seed + slot, t, lane).
        """
        if self._pool is None:
            self._pool = self._finish(self.generator.finish(self.generator.start("junk", 0, BLOCK)), 0)
        slot, t, lane = torch.broadcast_tensors(slot.to(self.device), t.to(self.device), lane.to(self.device))
        place = counter_hash(JUNK, self.config.seed + slot, t, lane) & (BLOCK - 1)
        return self._pool.map(lambda x: x[slot, place])

    def initial_state(self) -> Tensor:
        """S before token 0, [slots, HV, V, K] fp64 holding fp32 numbers, so that an fp32 checkpoint is exact.

        decode.initial_state: zero, random (0.1 N(0, 1)), wide (+-10^U(-3,2)); or the family's own state.
        """
        kind = self.config.initial_state
        if kind not in ("zero", "random", "wide"):
            raise ConfigError(f"decode.initial_state: {kind!r} is not one of zero, random, wide")
        size = (self.shape.V, self.shape.K)
        states = np.zeros((self.config.slots, len(self.values), *size), np.float32)
        for slot in range(self.config.slots):
            draw = self.generator.draw(slot, "head", 0, 0)
            for i, head in enumerate(self.values):
                if self.family.state is not None:
                    states[slot, i] = self.family.state(draw, head)
                elif kind == "random":
                    states[slot, i] = np.float32(0.1) * draw.fixed(NORMAL, "state", head, *size)
                elif kind == "wide":
                    states[slot, i] = draw.fixed(WIDE, "state", head, *size)
        return torch.from_numpy(states).to(self.device, torch.float64)

    def _gathered(self, starts: np.ndarray, count: int, needed: list[int]) -> Tokens:
        """tokens() by a few operations, however many slots there are."""
        t = starts[:, None] + np.arange(count)
        out: list[Tensor] = []
        for b in needed:
            block = self.block(b)
            slot, at = np.nonzero(t // BLOCK == b)
            of, to = on_device(self.device, slot * BLOCK + t[slot, at] - b * BLOCK, slot * count + at)
            read = [getattr(block, f.name) for f in fields(Tokens)]
            out = out or [x.new_empty(len(starts), count, *x.shape[2:]) for x in read]
            for x, y in zip(read, out, strict=True):
                # whole rows, as an index over two axes moves number by number
                y.flatten(0, 1).index_copy_(0, to, x.flatten(0, 1).index_select(0, of))
        return Tokens(*out)

    def _begin(self, b: int) -> None:
        """Start to draw a block on the CPU, unless that is under way, the decode ends before or the loop has begun."""
        if b in self._ahead or b * BLOCK >= self.config.prefill + self.config.tokens:
            return
        if self.loop_start is None or b * BLOCK < self.loop_start:
            self._ahead[b] = self.generator.start("block", b, BLOCK)

    def _drawn(self, b: int) -> Tokens:
        host = self._ahead.pop(b, None) or self.generator.start("block", b, BLOCK)
        return self.generator.finish(host)

    def _true(self, b: int) -> Tokens:
        """One block of every slot, [slots, 1024]: drawn, and from the start of the loop on repeated."""
        t = torch.arange(b * BLOCK, (b + 1) * BLOCK)
        start = self.loop_start
        if start is None or t[-1] < start:
            return self._drawn(b)
        if self._loop is None:
            self._loop = self.generator.finish(self.generator.start("loop", 0, self.family.period))
        at = ((t[t >= start] - start) % self.family.period).to(self.device)
        looped = self._loop.map(lambda x: x[:, at])
        if t[0] >= start:
            return looped
        before = self._drawn(b).map(lambda x: x[:, : start - t[0]])
        return Tokens(*(torch.cat([getattr(x, f.name) for x in (before, looped)], 1) for f in fields(Tokens)))

    def _finish(self, tokens: Tokens, first: int) -> Tokens:
        """Put captured and fixed gates in place, and check."""
        count = tokens.g.shape[1]
        if self.trace is not None:
            g, beta = self.trace.at(torch.arange(first, first + count), torch.tensor(self.values))
            g, beta = g.to(self.device), beta.to(self.device)
            tokens.g, tokens.beta = g.expand_as(tokens.g).clone(), beta.expand_as(tokens.beta).clone()
        if self.config.g is not None:
            tokens.g = torch.full_like(tokens.g, self.config.g)
        if self.config.beta is not None:
            tokens.beta = torch.full_like(tokens.beta, self.config.beta)
        tokens.validate(first)
        return tokens


def _join(parts: list[Tokens]) -> Tokens:
    """Token runs one after the other, leading axis [tokens]."""
    if len(parts) == 1:
        return parts[0]
    return Tokens(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Tokens)))


def _stack(parts: list[Tokens]) -> Tokens:
    """Slots side by side, a new leading axis [slots]."""
    return Tokens(*(torch.stack([getattr(p, f.name) for p in parts]) for f in fields(Tokens)))
