"""In exact arithmetic every design is the recurrence, whatever its verify, fold, records, inverse, ring or accepts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import EXACT, RESETS, SHAPE, Beside, close, design, draw, engine, fuzz, recurrence, start, windows

from harness.arithmetic import Arithmetic
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.reference.inverse import INVERSES
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec, names
from harness.window import Windows

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("engine")
RINGS = (
    RingConfig(8, 3),
    RingConfig(16, 4),
    RingConfig(16, 2, 5),
    RingConfig(16, 5, 1, "commit"),
    RingConfig(4, 1),
    RingConfig(32, 8, 12, "commit"),
    RingConfig(64, 7, 41),
)
SNAPSHOT = {"verify": "tokens", "fold": "snapshot", "flush_at": 1, "fold_when": "commit"}
# those cut short have a test of their own
WHOLE = [i for i, inverse in INVERSES.items() if inverse.order == np.inf]
# what is declared here need not ship: every verify x fold x record x inverse of the space
DECLARED = {
    **{f"window, {i}": {"inverse": i} for i in WHOLE},
    **{f"window, replay, {i}": {"inverse": i, "fold": "replay"} for i in WHOLE},
    **{f"window, cumulative, {i}": {"inverse": i, "gate_record": "cumulative"} for i in WHOLE},
    "tokens, product": {"verify": "tokens"},
    "tokens, cumulative": {"verify": "tokens", "gate_record": "cumulative"},
    "tokens, replay": {"verify": "tokens", "fold": "replay"},
    "snapshots": SNAPSHOT,
    "fold every commit": {"flush_at": 1, "fold_when": "commit"},
    "decode": {"fold_current": True},
    "decode, replay": {"fold_current": True, "fold": "replay"},
    "decode, cumulative": {"fold_current": True, "gate_record": "cumulative"},
    "decode, tokens": {"fold_current": True, "verify": "tokens", "fold": "replay"},
}
SPECS = {name: VariantSpec(name=name, **keys) for name, keys in DECLARED.items()}
# inf - inf is not a number: a cumulative record, which is read as a difference of two sums, cannot hold a reset to
# -inf. One of -160 it survives here, as fp64 keeps the 1e-14 that the difference needs
FINITE = (-160.0,)


def rings(spec: VariantSpec | str, *wanted: RingConfig) -> list[RingConfig]:
    """Those of the rings `wanted` that the design's own flush rule allows, each once."""
    legal = {}
    for ring in wanted:
        try:
            legal[design(spec, ring).ring] = ring
        except ConfigError:
            continue
    return list(legal.values())


def resets(spec: VariantSpec) -> tuple[float, ...]:
    return FINITE if spec.gate_record == "cumulative" else RESETS


@pytest.mark.parametrize("name", names())
def test_shipped_designs_are_the_recurrence(name: str) -> None:
    """Faults: any in a cursor, a record, a fold or a verify; a variant file whose exact form is another function."""
    for seed, ring in enumerate(rings(name, *RINGS[:5])):
        maker = design(name, ring)
        fuzz(maker, seed, steps=30, resets=resets(maker.spec))


@pytest.mark.parametrize("blocks", ["exact/1", "exact/3", "exact/5s"])
@pytest.mark.parametrize("inverse", ["rhs_solve", "substitution", "neumann"])
def test_sums_taken_in_blocks_are_the_same_sums(blocks: str, inverse: str) -> None:
    """Fault: a product whose accumulator takes fewer terms at once than it sums gets another shape, or other terms."""
    spec = VariantSpec(name="blocks", inverse=inverse, dots={"default": blocks})
    fuzz(design(spec, precision=None), 0, steps=10, resets=RESETS)


