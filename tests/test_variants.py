"""Every design that ships loads; a mistake in one is a line naming design and key; precision lies over it."""

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from harness.arithmetic import EXACT, PRODUCTS, SITES, Arithmetic, Dot, Rounding
from harness.config import PrecisionConfig, RingConfig
from harness.errors import ConfigError
from harness.state import RECORDS
from harness.variants import CONFIGS, VariantSpec, load, names

DEFAULT_ARMS = {"exact_recurrent", "null_arm", "chunked_fp32", "chunked_tf32", "chunked_bf16", "exact_fold"}
PRECISIONS = sorted((CONFIGS / "precision").glob("*.yaml"))


def site(a: Arithmetic, name: str) -> str:
    return str(getattr(a.sites, name))


def over(spec: VariantSpec, **precision: object) -> Arithmetic:
    return spec.arithmetic(PrecisionConfig(**precision))  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path):
    """written(text) -> path of a design `mine` holding it."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.mark.parametrize("name", names())
def test_every_design_that_ships_is_complete(name: str) -> None:
    """Faults: a file that does not load, has no description or thread, or asks for records that do not exist."""
    spec = load(name)
    assert spec.name == name and spec.doc and spec.source
    a = spec.arithmetic()
    assert set(spec.records(a)) <= set(RECORDS)
    assert spec.ring(RingConfig(max_window=1 if spec.fold_current else 4)).length == 16
    again = VariantSpec(
        name,
        sites={k: v for k, v in a.shown().items() if k in SITES},
        dots={p: a.shown()[f"dot.{p}"] for p in PRODUCTS},
        conventions=spec.conventions,
    )
    assert again.arithmetic() == a


def test_the_default_arms_ship() -> None:
    """Fault: a default arm is missing, or is not the design its name promises."""
    assert set(names()) >= DEFAULT_ARMS and list(names()) == sorted(names())
    fp32, tf32, bf16 = (load(f"chunked_{f}").arithmetic().shown() for f in ("fp32", "tf32", "bf16"))
    assert {k for k in fp32 if fp32[k] != tf32[k]} >= {"dot.fold", "dot.state", "dot.history"}
    assert bf16["checkpoint"] == bf16["store_d"] == bf16["dot.fold"] == "bf16"
    assert bf16["inverse"] == "fp32" and load("chunked_bf16").inverse == "substitution"
    # the null arm is the baseline but for the order of its sums
    a, b = (load(n).arithmetic() for n in ("exact_recurrent", "null_arm"))
    assert a.sites == b.sites and a.dots.recurrent.strided is not b.dots.recurrent.strided
    assert replace(a.dots.recurrent, strided=True) == replace(b.dots.recurrent, strided=True)


MISTAKES = """
    colour=red name=other 7=x verify=chunked fold=never fold=snapshot gate_record=sum history_read=lo
    inverse=cramer inverse=neumann/0 inverse=[doubling] sites=bf16 sites= sites.checkpiont=bf16 sites.checkpoint=bf61
    sites.default=half sites.key=bf16:stochastic dots=[ieee] dots.folds=ieee dots.fold=fp32 dots.default=3
    conventions=1 conventions.norm=l1 conventions.beta=bf17
    sites.default=bf16:stochastic conventions.beta=bf16:stochastic conventions.eps=-1.0 conventions.eps_at=nowhere
    conventions.decay=sideways flush_at=many flush_at=-3 flush_at=0 fold_when=sometimes fold_current=perhaps
""".split()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_design_and_key(written, mistake: str) -> None:
    """Fault: a typing error is ignored, or reported without the file and the key it stands in."""
    key, _, value = mistake.partition("=")
    table, _, inner = key.partition(".")
    with pytest.raises(ConfigError) as refused:
        load(written(f"{table}: {{{inner}: {value}}}" if inner else f"{table}: {value}"))
    message = str(refused.value)
    assert message.startswith("variant mine") and "\n" not in message
    assert key in message.partition("; have")[0].replace(": ", ".").split()[1], message


@pytest.mark.parametrize(
    "keys", [{"gate_record": "cumulative", "fold": "replay"}, {"fold": "snapshot", "verify": "tokens"}]
)
def test_declarations_that_exclude_each_other(keys: dict) -> None:
    """Fault: a fold that its records, or its flush rule, cannot serve."""
    with pytest.raises(ConfigError, match=f"^variant mine: {next(iter(keys))}: "):
        VariantSpec("mine", **keys)


def test_eps_is_a_number_however_it_is_written(written) -> None:
    """Fault: an eps that is text breaks the run at its first norm."""
    assert load(written("conventions: {eps: 1e-5}")).arithmetic().conventions.eps == 1e-5


@pytest.mark.parametrize(
    "content", ["a: [1", "{a: b: c}", "- 1", "text", "a: b\n c: d\n\te: f", b"\xff\xfe\x00a: \xff"], ids=repr
)
def test_a_file_that_is_no_table_is_one_line(written, content: str | bytes) -> None:
    """Fault: the parser's own report of many lines, or a traceback."""
    with pytest.raises(ConfigError, match=r"^variants: [^\n]*mine\.yaml: [^\n]+$"):
        load(written(content))


