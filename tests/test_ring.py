"""State, Rows and Lanes: what is read and written is what the cursors say, and nothing else is touched."""

import hashlib
import random
from itertools import count

import pytest
import torch
from torch import Tensor

from harness.errors import ConfigError, RingError
from harness.ring import RingSpec
from harness.state import RECORDS, Lanes, Rows, State
from harness.tokens import Shape

F64 = torch.float64
SHAPE = Shape(H=2, HV=6, V=3, K=5)  # no two sizes equal: a mixed-up axis cannot pass
L, WIDEST = 8, 3


def made(slots: int, poison: float = torch.nan) -> State:
    """A state whose unused parts hold `poison` and whose checkpoints tell slots apart."""
    state = State(SHAPE, RingSpec(L, WIDEST), slots, tuple(RECORDS))
    initial = torch.randn(slots, 6, 3, 5, dtype=F64, generator=torch.Generator().manual_seed(slots))
    state.reset(range(slots), initial)
    for rows in state.records.values():
        rows.nan_to_num_(nan=poison)
    return state


def fill(state: State, slots: list[int], lengths: list[int], start: int = 0) -> dict[str, Tensor]:
    """Write one window of each slot; its values, [slots, heads, m, width], are numbers used nowhere else."""
    lanes, m, written = Lanes(state, slots, lengths), max(lengths), {}
    numbers = count(start)
    for name, rows in state.records.items():
        values = torch.empty(state.slots, rows.shape[1], m, *rows.shape[3:], dtype=F64)
        written[name] = values.apply_(lambda _: next(numbers))
        lanes.write(name, values)
    return written


def place(state: State, slot: int, base: int, w: int) -> None:
    state.cursors.cache_base[slot], state.cursors.write_pos[slot] = base, w


def digest(state: State, slot: int, leave: set[int] = frozenset()) -> str:
    """Of every bit of a slot, but for the physical rows `leave`."""
    stays = [row for row in range(L) if row not in leave]
    parts = [state.checkpoint[slot], *(rows[slot][:, stays] for rows in state.records.values())]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in parts)).hexdigest()


@pytest.mark.parametrize("poison", [torch.nan, 1e30])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [1, 2], [0, 3], [2], [2, 0], [0, 2, 1, 3]], ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_a_window_comes_back_in_order_and_nothing_else_moves(slots: list, even: bool, poison: float) -> None:
    """Faults: a wrap off by one, a row of a neighbour, a padded lane written, an unused row read; in each of the
    ways rows can lie, from one slice for all slots to one index for each."""
    draw = random.Random(f"{slots}{even}")
    for base in range(L):
        state = made(4, poison)
        bases = [base] * 4 if even else [draw.randrange(L) for _ in range(4)]
        lengths = [2] * 4 if even else [draw.randint(1, WIDEST) for _ in range(4)]
        for slot in range(4):
            place(state, slot, bases[slot], 0)
        mine = {slot: {(bases[slot] + j) % L for j in range(lengths[slot])} for slot in slots}
        before = [digest(state, slot, mine.get(slot, set())) for slot in range(4)]
        written = fill(state, slots, [lengths[slot] for slot in slots])
        assert [digest(state, slot, mine.get(slot, set())) for slot in range(4)] == before
        for slot in slots:
            state.cursors.write_pos[slot] = lengths[slot]
        rows = Rows(state, slots, [lengths[slot] for slot in slots])
        widest = max(lengths[slot] for slot in slots)
        for name, values in written.items():
            want = values[slots][:, :, :widest].clone()
            for i, slot in enumerate(slots):
                want[i, :, lengths[slot] :] = 0.0
            assert torch.equal(rows.read(name), want), name


