"""The gate's rules, baselines and command line: what is not finite, absent or worse never passes."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from harness.errors import ConfigError, HarnessError
from harness.families import FAMILIES
from harness.gate import __main__ as command
from harness.gate import baselines, report, rules
from harness.gate.measure import joined, measure_case, reduce_exact, reduce_rows, slope
from harness.gate.rules import TIERS, compare, judge, status, toothless
from harness.gate.suite import ACCEPTS, RINGS, Case, default_of, suite
from harness.variants import load, names

NAN, INF = math.nan, math.inf
GOOD: dict[str, rules.Value] = {
    "rows": 12.0, "course": "ab", "formats": "cd", "backend": "emulated", "level.kept": 1e-7, "tail.kept": 3e-7,
    "slope.kept": 0.02, "residual": 0.0, "identity.o": 7.0,
}  # fmt: skip


def one(**changed: Any) -> dict[str, Any]:
    """A case of one variant, with some of its metrics changed; None: absent."""
    metrics = GOOD | {name.replace("__", "."): value for name, value in changed.items()}
    return {"silu": {"arm": {name: value for name, value in metrics.items() if value is not None}}}


def outcome(measured: Any, baseline: Any = None) -> int:
    return status(compare(one() if baseline is None else baseline, measured, ["arm"]))


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF, None])
@pytest.mark.parametrize("metric", GOOD)
def test_h5_what_is_not_a_finite_number_fails_every_gate(metric: str, bad: float | None) -> None:
    """Faults (OpenFAST/openfast#1156, ralna/RALFit#138): `new > allowed` is false for NaN; absence is skipped."""
    assert outcome(one()) == 0
    assert outcome(one(**{metric.replace(".", "__"): bad})) == 1


@pytest.mark.parametrize("values", [[1e-9, NAN], [NAN, 1e-9], [INF]])
def test_h5_one_bad_row_is_not_lost_among_good_ones(values: list[float]) -> None:
    """Fault: Python's max gives 1e-9 for one order of [1e-9, nan] and nan for the other."""
    columns = rows_of(np.array(values * 2))
    found = reduce_rows(columns)
    assert not math.isfinite(found["tail.kept"])
    assert outcome({"silu": {"arm": found}}, {"silu": {"arm": reduce_rows(rows_of(np.full(4, 1e-9)))}}) == 1


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({}, 1),
        ({"silu": {}}, 1),
        ({"silu": {"arm": {}}}, 1),
        ({"silu": {"other": GOOD}}, 1),
        (one(rows=11.0), 1),
        (one(rows=13.0), 1),
        (one(course="ac"), 1),
        (one(formats=3.0), 1),
        (one(rows="12"), 1),
    ],
)
def test_fewer_rows_a_skipped_variant_and_an_empty_run_fail(measured: Any, expected: int) -> None:
    """Faults: a gate that looks at what the run brings only; a count or a digest compared by size."""
    assert outcome(measured) == expected


def test_nothing_to_judge_is_not_a_pass() -> None:
    """Faults: all() of an empty list; a metric without a baseline that passes."""
    assert status([]) == 2
    assert outcome(one(), {}) == 2
    assert outcome(one(tail__o=1e-3)) == 2
    assert outcome(one(), one(level__kept=NAN)) == 2
    # a regression says more than a missing baseline
    assert outcome(one(tail__o=1e-3, rows=1.0)) == 1


