"""How wrong is the oracle itself, and does it lie within the bound that every run prints?

Hypothesis: the fp64 oracle of a long decode stays near its last places, as every token contracts what the tokens
before left; its certificate, which assumes the worst of every sum, is some thousand times larger and still far below
anything the harness says of a variant.

Predicted, for 16,384 tokens of 128 keys, relative to the state: errors of 1e-16 in heads that forget within a window,
1e-15 in heads with long memory, at most 1e-14 where text repeats, and no growth over the last half; bounds of 1e-13
in the former, up to 5e-10 in the heads that never decay, 1e3 to 1e5 above the error everywhere.

Refuted by one error above its bound, which also ends the run with an error: then no certificate printed is one.

The oracle runs as in any run: pieces between the flushes of the grid, value rows as `model.rows` has them. Beside it
the same tokens in integers of 2^-w, twice, to 100 bits (harness.reference.exact): some fifteen seconds per value head
of two rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import progress, shards
from harness.config import Config
from harness.decode import Stream
from harness.designs import oracle_engine
from harness.errors import ConfigError, HarnessError
from harness.provenance import identity_of
from harness.reference import exact
from harness.reference.oracle import Oracle
from harness.ring import RingSpec
from harness.rundir import Run
from harness.runner import block_steps
from harness.schedule import Schedule
from harness.tokens import Shape

BITS = 100
POINTS = 16  # states looked at: the last flush of each sixteenth of the decode


@dataclass
class Seen:
    """What the oracle said of one slot. States of as many token counts as it was looked at; outputs of all tokens."""

    states: dict[int, tuple[int, np.ndarray, np.ndarray]]  # sixteenth -> tokens, S [HV, V, K], bound [HV]
    outputs: list[np.ndarray]  # [T, HV, V] in parts


def run(config: Config) -> dict[str, Any]:
    """Decode, compare, write oracle.json, print the table. Raises HarnessError for an error above its bound."""
    device = shards.device_of(config)
    if config.decode.prefill:
        raise ConfigError(f"decode.prefill: {config.decode.prefill}; this experiment begins with the first token")
    who = identity_of({"oracle": {"engine": oracle_engine(config, device).engine, "device": device}}, [BITS, POINTS])
    with Run.open(config, who) as out:
        if out.finished:
            return {"state": "skipped", "directory": str(out.directory)}
        rows = measure(config, device)
        out.write_json("oracle.json", {"settings": settings(config, device), "rows": rows})
        directory = out.finish(device=device)
    report(rows, f"{directory / 'oracle.json'}")
    if wrong := [r for r in rows if not r["error"] <= r["bound"]]:
        text = "slot {slot}, head {head} after {tokens} tokens: error {error:.2e}, bound {bound:.2e}"
        raise HarnessError(f"oracle: {len(wrong)} errors above their bounds, first " + text.format(**wrong[0]))
    return {"state": "finished", "directory": str(directory)}


def settings(config: Config, device: str) -> dict[str, Any]:
    """What a reader of the numbers alone must know."""
    model, decode = config.model, config.decode
    names = ("family", "tokens", "slots", "seed", "window")
    found = {"model": model.name, "key_heads": model.key_heads, "value_heads": model.value_heads}
    found |= {"key_dim": model.key_dim, "rows": model.rows or model.value_dim}
    found |= {name: getattr(decode, name) for name in names}
    return found | {
        "gates": Path(decode.gates).name if decode.gates else None,
        "device": device,
        "torch": torch.__version__,
        "bits": BITS,
    }


def measure(config: Config, device: str) -> list[dict[str, Any]]:
    """A row per slot, value head and point: tokens, error, bound, memory, and the largest error of an output so far."""
    decode, whole = config.decode, Shape.of(config.model)
    rows: list[dict[str, Any]] = []
    with progress.tokens(config) as advance, torch.inference_mode():
        # heads never meet: the tokens of one key head at a time
        for h in range(whole.H):
            stream = Stream(decode, whole, heads=slice(h, h + 1), device=device)
            shape = Shape(1, whole.group, whole.V, whole.K)
            for slot, seen in enumerate(oracle(config, stream, shape, device)):
                tokens = stream.tokens(torch.zeros(decode.slots, dtype=torch.int64), decode.tokens)
                rows += compared(seen, stream, tokens.map(lambda x, slot=slot: x[slot].cpu()), slot, h * whole.group)
                advance(decode.tokens // whole.H)
    return sorted(rows, key=lambda r: (r["slot"], r["head"], r["tokens"]))


def oracle(config: Config, stream: Stream, shape: Shape, device: str) -> list[Seen]:
    """The oracle over a whole decode, as the runner drives it."""
    decode, grid = config.decode, RingSpec.of(config.ring)
    judge = Oracle(shape, stream.initial_state(), maker=oracle_engine(config, device))
    seen = [Seen({}, []) for _ in range(decode.slots)]
    schedule = Schedule(decode, config.acceptance, grid, 0, decode.tokens)
    for block in schedule.blocks(block_steps(config, 1, device)):
        pieces = block.pieces(stream, shape)
        if pieces is None:
            continue
        truth = judge.advance(pieces.windows, pieces.points)
        for slot, point, tokens in zip(block.grid.slot, block.grid.point, block.grid.tokens, strict=True):
            part = int(tokens) * POINTS // (decode.tokens + 1)
            seen[slot].states[part] = int(tokens), truth.S[point, slot].cpu().numpy().copy(), truth.bound[point, slot]
        for slot, n in enumerate(pieces.windows.lengths.sum(0)):
            seen[slot].outputs.append(truth.o[slot, :n].cpu().numpy().copy())
    return seen


def compared(seen: Seen, stream: Stream, tokens: Any, slot: int, first: int) -> list[dict[str, Any]]:
    """The rows of one slot, `first` its first value head."""
    if not seen.states:
        raise HarnessError(f"decode.tokens: {len(tokens.g)} tokens end before a ring flushes; nothing to compare")
    counts, states, bounds = zip(*(seen.states[part] for part in sorted(seen.states)), strict=True)
    whole = exact.decode(stream.initial_state()[slot].cpu(), tokens, BITS, points=counts)
    off, S = (np.linalg.norm(x, axis=(2, 3)) for x in (whole.error("S", np.stack(states)), whole.nearest("S")))
    o = np.concatenate(seen.outputs)
    # the oracle stops at the last flush
    o_off = largest(np.abs(replace(whole, o=whole.o[: len(o)]).error("o", o)))
    size = largest(np.abs(whole.nearest("o")))
    # absolute where the state is 0, as everywhere
    error = off / np.where(S == 0, 1.0, S)
    memory = -1 / np.minimum(tokens.g.numpy().clip(-1e3).mean(0), -1e-12)
    return [
        {
            "slot": slot,
            "head": first + i,
            "tokens": counts[p],
            "error": error[p, i],
            "bound": bounds[p][i],
            "output": o_off[i] / size[i],
            "memory": memory[i],
        }
        for i in range(len(memory))
        for p in range(len(counts))
    ]


def largest(x: np.ndarray) -> np.ndarray:
    """Over tokens and rows, [HV]."""
    return np.asarray(x.max(axis=(0, 2)))


def report(rows: list[dict[str, Any]], where: str) -> None:
    """A line per slot and head in 80 columns, and where the numbers lie."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for name in ("slot", "head", "memory", "error: half way", "at the end", "largest", "bound", "bound/error"):
        table.add_column(name, justify="right", no_wrap=True)
    series: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        series.setdefault((row["slot"], row["head"]), []).append(row)
    for (slot, head), mine in series.items():
        top, last = max(r["error"] for r in mine), mine[-1]
        ratio = f"{last['bound'] / last['error']:.0f}" if last["error"] else ""
        middle = mine[(len(mine) - 1) // 2]["error"]
        cells = [f"{x:.1e}" for x in (middle, last["error"], top, last["bound"])]
        table.add_row(str(slot), str(head), f"{last['memory']:.3g}", *cells, ratio)
    console = Console(markup=False, highlight=False)
    console.print(table)
    worst = max(rows, key=lambda r: r["error"] / r["bound"])
    console.print(
        f"memory: 1/mean(-g) in tokens; bound: at the end; nearest to its bound: head {worst['head']} "
        f"after {worst['tokens']} tokens, {worst['error']:.1e} of {worst['bound']:.1e}"
    )
    console.print(f"numbers: {where}", soft_wrap=True)
