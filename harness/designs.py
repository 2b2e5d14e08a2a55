"""The designs a configuration names, made: where a kernel or an outside implementation joins a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.arithmetic import Arithmetic
from harness.config import Config, backends
from harness.errors import ConfigError
from harness.outside import Outside
from harness.reference.emulated import Emulated
from harness.variants import VariantSpec, load


def designs(config: Config, device: str = "cpu") -> list[Emulated]:
    """The designs a configuration names, each in the run's precision, on its own ring and by every backend asked for.

    backend=auto takes what a variant's own `design:` names, or on a GPU a kernel where there is one for the design;
    backend=outside and backend=triton refuse the rest by name.
    engine=auto compiles what can be compiled on the CPU; engine=compiled refuses the rest, naming the design.
    """
    made: list[Emulated] = []
    for i, backend in enumerate(backends(config)):
        for name in config.variants:
            spec = load(name)
            arithmetic = spec.arithmetic(config.precision)
            label = spec if i == 0 else replace(spec, name=f"{spec.name}@{backend}")
            ring = spec.ring(config.ring)
            if is_outside(spec, arithmetic, backend):
                made.append(Outside(label, ring, arithmetic))
            elif triton := triton_of(spec, arithmetic, backend, device):
                made.append(triton(label, ring, arithmetic))
            else:
                made.append(engine_of(config, spec, arithmetic, device)(label, ring, arithmetic))
    return made


def is_outside(spec: VariantSpec, arithmetic: Arithmetic, backend: str) -> bool:
    """Whether `backend` resolves to an outside implementation. Raises ConfigError for one asked for in vain."""
    if backend == "outside" and not spec.design:
        raise ConfigError(f"backend: {spec.name} names no outside implementation; its file needs a key `design`")
    if backend not in ("auto", "outside") or not spec.design:
        return False
    own = spec.arithmetic()
    if (arithmetic.sites, arithmetic.dots) != (own.sites, own.dots):
        raise ConfigError(
            f"precision: {spec.name} is computed outside, where a run sets no rounding; backend=emulated runs its "
            "declaration"
        )
    return True


def triton_of(spec: VariantSpec, arithmetic: Arithmetic, backend: str, device: str) -> Any:
    """The Triton design where `backend` resolves to it. Raises ConfigError for one that was asked for in vain."""
    if backend == "emulated" or (backend == "auto" and device != "cuda"):
        return None
    from harness.kernels.options import unsupported

    why = unsupported(spec, arithmetic)
    if why and backend == "triton":
        raise ConfigError(f"backend: {spec.name} has no Triton kernel: {why}")
    if why:
        return None
    try:
        from harness.kernels.design import Triton
        from harness.kernels.numbers import INTERPRETED
    except ModuleNotFoundError as error:
        if backend == "auto":
            return None
        raise ConfigError(f"backend: triton is not installed ({error.name})") from None
    if device != "cuda" and not INTERPRETED:
        raise ConfigError(f"backend: triton needs a GPU, and the device is {device}; use backend=emulated")
    return Triton


def engine_of(config: Config, spec: VariantSpec, arithmetic: Arithmetic, device: str) -> type[Emulated]:
    """The emulation that runs a design. Raises ConfigError where engine=compiled cannot have it."""
    why = "engine torch asked for" if config.engine == "torch" else why_not(spec, arithmetic, device)
    if why and config.engine == "compiled":
        raise ConfigError(f"engine: {spec.name} cannot be compiled: {why}")
    if why:
        return Emulated
    from harness.compiled.design import Compiled

    return Compiled


def why_not(spec: VariantSpec, arithmetic: Arithmetic, device: str) -> str | None:
    """Why a design runs in torch, or None."""
    if device != "cpu":
        return "compiled steps run on the CPU"
    from harness.compiled.codes import unsupported

    return unsupported(spec, arithmetic)


def oracle_engine(config: Config, device: str) -> type[Emulated]:
    """What the oracle runs on: compiled like the designs, unless engine=torch or a GPU asks for tensors."""
    if config.engine == "torch" or device != "cpu":
        return Emulated
    from harness.compiled.design import Compiled

    return Compiled
