"""Drawing for all slots at once: numpy's streams, wherever the table is looked up."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from test_decode import SHAPE, same

from harness import pool
from harness.compiled import draws
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.families import FAMILIES, SILU, TABLES, Draw
from harness.generate import stream_keys
from harness.tokens import Tokens

SEEDS = [0, 5, 2**32 - 1, 2**32 + 5, 2**70 + 1]


def streams(family: str = "silu", **keys: object) -> tuple[Stream, Stream]:
    """The same decode drawn on the CPU and as a device has it."""
    config = DecodeConfig(family=family, **{"tokens": 8192, "slots": 2} | keys)  # type: ignore[arg-type]
    return Stream(config, SHAPE), Stream(config, SHAPE, lookup=True)


def test_streams_are_numpys() -> None:
    """Faults: a seed of over 32 bits cut, words of another slot's seed, the counter or a shift of the generator."""
    keys = stream_keys("block.k", [0, 3], 7, SEEDS)
    found = np.empty((len(keys), 101), np.uint64)
    draws.places(keys, found)
    for row, (seed, head) in zip(found, [(s, h) for s in SEEDS for h in (0, 3)], strict=True):
        draw = Draw(seed, "block", 7, 101, 5, 4, 0.0)
        places = np.arange(65536, dtype=np.float32)  # a table that says where it was read
        np.testing.assert_array_equal(row.view(np.uint16), draw.sample(places, "k", head, 101, 4).ravel())


@pytest.mark.parametrize(("T", "K"), [(24, 7), (9, 1), (1, 5), (1024, 24)])
def test_tokens_of_a_table_are_the_family_functions(T: int, K: int) -> None:
    """Faults: rows or tokens exchanged, places lost between two groups of rows, a tail that is no multiple of 4."""
    heads = [1, 4]
    for name, kernel, function in (("k", draws.keys_of, "silu"), ("v", draws.values_of, "normal_values")):
        family = FAMILIES["silu"]
        table = TABLES[family.keys if name == "k" else family.values]
        out = np.empty((len(SEEDS), T, len(heads), K))
        kernel(stream_keys(f"loop.{name}", heads, 0, SEEDS), table.astype(np.float64), out)
        for b, seed in enumerate(SEEDS):
            draw = Draw(seed, "loop", 0, T, K, K, 0.0)
            for h, head in enumerate(heads):
                drawn = family.keys(draw, "k", head) if name == "k" else family.values(draw, head, SILU).T
                np.testing.assert_array_equal(out[b, :, h], drawn, err_msg=function)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_that_looks_up_has_the_same_tokens(family: str) -> None:
    """Faults: places read as signed numbers, another order of axes, a draw that depends on the thread it is made in."""
    here, there = streams(family)
    n = torch.arange(9)
    for b in (0, 2):
        assert same(here.block(b), there.block(b))
    assert same(here.junk(n % 2, n, n), there.junk(n % 2, n, n))


@pytest.mark.parametrize("activation", ["bf16", "e4m3", "exact"])
@pytest.mark.parametrize("family", ["silu", "loop24"])
def test_gathers_on_a_device_are_those_of_the_cpu(family: str, activation: str) -> None:
    """Faults: a slot's tokens under another's, a block's end, a block drawn ahead under the wrong number."""
    here, there = streams(family, slots=3, prefill=1003, tokens=5000, activation=activation)
    for start, count in (([0, 1023, 2000], 1), ([1020, 3, 1024], 9), ([0, 1500, 70], 2500), ([5, 6, 7], 0)):
        at = torch.tensor(start)
        assert same(here.tokens(at, count), there.tokens(at, count))


def test_what_is_drawn_ahead_is_bounded() -> None:
    """Fault: blocks drawn that no token of the decode needs, or one block held for every block of the run."""
    _, there = streams(tokens=3000)
    for b in range(3):
        there.block(b)
        assert set(there._ahead) <= {b + 1, b + 2}
    assert not there._ahead


def test_gates_do_not_depend_on_the_slots_beside() -> None:
    """Fault: an exponential split between threads or vectors at another place, so that a last bit moves."""
    whole = Stream(DecodeConfig(slots=40, tokens=1024), SHAPE).block(0)
    alone = Stream(DecodeConfig(slots=1, seed=37, tokens=1024), SHAPE).block(0)
    part = whole.map(lambda x: x[37:38])
    assert all(torch.equal(getattr(part, f.name), getattr(alone, f.name)) for f in fields(Tokens))


def test_threads_are_made_where_they_are_used() -> None:
    """Fault: a pool inherited through a fork, whose threads are not there: the child waits for ever."""
    import multiprocessing

    assert pool.start([lambda: 1, lambda: 2], True)() == [1, 2]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(pool.start([lambda: 3], True)()))
    child.start()
    assert ours.poll(20) and ours.recv() == [3]
    child.join(20)
    assert [s.stop - s.start for s in pool.shares(7, False)] == [7]
    assert sum(s.stop - s.start for s in pool.shares(7, True)) == 7
