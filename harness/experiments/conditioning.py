"""Which inverse of I + A is accurate, in which format, on which inputs, up to which window?

Hypothesis: T is well conditioned wherever A comes from keys, so a method is as good as its products unless it forms
powers of A: max|A|^p, not any condition number, is what a series loses. A truncated series is no inverse at all once
keys are coherent, whatever the format. A window of 1 has A = 0 and needs no inverse.

Predicted, n the window, u the roundoff of the format (2u where operands are truncated), on inputs of the model:
  P1  substitution in fp32: error of T at most 4 n u for every input and n <= 128
  P2  doubling, neumann, newton: error of T about u max|A|^p: at most 10 times that, and at least a tenth of it where
      max|A|^p is 1e3 or more
  P3  horner, block and block/16 as substitution, with the u of their products: at most 4 n u in every format, except
      that horner overflows with beta 1.97 on one key at n = 128, where rows not settled yet hold powers
  P4  |T_ij| <= beta_i e^{G_i-G_j} holds for every window, within n 2^-53; so no T exceeds max(1, beta)
  P5  a series cut after A^3 is off by 0.1 or more for beta from .95, cosines from .63 and n >= 8, in every format
  P6  a refinement repairs block/16 in bf16 and tf32 products to 4 n of fp32's u, and repairs nothing of newton where
      max|A|^p is above 1/u
  P7  at a window of 1 T is exactly 1 in every method and format
Of inputs outside the model none of this is claimed; they are labelled and measured all the same.

Refuted wherever a check of summary.json says so: each is the worst case over all points it speaks of.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from harness import points
from harness.config import Config
from harness.cores import cores
from harness.errors import HarnessError
from harness.inverted import difficulties, inversions, parse_format
from harness.progress import shown
from harness.provenance import identity_of
from harness.reference.inverse import parse
from harness.rundir import Run
from harness.safety import summarise, tables


def run(config: Config) -> dict[str, Any]:
    """Measure, write points.parquet and inputs.parquet, summarise, draw. Returns state and directory."""
    c = config.conditioning
    if config.device == "cuda":
        raise HarnessError("device: the map of inverses is emulated on the CPU")
    formats = [parse_format(text) for text in c.formats]
    for name in c.methods:
        parse("conditioning.methods", name)
    points.names(c)
    given = points.given(c.matrices) if c.matrices is not None else None
    who = identity_of({}, [formats, None if given is None else given.A.numpy().tobytes().hex()])
    with Run.open(config, who) as out:
        if out.finished:
            return {"state": "skipped", "directory": str(out.directory)}
        start = time.perf_counter()
        inputs, rows = measure(config, given)
        inputs.to_parquet(out.path("inputs.parquet"), compression="zstd", index=False)
        rows.to_parquet(out.path("points.parquet"), compression="zstd", index=False)
        seconds = round(time.perf_counter() - start, 3)
        summary = summarise(inputs, rows, c.safe)
        out.write_json("summary.json", summary)
        # matplotlib takes a second to import
        from harness.maps import error_map, power_figure

        error_map(inputs, rows).savefig(out.path("map.png"))
        power_figure(inputs, rows).savefig(out.path("powers.png"))
        directory = out.finish(device="cpu", stages={"measure": seconds})
    console = Console(width=80, markup=False, highlight=False)
    for table in tables(summary):
        console.print(table)
    for name in ("map.png", "powers.png", "points.parquet"):
        console.print(f"{name.split('.')[0]}: {directory / name}", soft_wrap=True)
    return {"state": "finished", "directory": str(directory)}


def measure(config: Config, given: points.Batch | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per input and window, and a row per input, window, method and format."""
    c, inputs, rows = config.conditioning, [], []
    before = torch.get_num_threads()
    try:
        # threads inside a product of small matrices wait for each other longer than they work; formats do not
        torch.set_num_threads(1)
        for m in [*c.windows, None]:
            batch = given if m is None else points.batch(c, m, config.model.key_dim, config.decode.seed)
            if batch is None:
                continue
            if shown(config.progress):
                print(f"{len(batch.inputs)} inputs, windows of {batch.m}", file=sys.stderr, flush=True)
            inputs += difficulties(batch)
            one = partial(inversions, batch, c.methods, seed=config.decode.seed)
            with ThreadPoolExecutor(config.workers or cores(), "formats", torch.set_num_threads, (1,)) as threads:
                for found in threads.map(one, c.formats):
                    rows += found
    finally:
        torch.set_num_threads(before)
    return typed(inputs), typed(rows)


def typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Text as categories, what is absent as null, numbers as float64: a power of A reaches 1e58."""
    table = pd.DataFrame(rows)
    for name in table:
        text = name in ("input", "method", "format", "stage")
        if text or table[name].dtype == object:
            table[name] = table[name].astype("category" if text else "float64")
    return table
