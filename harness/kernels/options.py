"""Which designs the kernels can be, and how: a declared design as constexpr options, or why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.arithmetic import DOTS, EXACT, Arithmetic, Dot, Rounding
from harness.variants import VariantSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16", "bf16x2", "bf16x4")
PAIRS = ("store_d", "store_k_hat")  # sites that may be stored in two parts
PRODUCTS = ("gram", "state", "history_score", "history", "fold", "output")  # of a window
# values that a product rounds as it reads them, and which of its operands they are
COVERED = {
    "state_operand": ("state", "left"),
    "history_score": ("history", "right"),
    "history_d": ("history", "left"),
    "fold_d": ("fold", "left"),
    "fold_k": ("fold", "right"),
}
INVERSES = ("substitution", "rhs_solve", "doubling")


@dataclass(frozen=True)
class Options:
    """What the kernels compile in; the names of sites and products are those of harness.arithmetic.

    scores: A and F; series: the product inside an inverse; low_d, low_k: records of two parts, read_low: read by a
    verify too; raw: the fold replays; current: it takes the token at hand; outside, after: of Conventions; strided: a
    recurrence sums even and odd columns apart; formats: field -> torch.dtype, `checkpoint` and `output` among them
    """

    formats: tuple[tuple[str, torch.dtype], ...]
    key: str = "fp32"
    beta: str = "fp32"
    scores: str = "fp32"
    rhs: str = "fp32"
    gram: str = "ieee"
    state: str = "ieee"
    score: str = "ieee"
    history: str = "ieee"
    fold: str = "ieee"
    solve: str = "ieee"
    output: str = "ieee"
    series: str = "ieee"
    inverse: str = "substitution"
    low_d: bool = False
    low_k: bool = False
    read_low: bool = False
    cumulative: bool = False
    raw: bool = False
    current: bool = False
    outside: bool = False
    after: bool = False
    strided: bool = False


def unsupported(spec: VariantSpec, a: Arithmetic) -> str | None:
    """Why no kernel computes this design, or None."""
    s, d, window = a.sites, a.dots, spec.verify == "window"
    for name in ("gate", "decay", "inverse", "d", "store_g", "store_beta", "decayed", "step"):
        if getattr(s, name) != Rounding("fp32"):
            return f"site {name} is fp32 in every kernel, not {getattr(s, name)}"
    for name in ("key", "gram", "rhs"):
        if str(getattr(s, name)) not in ("fp32", "bf16"):
            return f"site {name} is fp32 or bf16 in every kernel, not {getattr(s, name)}"
    if a.conventions.beta not in (EXACT, Rounding("fp32"), Rounding("bf16")):
        return f"conventions.beta is fp32 or bf16 in every kernel, not {a.conventions.beta}"
    for name in ("checkpoint", "output", "store_v", "store_k", *PAIRS):
        pair = ("bf16x2",) if name in PAIRS else ()
        if str(getattr(s, name)) not in (*DTYPES, *pair):
            return f"site {name} is stored as {', '.join((*DTYPES, *pair))}, not {getattr(s, name)}"
    if (not window or spec.fold == "replay") and plain(d.recurrent) != "ieee":
        return "product recurrent is ieee in every kernel"
    if not window:
        if spec.fold == "product":
            return "a token pass on a fold of stored d has no kernel"
        if spec.fold_current:
            return "fold_current of a token pass has no kernel"
        if spec.fold == "snapshot" and s.snapshot != s.checkpoint:
            return f"a draft's state is stored as the checkpoint is, {s.checkpoint}, not {s.snapshot}"
        return None
    return window_unsupported(spec, a)


def window_unsupported(spec: VariantSpec, a: Arithmetic) -> str | None:
    """The same of a chunked window."""
    s, d = a.sites, a.dots
    if spec.fold_current and spec.fold == "replay":
        return "fold_current of a replay has no kernel"
    if spec.fold_current and spec.history_read == "hi" and 2 in (s.store_d.parts, s.store_k_hat.parts):
        return "fold_current reads both parts of a record, or none, in every kernel"
    if spec.inverse not in INVERSES:
        return f"inverse {spec.inverse} has no kernel"
    used = [*PRODUCTS, *{"rhs_solve": (), "doubling": ("solve", "inverse")}.get(spec.inverse, ("solve",))]
    for name in used:
        if plain(getattr(d, name)) not in PRECISIONS:
            return f"product {name} is {', '.join(PRECISIONS)} in every kernel"
    for name, (product, side) in COVERED.items():
        dot: Dot = getattr(d, product)
        reads: Rounding = getattr(dot, side)
        if getattr(s, name) != Rounding("fp32") and (getattr(s, name) != reads or dot.x3):
            return f"site {name} is fp32, or what product {product} reads, not {getattr(s, name)}"
    return None


def plain(dot: Dot) -> str | None:
    """The precision a product is named by, its blocks aside: a kernel sums in the order its compiler takes."""
    return next((n for n, x in DOTS.items() if (x.left, x.right, x.accumulate, x.x3) == (
        dot.left, dot.right, dot.accumulate, dot.x3)), None)  # fmt: skip


def options(spec: VariantSpec, a: Arithmetic) -> Options:
    """How the kernels compute a design; `unsupported` must have nothing to say."""
    s, c = a.sites, a.conventions
    stored = {"checkpoint": s.checkpoint, "output": s.output, "v": s.store_v, "k": s.store_k}
    stored |= {"k_hat": s.store_k_hat, "k_hat_lo": s.store_k_hat, "d": s.store_d, "d_lo": s.store_d}
    formats = {name: DTYPES[r.format] for name, r in stored.items()} | {"g": torch.float32, "beta": torch.float32}
    common: dict[str, Any] = {
        "formats": tuple(formats.items()),
        "key": s.key.format,
        "beta": "bf16" if c.beta == Rounding("bf16") else "fp32",
        "raw": spec.fold == "replay",
        "outside": c.eps_at == "outside",
        "after": c.decay == "after",
        "strided": a.dots.recurrent.strided and (spec.verify == "tokens" or spec.fold == "replay"),
    }
    if spec.verify == "tokens":
        return Options(**common)
    low_d, low_k = s.store_d.parts == 2, s.store_k_hat.parts == 2
    names: dict[str, str] = {"score": "history_score"} | {n: n for n in ("gram", "state", "history", "output")}
    if spec.inverse != "rhs_solve":
        names["solve"] = "solve"
    if spec.inverse == "doubling":
        names["series"] = "inverse"
    if spec.fold == "product":
        names["fold"] = "fold"
    return Options(
        **common | {ours: plain(getattr(a.dots, theirs)) for ours, theirs in names.items()},
        scores=s.gram.format,
        rhs=s.rhs.format,
        inverse=spec.inverse,
        low_d=low_d,
        low_k=low_k,
        read_low=(low_d or low_k) and spec.history_read == "sum",
        cumulative=spec.gate_record == "cumulative",
        current=spec.fold_current,
    )
