"""The ring/checkpoint state model: one checkpoint, a ring of declared records and three cursors per slot.

Every design reads and writes this object. Record j of a slot's history lies at physical row (cache_base + j) & (L-1).
A step is verify, then commit: verify writes the window's records behind the history and moves no cursor; commit(n)
keeps n of them by moving cursors. A flagged slot folds its history into the checkpoint at its next verify (fold_when
"next") or as soon as the flag would rise ("commit").

Rows outside the history hold NaN until something is written there: nothing may read them.

Source: the cursor rules of sgl-project/sglang python/sglang/srt/layers/attention/fla/gdn_replayssm_spec_decode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.errors import ConfigError, RingError
from harness.tokens import Shape

# field -> (heads, width): which sizes of the layer a record row has
RECORDS: dict[str, tuple[str, str | None]] = {
    "v": ("HV", "V"),  # raw value
    "k": ("H", "K"),  # raw key, before the norm
    "k_hat": ("H", "K"),
    "k_hat_lo": ("H", "K"),  # low part of a two-part record
    "d": ("HV", "V"),
    "d_lo": ("HV", "V"),
    "g": ("HV", None),  # log decay, of the token or cumulative since the last fold, as the design declares
    "beta": ("HV", None),
}


@dataclass(frozen=True)
class RingSpec:
    """Ring length L, widest window, and the flush rule. Raises ConfigError for a combination that could overflow."""

    length: int
    max_window: int
    flush_at: int | None = None  # committed records that raise the flag; None: L - 2*max_window + 1
    fold_when: str = "next"

    def __post_init__(self) -> None:
        L, m = self.length, self.max_window
        if L < 1 or L & (L - 1):
            raise ConfigError(f"ring.length: {L} is not a power of two")
        if m < 1:
            raise ConfigError(f"ring.max_window: {m} is below 1")
        if self.fold_when not in ("next", "commit"):
            raise ConfigError(f"ring.fold_when: {self.fold_when!r} is neither next nor commit")
        windows = 2 if self.fold_when == "next" else 1
        if self.flush_at is None:
            object.__setattr__(self, "flush_at", L - 2 * m + 1)
            if L - 2 * m + 1 < 1:
                raise ConfigError(f"ring.length: {L} cannot hold two windows of ring.max_window={m}")
        assert self.flush_at is not None
        if self.flush_at < 1:
            raise ConfigError(f"ring.flush_at: {self.flush_at} is below 1")
        if self.flush_at - 1 + windows * m > L:
            raise ConfigError(
                f"ring.flush_at: {self.flush_at} - 1 + {windows}*{m} exceeds ring.length={L}; "
                f"the largest legal value is {L - windows * m + 1}"
            )


class Cursors:
    """write_pos, cache_base and is_flush of every slot, and the step in progress; plain integers on the host."""

    def __init__(self, spec: RingSpec, slots: int):
        self.spec, self.slots = spec, slots
        assert spec.flush_at is not None
        self.flush_at = spec.flush_at
        self.write_pos = [0] * slots
        self.cache_base = [0] * slots
        self.is_flush = [False] * slots
        self.window = [-1] * slots  # tokens verified and not yet committed, -1 outside a step
        self.flushed = [False] * slots  # whether this step took the flush route

    def check(self, slots: Sequence[int]) -> None:
        """Refuse slot numbers that do not exist or appear twice."""
        for slot in slots:
            if not 0 <= slot < self.slots:
                raise RingError(f"slot {slot}: not in 0..{self.slots - 1}")
        if len(slots) > 1 and len(set(slots)) < len(slots):
            raise RingError(f"slots {list(slots)}: one appears twice")

    def paired(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Refuse counts that do not go with the slots one to one."""
        if len(slots) != len(counts):
            raise RingError(f"slots {list(slots)}: {len(counts)} counts for {len(slots)} slots")

    def idle(self, slots: Sequence[int], verb: str) -> None:
        """Refuse to touch a slot between its verify and its commit, or one whose cursors leave the ring."""
        self.check(slots)
        for slot in slots:
            w, base = self.write_pos[slot], self.cache_base[slot]
            if not (0 <= w <= self.spec.length and 0 <= base < self.spec.length):
                raise RingError(f"slot {slot}: write_pos {w}, cache_base {base} leave a ring of {self.spec.length}")
            if self.window[slot] >= 0:
                raise RingError(f"slot {slot}: {verb} between verify and commit")

    def verify(self, slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Begin a step of lengths[i] tokens on slots[i]; returns the slots that take the flush route."""
        self.idle(slots, "verify")
        self.paired(slots, lengths)
        L, widest = self.spec.length, self.spec.max_window
        for slot, m in zip(slots, lengths, strict=True):
            w = self.write_pos[slot]
            if not 1 <= m <= widest:
                raise RingError(f"slot {slot}: a window of {m} is not in 1..max_window={widest}")
            if w + m > L:
                raise RingError(f"slot {slot}: a window of {m} at write_pos {w} leaves a ring of {L}")
        for slot, m in zip(slots, lengths, strict=True):
            self.window[slot], self.flushed[slot] = m, self.is_flush[slot]
        return [slot for slot in slots if self.is_flush[slot]]

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """Keep the first accepted[i] tokens of each window; returns the slots to fold now (fold_when=commit)."""
        self.check(slots)
        self.paired(slots, accepted)
        for slot, n in zip(slots, accepted, strict=True):
            if self.window[slot] < 0:
                raise RingError(f"slot {slot}: commit without a verify in this step")
            if not 0 <= n <= self.window[slot]:
                raise RingError(f"slot {slot}: {n} tokens accepted of a window of {self.window[slot]}")
        full = []
        for slot, n in zip(slots, accepted, strict=True):
            if self.flushed[slot]:
                if n > 0:
                    self.cache_base[slot] = (self.cache_base[slot] + self.write_pos[slot]) & (self.spec.length - 1)
                self.write_pos[slot] = n
            else:
                self.write_pos[slot] += n
            self.window[slot], self.flushed[slot] = -1, False
            over = self.write_pos[slot] >= self.flush_at
            self.is_flush[slot] = over and self.spec.fold_when == "next"
            if over and self.spec.fold_when == "commit":
                full.append(slot)
        return full

    def absorb(self, slots: Sequence[int]) -> None:
        """Move the history behind the base: it has just been folded."""
        for slot in slots:
            self.cache_base[slot] = (self.cache_base[slot] + self.write_pos[slot]) & (self.spec.length - 1)
            self.write_pos[slot] = 0
            self.is_flush[slot] = False

    def reset(self, slots: Sequence[int]) -> None:
        """An empty history, whatever was in progress."""
        self.check(slots)
        for slot in slots:
            self.write_pos[slot] = self.cache_base[slot] = 0
            self.is_flush[slot] = self.flushed[slot] = False
            self.window[slot] = -1

    def copy(self, source: int, target: int) -> None:
        """The three cursors of `source`, for a slot whose ring has been copied too."""
        self.write_pos[target] = self.write_pos[source]
        self.cache_base[target] = self.cache_base[source]
        self.is_flush[target] = self.is_flush[source]

    def part(self, slots: slice) -> Cursors:
        """An independent copy of some slots."""
        new = Cursors(self.spec, 0)
        for name in ("write_pos", "cache_base", "is_flush", "window", "flushed"):
            setattr(new, name, getattr(self, name)[slots])
        new.slots = len(new.write_pos)
        return new

    def force_flush(self, slots: Sequence[int]) -> None:
        """Raise the flag: the slots fold at their next verify, whatever their history length."""
        self.idle(slots, "force_flush")
        for slot in slots:
            self.is_flush[slot] = True


class State:
    """Checkpoint [slots, HV, V, K], records {field: [slots, heads, L, width]} and cursors, fp64 carriers."""

    def __init__(self, shape: Shape, spec: RingSpec, slots: int, records: tuple[str, ...], device: Any = "cpu"):
        unknown = set(records) - set(RECORDS)
        if unknown:
            raise ConfigError(f"records: {', '.join(sorted(unknown))} not among {', '.join(RECORDS)}")
        self.shape, self.spec, self.slots, self.device = shape, spec, slots, torch.device(device)
        self.cursors = Cursors(spec, slots)
        self.checkpoint = self._poison(slots, shape.HV, shape.V, shape.K)
        self.records = {}
        for name in records:
            heads, width = RECORDS[name]
            tail = (getattr(shape, width),) if width else ()
            self.records[name] = self._poison(slots, getattr(shape, heads), spec.length, *tail)
        self.seed = list(range(slots))  # of each slot's stream; keys stochastic rounding
        self.tokens = [0] * slots  # committed since the slot's reset
        self.version = 0  # rises with every change; what was computed from an older one is void

    def _poison(self, *size: int) -> Tensor:
        return torch.full(size, torch.nan, dtype=torch.float64, device=self.device)

    def reset(self, slots: Sequence[int], initial: Tensor) -> None:
        """Hand `slots` to new sequences starting at `initial` [n, HV, V, K]; their old records are void."""
        self.cursors.reset(slots)
        self.checkpoint[list(slots)] = initial.to(self.checkpoint)
        for rows in self.records.values():
            rows[list(slots)] = torch.nan
        for slot in slots:
            self.tokens[slot] = 0
        self.version += 1

    def copy(self, source: int, target: int, ring: bool = False) -> None:
        """Copy a slot. A source with history is refused unless its ring comes along (sglang#28451)."""
        cursors = self.cursors
        if source == target:
            raise RingError(f"slot {source}: copied onto itself")
        cursors.idle([source], "copy")
        if cursors.write_pos[source] and not ring:
            raise RingError(f"slot {source}: {cursors.write_pos[source]} records not folded; copy its ring too")
        cursors.reset([target])
        if ring:
            cursors.copy(source, target)
        self.checkpoint[target] = self.checkpoint[source]
        for rows in self.records.values():
            rows[target] = rows[source] if ring else torch.nan
        self.tokens[target], self.seed[target] = self.tokens[source], self.seed[source]
        self.version += 1


def run_of(slots: Sequence[int]) -> slice | None:
    """Consecutive slots as a slice, so that they are read in place; None where they are not consecutive."""
    if not slots:
        return None
    first, end = slots[0], slots[-1] + 1
    return slice(first, end) if end - first == len(slots) and all(b - a == 1 for a, b in pairwise(slots)) else None


class Rows:
    """The first lengths[i] history rows of slots[i], in logical order; what lies behind reads as zero."""

    def __init__(self, state: State, slots: Sequence[int], lengths: Sequence[int]):
        self.state, self.slots, self.lengths = state, slots, lengths
        self.count = max(lengths, default=0)
        self.uneven = min(lengths, default=0) < self.count
        L = state.spec.length
        base = [state.cursors.cache_base[slot] for slot in slots]
        self.run = run_of(slots)
        alike = self.run is not None and not self.uneven and base.count(base[0]) == len(base)
        self.span = slice(base[0], base[0] + self.count) if alike and base[0] + self.count <= L else None
        if self.span is None:
            index = (np.array(base)[:, None] + np.arange(self.count)) & (L - 1)
            self.index = torch.from_numpy(index).to(state.device)
            behind = np.arange(self.count) >= np.array(lengths)[:, None]
            self.behind = torch.from_numpy(behind).to(state.device) if self.uneven else None

    def read(self, name: str) -> Tensor:
        """[n, heads, count, width] of one field."""
        rows = self.state.records[name]
        if self.span is not None:
            return rows[self.run, :, self.span]
        rows = rows[list(self.slots)] if self.run is None else rows[self.run]
        tail = rows.shape[3:]
        ones = (1,) * len(tail)
        index = self.index.view(len(self.slots), 1, self.count, *ones)
        got = rows.gather(2, index.expand(-1, rows.shape[1], -1, *tail))
        if self.behind is None:
            return got
        # a select, not a product: what lies behind may hold NaN
        return got.masked_fill(self.behind.view(len(self.slots), 1, self.count, *ones), 0.0)

    def last(self, values: Tensor) -> Tensor:
        """values [n, heads, count] at each slot's last row, [n, heads, 1]; zero-length slots yield row 0, a zero."""
        if not self.uneven:
            return values[..., -1:]
        at = torch.tensor([max(n, 1) - 1 for n in self.lengths], device=values.device)
        return values.gather(-1, at.view(-1, 1, 1).expand(-1, values.shape[1], 1))


class Lanes:
    """Where a step's records go: behind the history of each of its slots; padded lanes go nowhere."""

    def __init__(self, state: State, slots: Sequence[int], lengths: Sequence[int]):
        cursors, L = state.cursors, state.spec.length
        first = [(cursors.cache_base[s] + cursors.write_pos[s]) & (L - 1) for s in slots]
        start, m = first[0], lengths[0]
        self.state, self.run = state, run_of(slots)
        alike = self.run is not None and first.count(start) == len(first) and list(lengths).count(m) == len(lengths)
        self.span = slice(start, start + m) if alike and start + m <= L else None
        if self.span is None:
            which, lane = np.nonzero(np.arange(max(lengths)) < np.array(lengths)[:, None])
            row = (np.array(first)[which] + lane) & (L - 1)
            self.slot, self.lane, self.row = (
                torch.from_numpy(i).to(state.device) for i in (np.array(slots)[which], lane, row)
            )

    def write(self, name: str, values: Tensor, origin: int = 0) -> None:
        """values [n, heads, m, width] of slots origin..origin+n-1; those outside the step are ignored."""
        rows = self.state.records[name]
        if self.span is not None and self.run is not None:
            mine = values[self.run.start - origin : self.run.stop - origin]
            rows[self.run, :, self.span] = mine[:, :, : self.span.stop - self.span.start]
        else:
            rows[self.slot, :, self.row] = values[self.slot - origin, :, self.lane]
