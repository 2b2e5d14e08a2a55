"""Configurations of many runs side by side: dotted keys, one plain value each, and which of them differ.

A list is its items with commas between them, a mapping key=value with commas, so that every value is a number, a
truth value, a text or null and can stand in a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from harness.config import Config, leaves
from harness.provenance import LAUNCHER_GROUPS, LAUNCHER_KEYS

SEED = "decode.seed"
Value = bool | int | float | str | None
Flat = dict[str, Value]


@cache
def defaults() -> Flat:
    """What a run has that asks for nothing, in the order of harness.config."""
    return {key: value_of(value) for key, value in leaves(Config())}


def value_of(value: Any) -> Value:
    """A leaf of a configuration as one plain value."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value_of(x)}" for key, x in value.items())
    if isinstance(value, list | tuple):
        return ",".join(str(value_of(x)) for x in value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def flat(config: Mapping[str, Any], prefix: str = "") -> Flat:
    """{dotted key: value} of a manifest's config, nested or dotted already, keys in the order of harness.config."""
    found: Flat = {}
    for key, value in config.items():
        name = prefix + key
        if isinstance(value, Mapping) and name not in defaults():
            found |= flat(value, f"{name}.")
        else:
            found[name] = value_of(value)
    return found if prefix else {key: found[key] for key in ordered(found)}


def ordered(keys: Iterable[str]) -> list[str]:
    """Keys as harness.config has them, those of another source behind."""
    place = {key: i for i, key in enumerate(defaults())}
    return sorted(set(keys), key=lambda key: (place.get(key, len(place)), key))


def launches(key: str) -> bool:
    """Whether a key says how a run is started or judged, not what it computes."""
    return key in LAUNCHER_KEYS or key.startswith(LAUNCHER_GROUPS)


def varying(configs: Sequence[Flat]) -> list[str]:
    """The keys whose values differ among the configurations that have them, launcher keys left out.

    Another source may lack a key altogether; that says nothing about what it computed.
    """
    every = ordered(key for config in configs for key in config)
    return [key for key in every if not launches(key) and len({c[key] for c in configs if key in c}) > 1]


def telling(configs: Sequence[Flat]) -> list[str]:
    """The varying keys without those that a group's name or family settles, as precision.name does precision.base."""
    keys = varying(configs)

    def settled(key: str) -> bool:
        group = key.rpartition(".")[0]
        for head in (f"{group}.name", f"{group}.family"):
            if group and head in keys and head != key:
                if len({(c.get(head), c.get(key)) for c in configs}) == len({c.get(head) for c in configs}):
                    return True
        return False

    return [key for key in keys if not settled(key)]


def constant(configs: Sequence[Flat]) -> Flat:
    """The keys that all of them have, with one value, and that."""
    first, *others = configs
    return {key: x for key, x in first.items() if all(key in c and c[key] == x for c in others)}


def own(config: Flat) -> Flat:
    """What of a configuration differs from the defaults of this source, launcher keys left out."""
    return {k: v for k, v in config.items() if not launches(k) and (k not in defaults() or v != defaults()[k])}


def shown(config: Mapping[str, Value], keys: Iterable[str]) -> str:
    """key=value of each key, as on a command line."""
    return " ".join(f"{key}={word(config.get(key))}" for key in keys)


def word(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None or value != value:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def alike(values: Iterable[Value]) -> type:
    """The type a column of these values has: bool, int, float, or str where they mix."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else str
    return float if kinds == {int, float} else str
