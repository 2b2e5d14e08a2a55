"""The configuration of one run: typed, flat, one dataclass per Hydra group. Nothing here imports Hydra.

Every key carries its unit and range; `validate` refuses what the dataclass types cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Optional

from harness.errors import ConfigError
from harness.map_config import ConditioningConfig
from harness.objective_config import ObjectiveConfig
from harness.operator_config import OperatorConfig

# Optional[...] rather than X | None: OmegaConf reads these annotations at run time.


@dataclass
class ModelConfig:
    """One GDN layer."""

    name: str = "default"
    key_heads: int = 8  # H
    value_heads: int = 16  # HV, a multiple of H
    key_dim: int = 128  # K
    value_dim: int = 128  # V of the real layer
    rows: Optional[int] = 32  # value rows simulated per head (rows of S are independent); null: all of them


@dataclass
class DecodeConfig:
    """The token stream; see harness.decode."""

    family: str = "silu"  # a name of harness.families.FAMILIES
    tokens: int = 16384  # committed tokens after the prefill
    slots: int = 1  # independent sequences; slot i draws from seed + i
    seed: int = 0
    window: int = 4  # draft tokens + bonus token per step, <= ring.max_window
    ragged: bool = False  # draw each window's length from 1..window instead
    prefill: int = 0  # tokens run first in windows of 64, all accepted
    activation: str = "bf16"  # format q, k, v, a, b are rounded to, once
    gates: Optional[str] = None  # captured gates: a safetensors file with log_decay and beta [tokens, heads]
    g: Optional[float] = None  # fix every log decay, <= 0
    beta: Optional[float] = None  # fix every beta, in [0, 2]
    coherence: Optional[float] = None  # weight of the common key direction, 0..1, where the family has one
    initial_state: str = "random"  # zero | random | wide; families with a state of their own ignore it


@dataclass
class AcceptanceConfig:
    """How many tokens of each window are committed; the bonus token always is."""

    kind: str = "uniform"  # uniform | all | none | geometric | fixed
    p: Optional[float] = None  # geometric: probability that a draft is accepted, 0..1
    sequence: Optional[list[int]] = None  # fixed: accepted counts, cycled


@dataclass
class RingConfig:
    """Ring and flush rule; see harness.ring."""

    length: int = 16  # L, a power of two
    max_window: int = 4
    flush_at: Optional[int] = None  # committed records that raise the flag; null: L - 2*max_window + 1
    fold_when: str = "next"  # next: at the flagged slot's next verify; commit: at once


@dataclass
class PrecisionConfig:
    """Rounding of every variant except the oracle; see harness.arithmetic."""

    name: str = "own"
    base: str = "own"  # own: each variant's sites; else one format for every site, or `exact`
    dots: Optional[str] = None  # with a base other than own: dot precision of every product
    keep: list[str] = field(default_factory=list)  # sites that stay the variant's own
    sites: dict[str, str] = field(default_factory=dict)  # single sites: format[:mode]
    products: dict[str, str] = field(default_factory=dict)  # single products: dot precision
    exp: str = "fast"  # e^g where decays are fp32: fast, as tl.exp has it on a GPU | rounded: once, from fp64


@dataclass
class BenchConfig:
    """What experiment=bench times; window, ring, key_dim and value_dim are the run's."""

    parts: Optional[list[str]] = None  # of harness, kernels; null: kernels on a GPU, harness on a CPU
    batches: list[int] = field(default_factory=lambda: [1, 16, 64, 256])  # slots in a call of the kernel part
    heads: list[str] = field(default_factory=lambda: ["16/32", "16/64"])  # H/HV of the kernel part
    repeats: int = 15  # timed rounds of the kernel part
    peers: list[str] = field(default_factory=lambda: ["sglang", "fla"])  # timed beside our kernels, where installed
    sglang: Optional[str] = None  # folder that holds sglang/kernels; null: the installed package


