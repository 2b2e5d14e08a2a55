"""Judge a kernel by its four calls, before any long decode.

  python -m harness.conformance VARIANT [--check NAME,...] [--json FILE] ...

VARIANT is what `variants=` takes: mine.yaml with a key `design:`, the entry point of an installed implementation, or a
design of the harness itself. Every check of harness/checks.py is run on a small layer; a failure is told with the first
(step, slot, head, quantity) at which it shows, quantity being o, d, or the served or kept state. Last it is held beside
the emulation of its own declaration, which says whether it rounds where it claims to.

Exit status: 0 nothing fails, 1 a check fails, 2 it could not be judged.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.checks import ALLOWED, CHECKS, Outcome, Place
from harness.commands import Parser, status
from harness.config import Config, PrecisionConfig, RingConfig, validate
from harness.designs import designs
from harness.errors import ConfigError, HarnessError
from harness.nearest import nearest
from harness.plugins import one_line
from harness.provenance import plain
from harness.shards import device_of
from harness.subject import Subject
from harness.tokens import Shape

if TYPE_CHECKING:
    from rich.table import Table

SLOTS = 3


def judge(subject: Subject, names: list[str]) -> dict[str, Outcome]:
    """The outcome of every named check; an exception in one is its failure."""
    found = {}
    with torch.inference_mode():
        for name in names:
            try:
                found[name] = CHECKS[name][0](subject)
            except Exception as error:
                text = str(error) if isinstance(error, HarnessError) else one_line(error)
                found[name] = Outcome("FAIL", text)
    return found


def where(place: Place) -> str:
    """A place in words."""
    off = f"{place.off:.1e}" + ("" if place.units is None else f", {place.units:.3g} units")
    return f"step {place.step}, slot {place.slot}, head {place.head}, {place.quantity}: off by {off}"


def table(found: dict[str, Outcome], near: str | None = None) -> Table:
    """The outcomes in 80 columns; below them, where the design departs most from its declared emulation, and `near`."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, width=80, caption_justify="left", caption_style="")
    for name, least in (("check", 10), ("result", 8), ("found", 0)):
        drawn.add_column(name, no_wrap=name != "found", min_width=least)
    for name, outcome in found.items():
        bad = f"{where(outcome.first)}; guards {CHECKS[name][1]}" if outcome.first else outcome.note
        drawn.add_row(name, outcome.result, bad)
    if (departure := found.get("departure")) and departure.worst:
        lines = ["most apart from the declared emulation:"]
        lines += [f"  {where(place)}" for place in departure.worst.values()]
        lines.append(f"{ALLOWED} units are allowed; 1 is what the declared roundings do there by themselves")
        lines += [near] if near else []
        drawn.caption = "\n".join(lines)
    return drawn


def explained(subject: Subject, found: dict[str, Outcome]) -> str | None:
    """What the declaration ought to say for a departure to be none, in words; None without a departure."""
    departure = found.get("departure")
    if departure is None or departure.first is None:
        return None
    with torch.inference_mode():
        near = nearest(subject, departure.first.step)
    if near is None:
        return "no single rounding declared otherwise would explain it"
    return f"declared as {near[0]}, it would be within {near[1]:.2g} units"


def pair(option: str, text: str) -> tuple[int, int]:
    """The two sizes of `a/b`. Raises ConfigError naming the option."""
    if not (sizes := re.fullmatch(r"(\d+)/(\d+)", text)):
        raise ConfigError(f"--{option}: {text!r} is not two sizes like 16/4")
    return int(sizes[1]), int(sizes[2])


def subject_of(options: Any) -> Subject:
    """The one design of a command line on its layer. Raises HarnessError for what cannot be judged."""
    (H, HV), (V, K), (L, m) = (pair(name, getattr(options, name)) for name in ("heads", "dims", "ring"))
    config = Config(variants=[options.variant], backend=options.backend, device=options.device)
    config.ring = RingConfig(L, m)
    config.device = device_of(config)
    # outside a GPU nothing computes its fast exponential
    config.precision = PrecisionConfig(exp="fast" if config.device == "cuda" else "rounded")
    config.decode.window = m
    validate(config)
    if options.steps < 2:
        raise ConfigError(f"--steps: {options.steps} is below 2")
    (design,) = designs(config, config.device)
    return Subject(design, Shape(H, HV, V, K), SLOTS, options.steps, options.seed, config.device)


def run(options: Any) -> int:
    """Judge, print, write --json; the exit status."""
    from rich.console import Console

    names = list(CHECKS) if options.check is None else options.check.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigError(f"--check: {unknown[0]!r} is not one of {', '.join(CHECKS)}")
    subject = subject_of(options)
    design, s, ring = subject.design, subject.shape, subject.design.ring
    found = judge(subject, names)
    near = explained(subject, found)
    console = Console(markup=False, highlight=False)
    console.print(
        f"{design.spec.name}: {design.backend}, {design.engine}, on {subject.device}; heads {s.H}/{s.HV}, "
        f"V/K {s.V}/{s.K}, ring {ring.length}/{ring.max_window}"
    )
    console.print(table(found, near))
    failed = any(outcome.result == "FAIL" for outcome in found.values())
    if options.json is not None:
        told = {name: asdict(o) | {"first": o.first and o.first._asdict()} for name, o in found.items()}
        for entry in told.values():
            entry["worst"] = {name: place._asdict() for name, place in entry["worst"].items()}
        facts: dict[str, Any] = {"variant": design.spec.name, "backend": design.backend, "engine": design.engine}
        facts |= {"origin": design.origin, "device": subject.device, "shape": s, "ring": ring, "allowed": ALLOWED}
        try:
            options.json.write_text(json.dumps(plain(facts | {"checks": told, "nearest": near}), indent=1) + "\n")
        except OSError as error:
            raise HarnessError(f"--json: cannot write {options.json} ({error.strerror or error})") from None
    return int(failed)


def main(argv: list[str]) -> int:
    """Run one command line; the exit status."""
    parser = Parser("conformance", __doc__)
    parser.add_argument("variant", metavar="VARIANT", help="a name, an entry point, or the path of a .yaml")
    parser.add_argument("--check", metavar="LIST", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--backend", default="auto", help="auto, outside, emulated or triton; default: auto")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; default: auto")
    parser.add_argument("--heads", metavar="H/HV", default="2/6", help="key and value heads; default: 2/6")
    parser.add_argument("--dims", metavar="V/K", default="128/128", help="rows and keys of a state; default: 128/128")
    parser.add_argument("--ring", metavar="L/m", default="16/4", help="ring length, widest window; default: 16/4")
    parser.add_argument("--steps", metavar="N", type=int, default=32, help="steps of a check; default: 32")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of tokens and accepts; default: 0")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write what was found")
    return status(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
