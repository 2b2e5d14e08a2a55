"""Sweeps: no job fails silently, none is missed, none disturbs another (cases H1 to H3)."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from fake_experiment import BUG, DONE_BEFORE, EXIT, INTERRUPT, seen
from hydra.core.plugins import Plugins

from harness import app
from harness.sweeps import sweep
from harness.sweeps.plan import plan
from harness.sweeps.table import report


def folders(root: Path) -> list[Path]:
    return sorted(root.glob("*/runs/sweeps/*"))


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def test_failing_jobs_are_recorded_and_the_others_run(command, tmp_path):
    status, table, err = command("-m", f"decode.tokens=7,{BUG},-1,{EXIT},8")
    (folder,) = folders(tmp_path)
    assert status == 1
    assert [(r["state"], r["error"]) for r in records(folder)] == [
        ("finished", None),
        ("failed", "ZeroDivisionError: planted bug"),
        ("failed", "decode.tokens: -1 is below 1"),
        ("failed", "SystemExit: 3"),
        ("finished", None),
    ]
    assert "fake_experiment.py" in records(folder)[1]["traceback"]
    assert "2 finished, 3 failed" in table and "ZeroDivisionError: planted bug" in table
    assert table.count("drift/0123456789abcdef") == 2 and str(folder.relative_to(tmp_path)) in table
    assert max(map(len, table.splitlines())) <= 80
    # nothing of Hydra's, and nobody looks; what a job printed is in its log
    assert err == ""
    assert (folder / "00001.log").read_text() == f"decoding {BUG} tokens\n"
    assert "decoding" not in table
    written = {f"{i:05d}.{kind}" for i in range(5) for kind in ("json", "log")}
    assert {p.name for p in folder.iterdir()} == written | {"sweep.json", "multirun.yaml"}


def test_a_sweep_without_failures_succeeds_and_counts_skipped_jobs_as_done(command):
    status, table, _ = command("-m", f"decode.tokens=7,{DONE_BEFORE}", "ring.length=32")
    assert status == 0
    assert "1 finished, 1 skipped; all with ring.length=32" in table and "already done" in table


def test_ctrl_c_ends_the_sweep_in_one_line_and_keeps_the_records(command, tmp_path):
    status, out, err = command("-m", f"decode.tokens=7,{INTERRUPT},8")
    (folder,) = folders(tmp_path)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == f"harness: interrupted; records in {folder.relative_to(tmp_path)}"
    assert [r["error"] for r in records(folder)] == [None, "interrupted"]
    assert [r["error"] for r in sweep.rows(folder)][2] == "left no record"


def basic() -> type:
    """Hydra loads its plug-ins by file, so the class to patch is the one it found."""
    return Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]


@pytest.fixture
def pool_of(monkeypatch):
    """pool_of(function): the launcher joblib is Hydra's own, each of whose launches goes through `function`."""

    def put(function) -> None:
        launch = basic().launch
        monkeypatch.setattr("harness.sweeps.launching.launcher_of", lambda config: "joblib")
        monkeypatch.setattr("harness.sweeps.launching.POLL", 0.01)
        monkeypatch.setattr(basic(), "launch", lambda self, jobs, first: function(partial(launch, self), jobs, first))

    return put


def dying(folder: Path, number: int) -> None:
    """What a killed job leaves."""
    (folder / f"{number:05d}.json").write_text(
        json.dumps({"job": number, "state": "running", "host": "x", "attempt": 1})
    )


def test_a_launcher_that_gives_up_is_asked_again(command, tmp_path, pool_of):
    """Faults: jobs that never began are dropped; one that died is not tried again, or not alone."""
    asked = []

    def give_up_at_the_second(launch, jobs, first):
        (folder,) = folders(tmp_path)
        asked.append([first + i for i in range(len(jobs))])
        launch(jobs[:1], first)
        if len(jobs) > 1:
            dying(folder, first + 1)
            raise RuntimeError("a worker was killed")

    pool_of(give_up_at_the_second)
    status, table, err = command("-m", "decode.tokens=7,8,9,10")
    assert status == 0 and "4 finished" in table
    assert asked == [[0, 1, 2, 3], [2, 3], [1], [3]]
    assert err.splitlines()[0] == "harness: the launcher stopped: RuntimeError: a worker was killed; jobs left: 3"
    assert [c.decode.tokens for c in seen] == [7, 9, 8, 10]


def test_a_job_that_dies_alone_has_failed_and_the_others_have_not(command, tmp_path, pool_of):
    def die_at_eight(launch, jobs, first):
        for i, job in enumerate(jobs):
            if "decode.tokens=8" in job:
                dying(folders(tmp_path)[0], first + i)
                raise RuntimeError("a worker was killed")
            launch([job], first + i)

    pool_of(die_at_eight)
    status, table, _ = command("-m", "decode.tokens=7,8,9")
    assert status == 1 and "2 finished, 1 failed" in table and "died while running" in table


