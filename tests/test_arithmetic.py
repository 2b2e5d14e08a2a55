"""Roundings and products: what they read, in what order they accumulate, and how they are spelt."""

import math

import pytest
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot, Rounding
from harness.errors import ConfigError
from harness.precision import FORMATS, round_to
from harness.variants import VariantSpec

F64 = torch.float64
SPELLINGS = [f"{f}{m}" for f in ("exact", *FORMATS) for m in ("", ":zero")]
PRECISIONS = ("exact", "ieee", "tf32", "tf32x3", "bf16", "bf16x2", "fp16")


def wide(*size: int, seed: int = 0, spread: int = 40) -> Tensor:
    """Numbers of full fp64 precision over many binades."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.randint(-spread, spread, size, generator=draw)
    return torch.randn(size, dtype=F64, generator=draw) * torch.exp2(scale.double())


def integers(*size: int, bits: int, seed: int) -> Tensor:
    """Integers of up to `bits` bits: sums of their products are exact in fp64, so that every emulation agrees."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << bits), 1 << bits, size, generator=draw).double()


def product(spelling: str, x: Tensor, y: Tensor, init: Tensor | None = None) -> Tensor:
    """init + x @ y of one batch entry, x [R, n], y [n, C]."""
    dot = Dot.parse("dot", spelling)
    return dot(dot.lhs(x[None]), dot.rhs(y[None]), None if init is None else init[None])[0]


def emulated(precision: str, x: Tensor, y: Tensor, init: Tensor | None, blocks: list[list[int]]) -> Tensor:
    """The same, step by step: operands cut as the unit reads them, one rounding of the accumulator a block. A block is
    added to init as it is; with none, blocks are partial sums, rounded each."""

    def cut(v: Tensor, name: str, mode: str = "nearest") -> tuple[Tensor, Tensor]:
        hi = round_to(v, FORMATS[name], mode)
        return hi, round_to(v - hi, FORMATS[name], mode)

    def acc(v: Tensor) -> Tensor:
        if precision == "exact":
            return v
        return round_to(v, FORMATS["fp32"], "nearest" if precision == "ieee" else "zero")

    if precision == "exact":
        pairs = [(x, y)]
    elif precision == "ieee":
        pairs = [(cut(x, "fp32")[0], cut(y, "fp32")[0])]
    elif precision == "tf32":
        pairs = [(cut(x, "tf32", "zero")[0], cut(y, "tf32", "zero")[0])]
    elif precision == "tf32x3":
        a, c = cut(x, "tf32")[0], cut(y, "tf32")[0]
        pairs = [(a, c), (a, cut(y - c, "tf32", "zero")[0]), (cut(x - a, "tf32", "zero")[0], c)]
    elif precision == "bf16x2":
        (a, b), (c, _) = cut(x, "bf16"), cut(y, "bf16")
        pairs = [(a, c), (b, c)]
    else:
        pairs = [(cut(x, precision)[0], cut(y, precision)[0])]
    total = acc(torch.zeros(x.shape[0], y.shape[1], dtype=F64) if init is None else init)
    for block in blocks:
        part = sum(a[:, block] @ b[block] for a, b in pairs)
        if precision == "tf32x3" and len(blocks) == 1:
            total = round_to(total + acc(part), FORMATS["fp32"])
        else:
            total = acc(total + (part if init is not None or len(blocks) == 1 else acc(part)))
    return total


@pytest.mark.parametrize("text", ["bf17", "", "x2", "float32", "bf16:up", "bf16 ", "ieee", 7, None])
def test_a_misspelt_rounding_names_its_key(text: object) -> None:
    """Fault: a typing error rounds to something, or the message does not say where it was."""
    with pytest.raises(ConfigError, match=r"^variant a: sites\.key: [^\n]*$"):
        Rounding.parse("variant a: sites.key", text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["fp32", "", "tf32/0", "tf32/", "tf32/s", "ieee/-3", "ieee/8x", None])
def test_a_misspelt_dot_names_its_key(text: object) -> None:
    """Fault: the same for a product; a block of no products would never end."""
    with pytest.raises(ConfigError, match=r"^precision\.products\.fold: [^\n]*$"):
        Dot.parse("precision.products.fold", text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["bf16", "tf32:zero", "bf16x2", "bf16x2:zero", "e4m3:stochastic", "exact"])
def test_a_rounding_is_shown_as_it_is_read(text: str) -> None:
    """Fault: the manifest shows a rounding other than the one in use."""
    assert str(Rounding.parse("k", text)) == text
    assert Rounding.parse("k", "fp64") == Rounding.parse("k", "exact")


