"""What must not change a single bit: other slots, other heads, rejected drafts, the time of a fold, who else reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import MAKERS, SHAPE, bf16, decode, design, draw, engine, same, start, windows

from harness.arithmetic import PRODUCTS, SITES
from harness.compiled.codes import unsupported
from harness.config import PrecisionConfig, RingConfig
from harness.precision import FORMATS
from harness.reference.emulated import Emulated
from harness.reference.inverse import INVERSES
from harness.tokens import Tokens
from harness.variants import VariantSpec, load, names
from harness.window import Step, Windows

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("engine")
OWN, FP32 = PrecisionConfig(), PrecisionConfig(base="fp32")
STOCHASTIC = PrecisionConfig(sites={"step": "bf16:stochastic", "checkpoint": "bf16:stochastic"})
ROUNDED = [*names(), "decode"]
# designs whose fold may be put off, and covers records only
DEFERRED = [n for n in names() if load(n).fold_when is None and not load(n).fold_current]
REPLAY = replace(load("exact_recurrent"), name="replay", fold="replay", flush_at=None, fold_when=None)


def spec_of(name: str) -> VariantSpec:
    return replace(load("exact_fold"), name="decode", fold_current=True) if name == "decode" else load(name)


def made(name: str, ring: RingConfig | None = None, precision: PrecisionConfig = OWN) -> Emulated:
    return design(spec_of(name), ring, precision)


def case(seed: int, steps: int, slots: int, m: int) -> tuple[torch.Tensor, Tokens, np.ndarray, np.ndarray]:
    """Initial states, bf16 tokens, ragged lengths with idle slots, accepts."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, m + 1, (steps, slots))
    lengths[lengths.sum(1) == 0, 0] = 1
    accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
    return start(rng, slots), bf16(draw(rng, steps, slots, m, resets=(-160.0,))), lengths, accepted


@pytest.mark.parametrize("ring", [RingConfig(16, 4), RingConfig(8, 1), RingConfig(32, 8, 3, "commit")], ids=str)
@pytest.mark.parametrize("spec", ["exact_fold", REPLAY], ids=["exact_fold", "replay"])
def test_a_closed_loop_fold_is_the_recurrent_state(spec: Any, ring: RingConfig) -> None:
    """Faults: a replay that rounds elsewhere than the recurrence, or from k_hat, or keeps its step unrounded.

    Bit for bit, as both are one code path on an fp32 step and checkpoint, from inputs the bf16 records hold exactly.
    """
    initial, tokens, lengths, accepted = case(1, 24, 3, ring.max_window)
    ready = windows(tokens, lengths)
    recurrent = decode(design("exact_recurrent", ring, OWN), initial, ready, accepted)
    replayed = decode(design(spec, ring, OWN), initial, ready, accepted)
    for mine, theirs in zip(replayed, recurrent, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine[2::3], theirs[2::3], strict=True))
        if spec is REPLAY:
            assert all(torch.equal(x, y) for x, y in zip(mine[1::3], theirs[1::3], strict=True))


@pytest.mark.parametrize("name", DEFERRED)
def test_folding_late_or_at_once_is_the_same_fold(name: str) -> None:
    """Faults: fold_when=commit folding other records, or in another order, than the flagged slot's next verify."""
    initial, tokens, lengths, accepted = case(2, 28, 3, 4)
    ready = windows(tokens, lengths)
    rings = (RingConfig(16, 4, 7, when) for when in ("next", "commit"))
    late, early = (decode(made(name, ring), initial, ready, accepted) for ring in rings)
    for mine, theirs in zip(late, early, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine[2::3], theirs[2::3], strict=True))
        assert all(torch.equal(x, y) for x, y in zip(mine[0::3], theirs[0::3], strict=True))


def junk_scale(maker: Emulated) -> float:
    """1e30 where every format of the design has the exponents for it, else what fp16 holds with room."""
    a = maker.arithmetic
    dots = [getattr(a.dots, p) for p in PRODUCTS]
    used = [getattr(a.sites, s) for s in SITES] + [r for d in dots for r in (d.left, d.right, d.accumulate)]
    formats = {r.format for r in used if not r.exact}
    return 1e30 if all(FORMATS[f].emax >= 127 for f in formats) else 1e2


