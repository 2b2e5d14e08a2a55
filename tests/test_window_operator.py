"""The experiment on window operators: numbers against independent ones, refusals, and a whole small run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from harness import cli, closed_runs
from harness import operator_summary as summary
from harness.arithmetic import Arithmetic, Dot, Dots, Rounding, Sites
from harness.conditioning import window_operator
from harness.config import Config, ModelConfig, validate
from harness.errors import ConfigError
from harness.operator_config import OperatorConfig
from harness.tokens import Shape, Tokens
from harness.window import Windows

F64 = torch.float64


def nearest(form: str) -> Arithmetic:
    """Operands of products inside the inverse rounded to nearest, sums and results in fp32."""
    dot = Dot(Rounding(form), Rounding(form), Rounding("fp32"))
    return Arithmetic(Sites(inverse=Rounding("fp32")), Dots(inverse=dot))


ROUNDED = {
    "exact": Arithmetic(),
    "tf32, nearest": nearest("tf32"),
    "bf16, nearest": nearest("bf16"),
    "tf32": Arithmetic(Sites(inverse=Rounding("fp32")), Dots(inverse=Dot.parse("inverse", "tf32"))),
}
# cosine, window, inverse, arithmetic, radius: one draw of keys each, beta .95, g -1e-3, d 128
PUBLISHED = [
    (0.3, 8, "neumann/1", "exact", "1.08"),
    (0.3, 8, "neumann/2", "exact", ".99"),
    (0.3, 16, "neumann/1", "exact", "6.6"),
    (0.3, 16, "neumann/2", "exact", "8.1"),
    (0.3, 16, "neumann/3", "exact", "5.5"),
    (0.6, 8, "neumann/1", "exact", "5.4"),
    (0.6, 8, "neumann/2", "exact", "5.3"),
    (0.6, 8, "neumann/3", "exact", "1.7"),
    (0.6, 16, "neumann/1", "exact", "30"),
    (0.6, 16, "neumann/2", "exact", "69"),
    (0.6, 16, "neumann/3", "exact", "108"),
    (0.9, 4, "neumann/1", "exact", "1.6"),
    (0.9, 4, "neumann/2", "exact", ".996"),
    (0.9, 8, "neumann/1", "exact", "15"),
    (0.9, 8, "neumann/2", "exact", "20"),
    (0.9, 8, "neumann/3", "exact", "17"),
    (0.9, 16, "neumann/1", "exact", "74"),
    (0.9, 16, "neumann/2", "exact", "272"),
    (0.9, 16, "neumann/3", "exact", "691"),
    (0.9, 16, "doubling", "tf32, nearest", ".984"),
    (0.9, 16, "doubling", "bf16, nearest", "3.1"),
    (0.99, 8, "neumann/1", "exact", "18"),
    (0.99, 8, "neumann/2", "exact", "28"),
    (0.99, 8, "neumann/3", "exact", "26"),
    (0.99, 16, "neumann/1", "exact", "91"),
    (0.99, 16, "neumann/2", "exact", "368"),
    (0.99, 16, "neumann/3", "exact", "1040"),
    (0.99, 16, "doubling", "tf32, nearest", "1.06"),
    (0.99, 16, "doubling", "bf16, nearest", ".98"),
]


def drawn(cosine: float, m: int, count: int = 32) -> Windows:
    """`count` windows of Gaussian keys with pairwise cosine about `cosine`."""
    gen = torch.Generator().manual_seed(0)
    common, noise = (torch.randn(count, n, 1, 128, dtype=F64, generator=gen) for n in (1, m))
    k = (math.sqrt(cosine) * common + math.sqrt(1 - cosine) * noise)[None]
    zero = torch.zeros(1, count, m, 1, dtype=F64)
    tokens = Tokens(k, k, zero[..., None], zero - 1e-3, zero + 0.95)
    return Windows(tokens, np.full((1, count), m), Shape(1, 1, 1, 128))


@pytest.mark.parametrize(("cosine", "m", "inverse", "arithmetic", "value"), PUBLISHED, ids=str)
def test_radii_of_an_independent_probe(cosine: float, m: int, inverse: str, arithmetic: str, value: str) -> None:
    """Faults: T for its transpose, a decay to the wrong end, beta left out. The values come from another program with
    keys of its own: each must lie among those of 32 draws, to half a unit of the last digit printed."""
    radius = window_operator(drawn(cosine, m), ROUNDED[arithmetic], inverse)[1]
    half = 0.5 * 10.0 ** -len(value.partition(".")[2]) * (10 if value in ("1040",) else 1)
    # e^{G_m} is the least a radius can be, and is printed with its own rounding
    assert radius.min() - half <= float(value) <= radius.max() + half


def test_hardware_that_truncates_expands_where_nearest_does_not() -> None:
    """Fault: a tf32 product emulated as textbooks have it. At cosine .9 and 16 tokens doubling then seems safe."""
    nearest, truncated = (window_operator(drawn(0.9, 16), ROUNDED[a], "doubling")[1] for a in ("tf32, nearest", "tf32"))
    assert nearest.median() < 1 < truncated.min()


def small(**keys: Any) -> Config:
    """One point of closed runs."""
    keys = {"windows": [8], "cosines": [1.0], "gates": ["0.95/-0.001"], "formats": ["fp32/ieee"], "heads": 1} | keys
    return Config(operator=OperatorConfig(inverses=keys.pop("inverses"), tokens=keys.pop("tokens", 1024), **keys))


def frame(config: Config) -> pd.DataFrame:
    with torch.inference_mode():
        return pd.DataFrame([row for w in config.operator.windows for row in closed_runs.runs(config, w)])


def test_identical_windows_grow_by_their_radius() -> None:
    """Faults: a decode whose inverse is not the operator's, a window folded twice, a rate over the wrong windows."""
    rows = frame(small(inverses=["neumann/1", "neumann/2", "substitution"]))
    half = int(rows["count"].iloc[0]) // 2
    for _, row in rows.iterrows():
        # one operator throughout: the square root of a singular Gram matrix costs half the digits
        assert abs(row["joint"] - math.log(row["radius"])) <= 1e-6
        if row["inverse"] == "substitution":
            assert not row["diverged"] and row["error"] < 1e-6
            continue
        # ||S|| under the error varies less than twofold, and a slope over n points of something within c by 3c/n
        assert row["diverged"] and abs(row["growth"] - row["joint"]) <= 3 * math.log(2) / half


