"""The error budget: whole² ≈ Σ site², each site's error taken from a run in which it alone rounds.

From table `levels` of a sweep: parts are runs with precision=exact and precision.keep=[site], the whole is the run with
precision=own, and exact with nothing kept is the floor, what a design's other order of operations leaves in fp64.
Independent roundings add as squares; a value that is rounded again to the format it has counts once. What the sum
leaves over is what sites do to one another, a site that was not tried, or that the numbers are medians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.records import ORACLE, quantiles_of, recorded

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("precision.name", "precision.keep")
# sites that round one value in turn: to a format that it already has, which changes nothing, so the coarsest counts
IN_TURN = (("key", "store_k_hat", "fold_k"), ("store_d", "fold_d"), ("checkpoint", "state_operand"))


@dataclass(frozen=True)
class Account:
    """What one variant's error is made of. All numbers are medians over seeds; NaN ranks above inf."""

    variant: str
    whole: float
    floor: float | None  # nothing rounds; None where the sweep has no such run
    parts: dict[str, float]  # site or product -> error if it alone rounds, largest first

    @property
    def counted(self) -> dict[str, float]:
        """The parts, largest first, of sites IN_TURN the largest alone."""
        again = set()
        for group in IN_TURN:
            first, *others = sorted((site for site in group if site in self.parts), key=list(self.parts).index) or [""]
            again |= set(others)
        return {site: x for site, x in self.parts.items() if site not in again}

    @property
    def sum(self) -> float:
        """√Σ part² of those counted; NaN if any part is NaN."""
        values = [math.nan] if any(map(math.isnan, self.parts.values())) else list(self.counted.values())
        # hypot of NaN and inf is inf
        return math.nan if any(map(math.isnan, values)) else math.hypot(*values)

    @property
    def residual(self) -> float:
        """1 - Σ part² / whole²: above 0 where the whole is more; NaN where a number is not finite."""
        if not (math.isfinite(self.whole) and math.isfinite(self.sum)):
            return math.nan
        if self.whole == 0:
            return 0.0 if self.sum == 0 else -math.inf
        return 1 - (self.sum / self.whole) ** 2

    def share(self, site: str) -> float:
        """part² / Σ part²: a site's share of what the sites add up to; 0 where all are 0, or it is not counted."""
        return (self.counted.get(site, 0.0) / self.sum) ** 2 if self.sum else 0.0


def accounts(frame: pd.DataFrame, error: str = "kept_median") -> list[Account]:
    """One account per variant of a table `levels`, in its order.

    error: a column, as kept_median or o_max. Raises HarnessError for a column that is missing, a variant without the
    run precision=own or without parts, a run that keeps several sites at once, and other config columns that differ.
    """
    for key in (*KEYS, "variant", error):
        if key not in frame.columns:
            raise HarnessError(f"{key}: not a column of the table; an error budget is made of a sweep over {KEYS[1]}")
    absent = [name for name in frame["variant"].unique() if name == ORACLE or not recorded(frame, str(name), error)]
    frame = frame[~frame["variant"].isin(absent)]
    # slices copy attrs, which are long where runs are many
    frame.attrs = {}
    kept = [sites(x) for x in frame["precision.keep"]]
    frame = frame.assign(**{"precision.keep": kept})
    # the name says the rest of the group
    alike = [key for key in frame.columns if "." in key and not key.startswith("precision.") and key != "decode.seed"]
    for key in alike:
        if len(found := set(map(str, frame[key]))) > 1:
            raise HarnessError(f"{key}: {', '.join(sorted(found))} in one budget; choose one")
    return [_account(str(name), part, error) for name, part in frame.groupby("variant", sort=False, observed=True)]


def sites(kept: Any) -> tuple[str, ...]:
    """precision.keep as a tuple, from a list or from its text, as [gate] or gate,key."""
    if isinstance(kept, str):
        return tuple(x.strip().strip("'\"") for x in kept.strip("[]() ").split(",") if x.strip())
    return tuple(map(str, kept)) if isinstance(kept, Iterable) else ()


def _account(variant: str, rows: pd.DataFrame, error: str) -> Account:
    whole, floor, parts = [], [], dict[str, list[float]]()
    for name, keep, value in zip(
        rows["precision.name"], rows["precision.keep"], rows[error].astype(float), strict=True
    ):
        if name == "own" and not keep:
            whole.append(value)
        elif name == "exact" and not keep:
            floor.append(value)
        elif name == "exact" and len(keep) == 1:
            parts.setdefault(keep[0], []).append(value)
        else:
            raise HarnessError(
                f"precision.keep: {', '.join(keep) or 'nothing'} with precision={name} is no part of a budget"
            )
    for what, there in (("precision=own", whole), ("precision=exact with one site kept", parts)):
        if not there:
            raise HarnessError(f"variant {variant}: the table has no run with {what}")
    found = {site: _middle(x) for site, x in parts.items()}
    # NaN first, then inf
    order = sorted(found, key=lambda site: (not math.isnan(found[site]), -found[site]))
    return Account(variant, _middle(whole), _middle(floor) if floor else None, {site: found[site] for site in order})


def _middle(x: list[float]) -> float:
    return quantiles_of(x, [0.5])[0]
