"""Triton kernels against the readable designs: on the GPU at hand, else in Triton's interpreter at small shapes.

The interpreter can check indices, masks, cursors and where a value is rounded, not what hardware does in a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, bf16, decode, draw, same, start, windows
from test_precision import fp32_patterns

from harness.arithmetic import Rounding
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.reference.emulated import Emulated
from harness.tokens import Shape
from harness.variants import VariantSpec, load, names
from harness.window import Windows

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from harness.kernels.design import Triton, TritonState  # noqa: E402
from harness.kernels.numbers import round_bf16, truncate_tf32  # noqa: E402
from harness.kernels.options import unsupported  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Shape(1, 2, 5, 6)  # no two sizes equal, no power of two, one key head for two value heads
U = 2.0**-24
KERNELS = [n for n in names() if not load(n).fold_current and unsupported(load(n), load(n).arithmetic()) is None]
RINGS = [RingConfig(16, 4), RingConfig(8, 3, 4, "commit")]


@triton.jit
def _each(x, y, N: tl.constexpr, TF32: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(y + i, truncate_tf32(value) if TF32 else round_bf16(value))


@pytest.mark.parametrize(("name", "mode"), [("bf16", "nearest"), ("tf32", "zero")])
def test_the_device_rounds_as_the_rounder(name: str, mode: str) -> None:
    """Faults: ties away from even, a NaN that becomes infinite, an infinity that becomes NaN, truncation."""
    x = fp32_patterns()
    n = 1 << 14
    x = x[: len(x) // n * n].to(DEVICE)
    y = torch.empty_like(x)
    _each[(len(x) // n,)](x, y, n, name == "tf32")
    expected = x.to(torch.bfloat16).float() if name == "bf16" else Rounding(name, mode)(x.double()).float()
    finite = torch.isfinite(x) | torch.isinf(x)
    # a truncated NaN may end as an infinity, and no product is asked about one
    assert torch.equal(y[finite].view(torch.int32), expected[finite].view(torch.int32))
    if name == "bf16":
        assert torch.isnan(y[torch.isnan(x)]).all()


def case(seed: int, ring: RingConfig, steps: int = 7, slots: int = 2) -> tuple[torch.Tensor, Windows, np.ndarray]:
    """Initial states, windows with idle slots and NaN padding, accepts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, ring.max_window + 1, (steps, slots))
    lengths[lengths.sum(1) == 0, 0] = 1
    accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
    tokens = bf16(draw(rng, steps, slots, ring.max_window, shape=SMALL)).map(lambda x: x.to(DEVICE))
    return start(rng, slots, SMALL).to(DEVICE), windows(tokens, lengths, SMALL), accepted


def made(
    kind: type[Emulated], spec: VariantSpec, ring: RingConfig, precision: PrecisionConfig | None = None
) -> Emulated:
    return kind(spec, spec.ring(ring), spec.arithmetic(precision))


def run(maker: Emulated, initial: torch.Tensor, ready: Windows, accepted: np.ndarray, also: Any = None) -> Any:
    state = maker.create(SMALL, len(initial), initial, device=DEVICE)
    return decode(maker, initial, ready, accepted, also=also, state=state)


def distance(x: Any, y: Any, part: int) -> float:
    """Largest relative distance of two traces in outputs (0), served (1) or kept states (2)."""
    pairs = [
        (a.double(), b.double())
        for one, two in zip(x, y, strict=True)
        for a, b in zip(one[part::3], two[part::3], strict=True)
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_its_emulation(name: str, ring: RingConfig) -> None:
    """Faults: a head or row mapped wrongly, a decay to the wrong end, a record in another's row, a cursor read late,
    a rounding left out or doubled.

    Served and kept states: sums of K and of a window in fp32 in another order, over all tokens; in lower precision a
    value that lies near a tie may go either way, so half of what the rounding itself costs.
    """
    spec = load(name)
    initial, ready, accepted = case(1, ring)
    mine = run(made(Triton, spec, ring), initial, ready, accepted)
    emulated = run(made(Emulated, spec, ring), initial, ready, accepted)
    exact = run(made(Emulated, spec, ring, EXACT), initial, ready, accepted)
    tokens = int(accepted.sum(0).max())
    for part in (1, 2):
        own = distance(emulated, exact, part)
        assert distance(mine, emulated, part) <= max(0.5 * own, (tokens + SMALL.K) * U), f"part {part}: {own:.1e}"
    # outputs are stored in bf16: one unit where a value lies near a tie
    assert distance(mine, emulated, 0) <= 2.0**-8


@pytest.mark.parametrize("name", ["chunked_fp32", "exact_fold", "exact_recurrent"])
def test_rows_outside_a_history_are_not_read(name: str) -> None:
    """Fault: a row behind the history loaded and multiplied by zero."""
    spec, ring = load(name), RINGS[0]
    initial, ready, accepted = case(2, ring)

    def poison(value: float) -> Callable[[TritonState, int], None]:
        def spoil(state: TritonState, step: int) -> None:
            for slot, (base, w) in enumerate(zip(state.cursors.cache_base, state.cursors.write_pos, strict=True)):
                free = [(base + j) & (state.spec.length - 1) for j in range(w, state.spec.length)]
                for rows in state.records.values():
                    rows[slot, :, free] = value

        return spoil

    plain = run(made(Triton, spec, ring), initial, ready, accepted)
    for value in (float("nan"), 1e30):
        assert same(run(made(Triton, spec, ring), initial, ready, accepted, poison(value)), plain)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("name", ["chunked_fp32", "exact_recurrent"])
def test_the_device_moves_its_cursors_as_the_host(name: str, ring: RingConfig) -> None:
    """Faults: a base that moves without a flush, an aborted window that moves one, a flag raised one record late."""
    spec = load(name)
    initial, ready, accepted = case(3, ring, steps=12)
    accepted[5] = 0
    maker = made(Triton, spec, ring)

    def look(state: TritonState, step: int) -> None:
        c = state.cursors
        assert state.on_device.tolist() == [c.write_pos, c.cache_base, [int(f) for f in c.is_flush]], f"step {step}"

    run(maker, initial, ready, accepted, look)


def test_a_design_without_a_kernel_is_refused_by_name() -> None:
    """Fault: a kernel of another arithmetic run in silence."""
    for name, word in (
        ("kv_replay", "token pass"),
        ("trtllm_replay", "cumulative"),
        ("compensated_fold", "store_k_hat"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}.*{word}"):
            made(Triton, load(name), RingConfig())
    with pytest.raises(ConfigError, match="site gram"):
        made(Triton, load("chunked_fp32"), RingConfig(), PrecisionConfig(sites={"gram": "bf16"}))