@pytest.mark.parametrize(
    ("metric", "old", "passes", "fails", "improves"),
    [
        ("level.kept", 1e-7, 1.1e-7, 1.13e-7, 0.88e-7),
        ("tail.kept", 1e-7, 1.5e-7, 1.6e-7, 0.6e-7),
        ("slope.kept", 0.02, 0.2, 0.23, -0.2),
        ("slope.kept", -0.5, -0.35, -0.2, -0.75),
        ("residual", 0.0, 0.0, 1e-19, None),
        ("identity.o", 7.0, 3999.0, 4001.0, None),
        # H6: a golden number near 1e-9 that has changed fivefold passes under an absolute tolerance
        ("level.o", 1e-9, 1.1e-9, 5e-9, 2e-10),
    ],
)
def test_h6_a_tier_allows_what_it_states(
    metric: str, old: float, passes: float, fails: float, improves: float | None
) -> None:
    """Faults (ESSS/pytest-regressions#84): an absolute tolerance on small errors; an allowance that is not applied, or
    applied both ways; an exact zero that may become anything."""
    assert judge(metric, old, old)[0] == judge(metric, old, passes)[0] == "pass"
    assert judge(metric, old, fails)[0] == "regression"
    if improves is not None:
        assert judge(metric, old, improves)[0] == "improvement"
        assert status(compare({"c": {"arm": {metric: old}}}, {"c": {"arm": {metric: improves}}}, ["arm"])) == 0


def test_a_negative_error_is_none() -> None:
    """Fault: the logarithm's floor makes an error of -1 an exact zero."""
    assert judge("level.kept", 1e-7, -1.0)[0] == judge("identity.o", 1.0, -5.0)[0] == "regression"


def test_every_metric_has_a_stated_tier_and_no_other_is_judged() -> None:
    """Fault: a metric of unknown kind that passes."""
    assert {name.partition(".")[0] for name in GOOD} == set(TIERS)
    with pytest.raises(KeyError):
        judge("speed", 1.0, 1.0)


@pytest.mark.parametrize("fault", ["nan", "absent", "allowance", "empty"])
def test_the_gate_notices_that_it_has_lost_a_tooth(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a rule broken later, under which every run passes; each is planted here."""
    assert toothless(one()) is None
    plain = rules.judge

    def blunt(metric: str, old: Any, new: Any) -> tuple[str, float]:
        if fault == "nan" and isinstance(new, float) and math.isnan(new) and metric.startswith("tail"):
            return "pass", 0.0
        if fault == "absent" and new is None:
            return "pass", 0.0
        verdict, share = plain(metric, old, new)
        return (
            ("pass", share) if fault == "allowance" and share < 1.5 and metric.startswith("slope") else (verdict, share)
        )

    if fault == "empty":
        monkeypatch.setattr(rules, "status", lambda findings: int(any(f.verdict == "regression" for f in findings)))
    else:
        monkeypatch.setattr(rules, "judge", blunt)
    assert "passes" in (toothless(one()) or "")


# --- measuring ----------------------------------------------------------------------------------------------------


def rows_of(errors: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of one slot and one head, a flush each, every error the same."""
    n = len(errors)
    whole = {name: np.zeros(n, int) for name in ("slot", "head", "history", "folded")}
    whole |= {"flush": np.arange(n), "tokens": 11 * np.arange(1, n + 1)}
    columns = ("served_fro", "served_max", "kept_fro", "kept_max", "d_med", "d_max", "o_med", "o_max")
    return whole | dict.fromkeys(columns, errors)


def test_level_slope_and_tail_are_each_their_own() -> None:
    """Faults: a growing error told by its level alone; an early maximum left out of the tail; a level of all rows."""
    tokens = 11.0 * np.arange(1, 41)
    errors = 1e-8 * np.sqrt(tokens)
    errors[3] = 1e-3
    found = reduce_rows(rows_of(errors))
    late = errors[20:]
    assert found["level.kept"] == pytest.approx(np.median(late), rel=0.02)  # an element, of twenty
    assert found["tail.kept"] == 1e-3
    assert found["slope.kept"] == pytest.approx(0.5, abs=1e-3)
    assert reduce_rows(rows_of(np.full(40, 1e-7)))["slope.kept"] == 0
    assert slope(np.zeros(3), np.ones(3), np.ones(3)) == 0.0
    assert math.isnan(slope(np.array([0, 1]), np.array([1, 2]), np.array([1.0, INF])))


def test_a_metric_that_a_design_does_not_have_is_not_gated_and_zero_is() -> None:
    """Faults: a masked column read as zeros; an exact zero taken for absent."""
    columns = rows_of(np.zeros(6))
    columns["d_med"] = columns["d_max"] = np.ma.masked_all(6)
    found = reduce_rows(columns)
    assert "level.d" not in found and found["level.o"] == 0.0
    exact = reduce_exact(rows_of(np.full(6, 3 * 2.0**-53)))
    assert exact["identity.kept"] == 3.0 and not any(name.startswith("level") for name in exact)
    assert reduce_rows({}) == reduce_exact({}) == {"rows": 0.0}


def test_the_course_is_of_the_rows_not_of_their_order() -> None:
    """Faults: a digest that depends on how rows were blocked; one that does not see a fold at another flush."""
    columns = rows_of(np.arange(1.0, 7.0))
    parts = [{k: v[some] for k, v in columns.items()} for some in (slice(4, 6), slice(0, 4))]
    assert reduce_rows(joined(parts))["course"] == reduce_rows(columns)["course"]
    moved = columns | {"folded": np.array([0, 0, 1, 0, 0, 0])}
    assert reduce_rows(moved)["course"] != reduce_rows(columns)["course"]


# --- suites -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fast", "full"])
def test_a_suite_leaves_out_no_family_pattern_ring_or_variant(name: str) -> None:
    """Faults: a family added and not gated; a variant that no case can run; a seed left to chance."""
    cases = suite(name, list(names()))
    words = [set(case.name.split("/")) for case in cases]
    for wanted in (FAMILIES, ACCEPTS, RINGS):
        assert set(wanted) <= set().union(*words)
    ran = {v for case in cases if not case.exact for v in case.variants}
    assert ran == set(names()) == {v for case in cases if case.exact for v in case.variants}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.config.decode.seed == 100 and case.config.decode.slots == 2 for case in cases)


