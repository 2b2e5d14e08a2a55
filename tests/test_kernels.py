"""Triton kernels against the readable designs: on the GPU at hand, else in Triton's interpreter at small shapes.

The interpreter can check indices, masks, cursors and where a value is rounded, not what hardware does in a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, bf16, decode, draw, same, start, windows
from test_precision import fp32_patterns

from harness.arithmetic import Rounding
from harness.compiled.course import course
from harness.config import Config, PrecisionConfig, RingConfig, validate
from harness.designs import designs
from harness.errors import ConfigError, RingError
from harness.experiments import probe
from harness.reference.emulated import Emulated
from harness.ring import Cursors
from harness.tokens import Shape
from harness.variants import VariantSpec, load, names
from harness.window import Windows

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from harness.kernels.design import Triton, TritonState  # noqa: E402
from harness.kernels.numbers import round_bf16, truncate_tf32  # noqa: E402
from harness.kernels.options import unsupported  # noqa: E402
from harness.kernels.steps import Inputs, Steps, check  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVEN = Shape(1, 2, 32, 16)  # no tile reaches over its rows or columns
SMALL = Shape(1, 2, 5, 6)  # no two sizes equal, no power of two, one key head for two value heads
U = 2.0**-24
KERNELS = [n for n in names() if unsupported(load(n), load(n).arithmetic()) is None]
RINGS = [RingConfig(16, 4), RingConfig(8, 3, 4, "commit")]
# between them they take every branch of a kernel; in the interpreter the others wait for the slow tests
QUICK = ("chunked_bf16", "exact_fold", "exact_recurrent", "compensated_fold", "replay_decode")


def unless_quick(name: str, *rest: Any, quick: bool = False) -> Any:
    """A preset and more as a case, slow in the interpreter unless it is one of QUICK or the case itself is quick."""
    sizes = [str(x.length) if isinstance(x, RingConfig) else f"V{x.V}" for x in rest]
    slow = DEVICE == "cpu" and not quick and name not in QUICK
    return pytest.param(name, *rest, marks=pytest.mark.slow if slow else (), id="-".join([name, *sizes]))


DECODE = RingConfig(4, 1)  # for designs that decode a token a step


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


def case(
    seed: int, ring: RingConfig, steps: int = 7, slots: int = 2, shape: Shape = SMALL, idle: bool = True
) -> tuple[torch.Tensor, Windows, np.ndarray]:
    """Initial states, windows with `idle` slots and NaN padding, accepts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if idle else 1, ring.max_window + 1, (steps, slots))
    lengths[lengths.sum(1) == 0, 0] = 1
    accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
    tokens = bf16(draw(rng, steps, slots, ring.max_window, shape=shape)).map(lambda x: x.to(DEVICE))
    return start(rng, slots, shape).to(DEVICE), windows(tokens, lengths, shape), accepted


def ring_of(spec: VariantSpec, ring: RingConfig) -> RingConfig:
    """The ring, or one that the design can have."""
    return DECODE if spec.fold_current else ring


def made(
    kind: type[Emulated], spec: VariantSpec, ring: RingConfig, precision: PrecisionConfig | None = None
) -> Emulated:
    return kind(spec, spec.ring(ring), spec.arithmetic(precision))


def run(maker: Emulated, initial: torch.Tensor, ready: Windows, accepted: np.ndarray, also: Any = None) -> Any:
    state = maker.create(ready.shape, len(initial), initial, device=DEVICE)
    return decode(maker, initial, ready, accepted, also=also, state=state)


def distance(x: Any, y: Any, part: int) -> float:
    """Largest relative distance of two traces in outputs (0), served (1) or kept states (2)."""
    pairs = [
        (a.double(), b.double())
        for one, two in zip(x, y, strict=True)
        for a, b in zip(one[part::3], two[part::3], strict=True)
    ]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def as_emulated(spec: VariantSpec, ring: RingConfig, shape: Shape = SMALL) -> None:
    """Assert that a kernel does what its emulation does.

    Served and kept states: sums of K and of a window in fp32 in another order, over all tokens; in lower precision a
    value that lies near a tie may go either way, so half of what the rounding itself costs.
    """
    initial, ready, accepted = case(1, ring, shape=shape, steps=7 if ring.max_window < 16 else 3)
    mine = run(made(Triton, spec, ring), initial, ready, accepted)
    emulated = run(made(Emulated, spec, ring), initial, ready, accepted)
    exact = run(made(Emulated, spec, ring, EXACT), initial, ready, accepted)
    tokens = int(accepted.sum(0).max())
    for part in (1, 2):
        own = distance(emulated, exact, part)
        assert distance(mine, emulated, part) <= max(0.5 * own, (tokens + shape.K) * U), f"part {part}: {own:.1e}"
    # outputs are stored in bf16: one unit where a value lies near a tie
    assert distance(mine, emulated, 0) <= 2.0**-8


