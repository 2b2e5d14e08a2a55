"""From what Hydra composes to a typed configuration that is known to make sense."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import Config, validate
from harness.experiments import EXPERIMENTS
from harness.refusals import check_keys, check_variants, no_option, refusal


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
