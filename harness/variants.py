"""A design is a declaration: what it verifies with, what its ring keeps, how it folds, and where it rounds.

One small file per design in configs/variant; the keys are the fields of VariantSpec. To add a design, add a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from harness import plugins
from harness.arithmetic import EXACT, PRODUCTS, SITES, Arithmetic, Conventions, Dot, Dots, Rounding, Sites
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.reference.inverse import parse as parse_inverse
from harness.ring import RingSpec

CONFIGS = next(p for p in (Path(__file__).parent / "configs", Path(__file__).parents[1] / "configs") if p.is_dir())
# a draw per element makes sense where a state is stored; elsewhere no kernel does it
STOCHASTIC = ("step", "checkpoint", "snapshot")
# how a design computes, its rounding aside
DECLARED = (
    *("verify", "fold", "gate_record", "history_read", "inverse"),
    *("flush_at", "fold_when", "fold_current"),
)


@dataclass
class VariantSpec:
    """One point of the declared space."""

    name: str
    doc: str = ""  # one line
    source: str = ""  # thread or repository + path
    design: str = ""  # who computes it, if not the harness: an entry point, or file.py:Name beside this file
    verify: str = "window"  # window: chunked; tokens: one after the other
    fold: str = "product"  # product of stored d; replay of raw records; snapshot: each draft's own state
    gate_record: str = "per_token"  # or cumulative since the last fold
    history_read: str = "sum"  # of two-part records a verify reads hi, or the sum
    inverse: str = "substitution"  # as harness.reference.inverse spells it: doubling, neumann/3, newton/2r, ...
    flush_at: int | None = None  # null: the run's
    fold_when: str | None = None  # null: the run's
    fold_current: bool = False  # window 1 only: a flush folds the token at hand too, unrounded
    sites: dict[str, str] = field(default_factory=dict)  # site: rounding; `default` for those not named
    dots: dict[str, str] = field(default_factory=dict)  # product: precision; `default` likewise
    conventions: dict[str, Any] = field(default_factory=dict)  # eps, eps_at, beta, decay

    def __post_init__(self) -> None:
        choices = {
            "verify": ("window", "tokens"),
            "fold": ("product", "replay", "snapshot"),
            "gate_record": ("per_token", "cumulative"),
            "history_read": ("hi", "sum"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"variant {self.name}: {key}: {getattr(self, key)!r} is not {' or '.join(allowed)}")
        parse_inverse(f"variant {self.name}: inverse", self.inverse)
        if type(self.design) is not str:
            raise ConfigError(
                f"variant {self.name}: design: {self.design!r} is neither an entry point nor file.py:Name"
            )
        if self.flush_at is not None and (type(self.flush_at) is not int or self.flush_at < 1):
            raise ConfigError(f"variant {self.name}: flush_at: {self.flush_at!r} is not a count of 1 or more")
        if self.fold_when not in (None, "next", "commit"):
            raise ConfigError(f"variant {self.name}: fold_when: {self.fold_when!r} is neither next nor commit")
        if type(self.fold_current) is not bool:
            raise ConfigError(f"variant {self.name}: fold_current: {self.fold_current!r} is neither true nor false")
        if self.fold == "snapshot" and (self.verify != "tokens" or (self.flush_at, self.fold_when) != (1, "commit")):
            raise ConfigError(
                f"variant {self.name}: fold: snapshot needs verify: tokens, flush_at: 1 and fold_when: commit"
            )
        if self.gate_record == "cumulative" and self.fold != "product":
            raise ConfigError(f"variant {self.name}: gate_record: cumulative gates cannot be replayed token by token")

    def records(self, a: Arithmetic) -> tuple[str, ...]:
        """The fields its ring keeps."""
        if self.fold == "snapshot":
            return ()
        names: list[str] = []
        if self.verify == "window" or self.fold == "product":
            names += ["d", "k_hat", "g"]
            names += [f"{n}_lo" for n in ("d", "k_hat") if getattr(a.sites, f"store_{n}").parts == 2]
        if self.fold == "replay":
            names += ["v", "k", "beta"] + ([] if "g" in names else ["g"])
        return tuple(names)

    def ring(self, run: RingConfig) -> RingSpec:
        """The run's ring under this design's own flush rule."""
        window = 1 if self.fold_current else run.max_window
        flush_at = run.flush_at if self.flush_at is None else self.flush_at
        if self.fold_current and run.max_window != 1:
            raise ConfigError(f"variant {self.name}: decodes one token a step; set ring.max_window=1 decode.window=1")
        if self.fold_current and flush_at is None:
            flush_at = run.length - 1
        return RingSpec(run.length, window, flush_at, self.fold_when or run.fold_when)

    def arithmetic(self, precision: PrecisionConfig | None = None) -> Arithmetic:
        """Its sites, products and conventions, with the run's `precision` laid over them."""
        where = f"variant {self.name}"
        own_sites = _table(f"{where}: sites", self.sites, SITES, Rounding.parse, EXACT)
        own_dots = _table(f"{where}: dots", self.dots, PRODUCTS, Dot.parse, Dot())
        given = dict(self.conventions)
        _known(f"{where}: conventions", given, tuple(f.name for f in fields(Conventions)))
        arithmetic = Arithmetic(Sites(**own_sites), Dots(**own_dots), _conventions(f"{where}: conventions", given))
        _check_draws(f"{where}: sites", arithmetic)
        return arithmetic if precision is None else overlay(arithmetic, precision)


