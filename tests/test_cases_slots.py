"""Public bug reports about cursors (family D) and slots, padding and empty windows (family E), as small inputs.

D is told in tokens: the state must be that of the tokens accepted so far, however rounds and windows fell.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, SHAPE, Beside, bf16, close, decode, design, draw, engine, recurrence, same, start, windows

from harness.config import PrecisionConfig, RingConfig
from harness.errors import RingError
from harness.reference.emulated import Emulated
from harness.variants import load, names
from harness.window import Step

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("engine")
OWN = PrecisionConfig()
NAMES = [n for n in names() if not load(n).fold_current]  # windows of more than one token


def rounds(name: str, ring: RingConfig, *counts: tuple[int, int]) -> Beside:
    """(tokens verified, tokens accepted) of successive steps, each compared with the recurrence."""
    rng = np.random.default_rng(len(counts))
    lengths = np.array([[m] for m, _ in counts])
    table = draw(rng, len(counts), 1, ring.max_window), lengths
    pair = Beside(design(name, ring), start(rng, 1))
    ready = windows(*table)
    for i, (_, n) in enumerate(counts):
        pair.step(table, ready, i, {0: n})
        assert pair.state.tokens[0] == sum(n for _, n in counts[: i + 1])
    return pair


@pytest.mark.parametrize("name", NAMES)
def test_d1_rounds_shorter_than_the_window(name: str) -> None:
    """Fault (turboquant#345): the checkpoint anchored at the start of the round, right only at equal lengths."""
    rounds(name, RingConfig(8, 4, 1), (4, 2), (2, 1), (4, 2), (2, 1))
    rounds(name, RingConfig(16, 4), *[(4, 2), (2, 1), (4, 2), (2, 1)] * 3)
    rounds(name, RingConfig(8, 4, 1), (4, 2), (4, 1), (4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_d2_a_partial_rejection_is_over_when_it_is_over(name: str) -> None:
    """Fault (turboquant#352): a rollback length never cleared, so that the state trails the text for ever."""
    rounds(name, RingConfig(16, 4), (4, 4), (4, 2), (4, 4), (4, 4), (4, 4))
    pair = rounds(name, RingConfig(16, 4), (4, 4), (4, 2))
    first = [pair.design.read(pair.state, which, [0]) for which in ("served", "kept")]
    again = [pair.design.read(pair.state, which, [0]) for which in ("served", "kept")]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_d3_every_count_up_to_the_whole_window(name: str) -> None:
    """Fault (xllm#2247): the accepted count clamped to another buffer's depth before it picks the state."""
    rounds(name, RingConfig(16, 6), *[(6, n) for n in range(1, 7)])


@pytest.mark.parametrize("name", NAMES)
def test_d4_speculative_steps_and_steps_without_a_draft(name: str) -> None:
    """Fault (vllm#52942, #56531, #39273): the live state left at the accepted draft while a plain step reads slot 0."""
    rounds(name, RingConfig(16, 4), (4, 3), (1, 1), (4, 1), (1, 1), (4, 4), (1, 1))
    rounds(name, RingConfig(8, 4), (4, 3), (1, 1), (4, 1), (1, 1), (4, 4), (1, 1))


@pytest.mark.parametrize("precision", [EXACT, OWN], ids=["exact", "own"])
@pytest.mark.parametrize("name", NAMES)
def test_d5_a_copy_carries_its_ring_or_is_refused(name: str, precision: PrecisionConfig) -> None:
    """Fault (sglang#28451): a copy that assumes a folded source; cursors, flag or a record field left behind."""
    rng = np.random.default_rng(5)
    tokens, lengths = bf16(draw(rng, 8, 1, 4)), np.full((8, 1), 4)
    both = windows(tokens.map(lambda x: torch.cat((x, x), 1)), np.repeat(lengths, 2, 1))
    only = windows(tokens.map(lambda x: torch.cat((x, x), 1)), np.concatenate((lengths, 0 * lengths), 1))
    for history in range(1, 4):
        maker = design(name, RingConfig(16, 4), precision)
        state = maker.create(SHAPE, 2, start(rng, 2))
        state.seed = [3, 3]
        for i in range(history):
            maker.verify(state, Step(only, i))
            maker.commit(state, [0], [3])
        if state.cursors.write_pos[0]:
            with pytest.raises(RingError, match="not folded"):
                maker.copy(state, 0, 1)
        maker.copy(state, 0, 1, ring=True)
        for i in range(history, 8):
            result = maker.verify(state, Step(both, i))
            assert torch.equal(result.o[0], result.o[1])
            maker.commit(state, [0, 1], [2, 2])
            for which in ("served", "kept"):
                assert torch.equal(maker.read(state, which, [0]), maker.read(state, which, [1]))
        assert state.cursors.write_pos[0] == state.cursors.write_pos[1]


def digest(state: Any, slot: int) -> str:
    """Every bit a slot owns."""
    parts = [state.checkpoint[slot], *(rows[slot] for rows in state.records.values())]
    cursors = [getattr(state.cursors, n)[slot] for n in ("write_pos", "cache_base", "is_flush")]
    marks = repr((cursors, state.tokens[slot], state.seed[slot])).encode()
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in parts) + marks).hexdigest()


@pytest.mark.parametrize("name", names())
def test_e1_slots_outside_the_step_keep_every_bit(name: str) -> None:
    """Fault (tokenspeed#700, AReno#509): padded rows write into slot 0; a fold or a read that touches idle slots."""
    rng = np.random.default_rng(1)
    maker = design(name, precision=OWN)
    m = maker.ring.max_window
    lengths = rng.integers(1, m + 1, (24, 8)) * (rng.random((24, 8)) < 0.4)
    lengths[:, 5] = m
    lengths[::2, 0] = 0
    ready = windows(bf16(draw(rng, 24, 8, m)), lengths)
    state = maker.create(SHAPE, 8, start(rng, 8))
    for i in range(24):
        step = Step(ready, i)
        before = [digest(state, slot) for slot in range(8)]
        maker.verify(state, step)
        maker.commit(state, step.slots, [int(rng.integers(1, n + 1)) for n in step.lengths])
        for which in ("served", "kept"):
            maker.read(state, which, step.slots)
        after = [digest(state, slot) for slot in range(8)]
        assert [s for s in range(8) if before[s] != after[s]] == step.slots


@pytest.mark.parametrize("value", [float("nan"), 1e30])
@pytest.mark.parametrize("name", names())
def test_e2_a_reused_slot_is_a_fresh_one(name: str, value: float) -> None:
    """Fault (vllm#56524, TensorRT-LLM#14203, #14509): checkpoint, ring, cursors, flag, token count or operand cache
    of the tenant before; bits compared with a pool that never had one."""
    rng = np.random.default_rng(2)
    maker = design(name, precision=OWN)
    m = maker.ring.max_window
    initial, tokens, lengths = start(rng, 2), bf16(draw(rng, 14, 2, m)), rng.integers(1, m + 1, (14, 2))
    ready = windows(tokens, lengths)
    fresh = decode(maker, initial, ready, lengths)
    state = maker.create(SHAPE, 2, torch.full_like(initial, value))
    for i in range(int(rng.integers(1, 9))):
        step = Step(ready, i)
        maker.verify(state, step)
        maker.commit(state, step.slots, step.lengths)
    for rows in state.records.values():
        rows.fill_(value)
    maker.reset(state, [1, 0], initial.flip(0))
    for rows in state.records.values():
        rows.fill_(value)
    assert same(decode(maker, initial, ready, lengths, state=state), fresh)


@pytest.mark.parametrize("pad", [float("nan"), 1e30, float("inf")])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 20])
def test_e3_a_tail_shorter_than_the_window(T: int, pad: float) -> None:
    """Fault (cuLA#38): the last gate taken at the window's end, padded keys summed. The state tells, outputs do not."""
    rng = np.random.default_rng(T)
    initial, tokens = start(rng, 1), draw(rng, T)
    for name in names():
        maker = design(name, RingConfig(16, 8))
        S = recurrence(initial[0], tokens, maker.arithmetic.conventions)[0][-1]
        m = maker.ring.max_window
        W = -(-T // m)
        lengths = np.minimum(m, T - m * np.arange(W))[:, None]
        at = torch.arange(W * m).clamp(max=T - 1).view(W, 1, m)
        trace = decode(maker, initial, windows(tokens.map(lambda x, at=at: x[at]), lengths, pad=pad), lengths)[0]
        for which, x in zip(("served", "kept"), trace[-2:], strict=True):
            close(f"{which} of {name}", x, S)


@pytest.mark.parametrize("name", names())
def test_e4_empty_windows_between_others(name: str) -> None:
    """Fault (vllm-ascend#11438, flashinfer#3536): an empty window shifts its neighbours' index; a slot that never
    decodes loses its initial state."""
    maker = design(name)
    rng = np.random.default_rng(4)
    m = maker.ring.max_window
    lengths = np.array([[m, 0, m], [0, 0, 1], [0, m, 0], [1, 0, 0], [m, 0, m]])
    table = draw(rng, 5, 3, m), lengths
    initial = start(rng, 4)
    pair = Beside(maker, initial[:3])
    for i in range(5):
        pair.step(table, windows(*table), i, {b: n for b, n in enumerate(lengths[i].tolist()) if n})
    never = maker.create(SHAPE, 4, initial)
    for which in ("served", "kept"):
        assert torch.equal(maker.read(never, which, [3, 1]), initial[[3, 1]])


@pytest.mark.parametrize("name", names())
def test_e4_a_step_without_any_window(name: str) -> None:
    """Fault (FlashKDA#32): abort where every sequence of the batch is empty. Nothing may change."""
    maker = design(name)
    rng = np.random.default_rng(5)
    state = maker.create(SHAPE, 2, start(rng, 2))
    ready = windows(draw(rng, 2, 2, 1), [[1, 1], [0, 0]])
    maker.verify(state, Step(ready, 0))
    maker.commit(state, [0, 1], [1, 1])
    before = [digest(state, slot) for slot in range(2)]
    maker.verify(state, Step(ready, 1))
    maker.commit(state, [], [])
    assert [digest(state, slot) for slot in range(2)] == before


@pytest.mark.parametrize("name", names())
def test_e5_padding_changes_no_bit(name: str) -> None:
    """Fault (maxtext#5295, fla#892): pads that enter the norm, the decay or a sum; a wider batch of windows."""
    rng = np.random.default_rng(6)
    maker = design(name, RingConfig(32, 4), OWN)
    m = maker.ring.max_window
    initial, tokens, lengths = start(rng, 2), bf16(draw(rng, 20, 2, m)), rng.integers(1, m + 1, (20, 2))
    plain = decode(maker, initial, windows(tokens, lengths, pad=0.0), lengths)
    for pad in (float("nan"), 1e30, -1e30):
        assert same(decode(maker, initial, windows(tokens, lengths, pad=pad), lengths), plain)
    for extra in (1, 3, 17):
        wide = tokens.map(lambda x, extra=extra: torch.cat((x, x[:, :, :1].expand(-1, -1, extra, *x.shape[3:])), 2))
        assert same(decode(maker, initial, windows(wide, lengths), lengths), plain), extra


@pytest.mark.parametrize("name", names())
def test_slots_may_be_named_in_any_order(name: str) -> None:
    """Fault: as many slots as there are taken for all of them in order, so that a permuted call mixes sequences."""
    rng = np.random.default_rng(8)
    maker = design(name)
    m = maker.ring.max_window
    lengths, order = np.full((12, 3), m), [2, 0, 1]
    ready, initial = windows(draw(rng, 12, 3, m), lengths), start(rng, 3)
    states = [maker.create(SHAPE, 3, initial) for _ in range(2)]
    maker.reset(states[1], order, initial[order])
    for i in range(12):
        counts = [int(n) for n in rng.integers(1, m + 1, 3)]
        for state, slots in zip(states, ([0, 1, 2], order), strict=True):
            maker.verify(state, Step(ready, i))
            maker.commit(state, slots, [counts[s] for s in slots])
        for which in ("served", "kept"):
            for some in (order, [1, 0]):
                close(which, maker.read(states[1], which, some), maker.read(states[0], which, [0, 1, 2])[some])


def test_an_aborted_request_leaves_its_history() -> None:
    """Fault: n = 0 moving the base after a flush although nothing follows it, or counting the bonus token anyway."""
    for name in NAMES:
        maker: Emulated = design(replace(load(name)), RingConfig(16, 4))
        rng = np.random.default_rng(7)
        table = draw(rng, 7, 1, 4), np.full((7, 1), 4)
        pair = Beside(maker, start(rng, 1))
        for i, n in enumerate((4, 0, 4, 4, 0, 0, 2)):
            pair.step(table, windows(*table), i, {0: n})
        assert pair.state.tokens == [14]
