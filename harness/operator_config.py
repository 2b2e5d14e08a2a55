"""What experiment=window_operator sweeps: one group of keys of harness.config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from harness.errors import ConfigError

FORMATS = ("fp32/ieee", "fp32/tf32", "bf16/bf16", "fp16/fp16")
GATES = ("0.95/-0.001", "0.5/-0.001", "0.95/-0.1", "1.97/-0.001")
INVERSES = (
    *("substitution", "block", "block/16", "horner", "doubling", "newton", "neumann"),
    *("neumann/1", "neumann/2", "neumann/3", "newton/2"),
)


@dataclass
class OperatorConfig:
    """What experiment=window_operator sweeps; key_dim, seed and activation are the run's."""

    windows: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32])  # tokens of a window, 2 or more
    cosines: list[float] = field(default_factory=lambda: [0.0, 0.3, 0.6, 0.9, 0.99, 1.0])  # of two keys, 1: identical
    gates: list[str] = field(default_factory=lambda: [*GATES])  # beta/g of every token; tables show the first
    inverses: list[str] = field(default_factory=lambda: [*INVERSES])  # those that form T, as variants spell them
    formats: list[str] = field(default_factory=lambda: [*FORMATS])  # of the inverse alone, site/product
    heads: int = 2  # draws of keys and values of every closed run
    tokens: int = 2048  # of a closed run, and of the decode after an injection
    perturbation: float = 0.25  # injected, in rms of what it perturbs; large beside a rounding, the map is linear
    rings: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])  # records of the folds compared in fp32

    def check(self) -> None:
        """Ranges. Raises ConfigError whose message starts with the key; names are checked where they are looked up."""
        for key in ("windows", "cosines", "gates", "inverses", "formats", "rings"):
            values = getattr(self, key)
            if not values:
                raise ConfigError(f"operator.{key}: empty; name at least one")
            if len(set(values)) != len(values):
                raise ConfigError(f"operator.{key}: one appears twice in {values}")
        for value in self.cosines:
            if not 0 <= value <= 1:
                raise ConfigError(f"operator.cosines: {value} is outside [0, 1]")
        for text in self.gates:
            gate_point(text)
        if self.perturbation < 0:
            raise ConfigError(f"operator.perturbation: {self.perturbation} is below 0")
        # growth is read off the second half of at least eight windows
        least = 8 * max(self.windows)
        for key, low in (("windows", 2), ("rings", 1), ("heads", 1), ("tokens", least)):
            values = getattr(self, key)
            for value in values if isinstance(values, list) else [values]:
                if value < low:
                    raise ConfigError(f"operator.{key}: {value} is below {low}")


def gate_point(text: str) -> tuple[float, float]:
    """beta and g of "beta/g". Raises ConfigError for anything else, a beta outside [0, 2] or a g above 0."""
    try:
        beta, g = (float(x) for x in str(text).split("/"))
    except ValueError:
        raise ConfigError(f"operator.gates: {text!r} is not beta/g, as 0.95/-0.001") from None
    if not 0 <= beta <= 2 or not -math.inf < g <= 0:
        raise ConfigError(f"operator.gates: {text!r} is not a beta in [0, 2] and a finite log decay <= 0")
    return beta, g
