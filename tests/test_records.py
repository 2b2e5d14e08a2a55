"""Rows: what is written is complete, and exact about NaN and null."""

import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.errors import HarnessError
from harness.records import PENDING, RowWriter, group_quantiles, grouped, read_rows, recorded, to_float32


def block(n: int, first: int = 0, **metrics) -> dict:
    flush = np.arange(first, first + n)
    return {"slot": 0, "head": 3, "flush": flush, "tokens": 10 * (flush + 1)} | metrics


def test_nan_and_null_stay_apart(tmp_path):
    """Fault: a metric the variant never had (null) and a failed one (NaN) become the same thing."""
    bad = np.array([1e-7, np.nan, np.inf, 0.0])
    with RowWriter(tmp_path / "a.parquet") as writer:
        writer.append("exact_fold", block(4, served_fro=bad, d_med=np.ma.masked_array(bad, [1, 0, 0, 0])))
        writer.append("oracle", block(4, cond2=np.full(4, 5.0)))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["served_fro"].is_null().to_pylist() == [False] * 4 + [True] * 4
    assert table["d_med"].is_null().to_pylist() == [True] + [False] * 3 + [True] * 4
    assert np.isnan(table["served_fro"][1].as_py())
    rows = read_rows(tmp_path / "a.parquet")
    np.testing.assert_array_equal(rows["served_fro"][:4], bad.astype(np.float32))
    assert recorded(rows, "exact_fold", "served_fro")
    assert not recorded(rows, "oracle", "served_fro")
    assert not recorded(rows, "exact_fold", "cond2")


def test_an_all_nan_metric_is_recorded(tmp_path):
    """Fault: a variant that fails from its first flush on is taken for one that lacks the metric."""
    with RowWriter(tmp_path / "a.parquet") as writer:
        writer.append("doubling", block(3, served_fro=np.full(3, np.nan), nonfinite_stage=[None, "inverse", "d"]))
    rows = read_rows(tmp_path / "a.parquet")
    assert recorded(rows, "doubling", "served_fro")
    assert rows["nonfinite_stage"].tolist()[1:] == ["inverse", "d"]
    assert rows["nonfinite_stage"].isna().tolist() == [True, False, False]


def test_float32_neither_invents_infinities_nor_zeros():
    """Fault: the cast to float32 makes a power of 1e59 a divergence and an error of 1e-320 an exact 0."""
    wide = np.array([1e59, -1e59, 1e-320, -1e-60, 0.0, np.inf, np.nan, 1.5])
    narrow = to_float32(wide)
    assert narrow.dtype == np.float32
    np.testing.assert_array_equal(np.isfinite(narrow), np.isfinite(wide))
    np.testing.assert_array_equal(narrow == 0, wide == 0)
    np.testing.assert_array_equal(np.sign(narrow[:4]), [1, -1, 1, -1])
    assert narrow[-1] == 1.5


def test_rows_leave_memory_as_row_groups(tmp_path):
    """Fault: the writer keeps every row until it is closed, so memory grows with the decode."""
    with RowWriter(tmp_path / "a.parquet", group=1000) as writer:
        for i in range(40):
            writer.append("chunked_bf16", block(250, 250 * i, served_fro=np.full(250, 1e-3)))
            assert len(writer._pending) <= PENDING + 1
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [1000] * 10
    assert read_rows(tmp_path / "a.parquet", ["flush"])["flush"].tolist() == list(range(10000))


def test_what_the_disk_refuses_is_raised(tmp_path, monkeypatch):
    """Fault: an error of the thread that writes is lost with it, and a run ends as if its rows were there."""

    def refuse(*args, **kwargs):
        raise OSError("no space left")

    writer = RowWriter(tmp_path / "a.parquet", group=100)
    monkeypatch.setattr(writer._writer, "write_table", refuse)
    writer.append("chunked_bf16", block(100, served_fro=np.full(100, 1e-3)))
    with pytest.raises(OSError, match="no space"):
        writer.close()


