"""Run directories: complete or absent, never overwritten, and always accounted for."""

import copy
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest

from harness.config import Config, DecodeConfig, leaves
from harness.errors import ConfigError, HarnessError
from harness.objective_config import ObjectiveConfig
from harness.provenance import content_hash, identity_of, launched, source_digest, write_json
from harness.rundir import DamagedError, Run, RunBusyError, check, list_runs, read_status

IDENTITY = {"source": source_digest(), "variants": {"exact_fold": {"backend": "emulated", "device": "cpu"}}}


def config(results: Path, **changes) -> Config:
    made = Config(results_dir=str(results), **changes)
    made.variants = ["exact_fold"]
    return made


def finish(run: Run, text: str = "first") -> Path:
    run.path("note.txt").write_text(text)
    return run.finish(device="cpu")


def test_hash_covers_what_a_result_depends_on(tmp_path):
    """Fault: two different runs share a directory, or one run has two because it was launched otherwise."""
    base = content_hash(config(tmp_path), IDENTITY)
    assert content_hash(config(tmp_path / "x", workers=3, progress=False), IDENTITY) == base
    assert content_hash(config(tmp_path, decode=DecodeConfig(g=0)), IDENTITY) == content_hash(
        config(tmp_path, decode=DecodeConfig(g=-0.0)), IDENTITY
    )
    gpu = {"exact_fold": {"backend": "triton", "device": "cuda"}}
    others = [
        content_hash(config(tmp_path, decode=DecodeConfig(seed=1)), IDENTITY),
        content_hash(config(tmp_path, decode=DecodeConfig(g=-1e-9)), IDENTITY),
        content_hash(config(tmp_path, decode=DecodeConfig(beta=1.0)), IDENTITY),
        content_hash(config(tmp_path, device="cpu"), IDENTITY),
        content_hash(config(tmp_path), IDENTITY | {"source": "0" * 16}),
        content_hash(config(tmp_path), IDENTITY | {"variants": gpu}),
        content_hash(config(tmp_path), identity_of(IDENTITY["variants"], {"exact_fold": "changed"})),
    ]
    assert len({base, *others}) == len(others) + 1


def test_hash_covers_every_key_but_those_of_the_launcher():
    """Fault: a key left out, so that a run under another value of it is taken for done."""
    base, left_out = Config(), []
    for key, _ in leaves(base):
        changed = copy.deepcopy(base)
        *path, last = key.split(".")
        setattr(reduce(getattr, path, changed), last, "another")
        if content_hash(changed, IDENTITY) == content_hash(base, IDENTITY):
            left_out.append(key)
    assert sorted(key for key in left_out if not key.startswith("objective.")) == ["progress", "results_dir", "workers"]
    assert sum(key.startswith("objective.") for key in left_out) == len(fields(ObjectiveConfig))


def test_hash_covers_the_contents_of_a_trace(tmp_path):
    """Fault: a gates file is replaced under its old name, and the old run is taken for the new one."""
    path = tmp_path / "gates.safetensors"
    path.write_bytes(b"one")
    decode = DecodeConfig(gates=str(path))
    first = content_hash(config(tmp_path, decode=decode), IDENTITY)
    path.write_bytes(b"two")
    assert content_hash(config(tmp_path, decode=decode), IDENTITY) != first


def test_source_digest_sees_code_and_configs(tmp_path):
    """Fault: results of changed code are reused; or an installed package and a checkout never agree."""
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for root, configs in ((checkout, "configs"), (installed, "harness/configs")):
        (root / "harness").mkdir(parents=True)
        (root / configs).mkdir()
        (root / "harness" / "a.py").write_text("x = 1\n")
        (root / configs / "b.yaml").write_text("y: 2\n")
    # past the cache, which holds for the life of a process
    read = source_digest.__wrapped__
    first = read(checkout / "harness")
    assert read(installed / "harness") == first
    found = {first}
    for name, text in (("harness/a.py", "x = 2\n"), ("configs/b.yaml", "y: 3\n"), ("harness/c.py", "")):
        (checkout / name).write_text(text)
        found.add(read(checkout / "harness"))
    assert len(found) == 4


def test_a_finished_run_is_never_overwritten(tmp_path):
    """Fault: a second start of the same hash replaces, or adds to, a finished result."""
    with Run.open(config(tmp_path), IDENTITY) as run:
        directory = finish(run)
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    with Run.open(config(tmp_path), IDENTITY) as again:
        assert again.finished
        assert again.path("note.txt").read_text() == "first"
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    manifest = json.loads(before["manifest.json"])
    assert manifest["config"]["variants"] == ["exact_fold"]
    assert manifest["identity"] == IDENTITY
    assert {"torch", "numpy", "pyarrow", "hydra-core"} <= set(manifest["packages"])
    assert [run["state"] for run in list_runs(tmp_path)] == ["finished"]


def test_a_failure_is_recorded_and_replaced(tmp_path):
    """Fault (H1): a failed job leaves no record, or half a directory that blocks the next try."""
    run = Run.open(config(tmp_path), IDENTITY)
    run.path("flushes.parquet").write_bytes(b"half")
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError("the seventh block")
    (entry,) = list_runs(tmp_path)
    assert entry["state"] == "failed"
    assert entry["error"] == "ZeroDivisionError: the seventh block"
    assert "raise ZeroDivisionError" in entry["traceback"]
    assert not [p for p in run.folder.iterdir() if p.is_dir()]
    with Run.open(config(tmp_path), IDENTITY) as again:
        assert not again.finished
        finish(again)
    assert [e["state"] for e in list_runs(tmp_path)] == ["finished"]
    assert "error" not in read_status(run.status_path)


