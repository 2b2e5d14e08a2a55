"""What a ring kernel may get wrong, a check each, on the four calls alone.

A distance is relative to the exact state (for o and d: to what a token of that head may have at most), of one slot and
head. A unit is what the declared roundings do to that slot and head by themselves: the largest distance so far between
the emulation of the declaration and exact arithmetic, at least one roundoff of the format the quantity is kept in. Two
legitimate orders of the same sums lie within ALLOWED units of each other. Where an implementation computes in fp64 on
request, its formula and its bookkeeping are held to exact arithmetic itself, a unit being 16 K roundoffs of fp64 and
those of a sum of log decays that a reset has made large.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Rounding
from harness.looks import QUANTITIES, Look, looks
from harness.outside import Outside
from harness.precision import FORMATS
from harness.subject import RESET, Case, Subject
from harness.tokens import Tokens
from harness.window import Windows

# kernels lie up to 2.4 units from exact arithmetic where their emulation lies one (results/LOG.md): 3.4 apart at most
ALLOWED = 4


class Place(NamedTuple):
    """Where something is first wrong, and by how much: units, or None where bits ought to agree."""

    step: int
    slot: int
    head: int
    quantity: str
    off: float
    units: float | None = None


@dataclass
class Outcome:
    """pass, FAIL or skipped, with one phrase that says what was found; worst: the most units of each quantity."""

    result: str
    note: str
    first: Place | None = None
    worst: dict[str, Place] = field(default_factory=dict)


def distances(x: Look, y: Look, truth: Look, K: int) -> dict[str, Tensor]:
    """Relative distances of two looks, {quantity: [B, HV]}, of what both have."""
    assert truth.served is not None
    size = torch.linalg.vector_norm(truth.served.flatten(2), dim=-1)
    found = {}
    for name in QUANTITIES:
        a, b, t = (getattr(look, name) for look in (x, y, truth))
        if a is None or b is None:
            continue
        if name in ("served", "kept"):
            off, scale = torch.linalg.vector_norm((a - b).flatten(2), dim=-1), size
        else:
            # what a token reads of the state, and what the state predicts of it, may cancel
            off, scale = (torch.linalg.vector_norm(z, dim=2).amax(-1) for z in (a - b, t))
            scale = scale + size * (K**-0.5 if name == "o" else 1)
        found[name] = off / torch.where(scale == 0, 1.0, scale)
    return found


def least_units(a: Arithmetic) -> dict[str, float]:
    """One roundoff of the format each quantity is kept in."""

    def u(r: Rounding) -> float:
        one = 2.0**-53 if r.exact else FORMATS[r.format].u * (1 if r.mode == "nearest" else 2)
        return one**r.parts

    return {"o": u(a.sites.output), "d": u(a.sites.d), "served": u(a.sites.checkpoint), "kept": u(a.sites.checkpoint)}


def held(s: Subject, case: Case, *, emulated: bool = False) -> Outcome:
    """A design on a case beside exact arithmetic, in fp64 if it can be; emulated: beside its emulation instead."""
    wide = None if emulated else s.design.exactly()
    design, K = wide or s.design, s.shape.K
    least = dict.fromkeys(QUANTITIES, (16 * K + RESET * s.m) * 2.0**-53) if wide else least_units(s.design.arithmetic)
    unit: dict[str, Tensor] = {}
    first: Place | None = None
    worst: dict[str, Place] = {}
    own = s.follow(s.exact if wide else s.emulation, case)
    for x, e, t in zip(s.follow(design, case), own, s.follow(s.exact, case), strict=True):
        for name, level in distances(e, t, t, K).items():
            unit[name] = torch.maximum(unit.get(name, torch.full_like(level, least[name])), level)
        for name, off in distances(x, e if emulated else t, t, K).items():
            units = off / unit[name]
            # NaN is beyond any allowance
            rank = torch.where(units.isnan(), torch.inf, units)
            slot, head = divmod(int(rank.argmax()), rank.shape[1])
            top = Place(x.step, slot, head, name, float(off[slot, head]), float(units[slot, head]))
            if name not in worst or not float(rank.max()) <= _rank(worst[name]):
                worst[name] = top
            if first is None and (rank > ALLOWED).any():
                slot, head = (rank > ALLOWED).nonzero()[0].tolist()
                first = Place(x.step, slot, head, name, float(off[slot, head]), float(units[slot, head]))
    most = max(map(_rank, worst.values()))
    how = "in fp64" if wide else "of its emulation's own error"
    return Outcome("FAIL" if first else "pass", f"at most {most:.2g} of {ALLOWED} units {how}", first, worst)


def _rank(place: Place) -> float:
    return float("inf") if place.units is None or np.isnan(place.units) else place.units


def alike(one: Iterator[Look], two: Iterator[Look], slots: list[int] | None = None) -> Outcome:
    """Whether two runs agree in every bit that both have, in some slots or all; NaN agrees with nothing."""
    for x, y in zip(one, two, strict=True):
        for name in QUANTITIES:
            a, b = getattr(x, name), getattr(y, name)
            if a is None or b is None:
                continue
            if found := differing(x.step, name, a, b, slots):
                return Outcome("FAIL", "", found)
    return Outcome("pass", "every bit")


def differing(step: int, name: str, a: Tensor, b: Tensor, slots: list[int] | None = None) -> Place | None:
    """The first slot, of those in `slots`, and head in which a and b [B, HV, ..] differ in a bit."""
    for slot in range(len(a)) if slots is None else slots:
        x, y = a[slot].flatten(1), b[slot].flatten(1)
        # NaN is equal to nothing
        if not torch.equal(x, y):
            head = int(((x != y) | x.isnan()).any(-1).nonzero()[0])
            return Place(step, slot, head, name, float((x[head] - y[head]).abs().amax()))
    return None


def identity(s: Subject) -> Outcome:
    return held(s, s.full())


def cursor(s: Subject) -> Outcome:
    return held(s, s.ragged)


def departure(s: Subject) -> Outcome:
    return held(s, s.ragged, emulated=True)


def poison(s: Subject) -> Outcome:
    # the last slot is free; a window that is given up leaves its records behind the history
    case = s.ragged
    lengths = case.lengths.copy()
    lengths[:, -1] = 0
    clean = replace(case, lengths=lengths, accepted=np.minimum(case.accepted, lengths))
    lost = torch.from_numpy((clean.accepted == 0) & (lengths > 0)).to(case.tokens.g.device)
    initial = case.initial.clone()
    initial[-1] = torch.nan
    tokens = case.tokens.map(lambda x: x.masked_fill(lost.view(*lost.shape, *(1,) * (x.ndim - 2)), torch.nan))
    foul = replace(clean, tokens=tokens, initial=initial)
    design = copy.copy(s.design)
    if isinstance(design, Outside):
        design.pad = torch.nan
    lanes = np.where(clean.accepted > 0, lengths, 0)
    others = list(range(len(initial) - 1))
    return alike(s.follow(s.design, clean, lanes=lanes), s.follow(design, foul, lanes=lanes), others)


def idle(s: Subject) -> Outcome:
    state, case = s.pool(s.design, s.initial), s.ragged
    windows = Windows(case.tokens, case.lengths, s.shape)

    def seen(which: str, slot: int) -> Tensor:
        # alone, as the order of a sum may depend on who is read beside it
        return s.design.read(state, which, [slot]).clone()

    for i in range(s.steps):
        rest = [(which, slot) for slot in np.flatnonzero(case.lengths[i] == 0).tolist() for which in ("served", "kept")]
        before = [seen(*one) for one in rest]
        for _ in looks(s.design, state, windows, case.accepted, case.lengths, steps=range(i, i + 1)):
            pass
        for (which, slot), old in zip(rest, before, strict=True):
            if found := differing(i, which, seen(which, slot), old):
                return Outcome("FAIL", "", found._replace(slot=slot))
    return Outcome("pass", "every bit")


def rejection(s: Subject) -> Outcome:
    case, other = s.ragged, s.draw(2, s.steps)
    lost = np.arange(s.m) >= case.accepted[..., None]
    there = torch.from_numpy(lost).to(case.tokens.g.device)

    def mixed(name: str) -> Tensor:
        x = getattr(case.tokens, name)
        return torch.where(there.view(*there.shape, *(1,) * (x.ndim - 3)), getattr(other, name), x)

    changed = replace(case, tokens=Tokens(*map(mixed, ("q", "k", "v", "g", "beta"))))
    one, two = (s.follow(s.design, c, lanes=case.accepted) for c in (case, changed))
    return alike(one, two)


def reuse(s: Subject) -> Outcome:
    if isinstance(s.design, Outside) and not hasattr(s.design.own, "reset"):
        return Outcome("skipped", "it has no call reset")
    case, B = s.ragged, len(s.initial)
    state = s.pool(s.design, 100 * case.initial)
    for _ in s.follow(s.design, replace(case, tokens=s.draw(2, s.steps)), state=state, steps=range(s.steps // 2)):
        pass
    s.design.reset(state, range(B), torch.full_like(case.initial, torch.nan))
    s.design.reset(state, range(B)[::-1], case.initial.flip(0))
    return alike(s.follow(s.design, case), s.follow(s.design, case, state=state))


def read(s: Subject) -> Outcome:
    state = s.pool(s.design, s.initial)
    outcome = alike(s.follow(s.design, s.ragged, read=False), s.follow(s.design, s.ragged, state=state))
    slots = list(range(len(s.initial)))
    for name in ("served", "kept") if outcome.first is None else ():
        there = s.design.read(state, name, slots).clone()
        if found := differing(s.steps - 1, name, there, s.design.read(state, name, slots[::-1]).flip(0)):
            return Outcome("FAIL", "", found)
    return outcome


def repeat(s: Subject) -> Outcome:
    return alike(s.follow(s.design, s.ragged), s.follow(s.design, s.ragged))


def clone(s: Subject) -> Outcome:
    state, half = s.pool(s.design, s.initial), s.steps // 2
    for _ in s.follow(s.design, s.ragged, state=state, steps=range(half), read=False):
        pass
    twin = state.clone()
    rest = [list(s.follow(s.design, s.ragged, state=x, steps=range(half, s.steps), read=False)) for x in (state, twin)]
    return alike(iter(rest[0]), iter(rest[1]))


# name -> check, and what it guards against
CHECKS: dict[str, tuple[Callable[[Subject], Outcome], str]] = {
    "identity": (identity, "the formula: norm, gate, decay, inverse, head map, fold"),
    "cursor": (cursor, "the ring: ragged windows, wraps, rejections, aborts, every read"),
    "poison": (poison, "NaN in padded lanes, in rows behind a history, in free slots"),
    "idle": (idle, "slots that are not in a step"),
    "rejection": (rejection, "what a rejected draft leaves behind"),
    "reuse": (reuse, "what a slot's tenant leaves to the next"),
    "read": (read, "a read that changes something, or mixes slots"),
    "repeat": (repeat, "the same call with another result"),
    "clone": (clone, "a copy that shares memory"),
    "departure": (departure, "other roundings than those declared"),
}
