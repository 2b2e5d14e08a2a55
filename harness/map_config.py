"""What experiment=conditioning inverts and how: one group of keys of harness.config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

from harness.errors import ConfigError

INVERTED = (
    *("substitution", "rhs_solve", "horner", "block", "block/16", "block/16r"),
    *("doubling", "neumann", "newton", "newton/r", "neumann/3", "newton/3"),
)
# truncated tf32 operands, as the hardware has them; bf16/bf16 and fp16/fp16 store T in the format too
INVERSE_FORMATS = ("fp32/ieee", "fp32/tf32x3", "fp32/tf32", "fp32/bf16", "bf16/bf16", "fp16/fp16")


@dataclass
class ConditioningConfig:
    """What experiment=conditioning inverts, how, and what it calls safe; key_dim and decode.seed are the run's."""

    windows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])  # tokens, 1..256
    coherence: list[float] = field(default_factory=lambda: [0.0, 0.31, 0.63, 0.91, 0.993, 1.0])  # cosine of keys, 0..1
    beta: list[float] = field(default_factory=lambda: [0.47, 0.953, 1.97])  # of the grid, in [0, 2]
    g: list[float] = field(default_factory=lambda: [-1.1e-3, -0.107])  # log decay per token of the grid, <= 0
    inputs: Optional[list[str]] = None  # beside the grid, by name; null: all of harness.points.NAMED
    matrices: Optional[str] = None  # a .npy file of A [N, m, m], strictly lower, measured beside them
    draws: int = 8  # windows per input and length up to 32; beyond, that times (32 / length)^2, 1 at least
    methods: list[str] = field(default_factory=lambda: [*INVERTED])  # as harness.reference.inverse spells them
    formats: list[str] = field(default_factory=lambda: [*INVERSE_FORMATS])  # site/product: as stored / as multiplied
    safe: float = 4.0  # an inverse is safe up to the window where its error of T passes safe * window * u

    def check(self) -> None:
        """Ranges. Raises ConfigError whose message starts with the key; names are checked where they are looked up."""
        for key in ("windows", "methods", "formats"):
            values = getattr(self, key)
            if len(set(values)) != len(values):
                raise ConfigError(f"conditioning.{key}: one appears twice in {values}")
            if not values:
                raise ConfigError(f"conditioning.{key}: empty; name at least one")
        for key, low, high in (("windows", 1, 256), ("coherence", 0, 1), ("beta", 0, 2)):
            for value in getattr(self, key):
                if not low <= value <= high:
                    raise ConfigError(f"conditioning.{key}: {value} is outside [{low}, {high}]")
        for value in self.g:
            if not -math.inf < value <= 0:
                raise ConfigError(f"conditioning.g: {value} is no finite log decay <= 0")
        if self.draws < 1:
            raise ConfigError(f"conditioning.draws: {self.draws} is below 1")
        if not 0 < self.safe < math.inf:
            raise ConfigError(f"conditioning.safe: {self.safe} is not a positive number")
