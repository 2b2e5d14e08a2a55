"""Timing a kernel that updates its state in place (case H7, triton#6547, #9230): once is once, whoever ran before.

What is timed runs many times over the bench's own buffers. Nothing of that may reach a decode, an input that others are
timed on, or an output that is compared.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import start

from harness import contenders, workload
from harness.config import DecodeConfig, RingConfig
from harness.contenders import FLUSH, RING, Settled, Work, ours
from harness.decode import Stream
from harness.experiments import kernels
from harness.peers import transformers_recurrent as peer
from harness.ring import RingSpec
from harness.timing import Graphs, Row, measure
from harness.tokens import Shape
from harness.variants import load

pytest.importorskip("triton")
from fake_kernels import FakeSteps, fake

from harness.kernels.design import Triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, RING16 = Shape(1, 2, 5, 6), RingSpec(16, 4)
# one of them folds by replay and flushes in its verify; in the interpreter the others wait for the slow tests
SLOW = pytest.mark.slow if DEVICE == "cpu" else ()
NAMES = ["exact_fold", *(pytest.param(n, marks=SLOW) for n in ("exact_recurrent", "chunked_bf16"))]


class Eager:
    """A clock that runs the calls of a row one by one: to warm up, and for every sample."""

    def capture(self, row: Row) -> Any:
        self.seconds(row, None)
        return None

    def seconds(self, row: Row, replay: Any) -> float:
        row.before()
        for call in row.calls:
            call()
        return 1e-6


def made(name: str) -> Triton:
    spec = load(name)
    return Triton(spec, spec.ring(RingConfig(16, 4)), spec.arithmetic())


def bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies that compare equal where every bit is."""
    return [x.clone().contiguous().view(torch.uint8) for x in tensors]


def alike(x: list[torch.Tensor], y: list[torch.Tensor]) -> bool:
    return len(x) == len(y) and all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def once(design: Triton, work: Work) -> list[torch.Tensor]:
    """All that two steps leave of a state of its own, the second of them a flush."""
    state = design.create(work.shape, work.B, work.initial, device=DEVICE)
    steps, found = design.steps(state, work.m), []
    for x in work.timed(1) * 2:
        steps.out.fill_(torch.nan)
        steps.verify(contenders.inputs(x))
        found += bits(steps.out)
        steps.commit(torch.full((work.B,), 3, dtype=torch.int32, device=DEVICE))
        state.on_device[2] = int(state.spec.fold_when == "next")
        steps.route()
    return found + bits(state.checkpoint, state.on_device, *state.records.values())


@pytest.mark.parametrize("name", NAMES)
def test_h7_a_bench_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: windows, initial states or what a peer is handed changed by the calls that are timed; a buffer of a
    design that outlives its state. A decode has the same bits whether or not a bench ran before it."""
    for module in (contenders, workload):
        monkeypatch.setattr(module, "SETTLE", 2)
    for what, size in (("CALLS", (1, 1)), ("STEPS", 1), ("STEPS_A_SET", 1)):
        monkeypatch.setattr(contenders, what, size)
    design, work = made(name), Work(SMALL, 1, 4, RING16, 1, device=DEVICE)
    before = once(design, work)
    settled = Settled(design, work)
    (handed,) = settled.seats()

    def shared() -> list[torch.Tensor]:
        inputs = [x for window in (*work.settling, *work.windows) for x in window]
        return bits(work.initial, *inputs, handed.checkpoint, handed.cursors, *handed.records.values())

    given = shared()
    rows = {line.what: line.row for line in ours(settled, None)}
    measure(rows, 1, Eager())
    assert alike(shared(), given)
    assert not torch.equal(settled.states[0].checkpoint, handed.checkpoint)
    assert alike(once(design, work), before)


@pytest.mark.parametrize("name", ["exact_fold", "exact_recurrent"])
def test_h7_a_verify_may_run_again(name: str) -> None:
    """Faults: a first run, which also compiles, that is another than the second; an output left where it was; a verify
    of unflagged slots, or a fold into a place of its own, that moves the state. All begin with NaN in their output."""
    design, work = made(name), Work(SMALL, 1, 4, RING16, 1, device=DEVICE)
    state = design.create(SMALL, 1, work.initial, device=DEVICE)
    steps, window = design.steps(state, 4), contenders.inputs(work.timed(1)[0])
    runs = []
    for _ in range(2):
        steps.out.fill_(torch.nan)
        steps.verify(window)
        runs.append(bits(steps.out, state.checkpoint, state.on_device, *state.records.values()))
        assert steps.out.isfinite().all()
    assert alike(*runs)
    if design.spec.fold == "snapshot":
        return
    folds = []
    for _ in range(2):
        out = torch.full_like(state.checkpoint, torch.nan)
        steps.fold(torch.full((1,), 4, dtype=torch.int32, device=DEVICE), out)
        folds.append(bits(out, state.checkpoint))
        assert out.isfinite().all() and not torch.equal(out, state.checkpoint)
    assert alike(*folds)


class Silent(FakeSteps):
    """Steps whose flush writes no output."""

    def verify(self, x: Any) -> None:
        left = getattr(self, "out", None)
        super().verify(x)
        if any(self.state.on_device[2].tolist()):
            self.out = left


def test_h7_an_output_of_the_run_before_is_no_result() -> None:
    """Fault: a flush step that writes nothing is compared by what the verify before it has left, and agrees."""
    work = Work(Shape(2, 4, 3, 8), 2, 4, RING16, 1, device="cpu")
    ours(Settled(fake("exact_recurrent", []), work), None)
    silent = fake("exact_fold", [])
    silent.steps = lambda state, m: Silent(state, m, [])
    lines = {line.what: line for line in ours(Settled(silent, work), "exact_recurrent")}
    assert lines[RING].error < 1e-12 and math.isnan(lines[FLUSH].error)
    assert [kernels.row(lines[what], [1e-6], 1e12)["agrees"] for what in (RING, FLUSH)] == [True, False]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_h7_a_timed_replay_is_one_update() -> None:
    """Fault: a state updated by warm-up, capture and the replay in front before what is timed updates it once more."""
    x = torch.zeros(3, device=DEVICE)
    row, clock = Row([lambda: x.add_(1)] * 4, lambda: x.zero_()), Graphs()
    replay = clock.capture(row)
    for _ in range(3):
        assert clock.seconds(row, replay) > 0
        assert (x == 4).all()


def test_h7_the_peer_of_the_bench_may_run_again() -> None:
    """Fault: a pass of transformers' recurrence that begins where the one before has ended."""
    pytest.importorskip("transformers")
    shape = Shape(2, 6, 5, 8)
    stream = Stream(DecodeConfig(slots=2), shape)
    arguments = peer.inputs(stream.tokens(torch.tensor([0, 0]), 20), start(np.random.default_rng(0), 2, shape))
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    given, found = bits(*tensors), [bits(*peer.decode(peer.load(), arguments)) for _ in range(2)]
    assert alike(*found) and alike(bits(*tensors), given)
