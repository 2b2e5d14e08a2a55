"""The Hydra application: Hydra composes, `Job` checks the configuration and runs its experiment.

Hydra writes no folders or logs of its own and prints no errors of its own: a single run leaves a run
directory, a sweep also a folder of records (harness.sweep).
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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

from harness import search, sweep
from harness.config import Config, validate
from harness.errors import ConfigError
from harness.experiments import EXPERIMENTS
from harness.groups import config_dir
from harness.refusals import check_keys, check_variants, no_option, refusal

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


def checked(cfg: DictConfig) -> Config:
    """The typed configuration of a composed one. Raises ConfigError."""
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
    return config


def execute(config: Config) -> dict[str, Any]:
    """Run a checked configuration's experiment: {"state": finished|skipped, "directory": ...}."""
    module, _, function = EXPERIMENTS[config.experiment].partition(":")
    return getattr(import_module(module), function)(config)


class Job:
    """The task function. It raises nothing, so that Hydra neither prints an error nor drops later jobs."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self.error: BaseException | None = None

    def __call__(self, cfg: DictConfig) -> Any:
        """Run one job; a job of a sweep leaves its record instead of an outcome."""
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            folder, overrides = Path(settings.sweep.dir), list(settings.overrides.task)
            value = None
            with sweep.recorded(folder, settings.job.num, overrides) as record:
                config = checked(cfg)
                record.update(execute(config))
                if search.searching(settings.runtime.choices):
                    value = search.told(record, config)
            return value if search.searching(settings.runtime.choices) else record
        try:
            search.check_single(settings.runtime.choices)
            self.outcome = execute(checked(cfg))
        except Exception as error:
            self.error = error
        return self.outcome


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


def plan(overrides: list[str]) -> tuple[Path, list[list[str]] | None]:
    """(results_dir, overrides of every job in the order of Hydra's sweeper; None for another sweeper)."""
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
        basic = cfg.hydra.runtime.choices["hydra/sweeper"] == "basic"
        return Path(cfg.results_dir), [list(job) for job in product(*choices.values())] if basic else None


def quoted(text: str) -> str:
    """text as a string of Hydra's override grammar."""
    # backslashes are doubled before a quote only
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + "\\'" * bool(m[2]), text) + "'"


def run_sweep(overrides: list[str]) -> int:
    """Every job of -m through Hydra's sweeper and launcher; 1 if a job failed or left no record."""
    results_dir, jobs = plan(overrides)
    if jobs is None:
        search.quiet()
    with sweep.opened(results_dir, overrides, jobs) as folder:
        try:
            _hydra(Job(), overrides, ("--multirun", f"hydra.sweep.dir={quoted(str(folder.resolve()))}"))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"records in {folder}") from None
        except Exception as error:
            # a launcher gives up when one of its workers is killed; the table says which job that was
            if not sweep.started(folder):
                raise
            print(f"harness: the launcher stopped: {sweep.headline(error)}", file=sys.stderr)
    return sweep.report(folder)
