"""An outside implementation joins by path or by entry point, is refused in one line, and runs where designs run."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SHAPE, bf16, draw, start, windows

from harness import app, plugins
from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig, PrecisionConfig, RingConfig, validate
from harness.designs import designs
from harness.errors import ConfigError, RingError
from harness.experiments import drift
from harness.outside import Outside
from harness.protocol import RingCursors, Window
from harness.records import read_rows, recorded
from harness.reference.emulated import Emulated
from harness.refusals import check_variants
from harness.runner import Runner
from harness.variants import load, names
from harness.window import Step

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/outside_kernel"
VARIANT = str(EXAMPLE / "gdn_ring/gdn_ring.yaml")
TINY = ModelConfig(name="tiny", key_heads=1, value_heads=2, key_dim=16, value_dim=8, rows=8)
KERNEL = '''
from gdn_ring.ring import Ring


class Mine(Ring):
    def verify(self, state, window, cursors):
        o, d = super().verify(state, window, cursors)
        return o, None


class Broken(Ring):
    """NaN in slot 1, head 1, from its third step on."""

    def verify(self, state, window, cursors):
        o, d = super().verify(state, window, cursors)
        state.steps = getattr(state, "steps", 0) + 1
        if state.steps > 2:
            state.d[1, :, 1] = float("nan")
        return o, d
'''


def config(*variants: str, **keys: Any) -> Config:
    decode = DecodeConfig(tokens=60, slots=2) if "decode" not in keys else keys.pop("decode")
    made = Config(model=TINY, decode=decode, variants=list(variants), device="cpu", workers=1, **keys)
    validate(made)
    return made


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """write(text, name, declaration) -> the path of a variant file beside a kernel file of this text."""
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def write(name: str, text: str = KERNEL, design: str | None = None, **keys: str) -> str:
        (tmp_path / "kernel.py").write_text(text)
        lines = [f"design: {design or 'kernel.py:' + name}", "sites: {default: fp32}", "dots: {default: ieee}"]
        path = tmp_path / f"{name.lower()}.yaml"
        path.write_text("\n".join(lines + [f"{key}: {value}" for key, value in keys.items()]) + "\n")
        return str(path)

    return write


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """install(entries, name) -> the example as an installed distribution of that name, entry points as given."""

    def install(entries: dict[str, str], name: str = "gdn_ring") -> Path:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        shutil.copytree(EXAMPLE / "gdn_ring", site / "gdn_ring")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[{plugins.GROUP}]", *(f"{key} = {value}" for key, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(site))
        for module in [m for m in sys.modules if m.partition(".")[0] == "gdn_ring"]:
            monkeypatch.delitem(sys.modules, module)
        return site

    return install


def test_a_path_and_an_entry_point_name_the_same_kernel(installed: Any) -> None:
    """Faults: an entry point without its declaration; a name that only the loader knows; a wrong owner."""
    (by_path,) = designs(config(VARIANT))
    entry = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][plugins.GROUP]
    installed(entry)
    check_variants(["gdn_ring"])
    (by_name,) = designs(config("gdn_ring"))
    assert isinstance(by_path, Outside) and isinstance(by_name, Outside)
    assert by_path.spec.name == by_name.spec.name == "gdn_ring"
    assert (by_path.arithmetic, by_path.ring) == (by_name.arithmetic, by_name.ring)
    assert by_path.origin and by_name.origin
    assert by_path.origin["files"] == by_name.origin["files"]
    assert (by_path.origin["distribution"], by_name.origin["distribution"]) == (None, "gdn_ring 1.0")
    assert "gdn_ring" not in names()


def test_a_file_may_name_an_entry_point(installed: Any, kernels: Any) -> None:
    """Fault: `design:` read as a path alone."""
    installed({"other": "gdn_ring.ring:Ring"})
    assert isinstance(designs(config(kernels("Any", design="other")))[0], Outside)


def test_what_backend_resolves_to(kernels: Any) -> None:
    """Faults: the emulation run under the kernel's name, or a kernel where the emulation was asked for."""
    mine = kernels("Mine")

    def who(backend: Any, *variants: str) -> list[tuple[str, str]]:
        return [(d.spec.name, d.backend) for d in designs(config(*variants, backend=backend))]

    assert who("auto", mine, "exact_fold") == [("mine", "outside"), ("exact_fold", "emulated")]
    assert who("emulated", mine) == [("mine", "emulated")]
    assert who(["outside", "emulated"], mine) == [("mine", "outside"), ("mine@emulated", "emulated")]
    with pytest.raises(ConfigError, match=r"^backend: exact_fold names no outside implementation"):
        who("outside", mine, "exact_fold")
    with pytest.raises(ConfigError, match=r"^precision: mine is computed outside"):
        designs(config(mine, precision=PrecisionConfig(sites={"checkpoint": "bf16"})))
    # how an emulation takes its exponential is no rounding of the kernel's
    assert len(designs(config(mine, precision=PrecisionConfig(exp="rounded")))) == 1