def test_the_radius_of_single_windows_can_miss_a_divergence() -> None:
    """Fault: a radius below 1 in every window taken for a proof. Keys vary here, and only the product grows."""
    point = {"cosines": [0.6], "gates": ["0.95/-0.1"], "tokens": 2048}
    (row,) = frame(small(inverses=["neumann/3"], **point)).to_dict("records")
    assert row["radius_max"] < 1 < row["norm_max"]
    assert row["joint"] > 0.1 and row["diverged"]
    # the product of 256 windows from two other rows of numbers; 3 c / n as above
    assert abs(row["growth"] - row["joint"]) <= 3 * math.log(2) / 128


def test_a_t_that_is_not_finite_counts_as_diverged() -> None:
    """Fault: NaN compared with 1, which is false, and reported as a contraction."""
    rows = frame(small(windows=[32], inverses=["doubling"], formats=["fp16/fp16"]))
    assert np.isnan(rows["radius"]).all() and rows["diverged"].all() and (rows["first_nonfinite"] == 0).all()
    found = {(row["by"], row["keys"]): row for row in summary.agreement(rows)}
    assert found["radius, median", "identical"]["both"] == 1


def test_a_rate_by_hand() -> None:
    """Faults: the first half taken along, what lies behind an overflow, zeros of an exact run read as a decay."""
    line = np.r_[np.zeros(10), 0.5 * np.arange(10)]
    assert abs(closed_runs.rate(line, math.inf) - 0.5) < 1e-12
    assert abs(closed_runs.rate(np.r_[line, 600.0, np.nan], 500.0) - 0.5) < 1e-12
    assert math.isnan(closed_runs.rate(np.r_[0.0, np.nan, np.zeros(9)], math.inf))
    assert closed_runs.rate(np.full(16, -np.inf), math.inf) == 0


