"""What a design costs: bytes by hand, from a declaration, a configuration and a manifest alike."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness import cost
from harness.acceptance import accepted, chances
from harness.arithmetic import Rounding
from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig, PrecisionConfig, RingConfig
from harness.designs import designs
from harness.errors import HarnessError
from harness.experiments.drift import formats_of
from harness.kernels.options import options
from harness.provenance import plain
from harness.ring import Cursors, RingSpec
from harness.steady import steady
from harness.tokens import Shape
from harness.traffic import of_design, stated
from harness.variants import load, names

LAYER = ModelConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=16, rows=None)
STATE = 4 * 16 * 8
D, K_HAT, G = 4 * 16, 2 * 8, 4  # numbers of a record
STEPS = 1200
GOLDEN = AcceptanceConfig("fixed", sequence=[1, 2, 3, 4])
PUBLISHED = Path(__file__).parents[1] / "results" / "h200_qwen3_5_35b_a3b_loop24" / "manifest.json"


def config(*variants: str, **changes) -> Config:
    return replace(Config(model=LAYER, acceptance=GOLDEN, variants=list(variants)), **changes)


def manifest(made: Config) -> dict:
    """What a run of it would leave, through JSON."""
    entries = {d.spec.name: formats_of(d, "cpu") for d in designs(made)}
    return json.loads(json.dumps(plain({"config": made, "variants": entries})))


@lru_cache
def moved(ring: RingSpec, w: int, flag: bool, m: int, n: int) -> tuple[int, bool, int]:
    """Where the cursors stand after a step, and whether its commit folds."""
    c = Cursors(ring, 1)
    c.write_pos[0], c.is_flush[0] = w, flag
    c.verify([0], [m])
    full = c.commit([0], [n])
    c.absorb(full)
    return c.write_pos[0], c.is_flush[0], len(full)


def naive(ring: RingSpec, decode: DecodeConfig, acceptance: AcceptanceConfig) -> tuple[np.ndarray, float]:
    """Shares of the history lengths, and folds a step: chances passed on through the cursors, seen for STEPS steps."""
    total, folds, state = np.zeros(ring.length + 1), 0.0, {(0, False): 1.0}
    lengths = range(1, decode.window + 1) if decode.ragged else [decode.window]
    for t in range(2 * STEPS):
        after: dict[tuple[int, bool], float] = {}
        seen = (t >= STEPS) / STEPS
        drawn = [(m, n, p / len(lengths)) for m in lengths for n, p in enumerate(chances(acceptance, m, t)) if p]
        for (w, flag), share in state.items():
            total[w] += share * seen
            folds += share * flag * seen
            for m, n, chance in drawn:
                w_after, flag_after, full = moved(ring, w, flag, m, n)
                folds += share * chance * full * seen
                after[w_after, flag_after] = after.get((w_after, flag_after), 0) + share * chance
        state = after
    return total, folds


CHAINS = {
    "golden": (RingSpec(16, 4), DecodeConfig(), GOLDEN),
    "uniform": (RingSpec(16, 4), DecodeConfig(), AcceptanceConfig()),
    "ragged": (RingSpec(16, 4), DecodeConfig(ragged=True), AcceptanceConfig("geometric", p=0.8)),
    "all, in circles": (RingSpec(32, 4), DecodeConfig(), AcceptanceConfig("all")),
    "at commit": (RingSpec(16, 4, 5, "commit"), DecodeConfig(window=3), AcceptanceConfig("geometric", p=0.5)),
    "every commit": (RingSpec(16, 4, 1, "commit"), DecodeConfig(), AcceptanceConfig()),
    "fixed and ragged": (RingSpec(16, 4), DecodeConfig(ragged=True), AcceptanceConfig("fixed", sequence=[4, 1])),
}


@pytest.mark.parametrize("case", CHAINS)
def test_the_mean_step_is_the_cursors(case):
    """Fault: a flush that keeps its history, a fold at commit missed, a chain in circles that never settles."""
    ring, decode, acceptance = CHAINS[case]
    found = steady(ring, decode, acceptance)
    shares, folds = naive(ring, decode, acceptance)
    mine = np.array([found.found.get(w, 0.0) for w in range(ring.length + 1)])
    # STEPS steps see a circle of c steps to c / STEPS, and none here is longer than 12; chance settles far below that
    assert np.abs(mine - shares).max() < 12 / STEPS and mine.sum() == pytest.approx(1, abs=1e-12)
    assert sum(found.flushed.values()) + sum(found.folded.values()) == pytest.approx(folds, abs=12 / STEPS)
    if case == "golden":
        # the trace of the design: 1, 3, 6, 10 and over
        assert found.found == pytest.approx(dict.fromkeys((1, 3, 6, 10), 0.25)) and set(found.flushed) == {10}
        assert found.committed == 2.5
    if case == "every commit":
        assert found.found == {0: 1} and found.folded == pytest.approx(dict.fromkeys((1, 2, 3, 4), 0.25))


@pytest.mark.parametrize("kind", ["uniform", "all", "none", "geometric", "fixed"])
def test_chances_are_those_of_the_draws(kind):
    """Fault: the last draft of a geometric window, which nothing cuts short, gets the chance of the others."""
    config = AcceptanceConfig(kind, p=0.7, sequence=[2, 9])
    t = np.arange(20000)
    for m in (1, 2, 4):
        p = chances(config, m, 1)
        share = np.bincount(accepted(config, 0, 0, t, np.full_like(t, m), 1), minlength=m + 1) / len(t)
        # five standard deviations of a share of 20,000 draws
        assert p.sum() == pytest.approx(1) and np.abs(p - share).max() <= 5 * 0.5 / len(t) ** 0.5
        assert ((p > 0) == (share > 0)).all()


def test_bytes_of_a_design_are_those_worked_by_hand():
    """Fault: the fp64 carriers of an emulation counted in place of bf16; a ring counted without its length."""
    found = cost.of_manifest(manifest(config("chunked_bf16")))["chunked_bf16"]
    record = 2 * D + 2 * K_HAT + 4 * G
    assert found["bytes_held"] == 2 * STATE + 16 * record
    # q, k, v in two bytes, g and beta in four, the output in two, and four records
    window = 4 * (2 * (2 * 16 + 64) + 4 * 2 * 4 + 2 * 64 + record)
    # histories of 1, 3, 6 and 10, where the last is folded: ten tokens
    assert found["bytes_token"] == pytest.approx((5 * 2 * STATE + 4 * window + 20 * record) / 10)


def test_both_parts_of_a_record_are_held_and_folded_and_one_is_read():
    """Fault: x2 counted once; a verify of the high halves charged for both."""
    found = cost.of_config(config("compensated_fold"))["compensated_fold"]
    high = 2 * D + 2 * K_HAT
    assert found["bytes_held"] == 4 * STATE + 16 * (2 * high + 4 * G)
    window = 4 * (2 * (2 * 16 + 64) + 4 * 2 * 4 + 2 * 64 + 2 * high + 4 * G)
    read = 10 * (high + 4 * G) + 10 * (2 * high + 4 * G)
    assert found["bytes_token"] == pytest.approx((5 * 4 * STATE + 4 * window + read) / 10)


def test_a_state_per_draft_is_held_and_written():
    """Fault: snapshots held for free; or taken twice at a commit; or counted in the checkpoint's format."""
    own = PrecisionConfig(sites={"snapshot": "bf16"})
    found = cost.of_config(config("exact_recurrent", precision=own))["exact_recurrent"]
    assert found["bytes_held"] == 4 * STATE + 4 * 2 * STATE
    window = 4 * (2 * (2 * 16 + 64) + 4 * 2 * 4 + 2 * 64)
    # read the state, write four drafts; read a draft, write the state
    assert found["bytes_token"] == pytest.approx((4 * STATE + 4 * 2 * STATE + window + 2 * STATE + 4 * STATE) / 2.5)


