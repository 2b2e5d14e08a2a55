"""What every design decodes: the raw inputs of a run of tokens, and the shape of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.errors import ConfigError, InputError

if TYPE_CHECKING:
    from harness.config import ModelConfig


@dataclass(frozen=True)
class Shape:
    """One GDN layer: S is [HV, V, K]; value head i reads key head i // (HV/H). V counts the value rows simulated."""

    H: int
    HV: int
    V: int
    K: int

    def __post_init__(self) -> None:
        for name in ("H", "HV", "V", "K"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}: {getattr(self, name)} is not a positive size")
        if self.HV % self.H:
            raise ConfigError(f"model.value_heads: {self.HV} value heads do not divide over {self.H} key heads")

    @staticmethod
    def of(model: ModelConfig) -> Shape:
        """The layer of a run."""
        return Shape(model.key_heads, model.value_heads, model.rows or model.value_dim, model.key_dim)

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.HV // self.H


@dataclass
class Tokens:
    """Raw inputs, fp64 carriers of activation-format values; the leading axes are free but equal in all five.

    q, k  [..., H, K]   before the norm
    v     [..., HV, V]
    g     [..., HV]     log decay, <= 0; -inf is a reset
    beta  [..., HV]     in [0, 2]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def map(self, f: Any) -> Tokens:
        """Apply f to each of the five tensors."""
        return Tokens(*(f(getattr(self, x.name)) for x in fields(self)))

    def heads(self, keys: slice, values: slice) -> Tokens:
        """The tokens as a layer of fewer heads sees them."""
        return Tokens(
            self.q[..., keys, :],
            self.k[..., keys, :],
            self.v[..., values, :],
            self.g[..., values],
            self.beta[..., values],
        )

    def validate(self, first: int = 0) -> None:
        """Refuse what no kernel may be fed. Axis -1 of the leading axes counts tokens, the first being `first`.

        Raises InputError naming the field, the token and the head: NaN or inf in q, k, v; NaN in g or beta;
        g > 0; beta outside [0, 2].
        """
        # one sum a row finds what is not finite at a tenth of the cost; activations are far from overflowing it
        wrong = {
            "q": ~torch.isfinite(self.q.sum(-1)),
            "k": ~torch.isfinite(self.k.sum(-1)),
            "v": ~torch.isfinite(self.v.sum(-1)),
            "g": ~(self.g <= 0),
            "beta": ~((self.beta >= 0) & (self.beta <= 2)),
        }
        rule = {"g": "a log decay in [-inf, 0]", "beta": "in [0, 2]"}
        # a device is asked once
        found = torch.stack([mask.any() for mask in wrong.values()]).tolist()
        for bad, (name, mask) in zip(found, wrong.items(), strict=True):
            if bad:
                at = mask.nonzero()[0].tolist()
                value = getattr(self, name)[tuple(at)]
                value = value if value.ndim == 0 else value[~torch.isfinite(value)][0]
                where = f"token {first + at[-2]}, head {at[-1]}" if len(at) > 1 else f"head {at[-1]}"
                raise InputError(f"{name}: {value.item():g} at {where} is not {rule.get(name, 'finite')}")


def on_cpu(x: Tensor) -> bool:
    """Whether compiled kernels reach x; the bookkeeping of a run asks here alone which way it goes."""
    return x.device.type == "cpu"


def on_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Arrays as tensors there; what is under way on a device is not waited for."""
    there = (torch.from_numpy(x) for x in arrays)
    if device.type == "cuda":
        # a copy out of memory that may be paged waits for the work ahead of it
        there = (x.pin_memory() for x in there)
    return [x.to(device, non_blocking=True) for x in there]


def on_host(*xs: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
    """Tensors in the CPU's memory, and what waits until they hold their numbers, if they are still on their way."""
    if not xs[0].is_cuda:
        return [x.cpu() for x in xs], lambda: None
    there = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in xs]
    done = torch.cuda.Event()
    done.record()
    return there, done.synchronize
