"""Loading results: every row beside its own configuration, no failure dressed up, no absence unnoticed."""

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_runs import HEADS, LEVELS, F, make, resummarised, swept, truncated

from harness import cli
from harness.errors import HarnessError
from harness.provenance import read_json, write_json
from harness.records import CONDITIONING, ERRORS, RowWriter, read_rows, recorded
from harness.results import frames, load, parts
from harness.results.columns import Codes
from harness.rundir import list_runs

LARGE = 10_000_000  # rows
ALLOWED = 2 << 20  # KiB resident


def four(root: Path) -> list[Path]:
    """Runs of two rings and two seeds; an error is 1e-5 times the ring's length, plus seed."""
    return [
        make(root, f"{length}{seed}", {"exact_fold": length * 1e-5 + seed}, ring__length=length, decode__seed=seed)
        for length in (8, 16)
        for seed in (0, 1)
    ]


def test_a_row_stands_beside_the_configuration_of_its_own_run(tmp_path, monkeypatch):
    """Fault: config columns are attached to another run's rows, or in another order than the rows."""
    four(tmp_path)
    # several batches a run, so that a run is not one piece
    monkeypatch.setattr(parts, "BATCH", 7)
    flushes = load(tmp_path, "flushes", variants=["exact_fold"])
    assert len(flushes) == 4 * F * HEADS and list(flushes)[:3] == ["run", "decode.seed", "ring.length"]
    expected = flushes["ring.length"].astype(float) * 1e-5 + flushes["decode.seed"].astype(float)
    np.testing.assert_allclose(flushes["served_fro"], expected, rtol=1e-6)
    assert flushes.groupby("run", observed=True).size().tolist() == [F * HEADS] * 4
    assert (
        list(flushes["ring.length"].cat.categories) == [8, 16] and (flushes["ring.length"] < 16).sum() == 2 * F * HEADS
    )
    levels = load(tmp_path)
    np.testing.assert_allclose(levels["served_median"], levels["ring.length"] * 1e-5 + levels["decode.seed"], rtol=1e-6)
    assert levels["ring.length"].dtype == np.int64
    assert levels.attrs["config"]["decode.tokens"] == 16384 and "ring.length" not in levels.attrs["config"]
    assert {Path(x).name for x in levels.attrs["directories"].values()} == set(levels["run"])


def ordered(levels: pd.DataFrame) -> pd.DataFrame:
    return levels.sort_values(["decode.seed", "ring.length"], ignore_index=True).astype({"run": str})