def test_arithmetic_shows_every_site_and_product() -> None:
    """Fault: a manifest that leaves out a site, or shows the blocks of a product wrongly."""
    sites, dots = {"default": "fp32", "d": "bf16x2"}, {"default": "tf32x3", "fold": "ieee/8s"}
    spec = VariantSpec("a", sites=sites, dots=dots)
    shown = spec.arithmetic().shown()
    assert shown["d"] == "bf16x2" and shown["dot.fold"] == "ieee/8s" and shown["dot.state"] == "tf32x3"
    assert {v for k, v in shown.items() if k not in ("d", "dot.fold")} == {"fp32", "tf32x3"}
    read = VariantSpec(
        "b",
        sites={k: v for k, v in shown.items() if not k.startswith("dot.")},
        dots={k.removeprefix("dot."): v for k, v in shown.items() if k.startswith("dot.")},
    )
    assert read.arithmetic() == spec.arithmetic() and hash(read.arithmetic()) == hash(spec.arithmetic())
    assert read.arithmetic() != Arithmetic()


@pytest.mark.parametrize("text", [s for s in SPELLINGS if not s.startswith(("exact", "fp64"))])
def test_two_parts_are_the_rounded_value_and_the_rounded_rest(text: str) -> None:
    """Faults: the low part taken of the wrong rest, or hi and lo not what a read sums up."""
    name, _, mode = text.partition(":")
    one, two = Rounding.parse("k", text), Rounding.parse("k", text.replace(name, name + "x2"))
    x = wide(3, 500, spread=4)
    hi, lo = two.pair(x)
    assert torch.equal(hi, one(x))
    assert torch.equal(lo, one(x - hi))
    assert torch.equal(two(x), hi + lo)
    assert torch.equal(one(x), round_to(x, FORMATS[name], mode or "nearest"))
    # two parts of a wide format hold nearly twice the digits
    if name in ("bf16", "fp16", "tf32", "fp32") and not mode:
        inside = x.abs() > 2.0**-2 if name == "fp16" else x.abs() > 0
        error = ((hi + lo - x).abs() / x.abs())[inside]
        assert error.max() <= max(FORMATS[name].u ** 2, 2.0**-25 if name == "fp16" else 0) * 1.01


def unchanged(r: Rounding, x: Tensor, **how: Tensor | Rounding) -> bool:
    return torch.equal(r(x, **how).nan_to_num(nan=0.125), x.nan_to_num(nan=0.125))


def all_sorts() -> Tensor:
    """[1, n]: random numbers at home in every format and beyond, and the limits of several."""
    limits = torch.tensor([0.0, 5e-324, 1e-310, 1e300, 3.4e38, 65519.0, 65520.0, 449.0, math.inf], dtype=F64)
    return torch.cat((wide(4000, seed=1), wide(4000, seed=2, spread=160), limits, -limits))[None]


@pytest.mark.parametrize("mine", [*SPELLINGS, "bf16x2", "tf32x2:zero", "bf16:stochastic"])
def test_keeps_never_claims_what_is_false(mine: str) -> None:
    """Fault: a rounding is skipped because its input "is in that format already" when it is not."""
    r = Rounding.parse("k", mine)
    claimed = []
    for theirs in [*SPELLINGS, "bf16x2", "tf32x2:zero", "bf16:stochastic"]:
        source = Rounding.parse("k", theirs)
        if r.keeps(source):
            claimed.append(theirs)
            x = source(all_sorts(), torch.tensor([1]))
            assert unchanged(r, x, key=torch.tensor([2])), f"{mine} after {theirs}"
            assert unchanged(r, x, key=torch.tensor([2]), of=source), f"{mine} after {theirs}"
    assert r.parts == 2 or mine in claimed
    assert r.exact or "exact" not in claimed


@pytest.mark.parametrize(("text", "value"), [("bf16x2:stochastic", 0.1), ("e5m2x2", 61439.9)])
def test_keeps_of_two_parts(text: str, value: float) -> None:
    """Fault: hi + lo is taken for a fixed point of a rounding in two parts where it is none."""
    r = Rounding.parse("k", text)
    x = r(torch.full((1, 999), value, dtype=F64), torch.tensor([1]))
    assert not r.keeps(r) or unchanged(r, x, key=torch.tensor([2]))


