"""g = -exp(A_log) softplus(a + dt_bias), beta = 1 / (1 + exp(-b)): the gate map, its domain, trained heads.

Source: huggingface/transformers, src/transformers/models/qwen3_next/modeling_qwen3_next.py;
fla-org/flash-linear-attention, fla/layers/gated_deltanet.py. Softplus is linear above 20 as in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import InputError


@dataclass(frozen=True)
class HeadClass:
    """The marginal law of one head's gates: ln(-g) and logit(beta) near normal, independent over tokens.

    g        median of g per token, < 0
    spread   standard deviation of ln(-g)
    b, b_sd  mean and standard deviation of b = logit(beta)
    dt_bias  where on softplus the head sits: -6 is its exponential part, 12 its linear part
    """

    name: str
    g: float
    spread: float
    b: float
    b_sd: float
    dt_bias: float

    @property
    def A_log(self) -> float:
        """The A_log that puts the median of g where the class has it, at a = 0."""
        return math.log(-self.g) - math.log(_softplus(self.dt_bias))

    @property
    def a_sd(self) -> float:
        """Standard deviation of a that gives `spread`, by the slope of ln softplus at dt_bias."""
        return self.spread * _softplus(self.dt_bias) * (1 + math.exp(-self.dt_bias))


# medians and logit(beta) as captured from one layer each of Qwen3-Next and Qwen3.5-0.8B, 8 x 1024 tokens
# (huawei-csl/gdn-tri-inverse, profiling/data). A name ends in the memory in tokens, 1 / mean(-g): spreads are
# set to meet it, as drift follows memory; the captured ln(-g) of the first four are not quite normal
# (spreads 1.95, 1.67, 1.86, 1.16)
TRAINED = (
    HeadClass("long_3431", -2.41e-5, 2.42, 0.24, 0.64, -6.0),
    HeadClass("long_363", -4.67e-4, 1.95, 0.07, 0.40, -6.0),
    HeadClass("mid_42", -1.73e-3, 2.51, 3.31, 1.21, -6.0),
    HeadClass("mid_7", -0.101, 0.77, 3.10, 1.13, -4.0),
    HeadClass("fast", -4.11, 0.59, -0.29, 0.80, 0.7),
    HeadClass("never_decays", -1.14e-9, 1.30, -1.44, 0.58, -6.0),
    HeadClass("long_340", -9.13e-4, 1.55, -0.75, 0.75, -6.0),
    HeadClass("memoryless", -166.0, 0.002, 5.82, 0.99, 12.0),
)


def head_class(head: int) -> HeadClass:
    """The class of global value head `head`: the trained classes in turn."""
    return TRAINED[head % len(TRAINED)]


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def softplus(x: Tensor) -> Tensor:
    """x above 20, else log1p(exp(x)); any shape, fp64; never overflows."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def gate_map(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), in fp64.

    a, b             [..., tokens, HV] or [HV], any format
    A_log, dt_bias   [HV]; A_log = -inf is a head that never decays

    Returns g in [-inf, 0], -inf being a full reset, and beta in [0, 1]; neither is ever NaN. Raises
    InputError naming the input, the token and the head if one of the four is NaN, or if opposite infinities
    leave g without a limit.
    """
    a, b, A_log, dt_bias = (x.to(torch.float64) for x in (a, b, A_log, dt_bias))
    for name, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        if x.isnan().any():
            raise InputError(f"{name}: NaN at {_where(x.isnan())}")
    x = a + dt_bias
    rate, drive = torch.exp(A_log), softplus(x)
    g = -rate * drive
    # inf * 0 has a limit: softplus(x) is exp(x) to the last bit long before it underflows
    log_drive = torch.where(x > 20, x.clamp(min=1).log(), torch.where(x < -40, x, softplus(x).log()))
    g = torch.where(rate.isinf() | (drive == 0), -torch.exp(A_log + log_drive), g)
    g = torch.where(rate == 0, torch.zeros_like(g), g)
    if g.isnan().any():
        raise InputError(f"a, A_log, dt_bias: opposite infinities at {_where(g.isnan())}: g has no limit")
    return g, torch.sigmoid(b)


def require_log(g: Tensor, first: int = 0) -> None:
    """Refuse gates that are not log decays. g [..., tokens, HV] or [HV], the first token being `first`.

    Raises InputError naming the gate space, the token and the head for a NaN or a positive log decay. Linear
    gates, alpha = exp(g) in (0, 1], are caught here, as all are positive.
    """
    wrong = ~(g <= 0)
    if wrong.any():
        value = g[tuple(wrong.nonzero()[0].tolist())].item()
        hint = "; all lie in [0, 1]: linear gates?" if ((g >= 0) & (g <= 1)).all() else ""
        place = _where(wrong, first)
        raise InputError(f"g: {value:g} at {place} is outside the log gate space [-inf, 0]{hint}")


def log_decay(alpha: Tensor, first: int = 0) -> Tensor:
    """g = ln(alpha) of linear gates alpha [..., tokens, HV] in [0, 1]; alpha = 0 is a reset.

    Raises InputError naming the gate space, the token and the head otherwise; log gates are negative.
    """
    wrong = ~((alpha >= 0) & (alpha <= 1))
    if wrong.any():
        value = alpha[tuple(wrong.nonzero()[0].tolist())].item()
        hint = "; all are <= 0: log gates?" if (alpha <= 0).all() else ""
        place = _where(wrong, first)
        raise InputError(f"alpha: {value:g} at {place} is outside the linear gate space [0, 1]{hint}")
    return torch.log(alpha.to(torch.float64))


def _where(wrong: Tensor, first: int = 0) -> str:
    """The first true entry of a mask [..., tokens, HV] or [HV], in words."""
    at = wrong.nonzero()[0].tolist()
    return f"token {first + at[-2]}, head {at[-1]}" if len(at) > 1 else f"head {at[-1]}"
