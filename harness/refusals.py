"""Bad input becomes a ConfigError that reads `<key>: <what is wrong>`, on one line.

Hydra and OmegaConf report one and the same mistake in several shapes, over several lines, with advice that
does not hold here (`+key` adds nothing to a closed schema).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.errors import ConfigError, HarnessError
from harness.groups import known_keys, nearest, options
from harness.plugins import entries

# what a reader calls the node types of OmegaConf
TYPES = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "String": "a string"}

# options that an extra of this package installs
EXTRAS = {
    ("hydra/sweeper", "optuna"): "optuna",
    ("hydra/launcher", "joblib"): "joblib",
    ("hydra/launcher", "submitit_local"): "submitit",
    ("hydra/launcher", "submitit_slurm"): "submitit",
    ("hydra/launcher", "ray"): "ray",
}


def unknown(key: str) -> ConfigError:
    """A key that no dataclass of harness.config has."""
    guess = nearest(key, known_keys())
    return ConfigError(f"{key}: unknown key; " + (f"did you mean {guess}?" if guess else "--help lists them"))


def no_option(group: str, name: str, have: list[str]) -> ConfigError:
    """A name that a group, or the list of variants, does not have."""
    if extra := EXTRAS.get((group, name)):
        return ConfigError(f"{group}: no option {name!r}; pip install 'replayssm-harness[{extra}]'")
    guess = nearest(name, have)
    hint = f"did you mean {guess}? have " if guess else "have "
    return ConfigError(f"{group}: no option {name!r}; {hint}{', '.join(have)}")


def check_variants(names: list[str]) -> None:
    """Refuse a variant that is neither a file nor an entry point. Paths are left to whoever loads them."""
    have = options("variant")
    for name in names:
        if name not in have and name not in entries() and not re.search(r"[/:.]", name):
            raise no_option("variants", name, have)


def check_keys(cfg: Any, schema: Any, prefix: str = "") -> None:
    """Refuse what + forced in and what ~ or null took out of cfg; typed nodes let all three pass."""
    defaults = {f.name: getattr(schema, f.name) for f in fields(schema)}
    for key in cfg:
        if key not in defaults:
            raise unknown(f"{prefix}{key}")
    for key, default in defaults.items():
        closed = is_dataclass(default)
        if key not in cfg or (closed and cfg[key] is None):
            raise ConfigError(f"{prefix}{key}: cannot be removed")
        if closed:
            check_keys(cfg[key], default, f"{prefix}{key}.")


def refusal(error: Exception, command: list[str]) -> HarnessError:
    """The one-line reading of an error raised while Hydra composes a configuration from `command`."""
    if isinstance(error, HarnessError):
        return error
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override or repr('')}: not key=value: {_parse_failure(str(error))}")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return no_option(group or "command line", name, list(error.options or ["none"]))
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException):
            return _bad_value(cause)
        cause = cause.__cause__
    item = " ".join(command) or "command line"
    if isinstance(error, OSError):
        return ConfigError(f"{error.filename or item}: {error.strerror or error}")
    return _composition(_first_line(error), item)


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _parse_failure(text: str) -> str:
    # what is left out repeats the override, lists tokens of the grammar, or points to a web page
    noise = ("Error parsing override", "LexerNoViableAlt", "See http")
    useful = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(noise)]
    return useful[0].partition(" expecting {")[0] if useful else "cannot be read"


def _lower(text: str) -> str:
    # a name such as DecodeConfig keeps its capitals
    return text[:1].lower() + text[1:] if re.match(r"[A-Z][a-z]*\b", text) else text


def _bad_value(error: OmegaConfBaseException) -> ConfigError:
    key, what = error.full_key or str(error.key), _first_line(error.msg or error)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return unknown(key)
    if found := re.match(r"Value (.*) of type .* could not be converted to (\w+)", what):
        return ConfigError(f"{key}: {found[1]} is not {TYPES.get(found[2], found[2])}")
    if found := re.match(r"Value (.*) is not a valid bool", what):
        return ConfigError(f"{key}: {found[1]} is not {TYPES['Boolean']}")
    if "is not a ListConfig" in what:
        return ConfigError(f"{key}: needs a list, [a,b]")
    if "does not support deletion" in what:
        return ConfigError(f"{key}: cannot be removed")
    return ConfigError(f"{key}: " + ("cannot be null" if "is not Optional" in what else _lower(what)))


def _composition(line: str, item: str) -> ConfigError:
    if found := re.match(r"Ambiguous value for argument '([^=]*)=(.*)'", line):
        return ConfigError(f"{found[1]}: several values need -m, one run each; a list is [{found[2]}]")
    if found := re.match(r"Sweep parameters '([^=]*)=.*' requires --multirun", line):
        return ConfigError(f"{found[1]}: a sweep needs -m")
    if found := re.match(r"Could not override '\+*([^']*)'", line):
        return unknown(found[1])
    return ConfigError(f"{item}: {_lower(line)}")


@contextmanager
def refusing(command: list[str]) -> Iterator[None]:
    """Whatever Hydra raises here was asked for by the command: Job itself lets nothing through."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="provider=.* is not available")
            yield
    except (HydraException, OmegaConfBaseException, ValueError, OSError, UserWarning) as error:
        raise refusal(error, command) from error
