"""A run spread over processes: heads never meet, so each process takes some key heads and the value heads on them.

The tensors of a step are small; one thread a process on its own heads beats threads inside every operation. Rows come
back block by block in the order of the shares, so the file does not depend on who was faster, and no value depends
on how many shares there were.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from harness import pool
from harness.config import Config
from harness.cores import cores
from harness.errors import HarnessError
from harness.runner import Rows, Runner, block_steps

Progress = Callable[[int], None]


def device_of(config: Config) -> str:
    """`device` with auto resolved. Raises HarnessError for cuda where there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise HarnessError("device: cuda asked for, but torch sees no GPU here; use device=cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device


def shares(config: Config, device: str) -> list[slice]:
    """The key heads of every process: one share on a GPU, else at most one a core."""
    H = config.model.key_heads
    return pool.pieces(H, 1 if device == "cuda" else min(config.workers or cores(), H))


def run(config: Config, device: str, progress: Progress) -> Iterator[list[Rows]]:
    """Yield the rows of `config`; progress(tokens) counts committed tokens of one share."""
    parts = shares(config, device)
    steps = block_steps(config, max(p.stop - p.start for p in parts), device)
    torch.set_num_threads(1)
    if device == "cpu":
        # compiled or loaded once, before the processes part
        import harness.compiled.inspect
        import harness.compiled.lockstep  # noqa: F401
    if len(parts) == 1:
        keep_memory()
        with torch.inference_mode():
            yield from Runner(config, parts[0], device, steps).run(progress)
        return
    context = multiprocessing.get_context("fork")
    workers: list[tuple[Connection, Any]] = []
    for part in parts:
        ours, theirs = context.Pipe(duplex=False)
        # a child that kept a reading end would never notice that its parent has died
        inherited = [ours, *(pipe for pipe, _ in workers)]
        process = context.Process(target=_work, args=(theirs, inherited, config, part, device, steps), daemon=True)
        process.start()
        theirs.close()
        workers.append((ours, process))
    try:
        yield from _gather(workers, progress)
    finally:
        for _, process in workers:
            process.terminate()
            process.join()


def _gather(workers: list[tuple[Connection, Any]], progress: Progress) -> Iterator[list[Rows]]:
    """One block of every share in turn; the first share's tokens count for all."""
    open_ = list(workers)
    while open_:
        for worker in list(open_):
            pipe, process = worker
            while True:
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process.join()
                    text = f"a worker process died with status {process.exitcode} before its share was done"
                    raise RuntimeError(text) from None
                if kind == "tokens" and worker is workers[0]:
                    progress(value)
                elif kind == "rows":
                    yield value
                    break
                elif kind == "error":
                    raise value
                elif kind == "done":
                    open_.remove(worker)
                    break


def _work(pipe: Connection, inherited: list[Connection], config: Config, part: slice, device: str, steps: int) -> None:
    # the parent answers Ctrl-C and ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    keep_memory()
    try:
        with torch.inference_mode():
            for rows in Runner(config, part, device, steps).run(lambda n: pipe.send(("tokens", n))):
                pipe.send(("rows", rows))
        pipe.send(("done", None))
    except HarnessError as error:
        pipe.send(("error", error))
    except BrokenPipeError:
        return
    except Exception:
        pipe.send(("error", RuntimeError(f"in a worker process:\n{traceback.format_exc()}")))


def keep_memory() -> None:
    """Ask glibc to keep freed megabytes instead of returning them: a page fault costs more than a step's sum."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        # M_MMAP_THRESHOLD (32 MiB is the most it takes), M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h
        for option, value in ((-3, 1 << 25), (-1, 1 << 30), (-2, 1 << 26)):
            libc.mallopt(option, value)
    except (OSError, AttributeError):
        # another C library: slower, same numbers
        return
