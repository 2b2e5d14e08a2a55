"""The default experiment: a run is complete, accounted for and done once, and refusals leave nothing behind."""

import json
from pathlib import Path

import pytest
import yaml

from harness import cli, progress, shards
from harness.config import Config, DecodeConfig
from harness.records import read_rows
from harness.rundir import list_runs
from harness.summary import summarise

ONE = ("model=tiny", "decode.tokens=60", "workers=1")  # one process, some five flushes
ARMS = ["exact_recurrent", "null_arm", "chunked_fp32", "chunked_tf32", "chunked_bf16", "exact_fold"]


@pytest.fixture
def harness(monkeypatch, tmp_path, capsys):
    """harness(*argv) -> (exit status, stdout, stderr), in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(list(argv))
        return status, *capsys.readouterr()

    return call


def runs(tmp_path: Path) -> list[dict]:
    return list_runs(tmp_path / "results/runs")


def test_a_run_is_complete_says_where_it_lies_and_is_done_once(harness, tmp_path):
    """Fault: a file is missing, the reader is not told where to look, or a finished run is decoded again."""
    status, out, err = harness(*ONE)
    (run,) = runs(tmp_path)
    directory = run["directory"]
    assert (status, err, run["state"]) == (0, "", "finished")
    files = {"config.yaml", "manifest.json", "flushes.parquet", "summary.json", "drift.png"}
    assert {p.name for p in directory.iterdir()} == files
    lines = out.splitlines()
    where = directory.relative_to(tmp_path)
    assert lines[-2:] == [f"run directory: {where}", f"figure: {where}/drift.png"]
    assert {line.split()[0] for line in lines} >= set(ARMS)
    rows = read_rows(directory)
    assert set(rows["variant"]) == {"oracle", *ARMS}
    assert set(rows.groupby("variant", observed=True).size()) == {6 * rows["flush"].nunique()}
    assert json.loads((directory / "summary.json").read_text()) == summarise(rows)
    assert (directory / "drift.png").read_bytes().startswith(b"\x89PNG")
    before = {p: p.stat().st_mtime_ns for p in directory.iterdir()}
    assert harness(*ONE, "progress=false") == (0, f"already done: {where}\n", "")
    assert {p: p.stat().st_mtime_ns for p in directory.iterdir()} == before


def test_the_manifest_tells_what_was_asked_for_from_what_was_done(harness, tmp_path):
    """Fault: under precision=fp32 the log still shows the formats of the variant's file, or no backend."""
    assert (
        harness(*ONE, "device=cpu", "variants=[chunked_bf16]", "precision=fp32", "precision.sites.checkpoint=fp16")[0]
        == 0
    )
    manifest = json.loads((runs(tmp_path)[0]["directory"] / "manifest.json").read_text())
    entry = manifest["variants"]["chunked_bf16"]
    assert (entry["backend"], entry["device"], manifest["device"]) == ("emulated", "cpu", "cpu")
    assert entry["requested"]["sites"]["checkpoint"] == "bf16"
    assert (entry["effective"]["checkpoint"], entry["effective"]["key"]) == ("fp16", "fp32")
    assert entry["effective"]["dot.fold"] == "ieee"
    assert entry["records"] == ["d", "k_hat", "g"] and entry["ring"]["length"] == 16
    assert set(manifest["stages"]) == {"decode", "summary", "figure"}
    assert sum(manifest["stages"].values()) <= manifest["seconds"] + 0.01


def test_a_decode_without_a_flush_is_one_clear_line(harness, tmp_path):
    """Fault: an empty table and an empty figure, or a traceback from inside them."""
    status, out, err = harness("model=tiny", "decode.tokens=5", "workers=1")
    assert (status, out) == (2, "")
    assert err.startswith("harness: error: decode.tokens: 5 tokens end before") and err.count("\n") == 1
    assert [(run["state"], run["directory"].exists()) for run in runs(tmp_path)] == [("failed", False)]


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("decode.gates", "decode.gates=nowhere.safetensors"),
        ("decode.coherence", "decode.coherence=0.5"),
        ("variants", "variants=[exact_fold,chunked_int4]"),
        ("precision.sites.checkpoint", "precision.sites.checkpoint=fp23"),
        ("ring.length", "ring.length=4"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(harness, tmp_path, key, override):
    """Fault: bad input leaves a run directory, a lock or a status behind."""
    status, out, err = harness(*ONE, override)
    assert (status, out) == (2, "")
    assert err.startswith(f"harness: error: {key}: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_middle_is_recorded_and_the_next_start_runs(harness, tmp_path, monkeypatch):
    """Fault: a run that broke off counts as done, or blocks its hash."""
    decode = shards.run

    def broken(*args):
        yield next(decode(*args))
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "run", broken)
        with pytest.raises(ZeroDivisionError):
            harness(*ONE)
    (run,) = runs(tmp_path)
    assert (run["state"], run["error"]) == ("failed", "ZeroDivisionError: planted")
    assert not run["directory"].exists() and not list(run["directory"].parent.glob(".*.partial"))
    assert harness(*ONE)[0] == 0
    assert [run["state"] for run in runs(tmp_path)] == ["finished"]


def test_an_edited_variant_is_another_run(harness, tmp_path):
    """Fault: results of a variant file are reused after the file was changed under the same name."""
    for checkpoint in ("bf16", "fp32"):
        sites = {"default": "fp32", "checkpoint": checkpoint}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"sites": sites, "dots": {"default": "ieee"}}))
        assert harness(*ONE, "variants=[mine.yaml]")[0] == 0
    errors = [read_rows(run["directory"], ["kept_fro"]).median().item() for run in runs(tmp_path)]
    assert len(errors) == 2 and max(errors) > 1e3 * min(errors)


def test_progress_counts_every_token_and_is_silent_where_nobody_looks(capsys):
    """Fault: a bar in a log file; or one that stops short because slots or prefill are left out."""
    decode = DecodeConfig(tokens=1000, prefill=200, slots=3)
    for shown in (None, False):
        with progress.tokens(Config(decode=decode, progress=shown)) as advance:
            advance(3600)
    assert capsys.readouterr() == ("", "")
    with progress.tokens(Config(decode=decode, progress=True)) as advance:
        for tokens in (600, 1500, 1500):
            advance(tokens)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("3,600 of 3,600 tokens, ") and err.endswith(" 0 s left\n")
