"""How far long work is: what is done, how fast, and how long it will take. A bar on a terminal, else silence.

Whoever asks for it (`progress=true`) has a line now and then without a terminal, as in the log of a batch job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from harness.config import Config

REFRESH, LINES = 0.1, 10.0  # seconds between two drawings of the bar, or two lines without a terminal

At = Callable[..., None]  # at(done, old=0, note="")


def shown(asked: bool | None) -> bool:
    """Whether progress is shown: as asked, else on a terminal."""
    return sys.stderr.isatty() if asked is None else asked


@contextmanager
def meter(total: int | None, unit: str, asked: bool | None = None) -> Iterator[At]:
    """Yields at(done, old=0, note=""): `done` of `total` units, `old` of them found done, which the rate leaves out.

    total None: not known beforehand.
    """
    if not shown(asked):
        yield lambda done, old=0, note="": None
        return
    terminal = sys.stderr.isatty()
    with _bar(total) if terminal else nullcontext(_line) as show:
        start = last = time.monotonic()

        def at(done: int, old: int = 0, note: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > (REFRESH if terminal else LINES) or (total is not None and done >= total):
                last = now
                show(done, text(done, total, unit, (done - old) / max(now - start, 1e-9), note))

        yield at


@contextmanager
def tokens(config: Config) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called with the tokens just committed, all slots."""
    total, done = (config.decode.prefill + config.decode.tokens) * config.decode.slots, 0
    with meter(total, "tokens", config.progress) as at:

        def advance(more: int) -> None:
            nonlocal done
            done = min(done + more, total)
            at(done)

        yield advance


def text(done: int, total: int | None, unit: str, rate: float, note: str = "") -> str:
    """12 of 48 jobs, 2 failed, 30/min, 1 min 12 s left."""
    parts = [f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"] + ([note] if note else [])
    if rate > 0:
        parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{60 * rate:.3g}/min")
        if total is not None:
            parts.append(f"{duration((total - done) / rate)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """45 s, 1 min 12 s, 3 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(), TextColumn("{task.description}", markup=False)
    # no thread of its own redraws it: a decode forks
    plain: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False, "transient": True}
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, **plain) as bar:
        task = bar.add_task("starting", total=total)
        bar.refresh()
        yield lambda done, text: bar.update(task, completed=done, description=text, refresh=True)


def _line(done: int, text: str) -> None:
    print(text, file=sys.stderr, flush=True)
