"""Comparing results: the right rows side by side, no failure called equal, nothing dropped in silence."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_runs import F, make, resummarised, swept, truncated

from harness.provenance import read_json, write_json
from harness.results import __main__ as command
from harness.results.comparing import Pair, compare
from harness.results.sides import side_at, side_of


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(*argv) -> (exit status, stdout, stderr) of `compare`, in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> tuple[int, str, str]:
        status = command.main(["compare", *map(str, argv)])
        out, err = capsys.readouterr()
        # a path, or a row without a partner, is not cut
        named = ("A:", "B:", "only in", "left out")
        assert max((len(line) for line in out.splitlines() if not line.startswith(named)), default=0) <= 80
        return status, out, err

    return run


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1e-6, 1.09e-6, True),
        (1e-6, 1.11e-6, False),
        (1.11e-6, 1e-6, False),
        (0.0, 0.0, True),
        (0.0, 1e-30, False),
        (1e-30, 0.0, False),
        (np.nan, np.nan, False),
        (np.inf, np.inf, False),
        (1e-6, np.nan, False),
        (None, 1e-6, False),
        (1e-6, None, False),
    ],
)
def test_equal_means_both_finite_and_close(a, b, equal):
    """Fault: NaN beside NaN is equal, an exact result beside an inexact one is, or a metric that was lost is."""
    assert Pair("", "exact_fold", "served_max", a, b).equal(0.1) is equal


def test_two_equal_runs_and_two_different_ones(call, tmp_path):
    """Fault: the exit status says equal of runs that are not; or a ratio is A over B."""
    a = make(tmp_path, "a", {"exact_fold": 1e-6, "null_arm": 1e-7})
    b = make(tmp_path, "b", {"exact_fold": 3e-6, "null_arm": 1.04e-7}, ring__length=32, workers=3, seconds=9.0)
    assert call(a, a)[0] == 0
    status, out, err = call(a, b)
    assert (status, err) == (1, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["ring.length", "16", "32"] in lines and not [line for line in lines if line[:1] == ["workers"]]
    assert ["exact_fold", "served_max", "1.0e-06", "3.0e-06", "3", "differs"] in lines
    assert ["null_arm", "served_max", "1.0e-07", "1.0e-07", "1.04"] in lines
    assert "2 rows matched, 0 not; 6 of 14 levels outside 0.909..1.1" in out
    assert call(a, b, "--tolerance", "2.1")[0] == 0


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.nan, np.inf, False),
        (np.inf, -np.inf, False),
        (np.nan, 1e-6, False),
        (1e-6, np.inf, False),
        (None, np.nan, False),
        (1e-6, 1e-6, False),
    ],
)
def test_failing_alike_is_neither_equal_nor_a_difference(a, b, alike):
    """Fault: a level that failed on one side only, or otherwise on the other, is excused."""
    pair = Pair("", "exact_fold", "served_max", a, b)
    assert pair.failed_alike is alike and pair.differs(0.1) is (not alike and a != b)


def test_levels_that_failed_on_both_sides_are_counted_apart(call, tmp_path):
    """Fault: a variant that diverges in both commits passes for unchanged, or a run differs from itself."""
    sick = np.full(F, 1e-3)
    sick[-2:] = np.nan
    a, b = (make(tmp_path, name, {"exact_fold": sick, "null_arm": 1e-7}) for name in "ab")
    status, out, _ = call(a, b)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and ["exact_fold", "served_max", "nan", "nan", "–", "not", "finite"] in lines
    alike = sum(line[-2:] == ["not", "finite"] for line in lines)
    assert f"0 of 14 levels outside 0.909..1.1\n{alike} levels not finite on both sides\n" in out
    c = make(tmp_path, "c", {"exact_fold": 1e-3, "null_arm": 1e-7})
    status, out, _ = call(a, c)
    assert status == 1 and "on both sides" not in out


def sweep_of(root: Path, factor: dict[int, float], variants: tuple[str, ...] = ("exact_fold", "null_arm")) -> Path:
    """Rings of these lengths; the error is the length, times a factor."""
    runs = [
        make(root, f"{length}", dict.fromkeys(variants, 1e-08 * length * x), ring__length=length)
        for length, x in factor.items()
    ]
    return swept(root, [("finished", run) for run in runs])


def test_rows_of_sweeps_meet_the_rows_of_their_own_configuration(call, tmp_path):
    """Fault: rows are joined by position, so that another order or a lost job shifts them all; or one is dropped."""
    a = sweep_of(tmp_path / "a", {8: 1, 16: 1, 32: 1})
    b = sweep_of(tmp_path / "b", {64: 1, 32: 1, 16: 5})
    found = compare(side_of(a), side_of(b))
    assert found.matched == 4 and found.keys == ["ring.length"]
    assert {pair.where: round(pair.ratio, 6) for pair in found.pairs} == {"ring.length=16": 5, "ring.length=32": 1}
    assert found.only_a == ["ring.length=8 exact_fold", "ring.length=8 null_arm"]
    assert found.only_b == ["ring.length=64 exact_fold", "ring.length=64 null_arm"]
    status, out, _ = call(a, b)
    assert status == 1 and "only in B, 2: ring.length=64 exact_fold; ring.length=64 null_arm" in out
    assert ["exact_fold", "served_max", "2", "1", "3", "5", "1"] in [line.split() for line in out.splitlines()]
    assert "1: ring.length=16" in out and "furthest apart" in out
    assert call(a, a)[0] == 0 and "14 of 14 levels are the same in every row" in call(a, a)[1]


def test_a_lost_job_alone_is_a_difference(call, tmp_path):
    """Fault: a sweep that lacks a job compares as equal, as all that is there is."""
    a, b = sweep_of(tmp_path / "a", {8: 1, 16: 1}), sweep_of(tmp_path / "b", {8: 1})
    assert call(a, b)[0] == 1 and call(b, a)[0] == 1
    c = sweep_of(tmp_path / "c", {8: 1, 16: 1}, ("exact_fold",))
    assert call(a, c)[0] == 1 and "ring.length=8 null_arm" in call(a, c)[1]


def test_what_was_not_read_is_a_difference_and_is_named(call, tmp_path):
    """Fault: two sweeps that failed or were damaged in the same job, or one of them, compare as equal."""
    runs = [make(tmp_path, f"{n}", ring__length=n) for n in (8, 16)]
    whole = swept(tmp_path, [("finished", runs[0])], "aaaaaaaa")
    failed = swept(tmp_path, [("finished", runs[0]), ("failed", None)], "bbbbbbbb")
    assert call(whole, whole)[0] == 0
    for pair, side in (((whole, failed), "B"), ((failed, whole), "A")):
        status, out, _ = call(*pair)
        assert status == 1 and f"left out of {side}: {failed / '00001'}: failed\n" in out
    damaged = swept(tmp_path, [("finished", run) for run in runs], "cccccccc")
    truncated(runs[1] / "summary.json")
    status, out, _ = call(whole, damaged)
    assert status == 1 and f"left out of B: {runs[1]}: damaged, summary.json is not JSON\n" in out
    # what never had levels is not missed
    resummarised(runs[1], {"speed": 1})
    status, out, _ = call(whole, damaged)
    assert status == 0 and "left out" not in out


def test_what_another_commit_has_not_finished_is_not_missed(call, commits):
    """Fault: one failed run of whatever source makes every comparison of commits a difference."""
    assert call("--commits", "bbbb", "bbbb", "--results", commits)[0] == 0
    for source, status in (("9" * 16, 0), ("1" * 16, 1)):
        record = {"state": "failed", "error": "planted", "source": source}
        write_json(commits / "drift" / f"{source}.status.json", record)
        found, out, _ = call("--commits", "bbbb", "bbbb", "--results", commits)
        assert found == status and (f"{source}: failed" in out) is bool(status)


COMMITS = {"old": "aaaa1111", "new": "bbbb2222", "edited": "bbbb2222+dirty"}


@pytest.fixture
def commits(tmp_path) -> Path:
    """Two rings at the commits old and new, and one of a changed tree; the default key fold_when came with new."""
    root = tmp_path / "runs"
    for i, (name, factor, rings) in enumerate([("old", 1, (8, 16)), ("new", 2, (16, 8)), ("edited", 9, (16,))]):
        for length in rings:
            more = {"commit": COMMITS[name]}
            directory = make(
                root,
                f"{i}{length:02d}",
                {"exact_fold": 1e-8 * length * factor},
                source=str(i) * 16,
                ring__length=length,
                more=more,
                workers=i + 1,
                results_dir=name,
            )
            if name == "old":
                manifest = read_json(directory / "manifest.json")
                del manifest["config"]["ring"]["fold_when"]
                write_json(directory / "manifest.json", manifest)
    return root


@pytest.mark.parametrize("pair", [("aaaa", "bbbb"), ("aaaa1111", "bbbb2222"), ("0000", "11111"), ("aaaa", "1111111")])
def test_runs_of_two_commits_meet_by_configuration(call, commits, pair):
    """Fault: runs of a changed tree count for its commit; or a key that came in between parts every pair."""
    found = compare(side_at(pair[0], commits), side_at(pair[1], commits), whole=True)
    assert found.matched == 2 and not found.only_a and not found.only_b
    assert [round(pair.ratio, 6) for pair in found.pairs] == [2.0] * len(found.pairs)
    status, out, _ = call("--commits", *pair, "--results", commits)
    assert status == 1 and "source  0000000000000000 1111111111111111" in " ".join(out.split()).replace(
        "source ", "source  "
    )


def test_a_changed_tree_is_a_commit_of_its_own(commits):
    """Fault: what was edited after a commit cannot be compared with it."""
    found = compare(side_at("bbbb", commits), side_at("bbbb+dirty", commits), whole=True)
    assert (
        found.matched == 1
        and found.pairs[0].ratio == pytest.approx(4.5)
        and found.only_a == ["ring.length=8 exact_fold"]
    )


def test_of_a_repeated_configuration_the_last_run_counts_and_it_is_said(call, tmp_path):
    """Fault: which of two runs is compared depends on the order of folders."""
    more = {"started": "2026-01-02", "commit": "aaaa1111"}
    late = make(tmp_path / "r", "a", {"exact_fold": 2e-6}, more=more)
    make(tmp_path / "r", "b", {"exact_fold": 1e-6}, device="cpu", more=more | {"started": "2026-01-01"})
    for path in (tmp_path / "r" / "drift").iterdir():
        manifest = read_json(path / "manifest.json")
        manifest["config"]["device"] = "auto"
        write_json(path / "manifest.json", manifest)
    side = side_at("aaaa", tmp_path / "r")
    for rows in (side.rows, side.rows[::-1]):
        found = compare(replace(side, rows=rows), side_of(late), whole=True)
        assert {pair.ratio for pair in found.pairs} == {1.0} and len(found.doubled) == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["runs"], "nothing to compare runs with"),
        (["runs", "nowhere"], "nowhere: no such folder"),
        (["--commits", "aaaa", "cccc", "--results", "runs"], "--commits: cccc: no run of it in runs"),
        (["--commits", "aa", "bbbb", "--results", "runs"], "--commits: 'aa' is too short"),
        (["runs", "runs", "--tolerance", "nan"], "--tolerance: nan"),
        (["runs", "runs", "--tolerance", "-1"], "--tolerance: -1.0"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(call, commits, argv, says):
    """Fault: a traceback, or status 0 for a commit that was never run."""
    status, out, err = call(*argv)
    assert (status, out) == (2, "") and says in err and err.count("\n") == 1
