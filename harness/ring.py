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
from typing import TYPE_CHECKING

from harness.errors import ConfigError, RingError

if TYPE_CHECKING:
    from harness.config import RingConfig


@dataclass(frozen=True)
class RingSpec:
    """Ring length L, widest window, and the flush rule. Raises ConfigError for a combination that could overflow."""

    length: int
    max_window: int
    flush_at: int | None = None  # committed records that raise the flag; None: L - 2*max_window + 1
    fold_when: str = "next"

    @staticmethod
    def of(ring: RingConfig) -> RingSpec:
        """The ring of a run, whose flushes are its grid."""
        return RingSpec(ring.length, ring.max_window, ring.flush_at, ring.fold_when)

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

    def current(self, slots: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """Slots whose flag has folded the token at hand, in a design that does so.

        Raises RingError for one that refuses its token.
        """
        current = [slot for slot in slots if self.flushed[slot]]
        for slot, n in zip(slots, accepted, strict=True):
            if slot in current and n == 0:
                raise RingError(f"slot {slot}: its token is folded already and cannot be refused")
        return current

    def step(self, slots: Sequence[int], accepted: Sequence[int], fold_current: bool = False) -> list[int]:
        """A commit and the folds that belong to it; returns the slots folded at once (fold_when=commit).

        fold_current: a flag has folded the token at hand too, which leaves no record behind.
        """
        current = self.current(slots, accepted) if fold_current else []
        full = self.commit(slots, accepted)
        self.absorb(current)
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