@pytest.mark.parametrize(
    ("text", "design", "message"),
    [
        (KERNEL, "absent.py:Mine", r"no file .*absent\.py"),
        (KERNEL, "kernel.py:Absent", r".*kernel\.py has no class or function Absent"),
        (KERNEL, "nowhere", r"'nowhere' is neither file\.py:Name nor an entry point of replayssm_harness\.designs"),
        (KERNEL, "3", r"3 is neither an entry point nor file\.py:Name"),
        ("import nowhere_to_be_found", "kernel.py:Mine", r".*cannot be imported: ModuleNotFoundError: .*kernel\.py:1"),
        ("x = (", "kernel.py:Mine", r".*cannot be imported: SyntaxError"),
        ("class Mine: pass", "kernel.py:Mine", r"Mine has no call create\(shape, ring, initial\)"),
        ("class Mine:\n def __init__(self, x): pass", "kernel.py:Mine", r"Mine\(\) raised TypeError: "),
        (
            KERNEL + "\n\nclass Short(Ring):\n def commit(self, state, slots): pass",
            "kernel.py:Short",
            r"Short cannot be called as commit\(state, slots, accepted, cursors\)",
        ),
        (
            KERNEL + "\n\nclass Short(Ring):\n def reset(self): pass",
            "kernel.py:Short",
            r"Short cannot be called as reset\(state, slots, initial\)",
        ),
    ],
)
def test_a_kernel_that_cannot_be_used_is_refused_in_one_line(
    text: str, design: str, message: str, kernels: Any
) -> None:
    """Faults: a traceback for a typing mistake; a message that does not name the variant; half a run written."""
    with pytest.raises(ConfigError, match=rf"^variant mine: design: {message}") as refused:
        designs(config(kernels("Mine", text, design)))
    assert "\n" not in str(refused.value)


def test_two_distributions_of_one_name_are_refused(installed: Any) -> None:
    """Fault: whichever is found first."""
    installed({"gdn_ring": "gdn_ring.ring:Ring"})
    installed({"gdn_ring": "gdn_ring.ring:Other"}, "twin")
    with pytest.raises(ConfigError, match=r"^variants: gdn_ring: 'gdn_ring' is an entry point of .*twin 1\.0"):
        load("gdn_ring")


def test_an_entry_point_without_a_declaration_is_refused(installed: Any) -> None:
    """Fault: a kernel run under the default declaration, which is exact in every format."""
    site = installed({"gdn_ring": "gdn_ring.ring:Ring"})
    code = site / "gdn_ring/ring.py"
    code.write_text(code.read_text().replace("    variant =", "    unnamed ="))
    with pytest.raises(ConfigError, match=r"^variants: gdn_ring: Ring has no attribute `variant`"):
        load("gdn_ring")


