"""Publishing a sweep: pooled over the right runs, hiding no failure, small, anonymous, and never half a sweep."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_runs import DESIGN, HEADS, F, make, swept

from harness import publish, published_sweep
from harness.copied import BITS
from harness.errors import HarnessError
from harness.provenance import damaged, read_json, write_json
from harness.quantiles import Q
from harness.records import read_rows
from harness.results import __main__ as command
from harness.results import load

ERRORS = {"served_fro", "kept_fro", "o_med", "d_med"}
CLOSE = 2.0**-BITS  # half a unit in the last of BITS bits


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep of two rings and three seeds; the error grows with all three, and one seed fails at the end."""
    root, jobs = tmp_path_factory.mktemp("whole"), []
    for length in (8, 16):
        for seed in range(3):
            levels = {"exact_fold": 1e-6 * length * (1 + seed) * np.linspace(1, 2, F), "chunked_bf16": np.full(F, 1e-3)}
            if (length, seed) == (8, 0):
                # it has no slope
                levels["exact_fold"] = np.full(F, 8e-6)
            if (length, seed) == (16, 2):
                levels["chunked_bf16"][-2:] = np.nan, np.inf
            more = {"cpu": "one", "device": "cpu", "commit": "0123abcd"}
            name = f"{length:02d}{seed}"
            jobs.append(("finished", make(root, name, levels, ring__length=length, decode__seed=seed, more=more)))
    return swept(root, jobs)


@pytest.fixture
def folder(whole, tmp_path, monkeypatch) -> Path:
    """A copy of it; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole.parent.parent, tmp_path / "elsewhere")
    return tmp_path / "elsewhere" / "sweeps" / whole.name


def test_quantiles_are_of_all_seeds_of_one_configuration(folder):
    """Fault: seeds of two configurations are pooled, or a seed is left out; a bin holds the tokens of another."""
    publish.publish(folder, "first")
    found = load("results/first", "quantiles")
    assert set(found) == {"ring.length", "variant", "tokens", "rows", "quantile", *ERRORS}
    runs = [path for path in (folder.parent.parent / "drift").iterdir() if path.name.startswith("08")]
    rows = pd.concat([read_rows(path) for path in runs])
    rows = rows[rows["variant"] == "exact_fold"]
    own = found[(found["ring.length"] == 8) & (found["variant"] == "exact_fold")]
    edges = own["tokens"].unique()
    assert len(rows) == 3 * F * HEADS == own.groupby("tokens")["rows"].first().sum()
    assert edges[-1] == rows["tokens"].max() and (np.diff(edges) > 0).all() and len(edges) <= published_sweep.BINS
    below = 0
    for edge in edges:
        inside = rows[(rows["tokens"] > below) & (rows["tokens"] <= edge)]["served_fro"]
        mine = own[own["tokens"] == edge]
        np.testing.assert_allclose(mine["quantile"], Q, rtol=2.0**-24)
        np.testing.assert_allclose(mine["served_fro"], np.quantile(inside, Q), rtol=2 * CLOSE)
        below = edge


def test_a_failed_seed_is_the_top_of_its_bin(folder):
    """Fault: a quantile skips NaN or inf, so that a configuration in which a seed fails looks sound."""
    publish.publish(folder, "first")
    found = load("results/first", "quantiles", variants=["chunked_bf16"])
    found["quantile"] = found["quantile"].round(2)
    last = found[found["tokens"] == found["tokens"].max()].set_index(["ring.length", "quantile"])["kept_fro"]
    # of 12 rows two are NaN and two inf
    assert np.isnan(last[16, 1.0]) and np.isposinf(last[16, 0.75]) and np.isfinite(last[16, 0.5])
    assert np.isfinite(found[found["ring.length"] == 8]["kept_fro"]).all()


def test_a_metric_that_a_variant_lacks_is_null_and_the_oracle_is_left_out(folder):
    """Fault: null becomes NaN, which says that it failed."""
    table = pq.read_table(publish.publish(folder, "first") / "quantiles.parquet")
    rows = table.to_pandas()
    assert set(rows["variant"].unique()) == {"exact_fold", "chunked_bf16"}
    lacks = (rows["variant"] == "exact_fold").to_numpy()
    np.testing.assert_array_equal(table["d_med"].is_null().to_numpy(), lacks)
    assert table["served_fro"].null_count == 0


def test_levels_read_like_those_of_the_runs(folder):
    """Fault: a published level is another run's, or a row, a column or a null is lost on the way out."""
    publish.publish(folder, "first")
    there, here = load("results/first"), load(folder)
    assert list(there) == list(here)
    for name in here:
        if pd.api.types.is_float_dtype(here[name]):
            np.testing.assert_allclose(there[name], here[name], rtol=CLOSE, err_msg=name)
        else:
            assert there[name].astype(object).equals(here[name].astype(object)), name
    assert there.attrs["config"] == here.attrs["config"]
    assert there.attrs["missing"] == here.attrs["missing"]
    assert there.attrs["missing_in"] == here.attrs["missing_in"] != {}
    named = load("results/first", columns=["run", "variant", "kept_max"])
    assert list(named) == ["run", "decode.seed", "ring.length", "variant", "kept_max"]
    both = load(["results/first", folder])
    assert len(both) == 2 * len(here) and list(both) == list(here)