def test_a_launcher_that_runs_nothing_is_refused(command, tmp_path, pool_of):
    def give_up(launch, jobs, first):
        raise RuntimeError("no machine to be had")

    pool_of(give_up)
    status, out, err = command("-m", "decode.tokens=7,8")
    assert status == 2 and out == "" and "no machine to be had" in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_job_that_has_ended_is_not_run_again(command, tmp_path, pool_of):
    """Fault: a launcher that hands a job to two workers makes two runs of it, or two outcomes."""
    pool_of(lambda launch, jobs, first: [launch([job], first + i) for i, job in enumerate(jobs) for _ in range(2)])
    status, table, _ = command("-m", f"decode.tokens=7,{BUG}")
    assert status == 1 and "1 finished, 1 failed" in table and len(seen) == 2


def test_jobs_that_were_not_planned_do_not_run(command, tmp_path, monkeypatch):
    """Fault: a sweeper that reads a command line otherwise than the plan (case H2: nine jobs of three)."""
    split = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    sweeper = Plugins.instance().class_name_to_class[split]
    other = [["decode.tokens=7"], ["decode.tokens=8"], ["decode.tokens=9"]]
    monkeypatch.setattr(sweeper, "split_arguments", staticmethod(lambda overrides, size: [other]))
    status, _, err = command("-m", "decode.tokens=7,8")
    assert status == 2 and "job 2 (decode.tokens=9) was not planned" in err and not seen


def test_the_number_of_jobs_is_checked_before_any_runs(command, tmp_path):
    swept = ["-m", "precision=own,fp32,bf16", "ring.length=16,32", "seed=range(8)"]
    status, _, err = command(*swept, "--expect", "24")
    said = "--expect: 24 jobs expected, the command makes 48 jobs: precision 3 × ring.length 2 × decode.seed 8"
    assert (status, err) == (2, f"harness: error: {said}\n")
    status, out, _ = command(*swept, "--expect", "48", "--plan")
    assert status == 0 and len(out.splitlines()) == 49
    assert out.splitlines()[47].split() == ["47", "precision=bf16", "ring.length=32", "decode.seed=7"]
    assert not seen and not list(tmp_path.iterdir())


def test_progress_counts_jobs_where_it_is_asked_for(command, capsys):
    status, _, err = command("-m", f"decode.tokens=7,{BUG},8", "progress=true")
    assert status == 1
    assert err.splitlines()[0] == "3 jobs: decode.tokens 3"
    assert err.splitlines()[-1].startswith("3 of 3 jobs, 1 failed, ") and err.endswith(" 0 s left\n")


def test_a_long_table_lists_failures_alone(command):
    status, table, _ = command("-m", "decode.seed=range(45)", "decode.tokens=7")
    assert status == 0 and "45 finished" in table and len(table.splitlines()) < 8
    status, table, _ = command("-m", "decode.seed=range(22)", f"decode.tokens=7,{BUG}")
    assert status == 1 and table.count("ZeroDivisionError") == 22 and "drift/0123" not in table


@pytest.mark.parametrize(("content", "error"), [(None, "left no record"), ({"state": "running"}, "died while running")])
def test_a_job_that_left_no_final_record_has_failed(command, tmp_path, capsys, content, error):
    command("-m", "decode.tokens=7,8")
    (folder,) = folders(tmp_path)
    # the last job: nothing after it shows the gap
    path = folder / "00001.json"
    path.unlink() if content is None else path.write_text(json.dumps(content))
    assert report(Path(folder.relative_to(tmp_path))) == 1
    table = capsys.readouterr().out
    assert "1 finished, 1 failed" in table and error in table and "decode.tokens=8" in table


@pytest.mark.parametrize(
    "swept",
    [
        ["decode.seed=range(2)", "ring.length=16,32", "model.rows=4"],
        ["precision=glob(*32)", "decode.tokens=7"],
        ["variants=[null_arm],[null_arm,exact_fold]"],
        ["decode.tokens=7,8", "decode.tokens=9", "hydra.sweeper.max_batch_size=1"],
        [],
    ],
    ids=" ".join,
)
def test_the_jobs_planned_are_the_jobs_that_ran(command, tmp_path, swept):
    assert command("-m", *swept)[0] == 0
    (folder,) = folders(tmp_path)
    planned = plan(swept).jobs
    assert planned == [r["overrides"] for r in records(folder)]
    assert len(planned) == len(seen)


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["decode.tokens=7,abc"], "decode.tokens: 'abc' is not an integer"),
        (["precision=fp32,fp23"], "precision: no option 'fp23'"),
        (["decode.tokenz=7,8"], "decode.tokenz: unknown key"),
        (["results_dir=a,b"], "results_dir: a sweep has one"),
        (["hydra.sweep.dir=here"], "hydra.sweep.dir: cannot be set"),
        (["hydra.mode=RUN"], "hydra.mode: cannot be set"),
        (["hydra.sweeper.params={ring.length:'16,32'}"], "hydra.sweeper.params: cannot be set"),
        (["hydra/launcher=none_such"], "hydra/launcher: no option 'none_such'"),
        (["decode.beta=interval(0,1)"], "decode.beta=interval(0,1): "),
        (["sweep=precision_ring,error_budget"], "sweep: one study at a time"),
        (["decode.tokens=-1", "seed=0,1"], "decode.tokens: -1 is below 1"),
        (["variants=[nosuch]", "seed=0,1"], "variants: no option 'nosuch'"),
        (["+seed=5", "ring.length=16,32"], "seed: unknown key"),
        (["seed=range(0)"], "decode.seed=range(0): no values"),
        (["seed=0,1", "decode.seed=2,3"], "seed: is short for decode.seed"),
    ],
    ids=str,
)
def test_a_refused_sweep_leaves_nothing(command, tmp_path, argv, key):
    status, out, err = command("-m", *argv)
    assert (status, out) == (2, "") and err.startswith(f"harness: error: {key}") and err.count("\n") == 1
    assert not seen and not list(tmp_path.iterdir())


