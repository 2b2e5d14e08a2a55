"""When a measurement passes: finite, and within its allowance. Nothing else passes, so NaN, inf and absence fail.

Tiers
  bitwise   equal: counts of rows, the course of cursors and grid, formats in effect
  ulp k     at most k units of 2^-53, whatever the baseline: exact arithmetic, where every design is the recurrence
  relative  log10 of an error rises by no more than the allowance, in decades; exact zeros count as FLOOR
  law       a slope of log10 error over log10 tokens rises by no more than the allowance

What falls by more than its allowance is an improvement: reported, and to be accepted, or it may be lost unseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Value = float | str
Measured = dict[str, dict[str, dict[str, Value]]]  # case -> variant -> metric -> value
FLOOR = 1e-20  # below any error of fp64; the logarithm of an exact zero


@dataclass(frozen=True)
class Tier:
    kind: str  # bitwise, ulp, relative, law
    allowance: float = 0.0

    def __str__(self) -> str:
        return {
            "bitwise": "equal",
            "ulp": f"<= {self.allowance:g} ulp",
            "relative": f"+{self.allowance:g} decades",
            "law": f"+{self.allowance:g}",
        }[self.kind]


# Inputs, seeds and roundings are fixed, so the emulation repeats its bits on one machine. On another, fp64 sums are
# taken in other orders, which flips a rounding here and there: a thousandth of a level, more of one maximum. Kernels
# add in an order of their own. The allowances are several times that, and below the factor of 2 that a lost bit costs.
TIERS: dict[str, Tier] = {
    "rows": Tier("bitwise"),
    "course": Tier("bitwise"),
    "formats": Tier("bitwise"),
    "backend": Tier("bitwise"),
    "level": Tier("relative", 0.05),
    "tail": Tier("relative", 0.2),
    "slope": Tier("law", 0.2),
    "residual": Tier("relative", 0.2),
    # K + L operations a token, against d and o that may cancel: 1,078 is the largest measured
    # in 2,048 tokens; fp32 would be 5e8
    "identity": Tier("ulp", 4000),
}


def tier_of(metric: str) -> Tier:
    """Of `kind` or `kind.column`. Raises KeyError for a metric that no tier is stated for."""
    return TIERS[metric.partition(".")[0]]


@dataclass(frozen=True)
class Finding:
    """One measurement judged. verdict: pass, improvement, regression, or unjudged (its baseline cannot judge)."""

    case: str
    variant: str
    metric: str
    old: Value | None
    new: Value | None
    verdict: str
    excess: float = 0.0  # share of the allowance that is used, for sorting; inf where there is none


def judge(metric: str, old: Value | None, new: Value | None) -> tuple[str, float]:
    """Verdict and the share of the allowance used. None: absent."""
    tier = tier_of(metric)
    if old is None or not sound(old):
        return "unjudged", math.inf
    if new is None or not sound(new) or isinstance(new, str) != isinstance(old, str):
        return "regression", math.inf
    if tier.kind == "bitwise":
        return ("pass", 0.0) if new == old else ("regression", math.inf)
    assert isinstance(old, float | int) and isinstance(new, float | int)
    if tier.kind == "ulp":
        return ("pass" if 0 <= new <= tier.allowance else "regression"), new / tier.allowance
    if tier.kind == "relative" and (new < 0 or old < 0):
        return "regression", math.inf
    rise = _log(new) - _log(old) if tier.kind == "relative" else new - old
    share = rise / tier.allowance
    return ("pass" if -1 <= share <= 1 else "improvement" if share < -1 else "regression"), share


def sound(value: Value) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _log(x: float) -> float:
    return math.log10(max(x, FLOOR))


def compare(baseline: Mapping[str, Any], measured: Mapping[str, Any], variants: list[str]) -> list[Finding]:
    """Every measurement of either side, for the variants asked for. What the baseline has and the run has not is a
    regression; what the run has and the baseline has not is unjudged."""
    findings = []
    for case in dict.fromkeys([*baseline, *measured]):
        before, after = baseline.get(case, {}), measured.get(case, {})
        for variant in dict.fromkeys([*before, *after]):
            if variant not in variants:
                continue
            old, new = before.get(variant, {}), after.get(variant, {})
            for metric in dict.fromkeys([*old, *new]) or ["rows"]:
                verdict, share = judge(metric, old.get(metric), new.get(metric))
                findings.append(Finding(case, variant, metric, old.get(metric), new.get(metric), verdict, share))
    return findings


def status(findings: list[Finding]) -> int:
    """0 all pass, 1 a regression, 2 nothing to judge or no baseline to judge by."""
    verdicts = [f.verdict for f in findings]
    if "regression" in verdicts:
        return 1
    # an empty suite proves nothing
    return 2 if "unjudged" in verdicts or not verdicts else 0


def bad_values(metric: str, old: Value) -> Iterator[Value | None]:
    """What a gate must not let pass beside this baseline."""
    tier = tier_of(metric)
    yield from (None, math.nan, math.inf, -math.inf)
    if tier.kind == "bitwise":
        yield f"not {old}" if isinstance(old, str) else old - 1
        return
    assert isinstance(old, float | int)
    if tier.kind == "ulp":
        yield 2 * tier.allowance
    elif tier.kind == "relative":
        yield max(old, FLOOR) * 10 ** (1.01 * tier.allowance)
    else:
        yield old + 1.01 * tier.allowance


def toothless(baseline: Mapping[str, Any]) -> str | None:
    """A known-bad measurement that this baseline and these rules would let pass, or None. Every gate of it is tried."""
    for case, variants in baseline.items():
        for variant, metrics in variants.items():
            for metric, old in metrics.items():
                where = f"{case}, {variant}, {metric}"
                if judge(metric, old, old)[0] != "pass":
                    return f"{where}: {old} does not pass beside itself"
                for bad in bad_values(metric, old):
                    one = {case: {variant: {metric: old}}}
                    found = compare(one, {case: {variant: {} if bad is None else {metric: bad}}}, [variant])
                    if status(found) != 1:
                        return f"{where}: {bad} passes beside {old}"
    for case, variants in list(baseline.items())[:1]:
        if status(compare({case: variants}, {}, list(variants))) != 1:
            return "a run without any row passes"
    return "an empty suite passes" if status(compare({}, {}, [])) == 0 else None
