"""What a search minimises and what it may spend: one group of keys of harness.config. No run depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

from harness.errors import ConfigError

ERRORS = ("served", "kept", "o", "d")
BUDGETS = ("bytes_held", "bytes_token", "us_token")


@dataclass
class ObjectiveConfig:
    """What a search minimises: the relative error at the end of a run, under budgets; see harness.sweeps.objective."""

    error: str = "kept"  # served | kept | o | d, as in summary.json
    statistic: str = "max"  # median | max over slots, heads and the last tenth of the flushes
    variant: Optional[str] = None  # whose error and cost; null: the first that is not null_arm
    bytes_held: Optional[float] = None  # budget: bytes a slot of one layer may hold; null: none
    bytes_token: Optional[float] = None  # budget: bytes a committed token may move; null: none
    us_token: Optional[float] = None  # budget: µs a committed token may take at objective.bandwidth; null: none
    bandwidth: Optional[float] = None  # bytes per second that us_token assumes, e.g. 4.4e12 read by an H200

    def check(self) -> None:
        """Ranges. Raises ConfigError whose message starts with the key."""
        for key, allowed in (("error", ERRORS), ("statistic", ("median", "max"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"objective.{key}: {getattr(self, key)!r} is not one of {', '.join(allowed)}")
        for key in (*BUDGETS, "bandwidth"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"objective.{key}: {value} is not a positive number")
        if self.us_token is not None and self.bandwidth is None:
            raise ConfigError("objective.us_token: needs objective.bandwidth, in bytes per second")
