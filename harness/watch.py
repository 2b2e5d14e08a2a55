"""Where a design first leaves the finite numbers: the block is run again with every site and product watched."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import PRODUCTS, SITES, Arithmetic, Dot, Dots, Rounding, Sites
from harness.reference.emulated import Emulated, EmulatedState
from harness.tokens import Shape
from harness.window import Step, Windows


@dataclass
class Log:
    """The earliest non-finite value of every (slot, head): step first, then order of evaluation."""

    shape: Shape
    slots: int
    steps: int
    step: int = 0
    count: int = 0
    first: dict[tuple[int, int], tuple[int, int, str]] = field(default_factory=dict)

    def look(self, name: str, x: Tensor) -> None:
        """Note the heads of x, whose leading axes merge [W?, B, HV or H], that hold a non-finite value."""
        self.count += 1
        if torch.isfinite(x).all():
            return
        for lead, heads in product((self.steps, 1), (self.shape.HV, self.shape.H)):
            rows = lead * self.slots * heads
            size = 1
            for i, n in enumerate(x.shape):
                size *= n
                if size == rows:
                    bad = ~torch.isfinite(x).flatten(i + 1).all(-1) if i + 1 < x.ndim else ~torch.isfinite(x)
                    self._note(name, bad.reshape(lead, self.slots, heads), lead > 1)
                    return

    def _note(self, name: str, bad: Tensor, whole: bool) -> None:
        group = self.shape.HV // bad.shape[2]
        for step, slot, head in bad.nonzero().tolist():
            for h in range(head * group, (head + 1) * group):
                entry = (step if whole else self.step, self.count, name)
                self.first[slot, h] = min(self.first.get((slot, h), entry), entry)


@dataclass(frozen=True)
class WatchedRounding(Rounding):
    name: str = ""
    log: Any = field(default=None, compare=False)

    def __call__(self, x: Tensor, key: Tensor | None = None, of: Rounding | None = None) -> Tensor:
        y = super().__call__(x, key, of)
        self.log.look(self.name, y)
        return y

    def into(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        return self(x, key)


@dataclass(frozen=True)
class WatchedDot(Dot):
    name: str = ""
    log: Any = field(default=None, compare=False)

    def __call__(self, x: Any, y: Any, init: Tensor | None = None) -> Tensor:
        z = super().__call__(x, y, init)
        self.log.look(self.name, z)
        return z


def watched(a: Arithmetic, log: Log) -> Arithmetic:
    """The same arithmetic, reporting every result to `log`."""

    def copy(x: Any, kind: Any, name: str) -> Any:
        return kind(**{f.name: getattr(x, f.name) for f in fields(x)}, name=name, log=log)

    sites = Sites(**{s: copy(getattr(a.sites, s), WatchedRounding, s) for s in SITES})
    dots = Dots(**{p: copy(getattr(a.dots, p), WatchedDot, f"dot.{p}") for p in PRODUCTS})
    return Arithmetic(sites, dots, a.conventions)


def first_nonfinite(design: Emulated, state: EmulatedState, windows: Windows, block: Any) -> dict[tuple[int, int], str]:
    """(slot, head) -> first site or product with a non-finite result, over one block from `state`."""
    log = Log(state.shape, windows.B, windows.W)
    again = Emulated(design.spec, design.ring, watched(design.arithmetic, log))
    for i in range(windows.W):
        log.step = i
        step = Step(windows, i)
        again.verify(state, step)
        again.commit(state, step.slots, block.accepted[i][block.accepted[i] > 0].tolist())
        if any(state.cursors.is_flush):
            again.read(state, "kept", step.slots)
    return {key: name for key, (_, _, name) in log.first.items()}