def test_a_suite_of_nothing_is_refused() -> None:
    """Fault: an empty list of variants that passes."""
    with pytest.raises(ConfigError, match="variants: none"):
        suite("fast", [])
    with pytest.raises(ConfigError, match="suite: 'slow'"):
        suite("slow", ["exact_fold"])


# --- baselines ----------------------------------------------------------------------------------------------------


def kept(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "fast.json").read_text()))


def accept(folder: Path, measured: Any, reason: str = "because") -> int:
    return baselines.accept(folder, "fast", measured, reason, "cpu", 100)[1]


def test_accept_says_why_with_what_and_what_was_there_before(tmp_path: Path) -> None:
    """Faults: a baseline replaced without a trace; one accept that drops what it did not measure."""
    assert accept(tmp_path, one() | {"loop24": {"arm": GOOD}}, "first") == 2 * len(GOOD)
    assert accept(tmp_path, one(level__kept=2e-7), "a slower but fairer sum") == 1
    found = kept(tmp_path)
    assert found["values"]["silu"]["arm"]["level.kept"] == 2e-7 and found["values"]["loop24"]["arm"] == GOOD
    first, second = found["accepted"]
    assert first["changed"] == [] and first["count"] == 2 * len(GOOD)
    assert second["reason"] == "a slower but fairer sum" and second["versions"]["torch"]
    change = {"case": "silu", "variant": "arm", "metric": "level.kept", "old": 1e-7, "new": 2e-7}
    assert second["changed"] == [change]
    # nothing new: nothing written
    before = (tmp_path / "fast.json").read_bytes()
    assert accept(tmp_path, one(level__kept=2e-7)) == 0 and (tmp_path / "fast.json").read_bytes() == before