@dataclass
class Config:
    experiment: str = "drift"
    model: ModelConfig = field(default_factory=ModelConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    conditioning: ConditioningConfig = field(default_factory=ConditioningConfig)
    operator: OperatorConfig = field(default_factory=OperatorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    variants: list[str] = field(
        default_factory=lambda: [
            "exact_recurrent",
            "null_arm",
            "chunked_fp32",
            "chunked_tf32",
            "chunked_bf16",
            "exact_fold",
        ]
    )
    reference: str = "fp64"  # fp64: one oracle, the model's conventions; own: one per convention in use
    # emulated | triton | outside, what a variant's own `design:` names | auto: outside where it names one, triton on a
    # GPU where there is a kernel; or a list to compare
    backend: Any = "auto"
    engine: str = "auto"  # of emulated designs: torch (readable, any device) | compiled (CPU) | auto
    device: str = "auto"  # auto | cpu | cuda
    workers: Optional[int] = None  # CPU processes, each with a share of the heads; null: one per core
    results_dir: str = "results/runs"
    progress: Optional[bool] = None  # null: a bar when standard error is a terminal


def backends(config: Config) -> list[str]:
    """What `backend` names, as a list."""
    return [config.backend] if isinstance(config.backend, str) else [str(x) for x in config.backend]


def leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a config dataclass."""
    found: list[tuple[str, Any]] = []
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            found += leaves(value, f"{prefix}{f.name}.")
        else:
            found.append((prefix + f.name, value))
    return found


def _at_least(key: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{key}: {value} is below {low}")


def head_counts(text: str) -> tuple[int, int]:
    """H and HV of "H/HV". Raises ConfigError for anything else, or an HV that is no multiple of H."""
    H, _, HV = str(text).partition("/")
    if not (H.isdigit() and HV.isdigit() and int(H) > 0 and int(HV) > 0 and int(HV) % int(H) == 0):
        raise ConfigError(f"bench.heads: {text!r} is not key heads/value heads, as 16/32, one a multiple of the other")
    return int(H), int(HV)


def _validate_bench(bench: BenchConfig) -> None:
    for part in bench.parts or []:
        _one_of("bench.parts", part, ("harness", "kernels"))
    for peer in bench.peers:
        _one_of("bench.peers", peer, ("sglang", "fla"))
    for key in ("batches", "heads") + (("parts",) if bench.parts is not None else ()):
        if not getattr(bench, key):
            raise ConfigError(f"bench.{key}: empty; name at least one")
    for batch in bench.batches:
        _at_least("bench.batches", batch, 1)
    for heads in bench.heads:
        head_counts(heads)
    _at_least("bench.repeats", bench.repeats, 1)


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")


def validate(config: Config) -> None:
    """Ranges and cross-checks that need no data. Raises ConfigError whose message starts with the key."""
    for key, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: {value} is not finite")
    model, decode, ring = config.model, config.decode, config.ring
    for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    if model.value_heads % model.key_heads:
        raise ConfigError(
            f"model.value_heads: {model.value_heads} is not a multiple of model.key_heads={model.key_heads}"
        )
    if model.rows is not None and not 1 <= model.rows <= model.value_dim:
        raise ConfigError(f"model.rows: {model.rows} is not in 1..model.value_dim={model.value_dim}")
    for name, low in (("tokens", 1), ("slots", 1), ("seed", 0), ("window", 1), ("prefill", 0)):
        _at_least(f"decode.{name}", getattr(decode, name), low)
    if decode.window > ring.max_window:
        raise ConfigError(f"decode.window: {decode.window} is above ring.max_window={ring.max_window}")
    if decode.g is not None and decode.g > 0:
        raise ConfigError(f"decode.g: {decode.g} is a positive log decay; log gates are <= 0")
    if decode.beta is not None and not 0 <= decode.beta <= 2:
        raise ConfigError(f"decode.beta: {decode.beta} is outside [0, 2]")
    if decode.coherence is not None and not 0 <= decode.coherence <= 1:
        raise ConfigError(f"decode.coherence: {decode.coherence} is outside [0, 1]")
    _one_of("decode.initial_state", decode.initial_state, ("zero", "random", "wide"))
    _one_of("acceptance.kind", config.acceptance.kind, ("uniform", "all", "none", "geometric", "fixed"))
    _one_of("ring.fold_when", ring.fold_when, ("next", "commit"))
    _one_of("reference", config.reference, ("fp64", "own"))
    if not isinstance(config.backend, (str, list)) or not config.backend:
        raise ConfigError(f"backend: {config.backend!r} is neither a name nor a list of names")
    for backend in backends(config):
        _one_of("backend", backend, ("auto", "emulated", "triton", "outside"))
    if len(set(backends(config))) != len(backends(config)):
        raise ConfigError(f"backend: a name appears twice in {config.backend}")
    _one_of("precision.exp", config.precision.exp, ("fast", "rounded"))
    _one_of("engine", config.engine, ("auto", "torch", "compiled"))
    _one_of("device", config.device, ("auto", "cpu", "cuda"))
    p = config.acceptance.p
    if config.acceptance.kind == "geometric" and (p is None or not 0 <= p <= 1):
        raise ConfigError(f"acceptance.p: {p} is not a probability")
    if config.acceptance.kind == "fixed":
        if not config.acceptance.sequence:
            raise ConfigError("acceptance.sequence: empty; a fixed acceptance needs counts")
        for n in config.acceptance.sequence:
            if not 1 <= n <= decode.window:
                raise ConfigError(f"acceptance.sequence: {n} is not in 1..decode.window={decode.window}")
    if config.workers is not None:
        _at_least("workers", config.workers, 1)
    _validate_bench(config.bench)
    config.conditioning.check()
    config.operator.check()
    config.objective.check()
    if not config.variants:
        raise ConfigError("variants: empty; name at least one")
    if len(set(config.variants)) != len(config.variants):
        raise ConfigError(f"variants: a name appears twice in {config.variants}")
