"""How fast are the kernels, beside those that are served today? The GPU part of experiment=bench.

Hypothesis: a verify that reads each byte once, with what all rows of a state share prepared once instead of in every
program, is bound by memory and not by the latency of its small products; and a flush that folds and answers in one
pass costs one more write of the state, so that a lossless fold every fourth step is nearly free.

Predicted, on one H200 with windows of 4 and a ring of 16 (measured of the released kernels: 41 to 48 % of the read
bandwidth in a ring verify; 735 µs for a snapshot verify, 260 for a ring verify, 640 for an exact flush, at 256 slots
and 32 heads):
  ring verify       1.6 times as fast as sglang 0.5.23's at 64 and 256 slots, and at 80 % of the read bandwidth,
                    counting every byte that must move; never slower at 1 and 16 slots
  amortised step    closed loop, serial fold, accepts uniform in 1..4: 2.5 times as fast as a snapshot verify at 256
                    slots; the limit at full bandwidth is 1.4 reads of the state
  fp32 products     of ieee precision some 9 times as slow as tf32 ones: bound by arithmetic

Refuted line by line: every goal is a ratio within this run, printed with what it should be. A peer whose output is not
ours does not count as a competitor.

A row is a graph of 4 calls or more that rotate over buffers of more than twice the L2 cache; all rows of a batch are
replayed in rounds; what is quoted is the median of the rounds with its quartiles. A ring verify is timed on slots as
often at each history length as a decode has them, a step on slots that flush when it is their turn.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.config import Config, head_counts
from harness.contenders import Contender, Settled, Work, ours
from harness.designs import designs
from harness.errors import HarnessError
from harness.goals import AGREE, goals
from harness.peers import fla, sglang
from harness.progress import shown
from harness.rivals import RECURRENT, REPLAY, Maker, of_fla, of_sglang
from harness.timing import Clock, Graphs, bandwidths, measure, spread
from harness.tokens import Shape
from harness.variants import load

Peers = dict[str, tuple[Any, dict[str, Any]]]  # name: its functions or None, and what is known of it


def run(config: Config) -> dict[str, Any]:
    """The whole measurement on the GPU at hand, as bench.json holds it under `kernels`."""
    import triton

    made, left_out = contenders(config)
    device = torch.cuda.get_device_properties(0)
    clock = Graphs()
    found: dict[str, Any] = {"device": device.name, "l2_bytes": device.L2_cache_size}
    found |= {"torch": torch.__version__, "triton": triton.__version__}
    peers = load_peers(config)
    with torch.inference_mode():
        found["bytes_per_second"] = bandwidths(config.bench.repeats, clock)
        cases = []
        for heads in config.bench.heads:
            for batch in config.bench.batches:
                note(config, f"{heads} heads, {batch} slots")
                work = work_of(config, heads, batch, device.L2_cache_size)
                read = found["bytes_per_second"]["read"]
                cases.append(
                    {"heads": heads, "batch": batch} | case(work, made, peers, config.bench.repeats, clock, read)
                )
                del work
                gc.collect()
                torch.cuda.empty_cache()
    ring = config.ring
    found |= {"window": config.decode.window, "ring": ring.length, "accepts": f"uniform 1..{config.decode.window}"}
    found |= {"peers": {name: facts for name, (_, facts) in peers.items()}, "left_out": left_out}
    return found | {"repeats": config.bench.repeats, "cases": cases, "goals": goals(cases)}


def note(config: Config, text: str) -> None:
    """A line of progress, where it is wanted."""
    if shown(config.progress):
        print(text, file=sys.stderr, flush=True)


def contenders(config: Config, device: str = "cuda") -> tuple[list[Any], dict[str, str]]:
    """Our designs that have a kernel, the two that the others are held to first; and why the rest have none.

    Raises HarnessError where one of those two has none.
    """
    from harness.kernels.options import options, unsupported

    names = list(dict.fromkeys([RECURRENT, REPLAY, *config.variants]))
    left_out: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name in names:
        spec = load(name)
        if spec.design:
            left_out[name] = "it is computed outside, and kernels of the harness are timed"
            continue
        arithmetic = spec.arithmetic(config.precision)
        if why := unsupported(spec, arithmetic):
            left_out[name] = why
            continue
        # two declarations may compile to one kernel: how many products a block of a sum has is the emulation's
        compiled = (options(spec, arithmetic), spec.verify, spec.fold, spec.ring(config.ring))
        if compiled in first:
            left_out[name] = f"the kernel is that of {first[compiled]}"
        first.setdefault(compiled, name)
    for name in (RECURRENT, REPLAY):
        if name in left_out:
            raise HarnessError(f"precision: {name}, which others are compared with, has no kernel: {left_out[name]}")
    kept = [name for name in names if name not in left_out]
    return designs(replace(config, variants=kept, backend="triton"), device), left_out


def load_peers(config: Config) -> Peers:
    """The functions of every peer that is asked for, or None and why."""
    loaders: dict[str, Callable[[], Any]] = {"sglang": lambda: sglang.load(config.bench.sglang), "fla": fla.load}
    found: Peers = {}
    for name in config.bench.peers:
        try:
            functions = loaders[name]()
        except HarnessError as error:
            found[name] = None, {"missing": str(error)}
        else:
            found[name] = functions, {"version": functions.version if name == "sglang" else fla.version()}
    return found


def work_of(config: Config, heads: str, batch: int, cache: int, device: str = "cuda") -> Work:
    """What one batch of one layer is timed on."""
    H, HV = head_counts(heads)
    shape = Shape(H, HV, config.model.value_dim, config.model.key_dim)
    spec = load(REPLAY).ring(config.ring)
    return Work(shape, batch, config.decode.window, spec, cache, config.decode.seed, device)


def case(work: Work, made: Sequence[Any], peers: Peers, repeats: int, clock: Clock, read: float) -> dict[str, Any]:
    """Every row of one batch, timed in rounds; and the rows of peers that failed, with their errors."""
    lines: list[Contender] = []
    failed: dict[str, str] = {}
    for design in made:
        settled = Settled(design, work)
        if design.spec.name in (RECURRENT, REPLAY) and peers:
            work.seats[design.spec.name] = settled.seats()
        lines += ours(settled, None if design.spec.name == RECURRENT else RECURRENT)
    makers: dict[str, Maker] = {}
    for name, of in (("sglang", of_sglang), ("fla", of_fla)):
        functions, _ = peers.get(name, (None, {}))
        if functions is not None:
            makers |= of(functions, work)
    for name, make in makers.items():
        try:
            lines.append(make())
        except Exception as error:
            # another project's kernel on a toolchain it was not made for: its row is lost, the run is not
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = measure({f"{x.what}, {x.who}": x.row for x in lines}, repeats, clock)
    return {"rows": [row(x, seconds[f"{x.what}, {x.who}"], read) for x in lines], "failed": failed}


def row(x: Contender, seconds: Sequence[float], read: float) -> dict[str, Any]:
    """A line of bench.json. share: of the read bandwidth, all bytes that must move; state_share: those of states."""
    per_second = 1 / (statistics.median(seconds) * read)
    found: dict[str, Any] = {"what": x.what, "who": x.who} | spread(seconds)
    found |= {"bytes": x.moved.total, "state_bytes": x.moved.state}
    found |= {"share": x.moved.total * per_second, "state_share": x.moved.state * per_second}
    found |= {"sets": x.sets, "calls": len(x.row.calls), "allocated": x.allocated, **x.facts}
    if x.error is not None:
        # NaN agrees with nothing
        found |= {"error": x.error, "against": x.against, "agrees": x.error <= AGREE}
    return found
