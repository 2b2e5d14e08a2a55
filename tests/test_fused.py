"""A block of launches does what the calls do, one step after the other, and sees what they see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bf16, draw, start, windows

from harness.arms import decode_block
from harness.config import Config, DecodeConfig, ModelConfig, RingConfig
from harness.errors import RingError
from harness.reference.calls import Seen
from harness.runner import Runner
from harness.schedule import Block, Grid
from harness.tokens import Shape
from harness.variants import VariantSpec, load

pytest.importorskip("triton")
from test_kernels import DECODE, DEFERRED, DEVICE, EVEN, KERNELS, RINGS, SMALL, made, ring_of, unless_quick
from test_measure import agree

from harness.kernels.design import Triton, TritonState

Ran = tuple[list[tuple[Block, Seen]], TritonState]
BLOCKS = ((4, None), (3, 2))  # steps, and the widest window where that is not the ring's


def block_of(rng: np.random.Generator, steps: int, widest: int) -> Block:
    """Ragged windows of three slots, one idle in the second step and one aborted in the third, and points of uneven
    number."""
    lengths = rng.integers(1, widest + 1, (steps, 3))
    lengths[1, 1] = 0
    accepted = np.where(lengths > 0, 1 + np.floor(rng.random(lengths.shape) * lengths), 0).astype(int)
    accepted[2, 2] = 0
    at = rng.random(lengths.shape) < (0.9, 0.3, 0.6)
    at[0] = False, False, True
    none = np.zeros(lengths.shape[1], dtype=int)
    return Block(np.zeros_like(lengths), lengths, accepted, Grid.of(at, accepted.cumsum(0), none, none))


def run(name: str | VariantSpec, ring: RingConfig, shape: Shape, fused: bool, spoil: Any = None) -> Ran:
    """Two blocks, the second of narrower windows, and the state at the end."""
    rng = np.random.default_rng(3)
    spec = load(name) if isinstance(name, str) else name
    ring = ring_of(spec, ring)
    maker = made(Triton, spec, ring)
    if not fused:
        maker.fused = None
    state, seen = maker.create(shape, 3, start(rng, 3, shape).to(DEVICE), device=DEVICE), []
    assert isinstance(state, TritonState)
    for steps, widest in BLOCKS:
        block = block_of(rng, steps, min(widest or ring.max_window, ring.max_window))
        tokens = bf16(draw(rng, steps, 3, int(block.lengths.max()), shape=shape))
        ready = windows(tokens.map(lambda x: x.to(DEVICE)), block.lengths, shape)
        exact = torch.from_numpy(rng.standard_normal((block.most, 3, shape.HV, shape.V, shape.K))).to(DEVICE)
        if spoil:
            spoil(state, exact)
        seen.append((block, decode_block(maker, state, ready, block, exact)))
    return seen, state


def compare(one: Ran, other: Ran) -> None:
    """Outputs, writes and records bit by bit, as the same kernels made them; errors as test_measure has them."""
    for (block, x), (_, y) in zip(one[0], other[0], strict=True):
        step, slot = np.nonzero(block.points >= 0)
        at = slot, block.points[step, slot]
        assert (x.history[at] == y.history[at]).all() and (x.folded[at] == y.folded[at]).all()
        agree(x.errors[at], y.errors[at])
        for b, n in enumerate(block.committed[0]):
            for mine, theirs in ((x.o, y.o), (x.d, y.d)):
                torch.testing.assert_close(mine[b, :n], theirs[b, :n], rtol=0, atol=0, equal_nan=True)
    mine, theirs = one[1], other[1]
    assert vars(mine.cursors) == vars(theirs.cursors)
    assert (mine.tokens, mine.version, mine.known) == (theirs.tokens, theirs.version, theirs.known)
    assert torch.equal(mine.on_device, theirs.on_device)
    torch.testing.assert_close(mine.checkpoint, theirs.checkpoint, rtol=0, atol=0, equal_nan=True)
    for name, rows in mine.records.items():
        torch.testing.assert_close(rows, theirs.records[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "ring", "shape"),
    [unless_quick(name, RINGS[0], SMALL) for name in KERNELS]
    + [unless_quick(name, RINGS[1], SMALL) for name in ("exact_fold", "chunked_bf16")]
    + [unless_quick("chunked_fp32", RINGS[0], EVEN), pytest.param(DEFERRED, RINGS[0], SMALL, id="deferred")],
)
def test_a_block_is_its_calls(name: str | VariantSpec, ring: RingConfig, shape: Shape) -> None:
    """Faults: a state read before the commit or after the next verify, an idle or aborted slot moved, a slot's error in
    another's row, a step's outputs written over the last one's, a cursor or count the host keeps wrong."""
    compare(run(name, ring, shape, True), run(name, ring, shape, False))


