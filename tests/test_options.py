"""The space of designs that the kernels compile: points of it beside the presets, and what is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError, RingError
from harness.reference.emulated import Emulated
from harness.tokens import Shape
from harness.variants import VariantSpec, load, names
from harness.window import Step

pytest.importorskip("triton")
from test_kernels import DECODE, DEFERRED, DEVICE, EVEN, KERNELS, RINGS, U, as_emulated, case, distance, made, run

from harness.kernels import options
from harness.kernels.design import Triton, TritonState

BLUNT = {"eps": 0.5}  # so that where eps stands is seen


def spec_of(base: str | VariantSpec, **changes: Any) -> VariantSpec:
    """A design with some declarations changed; sites and dots are laid over its own."""
    base = load(base) if isinstance(base, str) else base
    for name in ("sites", "dots"):
        changes[name] = getattr(base, name) | changes.get(name, {})
    return replace(base, **changes)


LOW = {"store_d": "bf16x2", "store_k_hat": "bf16x2"}
POINTS: dict[str, tuple[VariantSpec, RingConfig]] = {
    "doubling": (spec_of("chunked_fp32", inverse="doubling"), RINGS[0]),
    "doubling, tf32": (spec_of("chunked_tf32", inverse="doubling"), RINGS[0]),
    "doubling, its products in bf16": (spec_of("chunked_fp32", inverse="doubling", dots={"inverse": "bf16"}), RINGS[0]),
    "doubling of 8": (spec_of("chunked_fp32", inverse="doubling"), RingConfig(16, 6)),
    "cumulative": (spec_of("chunked_fp32", gate_record="cumulative"), RINGS[0]),
    "cumulative, at commit": (spec_of("chunked_fp32", gate_record="cumulative"), RINGS[1]),
    "both parts": (spec_of("chunked_fp32", sites=LOW), RINGS[0]),
    "both parts, tf32": (spec_of("chunked_tf32", sites=LOW), RINGS[0]),
    "high parts": (spec_of("chunked_fp32", sites=LOW, history_read="hi"), RINGS[0]),
    "solve, output in halves": (spec_of("chunked_fp32", dots={"solve": "bf16x2", "output": "bf16x4"}), RINGS[0]),
    "solve, output in bf16": (spec_of("chunked_fp32", dots={"solve": "bf16", "output": "bf16"}), RINGS[0]),
    "A, R in bf16": (spec_of("chunked_fp32", sites={"gram": "bf16", "rhs": "bf16"}), RINGS[0]),
    "replay of bf16 keys": (spec_of("exact_fold", sites={"key": "bf16"}, dots={"default": "ieee"}), RINGS[0]),
    "deferred": (DEFERRED, RINGS[0]),
    "deferred, at commit": (DEFERRED, RINGS[1]),
    "deferred, bf16 checkpoint": (spec_of(DEFERRED, sites={"checkpoint": "bf16"}), RINGS[0]),
    "decode": (spec_of("chunked_fp32", fold_current=True), DECODE),
    "decode, cumulative": (spec_of("chunked_fp32", fold_current=True, gate_record="cumulative"), DECODE),
    "decode, both parts": (spec_of("chunked_fp32", fold_current=True, sites=LOW), DECODE),
    "decode, at commit": (spec_of("chunked_fp32", fold_current=True), RingConfig(4, 1, 3, "commit")),
}
CONVENTIONS = [{"eps_at": "outside"}, {"eps_at": "mean"}, {"decay": "after"}, {"beta": "bf16"}]
for _base in ("chunked_fp32", "exact_fold", "exact_recurrent", DEFERRED):
    for _c in CONVENTIONS:
        _spec = spec_of(_base, conventions=BLUNT | _c)
        POINTS[f"{_spec.name}, {next(iter(_c.values()))}"] = _spec, RINGS[0]


@pytest.mark.parametrize("point", POINTS)
def test_a_point_of_the_space_is_its_emulation(point: str) -> None:
    """Faults: a part left out or read twice, a gate record that goes on over a fold or from the wrong record, a power
    left out, an operand read on the wrong side, eps or a decay on the wrong side, a token folded twice, a state rounded
    before its outputs, a replay of other keys."""
    as_emulated(*POINTS[point])


@pytest.mark.parametrize("point", ["cumulative", "deferred", "decode"])
def test_a_point_with_more_key_heads_is_its_emulation(point: str) -> None:
    """Fault: a record of the first key head alone."""
    as_emulated(*POINTS[point], Shape(2, 4, 5, 6))


def test_a_token_at_hand_is_decoded_before_it_is_folded() -> None:
    """Fault: its output on the folded state: the same but for the fold's own rounding, which no output has here."""
    spec = spec_of("chunked_fp32", fold_current=True, sites={"output": "fp32"}, dots={"fold": "bf16"})
    initial, ready, accepted = case(4, DECODE, steps=4, shape=EVEN, idle=False)
    mine, theirs = (run(made(kind, spec, DECODE), initial, ready, accepted) for kind in (Triton, Emulated))
    assert distance(mine, theirs, 0) <= (4 + EVEN.K) * U


