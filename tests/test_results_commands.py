"""list, show and export: nothing is lost between the files and the screen, or the file."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fake_runs import F, make, swept, truncated

from harness.provenance import read_json, write_json
from harness.results import __main__ as command
from harness.results import exporting, load, printing, showing


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(*argv) -> (exit status, stdout, stderr), in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> tuple[int, str, str]:
        status = command.main([*map(str, argv)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def results(tmp_path) -> Path:
    """results/runs: rings of 8 and 16, a stale run, a failed one, and a sweep of three jobs one of which failed."""
    root = tmp_path / "results/runs"
    runs = [make(root, f"a{n}", ring__length=n, model__name="tiny") for n in (8, 16)]
    make(root, "stale", ring__length=16, source="0" * 16)
    write_json(root / "drift" / f"{'f' * 16}.status.json", {"state": "failed", "error": "ring.length: planted"})
    swept(root, [("finished", runs[0]), ("failed", None), ("skipped", runs[1])])
    return root


def test_list_shows_every_run_with_what_tells_it_apart(call, results):
    """Fault: a run that failed is not listed, keys that are the same everywhere fill the screen, or lines are long."""
    status, out, err = call("list")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert out.startswith("runs in results/runs: ") and "2 finished" in out and "1 stale" in out and "1 failed" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}
    assert lines["a8000000"].rstrip().endswith("model.name=tiny ring.length=8")
    assert "decode.tokens" not in out
    assert "ring.length: planted" in lines["f" * 8] and "stale" in lines["stale000"]
    assert lines["abcdef01"].split()[:4] == ["abcdef01", "3", "2", "1"]


def test_list_a_sweep_names_its_lost_jobs(call, results):
    """Fault: a job that left no run has no hash, and ends the list of its sweep in a traceback."""
    folder = swept(results, [("failed", None), ("absent", None), ("finished", Path("drift/gone"))], "abcdef02")
    status, out, _ = call("list", folder)
    lines = [line.split()[:2] for line in out.splitlines()]
    assert status == 0 and "ZeroDivisionError: planted" in out
    assert all(line in lines for line in (["00000", "failed"], ["00001", "failed"], ["gone", "missing"]))


@pytest.mark.parametrize(
    ("argv", "runs"),
    [
        (["ring.length=16"], {"a1600000", "stale000"}),
        (["ring.length=16", "--state", "finished"], {"a1600000"}),
        (["--state", "failed,stale"], {"ffffffff", "stale000"}),
        (["model.name=tiny", "ring.length=8", "--experiment", "drift"], {"a8000000"}),
        (["--state", "killed"], set()),
        (["results/runs/sweeps/abcdef01", "--state", "finished"], {"a8000000", "a1600000"}),
    ],
)
def test_filters_choose(call, results, argv, runs):
    """Fault: a filter is ignored, or compares numbers as texts of another form."""
    status, out, _ = call("list", *argv)
    assert status == 0
    assert {line.split()[0] for line in out.splitlines() if line[:8].strip() in {*runs, "a8000000", "a1600000"}} == runs


def test_list_and_show_name_a_damaged_run(call, results):
    """Fault: a run whose summary breaks off is listed as finished, and its sweep is shown without it in silence."""
    sick = results / "drift" / "a8".ljust(16, "0")
    sweep = swept(results, [("finished", sick), ("finished", results / "drift" / "a16".ljust(16, "0"))], "abcdef02")
    truncated(sick / "summary.json")
    line = next(line for line in call("list")[1].splitlines() if line.startswith("a8000000"))
    assert line.split()[1] == "damaged"
    assert "a8000000" in call("list", "--state", "damaged")[1]
    status, out, _ = call("show", sweep)
    assert status == 1 and f"job 0: {sick}: damaged, summary.json is not JSON\n" in out
    write_json(sick / "manifest.json", read_json(sick / "manifest.json") | {"files": {}})
    status, out, _ = call("show", "a8")
    assert status == 1 and "no levels: damaged, summary.json is not JSON\n" in out


def test_one_unreadable_sweep_does_not_hide_the_others(call, results):
    """Fault: a sweep.json that breaks off ends the list, or is said not to be there."""
    sick = swept(results, [("finished", None)], "0bad0bad")
    truncated(sick / "sweep.json")
    status, out, _ = call("list")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line[:1].strip()}
    assert status == 0 and lines["abcdef01"][:2] == ["abcdef01", "3"]
    assert lines["0bad0bad"] == ["0bad0bad", "unreadable", "sweep.json"]
    assert "unreadable sweep.json" in call("show", sick)[2] and "has no sweep.json" not in call("show", sick)[2]


NAME = "a_published_name_that_is_as_long_as_fifty_four_letters"


def test_long_names_of_published_runs_and_sweeps_keep_the_columns(call, tmp_path):
    """Fault: one long name breaks the headers of all, or is cut."""
    root = tmp_path / "results"
    make(root, "x", more={"published": {"run": "9" * 16}}).rename(root / NAME)
    make(root, "y", more={"published": {"run": "8" * 16}}).rename(root / "short")
    sweep = root / f"{NAME}_too"
    sweep.mkdir()
    write_json(sweep / "sweep.json", {"command": ["decode.seed=1,2"], "jobs": 2, "launcher": "basic"})
    (sweep / "levels.parquet").touch()
    out = call("list", "results")[1]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and {NAME, f"{NAME}_too"} <= set(lines)
    assert "run   state     started          seconds" in out and "sweep jobs done failed running launcher" in out


def test_list_names_a_published_sweep_itself(call, tmp_path):
    """Fault: a path that `list` itself has printed holds nothing that fits."""
    folder = tmp_path / "results/mine"
    make(tmp_path, "x", more={"published": {"config": []}}).rename(tmp_path / "mine")
    folder.parent.mkdir()
    (tmp_path / "mine").rename(folder)
    write_json(folder / "sweep.json", {"command": ["decode.seed=1,2"], "jobs": 2})
    (folder / "levels.parquet").touch()
    status, out, _ = call("list", "results/mine")
    assert status == 0 and ["mine", "2", "2", "decode.seed=1,2"] in [line.split() for line in out.splitlines()]


def test_list_knows_published_runs_and_sweeps(call, results, tmp_path):
    """Fault: `list results` shows nothing of what is committed."""
    make(tmp_path, "x", more={"published": {"run": "9" * 16}}).rename(tmp_path / "results/first")
    assert "first published" in " ".join(call("list", "results")[1].split())
    frame = load("results")
    assert set(frame.attrs["directories"]) == {"9" * 16}


def test_show_a_run_tells_what_is_not_default_and_whether_files_are_as_written(call, results):
    """Fault: a file that was changed after the run is shown as its result."""
    directory = results / "drift" / "a8".ljust(16, "0")
    status, out, _ = call("show", "a8")
    assert status == 0 and "not default: model.name=tiny ring.length=8\n" in out and "all as written" in out
    assert "exact_fold" in out and "torch 2.11.0" in out
    (directory / "config.yaml").write_text("ring: {length: 32}\n")
    status, out, _ = call("show", "a8000")
    assert status == 1 and "changed since: config.yaml" in out
    write_json(directory / "manifest.json", read_json(directory / "manifest.json") | {"files": {}})
    status, out, _ = call("show", directory)
    assert status == 0 and "no checksums" in out


def test_show_a_failed_run_says_why(call, results):
    """Fault: a hash that `list` shows cannot be shown."""
    status, out, _ = call("show", "ffff")
    assert status == 1 and "failed" in out and "ring.length: planted" in out


def test_show_a_sweep_names_failures_and_spreads_levels(call, results):
    """Fault: a failed job is a number without a reason; or a level stands in another variant's column."""
    path = results / "sweeps/abcdef01/sweep.json"
    write_json(path, read_json(path) | {"launcher": "joblib", "workers": 2, "concurrent": 2})
    status, out, _ = call("show", "results/runs/sweeps/abcdef01", "--level", "served_max")
    assert "launched: joblib, 2 workers, 2 at once\n" in out
    assert status == 1 and "1 finished, 1 failed, 1 skipped" in out
    assert "job 1: failed, decode.seed=1: ZeroDivisionError: planted" in out
    assert ["8", "1.0e-06", "1.0e-07"] in [line.split() for line in out.splitlines()]
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 80


