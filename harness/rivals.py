"""What is timed beside our designs: kernels of peers, on copies of the states that our designs have settled in.

Each is run once before it is timed and its output compared with ours: a ratio to a kernel that computes something else
is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.contenders import (
    FLUSH,
    RING,
    SNAPSHOT,
    STEP,
    Contender,
    Work,
    amortised,
    cycle,
    distance,
    enough,
    flagged,
    sum_of,
)
from harness.peers import fla, sglang
from harness.peers.seat import Bound
from harness.ring import RingSpec
from harness.timing import Row, rotated
from harness.traffic import Moved, Traffic
from harness.workload import flush_length, head_major

RECURRENT, REPLAY = "exact_recurrent", "exact_fold"  # our designs whose states and outputs peers are given and held to
SIZES = {"checkpoint": 4, "output": 2, "d": 2, "k_hat": 2, "g": 4, "v": 2, "k": 2, "beta": 4, "d_lo": 2, "k_hat_lo": 2}
PLAIN = ("d", "k_hat", "g")
WRITTEN = {"raw": (*PLAIN, "v", "k", "beta"), "compact": (*PLAIN, "d_lo", "k_hat_lo")}
FOLDED = {"raw": ("v", "k", "g", "beta"), "compact": (*PLAIN, "d_lo", "k_hat_lo")}
Maker = Callable[[], Contender]


def _bound(
    what: str, who: str, bounds: Sequence[Bound], moved: Moved, work: Work, against: str, checked: Bound | None = None
) -> Contender:
    first = checked or bounds[0]
    first.run()
    error = distance(head_major(first.out(), work.B), work.outs[against])
    row = Row(rotated([b.run for b in bounds], enough(moved)))
    return Contender(what, who, row, moved, len(bounds), _allocated(bounds[0]), error, against)


def _allocated(bound: Bound) -> dict[str, int]:
    return {name: x.nbytes for name, x in bound.tensors.items()}


def of_sglang(kernels: sglang.Kernels, work: Work) -> dict[str, Maker]:
    """What makes sglang's rows, by name; each may fail on its own."""
    B, full = work.B, flush_length(work.ring, work.m)
    traffic = {mode: Traffic(work.shape, work.m, SIZES, WRITTEN[mode], PLAIN, FOLDED[mode]) for mode in sglang.MODES}
    seats = work.seats[REPLAY]

    def verify(mode: str) -> Contender:
        lengths: list[int] = [w for s in seats for w in s.cursors[0].tolist()]
        moved = sum_of(traffic[mode].verify(w) for w in lengths) * (1 / len(seats))
        bounds = [sglang.ring(kernels, s, mode, "verify") for s in seats]
        return _bound(RING, f"sglang {mode}", bounds, moved, work, REPLAY)

    def flush() -> Contender:
        # checked on the histories there are, on a copy: it writes the checkpoint
        alone = replace(seats[0], cursors=flagged(seats[0].cursors), checkpoint=seats[0].checkpoint.clone())
        bounds = [sglang.ring(kernels, replace(s, cursors=flagged(s.cursors, full)), "raw", "flush") for s in seats]
        moved = traffic["raw"].verify(full, flush=True) * B
        line = _bound(FLUSH, "sglang raw", bounds, moved, work, REPLAY, sglang.ring(kernels, alone, "raw", "flush"))
        line.facts["history"] = full
        return line

    def step() -> Contender:
        # its own rule, whatever the run's
        at_once = RingSpec(work.ring.length, work.m, fold_when="commit")
        start, pairs = cycle(work, at_once, len(seats))
        mine = [slice(i * B, (i + 1) * B) for i in range(len(seats))]
        made = [
            sglang.step(kernels, replace(s, cursors=start[:, part].contiguous()), [n[part] for n in pairs])
            for s, part in zip(seats, mine, strict=True)
        ]
        units, moved, facts = amortised(work, traffic["compact"], at_once, len(seats))

        def before() -> None:
            for _, back, _ in made:
                back()

        row = Row([calls[t] for t in range(len(pairs)) for calls, _, _ in made], before, units)
        return Contender(STEP, "sglang compact", row, moved, len(seats), _allocated(made[0][2]), facts=facts)

    def snapshots() -> Contender:
        moved = Traffic(work.shape, work.m, SIZES, snapshot=True).verify(0) * B
        bounds = [sglang.snapshots(kernels, s) for s in work.seats[RECURRENT]]
        return _bound(SNAPSHOT, "sglang", bounds, moved, work, RECURRENT)

    return {
        "sglang ring verify, raw": lambda: verify("raw"),
        "sglang ring verify, compact": lambda: verify("compact"),
        "sglang flush step": flush,
        "sglang step": step,
        "sglang snapshot verify": snapshots,
    }


def of_fla(function: Callable[..., Any], work: Work) -> dict[str, Maker]:
    """What makes fla's row."""

    def last_state() -> Contender:
        traffic = Traffic(work.shape, work.m, SIZES)
        moved = Moved(2 * traffic.state, traffic.window()) * work.B
        bounds = [fla.recurrent(function, s) for s in work.seats[RECURRENT]]
        return _bound("verify, last state", "fla", bounds, moved, work, RECURRENT)

    return {"fla verify": last_state}