@pytest.mark.parametrize("name", SPECS)
def test_declared_designs_are_the_recurrence(name: str) -> None:
    """Faults: a combination of the declared space that no shipped variant uses and that is wrong."""
    for seed, ring in enumerate(rings(SPECS[name], *RINGS[:3])):
        fuzz(design(SPECS[name], ring), seed, steps=20, resets=resets(SPECS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [*names(), *SPECS])
def test_long_fuzz(name: str, seed: int) -> None:
    """Faults: those of the short fuzz that need a rare order of events."""
    spec = SPECS.get(name, name)
    for ring in rings(spec, *RINGS):
        maker = design(spec, ring)
        fuzz(maker, 100 + seed, steps=120, slots=5, resets=resets(maker.spec))


@pytest.mark.parametrize("fold", ["product", "replay"])
@pytest.mark.parametrize("fold_when", ["next", "commit"])
def test_no_legal_flush_rule_changes_a_result(fold: str, fold_when: str) -> None:
    """Faults: a fold one record short or long at some history length; a ring that overflows at its last legal flag."""
    spec = VariantSpec(name=f"{fold}, {fold_when}", fold=fold, fold_when=fold_when)
    for length, window in ((8, 2), (16, 4), (32, 3)):
        last = length - window * (2 if fold_when == "next" else 1) + 1
        for flush_at in sorted({1, 2, last // 2, last - 1, last}):
            fuzz(design(spec, RingConfig(length, window, flush_at)), flush_at, steps=12, slots=2)


@pytest.mark.parametrize("name", ["window, substitution", "window, replay, substitution", "tokens, replay"])
def test_no_cache_base_changes_a_result(name: str) -> None:
    """Faults: a row index without the wrap, in the write or in the read; a mask of L instead of L-1."""
    rng = np.random.default_rng(3)
    initial, table = start(rng, 1), (draw(rng, 9, 1, 4), np.full((9, 1), 4))
    ready, seen = windows(*table), []
    for base in range(16):
        pair = Beside(design(SPECS[name], RingConfig(16, 4)), initial)
        pair.state.cursors.cache_base[0] = base
        for i, n in enumerate((1, 2, 3, 4, 4, 4, 3, 1, 2)):
            pair.step(table, ready, i, {0: n})
        seen.append(pair.design.read(pair.state, "kept", [0]))
    # the same sums in the same order: not even the last bit may know where the ring begins
    assert all(torch.equal(x, seen[0]) for x in seen)


@pytest.mark.parametrize("sites", [("store_d", "store_k_hat"), ("store_d",), ("store_k_hat",)], ids=" ".join)
@pytest.mark.parametrize("fold_when", ["next", "commit"])
def test_two_part_records_are_the_recurrence(sites: tuple[str, ...], fold_when: str) -> None:
    """Faults: a low part not stored, not read by verify or fold, left behind by a copy, or looked for where only the
    other field has one. Two fp32 numbers hold 48 bits, 2e-15; one alone is off by 6e-8."""
    spec = VariantSpec(name="hi + lo", fold_when=fold_when)
    precision = replace(EXACT, sites=dict.fromkeys(sites, "fp32x2"))
    maker = design(spec, RingConfig(16, 4), precision)
    assert {name for name in maker.records if name.endswith("_lo")} == {f"{s.removeprefix('store_')}_lo" for s in sites}
    fuzz(maker, 5)
    with pytest.raises(AssertionError):
        fuzz(design(replace(spec, history_read="hi"), RingConfig(16, 4), precision), 5)


@pytest.mark.parametrize("inverse", WHOLE)
@pytest.mark.parametrize("window", [4, 8, 32])
def test_inverses_on_coherent_keys(inverse: str, window: int) -> None:
    """Faults: a series one power short; a row or column left out, which random keys hide as A is small.

    A solve is right to 1e-12; a series may lose what its powers of A reach, c u max|A|^p with c = window for the sums.
    """
    rng = np.random.default_rng(window)
    tokens = draw(rng, 1, 2, window)
    tokens.k = torch.from_numpy(rng.standard_normal((1, 2, 1, SHAPE.H, SHAPE.K))) + 0.1 * tokens.k
    tokens.g, tokens.beta = tokens.g * 0 - 1e-3, tokens.beta * 0 + 0.97
    A = Windows(tokens, np.full((1, 2), window), SHAPE).scores(Arithmetic())[0].abs()
    power, largest = A, A.max().item()
    for _ in range(window - 2):
        power = power @ A
        largest = max(largest, power.max().item())
    tolerance = 1e-12 if inverse in ("substitution", "rhs_solve") else max(1e-12, window * 2.0**-53 * largest)
    assert tolerance < 1 or window == 32
    maker = design(VariantSpec(name=inverse, inverse=inverse), RingConfig(64, window, 1))
    pair = Beside(maker, start(rng, 2), tolerance=tolerance)
    table = tokens, np.full((1, 2), window)
    pair.step(table, windows(*table), 0, {0: window, 1: window // 2})


@pytest.mark.parametrize("inverse", [i for i in INVERSES if i not in WHOLE])
def test_a_truncated_inverse_is_exact_as_far_as_it_reaches(inverse: str) -> None:
    """Faults: an order said to reach further than it does; a truncation that no state shows."""
    reach = int(INVERSES[inverse].order) + 1
    for window in (reach, reach + 1):
        maker = design(VariantSpec(name=inverse, inverse=inverse), RingConfig(32, window, 1))
        if window == reach:
            fuzz(maker, 1, steps=20, resets=RESETS)
            continue
        with pytest.raises(AssertionError, match="off by"):
            fuzz(maker, 1, steps=20, resets=RESETS)


@pytest.mark.parametrize("name", [*names(), *SPECS])
def test_a_forced_fold_at_every_history_length(name: str) -> None:
    """Faults: a fold of no records, forced on a slot that has just been reset or folded; a flag that stays up."""
    rng = np.random.default_rng(13)
    maker = design(SPECS.get(name, name), RingConfig(16, 4))
    m = maker.ring.max_window
    table = draw(rng, 12, 1, m), np.full((12, 1), m)
    ready, initial = windows(*table), start(rng, 1)
    for late in range(4):
        pair = Beside(maker, initial)
        for i in range(late + 2):
            if i == late:
                pair.state.cursors.force_flush([0])
            pair.step(table, ready, i, {0: 1})
            assert not pair.state.cursors.is_flush[0] or pair.state.cursors.write_pos[0] >= maker.ring.flush_at


def test_heads_in_any_ratio() -> None:
    """Faults: value head i read from key head i, or i mod H; a group of one or of all special-cased wrongly."""
    for H, HV in ((1, 1), (1, 4), (3, 3), (2, 4)):
        for name in ("window, substitution", "tokens, replay", "snapshots"):
            fuzz(design(SPECS[name], RingConfig(16, 4)), 7, steps=12, slots=2, shape=Shape(H, HV, 3, 5))


def test_prefix_snapshots_of_every_length() -> None:
    """Faults: a prefix off by one; a snapshot that takes the source's cursors along; a source that is disturbed."""
    rng = np.random.default_rng(11)
    table = draw(rng, 2, 2, 4), np.array([[4, 0], [4, 0]])
    for name in ("window, substitution", "window, replay, substitution", "window, cumulative, substitution"):
        pair = Beside(design(SPECS[name], RingConfig(16, 4)), start(rng, 2))
        for i in range(2):
            pair.step(table, windows(*table), i, {0: 4})
        past = pair.truth[0]
        for prefix in range(9):
            pair.design.snapshot(pair.state, 0, 1, prefix)
            assert pair.state.cursors.write_pos == [8, 0]
            close("snapshot", pair.design.read(pair.state, "served", [1])[0], past[prefix])
            close("source", pair.design.read(pair.state, "kept", [0])[0], past[-1])


def test_the_loop_itself() -> None:
    """Faults of the judge: by hand, S = 2, k = 3, v = 5, alpha = 1/2, beta = 1/4, q = -7, one head of one element."""
    numbers = ([[[-7.0]]], [[[3.0]]], [[[5.0]]], [[np.log(0.5)]], [[0.25]])
    one = Tokens(*(torch.tensor(x, dtype=torch.float64) for x in numbers))
    states, o, d = recurrence(np.full((1, 1, 1), 2.0), one)
    k_hat, q_hat = 3 / np.sqrt(9 + 1e-6), -7 / np.sqrt(49 + 1e-6)
    expected = 0.25 * (5 - 1.0 * k_hat)
    close("d", d.ravel(), [expected], 1e-15)
    close("S", states[1].ravel(), [1.0 + expected * k_hat], 1e-15)
    close("o", o.ravel(), [(1.0 + expected * k_hat) * q_hat], 1e-15)


def test_exact_precision_is_exact() -> None:
    """Fault: `exact` that leaves one site of a variant rounding, so that identities hold only by luck of scale."""
    for name in names():
        shown = design(name, precision=PrecisionConfig(base="exact")).arithmetic.shown()
        assert set(shown.values()) == {"exact"}, name
