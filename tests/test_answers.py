"""Answers of the notebooks say what the data say: the same functions, fed the opposite, say the opposite."""

import numpy as np
import pandas as pd
import pytest
import tables

from harness import answers
from harness.errors import HarnessError
from harness.memory import heads
from harness.worst import designs


def sentence(answer: answers.Answer, start: str) -> str:
    """The sentence of an answer that begins so, without its full stop."""
    text = answer.text.rpartition("\n\n")[2]
    (found,) = [x for x in text.rstrip(".").split(". ") if x.startswith(start)]
    return found


def drifting(short: float, long: float, law: str = "sat. τ=9") -> pd.DataFrame:
    """Levels of one design that ends at `short` with a ring of 16 and at `long` with one of 64, and of a steady one."""
    rows = []
    for length, error in ((64, long), (16, short)):
        for variant, own, text in (("exact_fold", 1e-6, "none"), ("chunked_bf16", error, law)):
            run = {
                "ring.length": length,
                "decode.family": "loop24",
                "precision.name": "own",
                "variant": variant,
                "kept_law": text,
            }
            rows += [run | {"decode.seed": seed, "kept_max": own / (1 + seed)} for seed in (0, 1)]
    return pd.DataFrame(rows)


BF16 = "on loop24, chunked_bf16 with own"


@pytest.mark.parametrize(
    ("short", "long", "lowers", "raises", "lost"),
    [
        (0.5, 0.05, f"{BF16} (up to 10 times)", "none", "none"),
        (0.05, 0.5, "none", f"{BF16} (up to 10 times)", "none"),
        (0.5, 0.4, "none", "none", "none"),
        (0.5, 0.0, f"{BF16} (up to inf times)", "none", "none"),
        (0.5, np.nan, "none", "none", BF16),
        (np.inf, 0.5, "none", "none", BF16),
    ],
)
def test_a_longer_ring_does_what_the_levels_say(short, long, lowers, raises, lost):
    """Faults: a typed outcome, rings compared in the order of the file, a failure counted as no change."""
    answer = answers.drift(drifting(short, long))
    assert sentence(answer, "A longer").partition(": ")[2] == lowers
    assert sentence(answer, "It raises").partition(": ")[2] == raises
    assert sentence(answer, "Not finite").partition(": ")[2] == lost


def test_an_input_that_fails_hides_no_other():
    """Faults: one input whose error is NaN makes every cell NaN, or is dropped without a word."""
    both = pd.concat([drifting(0.5, 0.05), drifting(np.nan, np.nan).assign(**{"decode.family": "resets"})])
    answer = answers.drift(both)
    assert "| chunked_bf16 | 0.5 → 0.05 * |" in answer.text and "*: not finite on some input" in answer.text
    assert sentence(answer, "Not finite") == "Not finite: on resets, chunked_bf16 with own"
    assert "| chunked_bf16 | not finite |" in answers.drift(drifting(np.nan, np.nan)).text


def test_a_law_without_a_level_is_named():
    """Faults: a growing design left out, one that has saturated or falls accused, runs miscounted."""
    grows = f"{BF16} (up to 4 runs)"
    for law, found in (("√t", grows), ("diverged @9", grows), ("sat. τ=2k", "none"), ("t^-0", "none")):
        assert sentence(answers.drift(drifting(1, 1, law)), "Still growing").partition(": ")[2] == found


def test_like_findings_are_told_together():
    """Fault: sixty pairs that behave alike make a sentence of sixty names, or one of them is lost in it."""
    one, other = drifting(0.5, 0.05), drifting(0.5, 0.05).assign(**{"precision.name": "bf16"})
    third = other.replace({"variant": {"chunked_bf16": "mine"}})
    fourth = other.replace({"variant": {"chunked_bf16": "yours"}})
    said = sentence(answers.drift(pd.concat([one, other, third, fourth])), "A longer").partition(": ")[2]
    assert said == "on loop24, chunked_bf16 with own/bf16, mine/yours with bf16 (up to 10 times)"