@pytest.mark.parametrize("name", ["exact_recurent", "no/such/file.yaml", ""])
def test_an_unknown_design_lists_what_there_is(name: str) -> None:
    """Fault: a missing file without a word on what could have been meant."""
    with pytest.raises(ConfigError, match=r"^variants: '[^\n]*' is unknown; have [^\n]*exact_recurrent"):
        load(name)


def test_an_empty_file_is_a_design_in_exact_arithmetic(written) -> None:
    """Fault: a default that rounds."""
    spec = load(written(""))
    assert (spec.name, spec.verify, spec.fold, spec.inverse) == ("mine", "window", "product", "substitution")
    assert spec.arithmetic() == Arithmetic()
    assert set(spec.arithmetic().shown().values()) == {"exact"}


@pytest.mark.parametrize("path", PRECISIONS, ids=lambda p: p.stem)
@pytest.mark.parametrize("name", sorted(DEFAULT_ARMS))
def test_every_precision_lies_over_every_design(name: str, path: Path) -> None:
    """Fault: a preset that leaves one site or product of one design in another format."""
    preset = yaml.safe_load(path.read_text())
    assert preset["name"] == path.stem and set(preset) <= {f.name for f in fields(PrecisionConfig)}
    spec = load(name)
    a = over(spec, **preset)
    if path.stem == "own":
        # a run has its say in the exponential alone
        assert a == over(spec) and replace(a, exp="rounded") == spec.arithmetic()
        return
    rounding, dot = Rounding.parse("base", preset["base"]), Dot.parse("dots", preset["dots"])
    assert {getattr(a.sites, s) for s in SITES} == {rounding}
    assert {getattr(a.dots, p) for p in PRODUCTS} == {dot}
    assert a.conventions == spec.arithmetic().conventions
    kept = over(spec, **preset | {"keep": ["checkpoint", "fold"]})
    assert kept.sites == replace(a.sites, checkpoint=spec.arithmetic().sites.checkpoint)
    assert kept.dots == replace(a.dots, fold=spec.arithmetic().dots.fold)


def test_any_site_can_be_the_only_one_or_the_only_one_not() -> None:
    """Fault: attribution by switching sites: one that cannot be switched alone, or drags another along."""
    spec = load("chunked_bf16")
    own = spec.arithmetic()
    for name in SITES:
        alone = over(spec, base="exact", sites={name: "bf16"})
        assert alone.sites == replace(Arithmetic().sites, **{name: Rounding("bf16")})
        assert alone.dots == Arithmetic().dots
        without = over(spec, sites={name: "exact"})
        assert without.sites == replace(own.sites, **{name: EXACT}) and without.dots == own.dots
        stochastic = name in ("step", "checkpoint", "snapshot")
        with nullcontext() if stochastic else pytest.raises(ConfigError, match=f"^precision.sites.{name}: "):
            assert site(over(spec, sites={name: "fp16:stochastic"}), name) == "fp16:stochastic"
    for name in PRODUCTS:
        alone = over(spec, base="exact", products={name: "tf32x3/8"})
        assert alone.dots == replace(Arithmetic().dots, **{name: Dot.parse("", "tf32x3/8")})
        assert alone.sites == Arithmetic().sites
        without = over(spec, products={name: "exact"})
        assert without.dots == replace(own.dots, **{name: Dot()}) and without.sites == own.sites


