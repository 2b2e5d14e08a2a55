"""What is measured: cases, each an input family, an accept pattern and a ring, seeded and small.

fast  every family once, accept patterns and rings in turn, and four cases in exact arithmetic: 20 s on two cores
full  every family under every accept pattern, rings in turn, four times the tokens
gpu   the cases of fast at full head size on the device, kernels where there are any, over 2,048 tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product

from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig, PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.families import FAMILIES
from harness.variants import load, names

SUITES = ("fast", "full", "gpu")
ACCEPTS = {
    "uniform": AcceptanceConfig("uniform"),
    "geometric": AcceptanceConfig("geometric", p=0.8),
    "none": AcceptanceConfig("none"),
    "all": AcceptanceConfig("all"),
    "cycle": AcceptanceConfig("fixed", sequence=[1, 2, 3, 4]),
}
RINGS = {
    "L16": RingConfig(16, 4),
    "L32": RingConfig(32, 6),
    "commit": RingConfig(16, 4, 9, "commit"),
}
ONE = RingConfig(16, 1)  # one token a step
# no two sizes equal: a transposed state or a skipped head shows
SMALL = ModelConfig("gate", key_heads=2, value_heads=6, key_dim=64, value_dim=48, rows=16)
LAYER = ModelConfig("gate", key_heads=4, value_heads=8, key_dim=128, value_dim=128, rows=None)
EXACT = PrecisionConfig("exact", base="exact")


@dataclass(frozen=True)
class Case:
    """One decode of a suite. exact: in exact arithmetic, where every design is the recurrence."""

    name: str
    config: Config = field(compare=False)
    exact: bool = False

    @property
    def variants(self) -> list[str]:
        return self.config.variants


def default_of(name: str) -> list[str]:
    """The variants of a suite where none are named: all that ship; on a GPU, where each has kernels to compile, those
    that a run has."""
    return Config().variants if name == "gpu" else list(names())


def suite(name: str, variants: list[str]) -> list[Case]:
    """The cases of a suite, each with those of `variants` that its ring allows.

    Raises ConfigError for an unknown suite, no variant, or one that no case can run.
    """
    if name not in SUITES:
        raise ConfigError(f"suite: {name!r} is not one of {', '.join(SUITES)}")
    if not variants:
        raise ConfigError("variants: none asked for; an empty suite judges nothing")
    single = [v for v in variants if load(v).fold_current]
    wide = [v for v in variants if v not in single]
    cases = []
    for text, config, exact in _cases(name):
        allowed = [v for v in (single + wide if config.ring is ONE else wide) if answers(v, config, exact)]
        if allowed:
            config.variants = allowed
            cases.append(Case(text, config, exact))
    return cases


def answers(variant: str, config: Config, exact: bool) -> bool:
    """Whether a design has an answer to a case. A window's decay as a difference of rounded sums is NaN behind a gate
    of -inf, in kernels as here; an outside kernel computes in its own precision (fp64 is asked for by conformance).
    """
    spec = load(variant)
    if exact and spec.design:
        return False
    return config.decode.family != "resets" or spec.verify == "tokens"


def _cases(name: str) -> Iterator[tuple[str, Config, bool]]:
    device = "cuda" if name == "gpu" else "cpu"
    model = LAYER if name == "gpu" else SMALL
    tokens = {"fast": 512, "full": 2048, "gpu": 2048}[name]

    def made(family: str, accept: str, ring: RingConfig, precision: PrecisionConfig | None = None) -> Config:
        config = Config(model=model, device=device, acceptance=ACCEPTS[accept], ring=ring, reference="own")
        window, ragged = ring.max_window, accept == "uniform" and ring.max_window > 1
        config.decode = DecodeConfig(family, tokens, slots=2, seed=100, window=window, ragged=ragged)
        config.precision = precision or PrecisionConfig()
        return config

    every = product(FAMILIES, ACCEPTS) if name == "full" else zip(FAMILIES, cycle(ACCEPTS), strict=False)
    for (family, accept), ring in zip(every, cycle(RINGS), strict=False):
        yield f"{family}/{accept}/{ring}", made(family, accept, RINGS[ring]), False
    for family in ("silu", "loop24"):
        yield f"{family}/window 1", made(family, "all", ONE), False
    if name != "gpu":
        for family, accept in (("silu", "uniform"), ("beta_two", "geometric"), ("wide_state", "cycle")):
            yield f"exact: {family}/{accept}", made(family, accept, RINGS["L16"], EXACT), True
        yield "exact: silu/window 1", made("silu", "all", ONE, EXACT), True