def test_a_published_sweep_is_shown_and_compared_as_the_sweep(folder, capsys):
    """Fault: its rows have lost their configuration, so that all rings are one line, or none finds its partner."""
    publish.publish(folder, "first")
    assert command.main(["compare", "results/first", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "12 rows matched, 0 not; 0 of 84 levels outside" in out
    # NaN equals nothing: what failed in one seed
    assert "8 levels not finite on both sides" in out
    shown = []
    for path in ("results/first", folder):
        assert command.main(["show", str(path), "--level", "served_max"]) == 0
        shown.append(capsys.readouterr().out.partition("served_max, maximum over seeds:\n")[2])
    assert shown[0] == shown[1] != "" and len(shown[0].splitlines()) == 5


def test_a_published_sweep_takes_any_key_as_a_column(folder):
    """Fault: a key that is constant in the sweep is lost, so that two published sweeps cannot be told apart."""
    publish.publish(folder, "first")
    frame = load("results/first", "quantiles", config=["decode.family", "ring.length"])
    assert list(frame)[:3] == ["decode.family", "ring.length", "variant"] and set(frame["decode.family"]) == {"silu"}
    assert "decode.seed" not in load("results/first", "quantiles", config="all")
    with pytest.raises(HarnessError, match=r"no finished run with flushes \(.*no flushes.parquet"):
        load("results/first", "flushes")


def test_nothing_published_names_the_machine_and_jobs_are_a_number(folder):
    """Fault: a host, a home directory, or a thousand lines of overrides are committed."""
    sweep = read_json(folder / "sweep.json") | {"launcher": "joblib", "workers": 2}
    write_json(folder / "sweep.json", sweep)
    target = publish.publish(folder, "first")
    assert {p.name for p in target.iterdir()} == {"levels.parquet", "quantiles.parquet", "manifest.json", "sweep.json"}
    manifest, said = (json.loads((target / name).read_text()) for name in ("manifest.json", "sweep.json"))
    assert said == {
        "command": ["decode.seed=range(9)", "results_dir=runs"],
        "jobs": 6,
        "launcher": "joblib",
        "workers": 2,
    }
    assert manifest["packages"] == {"torch": "2.11.0"} and manifest["commit"] == "0123abcd" and manifest["runs"] == 6
    assert manifest["variants"]["exact_fold"] == DESIGN and manifest["run_seconds"] == 6.0
    assert not {"host", "command", "seeds"} & set(manifest)
    assert set(manifest["files"]) == {"levels.parquet", "quantiles.parquet", "sweep.json"}
    assert not damaged(target, manifest)
    assert "/home" not in json.dumps([manifest, said]) and "ring.length" not in manifest["config"]


def test_sweeps_published_together_are_one_table(folder, tmp_path, capsys):
    """Fault: the second sweep's runs are left out, counted twice, or lose the key that only they vary."""
    root = folder.parent.parent
    other = make(root, "other", ring__length=8, precision__name="fp32")
    more = swept(root, [("finished", other), ("skipped", root / "drift" / "080".ljust(16, "0"))], "beside00")
    assert publish.main([str(folder), str(more), "both"]) == 0
    found = load("results/both")
    assert set(found["precision.name"]) == {"own", "fp32"} and found["run"].nunique() == 7
    said = json.loads(Path("results/both/sweep.json").read_text())
    manifest = json.loads(Path("results/both/manifest.json").read_text())
    assert manifest["runs"] == 7 and manifest["run_seconds"] == 7.0
    assert said["jobs"] == 8 and [each["jobs"] for each in said["beside"]] == [2]
    assert publish.main([str(folder), str(other), "three"]) == 2
    assert "no sweep; only sweeps are published together" in capsys.readouterr().err
    assert not list(tmp_path.glob("results/three"))


def lose(folder: Path, what: str) -> None:
    run = folder.parent.parent / "drift" / "080".ljust(16, "0")
    if what == "failed":
        (folder / "00001.json").write_text(
            json.dumps({"job": 1, "overrides": [], "state": "failed", "error": "planted"})
        )
    elif what == "absent":
        (folder / "00005.json").unlink()
    elif what == "gone":
        (run / "manifest.json").unlink()
    elif what == "stale":
        write_json(run / "manifest.json", read_json(run / "manifest.json") | {"identity": {"source": "0" * 16}})
    elif what == "flushes":
        write_json(run / "manifest.json", read_json(run / "manifest.json") | {"files": {}})
        (run / "flushes.parquet").unlink()
    elif what.startswith("truncated"):
        if what != "truncated":
            write_json(run / "manifest.json", read_json(run / "manifest.json") | {"files": {}})
        (run / "flushes.parquet").write_bytes((run / "flushes.parquet").read_bytes()[:-100])


@pytest.mark.parametrize(
    ("what", "argv", "says"),
    [
        ("failed", ["first"], "1 failed"),
        ("absent", ["first"], "1 failed"),
        ("gone", ["first"], "1 missing"),
        ("stale", ["first"], "1 stale, made by other source than this"),
        ("flushes", ["first"], "1 without flushes.parquet"),
        ("truncated", ["first"], "1 damaged"),
        ("truncated, no checksums", ["first"], "not readable as Parquet"),
        ("", ["first", "--heads", "0"], "is a sweep, whose heads and slots are pooled"),
        ("", ["runs"], "cannot name a folder"),
    ],
)
def test_half_a_sweep_is_refused_and_leaves_nothing(folder, tmp_path, capsys, what, argv, says):
    """Fault: a figure is drawn from a sweep in which jobs are missing, or of two sources."""
    lose(folder, what)
    assert publish.main([str(folder), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("harness: error: ") and err.count("\n") == 1
    assert not list(tmp_path.glob("results/*"))


def test_a_large_or_a_second_one_of_a_name_is_refused(folder, monkeypatch, capsys):
    """Fault: a repository that grows unnoticed; a published figure replaced."""
    with monkeypatch.context() as patch:
        patch.setattr(publish, "LIMIT", 1000)
        assert publish.main([str(folder), "first"]) == 2
    assert "above 1,000" in capsys.readouterr().err
    assert publish.main([str(folder), "first"]) == 0
    assert publish.main([str(folder), "first"]) == 2 and "nothing is overwritten" in capsys.readouterr().err


def test_a_row_on_an_edge_belongs_to_the_bin_below_it(monkeypatch):
    """Fault: a bin called 8 holds the rows at 8 tokens, or those at 5 to 8, depending on a rounding."""
    monkeypatch.setattr(published_sweep, "BINS", 10)
    tokens = 2 ** np.arange(11)
    edges = published_sweep.bins(tokens)
    assert edges.tolist() == tokens[1:].tolist()
    names = pa.array(["exact_fold"] * 11).dictionary_encode()
    rows = pa.table({"variant": names, "tokens": tokens} | {name: tokens.astype(np.float32) for name in ERRORS})
    found = published_sweep._quantiles([rows]).to_pandas()
    top = found[found["quantile"] == 1]
    assert top["tokens"].tolist() == top["kept_fro"].tolist() == edges.tolist()
    assert top["rows"].tolist() == [2] + [1] * 9


@pytest.mark.parametrize("top", [1, 2, 39, 1000, 16384, 2**40])
def test_every_token_count_has_a_bin(top):
    """Fault: an edge misses the last count by a rounding, and its rows fall off the end; or bins are more than BINS."""
    tokens = np.unique(np.array([1, top // 3 + 1, top]))
    edges = published_sweep.bins(tokens)
    assert edges[-1] == top and (np.diff(edges) > 0).all() and len(edges) <= published_sweep.BINS
    assert (np.searchsorted(edges, tokens) < len(edges)).all()