def test_a_run_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults: rows that do not say who computed them; an inverse residual of a kernel nobody has looked into; a
    kernel's state read another way than its emulation's, in slots, heads or tokens."""
    c = config("chunked_fp32", VARIANT, backend=["auto", "emulated"], results_dir=str(tmp_path))
    directory = Path(drift.run(c)["directory"])
    rows = read_rows(directory)
    mine, own, same = (rows[rows["variant"] == n] for n in ("gdn_ring", "gdn_ring@emulated", "chunked_fp32"))
    assert set(mine["backend"]) == {"outside"} and set(own["backend"]) == {"emulated"}
    assert len(mine) == len(own) == len(same) > 10
    assert not recorded(rows, "gdn_ring", "inverse_residual") and recorded(rows, "gdn_ring", "d_max")
    for name in ("slot", "head", "flush", "tokens", "history", "folded"):
        np.testing.assert_array_equal(mine[name], own[name])
    # two orders of the same fp32 sums
    for name in ("served_fro", "kept_fro", "d_max", "o_max"):
        assert 0 < mine[name].max() < 4 * max(own[name].max(), 2.0**-24)
    manifest = json.loads((directory / "manifest.json").read_text())["variants"]["gdn_ring"]
    assert (manifest["backend"], manifest["engine"]) == ("outside", "Ring")
    assert manifest["origin"]["design"] == "Ring" and manifest["effective"]["checkpoint"] == "fp32"
    assert "gdn_ring" in capsys.readouterr().out


def test_without_d_its_columns_are_null(kernels: Any, tmp_path: Path) -> None:
    """Fault: zeros, which are exact results, or NaN, which is a failure, where nothing was shown."""
    directory = Path(drift.run(config(kernels("Mine"), results_dir=str(tmp_path)))["directory"])
    rows = read_rows(directory)
    assert [recorded(rows, "mine", name) for name in ("d_med", "d_max", "o_max")] == [False, False, True]
    assert not set(rows[rows["variant"] == "mine"]["nonfinite_stage"].dropna())


def test_where_it_leaves_the_finite_numbers(kernels: Any, tmp_path: Path) -> None:
    """Faults: a NaN that ends the run, or is looked for in the emulation, which has none; of another slot or head."""
    directory = Path(drift.run(config(kernels("Broken"), results_dir=str(tmp_path)))["directory"])
    rows = read_rows(directory)
    bad = rows[(rows["variant"] == "broken") & rows["nonfinite_stage"].notna()]
    # a record is read before the window's output is known, and by the state behind it
    assert set(zip(bad["slot"], bad["head"], strict=True)) == {(1, 1)}
    assert set(bad["nonfinite_stage"]) <= {"o", "served"}


def test_a_changed_kernel_is_another_run(kernels: Any) -> None:
    """Faults: `already done` for a kernel that has been edited, or whose neighbour has."""

    def hashed(path: str) -> Any:
        return drift.identity(designs(config(path)), "cpu")

    first = hashed(kernels("Mine"))
    assert hashed(kernels("Mine")) == first
    second = hashed(kernels("Mine", KERNEL + "# changed\n"))
    (Path(kernels("Mine", KERNEL)).parent / "helper.py").write_text("")
    third = hashed(kernels("Mine"))
    assert first != second and third not in (first, second)


def test_a_prefill_is_the_emulations(kernels: Any) -> None:
    """Fault: windows of 64 for a kernel made for 4; a state handed over to another slot."""
    text = (
        KERNEL
        + """

class Narrow(Ring):
    def create(self, shape, ring, initial):
        assert (ring.length, ring.max_window) == (16, 4)
        return super().create(shape, ring, initial)
