"""Where the configuration files lie and which options they offer. Light: --help needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

from harness.config import Config, leaves

GROUPS = ("experiment", "model", "decode", "acceptance", "ring", "precision", "search")


def config_dir() -> Path:
    """configs/: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configs/config.yaml in or beside {package}")


def options(group: str) -> list[str]:
    """Names of the files of a group, or of `variant`, which is no Hydra group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def known_keys() -> list[str]:
    """Every key and group that a command line may name."""
    return list(dict.fromkeys([key for key, _ in leaves(Config())] + [f.name for f in fields(Config)] + [*GROUPS]))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: similar in the same group, equal after the last dot, or similar."""
    names = list(names)
    group, dot, leaf = name.rpartition(".")
    siblings = {n.rpartition(".")[2]: n for n in names if dot and n.startswith(group + dot)}
    if siblings:
        return next((siblings[n] for n in get_close_matches(leaf, siblings, n=1)), None)
    same = [n for n in names if "." in n and n.rpartition(".")[2] == leaf]
    return next(iter(same or get_close_matches(name, names, n=1)), None)
