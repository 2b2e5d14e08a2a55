"""A search from the command line: a number for every trial, none run twice, nothing printed but the harness's lines."""

import json
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_experiment import BUG, seen
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from harness import app, cli, experiments
from harness.config import Config
from harness.errors import HarnessError
from harness.groups import config_dir, options
from harness.sweeps import study, sweep
from harness.sweeps.objective import OVER, WORST

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
TINY = ("model=tiny", "decode.tokens=256", "decode.family=loop24", "workers=1")


@pytest.fixture
def search(monkeypatch, tmp_path, capsys):
    """search(*argv) -> (exit status, stderr, table of the trials) of a real study in an empty directory."""
    monkeypatch.chdir(tmp_path)
    known: set[Path] = set()

    def call(*argv: str) -> tuple[int, str, pd.DataFrame]:
        status = cli.main(["-m", "sweep=least_error", *TINY, *argv])
        (folder,) = set(tmp_path.glob("results/runs/sweeps/*")) - known
        known.add(folder)
        return status, capsys.readouterr().err, study.trials(folder)

    return call


def test_a_study_learns_from_every_trial_and_a_new_budget_runs_none_again(search, tmp_path):
    """Fault: a list or a colon lost between Optuna and Hydra; a budget that changes the hash; Optuna's own lines."""
    status, err, first = search("hydra.sweeper.n_trials=4", "objective.bytes_token=15000")
    assert status == 0 and first["state"].tolist() == ["finished"] * 4 and first.attrs["metric"] == "kept max"
    assert err == ""
    assert first["variants"].str.fullmatch(r"\[\w+\]").all() and set(first["ring.length"]) <= {16, 32, 64}
    assert first["precision.sites.checkpoint"].isin(["fp32", "fp16", "bf16", "bf16:stochastic"]).all()
    assert first.attrs["fixed"]["model"] == "tiny" and "model" not in first
    # the budget splits these four; NaN in either column would fail both
    inside = first["bytes_token"] <= 15000
    assert inside.any() and not inside.all() and (first["feasible"] == inside).all()
    assert (first["value"] == first["error"]).tolist() == inside.tolist() and (first["value"][~inside] > OVER).all()
    # Optuna knows the values, or it would have no best one
    (told,) = tmp_path.glob("results/runs/sweeps/*/optimization_results.yaml")
    best = study.best(first)
    assert best is not None and best["value"] == first["value"].min() == OmegaConf.load(told).best_value
    _, _, again = search("hydra.sweeper.n_trials=4", "objective.bytes_token=30000")
    assert again["state"].tolist() == ["skipped"] * 4 and again["run"].tolist() == first["run"].tolist()
    assert again["feasible"].all() and again["error"].tolist() == first["error"].tolist()


@pytest.fixture
def faked(monkeypatch, tmp_path, capsys):
    """faked(errors by tokens) -> the table of a search over them, whose runs are summaries alone."""
    from harness.designs import designs
    from harness.experiments.drift import formats_of
    from harness.provenance import plain

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(experiments.EXPERIMENTS, "drift", "test_search:made")

    def call(table: dict[int, float], *argv: str) -> tuple[int, pd.DataFrame, str]:
        def run(config: Config) -> dict[str, str]:
            tokens = config.decode.tokens
            if tokens == BUG:
                raise ZeroDivisionError("planted bug")
            where = Path("runs") / str(tokens)
            where.mkdir(parents=True, exist_ok=True)
            entries = {d.spec.name: formats_of(d, "cpu") for d in designs(config)}
            (where / "manifest.json").write_text(json.dumps(plain({"config": config, "variants": entries})))
            ends = {name: {"end": {"kept": {"median": 0, "max": table[tokens]}}} for name in entries}
            (where / "summary.json").write_text(json.dumps(plain({"variants": ends})))
            return {"state": "finished", "directory": str(where)}

        monkeypatch.setitem(globals(), "made", run)
        choice = f"decode.tokens=choice({','.join(map(str, table))})"
        optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0")
        status = cli.main(["-m", *optuna, "variants=[exact_fold]", choice, *argv])
        (folder,) = tmp_path.glob("results/runs/sweeps/*")
        return status, study.trials(folder), capsys.readouterr().err

    return call


def test_an_error_that_is_not_finite_does_not_stop_a_study(faked):
    """Fault: NaN told to Optuna, which raises; or a diverging design that wins."""
    status, found, _ = faked({7: np.nan, 8: np.inf, 9: 0.5}, "hydra.sweeper.n_trials=8")
    assert status == 0 and len(found) == 8 and set(found["decode.tokens"]) == {7, 8, 9}
    bad = found["decode.tokens"] != 9
    assert (found["value"][bad] == WORST).all() and (found["value"][~bad] == 0.5).all()
    assert (found["feasible"] == ~bad).all() and found["note"][bad].str.startswith("error is ").all()
    assert found["error"][found["decode.tokens"] == 8].eq(np.inf).all()