@pytest.mark.parametrize("name", ["chunked_bf16", "exact_recurrent"])
def test_a_head_that_is_no_number_stays_alone(name: str) -> None:
    """Faults: a NaN that a maximum passes over or that reaches the errors of another head."""

    def spoil(state: TritonState, exact: torch.Tensor) -> None:
        state.checkpoint[2, 1, 0, 0] = torch.nan

    one = run(name, RINGS[0], SMALL, True, spoil)
    block, seen = one[0][0]
    step, slot = np.nonzero(block.points >= 0)
    bad = np.isnan(seen.errors[slot, block.points[step, slot]])
    assert (bad == ((slot == 2)[:, None] & (np.arange(2) == 1))[..., None]).all() and bad.any()
    compare(one, run(name, RINGS[0], SMALL, False, spoil))


def test_a_block_is_planned_anew_for_designs_that_fold_their_token() -> None:
    """Faults: a plan of equal rings shared where cursors move otherwise; a folded token that a block may refuse."""
    rng = np.random.default_rng(5)
    block = block_of(rng, 6, 1)
    block.accepted[block.lengths > 0] = 1
    ready = windows(bf16(draw(rng, 6, 3, 1, shape=SMALL)).map(lambda x: x.to(DEVICE)), block.lengths, SMALL)
    exact = torch.ones(block.most, 3, 2, 5, 6, dtype=torch.float64, device=DEVICE)
    for fold_current in (False, True):
        maker = made(Triton, replace(load("chunked_fp32"), flush_at=3, fold_current=fold_current), DECODE)
        state = maker.create(SMALL, 3, start(rng, 3, SMALL).to(DEVICE), device=DEVICE)
        decode_block(maker, state, ready, block, exact)
        # five tokens of slot 1: three, then a flush with the fourth inside it or behind it
        assert (state.cursors.write_pos[1], state.cursors.cache_base[1]) == ((1, 0) if fold_current else (2, 3))
        assert isinstance(state, TritonState) and state.on_device[:2, 1].tolist() == [
            state.cursors.write_pos[1], state.cursors.cache_base[1]
        ]  # fmt: skip
    block.accepted[4, 1] = 0
    state = maker.create(SMALL, 3, start(rng, 3, SMALL).to(DEVICE), device=DEVICE)
    block.memo.clear()
    with pytest.raises(RingError, match="slot 1: its token is folded already"):
        decode_block(maker, state, ready, block, exact)


def test_kernels_take_over_behind_a_prefill() -> None:
    """Fault: a checkpoint handed over in the kernels' own format, which a new state refuses."""
    model = ModelConfig(key_heads=1, value_heads=1, key_dim=6, value_dim=5, rows=5)
    decode = DecodeConfig(tokens=16, prefill=66)
    config = Config(model=model, decode=decode, variants=["chunked_bf16"], backend=["triton", "emulated"])
    with torch.inference_mode():
        rows = {name: columns for block in Runner(config, device=DEVICE).run() for name, columns in block}
    mine, own = rows["chunked_bf16"], rows["chunked_bf16@emulated"]
    assert mine["tokens"].min() > 66
    # one flipped bf16 rounding is 2^-8 of an element
    np.testing.assert_allclose(mine["kept_fro"], own["kept_fro"], atol=2.0**-8)


def test_a_refused_block_has_done_nothing() -> None:
    """Faults: a refusal the calls make and the block does not; a launch before it."""
    rng, ring = np.random.default_rng(4), RINGS[0]
    maker = made(Triton, load("chunked_fp32"), ring)
    state = maker.create(SMALL, 3, start(rng, 3, SMALL).to(DEVICE), device=DEVICE)
    block = block_of(rng, 3, 4)
    ready = windows(bf16(draw(rng, 3, 3, 4, shape=SMALL)).map(lambda x: x.to(DEVICE)), block.lengths, SMALL)
    before = state.clone()
    exact = torch.empty(block.most, 3, 2, 5, 6, dtype=torch.float64, device=DEVICE)
    for spoil, word in (
        (lambda c: c.verify([0], [1]), "verify between verify and commit"),
        (lambda c: c.write_pos.__setitem__(1, 15), "leaves a ring of 16"),
    ):
        again = state.clone()
        spoil(again.cursors)
        with pytest.raises(RingError, match=word):
            decode_block(maker, again, ready, block, exact)
        assert torch.equal(again.checkpoint, before.checkpoint) and again.tokens == [0, 0, 0]
    block.accepted[1, 0] = 5
    with pytest.raises(RingError, match="5 tokens accepted of a window of"):
        decode_block(maker, state, ready, block, exact)
    assert vars(state.cursors) == vars(before.cursors) and state.version == before.version
