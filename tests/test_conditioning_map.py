"""experiment=conditioning: whole and done once, refusals leave nothing, no verdict or figure loses a failure."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.patches import Rectangle

from harness import cli, copied, publish, safety
from harness.experiments.conditioning import typed
from harness.maps import error_map, power_figure

SMALL = (
    *("experiment=conditioning", "conditioning.windows=[1,2,8]", "conditioning.draws=2", "conditioning.g=[-1.1e-3]"),
    *("conditioning.coherence=[0.63,1.0]", "conditioning.beta=[0.953,1.97]"),
    *("conditioning.inputs=[silu,normal_triangular]", "conditioning.methods=[substitution,rhs_solve,horner,neumann/3]"),
    "conditioning.formats=[fp32/ieee,fp16/fp16]",
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*overrides) -> (exit status, output, error, run directories) of the small map, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str):
        status = cli.main([*SMALL, *overrides])
        out, err = capsys.readouterr()
        return status, out, err, sorted(p.parent for p in tmp_path.glob("results/runs/conditioning/*/manifest.json"))

    return call


def test_a_run_is_complete_and_done_once(run):
    """Faults: a point left out, a run repeated, a table wider than a terminal."""
    status, out, err, (directory,) = run()
    assert (status, err) == (0, "")
    assert all(len(line) <= 80 or str(directory) in line or ".p" in line for line in out.splitlines())
    rows, inputs = (pd.read_parquet(directory / f"{name}.parquet") for name in ("points", "inputs"))
    keys = ["input", "window", "method", "format"]
    assert len(rows) == 6 * 3 * 4 * 2 and not rows.duplicated(keys).any()
    assert len(inputs) == 6 * 3 and (inputs["draws"] == 2).all()
    # a window of 1 needs no inverse: T is 1
    one = rows[(rows["window"] == 1) & (rows["method"] != "rhs_solve")]
    assert len(one) == 6 * 3 * 2 and (one["error_T_max"] == 0).all() and (one["nonfinite"] == 0).all()
    outside = inputs[~inputs["in_domain"]]
    assert set(outside["input"]) == {"normal_triangular"} and rows[rows["input"] == "normal_triangular"].shape[0] == 24
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["outside"] == ["normal_triangular"] and summary["safe_any_beta"]["neumann/3"]["fp32/ieee"] == 2
    assert {p.name for p in directory.iterdir()} >= {"map.png", "powers.png", "config.yaml"}
    again = run()
    assert again[1].startswith("already done: ") and again[3] == [directory]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("conditioning.methods=[cramer]", "conditioning.methods: 'cramer' is no inverse; have substitution"),
        ("conditioning.methods=[neumann/0]", "conditioning.methods: 'neumann/0'"),
        ("conditioning.methods=[]", "conditioning.methods: empty"),
        ("conditioning.methods=[block,block]", "conditioning.methods: one appears twice"),
        ("conditioning.formats=[fp32]", "conditioning.formats: 'fp32' is not site/product"),
        ("conditioning.inputs=[slu]", "conditioning.inputs: 'slu' is not one of silu"),
        ("conditioning.windows=[0]", "conditioning.windows: 0 is outside [1, 256]"),
        ("conditioning.coherence=[1.1]", "conditioning.coherence: 1.1 is outside [0, 1]"),
        ("conditioning.beta=[2.5]", "conditioning.beta: 2.5 is outside [0, 2]"),
        ("conditioning.g=[0.1]", "conditioning.g: 0.1 is no finite log decay"),
        ("conditioning.g=[nan]", "conditioning.g: nan is no finite log decay"),
        ("conditioning.draws=0", "conditioning.draws: 0 is below 1"),
        ("conditioning.safe=0", "conditioning.safe: 0.0 is not a positive"),
        ("conditioning.matrices=nowhere.npy", "conditioning.matrices: nowhere.npy: not a readable .npy"),
        ("device=cuda", "device: "),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(run, tmp_path, override, says):
    """Fault: a mistake found after the first minutes, with a traceback or half a run behind it."""
    status, out, err, found = run(override)
    assert (status, out, found) == (2, "", []) and err.startswith(f"harness: error: {says}") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_matrices_of_a_file_are_measured_beside_the_grid(run, tmp_path):
    """Faults: a file read as a window of the run's lengths, another file of that name taken for the same run."""
    for value in (0.3, 0.4):
        A = np.tril(np.full((2, 5, 5), value), -1)
        A[1, 3, 2] = np.nan
        np.save(tmp_path / "mine.npy", A)
        status, _, err, found = run("conditioning.matrices=mine.npy")
        assert (status, err) == (0, "")
    assert len(found) == 2
    for directory in found:
        rows = pd.read_parquet(directory / "points.parquet")
        mine = rows[rows["input"] == "mine.npy"]
        assert (mine["window"] == 5).all() and len(mine) == 8
        assert (mine["nonfinite"] == 1).all() and (mine["stage"] == "A").all()


