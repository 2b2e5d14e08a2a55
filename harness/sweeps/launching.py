"""Between Hydra's sweeper and its launcher: a launcher that outlives the death of a worker.

A Hydra launcher gives up at the first worker that is killed, and takes the other jobs with it. Here what has ended
stays (harness.sweeps.sweep), jobs that never began are launched again, and those that died with the launcher once
more, each alone, so that the second death is its own. Hydra has no place for this: `enduring` puts it where a launcher
is made.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.cores import cores
from harness.errors import HarnessError
from harness.progress import At, meter
from harness.sweeps import sweep

# launchers that run several jobs at once on the machine of the command
HERE = ("joblib", "submitit_local", "ray")
# that start whatever they are given, however much it is: they are given as many jobs as there are cores
UNLIMITED = ("submitit_local",)
POLL = 0.5  # seconds between two looks at the records
# Ray says all that workers print, and opens a page for every sweep
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}


def launcher_of(config: DictConfig) -> str:
    """The option of hydra/launcher that a composed configuration names."""
    return str(OmegaConf.select(config, "hydra.runtime.choices.hydra/launcher"))


class Enduring(Launcher):
    """Runs every job of a batch through `inner` to its end, whatever becomes of its workers."""

    def __init__(self, inner: Launcher, config: DictConfig, planned: list[list[str]] | None, at: At) -> None:
        self.inner, self.name, self.at = inner, launcher_of(config), at
        self.folder = Path(config.hydra.sweep.dir)
        self.planned = planned
        self.jobs: dict[int, list[str]] = {}
        self.ended: dict[int, str] = {}
        self.compose = lambda overrides: None

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """What composing a job needs; `inner` has been set up where it was made."""
        loader = hydra_context.config_loader
        self.compose = lambda overrides: loader.load_sweep_config(config, overrides)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises HarnessError for jobs that were not planned, before any runs, and where no job can begin."""
        jobs = {initial_job_idx + i: list(overrides) for i, overrides in enumerate(job_overrides)}
        if self.planned is not None:
            for number, overrides in jobs.items():
                if number >= len(self.planned) or overrides != self.planned[number]:
                    raise HarnessError(f"hydra/sweeper: job {number} ({' '.join(overrides)}) was not planned")
        self.jobs |= jobs
        self._to_the_end(list(jobs))
        self._draw()
        ended = sweep.records(self.folder)
        return [self._returned(overrides, ended.get(number, {})) for number, overrides in jobs.items()]

    def _returned(self, overrides: list[str], record: dict[str, Any]) -> JobReturn:
        value = (record.get("objective") or {}).get("value", record.get("state"))
        # Hydra's own sweeper would print a failure and stop at it; one that learns decides by its max_failure_rate
        lost = self.planned is None and record.get("state") not in sweep.DONE
        made = Lost if lost else JobReturn
        return made(
            overrides=overrides, status=JobStatus.COMPLETED, _return_value=record.get("error") if lost else value
        )

    # --- one batch --------------------------------------------------------------------------------------------

    def _to_the_end(self, todo: list[int]) -> None:
        suspects: list[int] = []
        while todo:
            error = self._attempt(todo)
            begun = sweep.records(self.folder)
            fresh = [n for n in todo if n not in begun]
            suspects += [n for n in todo if n in begun and begun[n]["state"] not in sweep.ENDED]
            if error is not None:
                left = len(fresh) + len(suspects)
                print(f"harness: the launcher stopped: {sweep.headline(error)}; jobs left: {left}", file=sys.stderr)
            if fresh == todo and not self._refused(fresh):
                why = f": {sweep.headline(error)}" if error else ""
                raise HarnessError(f"hydra/launcher: {self.name} ran none of {len(todo)} jobs{why}") from error
            begun = sweep.records(self.folder)
            todo = [n for n in fresh if n not in begun]
        for number in suspects:
            self._attempt([number])

    def _refused(self, numbers: list[int]) -> bool:
        """Record those of jobs that could not begin whose configuration cannot be composed; False if all can."""
        found = False
        for number in numbers:
            try:
                self.compose(self.jobs[number])
            except HydraException as error:
                sweep.failed(self.folder, number, self.jobs[number], sweep.headline(error))
                found = True
        return found

    def _attempt(self, numbers: list[int]) -> Exception | None:
        """Launch these jobs, and wait for those of this machine. The launcher's own failure is returned."""
        try:
            if self.name == "basic":
                for number in numbers:
                    self._launch([number])
                    self._draw()
            else:
                with self._watched():
                    if self.name in UNLIMITED:
                        self._spread(numbers)
                    else:
                        for stretch in stretches(numbers):
                            self._launch(stretch)
            return None
        except Exception as error:
            self._settle()
            return error

    def _launch(self, numbers: list[int]) -> None:
        self.inner.launch([self.jobs[n] for n in numbers], numbers[0])

    def _spread(self, numbers: list[int]) -> None:
        """One launch a job, as many at once as there are cores; the first failure is raised when all have ended."""
        threads = ThreadPoolExecutor(cores(), "launch")
        futures = [threads.submit(self._launch, [n]) for n in numbers]
        try:
            wait(futures)
        except KeyboardInterrupt:
            # the jobs are in sessions of their own, which Ctrl-C does not reach
            threads.shutdown(wait=False, cancel_futures=True)
            for record in self._running():
                with suppress(ProcessLookupError):
                    os.kill(record["pid"], signal.SIGINT)
            raise
        threads.shutdown()
        for future in futures:
            future.result()

    def _settle(self) -> None:
        """Some launchers leave the other jobs running when they give up."""
        while self._running():
            time.sleep(POLL)

    def _running(self) -> list[dict[str, Any]]:
        """Records of jobs that run on this machine."""
        running = [r for r in sweep.records(self.folder).values() if r["state"] == "running"]
        return [r for r in running if r["host"] == platform.node() and sweep.alive(r)]

    # --- progress ---------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        # a record that has ended is not read again: there may be thousands
        for number, record in sweep.records(self.folder, self.ended).items():
            if record["state"] in sweep.ENDED:
                self.ended[number] = record["state"]
        states = list(self.ended.values())
        bad = states.count("failed")
        self.at(len(states), old=states.count("skipped"), note=f"{bad} failed" if bad else "")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        done = threading.Event()

        def look() -> None:
            while not done.wait(POLL):
                self._draw()

        thread = threading.Thread(target=look, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def stretches(numbers: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive numbers: a launcher counts its jobs up from the first."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][-1] == n - 1:
            found[-1].append(n)
        else:
            found.append([n])
    return found


class Lost(JobReturn):
    """A job without a value; the record has its error."""

    @property  # type: ignore[misc]
    def return_value(self) -> Any:
        """Raises HarnessError; Hydra's own would print a line first."""
        raise HarnessError(str(self._return_value or "died while running"))


@contextmanager
def _held() -> Iterator[None]:
    """Ctrl-C waits: what is compiled inside would swallow it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def enduring(progress: bool | None) -> Iterator[None]:
    """Every launcher that Hydra makes inside is an Enduring one."""
    shown = ExitStack()
    plugins = Plugins.instance()
    make, legal = plugins.instantiate_launcher, Sweeper.validate_batch_is_legal

    def made(hydra_context: Any, task_function: Any, config: DictConfig) -> Launcher:
        name = launcher_of(config)
        if name != "basic":
            with _held():
                # compiled once: every worker would do it for itself
                import harness.compiled.inspect
                import harness.compiled.lockstep  # noqa: F401
        inner: Any = make(hydra_context, task_function, config)
        if name == "ray":
            with open_dict(inner.ray_cfg):
                inner.ray_cfg.init = QUIET | dict(inner.ray_cfg.get("init") or {})
        planned = sweep.of(Path(config.hydra.sweep.dir))["jobs"]
        total = len(planned) if planned else OmegaConf.select(config, "hydra.sweeper.n_trials")
        launcher = Enduring(inner, config, planned, shown.enter_context(meter(total, "jobs", progress)))
        launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        return launcher

    plugins.instantiate_launcher = made  # type: ignore[method-assign]
    # Hydra would compose every job, one after the other, before it starts any; the plan has looked at every value
    Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        with shown:
            yield
    finally:
        plugins.instantiate_launcher = make  # type: ignore[method-assign]
        Sweeper.validate_batch_is_legal = legal  # type: ignore[method-assign]
