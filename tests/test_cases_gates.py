"""Public bug reports about gates, as small inputs (family B): spans beyond exp, tiny decays, resets, masked gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, SHAPE, bf16, close, decode, design, draw, recurrence, start, windows

from harness.arithmetic import Arithmetic, Conventions, Rounding, Sites
from harness.conditioning import conditioning
from harness.config import Config, PrecisionConfig, RingConfig
from harness.errors import InputError
from harness.gates import gate_map
from harness.reference.emulated import Emulated
from harness.tokens import Tokens
from harness.variants import load, names

ARMS = Config().variants
# a cumulative record is a running sum: what a gate of -160 or 1e4 swamps in it, no difference brings back
PER_TOKEN = [name for name in names() if load(name).gate_record == "per_token"]
FP32 = PrecisionConfig(base="fp32")
LOG_MAX = np.log(np.finfo(np.float32).max)


def run(maker: Emulated, tokens: Tokens, initial: torch.Tensor) -> list[torch.Tensor]:
    """tokens [T, ...] of one slot in full windows, the last one shorter; outputs and states of every window."""
    C, T = maker.ring.max_window, len(tokens.g)
    W = -(-T // C)
    lengths = np.minimum(C, T - C * np.arange(W))[:, None]
    at = torch.arange(W * C).clamp(max=T - 1).view(W, 1, C)
    return decode(maker, initial, windows(tokens.map(lambda x: x[at]), lengths), lengths)[0]


def against_loop(tokens: Tokens, C: int, arms: Any = ARMS, **tolerances: float) -> None:
    """Every arm on windows of C against the loop: in its exact form, in fp32, and in its own rounding.

    1e-12 as in every identity; fp32: a hundred roundings of 6e-8, the ring's and the verify's; own: outputs and
    operands in bf16, 4e-3 each. An overflow or a factor lost is of size 1 or NaN.
    """
    initial = start(np.random.default_rng(0), 1)
    length = 1 << (2 * C - 1).bit_length()
    for precision, tolerance in ((EXACT, 1e-12), (FP32, 1e-5), (PrecisionConfig(), 0.03)):
        for name in PER_TOKEN if precision is EXACT else arms:
            maker = design(name, RingConfig(length, C), precision)
            S, o, _ = recurrence(initial[0], tokens, maker.arithmetic.conventions)
            trace = run(maker, tokens, initial)
            close(f"o of {name}", torch.cat(trace[0::3], -1).permute(2, 0, 1), o, tolerance)
            close(f"served state of {name}", trace[-2], S[-1], tolerance)
            close(f"kept state of {name}", trace[-1], S[-1], tolerance)


def tokens_of(T: int, g: Any) -> Tokens:
    tokens = bf16(draw(np.random.default_rng(T), T))
    tokens.g = torch.as_tensor(g, dtype=torch.float64).expand(T, SHAPE.HV).clone()
    return tokens


@pytest.mark.parametrize("g", [-5.5, -5.6])
def test_b1_a_decay_whose_inverse_overflows_fp32(g: float) -> None:
    """Fault (flashinfer#5032): e^{-G} as a factor of its own; inf from 16 tokens of -5.6 on, finite at -5.5."""
    tokens = tokens_of(129, g)
    against_loop(tokens, 16)
    window = windows(tokens.map(lambda x: x[None, None, :16]), [[16]])
    span = conditioning(window)[0, 0, :, 4]
    close("gate span", span, np.full(SHAPE.HV, -16 * g), 1e-12)
    assert ((span > LOG_MAX) == (g < -5.545)).all()


def test_b2_a_decay_of_1e_12() -> None:
    """Fault (executorch#21417): e^{G_i} times e^{-G_j}, zero times infinity from the fourth token on."""
    against_loop(tokens_of(64, np.log(1e-12)), 32)


@pytest.mark.parametrize("A_log", [-5.0, 0.0, 5.0, 100.0])
@pytest.mark.parametrize("dt", [-200.0, 0.0, 100.0, 1e4])
def test_b3_one_extreme_gate_in_a_window(A_log: float, dt: float) -> None:
    """Fault (lattice#235, #315, TensorRT-LLM#14652): -inf - -inf or inf * 0 of one token poisons S for good.

    In exact form: kernels that take a difference of sums, and so the shipped arms, have no reset to -inf.
    """
    one = torch.tensor([dt], dtype=torch.float64)
    g, _ = gate_map(one, torch.zeros(1), torch.tensor([A_log]), torch.zeros(1))
    # the limits: softplus of -200 is nothing, e^100 of anything else is a reset
    assert dt > -200 or g.exp() == 1
    assert A_log < 100 or dt == -200 or g.exp() == 0
    ordinary = tokens_of(24, -0.03)
    extreme = ordinary.map(torch.clone)
    extreme.g[12] = g
    initial = start(np.random.default_rng(1), 1)
    for name in PER_TOKEN:
        maker = design(name, RingConfig(16, 8))
        S, o, _ = recurrence(initial[0], extreme, maker.arithmetic.conventions)
        plain, trace = run(maker, ordinary, initial), run(maker, extreme, initial)
        close(f"o of {name}", torch.cat(trace[0::3], -1).permute(2, 0, 1), o)
        close(f"state of {name}", trace[-1], S[-1])
        before = [torch.cat(t[0::3], -1)[..., :12] for t in (plain, trace)]
        assert torch.equal(*before), name


def test_b3_a_reset_to_minus_infinity_ends_a_difference_of_sums() -> None:
    """Fault: an emulation kinder than the kernels. -inf - -inf is NaN where two fp32 sums are subtracted, in the
    outputs of every chunked arm and the state of an open-loop one; the recurrence and the closed loop carry on."""
    tokens = tokens_of(24, -0.03)
    tokens.g[12] = -np.inf
    initial = start(np.random.default_rng(1), 1)
    finite = {}
    for name in ("exact_recurrent", "exact_fold", "chunked_fp32"):
        trace = run(design(name, RingConfig(16, 8), PrecisionConfig()), tokens, initial)
        finite[name] = [bool(torch.isfinite(x).all()) for x in (torch.cat(trace[0::3], -1), trace[-1])]
    assert finite == {"exact_recurrent": [True, True], "exact_fold": [False, True], "chunked_fp32": [False, False]}


def test_b4_gates_of_one_among_others() -> None:
    """Fault (fla#461): a guarded exp that takes a sum rounded to +1e-8 for a positive gate, and a factor 1 for 0."""
    rng = np.random.default_rng(4)
    g = torch.nn.functional.logsigmoid(torch.from_numpy(rng.standard_normal((128, SHAPE.HV))))
    g[torch.from_numpy(rng.random(g.shape) < 0.5)] = 0.0
    tokens = tokens_of(128, -1.0)
    tokens.g = g
    against_loop(tokens, 64)
    window = windows(tokens.map(lambda x: x.view(1, 2, 64, *x.shape[1:])), [[64, 64]])
    fp32 = Rounding("fp32")
    rounded, exact = (window.decays(Arithmetic(s))[1] for s in (Sites(gate=fp32, decay=fp32), Sites()))
    # two fp32 sums of up to 30 differ by at most 64 * 2e-6; nothing is judged by its sign
    close("e^{G_i-G_j}", rounded, exact, 1e-4)
    assert rounded.max() <= 1 + 1e-4 and (rounded[exact == 1] > 0.9999).all()


def test_b4_no_gate_at_all_is_the_ungated_rule() -> None:
    """Fault: g = 0 special-cased, or a decay applied twice, which a loop with the same gates would share."""
    tokens = tokens_of(64, 0.0)
    initial = start(np.random.default_rng(5), 1)
    S = initial[0].numpy().copy()
    k = tokens.k.numpy() / np.sqrt(np.square(tokens.k.numpy()).sum(-1, keepdims=True) + 1e-6)
    for t in range(64):
        for h in range(SHAPE.HV):
            key = k[t, h // SHAPE.group]
            S[h] += tokens.beta[t, h].item() * np.outer(tokens.v[t, h].numpy() - S[h] @ key, key)
    for name in names():
        maker = design(name, RingConfig(32, 8))
        # the loop above speaks the model's conventions alone
        if maker.arithmetic.conventions == Conventions():
            close(name, run(maker, tokens, initial)[-1], S)


@pytest.mark.parametrize(
    ("field", "value", "wording"),
    [
        ("g", 176.0, "log decay"),
        ("g", np.nan, "log decay"),
        ("beta", 2.5, "in [0, 2]"),
        ("beta", np.nan, "in [0, 2]"),
        ("v", np.nan, "finite"),
        ("k", np.inf, "finite"),
    ],
)
def test_b5_inputs_no_kernel_may_be_fed(field: str, value: float, wording: str) -> None:
    """Fault (flashinfer#2490, fla#215): a positive log gate or a NaN run instead of refused, by token and head."""
    tokens = tokens_of(6, -0.1)
    getattr(tokens, field)[4, 1] = value
    with pytest.raises(InputError) as caught:
        tokens.validate(first=100)
    message = str(caught.value)
    assert message.startswith(f"{field}: ") and "token 104, head 1" in message and wording in message


def test_b5_linear_gates_are_not_log_gates() -> None:
    """Fault: alpha in (0, 1] taken for a log decay; legal resets and full memory refused with it."""
    with pytest.raises(InputError, match="g: "):
        tokens_of(4, np.exp(-0.1)).validate()
    for g in (-np.inf, -160.0, 0.0):
        tokens_of(4, g).validate()
