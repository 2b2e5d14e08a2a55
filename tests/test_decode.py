"""The stream: what its tokens may depend on, addressing, rounding, refusals."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from harness.config import AcceptanceConfig, DecodeConfig, ModelConfig
from harness.decode import BLOCK, Stream
from harness.errors import ConfigError, InputError
from harness.families import FAMILIES
from harness.precision import FORMATS, round_to
from harness.tokens import Shape, Tokens

SHAPE = Shape(3, 6, 5, 24)
CONFIGS = Path(__file__).parents[1] / "configs"


def same(x: Tokens, y: Tokens) -> bool:
    return all(torch.equal(getattr(x, f.name), getattr(y, f.name)) for f in fields(Tokens))


def stream(family: str = "silu", shape: Shape = SHAPE, heads: slice = slice(None), **keys: object) -> Stream:
    config = DecodeConfig(family=family, **{"tokens": 8192, "slots": 2} | keys)  # type: ignore[arg-type]
    return Stream(config, shape, heads=heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_draw_the_same_alone(family: str) -> None:
    """Faults: one generator for all heads; a differing vector tail; classes counted from the own heads."""
    whole, part = stream(family), stream(family, heads=slice(1, 3))
    n = torch.arange(9)
    for b in (0, 2):
        assert same(whole.block(b).heads(slice(1, 3), slice(2, 6)), part.block(b))
    assert same(whole.junk(n % 2, n, n).heads(slice(1, 3), slice(2, 6)), part.junk(n % 2, n, n))
    assert torch.equal(whole.initial_state()[:, 2:], part.initial_state())


@pytest.mark.parametrize("family", ["silu", "coherent", "loop24", "manifold"])
def test_blocks_may_come_in_any_order_and_slot_number(family: str) -> None:
    """Fault: a generator that runs on from block to block, or a slot index where seed + slot is due."""
    forward, backward = stream(family, seed=3), stream(family, seed=3)
    late = [backward.block(b) for b in (5, 2, 1, 0)][::-1]
    for b, block in zip((0, 1, 2, 5), late, strict=True):
        assert same(forward.block(b), block)
        second = stream(family, seed=4, slots=1).block(b)
        assert same(block.map(lambda x: x[1:]), second)
    assert torch.equal(forward.initial_state()[1:], stream(family, seed=4, slots=1).initial_state())


@pytest.mark.parametrize("family", FAMILIES)
def test_first_value_rows_do_not_depend_on_how_many_are_simulated(family: str) -> None:
    """Fault: rows interleaved in one stream, so that 32 rows sample another decode than 128."""
    few, many = stream(family), stream(family, replace(SHAPE, V=11))
    assert torch.equal(few.block(1).v, many.block(1).v[..., :5])
    assert torch.equal(few.initial_state(), many.initial_state()[:, :, :5])
    assert torch.equal(few.block(1).g, many.block(1).g)


def test_draws_that_should_differ_differ() -> None:
    """Fault: a key of the generator left out: seed, block, head, purpose, or q and k alike."""
    s = stream()
    a, b = s.block(0), s.block(1)
    draws = [a.k[0, :, 0], a.k[1, :, 0], a.k[0, :, 1], b.k[0, :, 0], a.q[0, :, 0]]
    junk = s.junk(torch.zeros(BLOCK, dtype=torch.int64), torch.arange(BLOCK), torch.ones(BLOCK, dtype=torch.int64))
    draws.append(junk.k[:, 0])
    for i, x in enumerate(draws):
        for y in draws[:i]:
            assert (x == y).double().mean() < 0.05  # equal bf16 values by chance: about 1 %
    assert stream(seed=2**32).block(0).k.ne(a.k).any()  # a 32-bit seed would wrap


def test_tokens_gathers_across_blocks_and_slots() -> None:
    """Fault: an off-by-one at a block boundary, or slot 0's tokens for every slot."""
    s = stream("silu", slots=3)
    blocks = [s.block(b) for b in range(4)]
    line = Tokens(*(torch.cat([getattr(b, f.name) for b in blocks], dim=1) for f in fields(Tokens)))
    for start, count in (([0, 1023, 2000], 1), ([1020, 3, 1024], 9), ([0, 1500, 70], 2500), ([5, 6, 7], 0)):
        got = s.tokens(torch.tensor(start), count)
        for slot, at in enumerate(start):
            assert same(got.map(lambda x: x[slot]), line.map(lambda x: x[slot, at : at + count]))  # noqa: B023
    assert s.tokens(torch.tensor([0, 0, 0]), 4).g.shape == (3, 4, 6)


def test_gathered_tokens_are_a_copy() -> None:
    """Fault: a caller who poisons its window poisons the stream."""
    s = stream(slots=1)
    s.tokens(torch.tensor([0]), 4).k.fill_(float("nan"))
    assert s.tokens(torch.tensor([0]), 4).k.isfinite().all()


def test_loop24_repeats_whole_tokens_from_a_quarter_on() -> None:
    """Faults: gates or queries not repeated; the prefill not counted; the phase restarted at each block."""
    s = stream("loop24", tokens=7000, prefill=1003, slots=2)
    start = (7000 + 1003) // 4
    text = s.tokens(torch.tensor([start, start]), 24)
    for at in (start + 24, start + 24 * 45, start + 24 * 200):
        assert same(s.tokens(torch.tensor([at, at]), 24), text)
    assert not same(s.tokens(torch.tensor([start - 24] * 2), 24), text)
    assert (text.k[:, 1:] != text.k[:, :-1]).any(-1).all()
    assert (text.k[0] != text.k[1]).any()
    before = s.tokens(torch.tensor([0, 0]), start)
    assert same(before, stream("silu", slots=2).tokens(torch.tensor([0, 0]), start))