@pytest.mark.parametrize("bad", [NAN, INF])
def test_h6_what_is_not_finite_never_becomes_a_baseline(bad: float, tmp_path: Path) -> None:
    """Fault (ESSS/pytest-regressions#84): NaN equals a NaN baseline for ever."""
    with pytest.raises(HarnessError, match=r"silu, arm, level\.kept: .* is not finite"):
        accept(tmp_path, one(level__kept=bad))
    with pytest.raises(HarnessError, match=r"identity\.o: 5000\.0 fails beside itself"):
        accept(tmp_path, one(identity__o=5000.0))
    for nothing in ({}, {"silu": {}}, one(rows=0.0)):
        with pytest.raises(HarnessError, match="nothing"):
            accept(tmp_path, nothing)
    with pytest.raises(HarnessError, match="reason: empty"):
        accept(tmp_path, one(), "  ")
    assert not list(tmp_path.iterdir())
    # nor by hand
    accept(tmp_path, one())
    path = tmp_path / "fast.json"
    path.write_text(path.read_text().replace("3e-07", '"nan"'))
    with pytest.raises(HarnessError, match=r"silu, arm, tail.kept: nan can judge nothing"):
        baselines.load(tmp_path, "fast")
    path.write_text("[]")
    with pytest.raises(HarnessError, match="not a baseline"):
        baselines.load(tmp_path, "fast")


@pytest.mark.parametrize("name", ["fast", "full", "gpu"])
def test_the_committed_baseline_covers_the_suite_and_bites(name: str) -> None:
    """Faults: a case, variant or metric without a baseline; a value under which a known-bad error passes."""
    values = baselines.load(baselines.FOLDER, name)["values"]
    cases = suite(name, default_of(name))
    assert {c: set(v) for c, v in values.items()} == {case.name: set(case.variants) for case in cases}
    for case in cases:
        for variant, metrics in values[case.name].items():
            assert metrics["rows"] > 0, variant
            assert ("identity.kept" if case.exact else "slope.kept") in metrics
    assert toothless(values) is None


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """One small case instead of a suite, run in this process; the options that keep everything in a folder."""

    def small(name: str, variants: list[str]) -> list[Case]:
        case = next(c for c in suite(name, variants) if c.name.startswith("silu/"))
        decode = replace(case.config.decode, tokens=96)
        return [Case(case.name, replace(case.config, decode=decode))]

    monkeypatch.setattr(command, "suite", small)
    monkeypatch.setattr(
        "harness.gate.measure.measure", lambda cases, device, progress: {c.name: measure_case(c, device) for c in cases}
    )
    return ["variants=[chunked_tf32,exact_fold]", f"baselines={tmp_path / 'base'}"]


