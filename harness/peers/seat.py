"""What a peer's kernel is handed: the numbers our designs hold, laid out token by token as the peers expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.workload import Gate, Window, token_major


@dataclass(frozen=True)
class Seat:
    """One set of buffers of B slots; T = B m tokens, those of a slot side by side.

    q, k  [T, H, K], v [T, HV, V] bf16; a, b [T, HV] bf16; g, beta [T, HV] fp32; A_log, dt_bias [HV] fp32
    starts      [B + 1] int32, slots [B] int32
    checkpoint  [B, HV, V, K]
    records     {field: [B, heads, L, width]}
    cursors     [3, B] int32: write_pos, cache_base, is_flush
    """

    m: int
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    starts: Tensor
    slots: Tensor
    checkpoint: Tensor
    records: dict[str, Tensor]
    cursors: Tensor


@dataclass(frozen=True)
class Bound:
    """A peer's call with its arguments: `out` gives [T, HV, V] after `run`; `tensors` are what it needs beside them."""

    run: Callable[[], Any]
    out: Callable[[], Tensor]
    tensors: dict[str, Tensor]


def seat(window: Window, gate: Gate, state: Any) -> Seat:
    """A seat with copies of a design's checkpoint, records and device cursors, and of a window."""
    B, _, m, _ = window.q.shape
    on = window.q.device
    moved = {name: token_major(getattr(window, name)) for name in ("q", "k", "v", "a", "b", "g", "beta")}
    return Seat(
        m=m,
        **moved,
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        starts=torch.arange(0, B * m + 1, m, dtype=torch.int32, device=on),
        slots=torch.arange(B, dtype=torch.int32, device=on),
        checkpoint=state.checkpoint.clone(),
        records={name: rows.clone() for name, rows in state.records.items()},
        cursors=state.on_device.clone(),
    )