@pytest.mark.parametrize("name", ROUNDED)
def test_rejected_drafts_leave_no_trace(name: str) -> None:
    """Faults: a rejected lane read by a product, folded, or left where the next window's history reads it."""
    maker = made(name)
    initial, tokens, lengths, accepted = case(3, 20, 3, maker.ring.max_window)
    if maker.ring.max_window == 1:
        # a window of one token has no draft to reject: what follows the bonus token is padding
        return
    rejected = torch.from_numpy(np.arange(tokens.g.shape[2]) >= accepted[..., None])

    def junk(scale: float, g: float, beta: float) -> Windows:
        values = {"q": scale, "k": -scale, "v": scale, "g": g, "beta": beta}
        fill = {n: getattr(tokens, n) for n in values}
        masks = {n: rejected.view(*rejected.shape, *(1,) * (x.ndim - 3)) for n, x in fill.items()}
        return windows(Tokens(**{n: fill[n].masked_fill(masks[n], values[n]) for n in fill}), lengths)

    plain = decode(maker, initial, windows(tokens, lengths), accepted)
    for scale, g, beta in ((junk_scale(maker), -200.0, 2.0), (0.0, 0.0, 0.0), (1e-30, 0.0, 1.0)):
        assert same(decode(maker, initial, junk(scale, g, beta), accepted), plain), (scale, g, beta)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_slot_does_not_know_its_batch(name: str) -> None:
    """Faults: padding that changes a sum, a neighbour's count, base or flag used, a fold of slots that need none."""
    maker = made(name)
    initial, tokens, lengths, accepted = case(4, 20, 3, maker.ring.max_window)
    together = decode(maker, initial, windows(tokens, lengths), accepted)
    for b in range(3):
        at = np.flatnonzero(lengths[:, b])
        ready = windows(tokens.map(lambda x, at=at, b=b: x[at, b : b + 1]), lengths[at, b : b + 1])
        alone = decode(maker, initial[b : b + 1], ready, accepted[at, b : b + 1])
        assert same(alone, [together[b]]), f"slot {b}"


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("ring", [RingConfig(16, 4), RingConfig(32, 8, 3, "commit")], ids=str)
def test_the_engines_agree(name: str, ring: RingConfig) -> None:
    """Faults: a rounding missing, doubled or of another mode in a compiled step; a cursor read at another time.

    Outputs and kept states bit for bit; what is served is read unrounded, and fp64 sums may be taken in any order.
    """
    torch_design = made(name, ring)
    if why := unsupported(torch_design.spec, torch_design.arithmetic):
        pytest.skip(f"{name} is not compiled: {why}")
    other = MAKERS["compiled"](torch_design.spec, torch_design.ring, torch_design.arithmetic)
    initial, tokens, lengths, accepted = case(10, 24, 3, torch_design.ring.max_window)
    ready = windows(tokens, lengths)
    mine, theirs = (decode(maker, initial, ready, accepted) for maker in (torch_design, other))
    for x, y in zip(mine, theirs, strict=True):
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)) if i % 3 != 1)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(x[1::3], y[1::3], strict=True))


@pytest.mark.parametrize("name", ["exact_recurrent", "exact_fold", "chunked_bf16"])
def test_stochastic_rounding_is_keyed(name: str) -> None:
    """Faults: a generator advanced by whoever reads or folds first; a key without slot, head or token count."""
    maker = made(name, precision=STOCHASTIC)
    initial, tokens, lengths, accepted = case(5, 16, 3, 4)
    ready = windows(tokens, lengths)
    together = decode(maker, initial, ready, accepted, seed=40)

    def reader(state: Any, i: int) -> None:
        for slots in ([0], [2, 1], [0, 1, 2]):
            for which in ("kept", "served", "kept"):
                maker.read(state, which, slots)

    assert same(decode(maker, initial, ready, accepted, seed=40, also=reader), together)
    assert not same(decode(maker, initial, ready, accepted, seed=41), together)
    for b in range(3):
        at = np.flatnonzero(lengths[:, b])
        alone = windows(tokens.map(lambda x, at=at, b=b: x[at, b : b + 1]), lengths[at, b : b + 1])
        assert same(decode(maker, initial[b : b + 1], alone, accepted[at, b : b + 1], seed=40 + b), [together[b]])


@pytest.mark.parametrize("precision", [OWN, STOCHASTIC], ids=["own", "stochastic"])
@pytest.mark.parametrize("name", DEFERRED)
def test_kept_is_what_the_next_fold_stores(name: str, precision: PrecisionConfig) -> None:
    """Faults: `kept` read without the checkpoint's rounding, under another key, or changing what it reads."""
    maker = made(name, RingConfig(16, 4, 6), precision)
    initial, tokens, lengths, accepted = case(6, 30, 3, 4)
    kept: dict[int, torch.Tensor] = {}

    def watch(state: Any, i: int) -> None:
        for slot in range(3):
            if lengths[i, slot] and slot in kept:
                assert torch.equal(state.checkpoint[slot], kept.pop(slot))
            if state.cursors.is_flush[slot]:
                kept[slot] = maker.read(state, "kept", [slot])[0].clone()
                folds.append(slot)

    folds: list[int] = []
    decode(maker, initial, windows(tokens, lengths), accepted, also=watch)
    assert len(folds) > 6


