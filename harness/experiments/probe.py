"""What does a product of this device really compute, and does the emulation assume the same?

Hypothesis: on Hopper a tf32 product truncates its operands, every tensor-core accumulator truncates, an ieee product is
a chain of fp32 roundings, subnormals are kept, and e^x is not rounded to nearest.

Predicted: every operand probe agrees with harness.arithmetic.DOTS for ieee, tf32, tf32x3 and bf16; the accumulator
probes agree for tf32 and bf16; a long ieee sum differs in its last bits, as the order of its additions is the
compiler's. e^x of a log decay is off by up to 3 units of 2^-24, where one rounding would leave at most one, and is what
harness.exponential says in 95 of 100 arguments of every range, one unit beside it in the others.

A probe is a tile whose result tells two roundings apart; what is compared is the device's result with the emulated
product of the same tile, element by element. `differs` in the column of a probe means that the emulation is wrong
about this device: it is the finding, and a run of the kernels should not be explained by the emulation there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from harness import shards
from harness.arithmetic import DOTS, Arithmetic, Rounding, Sites
from harness.config import Config
from harness.errors import HarnessError
from harness.rundir import Run

SIDE = 16
PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16")
RANGES = ((-1e-4, 0.0), (-1e-2, -1e-4), (-1.0, -1e-2), (-20.0, -1.0))
SHARE = 0.95  # of the results of a fast exponential that its table gives to the bit; the rest one unit apart
FP32 = Arithmetic(Sites(decay=Rounding("fp32")))
Tile = tuple[Tensor, Tensor, Tensor]


def run(config: Config) -> dict[str, Any]:
    """Probe, write probe.json, print the table. Returns state and directory; HarnessError without a GPU."""
    device = shards.device_of(config)
    from harness.kernels.numbers import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        raise HarnessError(f"device: a probe asks a GPU, and the device is {device}")
    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    who = {"measured": datetime.now(UTC).isoformat(), "device": name}
    with Run.open(config, who) as out:
        products = {p: {name: compare(p, make(), device) for name, make in PROBES.items()} for p in PRECISIONS}
        result = {
            "device": name,
            "products": products,
            "exp": {e: exponentials(e, device) for e in ("fast", "rounded")},
        }
        out.write_json("probe.json", result)
        directory = out.finish(device=device)
    report(result, f"{directory / 'probe.json'}")
    return {"state": "finished", "directory": str(directory)}


def tiles() -> Tile:
    """Zero a, identity b, zero c."""
    return torch.zeros(1, SIDE, SIDE), torch.eye(SIDE)[None].clone(), torch.zeros(1, SIDE, SIDE)


def left_operand() -> Tile:
    """Numbers with all fraction bits times 1: how a left operand is read."""
    a, b, c = tiles()
    return a.copy_(1 + torch.rand(a.shape, generator=generator())), b, c


def right_operand() -> Tile:
    """The same for the right operand."""
    a, b, c = left_operand()
    return b, a, c


def halfway() -> Tile:
    """1 + 3/2^11 and its like: ties and near-ties of tf32 and bf16, which nearest and truncation read differently."""
    a, b, c = tiles()
    steps = torch.arange(SIDE * SIDE).view(1, SIDE, SIDE)
    return a.copy_(1 + steps * 2.0**-11), b, c


def accumulated() -> Tile:
    """c = 1 and one product of j/4 units of its last place: how the accumulator rounds."""
    a, b, c = tiles()
    return a.copy_((torch.arange(SIDE) / 4 * 2.0**-23)[None, :].expand(SIDE, SIDE)), b, c.fill_(1.0)


def many_small() -> Tile:
    """1 and fifteen products of 1/2^e, e from 24 down the rows: how many bits below the last place a sum keeps."""
    a, b, c = tiles()
    small = 2.0 ** -(24.0 + torch.arange(SIDE))
    a.copy_(small[None, :, None].expand_as(a))
    a[..., 0] = 1.0
    return a, b.fill_(1.0), c


def cancelled() -> Tile:
    """Products of size 1 that cancel to 2^-20: what of a small difference of large products is left."""
    a, b, c = tiles()
    values = 1 + torch.rand(a.shape, generator=generator())
    a.copy_(values)
    a[..., 1::2] = -values[..., 0::2]
    a[..., -1] += 2.0**-20
    return a.to(torch.bfloat16).float(), b.fill_(1.0), c


def subnormal() -> Tile:
    """Subnormal fp32 operands, and products that are subnormal: kept or flushed."""
    a, b, c = tiles()
    a.fill_(2.0**-130)
    a[:, SIDE // 2 :] = 2.0**-70
    b.copy_(torch.eye(SIDE)[None])
    b[..., SIDE // 2 :] *= 2.0**-62
    return a, b, c


def random_sum() -> Tile:
    """Sixteen random products of one sign or the other: the order of the additions."""
    a, b, c = tiles()
    g = generator()
    return a.copy_(torch.randn(a.shape, generator=g)), b.copy_(torch.randn(b.shape, generator=g)), c


PROBES: dict[str, Callable[[], Tile]] = {
    "left operand": left_operand,
    "right operand": right_operand,
    "ties": halfway,
    "accumulator": accumulated,
    "many small": many_small,
    "cancellation": cancelled,
    "subnormals": subnormal,
    "random sum": random_sum,
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def compare(precision: str, tile: Tile, device: str) -> dict[str, Any]:
    """Device and emulated c + a b: how many elements agree; worst distances in 2^-24 of the sum of magnitudes."""
    from harness.kernels.numbers import INTERPRETED
    from harness.kernels.probe import product

    a, b, c = (x.contiguous().to(device) for x in tile)
    out = torch.empty_like(c)
    product[(len(a),)](a, b, c, out, precision, INTERPRETED, INTERPRETED, SIDE)
    found = out.cpu().double()
    dot = DOTS[precision]
    a, b, c = (x.double() for x in tile)
    emulated, exact = dot(dot.lhs(a), dot.rhs(b), c), torch.baddbmm(c, a, b)
    # of the sum of magnitudes: what cancels is not held against the sum
    scale = torch.baddbmm(c.abs(), a.abs(), b.abs())
    scale = torch.where(scale == 0, 1.0, scale) * 2.0**-24
    return {
        "elements": found.numel(),
        "equal": int((found == emulated).sum()),
        "device_to_emulated": float(((found - emulated).abs() / scale).max()),
        "device_to_exact": float(((found - exact).abs() / scale).max()),
        "emulated_to_exact": float(((emulated - exact).abs() / scale).max()),
    }


def exponentials(kind: str, device: str) -> list[dict[str, float]]:
    """Error of e^x over every range of log decays, in units of 2^-24: worst and mean, which is what accumulates."""
    from harness.kernels.probe import exponential

    found = []
    for low, high in RANGES:
        x = (low + (high - low) * torch.rand(1 << 14, generator=generator())).to(device)
        y = torch.empty_like(x)
        exponential[(len(x) // 1024,)](x, y, 1024, kind)
        exact = x.double().exp()
        error = (y.double() - exact) / exact * 2.0**24
        emulated = replace(FP32, exp=kind).exponential(x.double()).float()
        apart = (y.view(torch.int32) - emulated.view(torch.int32)).abs()
        found.append({
            "from": low, "to": high, "worst": float(error.abs().max()), "mean": float(error.mean()),
            "equal": float((apart == 0).double().mean()), "apart": int(apart.max()),
        })  # fmt: skip
    return found


def report(result: dict[str, Any], where: str) -> None:
    """Two tables in 80 columns, and where the numbers lie."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("tl.dot", no_wrap=True)
    for precision in PRECISIONS:
        table.add_column(precision, justify="right", no_wrap=True)
    for name in PROBES:
        cells = []
        for precision in PRECISIONS:
            x = result["products"][precision][name]
            same = x["equal"] == x["elements"]
            cells.append("agrees" if same else f"differs {x['device_to_emulated']:.2g}")
        table.add_row(name, *cells)
    console.print(table)
    console.print("differs: worst distance of device and emulation, in 2^-24 of the sum of magnitudes")
    for kind, rows in result["exp"].items():
        text = "  ".join(f"[{r['from']:g}, {r['to']:g}] {r['worst']:.2f} ({r['mean']:+.2f})" for r in rows)
        console.print(f"e^x {kind}, worst (mean) error in 2^-24: {text}", soft_wrap=True)
        equal, apart = min(r["equal"] for r in rows), max(r["apart"] for r in rows)
        verdict = "agrees with" if equal >= SHARE and apart <= 1 else "DIFFERS from"
        console.print(f"  {verdict} its emulation: {equal:.1%} equal, at most {apart} units in the last place apart")
    console.print(f"{result['device']}; numbers: {where}", soft_wrap=True)
