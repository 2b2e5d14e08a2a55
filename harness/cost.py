"""What a design costs, counted from what it declares: bytes a slot holds, and bytes a committed token moves.

A model, not a measurement. Both are of one layer, one slot and all value heads, with the whole value_dim whatever
number of value rows a run simulates, in the formats that the sites state (checkpoint, store_*, snapshot, output) and
not on the fp64 carriers of an emulation.

1. bytes_held   the checkpoint, L rows of every record, and for a snapshot verify a state per token of max_window
2. bytes_token  what harness.traffic counts for the mean step of harness.steady, verify, flush and commit, over the
                tokens that step commits; q, k, v come in 16 bits, gates in 32
3. us_token     bytes_token at a stated bandwidth: the least time that memory allows, which no kernel reaches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from harness.arithmetic import Rounding
from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig
from harness.errors import ConfigError, HarnessError
from harness.ring import RingSpec
from harness.steady import steady
from harness.tokens import Shape
from harness.traffic import STORED, of_spec, stated
from harness.variants import DECLARED, VariantSpec, load

Group = TypeVar("Group")


def of(
    spec: VariantSpec,
    records: tuple[str, ...],
    roundings: Mapping[str, Rounding],
    ring: RingSpec,
    config: Config,
) -> dict[str, Any]:
    """{"bytes_held": int, "bytes_token": float} of a design on its own ring, in the decode of a run.

    roundings: site -> rounding, of traffic.STORED at least
    """
    shape = Shape.of(replace(config.model, rows=None))
    mean = steady(ring, config.decode, config.acceptance, spec.fold_current)
    traffic = of_spec(spec, records, stated(roundings), shape, mean.window)
    return {"bytes_held": traffic.held(ring.length, ring.max_window), "bytes_token": traffic.per_token(mean).total}


def of_config(config: Config) -> dict[str, dict[str, Any]]:
    """The cost of every variant of a configuration, by name, before anything is run."""
    found = {}
    for name in config.variants:
        spec = load(name)
        arithmetic = spec.arithmetic(config.precision)
        ring = spec.ring(config.ring)
        found[spec.name] = of(spec, spec.records(arithmetic), vars(arithmetic.sites), ring, config)
    return found


def of_manifest(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cost of every variant of a run, by name.

    Raises HarnessError naming the variant where a manifest from before designs were declared in it is of a variant
    file that no longer is what it was.
    """
    table = manifest["config"]
    config = Config(
        model=_group(ModelConfig, table["model"]),
        decode=_group(DecodeConfig, table["decode"]),
        acceptance=_group(AcceptanceConfig, table["acceptance"]),
    )
    found = {}
    for name, entry in manifest["variants"].items():
        stored = {site: Rounding.parse(f"{name}: {site}", entry["effective"][site]) for site in STORED}
        ring = RingSpec(**entry["ring"])
        found[name] = of(_declared(name, entry), tuple(entry["records"]), stored, ring, config)
    return found


def us_token(bytes_token: float, bandwidth: float) -> float:
    """Microseconds that bytes_token take at `bandwidth` bytes per second."""
    return 1e6 * bytes_token / bandwidth


def _group(kind: type[Group], table: Mapping[str, Any]) -> Group:
    # a run of an earlier version lacks what it did not know
    return kind(**{f.name: table[f.name] for f in fields(kind) if f.name in table})  # type: ignore[arg-type]


def _declared(name: str, entry: Mapping[str, Any]) -> VariantSpec:
    """The declaration of a variant, as far as it says what is moved."""
    if "declared" in entry:
        return VariantSpec(name, **{key: entry["declared"][key] for key in DECLARED})
    # label@backend where two backends ran side by side
    try:
        spec = load(name.partition("@")[0])
    except ConfigError as error:
        raise HarnessError(f"manifest: {name}: does not say what it declared, and {error}") from None
    if spec.sites != entry["requested"]["sites"]:
        raise HarnessError(f"manifest: {name}: does not say what it declared, and its file has changed since")
    return spec