PLACES = [(SMALL, RINGS[0]), (SMALL, RINGS[1]), (EVEN, RINGS[0]), (SMALL, RingConfig(32, 16))]


@pytest.mark.parametrize(
    ("name", "shape", "ring"),
    [unless_quick(name, *place, quick=place == PLACES[0]) for place in PLACES for name in KERNELS],
)
def test_a_kernel_is_its_emulation(name: str, shape: Shape, ring: RingConfig) -> None:
    """Faults: a head or row mapped wrongly, a decay to the wrong end, a record in another's row, a cursor read late,
    a rounding left out or doubled."""
    as_emulated(load(name), ring_of(load(name), ring), shape)


@pytest.mark.parametrize("name", ["exact_recurrent", "exact_fold"])
def test_another_order_of_the_sums_is_another_rounding(name: str) -> None:
    """Faults: a null arm that is the arm it is held against bit for bit, a column summed twice or left out.

    Both orders: the bound of a kernel in fp32 above, for they are equally legitimate.
    """
    initial, ready, accepted = case(1, RINGS[0], shape=EVEN)
    orders = [PrecisionConfig(products={"recurrent": x}, exp="rounded") for x in ("ieee/64", "ieee/64s")]
    one, other = (run(made(Triton, load(name), RINGS[0], p), initial, ready, accepted) for p in orders)
    emulated = run(made(Emulated, load(name), RINGS[0]), initial, ready, accepted)
    tokens = int(accepted.sum(0).max())
    for part in (1, 2) if name == "exact_recurrent" else (2,):
        assert not torch.equal(*(torch.cat([x for slot in y for x in slot[part::3]]) for y in (one, other)))
        assert all(distance(y, emulated, part) <= (tokens + EVEN.K) * U for y in (one, other))
    if name == "exact_recurrent":
        assert same(other, run(made(Triton, load("null_arm"), RINGS[0]), initial, ready, accepted))


DEFERRED = replace(load("kv_replay"), name="deferred", flush_at=None, fold_when=None)  # it replays in registers
NAMED = ["chunked_fp32", "exact_fold", "exact_recurrent", "compensated_fold", "trtllm_replay", "replay_decode"]


@pytest.mark.parametrize("spec", [*map(load, NAMED), DEFERRED], ids=lambda spec: spec.name)
def test_rows_outside_a_history_are_not_read(spec: VariantSpec) -> None:
    """Fault: a row behind the history loaded and multiplied by zero."""
    ring = ring_of(spec, RINGS[0])
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
@pytest.mark.parametrize("spec", [load("chunked_fp32"), load("exact_recurrent"), DEFERRED], ids=lambda spec: spec.name)
def test_the_device_moves_its_cursors_as_the_host(spec: VariantSpec, ring: RingConfig) -> None:
    """Faults: a base that moves without a flush, an aborted window that moves one, a flag raised one record late."""
    initial, ready, accepted = case(3, ring, steps=12)
    accepted[5] = 0
    maker = made(Triton, spec, ring)
    # each slot's first window that folds is given up, too
    folds = course(Cursors(maker.ring, 2), ready.lengths, accepted)[0].flag * (ready.lengths > 0)
    assert folds.any(0).all() == (maker.ring.fold_when == "next")
    accepted[folds.argmax(0), [0, 1]] = 0

    def look(state: TritonState, step: int) -> None:
        c = state.cursors
        assert state.on_device.tolist() == [c.write_pos, c.cache_base, [int(f) for f in c.is_flush]], f"step {step}"

    run(maker, initial, ready, accepted, look)