def test_junk_depends_on_slot_t_and_lane_only() -> None:
    """Fault: junk that follows the batch, so that rejected drafts differ between designs."""
    s = stream(slots=2, seed=7)
    slot, t, lane = torch.tensor([[0], [1]]), torch.arange(50)[None], torch.tensor([[3], [2]])
    batch = s.junk(slot, t, lane)
    assert batch.k.shape == (2, 50, 3, 24)
    alone = stream(slots=1, seed=8).junk(torch.tensor(0), torch.tensor(31), torch.tensor(2))
    assert same(batch.map(lambda x: x[1, 31]), alone)
    n = torch.arange(4096)
    picked = s.junk(torch.zeros_like(n), n // 4, n % 4).k.flatten(1).unique(dim=0).shape[0]
    # 4096 draws of 1024 leave exp(-4) unpicked
    assert 980 < picked < 1025


@pytest.mark.parametrize("activation", ["bf16", "fp16", "e5m2", "tf32", "fp32", "fp64", "exact"])
def test_activations_are_rounded_once_to_the_format(activation: str) -> None:
    """Fault: a fast path that rounds twice or otherwise than round_to; gates rounded after the map."""
    exact = stream(activation="exact").block(0)
    got = stream(activation=activation).block(0)
    fmt = FORMATS["fp64" if activation == "exact" else activation]
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(got, name), round_to(getattr(exact, name), fmt))
    assert torch.equal(got.g, exact.g) == (activation in ("fp64", "exact"))
    if activation == "bf16":
        assert got.g.unique().numel() > got.g.to(torch.bfloat16).unique().numel()


@pytest.mark.parametrize("kind", ["zero", "random", "wide"])
def test_initial_states_are_fp32_numbers(kind: str) -> None:
    """Fault: an initial state that an fp32 checkpoint cannot hold, which shows as drift at token 0."""
    S = stream(initial_state=kind).initial_state()
    assert S.shape == (2, 6, 5, 24)
    assert S.dtype == torch.float64
    assert torch.equal(S, S.float().double())
    assert (S == 0).all() == (kind == "zero")
    if kind == "random":
        assert S.std().item() == pytest.approx(0.1, rel=0.1)


def test_fixed_gates() -> None:
    """Fault: decode.g = 0 or decode.beta = 0 taken for absent."""
    block = stream("strong_decay", g=0.0, beta=0.0).block(0)
    assert (block.g == 0).all()
    assert (block.beta == 0).all()
    assert torch.equal(block.v, stream("strong_decay").block(0).v)


def test_settings_that_cannot_be() -> None:
    """Fault: a KeyError, or a coherence without effect."""
    for keys, message in (
        ({"family": "silo"}, r"^decode\.family: 'silo' is not one of silu, iid, "),
        ({"coherence": 0.5}, r"^decode\.coherence: family 'silu' has none; coherent, near_collinear"),
        ({"activation": "bf17"}, r"^decode\.activation: 'bf17'"),
    ):
        with pytest.raises(ConfigError, match=message):
            stream(**keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^decode\.initial_state: 'one'"):
        stream(initial_state="one").initial_state()
    with pytest.raises(ConfigError, match="selects none of 3 key heads"):
        stream(heads=slice(3, 9))


def test_a_block_that_overflows_its_format_is_refused() -> None:
    """Fault: NaN from an 8-bit activation format entering a decode unseen."""
    coarse = stream("wide_state", activation="e4m3_nan", shape=replace(SHAPE, V=64))
    coarse.block(0)  # 100 < 448
    coarse.generator.family = replace(coarse.family, values=lambda d, h, k: 10 * FAMILIES["wide_state"].values(d, h, k))
    with pytest.raises(InputError, match=r"^v: nan at token \d+, head \d is not finite"):
        coarse.block(1)


@pytest.mark.parametrize(
    ("group", "kind"), [("decode", DecodeConfig), ("acceptance", AcceptanceConfig), ("model", ModelConfig)]
)
def test_presets_name_only_keys_that_exist(group: str, kind: type) -> None:
    """Fault: a stale key, a number that YAML reads as text (1e-5), a family without a preset."""
    known = {f.name for f in fields(kind)}
    paths = sorted((CONFIGS / group).glob("*.yaml"))
    for path in paths:
        preset = yaml.safe_load(path.read_text())
        assert set(preset) <= known, path
        assert all(not isinstance(v, str) or not v[:1].isdigit() for v in preset.values()), path
    if group == "decode":
        assert {p.stem for p in paths} == set(FAMILIES)
        for path in paths:
            Stream(DecodeConfig(**yaml.safe_load(path.read_text())), SHAPE)
        assert DecodeConfig(**yaml.safe_load((CONFIGS / "decode/silu.yaml").read_text())) == DecodeConfig()
    if group == "model":
        default = ModelConfig(**yaml.safe_load((CONFIGS / "model/default.yaml").read_text()))
        assert default == ModelConfig()