def test_equal_draws_need_equal_seeds_only() -> None:
    """Fault: slots of one seed that differ, or of different seeds that agree: eight seeds are eight slots."""
    maker = made("exact_recurrent", precision=STOCHASTIC)
    initial, tokens, _, _ = case(7, 4, 1, 4)
    twice = tokens.map(lambda x: torch.cat((x, x), 1))
    both = decode(maker, torch.cat((initial, initial)), windows(twice, np.full((4, 2), 4)), np.full((4, 2), 4))
    assert not torch.equal(both[0][1], both[1][1])
    one = decode(maker, initial, windows(tokens, np.full((4, 1), 4)), np.full((4, 1), 4), seed=1)
    assert same(one, [both[1]])


@pytest.mark.parametrize("name", ["exact_recurrent", "exact_fold", "chunked_bf16"])
def test_heads_and_tokens_of_one_input_draw_apart(name: str) -> None:
    """Faults: a key that leaves out the head, or the token count: then heads that are given the same round the same,
    and so does one that is given the same again."""
    maker, m = made(name, RingConfig(16, 1, 1, "commit"), STOCHASTIC), 8
    initial, tokens, _, _ = case(12, m, 1, 1)
    # every head and every step like the first
    again = tokens.map(lambda x: x[:1, :, :, :1].expand_as(x).clone())
    kept: list[torch.Tensor] = []

    def start_over(state: Any, i: int) -> None:
        kept.append(state.checkpoint[0].clone())
        state.checkpoint[:] = alike
        state.operand = None

    alike = initial[:, :1].expand_as(initial).clone()
    decode(maker, alike.clone(), windows(again, np.full((m, 1), 1)), np.full((m, 1), 1), also=start_over)
    states = torch.stack(kept).flatten(2).flatten(0, 1)
    assert len(states.unique(dim=0)) == len(states) == m * SHAPE.HV


def test_windows_of_other_batches_are_the_same_windows() -> None:
    """Fault: a value computed for some hundred windows at once that depends on how many there are."""
    initial, tokens, lengths, accepted = case(8, 12, 2, 4)
    for name in ("chunked_bf16", "exact_fold", "null_arm"):
        maker = made(name)
        whole, parts = decode(maker, initial, windows(tokens, lengths), accepted), [[], []]
        state = maker.create(SHAPE, 2, initial)
        for i in range(12):
            step = Step(windows(tokens.map(lambda x, i=i: x[i : i + 1]), lengths[i : i + 1]), 0)
            result = maker.verify(state, step)
            maker.commit(state, step.slots, accepted[i][step.slots].tolist())
            for slot in step.slots:
                states = [maker.read(state, which, [slot])[0].clone() for which in ("served", "kept")]
                parts[slot] += [result.o[slot, :, :, : accepted[i, slot]].clone(), *states]
        assert same(parts, whole), name


ONE_CHANGE: dict[str, dict[str, Any]] = {
    **{f"site {s}": {"precision": replace(FP32, sites={s: "bf16"})} for s in SITES},
    **{f"product {p}": {"precision": replace(FP32, products={p: "bf16"})} for p in PRODUCTS},
    **{f"{k}: {v}": {"conventions": {k: v}} for k, v in {"eps": 1e-2, "eps_at": "mean", "beta": "bf16"}.items()},
    **{f"inverse: {i}": {"inverse": i} for i in INVERSES},
}


@pytest.mark.parametrize("verify", ["window", "tokens"])
def test_designs_on_the_same_windows_do_not_mix(verify: str) -> None:
    """Fault: a quantity computed once for all designs under a key that leaves out what it depends on."""
    initial, tokens, lengths, accepted = case(9, 4, 1, 4)
    plain = VariantSpec(name="plain", verify=verify, fold="replay")
    shared, wrong, changed = windows(tokens, lengths), [], 0
    first = decode(design(plain, precision=FP32), initial, shared, accepted)
    for name, change in ONE_CHANGE.items():
        keys = {k: v for k, v in change.items() if k != "precision"}
        maker = design(replace(plain, **keys), precision=change.get("precision", FP32))
        alone = decode(maker, initial, windows(tokens, lengths), accepted)
        changed += not same(alone, first)
        if not same(decode(maker, initial, shared, accepted), alone):
            wrong.append(name)
    assert not wrong
    assert changed > 10
