"""What every kernel is timed on: windows of one layer, accepts drawn ahead, and the cursors they lead to.

A slot's place in its ring decides what a step costs, so places are those of a long decode: accepts uniform in 1..m,
sixteen steps in, slots apart by their own draws. A verify without a flush is timed on slots whose flag is down, as
often at each history length as a decode has it; a step with everything in it on slots wherever they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.ring import Cursors, RingSpec
from harness.tokens import Shape

SETTLE = 16  # steps after which a slot is anywhere in its cycle


class Window(NamedTuple):
    """One window of B slots, on the device. q, k [B, H, m, K], v [B, HV, m, V] bf16; the rest [B, HV, m]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor  # bf16, what the gate is made of
    b: Tensor
    g: Tensor  # fp32
    beta: Tensor
    lengths: Tensor  # [B] int32


@dataclass(frozen=True)
class Gate:
    """A_log and dt_bias [HV], fp32: g = -e^A_log softplus(a + dt_bias), linear above 20."""

    A_log: Tensor
    dt_bias: Tensor

    @classmethod
    def draw(cls, HV: int, rng: torch.Generator) -> Gate:
        """Heads whose memory runs from some tokens to some hundred."""
        u = torch.rand(2, HV, generator=rng, device=rng.device)
        step = 1e-3 * 100.0 ** u[1]
        return cls(torch.log(1 + 15 * u[0]), torch.log(torch.expm1(step)))


def draw(shape: Shape, gate: Gate, B: int, m: int, rng: torch.Generator) -> Window:
    """A window of SiLU keys and queries and normal values, on the generator's device."""
    on = rng.device

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, device=on)

    q, k = (torch.nn.functional.silu(normal(B, shape.H, m, shape.K)).bfloat16() for _ in range(2))
    v = normal(B, shape.HV, m, shape.V).bfloat16()
    a, b = (normal(B, shape.HV, m).bfloat16() for _ in range(2))
    x = a.float() + gate.dt_bias[:, None]
    g = -gate.A_log.exp()[:, None] * torch.nn.functional.softplus(x, threshold=20.0)
    return Window(q, k, v, a, b, g, torch.sigmoid(b.float()), torch.full((B,), m, dtype=torch.int32, device=on))


@dataclass(frozen=True)
class Trace:
    """Cursors before every step and after the last, [steps + 1, 3, slots] int32 (write_pos, cache_base, is_flush).

    folded [steps, slots]: records folded by the commit of a step (fold_when=commit), else 0
    """

    cursors: NDArray[np.int32]
    folded: NDArray[np.int32]


def trace(ring: RingSpec, accepts: NDArray[np.int64], m: int) -> Trace:
    """The cursors of slots that accept accepts [steps, slots] of windows of m, by the rule of harness.ring."""
    steps, n = accepts.shape
    moving, slots = Cursors(ring, n), list(range(n))
    seen, folded = np.zeros((steps + 1, 3, n), np.int32), np.zeros((steps, n), np.int32)
    for t in range(steps):
        moving.verify(slots, [m] * n)
        full = moving.commit(slots, accepts[t].tolist())
        folded[t, full] = np.array(moving.write_pos)[full]
        moving.absorb(full)
        seen[t + 1] = moving.write_pos, moving.cache_base, moving.is_flush
    return Trace(seen, folded)


def accepts(slots: int, steps: int, m: int, seed: int) -> NDArray[np.int64]:
    """[steps, slots], uniform in 1..m; a slot's do not depend on how many slots there are."""
    return np.random.default_rng(seed).integers(1, m, (slots, steps), endpoint=True).T


def unflagged(ring: RingSpec, slots: int, m: int, seed: int) -> NDArray[np.int64]:
    """[SETTLE, slots] accepts after which no slot of this ring is flagged: a decode seen at its plain verifies."""
    drawn = accepts(4 * slots + 64, SETTLE, m, seed)
    down = np.flatnonzero(trace(ring, drawn, m).cursors[-1, 2] == 0)[:slots]
    if len(down) < slots:
        # a ring that flushes at every step has no plain verify; its last steps are what they are
        down = np.arange(slots)
    return drawn[:, down]


def flush_length(ring: RingSpec, m: int) -> int:
    """The mean history length at which a slot with accepts uniform in 1..m is flushed, rounded."""
    assert ring.flush_at is not None
    # the step that crosses flush_at overshoots it by j with probability proportional to P(accept > j)
    over = sum(j * (m - j) for j in range(m)) / sum(m - j for j in range(m))
    return min(round(ring.flush_at + over), ring.length - m)


def token_major(x: Tensor) -> Tensor:
    """[B, heads, m, ...] as [B m, heads, ...], contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def head_major(x: Tensor, B: int) -> Tensor:
    """The reverse, as a view."""
    return x.unflatten(0, (B, -1)).transpose(1, 2)
