"""Where a run meets a sweeper that learns from it: what it is told, and what it is kept from printing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from harness.config import Config
from harness.errors import ConfigError


def check_single(choices: Mapping[str, Any]) -> None:
    """Refuse a study without -m, which would run its defaults once and vary nothing. Raises ConfigError."""
    if choices.get("sweep") is not None:
        raise ConfigError(f"sweep: {choices['sweep']} needs -m")


def told(outcome: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The objective of a job that is done; its `value` is what the sweeper is told.

    A job that failed has none: the sweeper is then told its state, a failed trial, and never nan, which stops a study.
    """
    from harness.sweeps import objective

    return objective.of(outcome["directory"], config)


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
