"""The rounder, bit for bit: against torch and ml_dtypes from fp32 values, against rationals from fp64 values."""

import math
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.arithmetic import Rounding
from harness.compiled.rounding import code, round_rows
from harness.errors import ConfigError
from harness.precision import FORMATS, narrow, round_to, uniform

F64 = torch.float64
# name: significand bits, smallest normal exponent, largest number, what lies beyond; typed from the definitions
TABLE = {
    "fp32": (24, -126, 3.4028234663852886e38, "inf"),
    "tf32": (11, -126, 3.4011621342146535e38, "inf"),
    "bf16": (8, -126, 3.3895313892515355e38, "inf"),
    "fp16": (11, -14, 65504.0, "inf"),
    "e5m2": (3, -14, 57344.0, "inf"),
    "e4m3": (4, -6, 448.0, "saturate"),
    "e4m3_nan": (4, -6, 448.0, "nan"),
}
NEAREST_AND_ZERO = [(name, mode) for name in TABLE for mode in ("nearest", "zero")]


def exactly(x: float, name: str, mode: str) -> float:
    """One number rounded in rational arithmetic, from the definition of the format."""
    p, emin, largest, beyond = TABLE[name]
    if math.isnan(x):
        return x
    outside = {"inf": math.inf, "saturate": largest, "nan": math.nan}[beyond]
    if math.isinf(x):
        return math.copysign(outside, x)
    exponent = max(math.frexp(x)[1] - 1, emin)
    quantum = Fraction(2) ** (exponent - p + 1)
    n, rest = divmod(abs(Fraction(x)), quantum)
    if mode == "nearest" and (2 * rest > quantum or (2 * rest == quantum and n % 2)):
        n += 1
    value = n * quantum
    if value > largest:
        return math.copysign(largest if mode == "zero" else outside, x)
    return math.copysign(float(value), x)


def same_bits(got: Tensor, want: Tensor) -> None:
    """Equal bit for bit, signs of zeros included; any NaN equals any other."""
    assert got.dtype == want.dtype == F64
    wrong = (got.view(torch.int64) != want.view(torch.int64)) & ~(got.isnan() & want.isnan())
    assert not wrong.any(), f"got {got[wrong][:5].tolist()}, want {want[wrong][:5].tolist()}"


