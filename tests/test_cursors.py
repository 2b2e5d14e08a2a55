"""The cursor rules against a token-id model: what a slot holds is the list of tokens it was given, at every step."""

import random
from collections.abc import Sequence

import pytest

from harness.errors import RingError
from harness.ring import Cursors, RingSpec


class Ids:
    """Cursors, with token ids where records would be: rows of the ring, a list as the checkpoint, and the truth."""

    def __init__(self, spec: RingSpec, slots: int, fold_current: bool = False):
        self.cursors, self.spec, self.fold_current = Cursors(spec, slots), spec, fold_current
        self.rows: list[list[int | None]] = [[None] * spec.length for _ in range(slots)]
        self.folded: list[list[int]] = [[] for _ in range(slots)]
        self.accepted: list[list[int]] = [[] for _ in range(slots)]
        self.windows: dict[int, list[int]] = {}
        self.forced: set[int] = set()
        self.next_id = 0

    def history(self, slot: int) -> list[int | None]:
        base, w, L = self.cursors.cache_base[slot], self.cursors.write_pos[slot], self.spec.length
        return [self.rows[slot][(base + j) % L] for j in range(w)]

    def fold(self, slots: Sequence[int]) -> None:
        for slot in slots:
            ids = self.history(slot)
            # folding may not skip or repeat: what it appends is what comes next
            assert ids == self.accepted[slot][len(self.folded[slot]) :], f"slot {slot} folds {ids}"
            self.folded[slot] += [i for i in ids if i is not None]

    def verify(self, slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
        cursors, L = self.cursors, self.spec.length
        flush = cursors.verify(slots, lengths)
        self.fold(flush)
        for slot, m in zip(slots, lengths, strict=True):
            self.windows[slot] = list(range(self.next_id, self.next_id + m))
            self.next_id += m
            for lane, token in enumerate(self.windows[slot]):
                self.rows[slot][(cursors.cache_base[slot] + cursors.write_pos[slot] + lane) % L] = token
        return flush

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        current = [s for s in slots if self.cursors.flushed[s]] if self.fold_current else []
        for slot, n in zip(slots, accepted, strict=True):
            self.accepted[slot] += self.windows.pop(slot)[:n]
        self.forced.difference_update(slots)
        full = self.cursors.commit(slots, accepted)
        for group in (current, full):
            self.fold(group)
            self.cursors.absorb(group)

    def step(self, slot: int, window: int, n: int) -> None:
        self.verify([slot], [window])
        self.commit([slot], [n])
        self.check([slot])

    def force(self, slots: Sequence[int]) -> None:
        self.cursors.force_flush(slots)
        self.forced.update(slots)

    def reset(self, slots: Sequence[int]) -> None:
        self.cursors.reset(slots)
        self.forced.difference_update(slots)
        for slot in slots:
            self.rows[slot] = [None] * self.spec.length
            self.folded[slot], self.accepted[slot] = [], []
            self.windows.pop(slot, None)

    def copy(self, source: int, target: int, ring: bool) -> None:
        self.cursors.idle([source], "copy")
        self.reset([target])
        if ring:
            self.cursors.copy(source, target)
            self.rows[target] = list(self.rows[source])
            self.forced |= {target} if source in self.forced else set()
        self.folded[target], self.accepted[target] = list(self.folded[source]), list(self.accepted[source])

    def snapshot(self, source: int, target: int, prefix: int) -> None:
        ids = self.accepted[source][: len(self.folded[source]) + prefix]
        assert ids == self.folded[source] + self.history(source)[:prefix]
        self.reset([target])
        self.folded[target], self.accepted[target] = list(ids), list(ids)

    def check(self, slots: Sequence[int]) -> None:
        """Token lag 0, nothing out of order, a flag exactly where one is due, and room for the widest window."""
        for slot in slots:
            due = self.spec.fold_when == "next" and self.cursors.write_pos[slot] >= self.spec.flush_at
            assert self.cursors.is_flush[slot] == (due or slot in self.forced), f"slot {slot}"
            tail = self.accepted[slot][len(self.folded[slot]) :]
            assert self.history(slot) == tail, f"slot {slot} holds {self.history(slot)}, was given {tail}"
            assert self.cursors.write_pos[slot] + self.spec.max_window <= self.spec.length


SPECS = [
    (RingSpec(16, 4), False),
    (RingSpec(16, 4, 1), False),
    (RingSpec(16, 4, 5, "next"), False),
    (RingSpec(16, 4, 13, "commit"), False),
    (RingSpec(16, 4, 1, "commit"), False),
    (RingSpec(8, 4), False),
    (RingSpec(8, 3, 4, "commit"), False),
    (RingSpec(32, 6), False),
    (RingSpec(64, 7, 30), False),
    (RingSpec(2, 1), False),
    (RingSpec(1, 1, 1, "commit"), False),
    (RingSpec(16, 1, 15), True),
    (RingSpec(4, 1, 1), True),
]


@pytest.mark.parametrize(("spec", "fold_current"), SPECS, ids=str)
def test_fuzz(spec: RingSpec, fold_current: bool) -> None:
    """Faults: a dropped bonus token, a base off by one, a stale flag, a slot that follows its neighbour, drafts
    that land on rows still in use. 8,000 steps on each ring, 104,000 in all."""
    draw = random.Random(f"{spec}")
    slots, L, widest = 5, spec.length, spec.max_window
    ids = Ids(spec, slots, fold_current)
    every, flushes, wraps = range(slots), 0, 0
    for _ in range(8000):
        before = list(ids.cursors.cache_base)
        kind = draw.choices(("spec", "plain", "reset", "copy", "snapshot", "force"), (60, 20, 3, 3, 3, 3))[0]
        chosen = draw.sample(every, draw.randint(1, slots))
        one, other = draw.sample(every, 2)
        w = ids.cursors.write_pos[one]
        if kind in ("spec", "plain"):
            lengths = [draw.randint(1, widest) if kind == "spec" else 1 for _ in chosen]
            flush = ids.verify(chosen, lengths)
            flushes += len(flush)
            # an aborted request keeps nothing; a token folded while it is decoded cannot be aborted
            kept = [draw.choice((1, draw.randint(1, m), m)) for m in lengths]
            ids.commit(chosen, [0 if draw.random() < 0.05 and not fold_current else n for n in kept])
        elif kind == "reset":
            if draw.random() < 0.3:
                ids.verify([one], [1])  # reset whatever is in progress
            ids.reset([one])
        elif kind == "copy":
            ids.copy(one, other, ring=w > 0 or draw.random() < 0.5)
        elif kind == "snapshot":
            ids.snapshot(one, other, draw.randint(0, w))
        else:
            ids.force(chosen)
        ids.check(every)
        wraps += sum(b > a for b, a in zip(before, ids.cursors.cache_base, strict=True))
        if max(map(len, ids.accepted)) > 40 * L:
            ids.reset([max(every, key=lambda s: len(ids.accepted[s]))])
    assert flushes > 500
    assert wraps > 100 or L == 1


def test_golden_trace() -> None:
    """Fault: any change of the flush rule or of the base, against a trace worked out by hand."""
    ids = Ids(RingSpec(16, 4), 1)
    trace = []
    for n in (1, 2, 3, 4, 1, 2, 3, 4):
        ids.step(0, 4, n)
        trace.append((ids.cursors.write_pos[0], ids.cursors.cache_base[0], int(ids.cursors.is_flush[0])))
    assert trace[:4] == [(1, 0, 0), (3, 0, 0), (6, 0, 0), (10, 0, 1)]
    assert trace[4:] == [(1, 10, 0), (3, 10, 0), (6, 10, 0), (10, 10, 1)]


# (window, accepted) of one step after the other
RUNS = {
    "rounds shorter than the window, turboquant#345": [(4, 2), (2, 1), (4, 2), (2, 1)],
    "after a partial rejection, turboquant#352": [(4, 4), (4, 2), (4, 4), (4, 4), (4, 4)],
    "up to the whole window, xllm#2247": [(6, n) for n in (1, 2, 3, 4, 5, 6)],
    "steps without a draft, vllm#52942": [(4, 3), (1, 1), (4, 1), (1, 1), (4, 4), (1, 1)],
    "rollback after rollback, llama.cpp#29117": [(4, 1), (1, 1), (1, 1), (4, 1), (4, 1), (1, 1), (4, 4)],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("fold_when", ["next", "commit"])
def test_no_lag(run: str, fold_when: str) -> None:
    """Fault: the state trails the text, or holds a rejected draft, after one particular run of steps."""
    ids = Ids(RingSpec(16, max(window for window, _ in RUNS[run]), None, fold_when), 2)
    for window, n in RUNS[run] * 4:
        ids.step(0, window, n)
        ids.step(1, 1, 1)
    assert len(ids.accepted[0]) == 4 * sum(n for _, n in RUNS[run])


def test_a_read_between_steps_changes_nothing() -> None:
    """Fault (turboquant#352): a cursor that is read once more is applied once more; an idle slot ages."""
    ids = Ids(RingSpec(16, 4), 3)
    for n in (4, 4, 3):
        ids.step(1, 4, n)
    for _ in range(3):
        ids.cursors.idle([0, 1, 2], "read")
    assert ids.cursors.write_pos == [0, 11, 0]
    assert ids.cursors.is_flush == [False, True, False]
    ids.verify([1], [2])
    ids.commit([1], [0])  # aborted: the history is folded, nothing is added
    ids.check([1])
    assert (ids.cursors.write_pos[1], ids.cursors.cache_base[1], ids.cursors.is_flush[1]) == (0, 0, False)


def test_impossible_steps_are_refused_and_change_nothing() -> None:
    """Fault: a wrong call is clamped, or half of it is carried out before it is refused."""
    cursors = Cursors(RingSpec(16, 4), 3)
    cursors.verify([2], [3])
    refused = [
        (cursors.commit, ([0], [1]), "slot 0: commit without a verify"),
        (cursors.commit, ([2, 0], [1, 1]), "slot 0: commit without a verify"),
        (cursors.commit, ([2], [4]), "slot 2: 4 tokens accepted of a window of 3"),
        (cursors.commit, ([2], [-1]), "slot 2: -1 tokens"),
        (cursors.commit, ([2, 2], [1, 1]), "twice"),
        (cursors.verify, ([0, 2], [1, 1]), "slot 2: verify between verify and commit"),
        (cursors.verify, ([0, 1], [1, 5]), "slot 1: a window of 5 is not in 1..max_window=4"),
        (cursors.verify, ([0, 1], [1, 0]), "slot 1: a window of 0"),
        (cursors.verify, ([0, -1], [1, 1]), "slot -1: not in 0..2"),
        (cursors.verify, ([0, 3], [1, 1]), "slot 3: not in 0..2"),
        (cursors.verify, ([1, 0, 1], [1, 1, 1]), "twice"),
        (cursors.idle, ([2], "read"), "slot 2: read between verify and commit"),
        (cursors.force_flush, ([0, 2],), "slot 2: force_flush between"),
        (cursors.reset, ([0, 7],), "slot 7"),
    ]
    for call, arguments, message in refused:
        with pytest.raises(RingError, match=f"^slots? .*{message.removeprefix('slot ')}"):
            call(*arguments)
        assert (cursors.window, cursors.write_pos, cursors.is_flush) == ([-1, -1, 3], [0] * 3, [False] * 3)
    cursors.commit([2], [3])


@pytest.mark.parametrize("value", [-1, 16])
@pytest.mark.parametrize("name", ["write_pos", "cache_base"])
def test_cursors_out_of_range_are_refused(name: str, value: int) -> None:
    """Fault: a corrupt cursor wraps around and reads rows that belong to no one."""
    cursors = Cursors(RingSpec(16, 4), 2)
    getattr(cursors, name)[1] = value
    with pytest.raises(RingError, match=f"^slot 1: .*{value}"):
        cursors.verify([0, 1], [4, 4])
    assert cursors.window == [-1, -1]
