"""Which single rounding, declared otherwise, would explain a departure: the emulations next to the declared one.

Every site and product in turn is given another format, and the design is held beside that emulation. What explains it
leaves the two within the allowance of harness.checks, measured by that emulation's own error; of several, the one that
comes nearest. A rounding that explains nothing where the departure shows is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.arithmetic import PRODUCTS, SITES, Arithmetic, Dot, Rounding
from harness.checks import ALLOWED, distances, least_units
from harness.looks import Look
from harness.reference.emulated import Emulated
from harness.subject import Subject

FORMATS = ("fp32", "tf32:zero", "bf16", "fp16")
DOTS = ("ieee", "tf32", "bf16", "fp16")
BEYOND = 3  # steps behind the first departure that are looked at too


def others(a: Arithmetic) -> Iterator[tuple[str, Arithmetic]]:
    """(how a variant file spells it, arithmetic) of every declaration that differs in one rounding."""
    for name in SITES:
        for text in FORMATS:
            if (rounding := Rounding.parse(name, text)) != getattr(a.sites, name):
                yield f"sites: {{{name}: {text}}}", replace(a, sites=replace(a.sites, **{name: rounding}))
    for name in PRODUCTS:
        for text in DOTS:
            if (dot := Dot.parse(name, text)) != replace(getattr(a.dots, name), block=0, strided=False):
                yield f"dots: {{{name}: {text}}}", replace(a, dots=replace(a.dots, **{name: dot}))


def nearest(s: Subject, step: int) -> tuple[str, float] | None:
    """The declaration that explains a departure first seen at `step`, and the most units left; None without one."""
    steps = range(min(s.steps, step + 1 + BEYOND))

    def seen(design: Emulated) -> list[Look]:
        return list(s.follow(design, s.ragged, steps=steps))

    mine, exact = seen(s.design), seen(s.exact)
    found: list[tuple[float, str, float]] = []
    for text, arithmetic in others(s.design.arithmetic):
        theirs = seen(Emulated(s.design.spec, s.design.ring, arithmetic))
        unit, worst, total = least_units(arithmetic), 0.0, 0.0
        level: dict[str, torch.Tensor] = {}
        for x, e, t in zip(mine, theirs, exact, strict=True):
            own, off = distances(e, t, t, s.shape.K), distances(x, e, t, s.shape.K)
            for name in off:
                level[name] = torch.maximum(level.get(name, torch.full_like(own[name], unit[name])), own[name])
                units = (off[name] / level[name]).nan_to_num(torch.inf)
                worst, total = max(worst, float(units.max())), total + float(off[name].nan_to_num(torch.inf).sum())
        if worst <= ALLOWED:
            found.append((total, text, worst))
    if not found:
        return None
    _, text, worst = min(found)
    return text, worst
