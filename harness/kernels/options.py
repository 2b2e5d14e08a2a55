"""Which designs the kernels can be, and how: a declared design as constexpr options, or why not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.arithmetic import DOTS, Arithmetic, Conventions, Dot, Rounding
from harness.variants import VariantSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16")
WINDOW_DOTS = ("gram", "state", "history_score", "history")
# what a bf16 product rounds as it reads it
COVERED = ("state_operand", "history_score", "history_d", "fold_d", "fold_k")


@dataclass(frozen=True)
class Options:
    """What the kernels compile in. formats: field -> torch.dtype, `checkpoint` and `output` among them;
    strided: a recurrence sums even and odd columns apart."""

    key: str
    dot: str
    fold_dot: str
    inverse: str
    low: bool
    read_low: bool
    strided: bool
    formats: tuple[tuple[str, torch.dtype], ...]


def unsupported(spec: VariantSpec, a: Arithmetic) -> str | None:
    """Why no kernel computes this design, or None."""
    s, d = a.sites, a.dots
    if spec.fold_current:
        return "fold_current has no kernel"
    if spec.gate_record != "per_token":
        return "cumulative gates have no kernel"
    if a.conventions != Conventions():
        return "conventions other than the model's have no kernel"
    for name in ("gate", "decay", "rhs", "inverse", "d", "gram", "store_g", "store_beta", "step"):
        if getattr(s, name) != Rounding("fp32"):
            return f"site {name} is fp32 in every kernel, not {getattr(s, name)}"
    for name in ("checkpoint", "output", "store_v", "store_k"):
        if str(getattr(s, name)) not in DTYPES:
            return f"site {name} is stored as {', '.join(DTYPES)}, not {getattr(s, name)}"
    for name in ("store_d", "store_k_hat"):
        if str(getattr(s, name)) not in (*DTYPES, "bf16x2"):
            return f"site {name} is stored as {', '.join(DTYPES)} or bf16x2, not {getattr(s, name)}"
    if s.store_k_hat.parts == 2:
        return "site store_k_hat has one part in every kernel"
    if str(s.key) not in ("fp32", "bf16"):
        return f"site key is fp32 or bf16 in every kernel, not {s.key}"
    if (spec.verify == "tokens" or spec.fold == "replay") and plain(d.recurrent) != "ieee":
        return "product recurrent is ieee in every kernel"
    if spec.verify == "tokens":
        if spec.fold != "snapshot":
            return "a token pass that replays has no kernel"
        return None if s.key == Rounding("fp32") and s.snapshot == s.checkpoint else "a recurrence has fp32 keys"
    if len({plain(getattr(d, name)) for name in WINDOW_DOTS}) > 1:
        return f"products {', '.join(WINDOW_DOTS)} have one precision"
    for name in (*WINDOW_DOTS, "fold"):
        if plain(getattr(d, name)) not in PRECISIONS:
            return f"product {name} is {', '.join(PRECISIONS)} in every kernel"
    for name in ("solve", "output"):
        if plain(getattr(d, name)) != "ieee":
            return f"product {name} is ieee in every kernel"
    for name in COVERED:
        site, product = getattr(s, name), plain(d.fold if name.startswith("fold") else d.state)
        if not (site == Rounding("fp32") or (site == Rounding("bf16") and product == "bf16")):
            return f"site {name} is fp32, or bf16 before a bf16 product"
    if spec.inverse not in ("substitution", "rhs_solve"):
        return f"inverse {spec.inverse} has no kernel"
    return None


def plain(dot: Dot) -> str | None:
    """The precision a product is named by, its blocks aside: a kernel sums in the order its compiler takes."""
    return next((n for n, x in DOTS.items() if (x.left, x.right, x.accumulate, x.x3) == (
        dot.left, dot.right, dot.accumulate, dot.x3)), None)  # fmt: skip


def options(spec: VariantSpec, a: Arithmetic) -> Options:
    """How the kernels compute a design; `unsupported` must have nothing to say."""
    s = a.sites
    stored = {"checkpoint": s.checkpoint, "output": s.output, "v": s.store_v, "k": s.store_k}
    stored |= {"k_hat": s.store_k_hat, "d": s.store_d.high, "d_lo": s.store_d.high}
    formats = {name: DTYPES[r.format] for name, r in stored.items()} | {"g": torch.float32, "beta": torch.float32}
    low = s.store_d.parts == 2
    return Options(
        s.key.format,
        plain(a.dots.state) or "ieee",
        plain(a.dots.fold) or "ieee",
        spec.inverse,
        low,
        low and spec.history_read == "sum",
        a.dots.recurrent.strided and (spec.verify == "tokens" or spec.fold == "replay"),
        tuple(formats.items()),
    )
