"""Where a design first leaves the finite numbers: the block is run again with every site and product watched.

Only committed tokens are run, on windows of their own, so that neither a rejected draft nor what another design has
computed before can be named. A log decay of -inf is a reset and no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from harness.arithmetic import PRODUCTS, SITES, Arithmetic, Dot, Dots, Rounding, Sites
from harness.looks import looks
from harness.reference.emulated import Emulated
from harness.reference.state import EmulatedState
from harness.reference.steps import token_steps, window_steps
from harness.tokens import Shape
from harness.window import Step, Windows

RESETS = ("gate", "decay", "store_g")  # where -inf is a value


@dataclass
class Log:
    """The earliest non-finite value of every (slot, head): step first, then order of evaluation."""

    shape: Shape
    slots: Sequence[int]  # that the tensors now passing by hold, in order
    steps: int  # that they hold at once: the whole block, or 1
    step: int = 0
    count: int = 0
    first: dict[tuple[int, int], tuple[int, int, str]] = field(default_factory=dict)

    def look(self, name: str, x: Tensor) -> None:
        """Note the heads of x, whose leading axes merge [steps, slots, HV or H], that hold a bad value."""
        self.count += 1
        bad = torch.isnan(x) | (x == torch.inf) if name in RESETS else ~torch.isfinite(x)
        if not bad.any():
            return
        s, lead = self.shape, self.steps * len(self.slots)
        for heads in (s.HV, s.H):
            size = 1
            for i, n in enumerate(x.shape):
                size *= n
                if size == lead * heads:
                    rest = bad.reshape(lead * heads, -1)
                    if heads == s.H and x.shape[i + 1 : i + 2] == (s.group * s.V,):
                        # value heads stacked on their key head are told apart by their rows
                        rest, heads = rest.reshape(lead * s.HV, -1), s.HV
                    self._note(name, rest.any(-1).reshape(self.steps, len(self.slots), heads))
                    return

    def _note(self, name: str, bad: Tensor) -> None:
        group = self.shape.HV // bad.shape[2]
        for step, slot, head in bad.nonzero().tolist():
            for h in range(head * group, (head + 1) * group):
                entry = (step if self.steps > 1 else self.step, self.count, name)
                key = self.slots[slot], h
                self.first[key] = min(self.first.get(key, entry), entry)


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


class WatchedDesign(Emulated):
    """Tells the log which slots a fold is about."""

    log: Log

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        whole, self.log.slots = self.log.slots, list(slots)
        try:
            return super()._folded(state, slots, lengths, end)
        finally:
            self.log.slots = whole


def watched(a: Arithmetic, log: Log) -> Arithmetic:
    """The same arithmetic, reporting every result to `log`."""

    def copy(x: Any, kind: Any, name: str) -> Any:
        return kind(**{f.name: getattr(x, f.name) for f in fields(x)}, name=name, log=log)

    sites = Sites(**{s: copy(getattr(a.sites, s), WatchedRounding, s) for s in SITES})
    dots = Dots(**{p: copy(getattr(a.dots, p), WatchedDot, f"dot.{p}") for p in PRODUCTS})
    return replace(a, sites=sites, dots=dots)


def first_nonfinite(
    design: Emulated, state: EmulatedState, windows: Windows, block: Any, wanted: set[tuple[int, int]] | None = None
) -> dict[tuple[int, int], str]:
    """(slot, head) -> first site or product with a non-finite result, over one block from `state`; of an outside
    implementation the first quantity.

    A head in `wanted` that stays finite on its committed tokens alone is looked at with the rejected drafts too: a
    sum over a whole window carries their NaN through a zero weight.
    """
    look = _look_outside if design.backend == "outside" else _look
    found = look(design, state.clone(), windows.only(block.accepted), block)
    if wanted is not None and wanted - set(found):
        found = look(design, state.clone(), windows.only(windows.lengths), block) | found
    return found


def _look_outside(design: Emulated, state: EmulatedState, windows: Windows, block: Any) -> dict[tuple[int, int], str]:
    """What can be seen of an implementation without sites: o, d, served or kept."""
    found: dict[tuple[int, int], str] = {}
    for look in looks(design, state, windows, block.accepted, block.accepted):
        for name, x in look.all():
            for slot, head in (~torch.isfinite(x)).flatten(2).any(-1).nonzero().tolist():
                found.setdefault((slot, head), name)
    return found


def _look(design: Emulated, state: EmulatedState, windows: Windows, block: Any) -> dict[tuple[int, int], str]:
    log = Log(state.shape, list(range(windows.B)), windows.W)
    again = WatchedDesign(design.spec, design.ring, watched(design.arithmetic, log))
    again.log = log
    # what depends on inputs alone is looked at for the whole block, then the steps one by one
    if design.spec.verify == "tokens":
        token_steps(windows, again.arithmetic)
    else:
        window_steps(windows, again.arithmetic, design.spec.inverse)
    for name in again.records:
        if name not in ("d", "d_lo"):
            windows.stored(again.arithmetic, name)
    log.steps = 1
    for i in range(windows.W):
        log.step = i
        step = Step(windows, i)
        again.verify(state, step)
        again.commit(state, step.slots, block.accepted[i][block.accepted[i] > 0].tolist())
        ready = [s for s in step.slots if state.cursors.is_flush[s]]
        if ready:
            again.read(state, "kept", ready)
    return {key: name for key, (_, _, name) in log.first.items()}
