"""The summary and its table: failures rank above everything, and JSON has no NaN of its own."""

import io
import json

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from harness.summary import error_text, summarise, table

F, HEADS = 200, 4


def variant(name: str, level: float, growth: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(len(name))
    flush = np.repeat(np.arange(F), HEADS)
    tokens = 10 * (flush + 1)
    served = level * (tokens / tokens.max()) ** growth * np.exp(0.1 * rng.standard_normal(len(flush)))
    keys = {
        "variant": name,
        "slot": 0,
        "head": np.tile(np.arange(HEADS), F),
        "flush": flush,
        "tokens": tokens,
    }
    errors = {"served_fro": served, "kept_fro": served / 2, "o_med": served, "o_max": 3 * served}
    return pd.DataFrame(keys | errors | {"nonfinite_stage": None})


@pytest.fixture
def rows() -> pd.DataFrame:
    """Four variants and the oracle; head 2 of `doubling` fails at flush 150."""
    oracle = variant("oracle", 1.0).assign(cond2=np.linspace(1, 7, F * HEADS), skeel=np.nan)
    oracle[["served_fro", "kept_fro", "o_med", "o_max"]] = np.nan
    sick = variant("doubling", 1e-4)
    at = (sick["flush"] >= 150) & (sick["head"] == 2)
    sick.loc[at, "served_fro"] = np.nan
    sick.loc[at, "nonfinite_stage"] = "inverse"
    parts = [variant("null_arm", 5e-7), variant("chunked_bf16", 1e-2, 0.5), sick, oracle]
    frame = pd.concat([*parts, variant("exact", 0.0)], ignore_index=True)
    frame.attrs["missing"] = {"oracle": ["served_fro", "kept_fro", "o_med", "o_max"]}
    return frame


def test_levels_laws_and_ratios(rows):
    """Fault: a level of the whole run, or of one head, is quoted as the level at the end."""
    found = summarise(rows)["variants"]
    assert list(found) == ["null_arm", "chunked_bf16", "doubling", "exact"]
    bf16 = found["chunked_bf16"]
    assert (bf16["rows"], bf16["flushes"], bf16["nonfinite"]) == (F * HEADS, F, 0)
    assert bf16["end"]["served"]["median"] == pytest.approx(1e-2 * 0.95**0.5, rel=0.03)
    assert bf16["end"]["served"]["max"] > bf16["end"]["served"]["median"]
    assert bf16["end"]["o"]["max"] == pytest.approx(3 * bf16["end"]["served"]["max"])
    assert bf16["law"]["served"]["kind"] == "sqrt"
    assert bf16["ratio"]["served"] == pytest.approx(1e-2 * 0.95**0.5 / 5e-7, rel=0.05)
    assert found["null_arm"]["ratio"]["served"] == 1
    assert found["exact"]["zeros"]["served"] == F * HEADS
    assert found["exact"]["law"]["served"]["kind"] == "exact"


def test_a_failure_is_the_maximum(rows):
    """Fault (H5): NaN is skipped by a maximum, a count or a sort, and the failed variant looks best."""
    sick = summarise(rows)["variants"]["doubling"]
    assert sick["nonfinite"] == 50
    assert sick["first_nonfinite"] == {"tokens": 1510, "slot": 0, "head": 2, "stage": "inverse"}
    assert sick["end"]["served"]["max"] == "nan"
    assert sick["end"]["served"]["median"] == pytest.approx(1e-4, rel=0.1)
    assert sick["worst"]["head"] == 2
    assert sick["law"]["served"]["kind"] == "diverged"


def test_summary_is_strict_json(rows):
    """Fault: NaN or Infinity, which no other JSON reader accepts, are written into summary.json."""
    rows.loc[rows["variant"] == "null_arm", "kept_fro"] = 0.0
    summary = summarise(rows)
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text) == summary
    assert summary["variants"]["chunked_bf16"]["ratio"]["kept"] == "inf"
    assert summary["variants"]["null_arm"]["ratio"]["kept"] == "nan"
    assert summary["oracle"]["cond2"] == {"max": 7.0, "nan": 0}
    assert summary["oracle"]["skeel"] == {"max": "nan", "nan": F * HEADS}


def test_table_fits_a_terminal_worst_first(rows):
    """Fault: the table is cut at 80 columns, or a failed variant is sorted among the good ones."""
    long = rows[rows["variant"] == "null_arm"].assign(variant="a_variant_with_quite_a_long_name")
    console = Console(file=io.StringIO(), width=80)
    console.print(table(summarise(pd.concat([rows, long])), "results/runs/drift/0123456789abcdef"))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    order = [line.split()[0] for line in lines[2:7]]
    assert order[:2] == ["doubling", "chunked_bf16"]
    assert order[-1] == "exact"
    assert "diverged @1.51k" in lines[2]
    assert "√t" in lines[3]
    assert "…" not in "".join(line[19:] for line in lines)
    assert lines[-1] == "results/runs/drift/0123456789abcdef"
    assert any("50 of 800 rows not finite" in line for line in lines)


def test_the_bound_of_the_oracle_is_its_largest(rows):
    """Fault: a certificate quoted where it is best, a NaN or an infinity passed over, one made up."""

    def printed(summary: dict) -> str:
        console = Console(file=io.StringIO(), width=80)
        console.print(table(summary))
        return console.file.getvalue()

    summary = summarise(rows)
    assert summary["oracle_bound"] is None and "certified" not in printed(summary)
    mine = rows["variant"] == "oracle"
    rows["oracle_bound"] = np.where(mine, 1e-12, np.nan)
    at = rows.index[mine][37]
    for value, text in ((3.21e-10, "3.2e-10"), (np.inf, "inf"), (np.nan, "nan")):
        rows.loc[at, "oracle_bound"] = value
        summary = summarise(rows)
        assert float(summary["oracle_bound"]["max"]) == pytest.approx(value, nan_ok=True)
        assert (summary["oracle_bound"]["head"], summary["oracle_bound"]["tokens"]) == (1, 100)
        assert f"within {text} of the exact state" in " ".join(printed(summary).split())


def test_error_text():
    """Fault: an exact zero, an absent metric and a failure look alike."""
    texts = [error_text(x) for x in (1.23e-7, 0.0, float("nan"), float("inf"), float("-inf"))]
    assert texts == ["1.2e-07", "0", "nan", "inf", "–"]