def test_agreement_by_hand() -> None:
    """Faults: a cell of the table counted twice or under another name."""
    columns = "cosine radius radius_max norm_max joint resolved diverged".split()
    rows = [
        (0.5, 2.0, 2.0, 2.0, 0.7, 0.1, True),
        (0.5, 0.9, 0.9, 0.9, -0.1, 0.1, False),
        (0.5, 2.0, 2.0, 2.0, 0.7, 0.1, False),
        (0.5, 0.9, 0.9, 0.9, -0.1, 0.1, True),
        (0.5, 1.01, 1.01, 1.01, 0.01, 0.1, False),
        (1.0, math.nan, math.nan, math.nan, math.nan, 0.1, True),
    ]
    for row in summary.agreement(pd.DataFrame(rows, columns=columns)):
        want = [1, 1, 1, 1, 1] if row["keys"] == "varying" else [1, 0, 0, 0, 0]
        assert [row[name] for name in ("both", "neither", "predicted only", "diverged only", "near")] == want


def test_a_safe_window_ends_before_the_first_that_is_not() -> None:
    """Fault: the largest good window reported, beyond one that diverged."""
    assert summary.widest(pd.Series({2: True, 4: True, 8: False, 16: True})) == 4
    assert summary.widest(pd.Series({2: False, 4: True})) == 1


REFUSED: dict[str, Callable[[OperatorConfig], OperatorConfig]] = {
    "operator.windows: 1": lambda o: replace(o, windows=[1]),
    "operator.cosines: 1.5": lambda o: replace(o, cosines=[1.5]),
    "operator.gates: '0.95'": lambda o: replace(o, gates=["0.95"]),
    "operator.gates: '0.95/0.1'": lambda o: replace(o, gates=["0.95/0.1"]),
    "operator.formats: empty": lambda o: replace(o, formats=[]),
    "operator.rings: one appears twice": lambda o: replace(o, rings=[4, 4]),
    "operator.perturbation: -1": lambda o: replace(o, perturbation=-1.0),
    "operator.tokens: 100": lambda o: replace(o, tokens=100),
    "operator.inverses: 'rhs_solve'": lambda o: replace(o, inverses=["rhs_solve"]),
    "operator.inverses: 'newman'": lambda o: replace(o, inverses=["newman"]),
    "operator.formats: 'fp12/ieee'": lambda o: replace(o, formats=["fp12/ieee"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_swept_is_refused(message: str) -> None:
    """Fault: a value out of range that fails in the middle of a run, or is passed over."""
    config = Config(operator=REFUSED[message](OperatorConfig()))
    said = ""
    try:
        validate(config)
        closed_runs.designs(config, 8)
    except ConfigError as refusal:
        said = str(refusal)
    assert said.startswith(message)


SMALL = (
    "experiment=window_operator",
    "model=tiny",
    "operator.windows=[2,4]",
    "operator.cosines=[0,1]",
    "operator.gates=[0.95/-0.001]",
    "operator.inverses=[substitution,neumann/1]",
    "operator.formats=[fp32/ieee]",
    "operator.tokens=64",
    "operator.rings=[4]",
    "workers=1",
)


def test_a_run_is_complete_and_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults: a file left out, a table that a terminal of 80 columns breaks, a finished run done again."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(SMALL)) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-2])) <= 80 and "neumann/1" in out
    (directory,) = (p for p in (tmp_path / "results/runs/window_operator").iterdir() if p.is_dir())
    written = {"config.yaml", "manifest.json", "summary.json", "operator.png"}
    assert {p.name for p in directory.iterdir()} == written | {f"{t}.parquet" for t in ("closed", "injected", "folds")}
    closed = pd.read_parquet(directory / "closed.parquet")
    # windows, cosines, inverses, heads
    assert len(closed) == 2 * 2 * 2 * 2
    assert cli.main(list(SMALL)) == 0 and capsys.readouterr().out.startswith("already done")


def test_processes_find_what_one_finds() -> None:
    """Faults: rows in the order of who was first, a draw that depends on the process."""
    from harness.experiments.window_operator import frames

    config = small(windows=[2, 4], inverses=["neumann/1"], tokens=64, rings=[4])
    config.variants, config.model = ["chunked_fp32"], ModelConfig(key_heads=1, value_heads=1, key_dim=8, value_dim=4)
    one, two = (frames(replace(config, workers=n)) for n in (1, 2))
    for name, rows in one.items():
        pd.testing.assert_frame_equal(rows, two[name])
