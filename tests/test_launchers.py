"""Real launchers, real processes, real kills: nothing that has ended is lost, and nothing is left half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.provenance import read_json
from harness.rundir import check, list_runs
from harness.sweeps import sweep

ROOT = Path(__file__).parents[1]
TINY = ["model=tiny", "decode.tokens=60", "device=cpu"]
KILLER = """
import os, signal
from pathlib import Path
from gdn_ring.ring import Ring


class Always(Ring):
    def create(self, shape, ring, initial):
        os.kill(os.getpid(), signal.SIGKILL)


class Once(Always):
    def create(self, shape, ring, initial):
        mark = Path(__file__).with_name("killed")
        if mark.exists():
            return Ring.create(self, shape, ring, initial)
        mark.touch()
        super().create(shape, ring, initial)
"""


def start(where: Path, *argv: str) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/outside_kernel"), os.environ.get("PYTHONPATH", "")])
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "HOME": str(where)}
    env = os.environ | quiet | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harness", "-m", *argv]
    return subprocess.Popen(command, cwd=where, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def only_sweep(where: Path) -> Path:
    (folder,) = (where / "results/runs/sweeps").iterdir()
    return folder


LAUNCHERS = {
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": [],
    # its own retries would hide what is tested
    "ray": ["+hydra.launcher.ray.remote.max_retries=0", "+hydra.launcher.ray.init.num_cpus=2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_worker_costs_its_own_job_alone(launcher, tmp_path):
    """Faults: the launcher's other jobs are dropped or their results lost; a job that dies each time is run for ever,
    or hidden; the launcher is not recorded."""
    (tmp_path / "kernel.py").write_text(KILLER)
    for name in ("Once", "Always"):
        lines = [f"design: kernel.py:{name}", "sites: {default: fp32}", "dots: {default: ieee}"]
        (tmp_path / f"{name.lower()}.yaml").write_text("\n".join(lines) + "\n")
    arms = "variants=[exact_recurrent],[once.yaml],[always.yaml],[chunked_fp32]"
    process = start(tmp_path, *TINY, arms, f"hydra/launcher={launcher}", *LAUNCHERS[launcher])
    out, err = process.communicate(timeout=300)
    folder = only_sweep(tmp_path)
    found = sweep.rows(folder)
    assert [r["state"] for r in found] == ["finished", "finished", "failed", "finished"], err
    assert found[2]["error"] == "died while running" and process.returncode == 1
    assert found[1]["attempt"] >= 2 and found[2]["attempt"] >= 2
    assert "3 finished, 1 failed" in out and "died while running" in out
    assert "the launcher stopped: " in err
    whole = sweep.of(folder)
    assert whole["launcher"] == launcher and whole["ended"] and whole["workers"] >= 1 and whole["again"] >= 1
    for row in (found[0], found[1], found[3]):
        manifest = check(tmp_path / row["directory"])
        assert (manifest["launcher"], manifest["sweep"], manifest["job"]) == (launcher, folder.name, row["job"])
        assert manifest["command"][:3] == ["python", "-m", "harness"] and "-m" not in manifest["command"][3:]
    states = sorted(run["state"] for run in list_runs(tmp_path / "results/runs"))
    assert states == ["finished", "finished", "finished", "killed"]


def test_two_sweeps_at_once_share_the_work(tmp_path):
    """Faults: one fails because the other is at the same run; a run is made twice; records are mixed up."""
    argv = [*TINY, "variants=[exact_recurrent]", "seed=range(3)", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]
    both = [start(tmp_path, *argv) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    folders = list((tmp_path / "results/runs/sweeps").iterdir())
    states = [[row["state"] for row in sweep.rows(folder)] for folder in folders]
    assert len(folders) == 2 and all(sorted(pair) == ["finished", "skipped"] for pair in zip(*states, strict=True))
    assert [run["state"] for run in list_runs(tmp_path / "results/runs")] == ["finished"] * 3


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path):
    """Faults: finished runs are run again or lost; a half-written one passes for finished."""
    argv = [*TINY[:1], "decode.tokens=600", "variants=[exact_recurrent]", "seed=range(4)", "workers=1"]
    process = start(tmp_path, *argv)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        folders = list((tmp_path / "results/runs/sweeps").glob("*"))
        if folders and (read_json(folders[0] / "00001.json") or {}).get("state") == "running":
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = [
        r["directory"] / "manifest.json" for r in list_runs(tmp_path / "results/runs") if r["state"] == "finished"
    ]
    stamps = {path: path.stat().st_mtime_ns for path in finished}
    rows = sweep.rows(only_sweep(tmp_path))
    assert rows[0]["state"] == "finished" and "finished" not in [row["state"] for row in rows[2:]]
    again = start(tmp_path, *argv)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0 and "skipped" in out, err
    after = list_runs(tmp_path / "results/runs")
    assert [run["state"] for run in after] == ["finished"] * 4
    assert finished and {path: path.stat().st_mtime_ns for path in finished} == stamps
    assert not list((tmp_path / "results/runs/drift").glob(".*.partial"))