def rows_of(errors: dict[int, float], lost: tuple[int, ...] = (), **other: object) -> tuple[pd.DataFrame, ...]:
    """One method on one input: window -> error of T in units of n u; what else a row holds, as `other` says."""
    u = 2.0**-24
    base = {"input": "x", "method": "substitution", "format": "fp32/ieee", "u": u, "error_D_max": 0.0, "stage": None}
    rows = [
        base | {"window": w, "error_T": e * w * u, "error_T_max": e * w * u, "nonfinite": int(w in lost)} | other
        for w, e in errors.items()
    ]
    known = {"input": "x", "in_domain": True, "power": 1.0, "power_max": 1.0, "skeel_max": 1.0, "bound_max": 0.9}
    known |= {"coherence": 0.9, "structural_max": -0.1}
    for row in rows:
        row |= {"per_power": row["error_T"] / u, "per_power_max": row["error_T"] / u} | other
    return typed([known | {"window": w} for w in errors]), typed(rows)


def test_safe_is_safe_at_every_shorter_window():
    """Faults: a window that passes by luck beyond one that fails; a failure that is not finite passed over."""
    for errors, bad, want in (
        ({2: 1, 4: 1, 8: 1}, (), 8),
        ({2: 1, 4: 5, 8: 1}, (), 2),
        ({2: 5, 4: 1}, (), 1),
        ({8: 1, 2: 1, 4: 1}, (4,), 2),
        ({2: 1, 4: np.inf}, (), 2),
    ):
        table = safety.joined(*rows_of(errors, bad))
        assert safety.safe_windows(table, 4.0) == {"substitution": {"fp32/ieee": want}}, errors


def test_a_solve_is_judged_by_its_writes():
    """Fault: no error of T read as no error."""
    inputs, rows = rows_of({2: 1, 4: 1}, method="rhs_solve", error_T_max=None, error_D_max=1.0)
    assert safety.safe_windows(safety.joined(inputs, rows), 4.0) == {"rhs_solve": {"fp32/ieee": 1}}


@pytest.mark.parametrize(
    ("check", "method", "fields"),
    [
        ("P1", "substitution", {}),
        ("P2 series: ", "doubling", {}),
        ("P3", "block", {}),
        ("P3", "horner", {"error_T_max": np.inf, "nonfinite": 1}),
        ("P6 block/16r", "block/16r", {"format": "fp32/bf16"}),
        ("P7", "block", {"window": 1}),
    ],
)
def test_a_broken_prediction_is_named_with_its_point(check, method, fields):
    """Faults: a check that cannot fail, one that drops what is not finite, a verdict without its point."""
    inputs, rows = rows_of({1: 200.0}, method=method, **fields)
    verdicts = safety.checks(inputs, safety.joined(inputs, rows))
    (verdict,) = [v for name, v in verdicts.items() if name.startswith(check)]
    assert verdict and not verdict["holds"] and verdict["worst"] >= 200 * 2.0**-24
    assert (verdict["input"], verdict["method"], verdict["window"]) == ("x", method, 1)
    mild = safety.checks(*(lambda i, r: (i, safety.joined(i, r)))(*rows_of({8: 0.5}, method=method)))
    assert all(v is None or v["holds"] for name, v in mild.items() if name.startswith(check))