def inverses(errors: dict[str, float]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One input, windows 2 and 4: method -> error of T in units of n u at the window of 4."""
    u = 2.0**-24
    known = {"input": "x", "in_domain": True, "power": 1.0, "power_max": 1.0, "skeel_max": 1.0, "bound_max": 0.9}
    known |= {"coherence": 0.9, "structural_max": -0.1}
    base = {"input": "x", "format": "fp32/ieee", "u": u, "error_D_max": 0.0, "nonfinite": 0, "stage": None}
    rows = []
    for method, error in errors.items():
        for window in (2, 4):
            e = (error if window == 4 else 0.5) * window * u
            units = {"error_T": e, "error_T_max": e, "per_power": e / u, "per_power_max": e / u}
            rows.append(base | units | {"method": method, "window": window})
    return pd.DataFrame([known | {"window": w} for w in (2, 4)]), pd.DataFrame(rows)


def test_an_unsafe_inverse_is_no_safe_one():
    """Fault: substitution is called safe, and its prediction held, whatever the points say."""
    good = answers.conditioning(*inverses({"substitution": 0.5, "doubling": 100.0}))
    bad = answers.conditioning(*inverses({"substitution": 100.0, "doubling": 0.5}))
    for answer, safe, lost in ((good, "substitution", "doubling (2)"), (bad, "doubling", "substitution (2)")):
        assert sentence(answer, "Safe up to 4") == f"Safe up to 4 in every format and for any beta: {safe}"
        assert sentence(answer, "Not so").endswith(f": {lost}")
    for answer, holds, fails in (
        (good, "P1 substitution, fp32", ""),
        (bad, "", "P1 substitution, fp32: error / n u <= 4 (worst 100, substitution in fp32/ieee)"),
    ):
        held, failed = sentence(answer, "Predictions"), sentence(answer, "That fail")
        assert ("P1" in held, "P1" in failed) == (bool(holds), bool(fails)) and holds in held and fails in failed


@pytest.mark.parametrize(
    ("parts", "whole", "explained", "missed", "single"),
    [
        ({"step": 1.0, "gate": 0.1}, 1.0, "a", "none", "a (step)"),
        ({"step": 1.0, "gate": 1.0}, 5.0, "none", "a (+92%)", "none"),
        ({"step": 0.1, "gate": 1.0}, 0.5, "none", "a (-304%)", "a (gate)"),
        ({"step": np.nan, "gate": 1.0}, 1.0, "none", "a (not finite)", "none"),
    ],
)
def test_a_budget_that_does_not_add_up_is_named(parts, whole, explained, missed, single):
    """Faults: a residual of the wrong sign passed, a NaN that explains all, the largest site typed."""
    answer = answers.error_budget(tables.budget_levels({"a": parts}, {"a": whole}))
    assert f"within 20% in {explained}, and miss it by more in {missed}. " in answer.text
    assert answer.text.endswith(f"in {single}.")


def test_the_front_is_read_from_the_points():
    """Faults: ends of the front swapped, a variant on it called absent, failures not counted."""
    answer = answers.front(
        tables.cost_levels(("cheap", 1, 1e-2), ("exact", 2, 1e-6), ("bad", 3, 1e-3), ("bad", 4, np.nan))
    )
    said = "From its cheap end, cheap, to its exact end, exact, the error falls from 0.01 to 1.0e-06"
    assert f"{said} for 2 times the bytes. Never on it: bad." in answer.text
    assert answer.text.endswith("Errors that are not finite: 1.")
    turned = answers.front(tables.cost_levels(("cheap", 1, 1e-6), ("exact", 2, 1e-2), ("bad", 3, np.nan)))
    assert turned.text.startswith("1 of 3 points") and "Never on it: exact, bad." in turned.text
    assert answers.front(tables.cost_levels(("a", 1, np.nan))).text.startswith("No point has a finite")


def decayed(error: float, memory: float = 10.0) -> pd.DataFrame:
    """Rows of two runs x and y of one head: x ends at 1e-3, y at `error` with that memory."""
    parts = []
    for run, end, tokens in (("x", 1e-3, 10.0), ("y", error, memory)):
        flush = np.arange(20)
        part = pd.DataFrame({"run": run, "slot": 0, "head": 0, "flush": flush, "tokens": 10 * (flush + 1)})
        gates = part.assign(variant="oracle", interval_gate_span=10 / tokens, kept_fro=np.nan)
        # what comes before the last tenth must not count
        mine = part.assign(variant="a", interval_gate_span=np.nan, kept_fro=np.where(flush < 17, 7.0, end))
        parts += [gates, mine]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    ("error", "memory", "everywhere", "alike"),
    [
        (2e-3, 10, "none", "none"),
        (0.5, 10, "a (1.0e-03, 0.5)", "a (1.0e-03, 0.5)"),
        (0.5, 1000, "a (1.0e-03, 0.5)", "none"),
        (np.nan, 10, "a (1.0e-03, nan)", "a (1.0e-03, nan)"),
    ],
)
def test_a_run_that_drifts_is_told_from_one_that_remembers(error, memory, everywhere, alike):
    """Faults: NaN taken for no difference, a longer memory taken for another text, `10 times` typed."""
    answer = answers.gates(heads(decayed(error, memory), by="run"), "run")
    count = int(memory == 10)
    said = (
        f"that with x in {everywhere}. Among its {count} heads whose memory is within the longest of x, so in {alike}."
    )
    assert answer.text.endswith(said)


def test_memory_is_tokens_over_the_sum_of_gates():
    """Faults: memory per flush instead of per token, the start of a run taken for its end, no decay taken for none."""
    (row,) = heads(decayed(1e-3).query("run == 'x'"))[["memory", "decay", "kept_fro"]].to_numpy().tolist()
    # 20 flushes of 10 tokens with a sum of 1 each
    assert row == [10.0, 0.1, 1e-3]
    still = decayed(1e-3).assign(interval_gate_span=0.0)
    assert np.isinf(heads(still, by="run")["memory"]).all()
    with pytest.raises(HarnessError, match="interval_gate_span: head 0 has no oracle row"):
        heads(decayed(1e-3).query("variant == 'a'"), by="run")


def test_a_design_is_as_good_as_its_worst_input():
    """Faults: a failed seed skipped by a maximum, rings pooled, a design whose cost is unknown dropped."""
    seeds = [
        tables.cost_levels(("a", 1, y), ("b", np.nan, 1.0)).assign(**{"decode.seed": s, "decode.family": f})
        for s, f, y in ((0, "silu", 1e-3), (1, "silu", np.nan), (0, "loop24", 1e-2))
    ]
    other = tables.cost_levels(("a", 1, 5.0)).assign(**{"ring.length": 32, "decode.seed": 0, "decode.family": "silu"})
    # a key that one group of a configuration does not have is null
    found = designs(pd.concat([*seeds, other]).assign(**{"ring.flush_at": np.nan}))
    assert found[["variant", "ring.length", "runs"]].to_numpy().tolist() == [["a", 16, 3], ["b", 16, 3], ["a", 32, 1]]
    np.testing.assert_array_equal(found["kept_max"], [np.nan, 1.0, 5.0])
    np.testing.assert_array_equal(found["bytes_token"], [1, np.nan, 1])