def test_a_token_at_hand_is_folded_behind_an_empty_history() -> None:
    """Faults: a forced flag that an empty history hides, a cursor the device moves otherwise, a refused token."""
    spec = load("replay_decode")
    initial, ready, accepted = case(3, DECODE, steps=12)

    def look(state: TritonState, step: int) -> None:
        c = state.cursors
        if isinstance(state, TritonState):
            assert state.on_device.tolist() == [c.write_pos, c.cache_base, [int(f) for f in c.is_flush]], f"step {step}"
        if step in (0, 4, 5):
            c.force_flush([slot for slot in (0, 1) if c.window[slot] < 0])

    found = [run(made(kind, spec, DECODE), initial, ready, accepted, look) for kind in (Triton, Emulated)]
    for mine, theirs in zip(*found, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=0.02, atol=0.02)
    maker = made(Triton, spec, DECODE)
    state = maker.create(ready.shape, 2, initial, device=DEVICE)
    state.cursors.force_flush([0, 1])
    step = Step(ready, 0)
    maker.verify(state, step)
    with pytest.raises(RingError, match="folded already"):
        maker.commit(state, step.slots, [0] * len(step.slots))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chunked_fp32", {"conventions": {"beta": "fp16"}}, "conventions.beta"),
    ("chunked_fp32", {"verify": "tokens"}, "a fold of stored d"),
    ("kv_replay", {"fold_current": True}, "fold_current of a token pass"),
    ("exact_fold", {"fold_current": True}, "fold_current of a replay"),
    ("compensated_fold", {"fold_current": True}, "fold_current reads both parts"),
]