def test_a_defect_planted_in_a_fold_is_a_regression_and_its_repair_a_pass(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults: an exit status that hides a regression; a report that does not name it."""
    out = tmp_path / "out"
    assert command.main(["check", *tiny]) == 2 and "no baseline" in capsys.readouterr().err
    assert command.main(["accept", "reason=first", *tiny]) == 0
    assert command.main(["check", *tiny, f"out={out}"]) == 0
    assert "gate fast: pass" in capsys.readouterr().out
    from harness.reference import fold

    plain = fold.product
    with monkeypatch.context() as broken:
        # the newest record decays once too often
        broken.setattr(fold, "product", lambda C, d, k, W, total, a: plain(C, d, k, W * total, total, a))
        broken.setattr("harness.designs.why_not", lambda *_: "a test")
        assert command.main(["check", *tiny, f"out={out}"]) == 1
    shown = capsys.readouterr().out
    assert "REGRESSION" in shown and "chunked_tf32" in shown and max(map(len, shown.splitlines()[:-1])) <= 80
    found = json.loads((out / "gate.json").read_text())
    wrong = {(f["variant"], f["metric"]) for f in found["findings"] if f["verdict"] == "regression"}
    assert ("chunked_tf32", "level.kept") in wrong and not any(v == "exact_fold" for v, _ in wrong)
    top = ET.parse(out / "gate.xml").getroot()[0]
    assert (top.get("tests"), top.get("failures"), top.get("errors")) == ("2", "1", "0")
    failed = [case.get("name") for case in top if case.find("failure") is not None]
    assert failed == ["chunked_tf32"]


def test_against_another_design_judges_errors_alone(tiny: list[str], tmp_path: Path) -> None:
    """Faults: `no worse than` that compares formats or records; one that passes whatever is compared."""
    assert command.main(["accept", "reason=first", *tiny]) == 0
    out = f"out={tmp_path}"
    base = tiny[1]
    assert command.main(["check", base, out, "variants=chunked_fp32", "against=chunked_tf32"]) == 0
    assert command.main(["check", base, out, "variants=chunked_bf16", "against=exact_fold"]) == 1
    assert command.main(["check", base, out, "variants=exact_fold", "against=nobody"]) == 2


def test_a_gate_that_does_not_bite_judges_nothing(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: teeth that are tried nowhere but in a test."""
    assert command.main(["accept", "reason=first", *tiny]) == 0
    monkeypatch.setattr(rules, "judge", lambda metric, old, new: ("pass", 0.0))
    assert command.main(["check", *tiny]) == 2
    assert "lost its teeth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["compare"], "'compare' is neither check nor accept"),
        (["check", "speed=1"], "'speed=1' is no option of check; have suite="),
        (["check", "reason=x"], "'reason=x' is no option of check"),
        (["check", "suite=slow"], "suite: 'slow'"),
        (["check", "variants=[]"], "variants: none"),
        (["check", "variants=[nobody]"], "variants: 'nobody' is unknown"),
        (["accept"], "reason: accept needs one"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults: a traceback; a wrong option ignored; status 0 or 1 for what was never judged."""
    accept(tmp_path, one())
    given = argv[:1] + ([f"baselines={tmp_path}"] if argv[0] == "check" else []) + argv[1:]
    assert command.main(given) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_table_is_one_screen_and_leads_with_what_is_worst() -> None:
    """Faults: a regression below the fold among hundreds of passes; a table wider than a terminal."""
    from rich.console import Console

    measured = {f"case {i}": one(level__kept=1e-7)["silu"] for i in range(60)}
    baseline = {f"case {i}": one(level__kept=1e-7 if i else 1e-8)["silu"] for i in range(60)}

    def lines(findings: list[rules.Finding]) -> list[str]:
        console = Console(width=80, markup=False)
        with console.capture() as shown:
            console.print(report.table(findings))
        return shown.get().splitlines()

    found = lines(compare(baseline, measured, ["arm"]))
    assert "1 regression" in "".join(found) and "case 0" in found[2] and len(found) < 24
    assert max(map(len, found)) <= 80
    assert "nothing was measured" in "".join(lines([]))


def test_designs_that_have_no_answer_to_an_input_are_left_out_by_rule() -> None:
    """Fault: a window's decay as inf - inf, which would make a baseline of NaN or drop the family for all."""
    cases = {case.name.split("/")[0]: case for case in suite("fast", list(names()))}
    assert {load(v).verify for v in cases["resets"].variants} == {"tokens"}
    assert {"chunked_fp32", "exact_recurrent"} <= set(cases["mixed_gates"].variants)
    outside = Path(__file__).parents[1] / "examples" / "outside_kernel" / "gdn_ring" / "gdn_ring.yaml"
    alone = suite("fast", [str(outside)])
    assert len(alone) > 15 and not any(case.exact for case in alone)


def test_every_ci_file_runs_the_tests_and_the_gate() -> None:
    """Faults: a gate that CI forgot; a workflow that runs something else than .ci/run; an option it misspells."""
    root = Path(__file__).parents[1]
    made = [line for line in (root / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    flow = yaml.safe_load((root / ".github" / "workflows" / "ci.yml").read_text())
    assert (
        [step["run"] for step in flow["jobs"]["test"]["steps"] if "run" in step] == made == ["make test", "make gate"]
    )
    kernel = yaml.safe_load((root / "examples" / "outside_kernel" / "gate.yml").read_text())
    runs = [step["run"].split() for step in kernel["jobs"]["gate"]["steps"] if "run" in step]
    (gate,) = (words[3:] for words in runs if "harness.gate" in words)
    assert command._options(gate)["baselines"] == "baselines"
