"""The Hydra application: Hydra composes, `Job` checks the configuration and runs its experiment.

Hydra writes no folders or logs of its own and prints no errors of its own: a single run leaves a run
directory, a sweep also a folder of records (harness.sweep).
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness import provenance, sweep
from harness.config import Config, validate
from harness.cores import sharing
from harness.errors import ConfigError
from harness.experiments import EXPERIMENTS
from harness.groups import config_dir
from harness.launching import HERE, enduring, launcher_of
from harness.progress import shown
from harness.refusals import check_keys, check_variants, no_option, refusal
from harness.rundir import RunBusyError
from harness.sweep_table import report

LONG = 20  # values of one key that are all composed beforehand
PATIENCE = 1.0  # seconds between two looks at a run that another process is at
CHOSEN_HERE = {
    "hydra.mode": "a sweep is asked for with -m",
    "hydra.sweep.dir": "a sweep's folder is <results_dir>/sweeps/<name>",
    "hydra.sweep.subdir": "the jobs of a sweep share its folder",
}


def _register() -> None:
    schema = OmegaConf.structured(Config)
    # Hydra closes every dictionary; these two are open, and their keys are checked by harness.arithmetic
    for key in ("sites", "products"):
        OmegaConf.set_struct(schema.precision[key], False)
    ConfigStore.instance().store(name="schema", node=schema)


_register()


def execute(cfg: DictConfig) -> dict[str, Any]:
    """Check a composed configuration, run its experiment: {"state": finished|skipped, "directory": ...}."""
    try:
        check_keys(cfg, Config())
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise refusal(error, []) from error
    assert isinstance(config, Config)
    validate(config)
    check_variants(config.variants)
    if config.experiment not in EXPERIMENTS:
        raise no_option("experiment", config.experiment, list(EXPERIMENTS))
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
            self.outcome = execute(cfg)
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
            return _patiently(cfg)

    return sweep.recorded(folder, number, overrides, work)["state"]


def _patiently(cfg: DictConfig) -> dict[str, Any]:
    """Like execute; a run that another process of this machine is at is waited for."""
    while True:
        try:
            return execute(cfg)
        except RunBusyError as busy:
            if busy.host != platform.node():
                raise
            time.sleep(PATIENCE)


@contextmanager
def _refusing(command: list[str]) -> Iterator[None]:
    """Whatever Hydra raises here was asked for by the command: Job itself lets nothing through."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="provider=.* is not available")
            yield
    except (HydraException, OmegaConfBaseException, ValueError, OSError, UserWarning) as error:
        raise refusal(error, command) from error


def _hydra(task: Any, overrides: list[str], flags: tuple[str, ...] = ()) -> None:
    # Hydra reads its options from sys.argv, and this variable makes it raise instead of print and exit
    before, sys.argv = sys.argv, ["harness", *flags, *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _refusing(overrides):
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


@dataclass
class Plan:
    """What a sweep is going to be. jobs: the overrides of each, in the order of Hydra's own sweeper, or None where
    another sweeper chooses them as it goes."""

    results_dir: Path
    jobs: list[list[str]] | None
    launcher: str
    sweeper: str
    progress: bool | None
    swept: dict[str, int]  # key -> number of its values

    def text(self) -> str:
        """6 jobs: precision 3 x ring.length 2."""
        if self.jobs is None:
            return f"as many jobs as {self.sweeper} asks for"
        many = [f"{key} {n}" for key, n in self.swept.items() if n > 1]
        return f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}" + (": " + " × ".join(many) if many else "")


def plan(overrides: list[str]) -> Plan:
    """Read a command line and compose every value of it once: whatever can be refused is refused here."""
    with _refusing(overrides), hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides)
        for override in parsed:
            key = override.key_or_group
            if key in CHOSEN_HERE:
                raise ConfigError(f"{key}: cannot be set; {CHOSEN_HERE[key]}")
            if key == "results_dir" and override.is_sweep_override():
                raise ConfigError("results_dir: a sweep has one")
        fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
        cfg = hydra.compose("config", overrides=fixed, return_hydra_config=True)
        choices: dict[str, list[str]] = {}
        for override in parsed:
            key = override.get_key_element()
            if override.is_hydra_override():
                continue
            if not override.is_sweep_override():
                choices[key] = [f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        sweeper = cfg.hydra.runtime.choices["hydra/sweeper"]
        jobs = None
        if sweeper == "basic":
            jobs = [list(job) for job in product(*choices.values())]
            _compose_each(choices)
        swept = {key: len(values) for key, values in choices.items()}
        return Plan(Path(cfg.results_dir), jobs, launcher_of(cfg), sweeper, cfg.progress, swept)


def _compose_each(choices: dict[str, list[str]]) -> None:
    """Compose with every value once, the other keys at their first: a typing error ends a sweep before it starts."""
    first = [values[0] for values in choices.values()]
    for i, values in enumerate(choices.values()):
        # of a long range its ends tell
        for value in values[1:] if len(values) <= LONG else values[-1:]:
            hydra.compose("config", overrides=[*first[:i], value, *first[i + 1 :]])


def quoted(text: str) -> str:
    """text as a string of Hydra's override grammar."""
    # backslashes are doubled before a quote only
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + "\\'" * bool(m[2]), text) + "'"


def run_sweep(overrides: list[str], expect: int | None = None, show: bool = False) -> int:
    """Every job of -m through Hydra's sweeper and launcher; 1 if a job failed or left no record.

    expect: how many jobs there have to be; show: list them and run none.
    """
    planned = plan(overrides)
    if expect is not None and (planned.jobs is None or len(planned.jobs) != expect):
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
            raise KeyboardInterrupt(f"records in {folder}") from None
        except Exception as error:
            # the table says which job that was
            if not sweep.started(folder):
                raise
            print(f"harness: the sweep stopped: {sweep.headline(error)}", file=sys.stderr)
    return report(folder)