def test_a_layer_costs_what_it_has_not_what_is_simulated():
    """Fault: model.rows=16 makes every design eight times cheaper, and every budget with it."""
    few = config("exact_fold", model=replace(LAYER, rows=2))
    assert cost.of_config(few) == cost.of_config(config("exact_fold"))
    assert cost.of_manifest(manifest(few)) == cost.of_config(few)


@pytest.mark.parametrize("name", names())
def test_a_declaration_a_manifest_and_a_kernel_cost_the_same(name):
    """Fault: two counts of one design, of which a search minimises one and a benchmark divides by the other."""
    ring = RingConfig(16, 1) if load(name).fold_current else RingConfig()
    made = config(name, ring=ring, acceptance=AcceptanceConfig(), decode=DecodeConfig(window=ring.max_window))
    assert cost.of_manifest(manifest(made)) == cost.of_config(made)
    (design,) = designs(made)
    formats = dict(options(design.spec, design.arithmetic).formats)
    kernel = SimpleNamespace(spec=design.spec, records=design.records, formats=formats)
    shape = Shape.of(LAYER)
    one, other = of_design(design, shape, 4), of_design(kernel, shape, 4)
    for flush in (False, True):
        assert one.verify(5, flush) == other.verify(5, flush)
    assert one.commit(3) == other.commit(3) and one.held(16, 4) == other.held(16, 4)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("exact", 8), ("fp32", 4), ("tf32", 4), ("fp16:zero", 2), ("bf16x2", 4), ("bf16:stochastic", 2), ("e4m3", 1)],
)
def test_a_format_takes_the_bytes_it_is_stored_in(text, nbytes):
    """Fault: tf32 counted as 19 bits, a rounding mode read as another format."""
    assert Rounding.parse("site", text).nbytes == nbytes