def test_a_long_history_is_read_in_logical_order() -> None:
    """Fault: windows written one after the other, around the end of the ring, come back rotated."""
    state, given = made(2), []
    place(state, 0, 5, 0)
    for i, m in enumerate([3, 1, 2]):
        written = fill(state, [0], [m], 1000 * i)
        given.append(written["d"][0, :, :m])
        state.cursors.write_pos[0] += m
    history = Rows(state, [0], [6]).read("d")[0]
    assert torch.equal(history, torch.cat(given, 1))
    assert torch.equal(Rows(state, [0], [4]).read("d")[0], history[:, :4])
    # the second of two slots has none: zeros, whatever its rows hold
    both = Rows(state, [0, 1], [6, 0]).read("d")
    assert torch.equal(both[0], history) and both[1].eq(0).all()


def test_an_empty_history_reads_as_nothing() -> None:
    """Fault: a ring without records yields a row."""
    state = made(3)
    for slots in ([0, 1, 2], [1]):
        rows = Rows(state, slots, [0] * len(slots))
        assert rows.count == 0 and rows.read("k_hat").shape == (len(slots), 2, 0, 5)


def test_last_is_each_slots_own() -> None:
    """Fault: the gate at the end of the widest history taken for every slot (cuLA#38)."""
    state = made(3)
    for slot, base in enumerate((6, 0, 3)):
        place(state, slot, base, 0)
    g = fill(state, [0, 1, 2], [3, 1, 2])["g"]
    rows = Rows(state, [0, 1, 2], [3, 1, 2])
    want = torch.stack([g[0, :, 2], g[1, :, 0], g[2, :, 1]])[..., None]
    assert torch.equal(rows.last(rows.read("g")), want)
    rows = Rows(state, [0, 1], [3, 0])
    want = torch.stack([g[0, :, 2], torch.zeros(6, dtype=F64)])[..., None]
    assert torch.equal(rows.last(rows.read("g")), want)


def test_padding_is_no_slot() -> None:
    """Fault (tokenspeed#700): a padded row's -1 becomes slot 0, or the last slot."""
    slots, real = 9, [0, 5, 7]
    state, alone = made(slots), made(slots)
    with pytest.raises(RingError, match="slot -1"):
        state.cursors.verify([*real, -1], [2, 2, 2, 2])
    assert state.cursors.window == [-1] * slots
    for pool, chosen in ((state, real), (alone, [0])):
        before = [digest(pool, slot) for slot in range(slots)]
        fill(pool, chosen, [2] * len(chosen))
        changed = [slot for slot in range(slots) if digest(pool, slot) != before[slot]]
        assert changed == chosen
    assert digest(state, 0) == digest(alone, 0)


@pytest.mark.parametrize("poison", [torch.nan, 1e30])
def test_a_freed_slot_starts_afresh(poison: float) -> None:
    """Fault (vllm#56524): the next sequence inherits state, records, cursors or token count of the last one."""
    state, fresh = made(3), made(3)
    for slot in (0, 2):
        state.cursors.verify([slot], [3])
        fill(state, [slot], [3])
        state.cursors.commit([slot], [3])
        state.tokens[slot] = 3
    state.cursors.verify([2], [1])  # reset in the middle of a step
    state.cursors.force_flush([0])
    state.checkpoint[[0, 2]] = poison
    for rows in state.records.values():
        rows[[0, 2]] = rows[[0, 2]].nan_to_num(nan=poison)
    kept, version = digest(state, 1), state.version
    state.reset([2, 0], fresh.checkpoint[[2, 0]])
    for slot in (0, 1, 2):
        assert digest(state, slot) == digest(fresh, slot)
    assert digest(state, 1) == kept
    assert vars(state.cursors) | {"spec": 0} == vars(fresh.cursors) | {"spec": 0}
    assert state.tokens == [0, 0, 0] and state.version > version


