"""Checkpoint and records of every slot under the cursors of harness.ring, and how rows are reached.

Rows outside a history hold NaN until something is written there: nothing may read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.errors import ConfigError, RingError
from harness.ring import Cursors, RingSpec
from harness.tokens import Shape, on_device

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


class State:
    """Checkpoint [slots, HV, V, K], records {field: [slots, heads, L, width]} and cursors.

    fp64 carriers, but for the fields that `formats` names, `checkpoint` among them.
    """

    def __init__(
        self,
        shape: Shape,
        spec: RingSpec,
        slots: int,
        records: tuple[str, ...],
        device: Any = "cpu",
        formats: Mapping[str, torch.dtype] | None = None,
    ):
        formats = formats or {}
        unknown = set(records) - set(RECORDS)
        if unknown:
            raise ConfigError(f"records: {', '.join(sorted(unknown))} not among {', '.join(RECORDS)}")
        self.shape, self.spec, self.slots, self.device = shape, spec, slots, torch.device(device)
        self.cursors = Cursors(spec, slots)
        self.checkpoint = self._poison(formats.get("checkpoint"), slots, shape.HV, shape.V, shape.K)
        self.records = {}
        for name in records:
            heads, width = RECORDS[name]
            tail = (getattr(shape, width),) if width else ()
            self.records[name] = self._poison(formats.get(name), slots, getattr(shape, heads), spec.length, *tail)
        self.seed = list(range(slots))  # of each slot's stream; keys stochastic rounding
        self.tokens = [0] * slots  # committed since the slot's reset
        self.version = 0  # rises with every change; what was computed from an older one is void

    def _poison(self, dtype: torch.dtype | None, *size: int) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype or torch.float64, device=self.device)

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
            behind = np.arange(self.count) >= np.array(lengths)[:, None]
            self.index, hidden, self.which = on_device(state.device, index, behind, np.array(slots))
            self.behind = hidden if self.uneven else None

    def read(self, name: str) -> Tensor:
        """[n, heads, count, width] of one field."""
        rows = self.state.records[name]
        if self.span is not None:
            return rows[self.run, :, self.span]
        rows = rows[self.which] if self.run is None else rows[self.run]
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
        (at,) = on_device(values.device, np.maximum(self.lengths, 1) - 1)
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
            self.slot, self.lane, self.row = on_device(state.device, np.array(slots)[which], lane, row)

    def write(self, name: str, values: Tensor, origin: int = 0) -> None:
        """values [n, heads, m, width] of slots origin..origin+n-1; those outside the step are ignored."""
        rows = self.state.records[name]
        if self.span is not None and self.run is not None:
            mine = values[self.run.start - origin : self.run.stop - origin]
            rows[self.run, :, self.span] = mine[:, :, : self.span.stop - self.span.start]
        else:
            rows[self.slot, :, self.row] = values[self.slot - origin, :, self.lane]
