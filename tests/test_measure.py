"""Errors measured on the device are those of the states that `read` returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import RingConfig
from harness.metrics import state_errors
from harness.tokens import Shape
from harness.variants import VariantSpec, load
from harness.window import Step

pytest.importorskip("triton")
from test_kernels import DEFERRED, DEVICE, EVEN, KERNELS, RINGS, SMALL, case, made, ring_of, unless_quick

from harness.kernels.design import Triton, TritonState
from harness.kernels.measure import Measure, decays, relative

# of an error: both are fp64 sums of the same differences in another order, but where the error is 1e-8 of the state
# (half a unit of fp32, the least there is) the order in which the fp64 state is formed moves it by 1e-16 / 1e-8
SAME = 1e-6


def spoil(state: TritonState, value: float) -> None:
    """`value` in every ring row outside the histories."""
    L = state.spec.length
    for slot, (base, w) in enumerate(zip(state.cursors.cache_base, state.cursors.write_pos, strict=True)):
        free = [(base + j) & (L - 1) for j in range(w, L)]
        for rows in state.records.values():
            rows[slot, :, free] = value


def decoded(spec: VariantSpec, ring: RingConfig, shape: Shape, steps: int = 5) -> tuple[Triton, TritonState]:
    """Three slots some steps on, with histories of different length."""
    ring = ring_of(spec, ring)
    initial, ready, accepted = case(11, ring, steps, 3, shape)
    maker = made(Triton, spec, ring)
    assert isinstance(maker, Triton)
    state = maker.create(shape, 3, initial, device=DEVICE)
    assert isinstance(state, TritonState)
    for i in range(steps):
        step = Step(ready, i)
        maker.verify(state, step)
        maker.commit(state, step.slots, accepted[i][step.slots].tolist())
    return maker, state


def by_reading(maker: Triton, state: TritonState, slots: list[int], exact: torch.Tensor) -> torch.Tensor:
    both = [state_errors(maker.read(state, which, slots), exact) for which in ("served", "kept")]
    return torch.cat(both, -1)


def measured(maker: Triton, state: TritonState, slots: list[int], points: list[int], S: torch.Tensor) -> torch.Tensor:
    state.sync()
    at = [slots, points, [state.cursors.write_pos[s] for s in slots]]
    measure = Measure(state.steps or maker.steps(state, 1), S, len(slots))
    found = measure.room(len(slots))
    measure.look(*torch.tensor(at, dtype=torch.int32, device=DEVICE), found)
    return relative(found)


def agree(x: Any, y: Any) -> None:
    x, y = (torch.as_tensor(z).cpu().numpy() for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=SAME, atol=0)


def near(maker: Triton, state: TritonState, slots: list[int], points: list[int]) -> torch.Tensor:
    """Exact states [3, B, HV, V, K] that are off by parts in 1e7 at these points, and NaN elsewhere."""
    value = maker.read(state, "kept", slots)
    S = torch.full((3, state.slots, *value.shape[1:]), torch.nan, dtype=torch.float64, device=value.device)
    S[points, slots] = value * (1 + 1e-7 * torch.randn(value.shape, dtype=torch.float64).to(value))
    return S


@pytest.mark.parametrize(
    ("name", "shape", "ring"),
    [unless_quick(name, *place) for place in ((SMALL, RINGS[0]), (EVEN, RINGS[1])) for name in KERNELS],
)
def test_measured_errors_are_those_of_the_states_read(name: str, shape: Shape, ring: RingConfig) -> None:
    """Faults: a slot measured against another's point, a record of another row or one behind the history, an operand
    read in another format, the low part of a record left out, a tile of the sum lost, served for kept."""
    maker, state = decoded(load(name), ring, shape)
    slots, points = [2, 0], [1, 2]
    spoil(state, float("nan"))
    S = near(maker, state, slots, points)
    agree(measured(maker, state, slots, points, S), by_reading(maker, state, slots, S[points, slots]))


PARTS = {"store_d": "bf16x2", "store_k_hat": "fp16"}
BOTH = {"store_d": "bf16x2", "store_k_hat": "bf16x2"}


@pytest.mark.parametrize(
    ("dot", "history_read", "parts"),
    [("tf32x3", "sum", PARTS), ("tf32", "hi", PARTS), ("bf16", "sum", PARTS), ("tf32", "sum", BOTH)]
    + [("ieee", "hi", BOTH), ("bf16x2", "sum", BOTH), ("bf16x4", "hi", BOTH), ("mixed", "sum", PARTS)],
)
def test_operands_are_those_of_the_products(dot: str, history_read: str, parts: dict[str, str]) -> None:
    """Faults: a low part read where a verify reads none, or left out; two parts taken for the number they stand for; a
    product's operand read as another's."""
    base = load("chunked_fp32")
    dots = {"default": dot, "solve": "ieee", "output": "ieee"}
    if dot == "mixed":
        dots |= {"default": "tf32", "history_score": "ieee", "history": "bf16"}
    spec = replace(base, dots=dots, sites=base.sites | parts, history_read=history_read)
    maker, state = decoded(spec, RINGS[0], SMALL)
    spoil(state, 1e30)
    S = near(maker, state, [0, 1, 2], [0, 2, 0])
    agree(measured(maker, state, [0, 1, 2], [0, 2, 0], S), by_reading(maker, state, [0, 1, 2], S[[0, 2, 0], [0, 1, 2]]))


@pytest.mark.parametrize("checkpoint", ["fp32", "bf16"])
def test_a_replayed_state_is_read_as_the_next_window_starts(checkpoint: str) -> None:
    """Faults: served taken from the checkpoint, or after its rounding; kept before it."""
    spec = replace(DEFERRED, sites=DEFERRED.sites | {"checkpoint": checkpoint})
    maker, state = decoded(spec, RINGS[0], SMALL)
    spoil(state, float("nan"))
    assert any(state.cursors.write_pos)
    S = near(maker, state, [2, 0], [1, 2])
    mine = measured(maker, state, [2, 0], [1, 2], S)
    agree(mine, by_reading(maker, state, [2, 0], S[[1, 2], [2, 0]]))
    assert torch.equal(mine[..., :2], mine[..., 2:]) == (checkpoint == "fp32")


@pytest.mark.parametrize("name", ["chunked_tf32", "exact_recurrent"])
def test_what_is_no_number_is_seen_in_its_head_alone(name: str) -> None:
    """Faults: a maximum that passes over a NaN, a NaN of one head in another's sum, a zero state divided by."""
    maker, state = decoded(load(name), RINGS[0], EVEN)
    slots, points = [0, 1, 2], [0, 1, 2]
    S = near(maker, state, slots, points)
    S[0, 0, 1] = 0.0
    state.checkpoint[0, 0, 3, 5] = torch.nan
    state.checkpoint[2, 1, 31, 15] = torch.inf
    state.version += 1
    mine = measured(maker, state, slots, points, S)
    assert torch.isnan(mine).all(-1).tolist() == [[True, False], [False, False], [False, False]]
    assert torch.isinf(mine[2, 1]).all() and torch.isfinite(mine[1]).all() and (mine[0, 1] > 0.1).all()
    agree(mine, by_reading(maker, state, slots, S[points, slots]))


def test_the_last_record_of_a_history_does_not_decay() -> None:
    """Fault: a total summed in another order than the sum up to the last record, so that this one decays by the
    difference: 1e-4 where gates are -166, as in heads without memory."""
    rng, L = np.random.default_rng(5), 16
    lengths, base = list(range(1, L + 1)) * 4, rng.integers(0, L, 4 * L).tolist()
    g = torch.from_numpy(-166 * rng.random((4 * L, 2, L))).float().to(DEVICE)
    maker = made(Triton, load("chunked_fp32"), RINGS[0])
    assert isinstance(maker, Triton)
    W, _ = decays(g, lengths, base, maker.choices)
    last = [W[i, :, w - 1].tolist() for i, w in enumerate(lengths)]
    assert last == [[1.0, 1.0]] * len(lengths)