@cache
def fp32_patterns() -> Tensor:
    """fp32 numbers of every exponent: all upper halves with the low bits that decide a tie, and random ones."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x5000], np.uint32)
    drawn = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits = np.concatenate([(upper[:, None] | low).ravel(), drawn])
    return torch.from_numpy(bits.view(np.float32).copy())


@cache
def fp64_values(name: str) -> Tensor:
    """Neighbours, ties and near-ties of a format at every scale, its limits, and numbers no format contains."""
    p, emin, largest, _ = TABLE[name]
    draw = np.random.default_rng(2)
    values = [0.0, 5e-324, 2.2e-308, 1e-300, 1e300, 1.7976931348623157e308, math.inf, math.nan]
    scales = [*range(emin - p - 2, emin + 3), *range(-3, 4), *draw.integers(emin, -emin, 20).tolist()]
    for e in scales:
        for n in (0, 1, 2, 3, *draw.integers(1 << (p - 1), 1 << p, 4).tolist()):
            for part in (0.0, 0.25, 0.5, 0.75, draw.random()):
                # what is nudged by less than an fp32 unit becomes a tie on the way through fp32
                for nudge in (0.0, 2.0**-28, -(2.0**-28)):
                    values.append(math.ldexp((n + part) * (1 + nudge), e - p + 1))
    half = math.ldexp(1.0, math.frexp(largest)[1] - 1 - p)
    for at in (largest, largest + half, largest + 2 * half, 1.5 * largest):
        values += [math.nextafter(at, 0.0), at, math.nextafter(at, math.inf)]
    values += draw.integers(0, 0x7FF0 << 48, 300).astype(np.int64).view(np.float64).tolist()
    return torch.tensor(values + [-x for x in values], dtype=F64)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("e5m2", torch.float8_e5m2),
        ("e4m3", torch.float8_e4m3fn),
    ],
)
def test_nearest_equals_the_cast_of_torch(name: str, dtype: torch.dtype) -> None:
    """Faults: ties away from zero, flushed subnormals, a saturated infinity, an overflow one unit too early."""
    x = fp32_patterns()
    if name == "e4m3" and torch.tensor(1e6).to(dtype).isnan():
        x = x[(x.abs() <= 464) | x.isnan()]  # older casts give NaN beyond the range instead of saturating
    same_bits(round_to(x.double(), FORMATS[name]), x.to(dtype).double())


def test_nearest_equals_the_cast_of_ml_dtypes() -> None:
    """Fault: e4m3 without infinities saturates, or turns NaN at 448 already."""
    x = fp32_patterns()
    with np.errstate(invalid="ignore", over="ignore"):
        want = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
    same_bits(round_to(x.double(), FORMATS["e4m3_nan"]), want)


@pytest.mark.parametrize(("name", "mode"), NEAREST_AND_ZERO)
def test_rounding_from_fp64_is_exact(name: str, mode: str) -> None:
    """Faults: double rounding through fp32, ties, subnormals, the overflow threshold, signs of zeros."""
    x = fp64_values(name)
    want = torch.tensor([exactly(v, name, mode) for v in x.tolist()], dtype=F64)
    before = x.clone()
    same_bits(round_to(x, FORMATS[name], mode), want)
    same_bits(x, before)


@pytest.mark.parametrize("name", TABLE)
def test_toward_zero_stays_finite_and_never_grows(name: str) -> None:
    """Fault: truncation reaches infinity, or steps outward where a cast did."""
    x = fp64_values(name)
    finite = x[x.isfinite()]
    got = round_to(finite, FORMATS[name], "zero")
    assert (got.abs() <= finite.abs()).all()
    assert got.abs().max() == TABLE[name][2]


@pytest.mark.parametrize(("name", "mode"), NEAREST_AND_ZERO)
def test_narrow_is_round_to_on_fp32_numbers(name: str, mode: str) -> None:
    """Fault: a shortcut for fp32 inputs that differs in a subnormal, a tie or an infinity."""
    x = fp32_patterns().double()
    same_bits(narrow(x, FORMATS[name], mode), round_to(x, FORMATS[name], mode))


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize(("name", "mode"), NEAREST_AND_ZERO)
def test_compiled_rows_are_round_to(name: str, mode: str, width: int) -> None:
    """Faults: a row judged safe by the exponent of its largest number, which still rounds past the top of the format;
    a subnormal or a zero taken for a number whose pattern may lose bits; a carry lost at the end of a binade.

    Numbers lie in rows of their own size, so that every way through the row is taken by numbers at its edges.
    """
    x = torch.cat((fp64_values(name), fp32_patterns()[::7].double()))
    x = x[x.abs().nan_to_num(torch.inf).argsort(stable=True)]
    x = x[: len(x) // width * width].view(-1, width)
    rows = x.numpy().copy()
    for i in range(len(rows)):
        round_rows(rows, i, i + 1, code(Rounding(name, mode)))
    same_bits(torch.from_numpy(rows), round_to(x, FORMATS[name], mode))


def test_tf32_truncates_as_tensor_cores_do() -> None:
    """Fault: tf32 operands rounded to nearest, as textbooks have it, or to 11 fraction bits."""
    x = torch.tensor([1 + 3 * 2.0**-11, -1 - 3 * 2.0**-11], dtype=F64)
    assert round_to(x, FORMATS["tf32"], "zero").tolist() == [1 + 2.0**-10, -1 - 2.0**-10]
    assert round_to(x, FORMATS["tf32"]).tolist() == [1 + 2.0**-9, -1 - 2.0**-9]


def test_fp64_is_the_carrier_itself() -> None:
    """Fault: the widest format rounds, or another carrier is accepted."""
    x = fp64_values("fp16")
    same_bits(round_to(x, FORMATS["fp64"]), x)
    with pytest.raises(ConfigError, match="carrier"):
        round_to(x.float(), FORMATS["bf16"])
    with pytest.raises(ConfigError, match="sideways"):
        round_to(x, FORMATS["bf16"], "sideways")


@pytest.mark.parametrize("name", TABLE)
def test_stochastic_keeps_what_is_exact_and_picks_a_neighbour(name: str) -> None:
    """Faults: an exact value moves, or a draw lands on neither neighbour."""
    x = fp64_values(name)
    x = x[x.abs() <= TABLE[name][2]][None]
    draws = [round_to(x, FORMATS[name], "stochastic", torch.tensor([seed])) for seed in range(8)]
    low = round_to(x, FORMATS[name], "zero")
    for got in draws:
        exact = low == x
        assert torch.equal(got[exact], x[exact])
        inward, outward = got == low, got.abs() > x.abs()
        assert (inward | outward).all()
        # one unit out, truncated again half a unit further in, is the inner neighbour
        middle = (got + low) / 2
        assert torch.equal(round_to(middle[outward], FORMATS[name], "zero"), low[outward])
    assert any(not torch.equal(draws[0], other) for other in draws[1:])


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_is_unbiased(fraction: float, sign: int) -> None:
    """Fault: rounding up with the wrong probability, or mirrored for negative numbers. Within five sigma."""
    unit, keys, count = 2.0**-7, 500, 400
    x = torch.full((keys, count), sign * (1 + fraction * unit), dtype=F64)
    y = round_to(x, FORMATS["bf16"], "stochastic", torch.arange(keys))
    sigma = unit * math.sqrt(fraction * (1 - fraction) / (keys * count))
    assert abs((y - x).mean().item()) <= 5 * sigma
    # means over keys and over positions scatter as independent draws do
    for axis, n in ((0, keys), (1, count)):
        scatter = (y - x).mean(axis).std().item() / (unit * math.sqrt(fraction * (1 - fraction) / n))
        assert 0.8 < scatter < 1.2


def test_a_draw_depends_on_its_key_alone() -> None:
    """Faults: draws that depend on the batch or on the order of calls; a missing key that is not noticed."""
    x = torch.rand(5, 3, 7, dtype=F64, generator=torch.Generator().manual_seed(3))
    keys, fmt = torch.tensor([4, -1, 4, 1 << 60, 7]), FORMATS["bf16"]
    whole = round_to(x, fmt, "stochastic", keys)
    order = [3, 0, 4, 2, 1]
    same_bits(round_to(x[order], fmt, "stochastic", keys[order]), whole[order])
    for i in range(5):
        same_bits(round_to(x[i : i + 1], fmt, "stochastic", keys[i : i + 1]), whole[i : i + 1])
    draws = uniform(keys, 1000)
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(np.corrcoef(uniform(torch.arange(2), 4000).numpy())[0, 1]) < 0.08
    with pytest.raises(ConfigError, match="key"):
        round_to(x, fmt, "stochastic")


properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)
numbers = st.lists(st.floats(width=64, allow_nan=False), min_size=1, max_size=30)


@pytest.mark.parametrize(("name", "mode"), NEAREST_AND_ZERO)
@properties
@given(values=numbers)
def test_rounding_is_idempotent_monotone_and_within_u(name: str, mode: str, values: list[float]) -> None:
    """Faults: a second rounding that moves, an inversion of order, an error above u|x| in the normal range."""
    fmt = FORMATS[name]
    p, emin, largest, beyond = TABLE[name]
    x = torch.tensor(sorted(values), dtype=F64)
    y = round_to(x, fmt, mode)
    same_bits(round_to(y, fmt, mode), y)
    ordered = y[~y.isnan()]
    assert (ordered[1:] >= ordered[:-1]).all()
    normal = (x.abs() >= 2.0**emin) & (x.abs() <= largest)
    u = 2.0**-p if mode == "nearest" else 2.0 ** (1 - p)
    assert ((y - x).abs()[normal] <= u * x.abs()[normal]).all()
    assert fmt.u == 2.0**-p and fmt.max == largest and fmt.overflow == beyond
