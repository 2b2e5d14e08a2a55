"""What is timed on a GPU, ours: the steps of a design bound to buffers, with the bytes they move.

Every design first decodes the same SETTLE windows on every set of buffers; its output of the next window is kept, so
that what is compared is one function. Timed calls only move device cursors: `before` puts them back, and states go on
wherever they are, as no time depends on their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.errors import HarnessError
from harness.peers.seat import Seat, seat
from harness.ring import RingSpec
from harness.timing import Call, Row, rotated, sets_needed
from harness.tokens import Shape
from harness.traffic import Moved, Traffic, of_design
from harness.workload import SETTLE, Gate, Trace, Window, accepts, draw, flush_length, trace, unflagged

CALLS, BYTES = (4, 16), 1 << 32  # calls in a graph: between these, as many as move that much
STEPS, STEPS_A_SET = 32, 8  # verify-commit pairs in a graph at least, and of each set
SNAPSHOT, RING, FLUSH, FOLD, STEP = "snapshot verify", "ring verify", "flush step", "fold", "step"


@dataclass
class Contender:
    """A line of the result: what is done by whom, how to time it, and per unit the bytes that must move.

    error: relative distance of its output to the same window's of the design named in `against`
    """

    what: str
    who: str
    row: Row
    moved: Moved
    sets: int
    allocated: dict[str, int]  # bytes of one set
    error: float | None = None
    against: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Work:
    """The windows and accepts of one batch of one layer, drawn once for all who are timed."""

    shape: Shape
    B: int
    m: int
    ring: RingSpec
    cache: int  # bytes of L2
    seed: int = 0
    device: str = "cuda"
    outs: dict[str, Tensor] = field(default_factory=dict)  # of the window after SETTLE, set 0, by design
    seats: dict[str, list[Seat]] = field(default_factory=dict)  # states handed to peers, by design

    def __post_init__(self) -> None:
        self.rng = torch.Generator(self.device).manual_seed(self.seed)
        self.gate = Gate.draw(self.shape.HV, self.rng)
        s = self.shape
        size = (self.B, s.HV, s.V, s.K)
        self.initial = torch.randn(size, generator=self.rng, device=self.device, dtype=torch.float64)
        self.settling = [self.window() for _ in range(SETTLE)]
        self.windows: list[Window] = []

    def window(self) -> Window:
        """A new window."""
        return draw(self.shape, self.gate, self.B, self.m, self.rng)

    def timed(self, sets: int) -> list[Window]:
        """A window of every set; the same ones for every design."""
        while len(self.windows) < sets:
            self.windows.append(self.window())
        return self.windows[:sets]

    def tensor(self, x: NDArray[Any]) -> Tensor:
        """int32 on the device."""
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(self.device)


def inputs(x: Window) -> Any:
    """What our kernels take of a window."""
    from harness.kernels.steps import Inputs

    return Inputs(x.q, x.k, x.v, x.g, x.beta, x.lengths)


def distance(x: Tensor, y: Tensor) -> float:
    """‖x - y‖ / ‖y‖, in fp64."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def flagged(cursors: Tensor, w: int | None = None) -> Tensor:
    """These cursors [3, B] with every slot to flush w records; None: what each has."""
    found = cursors.clone()
    found[2] = 1
    if w is not None:
        found[0] = w
    return found


def enough(moved: Moved) -> int:
    """Calls in a graph, so that it takes far longer than the events around it."""
    return min(max(int(BYTES / moved.total), CALLS[0]), CALLS[1])


class Settled:
    """A design after SETTLE steps on every set of buffers. Raises HarnessError if its cursors left those of the ring.

    plain    [3, B] of every set: where a decode is at a verify without a flush
    """

    def __init__(self, design: Any, work: Work):
        self.design, self.work, B = design, work, work.B
        self.name, self.traffic = design.spec.name, of_design(design, work.shape, work.m)
        self.sets = sets_needed(self.traffic.state * B, work.cache)
        self.windows = work.timed(self.sets)
        drawn = unflagged(work.ring, self.sets * B, work.m, work.seed)
        counts, self.cursors = work.tensor(drawn), trace(design.ring, drawn, work.m).cursors[-1]
        self.states: list[Any] = []
        self.steps: list[Any] = []
        for i in range(self.sets):
            mine = slice(i * B, (i + 1) * B)
            state = design.create(work.shape, B, work.initial, device=work.device)
            steps = design.steps(state, work.m)
            for t, x in enumerate(work.settling):
                steps.verify(inputs(x))
                steps.commit(counts[t, mine])
            # a design of snapshots has no history, and need not count it
            if not self.traffic.snapshot and not torch.equal(state.on_device, work.tensor(self.cursors[:, mine])):
                raise HarnessError(f"{self.name}: cursors on the device left those of the ring after {SETTLE} steps")
            self.states.append(state)
            self.steps.append(steps)
        self.plain = [state.on_device.clone() for state in self.states]
        for there in self.plain:
            there[2] = 0
        self.verifies: list[Call] = [
            partial(steps.verify, inputs(x)) for steps, x in zip(self.steps, self.windows, strict=True)
        ]

    def seats(self) -> list[Seat]:
        """Copies of every set for a peer."""
        return [seat(x, self.work.gate, state) for x, state in zip(self.windows, self.states, strict=True)]

    def output(self, cursors: Tensor) -> Tensor:
        """Of the timed window of set 0, at these cursors. A flush leaves the state folded."""
        # what the run before has left there would agree
        self.steps[0].out.fill_(torch.nan)
        self.steps[0].place(cursors)
        self.verifies[0]()
        return self.steps[0].out.clone()

    def verify(self, what: str, cursors: Sequence[Tensor], moved: Moved, **facts: Any) -> Contender:
        """Verifies of the timed windows from these cursors of every set."""
        return self.line(what, rotated(self.verifies, enough(moved)), cursors, moved, **facts)

    def line(
        self, what: str, calls: Sequence[Call], cursors: Sequence[Tensor], moved: Moved, **facts: Any
    ) -> Contender:
        """Calls from these cursors of every set."""

        def before() -> None:
            for steps, c in zip(self.steps, cursors, strict=True):
                steps.place(c)

        allocated = dict(self.steps[0].nbytes)
        return Contender(what, self.name, Row(calls, before), moved, self.sets, allocated, facts=facts)


