"""Threads for what releases the interpreter lock: compiled kernels, large copies, batched operations.

They are made by the process that first asks for them, as a fork inherits a pool without its threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_made: dict[int, ThreadPoolExecutor] = {}  # by process


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def start(tasks: Sequence[Callable[[], Any]], threads: bool) -> Callable[[], list[Any]]:
    """Begin `tasks`; the call that comes back waits for their results, in order. Without threads they run here."""
    if not threads:
        done = [task() for task in tasks]
        return lambda: done
    mine = os.getpid()
    if mine not in _made:
        # the thread that asks has work of its own; a team of OpenMP in each of the others would be one too many
        _made[mine] = ThreadPoolExecutor(max(1, cores() - 1), "harness", torch.set_num_threads, (1,))
    futures = [_made[mine].submit(task) for task in tasks]
    return lambda: [future.result() for future in futures]


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items of an iterator, the next one made by a thread while this one is used."""
    mode = torch.is_inference_mode_enabled()

    def following() -> list[T]:
        with torch.inference_mode(mode):
            return list(islice(items, 1))

    with ThreadPoolExecutor(1, "ahead") as thread:
        coming = thread.submit(following)
        while item := coming.result():
            coming = thread.submit(following)
            yield item[0]


def pieces(n: int, count: int) -> list[slice]:
    """0..n cut into `count` pieces as equal as can be."""
    edges = [n * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def shares(n: int, threads: bool) -> list[slice]:
    """0..n cut into a piece per thread; in one without threads."""
    return pieces(n, max(1, min(n, cores() - 1)) if threads else 1)
