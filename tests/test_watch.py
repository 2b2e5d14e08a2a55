"""Where a design leaves the finite numbers: overflows planted at a known site, step, slot and head.

Value heads of one key head share products, so a head whose neighbour overflows may be listed too; nobody asks for the
stage of a head whose results are finite, and the tests allow for that alone.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SHAPE, design, draw, start, windows

from harness.config import PrecisionConfig, RingConfig
from harness.reference.emulated import Emulated
from harness.tokens import Tokens
from harness.watch import Log, first_nonfinite, watched
from harness.window import Step

STEPS, M = 8, 4
Stages = dict[tuple[int, int], str]


def plain(slots: int = 2, steps: int = STEPS) -> Tokens:
    tokens = draw(np.random.default_rng(0), steps, slots, M)
    return replace(tokens, g=tokens.g.clamp(min=-0.5), beta=tokens.beta.clamp(min=0.1))


def stages(
    name: str, tokens: Tokens, sites: dict[str, str], accepted: Any = 3, scale: float = 1.0, **products: str
) -> Stages:
    """What the watch finds for a design with some sites and products replaced, twice on the same windows."""
    precision = PrecisionConfig(base="fp32", sites=sites, products=products)
    maker = design(name, RingConfig(16, M), precision)
    steps, slots = tokens.g.shape[:2]
    lengths = np.full((steps, slots), M)
    block = SimpleNamespace(accepted=np.broadcast_to(np.asarray(accepted), lengths.shape))
    initial = scale * start(np.random.default_rng(1), slots)
    return first_nonfinite(maker, maker.create(SHAPE, slots, initial), windows(tokens, lengths), block)


def only(found: Stages, slot: int, heads: list[int], site: str) -> None:
    """The heads have the site, and nothing outside their key head is listed."""
    assert {h: found.get((slot, h)) for h in heads} == dict.fromkeys(heads, site)
    groups = {h // SHAPE.group for h in heads}
    assert {(s, h // SHAPE.group) for s, h in found} <= {(slot, k) for k in groups}


def test_nothing_is_found_where_all_is_finite() -> None:
    """Fault: infinities that belong there, as those of a causal mask, taken for an overflow."""
    for name in ("chunked_fp32", "exact_fold", "exact_recurrent"):
        assert stages(name, plain(), {}) == {}


@pytest.mark.parametrize("gate", [-np.inf, -160.0])
def test_a_reset_is_no_overflow(gate: float) -> None:
    """Fault: the legal log gate of -inf, or its running sum, named as where a design broke."""
    tokens = plain()
    tokens.g[3, 1, 0, 4] = gate
    assert stages("exact_recurrent", tokens, {}) == {}


@pytest.mark.parametrize(
    ("name", "field", "heads", "site"),
    [
        ("chunked_fp32", "v", [4], "store_d"),
        ("chunked_fp32", "v", [4], "rhs"),
        ("chunked_fp32", "v", [4], "d"),
        ("chunked_fp32", "v", [4], "output"),
        ("exact_fold", "v", [4], "store_v"),
        ("exact_fold", "k", [3, 4, 5], "store_k"),
        ("exact_recurrent", "v", [4], "decayed"),
        ("exact_recurrent", "v", [4], "step"),
    ],
)
def test_an_fp16_overflow_is_named(name: str, field: str, heads: list[int], site: str) -> None:
    """Faults: the site after it named, where inf became NaN; another slot or head; a key head's value heads missed."""
    tokens = plain()
    getattr(tokens, field)[3, 1, 0, 4 if field == "v" else 1] *= 1e7
    only(stages(name, tokens, {site: "fp16"}), 1, heads, site)


def test_an_operand_that_overflows_is_its_product() -> None:
    """Fault: operands rounded inside a product looked at by nobody."""
    found = stages("chunked_fp32", plain(1), {}, scale=1e6, state="fp16")
    assert found == {(0, h): "dot.state" for h in range(6)}