def ours(settled: Settled, against: str | None) -> list[Contender]:
    """The rows of one of our designs, whose output is compared with that of the design `against` in work.outs."""
    work, traffic, B = settled.work, settled.traffic, settled.work.B
    plain, full = settled.plain, flush_length(work.ring, work.m)
    work.outs[settled.name] = settled.output(plain[0])
    if traffic.snapshot:
        found = [settled.verify(SNAPSHOT, plain, traffic.verify(0) * B)]
    else:
        # the mean over the slots that are timed
        moved = sum_of(traffic.verify(w) for w in settled.cursors[0].tolist()) * (1 / settled.sets)
        found = [settled.verify(RING, plain, moved)]
    _compare(found[0], work.outs[settled.name], work, against)
    if not traffic.snapshot and settled.design.ring.fold_when == "next":
        moved = traffic.verify(full, flush=True) * B
        found.append(settled.verify(FLUSH, [flagged(c, full) for c in plain], moved, history=full))
        _compare(found[-1], settled.output(flagged(plain[0])), work, against)
    if not traffic.snapshot:
        lengths = torch.full((B,), full, dtype=torch.int32, device=work.device)
        folds: list[Call] = [partial(steps.fold, lengths) for steps in settled.steps]
        loop = "closed" if settled.design.spec.fold == "replay" else "open"
        moved = traffic.fold(full) * B
        found.append(settled.line(FOLD, rotated(folds, enough(moved)), plain, moved, history=full, loop=loop))
    start, pairs = cycle(work, settled.design.ring, settled.sets)
    calls: list[Call] = []
    for t in range(len(pairs)):
        for i, steps in enumerate(settled.steps):
            calls += [settled.verifies[i], partial(steps.commit, pairs[t, i * B : (i + 1) * B])]
    parts = [start[:, i * B : (i + 1) * B].contiguous() for i in range(settled.sets)]
    units, moved, facts = amortised(work, traffic, settled.design.ring, settled.sets)
    found.append(settled.line(STEP, calls, parts, moved, **facts))
    found[-1].row = Row(calls, found[-1].row.before, units)
    return found


def _compare(line: Contender, out: Tensor, work: Work, against: str | None) -> None:
    if against is not None:
        line.error, line.against = distance(out, work.outs[against]), against


def drawn_steps(work: Work, ring: RingSpec, sets: int) -> tuple[Trace, NDArray[np.int64]]:
    """Accepts of SETTLE untimed and the timed steps of all sets, and the cursors they lead to on `ring`."""
    timed = max(STEPS_A_SET, math.ceil(STEPS / sets))
    counts = accepts(sets * work.B, SETTLE + timed, work.m, work.seed + 1)
    return trace(ring, counts, work.m), counts


def cycle(work: Work, ring: RingSpec, sets: int) -> tuple[Tensor, Tensor]:
    """Where the timed steps start, [3, sets B], and what they accept, [steps, sets B]; int32 on the device."""
    seen, counts = drawn_steps(work, ring, sets)
    return work.tensor(seen.cursors[SETTLE]), work.tensor(counts[SETTLE:])


def amortised(work: Work, traffic: Traffic, ring: RingSpec, sets: int) -> tuple[int, Moved, dict[str, Any]]:
    """Verify-commit pairs that are timed, bytes of one of them, and how often a slot flushes."""
    seen, counts = drawn_steps(work, ring, sets)
    cursors, folded = seen.cursors[SETTLE:-1], seen.folded[SETTLE:]
    units = (len(counts) - SETTLE) * sets
    if traffic.snapshot:
        return units, (traffic.verify(0) + traffic.commit(0)) * work.B, {}
    w, flag = cursors[:, 0].ravel().tolist(), cursors[:, 2].ravel().tolist()
    moved = sum_of(traffic.verify(n, bool(f)) for n, f in zip(w, flag, strict=True))
    moved += sum_of(traffic.commit(n) for n in folded.ravel().tolist())
    flushes = (sum(flag) + int((folded > 0).sum())) / len(w)
    return units, moved * (1 / units), {"flushes_a_step": flushes}


def sum_of(parts: Iterable[Moved]) -> Moved:
    """Their sum."""
    return sum(parts, Moved())