def test_a_T_above_its_bound_is_named():
    """Fault: an oracle that breaks the structural bound, which no rounding explains, goes unseen."""
    inputs, rows = rows_of({8: 1.0})
    inputs["structural_max"] = 1e-9
    verdict = safety.checks(inputs, safety.joined(inputs, rows))["P4 (|T_ij| - beta_i e^{G_i-G_j}) / n 2^-53 <= 1"]
    assert verdict and not verdict["holds"]


def test_what_has_no_logarithm_is_drawn():
    """Faults: a failure, or an exact zero, that leaves a white cell, one like any other, or no mark at all."""
    inputs, rows = rows_of({1: 0.0, 4: 1.0, 8: np.inf}, (8,), method="doubling")
    (axis, *_) = error_map(inputs, rows).axes
    hatched = [p for p in axis.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert [p.get_xy() for p in hatched] == [(1.5, -0.5)]
    assert axis.images[0].get_array()[0, [0, 2]].tolist() == [-9.0, 2.0]
    left, right = power_figure(inputs, rows).axes
    assert [len(line.get_xdata()) for line in left.lines if line.get_marker() == "x"] == [1]
    assert [len(line.get_xdata()) for line in right.lines if line.get_marker() == "x"] == [0]


def test_published_numbers_keep_eleven_bits_and_their_range():
    """Faults: 1e58 made inf, a missing number made 0, text or a count rounded."""
    values = [1.0, 1e58, -3.1e-300, None, float("inf"), float("nan"), 1 + 2.0**-12]
    table = pa.table({"x": pa.array(values, pa.float64()), "n": [4097] * 7, "t": list("abcdefg")})
    short = copied.rounded(table)
    found = short["x"].to_pylist()
    assert found[0] == found[6] == 1.0 and found[3] is None and found[4] == float("inf") and np.isnan(found[5])
    assert all(abs(found[i] / values[i] - 1) <= 2.0**-11 and found[i] != values[i] for i in (1, 2))
    assert short["n"].to_pylist() == [4097] * 7 and short["t"].equals(table["t"])


def test_a_map_is_published_whole(run, capsys):
    """Faults: a figure or a table left behind, the host's name kept, an option for drift runs ignored."""
    directory = run()[3][0]
    assert publish.main([str(directory), "first", "--heads", "0"]) == 2
    assert "has no flushes.parquet" in capsys.readouterr().err
    target = publish.publish(directory, "first")
    assert {p.name for p in target.iterdir()} == {p.name for p in directory.iterdir()}
    manifest = json.loads((target / "manifest.json").read_text())
    assert "host" not in manifest and manifest["published"]["bits"] == copied.BITS
    before, after = (pd.read_parquet(p / "points.parquet") for p in (directory, target))
    np.testing.assert_allclose(after["error_D_max"], before["error_D_max"], rtol=2.0**-11)
    assert (after["error_T"].isna() == before["error_T"].isna()).all() and before["error_T"].isna().any()


def test_threads_change_no_number(run, tmp_path):
    """Faults: rows in the order in which formats end, numbers that depend on who computes beside them."""
    for workers in (1, 3):
        assert run(f"workers={workers}", f"results_dir=results/runs{workers}")[0] == 0
    one, three = (pd.read_parquet(next(tmp_path.glob(f"results/runs{n}/*/*/points.parquet"))) for n in (1, 3))
    pd.testing.assert_frame_equal(one, three, check_exact=True)
