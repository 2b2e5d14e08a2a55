"""Publishing: what leaves the machine is small, complete for the named heads, anonymous, and never a stale result."""

import json
import platform

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from harness import publish
from harness.copied import BITS
from harness.provenance import checksums, source_digest, write_json
from harness.quantiles import Q, shortened
from harness.records import METRICS, RowWriter, read_rows

F, HEADS, SLOTS = 30, 12, 2
KEYS = ["variant", "head", "slot", "flush"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of two variants and the oracle, 12 heads and 2 slots; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "elsewhere" / "0123456789abcdef"
    directory.mkdir(parents=True)
    flush, slot, head = (x.ravel() for x in np.meshgrid(*map(np.arange, (F, SLOTS, HEADS)), indexing="ij"))
    keys = {"slot": slot, "head": head, "flush": flush, "tokens": 10 * flush + slot + 10}
    rng = np.random.default_rng(0)
    with RowWriter(directory / "flushes.parquet") as writer:
        interval = np.ma.masked_where(flush >= 20, rng.random(len(flush)))
        writer.append("oracle", keys | {"cond2": 1 + rng.random(len(flush)), "interval_cond2": interval})
        for name in ("chunked_bf16", "exact_fold"):
            error = 10.0 ** rng.uniform(-7, -2, len(flush))
            error[(flush == 7) & (head == 9) & (slot == 1)] = np.nan
            error[(flush == 7) & (head == 10) & (slot == 1)] = np.inf
            stage = np.where(np.isfinite(error), None, "inverse")
            writer.append(name, keys | {"served_fro": error, "folded": flush % 2 == 0, "nonfinite_stage": stage})
    (directory / "config.yaml").write_text(
        "decode:\n  gates: /home/someone/traces/gates.safetensors\n"
        "results_dir: /home/someone/runs\nvariants:\n- chunked_bf16\n- '/home/some one/my own.yaml'\n"
    )
    command = [
        "python",
        "-m",
        "harness",
        "results_dir=/home/someone/runs",
        "variants=[a,/home/someone/b.yaml]",
    ]
    manifest = {"identity": {"source": source_digest()}, "host": platform.node(), "command": command}
    manifest |= {"cores": 2, "note": "ieee/64, 8/16 heads, results/runs"}
    write_json(directory / "summary.json", {"variants": {}})
    (directory / "drift.png").write_bytes(b"\x89PNG")
    write_json(directory / "manifest.json", manifest | {"files": checksums(directory)})
    return directory


def rows_of(path, heads) -> pd.DataFrame:
    rows = read_rows(path)
    return rows[rows["head"].isin(heads)].sort_values(KEYS).reset_index(drop=True)


def test_named_heads_are_published_in_full_and_the_folder_reads_like_a_run(run):
    """Fault: a column, a row or a null is lost or changed on the way out."""
    target = publish.publish(run, "first", [11, 3, 9])
    assert {p.name for p in target.iterdir()} == {*publish.COPIED, "flushes.parquet", "quantiles.parquet"}
    kept = rows_of(target, range(HEADS))
    pd.testing.assert_frame_equal(kept, rows_of(run, [3, 9, 11]))
    assert read_rows(target).attrs["missing"] == read_rows(run).attrs["missing"]
    assert kept["nonfinite_stage"].eq("inverse").sum() == 2
    assert json.loads((target / "manifest.json").read_text())["published"]["heads"] == [3, 9, 11]


def test_other_heads_are_published_as_quantiles_that_hide_no_failure(run):
    """Fault: quantiles over the wrong rows; NaN or a null skipped or taken for the other."""
    target = publish.publish(run, "first", [0, 1, 2])
    found = pq.read_table(target / "quantiles.parquet").to_pandas().set_index(["variant", "flush"])
    rows = rows_of(run, range(3, HEADS))
    assert len(found) == 3 * F * len(Q) and set(found["rows"]) == {9 * SLOTS}
    plain = rows[(rows["variant"] == "exact_fold") & (rows["flush"] == 4)]["served_fro"]
    mine = found.loc[("exact_fold", 4)]
    np.testing.assert_allclose(mine["quantile"], Q, rtol=1e-6)
    np.testing.assert_allclose(mine["served_fro"], np.quantile(plain, Q), rtol=2.0**-BITS)
    assert (mine["tokens"] == 50).all()
    failed = found.loc[("exact_fold", 7), "served_fro"].to_numpy()
    # of 18 values one is NaN and one inf: the top is NaN, and 95 % lies between the two
    assert np.isnan(failed[-2:]).all() and np.isfinite(failed[:-2]).all()
    table = pq.read_table(target / "quantiles.parquet")
    nulls = {name: table[name].null_count for name in METRICS}
    # what a variant never has, and the intervals that were not computed; NaN is no null
    assert nulls["served_fro"] == F * len(Q)
    assert nulls["interval_cond2"] == (2 * F + 10) * len(Q)
    assert nulls["o_max"] == len(table)


def test_a_model_of_few_heads_is_published_whole(run):
    """Fault: eight heads are demanded of a model that has six, or an empty rest fails."""
    target = publish.publish(run, "first", range(HEADS))
    assert pq.read_table(target / "quantiles.parquet").num_rows == 0
    assert json.loads((publish.publish(run, "second") / "manifest.json").read_text())["published"]["heads"] == [
        *range(8)
    ]


def test_shortened_numbers_keep_their_meaning():
    """Fault: rounding turns a finite error into inf, or a small one into an exact zero."""
    limits = np.finfo(np.float32)
    odd = np.array([0, np.inf, np.nan, limits.max, -limits.max, limits.smallest_subnormal, 1 + 2.0**-11], np.float32)
    np.testing.assert_array_equal(shortened(odd)[:3], odd[:3])
    assert np.isfinite(shortened(odd)[3:]).all() and (shortened(odd)[3:] != 0).all()
    assert shortened(odd)[-1] == 1
    x = np.exp(np.random.default_rng(0).uniform(-40, 40, 1000)).astype(np.float32)
    short = shortened(x)
    assert np.abs(short / x - 1).max() <= 2.0**-BITS
    assert not (short.view(np.uint32) & (2 ** (24 - BITS) - 1)).any()


def test_nothing_published_names_the_machine(run):
    """Fault: the host's name or a home directory is committed; or a word with a slash is cut as if it were a path."""
    target = publish.publish(run, "first")
    manifest = json.loads((target / "manifest.json").read_text())
    text = (target / "config.yaml").read_text()
    # the published tables have other bytes than those of the run
    assert manifest["files"] == checksums(target) != checksums(run)
    assert "host" not in manifest and "/home" not in text + json.dumps(manifest)
    assert manifest["command"][-2:] == ["results_dir=runs", "variants=[a,b.yaml]"]
    assert manifest["note"] == "ieee/64, 8/16 heads, results/runs"
    assert text.splitlines()[1:3] == ["  gates: gates.safetensors", "results_dir: runs"]
    assert text.splitlines()[-1] == "- 'my own.yaml'"


def corrupt(run, what):
    if what == "unfinished":
        (run / "manifest.json").unlink()
    elif what == "another experiment":
        (run / "drift.png").unlink()
    elif what == "stale":
        write_json(run / "manifest.json", {"identity": {"source": "0" * 16}})
    elif what == "changed":
        write_json(run / "summary.json", {"variants": {"mine": 0}})
    elif what == "truncated":
        # of an earlier version, without checksums
        write_json(run / "manifest.json", {"identity": {"source": source_digest()}})
        (run / "flushes.parquet").write_bytes((run / "flushes.parquet").read_bytes()[:-100])


@pytest.mark.parametrize(
    ("what", "argv", "says"),
    [
        ("unfinished", ["first"], "no finished run"),
        ("another experiment", ["first"], "it has no drift.png"),
        ("stale", ["first"], "made by other source"),
        ("changed", ["first"], "damaged, summary.json"),
        ("truncated", ["first"], "not readable as Parquet"),
        ("", ["first", "--heads", "0,12"], "no head 12; it has 0..11"),
        ("", ["first", "--heads", "0-3"], "--heads: '0-3' is not a list"),
        ("", ["../first"], "cannot name a folder"),
        ("", ["runs"], "cannot name a folder"),
        ("", [], "required: NAME"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(run, tmp_path, capsys, what, argv, says):
    """Fault: a stale or broken result is published, or half a folder stays behind."""
    corrupt(run, what)
    assert publish.main([str(run), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("harness: error: ") and err.count("\n") == 1
    assert [p.name for p in tmp_path.glob("**/*") if "first" in p.name or "partial" in p.name] == []


def test_too_large_is_refused_and_published_is_never_overwritten(run, tmp_path, monkeypatch, capsys):
    """Fault: a repository that grows by megabytes unnoticed; a published figure replaced by another run's."""
    with monkeypatch.context() as patch:
        patch.setattr(publish, "LIMIT", 1000)
        assert publish.main([str(run), "first"]) == 2
    assert "above 1,000" in capsys.readouterr().err and not list((tmp_path / "results").iterdir())
    assert publish.main([str(run), "first"]) == 0
    assert capsys.readouterr().out == "published: results/first\n"
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results/first").iterdir()}
    assert publish.main([str(run), "first"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "results/first").iterdir()} == before