def test_a_job_that_fails_is_a_failed_trial_and_the_study_goes_on(faked, caplog):
    """Fault: one refused design ends a night's search, or counts as a good one, or is told of twice."""
    status, found, err = faked(
        {BUG: 0.0, 8: 0.25, 9: 0.5}, "hydra.sweeper.n_trials=8", "hydra.sweeper.max_failure_rate=1.0"
    )
    failed = found["decode.tokens"] == BUG
    assert status == 1 and len(found) == 8 and failed.any() and not failed.all()
    assert (found["state"] == "failed").tolist() == failed.tolist() and found["value"][failed].isna().all()
    assert set(found["note"][failed]) == {"ZeroDivisionError: planted bug"}
    assert set(found["decode.tokens"]) == {BUG, 8, 9} and study.best(found)["decode.tokens"] == 8
    assert err == "" and not caplog.records


def test_a_search_stops_where_too_many_trials_fail(faked):
    """Fault: hydra.sweeper.max_failure_rate without effect, as no failure reaches the sweeper."""
    status, found, err = faked({BUG: 0.0, 9: 0.5}, "hydra.sweeper.n_trials=8", "hydra.sweeper.max_failure_rate=0.0")
    assert status == 1 and len(found) < 8 and found["state"].tolist()[-1] == "failed"
    assert err == "harness: the sweep stopped: ZeroDivisionError: planted bug\n"


def test_a_search_is_counted_before_it_runs(command):
    """Fault: a search whose length is given cannot be checked for it."""
    small = ["-m", "sweep=least_error", "hydra.sweeper.n_trials=5", "--plan"]
    assert command(*small, "--expect", "5")[0] == 0
    status, _, err = command(*small, "--expect", "6")
    assert status == 2 and "--expect: 6 jobs expected, the command makes 5 jobs chosen by optuna" in err
    for key in ("n_trials", "n_jobs"):
        status, _, err = command("-m", "sweep=least_error", f"hydra.sweeper.{key}=0")
        assert (status, err) == (2, f"harness: error: hydra.sweeper.{key}: 0 is not an integer above 0\n")
    assert not seen


def test_a_search_without_m_is_refused(command):
    """Fault: the defaults are run once and taken for the result of a search."""
    status, _, err = command("sweep=least_error")
    assert (status, err) == (2, "harness: error: sweep: least_error needs -m\n") and not seen


@pytest.mark.parametrize(
    ("argument", "group", "name", "extra"),
    [
        ("hydra/sweeper=optuna", "sweeper", "optuna", "optuna"),
        ("sweep=least_error", "sweeper", "optuna", "optuna"),
        ("hydra/launcher=joblib", "launcher", "joblib", "joblib"),
        ("hydra/launcher=submitit_local", "launcher", "submitit_local", "submitit"),
        ("hydra/launcher=submitit_slurm", "launcher", "submitit_slurm", "submitit"),
        ("hydra/launcher=ray", "launcher", "ray", "ray"),
    ],
)
def test_an_absent_plug_in_is_named_with_what_installs_it(command, monkeypatch, argument, group, name, extra):
    """Fault: a list of what there is, without a word on how to get the rest."""
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"][group], f"{name}.yaml", raising=False)
    status, _, err = command("-m", argument)
    line = f"harness: error: hydra/{group}: no option '{name}'; pip install 'replayssm-harness[{extra}]'\n"
    assert (status, err) == (2, line) and not seen


@pytest.mark.parametrize("name", options("sweep"))
def test_every_study_varies_keys_that_exist(name):
    """Fault: a misspelt site in a space, found after the first trial."""
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        cfg = hydra.compose("config", overrides=[f"sweep={name}"], return_hydra_config=True)
        space = [f"{key}={value}" for key, value in cfg.hydra.sweeper.params.items()]
        parsed = OverridesParser.create().parse_overrides(space)
        values = [o.sweep_string_iterator() if o.is_sweep_override() else [o.value()] for o in parsed]
        choices = [[f"{o.key_or_group}={x}" for x in some] for o, some in zip(parsed, values, strict=True)]
        # each choice once, several keys at a time
        for some in zip_longest(*choices):
            app.checked(hydra.compose("config", overrides=[f"sweep={name}", *filter(None, some)]))
    assert OmegaConf.to_container(cfg.hydra.sweeper).get("sampler", {"seed": 0})["seed"] == 0


def test_a_sweep_that_minimised_nothing_is_no_study(tmp_path):
    """Fault: a table without values, which a plot then shows as empty."""
    with pytest.raises(HarnessError, match=r"no sweep\.json"):
        study.trials(tmp_path)
    with sweep.opened(tmp_path, {}, [[]]) as folder:
        sweep.recorded(folder, 0, [], lambda: {"state": "finished"})
    with pytest.raises(HarnessError, match="no job has an objective"):
        study.trials(folder)
