"""experiment=oracle: what is compared with what, and what an error above its bound does to the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config import Config, DecodeConfig, ModelConfig
from harness.errors import ConfigError, HarnessError
from harness.experiments import oracle
from harness.provenance import read_json
from harness.reference import certificate


def config(folder: Path, **decode: Any) -> Config:
    keys = {"tokens": 90, "slots": 2, "ragged": True} | decode
    model = ModelConfig(name="tiny", key_heads=2, value_heads=4, key_dim=8, value_dim=6, rows=2)
    return Config(experiment="oracle", model=model, decode=DecodeConfig(**keys), results_dir=str(folder), device="cpu")


def test_every_slot_and_head_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults: a state that the next block writes over, one head compared under the names of all, a slot's or a head's
    states compared with another's, a state with another token count's, a table that no terminal shows. Wrong pairs
    differ by their own size, right ones by the 1e-14 of fp64."""
    monkeypatch.setattr(oracle, "block_steps", lambda *_: 5)
    outcome = oracle.run(config(tmp_path))
    found = read_json(Path(outcome["directory"]) / "oracle.json")
    assert found is not None and found["settings"]["slots"] == 2
    rows = found["rows"]
    assert {(r["slot"], r["head"]) for r in rows} == {(s, h) for s in range(2) for h in range(4)}
    # gates are drawn per slot and head
    assert len({r["memory"] for r in rows}) == 8
    for r in rows:
        assert r["error"] <= r["bound"] and r["error"] < 1e-14 and r["output"] < 1e-13
    assert max(r["error"] for r in rows) > 1e-17 and len({r["tokens"] for r in rows if r["slot"] == 0}) > 5
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80 and "bound/error" in lines[0]
    assert oracle.run(config(tmp_path))["state"] == "skipped"


def test_an_error_above_its_bound_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a refuted certificate that is a line in a file and an exit status of 0. The numbers stay to be read."""
    monkeypatch.setattr(certificate, "U", 2.0**-80)
    with pytest.raises(HarnessError, match=r"^oracle: \d+ errors above their bounds, first slot 0, head 0 after"):
        oracle.run(config(tmp_path))
    assert len(json.loads(next(tmp_path.glob("oracle/*/oracle.json")).read_text())["rows"]) > 0


def test_a_faulty_oracle_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a comparison that a wrong oracle passes, here one whose keys are off by a part in 10^12."""
    from harness import window

    right = window.normalise
    monkeypatch.setattr(window, "normalise", lambda x, c: right(x, c) * (1 + 1e-12))
    with pytest.raises(HarnessError, match=r"^oracle: "):
        oracle.run(config(tmp_path))


def test_what_it_cannot_run_is_refused(tmp_path: Path) -> None:
    """Faults: a prefill that the exact decode does not see; a table without a row. Nothing is left behind."""
    with pytest.raises(ConfigError, match=r"^decode\.prefill: 64"):
        oracle.run(config(tmp_path, prefill=64))
    with pytest.raises(HarnessError, match=r"^decode\.tokens: 5 tokens end"):
        oracle.run(config(tmp_path, tokens=5))
    assert not list(tmp_path.glob("oracle/*/"))
