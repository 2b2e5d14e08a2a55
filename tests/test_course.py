"""The compiled course of a block is that of the cursors, step by step, and refuses what they refuse in their words."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from harness.compiled.course import Course, course
from harness.errors import RingError
from harness.ring import Cursors, RingSpec

SPECS = [
    (RingSpec(16, 4), False),
    (RingSpec(8, 3, 4, "commit"), False),
    (RingSpec(16, 4, 1, "commit"), False),
    (RingSpec(2, 1), False),
    (RingSpec(16, 1, 15), True),
    (RingSpec(4, 1, 1), True),
]


def by_steps(cursors: Cursors, lengths: np.ndarray, accepted: np.ndarray, fold_current: bool) -> Course:
    """The same by the readable cursors, which move."""
    rows = []
    for sizes, counts in zip(lengths, accepted, strict=True):
        slots = np.flatnonzero(sizes).tolist()
        before = [list(x) for x in (cursors.cache_base, cursors.write_pos, cursors.is_flush)]
        cursors.verify(slots, sizes[slots].tolist())
        full = cursors.step(slots, counts[slots].tolist(), fold_current)
        at_once = [cursors.write_pos[b] if b in full else 0 for b in range(cursors.slots)]
        new = list(cursors.cache_base)
        cursors.absorb(full)
        rows.append([*before, new, at_once, cursors.cache_base, cursors.write_pos, cursors.is_flush])
        rows[-1] = [list(x) for x in rows[-1]]
    return Course(*np.array(rows, dtype=np.int64).transpose(1, 0, 2))


def steps(spec: RingSpec, seed: int, fold_current: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ragged windows of five slots, some idle; some aborted where that is allowed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, spec.max_window + 1, (60, 5))
    return lengths, np.minimum(rng.integers(1 if fold_current else 0, spec.max_window + 1, lengths.shape), lengths)


@pytest.mark.parametrize(("spec", "fold_current"), SPECS, ids=str)
def test_every_step_is_that_of_the_cursors(spec: RingSpec, fold_current: bool) -> None:
    """Faults: a base that moves on an aborted flush, a flag left by a fold at commit, an idle slot that moves, a second
    block that starts anew."""
    one, two = Cursors(spec, 5), Cursors(spec, 5)
    for seed in range(3):
        lengths, accepted = steps(spec, seed, fold_current)
        before = copy.deepcopy(vars(one))
        found, after = course(one, lengths, accepted, fold_current)
        assert vars(one) == before
        expected = by_steps(two, lengths, accepted, fold_current)
        for name in Course._fields:
            # a token folded as it is decoded moves the base at once
            if not (fold_current and name == "new_base"):
                assert (getattr(found, name) == getattr(expected, name)).all(), name
        assert vars(after) == vars(two)
        one = after


@pytest.mark.parametrize(
    ("length", "accepted", "message"),
    [
        (5, 1, "a window of 5 is not in 1..max_window=4"),
        (3, 4, "4 tokens accepted of a window of 3"),
        (3, -1, "-1 tokens accepted"),
        (-1, 0, "a window of -1"),
    ],
)
def test_what_the_cursors_refuse_is_refused_by_name(length: int, accepted: int, message: str) -> None:
    """Fault: a compiled loop that goes on past a window too wide or a count that was never verified."""
    lengths, counts = np.full((4, 3), 2), np.ones((4, 3), dtype=int)
    lengths[2, 1], counts[2, 1] = length, accepted
    with pytest.raises(RingError, match=f"slot 1: {message}"):
        course(Cursors(RingSpec(16, 4), 3), lengths, counts)


def test_a_slot_in_the_middle_of_a_step_and_a_refused_folded_token_are_refused() -> None:
    """Faults: a block that begins between verify and commit; a folded token taken back."""
    cursors = Cursors(RingSpec(16, 4), 2)
    cursors.verify([1], [2])
    with pytest.raises(RingError, match="slot 1: verify between verify and commit"):
        course(cursors, np.ones((1, 2), dtype=int), np.ones((1, 2), dtype=int))
    counts = np.ones((6, 1), dtype=int)
    counts[5] = 0
    with pytest.raises(RingError, match="slot 0: its token is folded already"):
        course(Cursors(RingSpec(8, 1, 5), 1), np.ones((6, 1), dtype=int), counts, fold_current=True)
