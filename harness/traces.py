"""Captured gates: log_decay and beta [tokens, heads] of a real layer, read from a safetensors file.

Token t takes row t mod rows and value head h column h mod columns, so a short capture of a few heads drives a
decode of any length and shape. Source of the format: captures of huawei-csl/gdn-tri-inverse, profiling/data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.errors import ConfigError, InputError
from harness.gates import require_log


@dataclass(frozen=True)
class Trace:
    """g, beta [rows, columns] fp64: log decay <= 0 and beta in [0, 2]."""

    g: Tensor
    beta: Tensor

    def at(self, tokens: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """(g, beta) [tokens, heads] of token numbers [tokens] and global value heads [heads], both int64."""
        rows, columns = self.g.shape
        index = ((tokens % rows)[:, None], (heads % columns)[None, :])
        return self.g[index], self.beta[index]


def load(path: str) -> Trace:
    """Read and check a gate file.

    Raises ConfigError for a file that is missing, unreadable, truncated, not safetensors, lacks a tensor, or
    holds one of another rank, shape or type; InputError for values no gate may have, naming the token (row)
    and the head (column). Both messages start with decode.gates and the path.
    """
    where = f"decode.gates: {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file")
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in ("log_decay", "beta"):
                if name not in names:
                    raise ConfigError(f"{where}: holds no tensor {name!r}")
                found[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{where}: not a readable safetensors file ({_line(error)})") from error
    g, beta = found["log_decay"], found["beta"]
    for name, x in found.items():
        if x.ndim != 2 or not x.numel() or not x.is_floating_point():
            kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
            raise ConfigError(f"{where}: {name} is {kind}, not floating point [tokens, heads]")
    if g.shape != beta.shape:
        raise ConfigError(f"{where}: log_decay {list(g.shape)} and beta {list(beta.shape)} differ in shape")
    g, beta = g.to(torch.float64), beta.to(torch.float64)
    try:
        require_log(g)
    except InputError as error:
        raise InputError(f"{where}: log_decay: {str(error).removeprefix('g: ')}") from error
    wrong = ~((beta >= 0) & (beta <= 2))
    if wrong.any():
        token, head = wrong.nonzero()[0].tolist()
        raise InputError(f"{where}: beta: {beta[token, head].item():g} at token {token}, head {head} is not in [0, 2]")
    return Trace(g, beta)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