@pytest.mark.parametrize("steps", [8, 20])
def test_a_fold_of_some_slots_is_seen(steps: int) -> None:
    """Fault: results of a fold, which holds the flagged slots only, matched with none, or with a slot, head or step
    that the sizes suggest: 20 steps * 2 slots are 40 value rows."""
    tokens = plain(steps=steps)
    tokens.v[0, 1, 0, 4] *= 1e7
    accepted = np.tile([1, 4], (steps, 1))
    only(stages("chunked_fp32", tokens, {"checkpoint": "fp16"}, accepted), 1, [4], "checkpoint")


def test_the_earliest_step_wins() -> None:
    """Fault: what is computed for all windows at once taken for earlier than what happens step by step."""
    tokens = plain(1)
    tokens.v[2, 0, 0, 4] *= 1e7
    tokens.k[5, 0, 1, 1] *= 1e60
    sites = {"store_v": "fp16", "store_k": "fp16"}
    found = stages("exact_fold", tokens, sites)
    assert found[0, 4] == "store_v" and found[0, 3] in ("store_k", "dot.recurrent")
    tokens.k[5, 0, 1, 1] *= 1e-60
    tokens.k[1, 0, 1, 1] *= 1e60
    assert stages("exact_fold", tokens, sites)[0, 4] == "store_k"


def test_a_difference_of_resets_is_the_decay() -> None:
    """Fault: -inf - -inf, the known end of a chunked kernel, named by the gate or by a product it spreads through."""
    tokens = plain(1)
    tokens.g[5, 0, 1, :3] = -np.inf
    only(stages("chunked_fp32", tokens, {}), 0, [0, 1, 2], "decay")


def test_a_second_look_sees_the_same() -> None:
    """Fault: quantities of the windows kept from the first look, so that the next arm's overflow has another name."""
    tokens = plain(1)
    tokens.k[3, 0, 0, 1] *= 1e7
    maker = design("exact_fold", RingConfig(16, M), PrecisionConfig(base="fp32", sites={"store_k": "fp16"}))
    ready, block = windows(tokens, np.full((STEPS, 1), M)), SimpleNamespace(accepted=np.full((STEPS, 1), 3))
    state = maker.create(SHAPE, 1, start(np.random.default_rng(1), 1))
    looks = [first_nonfinite(maker, state.clone(), ready, block) for _ in range(2)]
    for found in looks:
        only(found, 0, [3, 4, 5], "store_k")


def test_rejected_drafts_are_nobodys_first_stage() -> None:
    """Fault: an overflow in a draft that is never committed named as the cause of a later one."""
    tokens = plain(1)
    tokens.v[1, 0, 3, 4] *= 1e7
    tokens.k[5, 0, 1, 1] *= 1e7
    assert stages("exact_fold", tokens, {"store_v": "fp16", "store_k": "fp16"})[0, 4] == "store_k"


@pytest.mark.parametrize("name", ["chunked_bf16", "chunked_tf32", "exact_fold", "null_arm"])
def test_watching_changes_no_bit(name: str) -> None:
    """Fault: a rounding skipped or doubled under watch, so that the block run again is another one."""
    tokens = plain()
    maker = design(name, RingConfig(16, M), PrecisionConfig())
    other = Emulated(maker.spec, maker.ring, watched(maker.arithmetic, Log(SHAPE, 2, STEPS)))
    ready = windows(tokens, np.full((STEPS, 2), M))
    states = [x.create(SHAPE, 2, start(np.random.default_rng(1), 2)) for x in (maker, other)]
    for i in range(STEPS):
        mine, theirs = (x.verify(s, Step(ready, i)) for x, s in zip((maker, other), states, strict=True))
        assert torch.equal(mine.o, theirs.o)
        for x, s in zip((maker, other), states, strict=True):
            x.commit(s, [0, 1], [2, 3])
        assert torch.equal(maker.read(states[0], "kept", [0, 1]), other.read(states[1], "kept", [0, 1]))
