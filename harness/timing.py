"""Seconds per call on a GPU: a CUDA graph of many calls over rotating buffers, all competitors replayed in rounds.

A launch from the host costs 15 to 40 µs and hides what small batches cost; a graph does not. Buffers that were used a
moment ago lie in the L2 cache, where no layer of a model finds its state; calls therefore rotate over sets of buffers
that together exceed twice that cache. Rounds over all rows let a drift of the clocks meet everything alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

Call = Callable[[], object]
L2_SHARES = 2  # rotating buffers exceed the cache this many times
SIZES = (1 << 28, 1 << 29, 1 << 30)  # fp32 numbers summed or copied: a measured bandwidth is the best of them


def nothing() -> None:
    """Where a row needs no preparation."""


@dataclass(frozen=True)
class Row:
    """What one replay does: `calls` in order. `before` puts the device where the calls start from, untimed."""

    calls: Sequence[Call]
    before: Call = nothing
    count: int = 0  # what a replay's time is divided by; 0: the calls

    @property
    def divisor(self) -> int:
        """Units of work in one replay."""
        return self.count or len(self.calls)


class Clock(Protocol):
    """Whatever makes a row replayable and times one replay."""

    def capture(self, row: Row) -> Call:
        """Run every call once, so that it is compiled, and return what replays them all."""

    def seconds(self, row: Row, replay: Call) -> float:
        """One replay from the state that `before` leaves."""


class Graphs:
    """The clock of a GPU: CUDA graphs between two events."""

    def capture(self, row: Row) -> Call:
        """See Clock."""
        # inputs may still be in the making on this stream
        torch.cuda.synchronize()
        row.before()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in row.calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in row.calls:
                call()
        return graph.replay

    def seconds(self, row: Row, replay: Call) -> float:
        """See Clock. A replay in front keeps the device busy while the timed one is launched."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        row.before()
        replay()
        row.before()
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def sets_needed(nbytes: int, cache: int) -> int:
    """Sets of buffers of `nbytes` to rotate over, so that together they exceed the cache L2_SHARES times."""
    return L2_SHARES * cache // nbytes + 1


def rotated(sets: Sequence[Call], least: int) -> list[Call]:
    """Every set in turn, in whole rounds, `least` calls or more."""
    return list(sets) * math.ceil(least / len(sets))


def measure(rows: Mapping[str, Row], repeats: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds per unit of every row, one round over all rows after the other."""
    replays = {name: clock.capture(row) for name, row in rows.items()}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, row in rows.items():
            seconds[name].append(clock.seconds(row, replays[name]) / row.divisor)
    return seconds


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, lower and upper quartile in µs, and every sample."""
    us = [1e6 * s for s in seconds]
    low, median, high = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
    return {"us": median, "us_low": low, "us_high": high, "samples": us}


def bandwidths(repeats: int, clock: Clock, sizes: Sequence[int] = SIZES, device: str = "cuda") -> dict[str, float]:
    """Bytes per second of a sum (`read`) and of a copy (`copy`: read and written bytes) of fp32 numbers; best size."""
    found = {"read": 0.0, "copy": 0.0}
    for size in sizes:
        # two allocations: one that overlaps itself is copied at two thirds of the speed
        x, y = (torch.zeros(size, device=device) for _ in range(2))
        rows = {"read": Row([x.sum] * 4), "copy": Row([partial(y.copy_, x)] * 4)}
        for name, seconds in measure(rows, repeats, clock).items():
            moved = (1 + (name == "copy")) * x.nbytes
            found[name] = max(found[name], moved / statistics.median(seconds))
        del x, y, rows
    return found