def test_variants_share_a_row_group(tmp_path):
    """Fault: dictionaries of several blocks are mixed up, and rows change their variant."""
    with RowWriter(tmp_path / "a.parquet") as writer:
        for i in range(3):
            for name in ("b", "a", "c"):
                writer.append(name, block(2, 2 * i, served_fro=np.full(2, ord(name))))
    rows = read_rows(tmp_path / "a.parquet", ["variant", "served_fro"])
    assert rows["variant"].tolist() == ["b", "b", "a", "a", "c", "c"] * 3
    assert [chr(int(x)) for x in rows["served_fro"]] == rows["variant"].tolist()


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"served_frob": np.ones(2)}, "unknown columns served_frob"),
        ({"variant": "b"}, "unknown columns variant"),
        ({"served_fro": np.ones(3)}, "of one length"),
        ({}, "served_fro come in some blocks only"),
    ],
)
def test_a_wrong_block_is_refused(tmp_path, second, says):
    """Fault: a misspelt, ragged or half-filled metric is written, and is null or shifted when read."""
    with RowWriter(tmp_path / "a.parquet") as writer:
        writer.append("a", block(2, served_fro=np.ones(2)))
        with pytest.raises(ValueError, match=says):
            writer.append("a", block(2, 2, **second))
        with pytest.raises(ValueError, match="key columns tokens are missing"):
            writer.append("a", {"slot": 0, "head": 0, "flush": np.arange(2)})
    assert len(read_rows(tmp_path / "a.parquet")) == 2


def test_a_truncated_file_is_one_line(tmp_path):
    """Fault: a cut file raises a traceback of pyarrow, or is read as fewer rows."""
    with RowWriter(tmp_path / "a.parquet") as writer:
        writer.append("a", block(50, served_fro=np.ones(50)))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-40])
    for name in ("b.parquet", "absent.parquet"):
        with pytest.raises(HarnessError, match=f"{name}: not readable as Parquet") as caught:
            read_rows(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(HarnessError, match="no column nonsense"):
        read_rows(tmp_path / "a.parquet", ["nonsense"])


def test_quantiles_rank_nan_above_inf():
    """Fault: a quantile skips NaN, so a group with failures looks better than one without."""
    values = np.array([3.0, np.nan, 1.0, np.inf, np.nan, np.inf, 2.0, 5.0, 4.0])
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    found = group_quantiles(values, groups, [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(found, [[1, 3, np.nan], [np.inf, np.inf, np.nan], [2, 4, 5]])
    rng = np.random.default_rng(0)
    x = rng.standard_normal(1000)
    np.testing.assert_allclose(
        group_quantiles(x, np.zeros(1000, int), [0.05, 0.5, 0.95])[0], np.quantile(x, [0.05, 0.5, 0.95])
    )


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_quantiles_of_floats_sorted_by_their_bits(kind):
    """Faults: negative numbers in reverse, NaN of either sign below a number, a group's bits in another's.

    fp32 values are sorted as integers, others as two keys; ids may be few of many.
    """
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(3000) * 10.0 ** rng.integers(-44, 38, 3000)).astype(np.float32).astype(kind)
    x[:60] = np.repeat([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45], 10)
    x[60:70], x[70:75] = np.copysign(np.nan, -1.0), np.nan
    if kind is np.float64:
        x[100] = 1.0 + 2.0**-40
    ids = rng.integers(0, 6, 3000) * 5
    names, groups = grouped(ids)
    np.testing.assert_array_equal(names, np.unique(ids))
    q = [0.0, 0.25, 0.5, 0.9, 1.0]
    for name, row in zip(names, group_quantiles(x, groups, q), strict=True):
        # numpy sorts NaN of either sign behind everything
        ranked = np.sort(x[ids == name].astype(float))
        at = (len(ranked) - 1) * np.array(q)
        low, high = ranked[np.floor(at).astype(int)], ranked[np.ceil(at).astype(int)]
        with np.errstate(invalid="ignore"):
            expected = np.where(at == np.floor(at), low, low * (1 - at % 1) + high * (at % 1))
        np.testing.assert_allclose(row, expected, rtol=1e-12)


def test_records_do_not_load_the_plotting_library():
    """Fault: every command pays half a second for matplotlib, or needs Hydra to read a file."""
    code = "import sys, harness.records, harness.rundir; print({'matplotlib', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
