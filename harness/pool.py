"""Threads for what releases the interpreter lock: compiled kernels, large copies, batched operations.

They are made by the process that first asks for them, as a fork inherits a pool without its threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch

from harness.cores import cores

T = TypeVar("T")
NICE = 5  # priority of a thread, 0 being a program's own and 19 the last
SWITCH = 1e-4  # seconds; the interpreter's own is fifty times that
_made: dict[int, ThreadPoolExecutor] = {}  # by process


def start(tasks: Sequence[Callable[[], Any]], threads: bool) -> Callable[[], list[Any]]:
    """Begin `tasks`; the call that comes back waits for their results, in order. Without threads they run here."""
    if not threads:
        done = [task() for task in tasks]
        return lambda: done
    mine = os.getpid()
    if mine not in _made:
        _made[mine] = ThreadPoolExecutor(max(1, cores() - 1), "harness", _yielding)
    futures = [_made[mine].submit(task) for task in tasks]
    return lambda: [future.result() for future in futures]


def _yielding() -> None:
    """Leave a core to the threads that launch, which have work of their own; a team of OpenMP in each thread would be
    one too many."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The items of an iterator, the next one made by a thread while this one is used.

    On a GPU it is made on a stream of its own: on one stream, each thread would wait for what the other has launched
    whenever it reads a number. What is at hand when an item is asked for may be given back to that stream's memory.
    """
    mode = torch.is_inference_mode_enabled()
    here = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    aside = torch.cuda.Stream() if here else None

    def following() -> tuple[list[T], Any]:
        with torch.inference_mode(mode), torch.cuda.stream(aside):
            if aside and here:
                # memory of the item before last, given back meanwhile, may still be read by what is launched here
                aside.wait_stream(here)
            made = list(islice(items, 1))
            return made, aside.record_event() if aside else None

    interval = sys.getswitchinterval()
    # every launch gives the interpreter away, and would wait this long to have it back
    sys.setswitchinterval(SWITCH)
    try:
        with ThreadPoolExecutor(1, "ahead") as thread:
            coming = thread.submit(following)
            while True:
                item, made = coming.result()
                if not item:
                    return
                if here:
                    here.wait_event(made)
                coming = thread.submit(following)
                yield item[0]
    finally:
        sys.setswitchinterval(interval)


def pieces(n: int, count: int) -> list[slice]:
    """0..n cut into `count` pieces as equal as can be."""
    edges = [n * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def shares(n: int, threads: bool) -> list[slice]:
    """0..n cut into a piece per thread; in one without threads."""
    return pieces(n, max(1, min(n, cores() - 1)) if threads else 1)
