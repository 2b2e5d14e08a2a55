"""S_t = e^g S_{t-1} + k̂ (β (v - (e^g S_{t-1})ᵀ k̂))ᵀ, o_t = S_tᵀ q̂_t: the recurrence of transformers, in fp32.

A Python loop over tokens in plain torch, state [K, V]. It is what anyone without a GPU kernel would use, and what
the speed of this harness is quoted against.

Source: huggingface/transformers src/transformers/models/qwen3_next/modeling_qwen3_next.py,
torch_recurrent_gated_delta_rule. The norm is its use_qk_l2norm_in_kernel, x / sqrt(Σx² + 1e-6) as here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from harness.errors import HarnessError
from harness.tokens import Tokens

NAME = "transformers"
FUNCTION = "torch_recurrent_gated_delta_rule"
MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"
EXTRA = "bench"


def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """The peer's function without decorators, one of which may put a kernel in its place.

    Raises HarnessError naming the extra where transformers is missing or has no such function.
    """
    need = f"pip install 'replayssm-harness[{EXTRA}]'"
    try:
        return inspect.unwrap(getattr(import_module(MODULE), FUNCTION))
    except ModuleNotFoundError as error:
        raise HarnessError(f"{NAME}: no module {error.name}; {need}") from error
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"{NAME} {version()}: no {MODULE}.{FUNCTION} ({error}); {need}") from error


def version() -> str | None:
    """The installed version, None without one."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def inputs(tokens: Tokens, initial: Tensor) -> dict[str, Any]:
    """Its arguments, fp32: tokens with leading axes [slots, T], initial state [slots, HV, V, K]."""

    def single(x: Tensor) -> Tensor:
        return x.to(torch.float32).contiguous()

    # value heads share keys in turn; older releases leave the repetition to the caller
    group = tokens.v.shape[-2] // tokens.k.shape[-2]
    return {
        "query": single(tokens.q.repeat_interleave(group, -2)),
        "key": single(tokens.k.repeat_interleave(group, -2)),
        "value": single(tokens.v),
        "g": single(tokens.g),
        "beta": single(tokens.beta),
        "initial_state": single(initial.transpose(-1, -2)),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def decode(function: Callable[..., tuple[Tensor, Tensor]], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One pass: outputs [slots, T, HV, V] and the last state [slots, HV, V, K]."""
    with torch.inference_mode():
        o, S = function(**arguments)
    return o, S.transpose(-1, -2)