def test_a_design_without_a_kernel_is_refused_by_name() -> None:
    """Fault: a kernel of another arithmetic run in silence."""
    assert set(KERNELS) == set(names())
    for name, declared, word in REFUSED:
        spec = replace(load(name), **declared)
        ring = RingConfig(16, 1 if spec.fold_current else 4)
        with pytest.raises(ConfigError, match=rf"{name} has no Triton kernel: .*{word}"):
            made(Triton, spec, ring)
    for name, precision, word in (
        ("chunked_fp32", PrecisionConfig(sites={"gram": "fp16"}), "site gram"),
        ("chunked_fp32", PrecisionConfig(sites={"decay": "bf16"}), "site decay"),
        ("exact_recurrent", PrecisionConfig(sites={"decayed": "bf16"}), "site decayed"),
        ("exact_fold", PrecisionConfig(sites={"decayed": "exact"}), "site decayed"),
        ("kv_replay", PrecisionConfig(sites={"decayed": "fp32:zero"}), "site decayed"),
        ("chunked_tf32", PrecisionConfig(sites={"history_d": "bf16"}), "site history_d"),
        ("trtllm_replay", PrecisionConfig(sites={"state_operand": "bf16"}), "site state_operand"),
        ("chunked_fp32", PrecisionConfig(products={"solve": "fp16"}), "product solve"),
        ("exact_recurrent", PrecisionConfig(sites={"snapshot": "bf16"}), "a draft's state"),
        ("exact_recurrent", PrecisionConfig(products={"recurrent": "tf32"}), "product recurrent"),
        ("exact_fold", PrecisionConfig(products={"recurrent": "tf32"}), "product recurrent"),
        ("kv_replay", PrecisionConfig(products={"recurrent": "tf32"}), "product recurrent"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} has no Triton kernel: .*{word}"):
            made(Triton, load(name), RINGS[0], precision)


COMPILE = """
import dataclasses
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from harness.kernels import cursors, fold, measure, recurrent, route, window
from harness.kernels.numbers import Choices
from harness.kernels.options import Options, options
from harness.variants import load

B16, F32, I32 = "*bf16", "*fp32", "*i32"
TYPES = dict.fromkeys(("q", "k", "v", "out", "k_lo", "d_lo", "raw_v", "raw_k"), B16)
TYPES |= dict.fromkeys(("g", "beta", "d_out", "C", "ring_g", "raw_beta", "drafts", "kept"), F32)
TYPES |= dict.fromkeys(("W", "total", "A", "F", "eG", "W_in", "total_in", "W_out", "total_out"), F32)
TYPES |= dict.fromkeys(("exact", "found"), "*fp64")
TYPES |= dict.fromkeys(("lengths", "slots", "accepted", "write_pos", "cache_base", "is_flush"), I32)
TYPES |= dict.fromkeys(("plan", "counts", "folded", "points"), I32)
TYPES |= {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(("m", "H", "HV", "B", "n", "flush_at"), "i32")
SIZES = {"K": 128, "V": 128, "L": 16, "BK": 128, "BV": 32, "BS": 4, "BC": 16, "IN_PLACE": True, "KEEP_D": True}
SIZES |= {"HISTORY": "records", "BG": 2, "SHARES": 4, "PDL": True, "BLOCK": 64, "ON_COMMIT": True, "CURRENT": False}


def preset(name):
    return options(load(name), load(name).arithmetic())


def choices(options, exp="fast"):
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name != "formats"}
    return Choices(**given, exp=exp, interpreted=False)


def build(kernel, O=Options(()), exp="fast", **sizes):
    constants = {n: v for n, v in (SIZES | {"O": choices(O, exp)} | sizes).items() if n in kernel.arg_names}
    types = TYPES | dict.fromkeys(("ring_k", "ring_d"), B16)
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    at = {(kernel.arg_names.index(n),): v for n, v in constants.items()}
    how = {"num_warps": 2, "num_stages": 3}
    triton.compile(ASTSource(kernel, signature, at), target=GPUTarget("cuda", 90, 32), options=how)


if sys.argv[1] == "windows":
    for name in sys.argv[2:]:
        for flush in (False, True):
            build(window.ring_verify, preset(name), FLUSH=flush)
    series = Options((), inverse="doubling", series="tf32", after=True, low_k=True, read_low=True, solve="bf16x4")
    build(window.ring_verify, series, BS=8, FLUSH=False)
else:
    for current in (False, True):
        for kernel in (route.route, cursors.advance_cursors):
            build(kernel, CURRENT=current)
    build(cursors.absorb)
    for product in ("tf32x3", "bf16x2", "bf16x4"):
        build(fold.fold_product, Options((), fold=product, low_d=True, low_k=True, cumulative=product == "bf16x2"))
    for strided in (False, True):
        varied = Options((), strided=strided, after=strided, outside=strided, raw=strided, key="bf16", beta="bf16")
        build(fold.fold_replay, varied, "rounded")
        build(recurrent.recurrent_verify, varied)
    build(recurrent.recurrent_verify, preset("kv_replay"))
    build(recurrent.take_draft)
    build(measure.weigh)
    build(measure.weigh, Options((), cumulative=True))
    for product in ("ieee", "tf32", "tf32x3", "bf16", "bf16x2", "bf16x4"):
        low = product == "ieee"
        read = Options((), state=product, score=product, history=product, low_d=low, low_k=low, read_low=low)
        build(measure.error_sums, read, BV=16)
    for history in ("copy", "none"):
        build(measure.error_sums, BV=16, HISTORY=history)
print("built")
"""


WINDOWED = [n for n in KERNELS if load(n).verify == "window"]


@pytest.mark.parametrize("which", [["windows", *WINDOWED[::2]], ["windows", *WINDOWED[1::2]], ["others"]], ids=str)
def test_every_kernel_builds_for_hopper_without_one(which: list[str]) -> None:
    """Fault: what the interpreter runs and the compiler refuses, such as a name that changes its shape in a branch."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(options.__file__).parents[2]), env.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, "-c", COMPILE, *which], capture_output=True, text=True, env=env)
    assert done.stdout == "built\n", done.stderr[-2000:]
