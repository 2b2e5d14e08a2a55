"""A block in one compiled call does what the four calls do, one step after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, MAKERS, SHAPE, bf16, close, draw, start, windows

from harness.arms import decode_block
from harness.compiled.codes import unsupported
from harness.config import Config, PrecisionConfig, RingConfig
from harness.reference.calls import Seen
from harness.reference.emulated import Emulated
from harness.reference.inverse import INVERSES
from harness.reference.state import EmulatedState
from harness.ring import RingSpec
from harness.schedule import Block, Grid
from harness.variants import VariantSpec, load, names

OWN = PrecisionConfig()
FUSED = [
    n for n in names() if not unsupported(load(n), load(n).arithmetic()) and n not in ("kv_replay", "replay_decode")
]
RINGS = [RingConfig(16, 4), RingConfig(8, 1), RingConfig(32, 8, 3, "commit")]


def block_of(lengths: np.ndarray, accepted: np.ndarray) -> Block:
    """Steps with a grid point of one slot or another after two of three of them."""
    rng = np.random.default_rng(1)
    at = (rng.random(lengths.shape) < 0.7) & (accepted > 0)
    none = np.zeros(lengths.shape[1], dtype=int)
    return Block(np.zeros_like(lengths), lengths, accepted, Grid.of(at, accepted.cumsum(0), none, none))


Pair = tuple[list[tuple[Block, Seen]], EmulatedState]


def run(design: Emulated, ring: RingSpec) -> Pair:
    """Two blocks of ragged and idle windows; what was seen of each, and the state at the end."""
    rng = np.random.default_rng(0)
    state, seen = design.create(SHAPE, 3, start(rng, 3)), []
    for steps in (23, 10):
        lengths = rng.integers(0, ring.max_window + 1, (steps, 3))
        lengths[lengths.sum(1) == 0, 0] = 1
        accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
        ready = windows(bf16(draw(rng, steps, 3, ring.max_window, resets=(-160.0,))), lengths)
        exact = torch.from_numpy(rng.standard_normal((steps, 3, SHAPE.HV, SHAPE.V, SHAPE.K)))
        block = block_of(lengths, accepted)
        seen.append((block, decode_block(design, state, ready, block, exact[: block.most])))
    return seen, state


def compare(mine: Pair, other: Pair, same: Any) -> None:
    """Every value that a block leaves, rows outside a history and tokens behind a slot's last aside."""
    for (block, x), (_, y) in zip(mine[0], other[0], strict=True):
        step, slot = np.nonzero(block.points >= 0)
        at = slot, block.points[step, slot]
        assert (x.history[at] == y.history[at]).all() and (x.folded[at] == y.folded[at]).all()
        same("errors", x.errors[at], y.errors[at])
        for b, n in enumerate(block.committed[0]):
            same("o", x.o[b, :n], y.o[b, :n])
            same("d", x.d[b, :n], y.d[b, :n])
    one, two = mine[1], other[1]
    assert vars(one.cursors) | {"spec": 0} == vars(two.cursors) | {"spec": 0} and one.tokens == two.tokens
    same("checkpoint", one.checkpoint, two.checkpoint)
    L = one.spec.length
    for name, rows in one.records.items():
        for b, (base, w) in enumerate(zip(one.cursors.cache_base, one.cursors.write_pos, strict=True)):
            history = [(base + j) & (L - 1) for j in range(w)]
            same(name, rows[b][:, history], two.records[name][b][:, history])


def bitwise(what: str, x: Any, y: Any) -> None:
    assert np.array_equal(np.asarray(x), np.asarray(y)), what


def made(spec: VariantSpec, ring: RingConfig, precision: PrecisionConfig, engine: str = "compiled") -> Emulated:
    return MAKERS[engine](spec, spec.ring(ring), spec.arithmetic(precision))


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_a_block_is_its_steps(name: str, ring: RingConfig) -> None:
    """Faults: a cursor read at another time than the calls do, a fold kept past the next write, a record in another's
    row, a rounding missing where a state is taken, lanes put out under another token."""
    spec = load(name)
    together, apart = made(spec, ring, OWN), made(spec, ring, OWN)
    apart.fused = None
    compare(run(together, together.ring), run(apart, apart.ring), bitwise)


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("name", FUSED)
def test_a_block_of_exact_steps_is_the_readable_design(name: str, inverse: str) -> None:
    """Faults: of the kernels and the calls alike, where both are compiled: a formula that is not the reference's."""
    spec = replace(load(name), inverse=inverse) if load(name).verify == "window" else load(name)
    ring = RINGS[0]
    compare(
        run(made(spec, ring, EXACT), spec.ring(ring)), run(made(spec, ring, EXACT, "torch"), spec.ring(ring)), close
    )


def test_every_design_of_a_default_run_is_fused() -> None:
    """Fault: a default arm that falls back to single steps and takes the speed with it."""
    for name in Config().variants:
        assert made(load(name), RingConfig(), OWN).fused, name
    assert made(load("kv_replay"), RingConfig(), OWN).fused is None