def overlay(own: Arithmetic, precision: PrecisionConfig) -> Arithmetic:
    """`own` under a run's precision: a base for every site, sites kept as they were, single sites and products."""
    sites, dots = own.sites, own.dots
    if precision.base != "own":
        rounding = Rounding.parse("precision.base", precision.base)
        dot = Dot.parse("precision.dots", precision.dots or ("exact" if rounding.exact else "ieee"))
        sites, dots = Sites(**dict.fromkeys(SITES, rounding)), Dots(**dict.fromkeys(PRODUCTS, dot))
    elif precision.dots is not None:
        dots = Dots(**dict.fromkeys(PRODUCTS, Dot.parse("precision.dots", precision.dots)))
    for name in precision.keep:
        if name not in SITES + PRODUCTS:
            raise ConfigError(f"precision.keep: {name!r} is no site or product; have {', '.join(SITES + PRODUCTS)}")
        # some names are both: the value and the product that makes it
        if name in SITES:
            sites = replace(sites, **{name: getattr(own.sites, name)})
        if name in PRODUCTS:
            dots = replace(dots, **{name: getattr(own.dots, name)})
    _known("precision.sites", precision.sites, SITES)
    _known("precision.products", precision.products, PRODUCTS)
    for site, text in precision.sites.items():
        sites = replace(sites, **{site: Rounding.parse(f"precision.sites.{site}", text)})
    for product, text in precision.products.items():
        dots = replace(dots, **{product: Dot.parse(f"precision.products.{product}", text)})
    # no other format has a fast exponential
    made = replace(own, sites=sites, dots=dots, exp=precision.exp if sites.decay.native else own.exp)
    _check_draws("precision.sites", made)
    return made


def _conventions(key: str, table: dict[str, Any]) -> Conventions:
    given = dict(table)
    if "eps" in given:
        try:
            # YAML reads 1e-5 as text
            given["eps"] = float(given["eps"])
        except (TypeError, ValueError):
            raise ConfigError(f"{key}.eps: {given['eps']!r} is not a number") from None
        if not 0 <= given["eps"] < math.inf:
            raise ConfigError(f"{key}.eps: {given['eps']} is not a finite number >= 0")
    if "beta" in given:
        given["beta"] = Rounding.parse(f"{key}.beta", given["beta"])
        if given["beta"].mode == "stochastic":
            raise ConfigError(f"{key}.beta: stochastic rounding is for {', '.join(STOCHASTIC)}")
    for name, allowed in (("eps_at", ("sum", "mean", "outside")), ("decay", ("before", "after"))):
        if given.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{key}.{name}: {given[name]!r} is not {' or '.join(allowed)}")
    return Conventions(**given)


def _check_draws(key: str, a: Arithmetic) -> None:
    """Refuse a stochastic rounding where no draw is keyed."""
    for site in SITES:
        if getattr(a.sites, site).mode == "stochastic" and site not in STOCHASTIC:
            raise ConfigError(f"{key}.{site}: stochastic rounding is for {', '.join(STOCHASTIC)}")


def _known(key: str, table: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            raise ConfigError(f"{key}.{name}: unknown; have {', '.join(names)}")


def _table(key: str, table: dict[str, str], names: tuple[str, ...], parse: Any, otherwise: Any) -> dict[str, Any]:
    _known(key, table, (*names, "default"))
    default = parse(f"{key}.default", table["default"]) if "default" in table else otherwise
    if isinstance(default, Rounding) and default.mode == "stochastic":
        raise ConfigError(f"{key}.default: stochastic rounding is for {', '.join(STOCHASTIC)}")
    found = dict.fromkeys(names, default)
    for name, text in table.items():
        if name != "default":
            found[name] = parse(f"{key}.{name}", text)
    return found


@lru_cache
def names() -> tuple[str, ...]:
    """Every design that ships, sorted."""
    return tuple(sorted(p.stem for p in (CONFIGS / "variant").glob("*.yaml")))


def load(name: str) -> VariantSpec:
    """A design by name, by the path of a file of its own, or by the entry point of an implementation that has one.

    Raises ConfigError naming the variant and the key.
    """
    installed = None
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / "variant" / f"{name}.yaml"
    if not path.is_file():
        installed = plugins.declaration(name)
        if installed is None:
            raise ConfigError(f"variants: {name!r} is unknown; have {', '.join(names())}, or a path to a .yaml")
    label, path = (name, installed) if installed else (path.stem, path)
    try:
        table = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"variants: {name}: unreadable: {str(error).splitlines()[0]}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"variants: {name}: not a table of keys")
    _known(f"variant {label}", table, tuple(f.name for f in fields(VariantSpec) if f.name != "name"))
    for f in fields(VariantSpec):
        if f.name in ("sites", "dots", "conventions") and not isinstance(table.get(f.name, {}), dict):
            raise ConfigError(f"variant {label}: {f.name}: not a table of keys")
    spec = VariantSpec(name=label, **table)
    if installed:
        spec.design = name
    elif ".py:" in spec.design:
        spec.design = str(path.parent / spec.design)
    spec.arithmetic()
    return spec
