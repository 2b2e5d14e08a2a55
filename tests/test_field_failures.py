"""Public failures of (I+A)^-1, each as a named input: the method that broke breaks here, its remedy holds.

Where a report does not give keys, norms or window, the case says what was put in their place. Errors are of the
strictly lower part, max|T_hat - T|, beside |T| <= beta. A failure is pinned to a factor ten, since what is left after
cancellation is noise; a remedy is gated by c n u, or by u |T| |I+A| |T| where T is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hard_windows import SIGMOID_8, U, error, keys, matrix
from torch import Tensor

NOT_FINITE = math.nan


@dataclass
class Failure:
    """One report. broke: (method, format) -> pinned error, NOT_FINITE; holds: (method, format), gated by n u."""

    source: str
    A: Tensor
    broke: dict[tuple[str, str], float]
    holds: list[tuple[str, str]] = field(default_factory=list)


def repeated(m: int, broke: dict[tuple[str, str], float]) -> Failure:
    A = matrix(keys(1.0, m), SIGMOID_8, -math.log1p(math.exp(-12)))
    return Failure("vllm-project/FlashKDA#10, MoonshotAI/FlashKDA#34", A, broke, [("substitution", f) for f in U])


FAILURES: dict[str, Failure] = {
    # raw beta 8, raw gate -12, one token throughout
    "repeated token, 16": repeated(
        16, {("doubling", "fp32"): 1e-4, ("doubling", "bf16"): 8, ("doubling", "fp16, fp16 sums"): 1}
    ),
    "repeated token, 32": repeated(
        32, {("doubling", "fp32"): 8, ("doubling", "bf16"): 1e5, ("doubling", "fp16"): NOT_FINITE}
    ),
    "repeated token, 64": repeated(64, {("doubling", "fp32"): 1e10, ("doubling", "fp16"): NOT_FINITE}),
    "repeated token, 128": repeated(128, {("doubling", "fp32"): 6e29, ("doubling", "fp16"): NOT_FINITE}),
    # the remedy: substitution in fp32 on blocks of 8, merged by bf16 products
    "FlashKDA, 16 identical tokens": Failure(
        "MoonshotAI/FlashKDA#34",
        matrix(keys(1.0, 16), 0.9997, -1.03e-5),
        {("doubling", "fp16, fp16 sums"): 1},
        [("block/8", "fp32, bf16 products")],
    ),
    # keys of its layer 1 are not published: cosine .9, beta .95, g -1e-3
    "Tenstorrent, squaring of 32": Failure(
        "tenstorrent/tt-metal#54813, #55420",
        matrix(keys(0.9, 32), 0.95, -1e-3),
        {("doubling", "fp32"): 0.5, ("doubling", "tf32"): 2e4, ("doubling", "bf16"): 3e4},
        [("horner", "fp32"), ("horner", "tf32"), ("horner", "bf16"), ("block", "bf16")],
    ),
    # mild keys, on which truncation alone fails: three rounds end at A^15, four at A^31
    "vLLM, three rounds of bf16": Failure(
        "vllm-project/vllm#53864",
        matrix(keys(0.0, 64, silu=True), 0.95, -1e-3),
        {("newton/3", "bf16"): 0.1, ("newton/3", "fp32"): 0.1},
        [("newton/4", "bf16"), ("newton/4", "fp32")],
    ),
    # at cosine .3 a fourth round does not reach far enough either, nor does a fifth in bf16
    "vLLM, correlated keys": Failure(
        "vllm-project/vllm#53864",
        matrix(keys(0.3, 64), 0.95, -1e-3),
        {("newton/3", "bf16"): 5e6, ("newton/4", "bf16"): 3e4, ("newton/5", "bf16"): 30},
        [("block/16", "bf16")],
    ),
    # bf16 rounding in the diagonal inverse is harmless here: the NaN reported has another cause, or another input
    "ROCm, identical keys": Failure(
        "ROCm/aiter#4952",
        matrix(keys(1.0, 64), 0.835, -1e-3),
        {("doubling", "fp32"): 8e6, ("doubling", "bf16"): 1e12},
        [("substitution", "fp32"), ("substitution", "bf16"), ("block/16", "bf16")],
    ),
    # window and cosine are not given: 64 identical keys; wrong in every format, not finite in fp16
    "cuDNN FROST, key norms .9": Failure(
        "NVIDIA/cudnn-frontend#1051, #1124",
        matrix(keys(1.0, 64, norm=0.9), 1.0, torch.linspace(-0.034, -0.012, 64)),
        {("neumann", "fp32"): 1e7, ("neumann", "bf16"): 8e11, ("neumann", "fp16"): NOT_FINITE},
        [("block/16", "fp32"), ("block/16", "bf16"), ("block/16", "fp16")],
    ),
    # rows of |A| sum up to 39; 37.3 in layer 0 of the model
    "megagdn, whole block of 128": Failure(
        "huawei-csl/megagdn-pto#72, #74",
        matrix(keys(0.3, 128), 0.95, -1e-3),
        {("doubling", "fp16"): NOT_FINITE, ("doubling", "fp32"): 1e5},
        [("block/16", "fp16")],
    ),
    # the synthetic keys on which it was chosen
    "megagdn, Gaussian keys": Failure(
        "huawei-csl/megagdn-pto#72", matrix(keys(0.0, 128), 0.95, -1e-3), {}, [("doubling", "fp16")]
    ),
    # no report: partial sums of the series overflow on the way, though no power is formed and T is below 1
    "Horner in fp16": Failure(
        "harness.experiments.window_operator",
        matrix(keys(0.9, 32), 0.95, -1e-3),
        {("horner", "fp16"): NOT_FINITE},
        [("horner", "bf16"), ("block/16", "fp16")],
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_broke_in_the_field_breaks_here(name: str) -> None:
    """Fault: an emulation or an input so kind that a method known to fail passes, or a remedy that does not help."""
    case = FAILURES[name]
    m = case.A.shape[-1]
    for (method, form), level in case.broke.items():
        found = error(case.A, method, form)
        where = f"{name}: {method} in {form} is off by {found:.2g}, {level:.2g} is known"
        assert math.isnan(found) if math.isnan(level) else level / 10 <= found <= level * 10, where
    for method, form in case.holds:
        found = error(case.A, method, form)
        assert found <= m * U[form], (
            f"{name}: {method} in {form} is off by {found:.2g}, {found / (m * U[form]):.2g} n u"
        )