def test_every_way_to_the_same_runs_loads_the_same(tmp_path, monkeypatch):
    """Fault: an experiment's folder, a list, or a sweep that was moved since, lacks runs or counts them twice."""
    runs = four(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    swept(tmp_path / "here", [("finished", Path("here/drift") / run.name) for run in runs])
    expected = ordered(load(tmp_path / "here"))
    shutil.move("here", "there")
    ways = [
        "there",
        "there/drift",
        Path("there/sweeps/abcdef01"),
        [f"there/drift/{run.name}" for run in runs],
        ["there/drift", "there/sweeps/abcdef01"],
    ]
    for way in ways:
        pd.testing.assert_frame_equal(ordered(load(way)), expected)


def test_nan_inf_and_null_stay_three_things(tmp_path):
    """Fault: a failed level is read as a metric that the variant does not have, or the other way round."""
    sick = np.full(F, 1e-3)
    sick[-1] = np.nan
    blown = np.full(F, 1e-3)
    blown[-1] = np.inf
    make(tmp_path, "a", {"exact_fold": sick, "chunked_bf16": blown})
    make(tmp_path, "b", {"exact_fold": 1e-6, "chunked_bf16": 1e-3}, decode__seed=1)
    rows = load(tmp_path).set_index(["decode.seed", "variant"])
    assert np.isnan(rows.loc[(0, "exact_fold"), "served_max"]) and np.isposinf(
        rows.loc[(0, "chunked_bf16"), "served_max"]
    )
    assert rows["nonfinite"].tolist() == [HEADS, HEADS, 0, 0] and pd.isna(rows["first_nonfinite_tokens"].iloc[-1])
    levels = load(tmp_path)
    assert recorded(levels, "exact_fold", "served_max") and not recorded(levels, "exact_fold", "d_max")
    assert recorded(levels, "chunked_bf16", "d_max") and levels.attrs["missing_in"] == {}
    flushes = load(tmp_path, "flushes")
    assert flushes.attrs["missing"] == read_rows(tmp_path / "drift" / "a".ljust(16, "0")).attrs["missing"]


def test_a_cost_is_that_of_its_own_run(tmp_path):
    """Fault: what one design costs is remembered for another of other size, or for none."""
    for heads in (16, 32):
        make(tmp_path, f"a{heads}", {"chunked_bf16": 1e-3}, model__value_heads=heads)
    rows = load(tmp_path).set_index("model.value_heads")["bytes_held"]
    # a state, and all but the keys of a record, are one per value head
    assert 1.9 < rows[32] / rows[16] <= 2


def test_what_only_one_run_lacks_is_said_of_that_run(tmp_path):
    """Fault: where one of several runs has a metric, the nulls of the others pass for failures."""
    make(tmp_path, "a", {"chunked_bf16": 1e-3})
    directory = make(tmp_path, "b", {"chunked_bf16": 1e-3}, decode__seed=1)
    summary = read_json(directory / "summary.json")
    del summary["variants"]["chunked_bf16"]["end"]["o"]
    resummarised(directory, summary)
    frame = load(tmp_path)
    assert recorded(frame, "chunked_bf16", "o_max") and "ratio_kept" in frame.attrs["missing"]["chunked_bf16"]
    assert frame.attrs["missing_in"] == {directory.name: {"chunked_bf16": ["o_median", "o_max"]}}


def test_one_run_reads_as_read_rows_does(tmp_path):
    """Fault: two readers of one file differ in a value, a category or what is missing."""
    directory = make(tmp_path, "a", LEVELS)
    frame, rows = load(directory, "flushes"), read_rows(directory)
    assert list(frame) == list(rows)
    for name in rows:
        assert frame[name].isna().equals(rows[name].isna()), name
        assert (frame[name].dropna().astype(object) == rows[name].dropna().astype(object)).all(), name
    assert frame.attrs["missing"] == rows.attrs["missing"] and frame["variant"].dtype == rows["variant"].dtype
    assert (frame["history"].dtype, frame["folded"].dtype, frame["served_fro"].dtype) == ("Int32", "boolean", "float32")


@pytest.mark.parametrize(
    ("job", "state"), [(("failed", None), "failed"), (("absent", None), "failed"), (("finished", "gone"), "missing")]
)
def test_a_sweep_that_lacks_a_job_says_so_in_one_line(tmp_path, job, state):
    """Fault: a frame with a job less looks like the whole sweep."""
    gone = tmp_path / "drift" / ("f" * 16) if job[1] else None
    folder = swept(tmp_path, [("finished", make(tmp_path, "a")), (job[0], gone), ("skipped", make(tmp_path, "b"))])
    with pytest.warns(UserWarning, match="1 jobs are not there") as caught:
        frame = load(folder)
    assert len(caught) == 1 and f"00001 {state}" in str(caught[0].message) and "\n" not in str(caught[0].message)
    assert len(frame) == 2 * len(LEVELS) and [s for _, s in frame.attrs["left_out"]] == [state]


def test_a_whole_sweep_warns_of_nothing(tmp_path):
    """Fault: a warning that always comes is not read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(swept(tmp_path, [("finished", make(tmp_path, "a"))])).attrs["left_out"] == []


def altered(path: Path) -> None:
    """One digit of a number."""
    text = path.read_text()
    write_json(path, read_json(path) | {"seconds": 7})
    assert path.read_text() != text


@pytest.mark.parametrize(("spoil", "says"), [(truncated, "not JSON"), (altered, "not as it was written")])
def test_a_spoilt_summary_is_damage_and_not_a_run_without_levels(tmp_path, spoil, says):
    """Fault: a job whose summary breaks off is gone without a word, or altered numbers are read as genuine."""
    runs = [make(tmp_path, name, decode__seed=i) for i, name in enumerate("ab")]
    folder = swept(tmp_path, [("finished", run) for run in runs])
    spoil(runs[1] / "summary.json")
    message = f"{folder}: 1 jobs are not there (00001 damaged, summary.json is {says})"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        frame = load(folder)
    assert frame.attrs["left_out"] == [(str(runs[1]), f"damaged, summary.json is {says}")] and len(frame) == 2


def test_a_job_that_has_other_tables_is_not_missed(tmp_path):
    """Fault: a sweep is said to lack a job that was never to have levels."""
    runs = [make(tmp_path, name, decode__seed=i) for i, name in enumerate("ab")]
    folder = swept(tmp_path, [("finished", run) for run in runs])
    resummarised(runs[1], {"speed": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder).attrs["left_out"] == [(str(runs[1]), "no levels")]


def test_a_table_that_breaks_off_while_it_is_read_says_where(tmp_path):
    """Fault: of a thousand runs one has a flipped byte, and the error does not tell which."""
    make(tmp_path, "a")
    sick = make(tmp_path, "b", decode__seed=1)
    path = sick / "flushes.parquet"
    raw, column = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(raw)
    with pytest.raises(HarnessError, match=f"^{sick}: damaged, flushes.parquet is not readable as Parquet"):
        load(tmp_path, "flushes")


def test_one_name_need_not_be_a_list(tmp_path):
    """Fault: a text is taken for its letters."""
    make(tmp_path, "a")
    frame = load(tmp_path, columns="kept_median", variants="exact_fold")
    assert list(frame) == ["kept_median"] and len(frame) == 1


def test_runs_of_other_source_are_told_apart(tmp_path):
    """Fault: results of two sources in one column of levels, and nothing says which is which."""
    make(tmp_path, "a")
    assert "source" not in load(tmp_path) and len(load(tmp_path).attrs["sources"]) == 1
    make(tmp_path, "b", source="0" * 16)
    frame = load(tmp_path)
    assert frame.groupby("run", observed=True)["source"].first().tolist()[1] == "0" * 16
    assert frame["source"].nunique() == 2


def test_a_key_that_another_source_lacks_is_no_difference(tmp_path):
    """Fault: one run of an older source attaches a column for every key that has come since."""
    directory = make(tmp_path, "a")
    manifest = read_json(directory / "manifest.json")
    del manifest["config"]["operator"], manifest["config"]["ring"]["fold_when"]
    write_json(directory / "manifest.json", manifest)
    make(tmp_path, "b", decode__seed=1, workers=7, results_dir="elsewhere")
    frame = load(tmp_path)
    assert list(frame)[:3] == ["run", "decode.seed", "variant"]
    assert not {"ring.fold_when", "workers", "decode.seed"} & set(frame.attrs["config"])


def damage(directory: Path, how: str) -> None:
    if how == "manifest":
        (directory / "manifest.json").write_text('{"config"')
    elif how == "torn":
        write_json(directory / "manifest.json", read_json(directory / "manifest.json") | {"files": {"gone.png": "0"}})
    elif how == "truncated":
        whole = (directory / "flushes.parquet").read_bytes()
        (directory / "flushes.parquet").write_bytes(whole[:-40])
    else:
        write_json(directory / "manifest.json", read_json(directory / "manifest.json") | {"files": {}})
        (directory / "flushes.parquet").unlink()


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("manifest", "damaged"),
        ("torn", "damaged"),
        ("truncated", "damaged, flushes.parquet"),
        ("", "no flushes.parquet"),
    ],
)
def test_a_damaged_run_is_left_out_by_name_and_refused_alone(tmp_path, how, state):
    """Fault: half a run is loaded, a traceback of pyarrow ends the load, or nobody learns that a run is missing."""
    make(tmp_path, "a")
    sick = make(tmp_path, "b", decode__seed=1)
    damage(sick, how)
    frame = load(tmp_path, "flushes")
    assert len(frame) == F * HEADS * 3
    ((where, said),) = frame.attrs["left_out"]
    assert where == str(sick) and said.startswith(state)
    with pytest.raises(HarnessError, match=f"{sick}: no finished run with flushes") as caught:
        load([tmp_path / "drift" / "a".ljust(16, "0"), sick], "flushes")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "nowhere"}, "nowhere: no such folder"),
        ({"path": "empty"}, "empty: holds neither runs nor sweeps"),
        ({"path": []}, "path: an empty list"),
        ({"table": "points"}, r"no finished run with points \(.*no points.parquet"),
        ({"columns": ["nonsense"]}, "columns: nonsense: not in levels"),
        ({"config": ["ring.lenght"]}, "config: ring.lenght: no key of these runs"),
        ({"config": "some"}, "config: 'some' is neither varying nor all"),
        ({"variants": ["exact_fold", "doubling"]}, "variants: doubling: in no run"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path, given, says):
    """Fault: an empty frame for a misspelt name."""
    make(tmp_path, "a")
    (tmp_path / "empty").mkdir()
    path = given.get("path", "")
    given = given | {"path": tmp_path / path if isinstance(path, str) else path}
    with pytest.raises(HarnessError, match=says) as caught:
        load(**given)
    assert "\n" not in str(caught.value)


def test_columns_and_keys_that_are_named_are_the_columns(tmp_path):
    """Fault: all of a large table is read for two columns of it, or a constant key that is asked for is left out."""
    four(tmp_path)
    frame = load(tmp_path, "flushes", config=["decode.family", "precision.keep"], columns=["tokens", "kept_fro"])
    assert list(frame) == ["run", "decode.family", "precision.keep", "tokens", "kept_fro"]
    assert set(frame["decode.family"]) == {"silu"} and set(frame["precision.keep"]) == {""}
    assert {"ring.length", "decode.tokens", "workers"} <= set(load(tmp_path, config="all"))


def test_more_categories_than_a_byte_holds():
    """Fault: the 129th run gets the code of null."""
    column = Codes(600)
    for start in range(0, 600, 100):
        column.take(pa.array([f"run{i}" if i != 250 else None for i in range(start, start + 100)]), start)
    values = column.values(600)
    assert [x for x in values if x == x] == [f"run{i}" for i in range(600) if i != 250]
    assert np.flatnonzero(values.codes == -1).tolist() == [250] and values.codes.dtype == np.int16


def test_ordered_numbers_keep_their_rows_when_they_are_sorted():
    """Fault: categories are sorted and codes are not."""
    column = Codes(6, ordered=True)
    column.take(pa.array([32, 8, None, 16, 8, 32]).dictionary_encode(), 0)
    assert column.values(6).tolist()[:2] == [32, 8] and list(column.values(6).categories) == [8, 16, 32]
    assert column.values(6).codes.tolist() == [2, 0, -1, 1, 0, 2]


def test_importing_it_loads_neither_pandas_nor_torch():
    """Fault: `--help`, or a name looked up, takes seconds."""
    heavy = "{'pandas', 'pyarrow', 'torch', 'rich'}"
    code = f"import sys, harness.results, harness.results.__main__; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_real_runs_load_with_what_they_computed(tmp_path, monkeypatch, capsys):
    """Fault: the fake runs of these tests are not what a run leaves behind."""
    monkeypatch.chdir(tmp_path)
    keys = ["model=tiny", "decode.tokens=90", "workers=1", "variants=[null_arm,exact_fold]", "ring.length=16,32"]
    assert cli.main(["-m", *keys]) == 0
    capsys.readouterr()
    (folder,) = Path("results/runs/sweeps").iterdir()
    levels, flushes = load(folder), load("results/runs", "flushes")
    assert len(levels) == 4 and list(levels)[:2] == ["run", "ring.length"]
    for run in list_runs("results/runs"):
        rows = read_rows(run["directory"])
        own = flushes[flushes["run"] == run["hash"]]
        pd.testing.assert_series_equal(own["kept_fro"], rows["kept_fro"], check_index=False)
        config = read_json(run["directory"] / "manifest.json")["config"]
        assert set(own["ring.length"]) == {config["ring"]["length"]}
        summary = read_json(run["directory"] / "summary.json")["variants"]["exact_fold"]
        row = levels[(levels["run"] == run["hash"]) & (levels["variant"] == "exact_fold")].iloc[0]
        assert (
            row["kept_max"] == summary["end"]["kept"]["max"] and row["served_law"] == summary["law"]["served"]["text"]
        )
        assert row["bytes_held"] > 0 and row["bytes_token"] > 0
        assert row["ring.length"] == config["ring"]["length"] and row["backend"] == "emulated"


def many(root: Path, files: int, rows: int) -> None:
    """Runs of seven variants with every metric that a variant has."""
    names = ["oracle", "exact_recurrent", "null_arm", "chunked_fp32", "chunked_tf32", "chunked_bf16", "exact_fold"]
    rng = np.random.default_rng(0)
    for seed in range(files):
        directory = make(root, f"a{seed}", decode__seed=seed, ring__length=(16, 32)[seed % 2])
        with RowWriter(directory / "flushes.parquet") as writer:
            for i in range(0, rows // files, 50_000 * len(names)):
                at = np.arange(i, i + 50_000)
                keys = {"slot": at % 4, "head": at % 32, "flush": at // 128, "tokens": 10 * (at // 128)}
                for name in names:
                    columns = CONDITIONING if name == "oracle" else ERRORS
                    own = {} if name == "oracle" else {"history": at % 16, "folded": at % 2 == 0}
                    block = keys | own | {"backend": "emulated"} | {c: rng.random(len(at)) for c in columns}
                    writer.append(name, block)


@pytest.mark.slow
def test_ten_million_rows_load_within_two_gibibytes(tmp_path):
    """Fault: rows are held twice, in a frame per run or in a table beside the frame, or integers become objects."""
    many(tmp_path, 8, LARGE)
    code = f"""
import resource
from harness.results import load
frame = load({str(tmp_path)!r}, "flushes")
print(len(frame), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows, peak = map(int, done.stdout.split())
    assert rows >= LARGE and peak <= ALLOWED


def test_a_frame_is_filled_and_not_copied(tmp_path, monkeypatch):
    """Fault: the columns that were filled are copied into blocks, which doubles the peak."""
    four(tmp_path)
    filled = {}
    made = frames.frame_of

    def kept(gathered):
        from harness.results import columns

        take = columns.Numbers.values

        def values(self, n):
            filled[id(self)] = take(self, n)
            return filled[id(self)]

        monkeypatch.setattr(columns.Numbers, "values", values)
        return made(gathered)

    monkeypatch.setattr(frames, "frame_of", kept)
    frame = load(tmp_path, "flushes")
    floats = [array for array in filled.values() if isinstance(array, np.ndarray) and array.dtype == np.float32]
    shared = [any(np.shares_memory(array, frame[name].to_numpy()) for array in floats) for name in ERRORS]
    assert floats and all(shared)