"""
    )
    decode = DecodeConfig(tokens=60, slots=2, prefill=130)
    c = config(kernels("Narrow", text), decode=decode, acceptance=AcceptanceConfig("all"))
    with torch.inference_mode():
        rows = [columns for block in Runner(c).run() for name, columns in block if name == "narrow"]
    assert max(r["served_fro"].max() for r in rows) < 1e-5 and min(r["tokens"].min() for r in rows) > 130


def test_what_a_kernel_is_handed(kernels: Any) -> None:
    """Faults: fp64 where a kernel takes bf16; windows of another width; slots that are not in the step; cursors of
    the step before; what a fold at commit has to fold."""
    seen: dict[str, list[Any]] = {"verify": [], "commit": []}
    spec = load(VARIANT)
    design = Outside(spec, spec.ring(RingConfig(16, 4, 3, "commit")), spec.arithmetic())
    own: Any = design.own
    for call in seen:
        real = getattr(own, call)
        setattr(own, call, lambda *args, real=real, call=call: (seen[call].append(args), real(*args))[1])
    rng = np.random.default_rng(0)
    ready = windows(bf16(draw(rng, 2, 3, 2)), [[2, 0, 1], [0, 2, 2]])
    state = design.create(SHAPE, 3, start(rng, 3))
    design.pad = torch.nan
    for i, accepted in enumerate(([2, 1], [0, 2])):
        step = Step(ready, i)
        design.verify(state, step)
        with pytest.raises(RingError, match="slot"):
            design.read(state, "served", step.slots)
        design.commit(state, step.slots, accepted)
    (_, window, cursors), (_, second, later) = seen["verify"]
    assert isinstance(window, Window) and isinstance(cursors, RingCursors)
    assert [x.dtype for x in window] == [torch.int32] * 2 + [torch.bfloat16] * 3 + [torch.float32] * 2
    assert window.q.shape == (2, SHAPE.H, 4, SHAPE.K) and window.v.shape == (2, SHAPE.HV, 4, SHAPE.V)
    assert (window.slots.tolist(), window.lengths.tolist()) == ([0, 2], [2, 1])
    assert second.slots.tolist() == [1, 2]
    # every lane of a window's own, and none behind it
    assert [int(x.isfinite().all((0, 1) if x.ndim == 3 else (0, 1, 3)).sum()) for x in window[2:]] == [1] * 5
    assert window.v[0, :, :2].isfinite().all() and not window.v[0, :, 2:].isfinite().any()
    assert cursors.write_pos.tolist() == [0, 0, 0] and later.write_pos.tolist() == [2, 0, 1]
    (_, slots, counts, after), (_, _, _, last) = seen["commit"]
    assert (slots.tolist(), counts.tolist(), after.is_flush.tolist()) == ([0, 2], [2, 1], [0, 0, 0])
    # slot 2 has 3 records now, and folds them at once
    assert last.write_pos.tolist() == [2, 0, 3] and last.is_flush.tolist() == [0, 0, 1]
    assert state.cursors.write_pos == [2, 0, 0] and state.tokens == [2, 0, 3]


def test_what_it_returns_is_checked(kernels: Any) -> None:
    """Faults: outputs of another layout taken as they are; d in some steps only."""
    text = (
        KERNEL
        + """

class Odd(Ring):
    returned = None

    def verify(self, *args):
        return type(self).returned(*super().verify(*args))
"""
    )
    rng = np.random.default_rng(0)
    ready = windows(bf16(draw(rng, 1, 2, 4)), [[4, 4]])
    cases = {
        lambda o, d: o: r"verify returned Tensor, not \(o, d\)",
        lambda o, d: (o.mT, d): r"o of verify is \[2, 6, 40, 4\]",
        lambda o, d: (o, d.numpy()): r"d of verify is ndarray",
    }
    for returned, message in cases.items():
        (design,) = designs(config(kernels("Odd", text)))
        assert isinstance(design, Outside)
        type(design.own).returned = staticmethod(returned)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=rf"^variant odd: design: {message}"):
            design.verify(design.create(SHAPE, 2, start(rng, 2)), Step(ready, 0))


def test_the_command_line_takes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    """Fault: an entry point refused before anybody has looked for it."""
    installed({"gdn_ring": "gdn_ring.ring:Ring"})
    monkeypatch.chdir(tmp_path)
    for name in ("gdn_ring", VARIANT):
        overrides = ["model=tiny", "decode.tokens=30", "workers=1", "device=cpu", f"variants=[{name}]"]
        assert app.run_single(overrides) == 0
    found = {json.loads(p.read_text())["variants"]["gdn_ring"]["origin"]["distribution"]
             for p in tmp_path.glob("results/runs/drift/*/manifest.json")}  # fmt: skip
    assert found == {None, "gdn_ring 1.0"}


def test_its_emulation_is_no_outside_design() -> None:
    """Fault: the declaration of a kernel that only the kernel can run."""
    spec = load(VARIANT)
    assert type(designs(config(VARIANT, backend="emulated", engine="torch"))[0]) is Emulated
    assert spec.design.endswith("gdn_ring/ring.py:Ring")