def test_no_number_of_many_variants_breaks(call, tmp_path):
    """Fault: columns that do not fit are squeezed, and 1.0e-06 is 1.0e in one line and -06 in the next."""
    variants = {f"a_rather_outlandish_variant_{i:02d}": 1e-6 * (i + 1) for i in range(12)}
    runs = [make(tmp_path, f"{n}", variants, ring__length=n) for n in (8, 16)]
    out = call("show", swept(tmp_path, [("finished", run) for run in runs]), "--level", "served_max")[1]
    table = out[out.index("over seeds") :].splitlines()
    assert max(map(len, table)) <= 80
    numbers = [word for line in table if line[:2].strip() in ("8", "16") for word in line.split()[1:]]
    assert sorted(numbers) == sorted(f"{x:.1e}" for x in variants.values() for _ in runs)


def test_keys_give_way_to_numbers(capsys):
    """Fault: where the keys alone fill the line, the numbers are squeezed with them."""
    config = {f"group.a_long_key_{i}": f"a_long_value_{i}" for i in range(12)}
    (table,) = showing.pivot([(config, "exact_fold", 1.2e-6)], "served_max", 80)
    printing.console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.endswith(" 1.2e-06") for line in lines)


def test_over_seeds_a_failure_is_the_level(call, tmp_path):
    """Fault: the median over seeds skips NaN, so that two failures of three seeds look like one sound run."""
    root, sick = tmp_path / "results/runs", np.full(F, 1e-3)
    sick[-2:] = np.nan
    runs = [make(root, f"{i}", {"exact_fold": x}, decode__seed=i) for i, x in enumerate((1e-3, sick, sick))]
    out = call("show", swept(root, [("finished", run) for run in runs]))[1]
    assert ["nan"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["show", "a"], "a: is the beginning of "),
        (["show", "zzz"], "zzz: neither a folder nor the beginning of a hash in results/runs"),
        (["show", "abcdef01", "--level", "backend"], "--level: 'backend' is no number"),
        (["show", "*"], "*: neither a folder nor the beginning of a hash in results/runs"),
        (["show", "**"], "**: neither a folder nor the beginning of a hash in results/runs"),
        (["list", "--state", "finishd"], "--state: finishd: not one of finished, stale, published, failed"),
        (["list", "--experiment", "nosuch"], "--experiment: nosuch: not in results/runs, which has drift"),
        (["list", "ring.lenght=16"], "ring.lenght: no key of the runs"),
        (["list", "nowhere"], "nowhere: no such folder"),
        (["list", "a", "b"], "list: one PATH, not a, b"),
        (["lsit"], "command line: argument verb: invalid choice"),
        (["export", "results/runs", "x.xls"], "x.xls: suffix '.xls' is not one of .csv"),
        (["export", "results/runs", "nowhere/x.csv"], "nowhere/x.csv: cannot be written"),
        (["export", "results/runs", "x.csv", "--variants", "doubling"], "variants: doubling: in no run"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(call, results, argv, says):
    """Fault: a traceback, an empty table, or half a file."""
    status, out, err = call(*argv)
    assert status == 2 and says in err and err.count("\n") == 1 and err.startswith("harness: error: ")
    assert not list(Path().glob(".*partial")) and not list(Path().glob("x.*"))


def read(path: Path) -> pd.DataFrame:
    if path.suffix == ".csv":
        return pd.read_csv(path, keep_default_na=False, na_values={})
    if path.suffix == ".parquet":
        return pd.DataFrame(pq.read_table(path).to_pylist())
    rows = json.loads(path.read_text()) if path.suffix == ".json" else map(json.loads, path.read_text().splitlines())
    return pd.DataFrame(rows)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json", "jsonl"])
def test_an_export_keeps_null_nan_and_inf_apart(call, tmp_path, suffix):
    """Fault: a failed level leaves as an empty cell, as a metric that was never there does."""
    sick, blown = np.full(F, 1e-3), np.full(F, 1e-3)
    sick[-1], blown[-1] = np.nan, np.inf
    make(tmp_path / "r", "a", {"exact_fold": sick, "null_arm": blown})
    make(tmp_path / "r", "b", {"exact_fold": 1e-6, "null_arm": 1e-7}, ring__length=8)
    status, out, _ = call("export", "r", f"x.{suffix}")
    assert (status, out.splitlines()[0].split(",")[0]) == (0, f"x.{suffix}: 4 rows")
    rows = read(Path(f"x.{suffix}"))
    assert (
        list(rows)[:3] == ["run", "ring.length", "variant"]
        and rows["ring.length"].astype(int).tolist() == [16] * 2 + [8] * 2
    )
    text = [str(x).lower() for x in rows["served_max"]]
    assert text[:2] == ["nan", "inf"] and [float(x) for x in text[2:]] == pytest.approx([1e-6, 1e-7], rel=1e-6)
    lacks = rows["d_max"].tolist()
    assert lacks[0] in ("", None) or (suffix == "parquet" and pq.read_table("x.parquet")["d_max"].null_count == 2)
    assert str(lacks[1]).lower() == "inf"


def test_an_export_of_rows_has_all_of_them_beside_their_configuration(call, results):
    """Fault: the last batch is lost, or a text becomes the number of its category."""
    assert call("export", "results/runs", "x.csv", "--table", "flushes", "--config", "all")[0] == 0
    rows, frame = pd.read_csv("x.csv"), load("results/runs", "flushes", config="all")
    assert list(rows) == list(frame) and len(rows) == len(frame)
    assert rows["variant"].tolist() == frame["variant"].tolist() and rows["model.name"].unique().tolist() == [
        "tiny",
        "default",
    ]
    np.testing.assert_allclose(rows["kept_fro"], frame["kept_fro"], rtol=1e-6)


def test_a_file_is_not_overwritten_unasked(call, results):
    """Fault: a table that someone has edited is gone."""
    Path("x.md").write_text("mine")
    assert call("export", "results/runs", "x.md")[0] == 2 and Path("x.md").read_text() == "mine"
    assert call("export", "results/runs", "x.md", "--force")[0] == 0
    lines = Path("x.md").read_text().splitlines()
    assert len(lines) == 2 + 6 and {line.count("|") for line in lines} == {lines[0].count("|")}


def test_a_table_for_latex_compiles_whatever_it_holds(call, results):
    """Fault: an underscore or a per cent sign in a name breaks the document."""
    assert call("export", "results/runs", "x.tex", "--columns", "variant,served_law")[0] == 0
    text = Path("x.tex").read_text()
    assert "exact\\_fold" in text and "ring.length" in text and text.startswith("\\begin{tabular}{")
    assert exporting._escaped("a_b%c&d^e") == r"a\_b\%c\&d\textasciicircum{}e"
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert len(rows) == 7 and {row.count("&") for row in rows} == {rows[0].count("&")}


def test_the_manual_of_every_verb_prints(call):
    """Fault: --help fails on a stray character in a help text."""
    for verb in ("list", "show", "compare", "export"):
        with pytest.raises(SystemExit) as ended:
            call(verb, "--help")
        assert ended.value.code == 0
