"""E+ = E M: does an inexact (I+A)^-1 make the state diverge, and exactly where the radius of its window operator says?

With an inexact T a window maps a state error E to E M (harness.conditioning). For an exact T, M is the product of the
tokens' own contractions; for a truncated or overflowing one it need not contract, and that is the one mechanism known
here by which an open-loop fold could fail to. So operators and decodes are set side by side: for every inverse, format,
window size, key cosine, beta and g, norm and radius of single windows, the growth of their product, and the growth of
the state error in a decode closed through that inverse (harness.closed_runs). Then a state is perturbed and followed in
the default variants (harness.injection), and one fold is priced in fp32 (harness.fold_constants).

Hypothesis: the state error grows exponentially if and only if the radius is above 1 (P8). A fold by one matrix product
with a T that is good to a few units contracts as the recurrence does, in every format, until rounding.

Predicted, before the full run:
  substitution, block, horner   radius at most 1 and no divergence, in any format, at any window up to 32, beta <= 1
  neumann/n, newton/n cut short exact up to their order; radius above 1 at windows from 8 on, from cosine .6 on
  doubling, newton, neumann     in fp32 fine up to a window of 16, radius above 1 at 32 from cosine .9 on; in tf32 and
                                bf16 above 1 at 16 near cosine .9; in fp16 not finite at 32
  radius and divergence         agree in 95 % of runs, and wherever keys are identical, as all windows are then alike;
                                elsewhere windows differ, the radius of one is not the growth of many, and the product
                                decides: measured growth is its growth to 5 %
  injected perturbations        gain below e^G, within 1 % of exact arithmetic, until what is left is rounding: 1e-6 of
                                the state in fp32, 1e-3 in tf32, 1e-2 in bf16, where heads of long memory keep more, as
                                bf16 rounds their decay away. No gain grows
  one fold in fp32              by product below u of the state at any ring length; by replay some sqrt(w) u

Refuted if a run diverges in a format whose radius is below 1 by more than a run can resolve and the product does not
say so either; or if a perturbation of a default variant outgrows e^G before it is as small as that variant's rounding.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from harness import closed_runs, fold_constants, injection, shards
from harness.config import Config
from harness.cores import cores
from harness.errors import ConfigError
from harness.experiments.drift import formats_of
from harness.progress import shown
from harness.provenance import identity_of
from harness.rundir import Run

if TYPE_CHECKING:
    import pandas as pd

Task = Callable[[], Iterable[dict[str, Any]]]
TABLES = ("closed", "injected", "folds")


def run(config: Config) -> dict[str, Any]:
    """Run, write the three tables and summary.json, draw, print. Returns state and directory."""
    if shards.device_of(config) != "cpu":
        raise ConfigError("device: closed runs are emulated; window_operator takes device=cpu")
    made = [d for w in config.operator.windows for d in closed_runs.designs(config, w)]
    followed = injection.designs(config)
    who = {d.spec.name: {"backend": d.backend, "engine": d.engine, "device": "cpu"} for d in followed}
    definitions = [[d.spec, d.ring, d.arithmetic] for d in [*made, *followed]]
    with Run.open(config, identity_of(who, definitions)) as out:
        if out.finished:
            return {"state": "skipped", "directory": str(out.directory)}
        tables = frames(config)
        for name, rows in tables.items():
            rows.to_parquet(out.path(f"{name}.parquet"), compression="zstd", index=False)
        from harness.operator_figure import figure
        from harness.operator_summary import summarise
        from harness.operator_tables import report

        summary = summarise(config, **tables)
        out.write_json("summary.json", summary)
        figure(config, **tables).savefig(out.path("operator.png"))
        directory = out.finish(variants={d.spec.name: formats_of(d, "cpu") for d in followed}, device="cpu")
    report(summary, {"run directory": directory, "figure": directory / "operator.png"})
    return {"state": "finished", "directory": str(directory)}


def frames(config: Config) -> dict[str, pd.DataFrame]:
    """The rows of every part, by name; parts run in processes of their own."""
    import pandas as pd

    # the widest windows take longest and begin first
    tasks: list[tuple[str, Task]] = [
        ("closed", partial(closed_runs.runs, config, w)) for w in sorted(config.operator.windows, reverse=True)
    ]
    tasks.insert(0, ("injected", partial(injection.gains, config)))
    tasks.append(("folds", partial(fold_constants.constants, config)))
    found: dict[int, list[dict[str, Any]]] = {}
    for i, rows in done(config, [task for _, task in tasks]):
        found[i] = rows
        if shown(config.progress):
            print(f"{len(found)} of {len(tasks)} parts, {tasks[i][0]}: {len(rows):,} rows", file=sys.stderr, flush=True)
    # in the order of the tasks, whoever was faster
    return {
        name: pd.DataFrame([row for i, (kind, _) in enumerate(tasks) if kind == name for row in found[i]])
        for name in TABLES
    }


def done(config: Config, tasks: list[Task]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number, rows) of every task as it ends."""
    workers = min(config.workers or cores(), len(tasks))
    if workers == 1:
        yield from ((i, _rows(task)) for i, task in enumerate(tasks))
        return
    # compiled or loaded once, before the processes part
    import harness.compiled.inspect
    import harness.compiled.lockstep  # noqa: F401

    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as processes:
        futures = {processes.submit(_rows, task): i for i, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            processes.shutdown(wait=False, cancel_futures=True)


def _rows(task: Task) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return list(task())