def test_a_run_that_forgets_to_finish_has_failed(tmp_path):
    """Fault: a body that returns early counts as a success without a result."""
    with pytest.raises(HarnessError, match="ended without a result"), Run.open(config(tmp_path), IDENTITY):
        pass
    assert [e["state"] for e in list_runs(tmp_path)] == ["failed"]


CHILD = """
import sys, time
from harness.config import Config
from harness.rundir import Run
with Run.open(Config(results_dir=sys.argv[1], variants=["exact_fold"]), {"source": sys.argv[2]}) as run:
    run.path("flushes.parquet").write_bytes(b"half")
    print(run.hash, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def child(tmp_path):
    """A process in the middle of a run; (process, hash)."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), source_digest()], stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_run_reads_as_killed(tmp_path, child):
    """Fault: kill -9 leaves a run that looks running for ever, or half a directory under the final name."""
    process, name = child
    status = tmp_path / "drift" / f"{name}.status.json"
    assert read_status(status)["state"] == "running"
    with pytest.raises(RunBusyError, match=f"is being run by pid {process.pid}"):
        Run.open(config(tmp_path), {"source": source_digest()})
    os.kill(process.pid, signal.SIGKILL)
    # not reaped yet: a zombie is dead as well
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_status(status)["state"] == "killed"
    process.wait()
    (entry,) = list_runs(tmp_path)
    assert entry["state"] == "killed"
    assert str(process.pid) in entry["error"]
    assert not (tmp_path / "drift" / name).exists()
    with Run.open(config(tmp_path), {"source": source_digest()}) as again:
        assert again.hash == name
        finish(again)
    assert sorted(p.name for p in again.folder.iterdir()) == [".lock", name, f"{name}.status.json"]


def test_one_of_many_starters_wins(tmp_path):
    """Fault (H3): two starts of one hash at the same moment both write to it."""

    def start(_: int) -> bool:
        try:
            return not Run.open(config(tmp_path), IDENTITY).finished
        except RunBusyError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(start, range(32))) == 1


def test_a_recycled_pid_does_not_block(tmp_path):
    """Fault: the pid of a dead run belongs to another process by now, and the run is refused for ever."""
    run = Run.open(config(tmp_path), IDENTITY)
    with pytest.raises(RunBusyError):
        Run.open(config(tmp_path), IDENTITY)
    write_json(run.status_path, run.status | {"process_start": "1"})
    assert not Run.open(config(tmp_path), IDENTITY).finished


def test_other_source_is_stale(tmp_path):
    """Fault: a result of other code is listed as current."""
    with Run.open(config(tmp_path), IDENTITY | {"source": "0" * 16}) as run:
        finish(run)
    with Run.open(config(tmp_path), IDENTITY) as run:
        assert not run.finished
        finish(run)
    assert sorted(e["state"] for e in list_runs(tmp_path)) == ["finished", "stale"]
    os.rename(run.directory, tmp_path / "elsewhere")
    assert sorted(e["state"] for e in list_runs(tmp_path)) == ["missing", "stale"]


@pytest.mark.parametrize("where", ["a file", "a file/below", "/proc/none"])
def test_an_unwritable_results_dir_is_one_line(tmp_path, where):
    """Fault: a traceback, or something half-written, where results_dir cannot be used."""
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match=r"^results_dir: cannot write to .*$") as caught:
        Run.open(config(tmp_path / where), IDENTITY)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a file"]


def test_a_full_disk_is_one_line(tmp_path):
    """Fault: running out of space in the middle of a run ends in a traceback."""
    with (
        pytest.raises(ConfigError, match=r"^results_dir: .*No space left"),
        Run.open(config(tmp_path), IDENTITY),
    ):
        raise OSError(28, "No space left on device")
    assert [e["state"] for e in list_runs(tmp_path)] == ["failed"]


def test_an_experiment_name_stays_in_its_folder(tmp_path):
    """Fault: experiment=../x writes outside results_dir."""
    with pytest.raises(ConfigError, match=r"^experiment: "):
        Run.open(config(tmp_path / "runs", experiment="../x"), IDENTITY)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["shortened", "gone"])
def test_a_finished_run_whose_file_has_changed_is_refused_and_kept(tmp_path, change):
    """Fault: a truncated table passes for a result, is skipped by a sweep, or is silently thrown away."""
    with Run.open(config(tmp_path), IDENTITY) as run:
        directory = finish(run)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    assert set(files) == {"config.yaml", "note.txt"} and check(directory)["files"] == files
    note = directory / "note.txt"
    note.write_text("firs") if change == "shortened" else note.unlink()
    before = sorted(p.name for p in directory.iterdir())
    with pytest.raises(DamagedError, match=rf"^{directory}: damaged, note\.txt; delete the directory to run it again$"):
        Run.open(config(tmp_path), IDENTITY)
    assert sorted(p.name for p in directory.iterdir()) == before


def test_a_manifest_names_the_commit_and_what_launched_it(tmp_path):
    """Fault: a job of a sweep names its worker's command, which repeats nothing; a commit that is not the source's."""
    command = ["python", "-m", "harness", "decode.seed=1"]
    with launched(command, launcher="joblib", sweep="abc", job=3), Run.open(config(tmp_path), IDENTITY) as run:
        directory = finish(run)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["command"] == command
    assert (manifest["launcher"], manifest["sweep"], manifest["job"]) == ("joblib", "abc", 3)
    with Run.open(config(tmp_path / "alone"), IDENTITY) as run:
        alone = json.loads((finish(run) / "manifest.json").read_text())
    assert "launcher" not in alone and alone["command"] != manifest["command"]
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    head = done.stdout.strip() if done.returncode == 0 else None
    assert alone["commit"] in (head, f"{head}+dirty")
