"""What a sweep is going to be, read from its command line and checked before any job of it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from harness.composed import checked
from harness.errors import ConfigError
from harness.groups import config_dir
from harness.refusals import refusing
from harness.sweeps.launching import launcher_of

LONG = 20  # values of one key that are all composed beforehand
SHORT = {"seed": "decode.seed"}
CHOSEN_HERE = {
    "hydra.mode": "a sweep is asked for with -m",
    "hydra.sweep.dir": "a sweep's folder is <results_dir>/sweeps/<name>",
    "hydra.sweep.subdir": "the jobs of a sweep share its folder",
    "hydra.sweeper.params": "a key is swept as key=a,b, several by a file of configs/sweep",
}


def lengthened(overrides: list[str]) -> list[str]:
    """Overrides with the short names of keys replaced: seed=range(8) is decode.seed=range(8). Raises ConfigError."""
    found = []
    given = {text.partition("=")[0] for text in overrides}
    for text in overrides:
        key, equals, value = text.partition("=")
        if SHORT.get(key) in given:
            raise ConfigError(f"{key}: is short for {SHORT[key]}, which is given too")
        found.append(SHORT.get(key, key) + equals + value)
    return found


@dataclass
class Plan:
    """What a sweep is going to be. jobs: the overrides of each, in the order of Hydra's own sweeper, or None where
    another sweeper chooses them as it goes, `trials` of them."""

    results_dir: Path
    jobs: list[list[str]] | None
    launcher: str
    sweeper: str
    progress: bool | None
    swept: dict[str, int]  # key -> number of its values
    trials: int | None = None

    @property
    def total(self) -> int | None:
        """How many jobs there will be; None where only the sweeper knows."""
        return self.trials if self.jobs is None else len(self.jobs)

    def text(self) -> str:
        """6 jobs: precision 3 x ring.length 2."""
        many = " × ".join(f"{key} {n}" for key, n in self.swept.items() if n > 1)
        if self.jobs is None:
            asked = "jobs" if self.trials is None else f"{self.trials} jobs"
            return f"{asked} chosen by {self.sweeper}" + (f" among {many}" if many else "")
        return f"{len(self.jobs)} job{'s' * (len(self.jobs) != 1)}" + (f": {many}" if many else "")


def plan(overrides: list[str]) -> Plan:
    """Read a command line and compose every value of it once: whatever can be refused is refused here."""
    with refusing(overrides), hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides)
        for override in parsed:
            key = override.key_or_group
            if key in CHOSEN_HERE:
                raise ConfigError(f"{key}: cannot be set; {CHOSEN_HERE[key]}")
            if key == "results_dir" and override.is_sweep_override():
                raise ConfigError("results_dir: a sweep has one")
            if key == "sweep" and override.is_sweep_override():
                raise ConfigError("sweep: one study at a time")
        fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
        cfg = hydra.compose("config", overrides=fixed, return_hydra_config=True)
        # Hydra's sweeper reads those of a study first, so that the command line has the last word
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
        try:
            parsed = parser.parse_overrides([f"{key}={value}" for key, value in params.items()]) + parsed
        except (HydraException, AttributeError) as error:
            raise ConfigError(f"hydra.sweeper.params: {' '.join(str(error).split())}") from error
        choices: dict[str, list[str]] = {}
        for override in parsed:
            key = override.get_key_element()
            if override.is_hydra_override():
                continue
            if not override.is_sweep_override():
                choices[key] = [f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
                if not choices[key]:
                    raise ConfigError(f"{override.input_line}: no values")
        sweeper = cfg.hydra.runtime.choices["hydra/sweeper"]
        jobs = None
        if sweeper == "basic":
            jobs = [list(job) for job in product(*choices.values())]
            _compose_each(choices)
        swept = {key: len(values) for key, values in choices.items()}
        _check_first([values[0] for values in choices.values()], [key for key, n in swept.items() if n > 1])
        trials = {name: OmegaConf.select(cfg, f"hydra.sweeper.{name}") for name in ("n_trials", "n_jobs")}
        for name, n in trials.items():
            if n is not None and not (isinstance(n, int) and n > 0):
                raise ConfigError(f"hydra.sweeper.{name}: {n!r} is not an integer above 0")
        return Plan(Path(cfg.results_dir), jobs, launcher_of(cfg), sweeper, cfg.progress, swept, trials["n_trials"])


def _check_first(first: list[str], swept: list[str]) -> None:
    """Refuse what is wrong with every job: a mistake in the first that has nothing to do with what is swept."""
    cfg = hydra.compose("config", overrides=first)
    try:
        checked(cfg)
    except ConfigError as error:
        if not any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", str(error)) for key in swept):
            raise


def _compose_each(choices: dict[str, list[str]]) -> None:
    """Compose with every value once, the other keys at their first: a typing error ends a sweep before it starts."""
    first = [values[0] for values in choices.values()]
    for i, values in enumerate(choices.values()):
        # of a long range its ends tell
        for value in values[1:] if len(values) <= LONG else values[-1:]:
            hydra.compose("config", overrides=[*first[:i], value, *first[i + 1 :]])