@pytest.mark.parametrize("mine", SPELLINGS)
def test_a_known_source_changes_no_bit(mine: str) -> None:
    """Fault: the short way for values that are fp32 numbers already rounds differently."""
    r = Rounding.parse("k", mine)
    for theirs in ("fp32", "bf16", "fp16", "e5m2", "tf32:zero"):
        source = Rounding.parse("k", theirs)
        x = source(wide(2000, spread=140))
        assert torch.equal(r(x, of=source).nan_to_num(nan=0.125), r(x).nan_to_num(nan=0.125)), theirs


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("blocking", ["", "/1", "/8", "/8s", "/5", "/5s", "/24"])
def test_a_product_is_what_its_steps_say(precision: str, blocking: str) -> None:
    """Faults: an accumulator rounded to nearest where units truncate, a dropped or doubled partial product, blocks
    out of order, a leading value that is not rounded to the accumulator's format first."""
    R, n, C = 3, 24, 4
    x, y = integers(R, n, bits=18, seed=1), integers(n, C, bits=17, seed=2)
    init = integers(R, C, bits=42, seed=3)
    if precision == "fp16":
        x, y = x / 8, y / 8
    size = int(blocking.strip("/s") or n)
    lanes, count = list(range(n)), -(-n // size)
    in_order = [lanes[i * size :][:size] for i in range(count)]
    blocks = [lanes[i::count] for i in range(count)] if blocking.endswith("s") else in_order
    assert torch.equal(product(precision + blocking, x, y, init), emulated(precision, x, y, init, blocks))
    assert torch.equal(product(precision + blocking, x, y), emulated(precision, x, y, None, blocks))


def test_precisions_differ_where_they_should() -> None:
    """Fault: a mode that is an alias of another; the comparison above would not see two wrong twins."""
    x, y = wide(4, 64, seed=5, spread=2), wide(64, 5, seed=6, spread=2)
    exact = x @ y
    scale = (x.abs() @ y.abs()).max()
    error = {p: ((product(p, x, y) - exact).abs().max() / scale).item() for p in PRECISIONS}
    assert error["exact"] < 1e-15 < error["ieee"] < 1.2e-7
    assert error["ieee"] < error["tf32x3"] < 1e-6 < error["tf32"] < 2e-3
    assert error["fp16"] < error["tf32"] < error["bf16"] < 4e-3
    assert error["bf16x2"] < error["bf16"]


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("ieee", 1 + 2.0**-23), ("tf32", 1.0), ("tf32x3", 1 + 2.0**-23), ("bf16", 1.0), ("exact", 1 + 1.5 * 2.0**-24)],
)
def test_tensor_core_accumulators_truncate(precision: str, expected: float) -> None:
    """Fault: 1 + 1.5*2^-24 rounds up as in ieee, where an H200 leaves 1; but tf32x3 adds what was there in fp32."""
    x, y, init = (torch.tensor([[v]], dtype=F64) for v in (1.5 * 2.0**-12, 2.0**-12, 1.0))
    assert product(precision, x, y, init).item() == expected
    # and the negative side moves toward zero, not down
    assert product(precision, -x, y, -init).item() == -expected


def test_the_leading_value_is_rounded_first() -> None:
    """Fault: an fp64 value slips into an fp32 accumulator and is rounded together with the sum."""
    x, y = (torch.tensor([[v]], dtype=F64) for v in (2.0**-24, 1.0))
    init = torch.tensor([[1 + 2.0**-25]], dtype=F64)
    assert product("ieee", x, y, init).item() == 1.0  # together they would pass the tie
    assert product("exact", x, y, init).item() == 1 + 2.0**-24 + 2.0**-25


@pytest.mark.parametrize(("K", "chain"), [(256, 1), (1024, 2), (4096, 4)])
def test_partials_summed_apart_keep_the_small_terms(K: int, chain: int) -> None:
    """Fault (triton#4603): partial products chained through the running accumulator, which loses small terms."""
    draw = torch.Generator().manual_seed(K)
    x = torch.rand(2, K, dtype=F64, generator=draw).float().double()
    y = torch.rand(K, 2, dtype=F64, generator=draw).float().double()
    exact, bound, chained = x @ y, math.sqrt(K) * 2.0**-24, f"tf32x3/{chain}"

    def error(got: Tensor, want: Tensor) -> float:
        return ((got - want).abs() / want).max().item()

    assert error(product("tf32x3", x, y), exact) < bound
    assert error(product(chained, x, y), exact) > 3 * bound
    # an accumulator preloaded so high that no single block reaches its last bit
    init = torch.full((2, 2), 2.0**24 * chain, dtype=F64)
    assert error(product("tf32x3", x, y, init), init + exact) < bound
    assert torch.equal(product(chained, x, y, init), init)
    # the large term among the products: the order of the blocks decides what survives
    one = torch.ones(1, 2, dtype=F64)
    first = product(chained, torch.cat((init[:, :1], x), 1), torch.cat((one, y), 0))
    last = product(chained, torch.cat((x, init[:, :1]), 1), torch.cat((y, one), 0))
    assert torch.equal(first, init)
    assert (last > first).all()
