"""The manual page that --help prints, made from the config folder and the dataclasses, 80 columns wide.

A key's meaning is the comment behind it in harness/config.py; MEANINGS holds those that a symbol alone would
not explain. Imports neither Hydra nor torch.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from harness import __version__
from harness.config import Config, leaves
from harness.groups import GROUPS, config_dir, options

WIDTH = 80
MEANINGS = {
    "experiment": "the question to run; see GROUPS",
    "model.name": "label of the preset",
    "model.key_heads": "key heads H",
    "model.value_heads": "value heads HV, a multiple of H",
    "model.key_dim": "width K of a key",
    "model.value_dim": "width V of a value in the real layer",
    "decode.seed": "seed of slot 0, >= 0",
    "ring.max_window": "largest window a verify may bring, in tokens",
    "precision.name": "label of the preset",
    "backend": "emulated | triton | outside (what a variant's design: names) | auto "
    "(outside, else triton on a GPU where there is a kernel); or a list to compare",
    "variants": "implementations to run side by side; see VARIANTS",
    "results_dir": "where run directories and sweep records go",
}

GROUP_MEANINGS = {
    "experiment": "the question",
    "model": "shape of one layer",
    "decode": "the token stream: input family, length, seeds",
    "acceptance": "how many tokens of each window are committed",
    "ring": "ring length and flush rule",
    "precision": "rounding of every variant except the oracle",
    "search": "with -m, what Optuna varies to make objective.* small",
}

OWN_VARIANTS = (
    "Or the path of a .yaml like those in configs/variant, or an entry point of the group replayssm_harness.designs. "
    "`design: file.py:Class` in such a file names a kernel of your own; `python -m harness.conformance` judges it."
)

HEAD = """
NAME
    harness - does a decode with a ring of records drift, where, and why

SYNOPSIS
    harness [key=value | group=option]...
    harness -m [key=value,value,... | group=option,option,...]...
    harness --cfg job [key=value]...
    harness --help | --version

    `python -m harness` is the same command.

DESCRIPTION
    Decodes one seeded stream of tokens through several implementations of
    Gated DeltaNet speculative decoding, all on one ring/checkpoint state
    model, beside an fp64 oracle. Logs the error of the served and of the kept
    state at every flush, and the conditioning of every window; then prints a
    table and draws a figure.

    Every setting is key=value. A group=option loads a file of defaults, which
    single keys then override, whatever their order. Keys are closed: an
    unknown key, a wrong type or a value out of range is refused before
    anything is written.

    A run is identified by its resolved configuration, devices and source. One
    that is finished is not run again.

OPTIONS
    -m, --multirun   run every combination of the comma-separated values.
                     range(1,9) and choice(a,b) also name several values. A
                     failing job does not stop the others; a table at the end
                     lists them all.
    -c, --cfg job    print the resolved configuration and run nothing
    -p, --package KEY, --resolve
                     with --cfg: print this part only; resolve interpolations
    --version        print the version
"""

TAIL = """
EXAMPLES
    harness
        the default arms, side by side over 16,384 tokens
    harness model=qwen3_5_35b_a3b decode.tokens=16384 ring.length=16
        the shape of a real layer
    harness variants=[exact_fold,chunked_bf16] decode.slots=8
        two arms, eight seeds
    harness precision.sites.checkpoint=bf16
        one rounding changed in every variant
    harness -m precision=fp32,bf16 ring.length=8,16,32
        six runs; repeat the command to resume

FILES
    <results_dir>/<experiment>/<content hash>/
        config.yaml      the resolved configuration
        manifest.json    versions, host, devices, effective formats, wall time
        flushes.parquet  one row per variant, slot, value head and flush
        summary.json     what the table shows
        drift.png        the figure
    <results_dir>/<experiment>/<content hash>.status.json
        running, finished or failed, and whose it is
    <results_dir>/sweeps/<name>/
        sweep.json       the command and the jobs it asks for
        NNNNN.json       one job: overrides, state, run directory, failure
        NNNNN.log        what that job printed

EXIT STATUS
    0    finished, or already done
    1    a job of a sweep failed or left no record; or a bug, with a traceback
    2    bad input: one line names the key or the item
    130  interrupted
"""


def meanings() -> dict[str, str]:
    """Dotted key -> one line."""
    found: dict[str, str] = {}

    def collect(node: Any, prefix: str) -> None:
        source = inspect.getsource(type(node))
        for f in fields(node):
            value = getattr(node, f.name)
            comment = re.search(rf"^    {f.name}: .*?  # (.*)$", source, re.M)
            if is_dataclass(value):
                collect(value, f"{prefix}{f.name}.")
            else:
                key = prefix + f.name
                found[key] = MEANINGS.get(key) or (comment[1] if comment else "")

    collect(Config(), "")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _wrap(text: str, indent: int, hang: int = 0) -> str:
    wrapper = textwrap.TextWrapper(WIDTH - 1, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * indent, " " * (indent + hang)
    return wrapper.fill(text)


def _defaults() -> dict[str, str]:
    text = (config_dir() / "config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\w+)", text, re.M))


def _groups() -> str:
    chosen = _defaults()
    lines = ["GROUPS", "    An option is a file of configs/<group>; * marks the default.", ""]
    for group in GROUPS:
        names = [name + "*" * (name == chosen.get(group)) for name in options(group)]
        lines += [f"    {group}: {GROUP_MEANINGS[group]}", _wrap(" ".join(names), 8), ""]
    return "\n".join(lines)


def _keys() -> str:
    meaning = meanings()
    lines = ["KEYS", "    With their defaults; null means not set.", ""]
    for key, value in leaves(Config()):
        shown = f"{key}={_shown(value)}"
        lines.append(_wrap(shown.replace(",", ", ") if len(shown) > WIDTH - 6 else shown, 4, 4))
        lines.append(_wrap(meaning[key], 8))
    return "\n".join(lines)


def _variants() -> str:
    names = _wrap(" ".join(options("variant")), 4)
    return "\n".join(["VARIANTS", names, "", _wrap(OWN_VARIANTS, 4), ""])


def page() -> str:
    """The whole manual."""
    title = f"HARNESS {__version__}"
    parts = [title, HEAD.strip(), _groups().strip(), _variants().strip(), _keys().strip(), TAIL.strip()]
    return "\n\n".join(parts)