def test_the_order_of_the_layers() -> None:
    """base, then dots, then keep, then single sites and products. Fault: a later layer loses to an earlier one."""
    spec = replace(load("chunked_bf16"), conventions={"eps_at": "mean"})
    own = spec.arithmetic()
    assert over(spec, base="exact", dots="ieee").conventions == own.conventions != Arithmetic().conventions
    assert set(over(spec, base="fp32").shown().values()) == {"fp32", "ieee"}
    assert set(over(spec, base="exact", dots="tf32").shown().values()) == {"exact", "tf32"}
    only_dots = over(spec, dots="tf32")
    assert only_dots.sites == own.sites
    assert {getattr(only_dots.dots, p) for p in PRODUCTS} == {Dot.parse("", "tf32")}
    single = {"sites": {"store_d": "fp16"}, "products": {"fold": "bf16"}}
    a = over(spec, base="fp32", keep=["checkpoint", "store_d"], **single)
    assert (site(a, "checkpoint"), site(a, "store_d"), site(a, "key")) == ("bf16", "fp16", "fp32")
    assert a.shown()["dot.fold"] == "bf16" and a.shown()["dot.state"] == "ieee"


@pytest.mark.parametrize("name", sorted(set(SITES) & set(PRODUCTS)))
def test_a_name_of_site_and_product_keeps_both(name: str) -> None:
    """Fault: keep=[inverse] leaves the products of the inverse in the base's precision, without a word."""
    spec = VariantSpec("mine", sites={"default": "bf16"}, dots={"default": "bf16"})
    a = over(spec, base="fp32", keep=[name])
    assert a.shown()[name] == a.shown()[f"dot.{name}"] == "bf16"


@pytest.mark.parametrize(
    ("precision", "key"),
    [
        ({"base": "bf17"}, "precision.base"),
        ({"base": "own", "dots": "fp32"}, "precision.dots"),
        ({"keep": ["checkpiont"]}, "precision.keep"),
        ({"sites": {"checkpiont": "bf16"}}, "precision.sites.checkpiont"),
        ({"sites": {"key": "bf16:up"}}, "precision.sites.key"),
        ({"sites": {"default": "bf16"}}, "precision.sites.default"),
        ({"products": {"key": "ieee"}}, "precision.products.key"),
        ({"products": {"fold": "ieee/0"}}, "precision.products.fold"),
    ],
)
def test_a_mistake_in_precision_names_its_key(precision: dict, key: str) -> None:
    """Fault: an override that is misspelt changes nothing, or the message blames the design."""
    with pytest.raises(ConfigError) as refused:
        over(load("exact_fold"), **precision)
    assert str(refused.value).startswith(f"{key}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "sites", "records"),
    [
        ({}, {}, {"d", "k_hat", "g"}),
        ({}, {"store_d": "bf16x2"}, {"d", "d_lo", "k_hat", "g"}),
        ({"history_read": "hi"}, {"default": "bf16x2"}, {"d", "d_lo", "k_hat", "k_hat_lo", "g"}),
        ({"gate_record": "cumulative", "verify": "tokens"}, {}, {"d", "k_hat", "g"}),
        ({"fold": "replay"}, {}, {"d", "k_hat", "g", "v", "k", "beta"}),
        ({"fold": "replay", "verify": "tokens"}, {}, {"v", "k", "g", "beta"}),
        ({"verify": "tokens", "fold": "snapshot", "flush_at": 1, "fold_when": "commit"}, {}, set()),
    ],
)
def test_records_follow_from_the_declaration(keys: dict, sites: dict, records: set) -> None:
    """Fault: a record that is read and not kept, or kept and never read."""
    spec = VariantSpec("mine", sites=sites, **keys)
    kept = spec.records(spec.arithmetic())
    assert set(kept) == records and len(kept) == len(records)


def test_a_design_may_bring_its_own_flush_rule() -> None:
    """Faults: the run's rule wins over the design's own; window-1 decode accepted on a wider window."""
    run = RingConfig(length=16, max_window=4, flush_at=5, fold_when="next")
    assert (VariantSpec("a").ring(run).flush_at, VariantSpec("a").ring(run).fold_when) == (5, "next")
    own = VariantSpec("a", flush_at=3, fold_when="commit").ring(run)
    assert (own.flush_at, own.fold_when, own.max_window) == (3, "commit", 4)
    decode = VariantSpec("a", verify="tokens", fold_current=True)
    assert decode.ring(RingConfig(length=16, max_window=1)).flush_at == 15
    with pytest.raises(ConfigError, match=r"^variant a: .*ring\.max_window=1"):
        decode.ring(run)
    with pytest.raises(ConfigError, match=r"^ring\.flush_at: 12 .*largest legal value is 9"):
        VariantSpec("a", flush_at=12).ring(run)
