"""How fast does the emulation decode, counted in passes of a peer that anyone would otherwise use?

This is the part `harness` of bench.parts, the default on a CPU; the part `kernels`, the default on a GPU, has its
question, hypothesis and prediction in harness.experiments.kernels. Both end in one bench.json.

Hypothesis: rounding at every site on an fp64 carrier, for six designs, with oracle and metrics, costs less than five
fp32 passes of the peer, because windows are built some hundred at a time and each core has heads of its own.

Predicted: all default arms together, 3 to 5 passes of transformers' torch_recurrent_gated_delta_rule; one design alone
1 to 2, as generating the tokens, the oracle and the conditioning are shared by all and paid by each alone.

What is timed. A pass is the whole decode of one configuration, as `experiment=drift` runs it: tokens generated,
decoded, read against the oracle and measured, up to the rows; not their file, summary and figure. `all arms` runs the
configured variants side by side; a variant's own line is the same with that variant only, so it includes the shared
work. A pass of the peer is the same committed tokens, heads, rows and initial state in fp32, handed over ready made:
no rejected drafts, no rounding, no oracle. It is timed with torch's own number of threads and with one, as threads on
tensors this small may cost more than they save; what counts is the faster. Passes are interleaved, so that a busy
spell of the machine meets all.

A measurement is not a function of its configuration: every bench is a new one with a run directory of its own, never
skipped. Absolute times do not travel; ratios of one run do.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness import shards
from harness.config import Config
from harness.decode import Stream
from harness.designs import designs
from harness.errors import ConfigError, HarnessError
from harness.experiments import kernels
from harness.experiments.drift import identity
from harness.peers import transformers_recurrent as peer
from harness.progress import shown
from harness.rundir import Run
from harness.tokens import Shape

if TYPE_CHECKING:
    from rich.table import Table

REPEATS = 3  # timed passes of everything; odd, so that the median is one of them
WARM_UP = 256  # tokens of the untimed pass before
ALL = "all arms"

Pass = Callable[[], None]


def run(config: Config) -> dict[str, Any]:
    """Measure, write bench.json and of kernels bench.png, print the tables. Returns state and directory."""
    device = shards.device_of(config)
    parts = parts_of(config, device)
    made = designs(config, device)
    who = identity(made, device) | {"measured": datetime.now(UTC).isoformat()}
    with Run.open(config, who) as out:
        result = emulation(config, device) if "harness" in parts else {}
        if "kernels" in parts:
            result |= {"kernels": kernels.run(config)}
            # matplotlib takes a second to import
            from harness.speed import figure

            figure(result["kernels"]).savefig(out.path("bench.png"))
        out.write_json("bench.json", result)
        directory = out.finish(device=device)
    report(result, directory)
    return {"state": "finished", "directory": str(directory)}


def parts_of(config: Config, device: str) -> list[str]:
    """What is measured. Raises ConfigError for kernels without a GPU."""
    wanted = config.bench.parts or (["kernels"] if device == "cuda" else ["harness"])
    if "kernels" in wanted and device != "cuda":
        raise ConfigError(f"bench.parts: kernels are timed on a GPU, and the device is {device}")
    return wanted


def emulation(config: Config, device: str) -> dict[str, Any]:
    """The part `harness`: every design and the peer, timed."""
    threads = torch.get_num_threads()
    try:
        work, facts = passes(config, device, threads)
        seconds = measure(work, REPEATS, shown(config.progress))
    finally:
        # the harness decodes with one thread per process
        torch.set_num_threads(threads)
    return results(config, seconds, facts | {"device": device, "threads": threads})


def passes(config: Config, device: str, threads: int) -> tuple[dict[str, Pass], dict[str, Any]]:
    """Everything to be timed by name, warmed up, and what is known of the peer."""
    groups = {name: [name] for name in config.variants}
    if len(config.variants) > 1:
        groups = {ALL: list(config.variants)} | groups
    work: dict[str, Pass] = {}
    for name, variants in groups.items():
        own = replace(config, variants=variants)
        _decode(replace(own, decode=replace(own.decode, tokens=min(WARM_UP, own.decode.tokens))), device)
        work[name] = partial(_decode, own, device)
    facts: dict[str, Any] = {"peer": {"name": f"{peer.NAME} {peer.FUNCTION}", "version": peer.version()}}
    try:
        function = peer.load()
    except HarnessError as error:
        facts["peer"]["missing"] = str(error)
        return work, facts
    arguments = _peer_inputs(config, device, config.decode.prefill + config.decode.tokens)
    peer.decode(function, _peer_inputs(config, device, min(WARM_UP, config.decode.tokens)))
    for count in dict.fromkeys([threads] if device == "cuda" else [threads, 1]):
        work[_peer(count)] = partial(_peer_pass, function, arguments, count)
    return work, facts


def _decode(config: Config, device: str) -> None:
    for _ in shards.run(config, device, lambda tokens: None):
        pass


def _peer(threads: int) -> str:
    return f"{peer.NAME}, {threads} thread{'s' * (threads > 1)}"


def _peer_inputs(config: Config, device: str, tokens: int) -> dict[str, Any]:
    shape = Shape.of(config.model)
    stream = Stream(config.decode, shape, device=device)
    start = torch.zeros(config.decode.slots, dtype=torch.int64)
    return peer.inputs(stream.tokens(start, tokens), stream.initial_state())


def _peer_pass(function: Callable[..., Any], arguments: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    _, S = peer.decode(function, arguments)
    if S.is_cuda:
        torch.cuda.synchronize()


def measure(work: Mapping[str, Pass], repeats: int, shown: bool = False) -> dict[str, list[float]]:
    """Seconds of every pass, one round after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for i in range(repeats):
        for name, once in work.items():
            start = time.perf_counter()
            once()
            seconds[name].append(time.perf_counter() - start)
            if shown:
                print(
                    f"pass {i + 1} of {repeats}: {name}, {seconds[name][-1]:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return seconds


def results(config: Config, seconds: Mapping[str, list[float]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """bench.json: per name the seconds, their median, tokens·heads/s, and that median in passes of each peer."""
    model, decode = config.model, config.decode
    done = (decode.prefill + decode.tokens) * decode.slots * model.value_heads
    median = {name: statistics.median(x) for name, x in seconds.items()}
    units = {name: x for name, x in median.items() if name.startswith(f"{peer.NAME},")}
    lines = {
        name: {
            "seconds": seconds[name],
            "median": median[name],
            "tokens_heads_per_second": done / median[name],
            "passes": {unit: median[name] / x for unit, x in units.items()},
        }
        for name in seconds
    }
    size = {"tokens": decode.prefill + decode.tokens, "slots": decode.slots, "value_heads": model.value_heads}
    size |= {"rows": model.rows or model.value_dim, "key_dim": model.key_dim, "window": decode.window}
    device = {"cores": os.cpu_count(), "workers": len(shards.shares(config, facts["device"]))}
    faster = min(units, key=lambda name: units[name]) if units else None
    return {
        **facts,
        **device,
        "torch": torch.__version__,
        "size": size,
        "faster_peer": faster,
        "measured": lines,
    }


def table(result: Mapping[str, Any]) -> Table:
    """The lines of bench.json in 80 columns; ratios to a peer that is missing read `not measured`."""
    from rich import box
    from rich.table import Table

    lines, size = result["measured"], result["size"]
    units = list(next(iter(lines.values()))["passes"])
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption_justify="left", caption_style="")
    drawn.add_column("one pass of", no_wrap=True, max_width=24, overflow="ellipsis")
    for name in ("median\nseconds", "range\n", "\ntokens·heads/s"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for unit in units or ["peer"]:
        drawn.add_column("passes,\n" + unit.removeprefix(f"{peer.NAME}, "), justify="right")
    for name, line in lines.items():
        times = f"{min(line['seconds']):.3g}–{max(line['seconds']):.3g}"
        rate = f"{line['tokens_heads_per_second']:,.0f}"
        ratios = [f"{line['passes'][unit]:.2f}" for unit in units] or ["not measured"]
        drawn.add_row(name, f"{line['median']:.3g}", times, rate, *ratios)
    text = [
        f"{size['tokens']:,} tokens, {size['value_heads']} heads of {size['rows']} × {size['key_dim']}, "
        f"{size['slots']} sequence(s), {len(next(iter(lines.values()))['seconds'])} passes each",
        f"{result['workers']} worker process(es) on {result['cores']} cores, {result['device']}; "
        f"torch {result['torch']}, {peer.NAME} {result['peer']['version'] or 'absent'}",
    ]
    if units:
        text.append(f"passes: median over that of {peer.FUNCTION}")
        first, faster = next(iter(lines)), result["faster_peer"]
        text.append(f"{first}: {lines[first]['passes'][faster]:.2f} passes of the faster peer ({faster})")
    drawn.caption = "\n".join(text)
    return drawn


def report(result: Mapping[str, Any], directory: Path) -> None:
    """Print the tables and where the numbers and the figure lie."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if "measured" in result:
        console.print(table(result))
        if missing := result["peer"].get("missing"):
            console.print(f"peer not measured: {missing}", soft_wrap=True)
    if "kernels" in result:
        from harness.speed import lines, tables

        for drawn in tables(result["kernels"]):
            console.print(drawn)
        for line in lines(result["kernels"]):
            console.print(line, soft_wrap=True)
        console.print(f"figure: {directory / 'bench.png'}", soft_wrap=True)
    console.print(f"numbers: {directory / 'bench.json'}", soft_wrap=True)
