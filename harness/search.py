"""Where a run meets a sweeper that learns from it: what it is told, and what it is kept from printing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from harness.config import Config
from harness.errors import ConfigError


def searching(choices: Mapping[str, Any]) -> bool:
    """Whether Hydra's choices (`hydra.runtime.choices`) name a sweeper that wants a number of every job."""
    return bool(choices["hydra/sweeper"] != "basic")


def check_single(choices: Mapping[str, Any]) -> None:
    """Refuse a search without -m, which would run its defaults once and vary nothing. Raises ConfigError."""
    if choices.get("search") is not None:
        raise ConfigError(f"search: {choices['search']} needs -m")


def told(record: dict[str, Any], config: Config) -> float:
    """What the sweeper is told of a job that is done; its `objective` goes into the job's record.

    A job that failed has none: the sweeper is then told None, a failed trial, and never nan, which stops a study.
    """
    from harness import objective

    record["objective"] = objective.of(record["directory"], config)
    return float(record["objective"]["value"])


def quiet() -> None:
    """Keep Optuna's own lines off standard error, where the harness prints one per job."""
    try:
        with warnings.catch_warnings():
            # its models of a data base, which no search here uses, are of an older SQLAlchemy
            warnings.simplefilter("ignore")
            import optuna
    except ImportError:
        # the sweeper is then refused when Hydra looks for it
        return
    optuna.logging.set_verbosity(logging.ERROR)
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
