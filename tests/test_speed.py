"""What a reader of the kernel benchmark sees: goals judged on rows that agree, 80 columns, a figure with every row."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from harness import cli
from harness.experiments import bench, kernels
from harness.goals import goals
from harness.speed import cell, curves, figure, lines, tables


def row(what: str, who: str, us: float, share: float = 0.5, **more) -> dict:
    return {"what": what, "who": who, "us": us, "share": share} | more


def result(batch: int = 256, **peer) -> dict:
    """One case whose ratios are easy: ring 100 µs, sglang 170 and 150, snapshots 400 and 360, a step 150."""
    rows = [row("snapshot verify", "exact_recurrent", 400.0), row("ring verify", "chunked_tf32", 100.0, 0.79)]
    rows += [row("ring verify", "exact_fold", 100.0, 0.8), row("step", "exact_fold", 150.0)]
    rows += [row("ring verify", "sglang raw", 170.0, agrees=True), row("ring verify", "sglang compact", 150.0, **peer)]
    rows += [row("snapshot verify", "sglang", 360.0, agrees=True)]
    cases = [{"heads": "16/32", "batch": batch, "rows": rows, "failed": {"fla verify": "RuntimeError: no"}}]
    found = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "window": 4, "ring": 16, "repeats": 15}
    found |= {"bytes_per_second": {"read": 4.4e12, "copy": 4.3e12}, "accepts": "uniform 1..4", "cases": cases}
    found |= {"peers": {"sglang": {"version": "0.5.23"}, "fla": {"missing": "fla: no module fla"}}}
    return found | {"left_out": {"null_arm": "the kernel is that of exact_recurrent"}, "goals": goals(cases)}


def test_goals_take_the_fastest_competitor_that_computes_the_same():
    """Fault: a goal met against the slower mode, or missed against a kernel whose output is something else."""
    ring = "ring verify of chunked_tf32: times as fast as "
    plain = {g["goal"]: g for g in result(agrees=True)["goals"]}
    assert (plain[ring + "sglang compact"]["value"], plain[ring + "sglang compact"]["met"]) == (1.5, False)
    wrong = {g["goal"]: g for g in result(agrees=False)["goals"]}
    assert (wrong[ring + "sglang raw"]["value"], wrong[ring + "sglang raw"]["met"]) == (1.7, True)
    share = "share of the read bandwidth"
    assert [plain[f"ring verify of {n}: {share}"]["met"] for n in ("chunked_tf32", "exact_fold")] == [False, True]
    step = "step of exact_fold: times as fast as a snapshot verify of sglang"
    assert (plain[step]["value"], plain[step]["at_least"], plain[step]["met"]) == (2.4, 2.5, False)


def test_a_small_batch_only_must_not_be_slower():
    """Fault: the goal of large batches asked of small ones."""
    found = result(16, agrees=True)["goals"]
    assert [(g["at_least"], g["met"]) for g in found] == [(1.0, True)] * 2


def test_without_a_peer_its_goals_are_open():
    """Fault: a goal counts as met because there was nothing to compare with."""
    case = {"heads": "16/32", "batch": 64, "rows": [row("ring verify", "exact_fold", 100.0)], "failed": {}}
    (faster, _) = goals([case])
    assert faster["value"] is None and not faster["met"]
    text = lines(result() | {"goals": [faster]})
    assert (
        "open: ring verify of exact_fold: times as fast as sglang, 16/32, batch 64: not measured (at least 1.6)" in text
    )


def test_tables_fit_and_name_what_is_wrong():
    """Fault: a table broken at 80 columns; a failed or disagreeing peer that reads like a measured one."""
    found = result(agrees=False, error=0.3, against="exact_fold")
    console = Console(width=80, markup=False, highlight=False)
    with console.capture() as printed:
        for table in tables(found):
            console.print(table)
    text = printed.get()
    assert max(map(len, text.splitlines())) <= 80 and "≠150 50%" in text and "ring verify, sglang compact" in text
    below = lines(found)
    assert "≠ ring verify, sglang compact, 16/32, batch 256: output 3.0e-01 from exact_fold" in below
    assert "failed: fla verify, 16/32, batch 256: RuntimeError: no" in below
    assert "peer not measured: fla: no module fla" in below
    assert (cell(None), cell(row("", "", 2249.4, 0.06))) == ("–", "2249  6%")


def test_the_figure_has_every_ring_verify_and_step(tmp_path):
    """Fault: a line missing, or ratios taken to a snapshot verify that is not the fastest."""
    found = result(agrees=True)
    shares, ratios = curves(found, "16/32")
    assert list(shares) == ["chunked_tf32", "exact_fold", "sglang raw", "sglang compact"]
    assert ratios["step", "exact_fold"] == [(256, pytest.approx(2.4))]
    drawn = figure(found)
    drawn.savefig(tmp_path / "bench.png")
    above, below = drawn.axes
    # and one goal above, one goal and the line of equal speed below
    assert (len(above.get_lines()), len(below.get_lines())) == (4 + 1, 5 + 2)


def test_a_gpu_times_kernels_and_writes_the_figure(monkeypatch, tmp_path, capsys):
    """Fault: on a GPU the default bench decodes for minutes, or its run lacks the figure or the numbers."""
    monkeypatch.chdir(tmp_path)
    assert (bench.parts_of(SimpleNamespace(bench=SimpleNamespace(parts=None)), "cuda")) == ["kernels"]
    monkeypatch.setattr(bench, "parts_of", lambda config, device: ["kernels"])
    monkeypatch.setattr(kernels, "run", lambda config: result(agrees=True))
    assert cli.main(["experiment=bench", "device=cpu"]) == 0
    (numbers,) = tmp_path.glob("results/runs/bench/*/bench.json")
    assert (
        list(json.loads(numbers.read_text())) == ["kernels"] and (numbers.parent / "bench.png").stat().st_size > 10_000
    )
    assert f"figure: {numbers.relative_to(tmp_path).parent / 'bench.png'}" in capsys.readouterr().out