def test_a_slot_with_history_is_copied_with_its_ring_or_not_at_all() -> None:
    """Fault (sglang#28451): the copy starts with an empty ring while its source still has unfolded tokens."""
    state = made(3)
    place(state, 1, 6, 0)
    state.cursors.verify([1], [3])
    fill(state, [1], [3])
    with pytest.raises(RingError, match=r"^slot 1: copy between verify and commit"):
        state.copy(1, 2, ring=True)
    state.cursors.commit([1], [3])
    state.tokens[1], state.seed[1] = 3, 77
    before = [digest(state, slot) for slot in range(3)]
    with pytest.raises(RingError, match=r"^slot 1: 3 records not folded"):
        state.copy(1, 2)
    for bad in ((3, 1), (1, 3), (-1, 1)):
        with pytest.raises(RingError, match=rf"^slot {bad[0] if bad[0] != 1 else bad[1]}: not in"):
            state.copy(*bad, ring=True)
    assert [digest(state, slot) for slot in range(3)] == before

    state.copy(1, 2, ring=True)
    assert [digest(state, slot) for slot in range(3)] == [before[0], before[1], before[1]]
    cursors = state.cursors
    assert (cursors.write_pos[2], cursors.cache_base[2], cursors.is_flush[2]) == (3, 6, True)
    assert (state.tokens[2], state.seed[2]) == (3, 77)
    # from here on both go their own way
    cursors.verify([2], [2])
    fill(state, [2], [2], 5000)
    assert digest(state, 1) == before[1] and digest(state, 2) != before[1]
    # rejected drafts stay in the ring, but a copy without one has nothing of them
    cursors.commit([2], [0])
    state.copy(2, 0)
    assert state.records["d"][0].isnan().all() and torch.equal(state.checkpoint[0], state.checkpoint[2])
    assert (cursors.write_pos[0], cursors.cache_base[0], cursors.is_flush[0]) == (0, 0, False)


def test_a_copy_onto_itself_is_refused() -> None:
    """Fault: a slot copied to itself keeps its records and forgets that it has them."""
    state = made(1)
    with pytest.raises(RingError, match="slot 0: copied onto itself"):
        state.copy(0, 0, ring=True)


def test_only_declared_records_exist() -> None:
    """Fault: a misspelt record is allocated and never read; a declared one has another field's shape."""
    with pytest.raises(ConfigError, match=r"^records: k_tilde not among .*k_hat"):
        State(SHAPE, RingSpec(L, WIDEST), 1, ("d", "k_tilde"))
    state = made(2)
    shapes = {name: tuple(rows.shape) for name, rows in state.records.items()}
    wide = {"v": (6, L, 3), "k": (2, L, 5), "k_hat": (2, L, 5), "k_hat_lo": (2, L, 5), "d": (6, L, 3)}
    wide |= {"d_lo": (6, L, 3), "g": (6, L), "beta": (6, L)}
    assert shapes == {name: (2, *size) for name, size in wide.items()}
    with pytest.raises(KeyError):
        Rows(State(SHAPE, RingSpec(L, WIDEST), 1, ("d",)), [0], [1]).read("g")


@pytest.mark.parametrize(
    ("arguments", "key", "largest"),
    [
        ((7, 1), "ring.length", ""),
        ((0, 1), "ring.length", ""),
        ((16, 0), "ring.max_window", ""),
        ((4, 4), "ring.length", ""),
        ((16, 4, 10), "ring.flush_at", "9"),
        ((16, 4, 14, "commit"), "ring.flush_at", "13"),
        ((16, 4, -1), "ring.flush_at", ""),
        ((16, 4, 1, "later"), "ring.fold_when", "next"),
    ],
)
def test_rings_that_could_overflow_are_refused(arguments: tuple, key: str, largest: str) -> None:
    """Fault: a mask that is no modulus, or drafts on rows still being folded; the message says what is legal."""
    with pytest.raises(ConfigError, match=rf"^{key}: .*{largest}") as refused:
        RingSpec(*arguments)
    if key == "ring.flush_at" and largest:
        assert str(refused.value).endswith(f"largest legal value is {largest}")
        RingSpec(*arguments[:2], int(largest), *arguments[3:])
    assert "\n" not in str(refused.value)
    assert RingSpec(16, 4).flush_at == 9
