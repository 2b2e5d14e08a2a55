"""Does the state drift over a long decode, and which rounding sets its level? All variants on one decode.

Hypothesis: over 16,384 tokens no error grows without bound. Each saturates within one memory of the head, at a
level set by what is rounded most coarsely between two flushes, and the open-loop fold is no worse than the exact
fold in the same formats. The account to be tested says the opposite: that an open-loop fold accumulates its errors.

Predicted: relative error of the state, with windows of 4, a ring of 16 and SiLU keys.
  exact_recurrent  1e-7 to 1e-6, flat: one fp32 rounding per token, contracted by decay and delta
  null_arm         the same; its ratio to exact_recurrent is within 2, and is the floor for any "worse than"
  chunked_fp32     1e-7, flat, at or below exact_recurrent: it rounds its state ten times less often
  chunked_tf32     6e-4, flat: 2e-4 for rounded operands, times 2.6 to 2.9 as the hardware truncates them
  chunked_bf16     5e-3 to 2e-2, saturating over some thousand tokens in the heads with long memory
  exact_fold       kept as exact_recurrent; served at the level of chunked_tf32, as its read is a tf32 product

Refuted if an error still rises over the last half of the run beyond the null arm's ratio, or if chunked_fp32 lies
more than 3 times above exact_recurrent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import progress, shards
from harness.config import Config
from harness.decode import Stream
from harness.designs import designs
from harness.errors import HarnessError
from harness.provenance import identity_of
from harness.records import RowWriter, read_rows
from harness.reference.emulated import Emulated
from harness.rundir import Run
from harness.summary import summarise, table
from harness.tokens import Shape
from harness.variants import DECLARED


def run(config: Config) -> dict[str, Any]:
    """Decode, write the rows, summarise, draw. Returns state (finished or skipped) and directory."""
    device = shards.device_of(config)
    made = designs(config, device)
    # a family or a gates file that cannot be used is refused before anything is written
    Stream(config.decode, Shape.of(config.model))
    with Run.open(config, identity(made, device)) as out:
        if out.finished:
            return {"state": "skipped", "directory": str(out.directory)}
        seconds: dict[str, float] = {}
        with _timed(seconds, "decode"):
            decode(config, device, out)
        with _timed(seconds, "summary"):
            rows = read_rows(out.work)
            summary = summarise(rows)
            out.write_json("summary.json", summary)
        with _timed(seconds, "figure"):
            # matplotlib takes a second to import
            from harness.plots import drift_figure, settings

            drift_figure(rows, settings(config, device)).savefig(out.path("drift.png"))
        formats = {design.spec.name: formats_of(design, device) for design in made}
        directory = out.finish(variants=formats, device=device, stages=seconds)
    report(summary, {"run directory": directory, "figure": directory / "drift.png"})
    return {"state": "finished", "directory": str(directory)}


def decode(config: Config, device: str, out: Run) -> None:
    """Stream every row into flushes.parquet. Raises HarnessError for a decode that ends before its first flush."""
    with RowWriter(out.path("flushes.parquet")) as writer, progress.tokens(config) as advance:
        for block in shards.run(config, device, advance):
            for variant, columns in block:
                writer.append(variant, columns)
    if not writer.rows:
        tokens, length = config.decode.tokens, config.ring.length
        raise HarnessError(f"decode.tokens: {tokens} tokens end before a ring of {length} flushes; nothing to read")


def identity(made: list[Emulated], device: str) -> dict[str, Any]:
    """What the content hash covers beside the configuration."""
    backends = {
        design.spec.name: {"backend": design.backend, "engine": design.engine, "device": device}
        | ({"origin": design.origin} if design.origin else {})
        for design in made
    }
    definitions = {design.spec.name: [design.spec, design.ring, design.arithmetic] for design in made}
    return identity_of(backends, definitions)


def formats_of(design: Emulated, device: str) -> dict[str, Any]:
    """One variant in the manifest: what its file asks for, what every site and product did in this run, and what the
    tensors of its state are."""
    spec = design.spec
    return {
        "backend": design.backend,
        "engine": design.engine,
        "device": device,
        "origin": design.origin,
        "source": spec.source,
        "declared": {key: getattr(spec, key) for key in DECLARED},
        "ring": design.ring,
        "records": spec.records(design.arithmetic),
        "conventions": design.arithmetic.conventions,
        "exp": "fast" if design.arithmetic.fast else "rounded",
        "requested": {"sites": spec.sites, "dots": spec.dots, "conventions": spec.conventions},
        "effective": design.arithmetic.shown(),
        "tensors": design.tensors(device),
    }


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 3)


def report(summary: dict[str, Any], paths: dict[str, Any]) -> None:
    """Print the summary table and where things lie."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(table(summary))
    for name, path in paths.items():
        console.print(f"{name}: {path}", soft_wrap=True)