def test_a_value_that_another_swept_one_may_mend_is_left_to_its_job(command):
    """Fault: a sweep refused for its first job, where the second is sound."""
    status, table, _ = command("-m", "decode.window=8", "ring.max_window=4,8", "decode.tokens=7")
    assert status == 1 and "1 failed, 1 finished" in table and len(seen) == 1


def test_jobs_on_another_machine_are_taken_at_their_word(tmp_path):
    """Fault: a sweep under way elsewhere on a shared folder reads as failed."""
    with sweep.opened(tmp_path, {}, [["a"], ["b"]]) as folder:
        far = {"job": 0, "state": "running", "host": "elsewhere", "pid": 1, "process_start": "1"}
        (folder / "00000.json").write_text(json.dumps(far))
        own = json.loads((folder / "sweep.json").read_text())
        (folder / "sweep.json").write_text(json.dumps(own | {"host": "elsewhere"}))
        assert [row["state"] for row in sweep.rows(folder)] == ["running", "waiting"]
    assert [row["state"] for row in sweep.rows(folder)] == ["failed", "failed"]


def test_an_unwritable_results_dir_is_refused_before_any_job(command, tmp_path):
    (tmp_path / "taken").write_text("a file")
    status, _, err = command("-m", "decode.tokens=7,8", "results_dir=taken")
    assert status == 2 and err.startswith("harness: error: results_dir: cannot write taken/") and not seen


@pytest.mark.parametrize("name", ["an o'clock", "back\\slash\\"])
def test_a_results_dir_of_any_name_holds_its_sweeps(command, tmp_path, name):
    assert command("-m", "decode.tokens=7", f"results_dir={app.quoted(name)}")[0] == 0
    (folder,) = (tmp_path / name / "sweeps").iterdir()
    assert records(folder)[0]["directory"] == f"{name}/drift/0123456789abcdef"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_two_sweeps_of_one_command_have_folders_of_their_own(command, tmp_path):
    for _ in range(2):
        assert command("-m", "decode.tokens=7")[0] == 0
    assert [len(records(folder)) for folder in folders(tmp_path)] == [1, 1]


def test_swept_numbers_stay_numbers_and_non_finite_ones_fail_their_job(command, tmp_path):
    command("-m", "decode.g=-1e-5,0,nan,1e5")
    assert [c.decode.g for c in seen] == [-1e-5, 0.0]
    assert all(isinstance(c.decode.g, float) and math.isfinite(c.decode.g) for c in seen)
    errors = [r["error"] for r in records(folders(tmp_path)[0])[2:]]
    assert all(e.startswith("decode.g: ") for e in errors) and len(errors) == 2


def test_an_experiment_that_returns_no_state_has_failed(tmp_path):
    with sweep.opened(tmp_path, {}, [[]]) as folder:
        sweep.recorded(folder, 0, [], lambda: {"state": None})
    assert sweep.rows(folder)[0]["error"] == "TypeError: the experiment returned the state None"


def test_what_launched_the_jobs_is_read_off_their_records(tmp_path):
    """Fault: the number of workers asked for is taken for the number that ran."""
    with sweep.opened(tmp_path, {"launcher": "joblib"}, [[]] * 4) as folder:
        for job, (pid, began, seconds, attempt) in enumerate(
            [(1, 0, 5, 1), (2, 1, 3, 2), (1, 5, 2, 1), (2, 4.5, 9, 1)]
        ):
            record = {"job": job, "state": "finished", "host": "a", "pid": pid, "attempt": attempt}
            record |= {"began": began, "seconds": seconds, "directory": "d"}
            (folder / f"{job:05d}.json").write_text(json.dumps(record))
    found = sweep.of(folder)
    # the first ends at the instant at which the third begins
    assert {key: found[key] for key in ("hosts", "workers", "concurrent", "again", "seconds")} == {
        "hosts": 1,
        "workers": 2,
        "concurrent": 2,
        "again": 1,
        "seconds": 13.5,
    }
    assert found["launcher"] == "joblib" and found["ended"]
