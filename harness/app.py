"""The Hydra application: Hydra composes, `Job` checks the configuration and runs its experiment.

Hydra writes no folders or logs of its own and prints no errors of its own: a single run leaves a run
directory, a sweep also a folder of records (harness.sweeps.sweep).
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness import provenance
from harness.composed import checked
from harness.config import Config
from harness.cores import sharing
from harness.errors import ConfigError
from harness.experiments import EXPERIMENTS
from harness.groups import config_dir
from harness.progress import shown
from harness.refusals import refusing
from harness.rundir import RunBusyError
from harness.sweeps import search, sweep
from harness.sweeps.launching import HERE, enduring
from harness.sweeps.plan import plan
from harness.sweeps.table import report

PATIENCE = 1.0  # seconds between two looks at a run that another process is at


def _register() -> None:
    schema = OmegaConf.structured(Config)
    # Hydra closes every dictionary; these two are open, and their keys are checked by harness.arithmetic
    for key in ("sites", "products"):
        OmegaConf.set_struct(schema.precision[key], False)
    ConfigStore.instance().store(name="schema", node=schema)


_register()


def execute(config: Config) -> dict[str, Any]:
    """Run a checked configuration's experiment: {"state": finished|skipped, "directory": ...}."""
    module, _, function = EXPERIMENTS[config.experiment].partition(":")
    return getattr(import_module(module), function)(config)


class Job:
    """The task function. It raises nothing, so that Hydra neither prints an error nor drops later jobs.

    A job of a sweep leaves its record, in whichever process it runs, and returns what the sweeper minimises.
    """

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self.error: BaseException | None = None

    def __call__(self, cfg: DictConfig) -> Any:
        """Run one job."""
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            return _job_of_a_sweep(settings, cfg)
        try:
            search.check_single(settings.runtime.choices)
            self.outcome = execute(checked(cfg))
        except Exception as error:
            self.error = error
        return self.outcome


def _job_of_a_sweep(settings: Any, cfg: DictConfig) -> Any:
    folder, number, overrides = Path(settings.sweep.dir), settings.job.num, list(settings.overrides.task)
    launcher, sweeper = (str(settings.runtime.choices[f"hydra/{name}"]) for name in ("launcher", "sweeper"))
    command = ["python", "-m", "harness", *overrides]

    def work() -> dict[str, Any]:
        # a worker need not start where the command was given
        os.chdir(settings.runtime.cwd)
        shared = 1 if launcher in HERE else None
        with sharing(shared), provenance.launched(command, launcher=launcher, sweep=folder.name, job=number):
            config = checked(cfg)
            outcome = _patiently(config)
            return outcome | ({"objective": search.told(outcome, config)} if sweeper != "basic" else {})

    return sweep.recorded(folder, number, overrides, work)["state"]


def _patiently(config: Config) -> dict[str, Any]:
    """Like execute; a run that another process of this machine is at is waited for."""
    while True:
        try:
            return execute(config)
        except RunBusyError as busy:
            if busy.host != platform.node():
                raise
            time.sleep(PATIENCE)


def _hydra(task: Any, overrides: list[str], flags: tuple[str, ...] = ()) -> None:
    # Hydra reads its options from sys.argv, and this variable makes it raise instead of print and exit
    before, sys.argv = sys.argv, ["harness", *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with refusing(overrides):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")(task)()
    finally:
        sys.argv = before


def show(overrides: list[str], flags: tuple[str, ...]) -> None:
    """Hydra's --cfg: print a composed configuration and run nothing."""
    _hydra(Job(), overrides, flags)


def run_single(overrides: list[str]) -> int:
    """One run in this process."""
    job = Job()
    _hydra(job, overrides)
    if job.error is not None:
        raise job.error
    if job.outcome.get("state") == "skipped":
        print(f"already done: {job.outcome.get('directory')}")
    return 0


def quoted(text: str) -> str:
    """text as a string of Hydra's override grammar."""
    # backslashes are doubled before a quote only
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + "\\'" * bool(m[2]), text) + "'"


def run_sweep(overrides: list[str], expect: int | None = None, show: bool = False) -> int:
    """Every job of -m through Hydra's sweeper and launcher; 1 if a job failed or left no record.

    expect: how many jobs there have to be; show: list them and run none.
    """
    planned = plan(overrides)
    if planned.jobs is None:
        search.quiet()
    if expect is not None and planned.total != expect:
        raise ConfigError(f"--expect: {expect} jobs expected, the command makes {planned.text()}")
    if show:
        for number, job in enumerate(planned.jobs or []):
            print(f"{number:5d}", *job)
        print(planned.text())
        return 0
    if shown(planned.progress):
        print(planned.text(), file=sys.stderr)
    facts: dict[str, Any] = {"command": ["python", "-m", "harness", "-m", *overrides], "launcher": planned.launcher}
    facts |= {"sweeper": planned.sweeper, "source": provenance.source_digest(), "commit": provenance.commit()}
    with sweep.opened(planned.results_dir, facts, planned.jobs) as folder:
        flags = "--multirun", f"hydra.sweep.dir={quoted(str(folder.resolve()))}"
        try:
            with enduring(planned.progress):
                _hydra(Job(), overrides, flags)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[f"records in {folder}"][: sweep.started(folder)]) from None
        except Exception as error:
            # the table says which job that was
            if not sweep.started(folder):
                raise
            print(f"harness: the sweep stopped: {sweep.headline(error)}", file=sys.stderr)
    return report(folder)
