"""The designs a configuration names, made: where a kernel or an outside implementation joins a run."""

from __future__ import annotations

from harness.arithmetic import Arithmetic
from harness.config import Config
from harness.errors import ConfigError
from harness.reference.emulated import Emulated
from harness.variants import VariantSpec, load


def designs(config: Config, device: str = "cpu") -> list[Emulated]:
    """The designs a configuration names, each in the run's precision, on its own ring and by its engine.

    engine=auto compiles what can be compiled on the CPU; engine=compiled refuses the rest, naming the design.
    """
    made: list[Emulated] = []
    for name in config.variants:
        spec = load(name)
        ring, arithmetic = spec.ring(config.ring), spec.arithmetic(config.precision)
        why = "engine torch asked for" if config.engine == "torch" else why_not(spec, arithmetic, device)
        if why and config.engine == "compiled":
            raise ConfigError(f"engine: {name} cannot be compiled: {why}")
        if why:
            made.append(Emulated(spec, ring, arithmetic))
        else:
            from harness.compiled.design import Compiled

            made.append(Compiled(spec, ring, arithmetic))
    return made


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
