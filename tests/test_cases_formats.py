"""Public reports of a state in another format than was asked for (cases C2 and C3): what is held, not what is declared.

A format is told by the numbers in it: of some hundred random ones, some need all of its bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MAKERS, SHAPE, bf16, close, draw, start, windows

from harness.compiled.codes import unsupported
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.experiments.drift import formats_of
from harness.precision import FORMATS, round_to
from harness.reference.emulated import Emulated
from harness.tokens import Shape, Tokens
from harness.variants import load, names
from harness.window import Step

KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Shape(1, 2, 5, 6)  # for the interpreter
FP32 = PrecisionConfig(base="fp32")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}


def cases(kernels: tuple[str, ...], wide: bool = False) -> list[Any]:
    """(name, engine) of every design that an engine runs, and of these kernels. wide: in windows of several tokens."""
    found: list[Any] = [(n, "torch") for n in names()]
    found += [(n, "compiled") for n in names() if unsupported(load(n), load(n).arithmetic()) is None]
    found = [case for case in found if not (wide and load(case[0]).fold_current)]
    return found + [(n, "triton") for n in kernels]


def made(name: str, engine: str, ring: RingConfig, precision: PrecisionConfig) -> Emulated:
    """A design on an engine."""
    spec, maker = load(name), MAKERS.get(engine)
    if maker is None:
        pytest.importorskip("triton")
        from harness.kernels.design import Triton as maker  # noqa: N813
    if spec.fold_current:
        ring = replace(ring, max_window=1, flush_at=None)
    return maker(spec, spec.ring(ring), spec.arithmetic(precision))


def on(maker: Emulated) -> str:
    """Where a design's tensors lie."""
    return KERNELS_ON if maker.backend == "triton" else "cpu"


def run(maker: Emulated, initial: torch.Tensor, tokens: Tokens, sizes: list[int], shape: Shape = SHAPE) -> Any:
    """The state after `tokens` [T, ...] of one slot in windows of these sizes, all accepted."""
    device, begin = on(maker), 0
    state = maker.create(shape, 1, initial.to(device), device=device)
    for m in sizes:
        step = Step(windows(tokens.map(lambda x, b=begin, m=m: x[None, None, b : b + m].to(device)), [[m]], shape), 0)
        maker.verify(state, step)
        maker.commit(state, [0], [m])
        begin += m
    return state


def held(x: torch.Tensor) -> str:
    """The narrowest format that holds every number of x; NaN are rows never written."""
    some = x.double()[~x.isnan()].cpu()
    assert len(some)
    return next(f for f in ("bf16", "fp16", "tf32", "fp32", "fp64") if torch.equal(round_to(some, FORMATS[f]), some))


@pytest.mark.parametrize(("name", "engine"), cases(("exact_recurrent", "exact_fold", "chunked_bf16"), wide=True))
def test_c2_one_window_of_64_and_64_of_one(name: str, engine: str) -> None:
    """Fault (ollama#15865, mlx-swift-lm#224): a state stored in the format of bf16 inputs at the end of every call, so
    that T calls of one token are not one of T. In fp32 both are within its roundings, one a token and K a sum."""
    T, shape = (4, SMALL) if engine == "triton" else (64, SHAPE)
    rng = np.random.default_rng(1)
    initial, tokens = start(rng, 1, shape), bf16(draw(rng, T, shape=shape))
    ring = RingConfig(2 * T, T, 1, "commit")
    single = made(name, engine, replace(ring, max_window=1), FP32)
    ends = (
        run(single, initial, tokens, [1] * T, shape),
        run(made(name, engine, ring, FP32), initial, tokens, [T], shape),
    )
    for which in ("served", "kept"):
        one, whole = (single.read(state, which, [0]).double().cpu() for state in ends)
        close(which, one, whole, (T + shape.K) * 2.0**-24)


@pytest.mark.parametrize(("name", "engine"), cases(("exact_recurrent", "exact_fold", "chunked_bf16", "kv_replay")))
def test_c2_a_state_moves_with_its_token(name: str, engine: str) -> None:
    """Fault (xllm#1873): a bf16 state cast for the kernel, which then updates the copy. One token, of beta 1/2, moves
    every row of served and kept state, and of the tensor that holds them; the caller's own stays as it is."""
    shape = SMALL if engine == "triton" else SHAPE
    rng = np.random.default_rng(2)
    initial, tokens = start(rng, 1, shape), bf16(draw(rng, 1, shape=shape))
    tokens.g, tokens.beta = torch.zeros_like(tokens.g), torch.full_like(tokens.beta, 0.5)
    half = PrecisionConfig(sites={"checkpoint": "bf16", "snapshot": "bf16"})
    maker = made(name, engine, RingConfig(8, 1, 1, "commit"), half)
    given = initial.to(on(maker))
    state = maker.create(shape, 1, given, device=on(maker))
    before = {which: maker.read(state, which, [0]).clone() for which in ("served", "kept")}
    step = Step(windows(tokens.map(lambda x: x[None, None].to(on(maker))), [[1]], shape), 0)
    maker.verify(state, step)
    maker.commit(state, [0], [1])
    for which, S in before.items():
        assert (maker.read(state, which, [0]) != S).any(-1).all(), which
    if not state.cursors.write_pos[0]:
        assert (state.checkpoint.double() != before["kept"]).any(-1).all()
    assert torch.equal(given.cpu(), initial)


@pytest.mark.parametrize("checkpoint", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "engine"), cases(("exact_recurrent", "exact_fold", "compensated_fold")))
def test_c3_what_is_asked_for_is_what_is_held(name: str, engine: str, checkpoint: str) -> None:
    """Fault (vllm#34489): a state asked for in fp32 and held in bf16, or a format that follows that of another field.
    Every stored field holds numbers of the format that the manifest calls its effective one, and of no narrower."""
    shape = SMALL if engine == "triton" else SHAPE
    rng = np.random.default_rng(3)
    ring = RingConfig(16, 3, 4)
    wanted = PrecisionConfig(sites={"checkpoint": checkpoint, "snapshot": checkpoint})
    maker = made(name, engine, ring, wanted)
    # inputs of every bit, so that no field is narrow because they are
    sizes = [min(m, maker.ring.max_window) for m in (3, 3, 3, 1)] + [1] * 14 * (maker.ring.max_window == 1)
    state = run(maker, start(rng, 1, shape), draw(rng, sum(sizes), shape=shape), sizes, shape)
    entry = formats_of(maker, on(maker))
    sites = {field: "store_" + field.removesuffix("_lo") for field in state.records} | {"checkpoint": "checkpoint"}
    assert entry["effective"]["checkpoint"] == checkpoint
    for field, site in sites.items():
        x = state.checkpoint if field == "checkpoint" else state.records[field]
        effective = entry["effective"][site].removesuffix("x2")
        assert held(x) == effective, field
        dtype = entry["tensors"][field]
        assert (str(x.dtype), DTYPES[dtype]) == (f"torch.{dtype}", effective if engine == "triton" else "fp64"), field


def test_c3_formats_that_do_not_go_together_are_refused() -> None:
    """Fault: a checkpoint that takes its drafts' format in silence, as no kernel holds the two apart."""
    for site in ("checkpoint", "snapshot"):
        with pytest.raises(ConfigError, match=r"exact_recurrent has no Triton kernel: a draft's state is stored as"):
            made("exact_recurrent", "triton", RingConfig(), PrecisionConfig(sites={site: "bf16"}))