def test_backends_are_resolved_by_name() -> None:
    """Faults: a backend changed in silence, two arms of one name, a refusal that names no design."""
    both = designs(Config(variants=["chunked_fp32", "null_arm"], backend=["triton", "emulated"]), DEVICE)
    assert [(d.spec.name, d.backend) for d in both] == [
        ("chunked_fp32", "triton"), ("null_arm", "triton"),
        ("chunked_fp32@emulated", "emulated"), ("null_arm@emulated", "emulated"),
    ]  # fmt: skip
    assert [d.backend for d in designs(Config(variants=["chunked_fp32"]), "cpu")] == ["emulated"]
    refused = PrecisionConfig(sites={"gram": "fp16"})
    with pytest.raises(ConfigError, match=r"backend: chunked_fp32 .*site gram"):
        designs(Config(variants=["chunked_fp32"], backend="triton", precision=refused), DEVICE)
    for wrong in ("cuda", [], ["triton", "triton"], 3):
        with pytest.raises(ConfigError, match=r"^backend: "):
            validate(Config(backend=wrong))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_a_probe_tells_two_roundings_apart(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a probe that agrees with anything, so that a wrong emulation goes unseen."""
    names = ("left operand", "right operand", "ties")
    assert all(probe.compare(precision, probe.PROBES[n](), DEVICE)["equal"] == 256 for n in names)
    other = {"ieee": "tf32", "tf32": "ieee", "bf16": "tf32"}[precision]
    monkeypatch.setitem(probe.DOTS, precision, probe.DOTS[other])
    assert all(probe.compare(precision, probe.PROBES[n](), DEVICE)["equal"] < 256 for n in names)


def test_a_decay_rounded_once_is_closer() -> None:
    """Fault: exp=rounded that takes the fast one; measured by its own report."""
    fast, rounded = probe.exponentials("fast", DEVICE), probe.exponentials("rounded", DEVICE)
    # half a unit in the last place is at most one unit of 2^-24
    assert all(r["worst"] <= 1.0 + 1e-6 for r in rounded)
    assert max(f["worst"] for f in fast) > 1.0


def ready_steps(name: str, m: int = 4) -> tuple[TritonState, Steps, Inputs]:
    """A state of two slots, its steps, and one window of each."""
    initial, ready, _ = case(6, RINGS[0], steps=1, shape=EVEN)
    maker = made(Triton, load(name), RINGS[0])
    assert isinstance(maker, Triton)
    state = maker.create(EVEN, 2, initial, device=DEVICE)
    assert isinstance(state, TritonState)
    return state, maker.steps(state, m), maker.inputs(ready).step(0)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("q", lambda x: x[:, :, :-1]),
        ("k", lambda x: x.half()),
        ("v", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        ("g", lambda x: x.double()),
        ("beta", lambda x: x.to("meta")),
        ("lengths", lambda x: x.long()),
    ],
)
def test_an_input_the_kernels_would_misread_is_named(name: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Faults: a stride, dtype, shape or device that reaches a launch."""
    state, _, x = ready_steps("chunked_fp32")
    check(x, state, 4)
    with pytest.raises(RingError, match=f"^{name}: "):
        check(x._replace(**{name: spoil(getattr(x, name))}), state, 4)


@pytest.mark.parametrize("name", ["chunked_fp32", "exact_fold", "trtllm_replay"])
def test_lanes_behind_a_window_are_not_read(name: str) -> None:
    """Fault: a padded lane that is loaded and multiplied by zero; in an engine's batch it holds anything."""
    lengths, found = (3, 1), []
    for value in (0.0, float("nan")):
        state, steps, x = ready_steps(name)
        rng, seen = torch.Generator().manual_seed(0), []
        for _ in range(2):
            drawn = (torch.randn(part.shape, generator=rng) for part in x[:5])
            q, k, v, g, beta = (part.to(DEVICE, like.dtype) for part, like in zip(drawn, x, strict=False))
            mine = Inputs(q, k, v, -g.abs(), beta.sigmoid(), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
            for b, n in enumerate(lengths):
                for part in mine[:5]:
                    part[b, :, n:] = value
            steps.verify(mine)
            seen += [steps.out[b, :, :n].clone() for b, n in enumerate(lengths)]
            steps.commit(mine.lengths)
        steps.fold(state.on_device[0].clone())
        found.append([*seen, state.checkpoint])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*found, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ["chunked_tf32", "exact_fold", "exact_recurrent"])
def test_a_captured_step_is_the_step(name: str) -> None:
    """Faults: a launch that reads the host's cursors, so that a replay repeats the first step's place in the ring."""
    found = []
    for captured in (False, True):
        state, steps, x = ready_steps(name)
        x = x._replace(lengths=torch.full_like(x.lengths, 4))
        accepted = torch.tensor([3, 2], dtype=torch.int32, device=DEVICE)
        steps.verify(x)
        steps.commit(accepted)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                steps.verify(x)
                steps.commit(accepted)
        for _ in range(9):
            if captured:
                graph.replay()
            else:
                steps.verify(x)
                steps.commit(accepted)
        found.append((steps.out.clone(), state.checkpoint.clone(), state.on_device.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