def test_a_site_beyond_the_stored_ones_costs_nothing():
    """Fault: what only passes through registers is charged for."""
    base = cost.of_config(config("chunked_bf16"))
    for site in ("step", "state_operand", "fold_d", "d", "gram"):
        assert cost.of_config(config("chunked_bf16", precision=PrecisionConfig(sites={site: "exact"}))) == base
    assert set(stated(vars(load("chunked_bf16").arithmetic().sites))) > {"checkpoint", "d", "d_lo", "k_hat", "g"}


def test_manifests_from_before_the_declaration_are_read_while_their_variant_stands():
    """Fault: published runs cannot be placed on a front; or an edited variant file answers for an old run."""
    old = json.loads(PUBLISHED.read_text())
    assert "declared" not in old["variants"]["exact_fold"]
    found = cost.of_manifest(old)
    assert found["chunked_bf16"]["bytes_token"] < 0.53 * found["chunked_fp32"]["bytes_token"]
    old["variants"]["exact_fold"]["requested"]["sites"]["checkpoint"] = "bf16"
    with pytest.raises(HarnessError, match="manifest: exact_fold: does not say what it declared"):
        cost.of_manifest(old)
    old["variants"] = {"elsewhere": old["variants"]["chunked_bf16"]}
    with pytest.raises(HarnessError, match="manifest: elsewhere: does not say"):
        cost.of_manifest(old)


def test_a_bandwidth_turns_bytes_into_microseconds():
    """Fault: seconds, or a bandwidth taken for gigabytes."""
    assert cost.us_token(4.4e6, 4.4e12) == pytest.approx(1)


def test_bytes_are_numbers_that_json_takes():
    """Fault: a NumPy number, at which the record of a job is lost."""
    found = cost.of_config(config("exact_fold", "kv_replay"))
    assert json.loads(json.dumps(found)) == found
