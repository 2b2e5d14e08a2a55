"""The run itself: which rows there are, what they say, and what they may not depend on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import decode, design, recurrence, windows

from harness import conditioning, metrics, pool
from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig, PrecisionConfig, RingConfig
from harness.decode import Stream
from harness.metrics import state_errors
from harness.runner import Runner, block_steps
from harness.tokens import Shape

TINY = ModelConfig("tiny", key_heads=2, value_heads=6, key_dim=24, value_dim=40, rows=None)
SHAPE = Shape(2, 6, 40, 24)
EXACT = PrecisionConfig(base="exact")
CYCLE = AcceptanceConfig("fixed", sequence=[1, 2, 3, 4])
ERRORS = ("served_fro", "served_max", "kept_fro", "kept_max", "o_med", "o_max", "d_med", "d_max")
Table = dict[str, dict[str, np.ndarray]]


def config(*, tokens: int = 120, variants: Any = None, **keys: Any) -> Config:
    """Keys of `decode` and of the run, by name."""
    decode = {key: keys.pop(key) for key in list(keys) if hasattr(DecodeConfig, key)}
    variants = list(variants or Config().variants)
    return Config(model=TINY, decode=DecodeConfig(tokens=tokens, **decode), variants=variants, **keys)


def table(run: Config, **how: Any) -> Table:
    """All rows of a run, variant -> column -> [rows], ordered by slot, flush and head."""
    parts: Any = defaultdict(lambda: defaultdict(list))
    for block in Runner(run, **how).run():
        for variant, columns in block:
            for name, values in columns.items():
                parts[variant][name].append(np.ma.filled(values, np.nan) if np.ma.is_masked(values) else values)
    rows = {v: {n: np.concatenate(x) for n, x in columns.items()} for v, columns in parts.items()}
    for columns in rows.values():
        order = np.lexsort((columns["head"], columns["flush"], columns["slot"]))
        columns.update({name: x[order] for name, x in columns.items()})
    return rows


def alike(x: Table, y: Table, rtol: float = 0.0, columns: tuple[str, ...] = ()) -> None:
    assert list(x) == list(y)
    for variant in x:
        assert list(x[variant]) == list(y[variant])
        for name in columns or x[variant]:
            mine, theirs = x[variant][name], y[variant][name]
            if mine.dtype == object:
                assert mine.tolist() == theirs.tolist(), (variant, name)
            else:
                np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=0, err_msg=f"{variant} {name}")


def test_a_row_for_every_variant_slot_head_and_flush() -> None:
    """Faults: a flush without a row, a row twice, an oracle that is not logged, heads numbered from the share."""
    run = config(slots=2, acceptance=CYCLE)
    rows = table(run)
    assert list(rows) == ["oracle", *run.variants]
    expected = [(s, h, f, 10 * (f + 1)) for s in range(2) for f in range(12) for h in range(6)]
    for variant, columns in rows.items():
        keys = zip(*(columns[k].tolist() for k in ("slot", "head", "flush", "tokens")), strict=True)
        assert list(keys) == expected, variant
        assert {len(x) for x in columns.values()} == {len(expected)}
        if variant != "oracle":
            assert set(ERRORS) <= set(columns)
            assert all(np.isfinite(columns[name]).all() for name in ERRORS)
    # the golden trace: accepts 1, 2, 3, 4 on a ring of 16 fold ten records each time
    for variant, history in (("chunked_fp32", 10), ("exact_fold", 10), ("exact_recurrent", 0)):
        assert (rows[variant]["history"] == history).all() and rows[variant]["folded"].all()


def golden(counts: list[int], flush_at: int, fold_when: str) -> list[int]:
    """Token counts at which a ring folds, by the cursor rule."""
    w, flag, t, found = 0, False, 0, []
    for n in counts:
        w, t = (n if flag else w + n), t + n
        flag = w >= flush_at
        if flag:
            found.append(t)
            if fold_when == "commit":
                w, flag = 0, False
    return found


@pytest.mark.parametrize("fold_when", ["next", "commit"])
@pytest.mark.parametrize("flush_at", [1, 6, 9])
def test_the_grid_is_the_golden_rule(flush_at: int, fold_when: str) -> None:
    """Faults: a grid that counts from the flag's step instead of the tokens kept, or resets w to 0 after a flush."""
    ring = RingConfig(16, 4, flush_at, fold_when)
    rows = table(config(ring=ring, acceptance=CYCLE, variants=["exact_recurrent", "chunked_fp32"]))
    expected = golden([1, 2, 3, 4] * 12, flush_at, fold_when)
    for variant in ("oracle", "exact_recurrent", "chunked_fp32"):
        assert sorted(set(rows[variant]["tokens"].tolist())) == expected


def test_every_design_is_exact_in_exact_arithmetic() -> None:
    """Faults: outputs of a slot measured against another's, an interval's tokens shifted by one, a ragged window's
    padding counted; and in the states, whatever the lock-step adds to the design."""
    run = config(tokens=150, slots=3, seed=7, family="resets", ragged=True, precision=EXACT)
    for variant, columns in table(run).items():
        for name in ERRORS if variant != "oracle" else ():
            assert columns[name].max() < 1e-12, (variant, name)
    assert len(columns["slot"]) >= 3 * 12 * 6


def test_what_a_row_says_is_what_one_computes_by_hand() -> None:
    """Faults: an error against the wrong state, a median of the wrong tokens, an interval off by one."""
    run = config(tokens=110, slots=2, seed=3, ragged=True, variants=["exact_recurrent"])
    columns = table(run)["exact_recurrent"]
    stream = Stream(run.decode, SHAPE)
    tokens = stream.tokens(torch.zeros(2, dtype=torch.int64), 110)
    # a recurrent state knows no windows: one token a step gives the same bits
    one = np.ones((110, 2), dtype=int)
    single = windows(tokens.map(lambda x: x.transpose(0, 1).unsqueeze(2)), one)
    own = decode(design("exact_recurrent", RingConfig(8, 1), PrecisionConfig()), stream.initial_state(), single, one)
    for slot in range(2):
        states, outputs, writes = recurrence(stream.initial_state()[slot], tokens.map(lambda x, s=slot: x[s]))
        o_hat = torch.cat(own[slot][0::3], -1).permute(2, 0, 1).numpy()
        wrong = np.linalg.norm(o_hat - outputs, axis=-1) / np.linalg.norm(outputs, axis=-1)
        rows = np.flatnonzero(columns["slot"] == slot)
        ends = columns["tokens"][rows]
        begins = np.where(columns["flush"][rows] == 0, 0, ends[np.maximum(np.arange(len(rows)) - 6, 0)])
        for row, b, e, head in zip(rows, begins, ends, columns["head"][rows], strict=True):
            pair = own[slot][3 * e - 1][head], torch.from_numpy(states[e][head])
            errors = state_errors(*(S[None, None] for S in pair)).flatten().tolist()
            # the two fp64 references differ by 1e-15, and errors are from 1e-8 on
            for names in (("served_fro", "served_max"), ("kept_fro", "kept_max")):
                np.testing.assert_allclose([columns[n][row] for n in names], errors, rtol=1e-5)
            assert np.isclose(columns["o_med"][row], np.median(wrong[b:e, head]), rtol=1e-5)
            assert np.isclose(columns["o_max"][row], wrong[b:e, head].max(), rtol=1e-5)
    assert len(writes) == 110


@pytest.mark.parametrize("steps", [1, 7])
def test_blocks_are_bookkeeping(steps: int) -> None:
    """Faults: a carry over a block's end lost or doubled, an event in the last step of a block, tokens cut short."""
    run = config(tokens=70, slots=2, ragged=True)
    whole = table(run, steps=256)
    parts = table(run, steps=steps)
    # singular values of a batch may depend on its size in the last digits; rounded designs may not in any
    alike({"oracle": whole.pop("oracle")}, {"oracle": parts.pop("oracle")}, rtol=1e-12)
    alike(whole, parts, columns=(*ERRORS, "slot", "head", "flush", "tokens", "history", "folded", "nonfinite_stage"))


def test_a_block_fills_a_cache_or_a_share_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: blocks of a step on a device, which pay the bookkeeping in each; a block that a device cannot hold."""
    model = ModelConfig("layer", key_heads=16, value_heads=32, key_dim=128, value_dim=128, rows=None)

    def steps(slots: int, device: str) -> int:
        return block_steps(Config(model=model, decode=DecodeConfig(slots=slots)), 16, device)

    for memory in (24, 140):
        monkeypatch.setattr("harness.runner.memory_of", lambda _, memory=memory: memory << 30)
        # exact states of the grid points alone are 64 MiB a step of 64 slots
        assert 0 < steps(64, "cuda") * (64 << 20) < (memory << 30) / 8
        assert steps(64, "cuda") >= memory // 2
    assert (steps(1, "cuda"), steps(100_000, "cuda")) == (1536, 1)
    assert (steps(1, "cpu"), steps(64, "cpu")) == (64, 1)


def test_the_bookkeeping_of_a_device_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the way that a device goes, taken here on the CPU: matrices of one design or step read as another's,
    errors in another order, threads that are not waited for."""
    monkeypatch.setattr(pool, "cores", lambda: 4)
    run = config(tokens=70, slots=3, ragged=True, engine="torch")
    here = table(run, steps=9)
    for module in (conditioning, metrics):
        monkeypatch.setattr(module, "on_cpu", lambda x: False)
    there = table(run, steps=9)
    exact = ("slot", "head", "flush", "tokens", "history", "folded", "zero_state", "nonfinite_stage", "backend")
    assert here["chunked_tf32"]["operator_radius"].max() > 0
    for variant, columns in here.items():
        assert set(columns) == set(there[variant])
        for name in columns:
            if name in exact:
                assert columns[name].tolist() == there[variant][name].tolist()
            else:
                # the norm of an operator loses half the digits where keys repeat; a residual is rounding itself
                loose = name.startswith("operator")
                np.testing.assert_allclose(
                    there[variant][name], columns[name], rtol=1e-6 if loose else 1e-9, atol=1e-15, err_msg=name
                )


def test_the_oracle_brings_its_bound() -> None:
    """Faults: rows without a bound, one that begins anew with a block or without the prefill."""
    bound = table(config(slots=2, prefill=100, variants=["exact_recurrent"]))["oracle"]["oracle_bound"]
    # 220 tokens of 24 keys and windows of up to 64: far below what is told apart, far above what one token adds
    assert (bound > 1e-15).all() and (bound < 1e-9).all()
    # the first interval after the prefill carries what a hundred tokens before it left
    without = table(config(slots=2, variants=["exact_recurrent"]))["oracle"]["oracle_bound"]
    assert bound[:6].max() > 2 * without[:6].max()


def test_of_two_references_the_less_certain_is_quoted(tmp_path: Path) -> None:
    """Fault: with reference=own the bound of one oracle said of all."""
    (tmp_path / "other.yaml").write_text("conventions: {eps: 1.0}\n")
    names = ["exact_recurrent", str(tmp_path / "other.yaml")]
    one, other, both = (
        table(config(slots=2, variants=some, reference="own"))["oracle"]["oracle_bound"]
        for some in (names[:1], names[1:], names)
    )
    assert (one != other).any()
    np.testing.assert_array_equal(both, np.maximum(one, other))


def test_shares_of_the_heads_are_the_whole() -> None:
    """Faults: heads numbered, seeded or gated from the share; a sum over heads; a stochastic draw by position."""
    run = config(tokens=60, slots=2, ragged=True, precision=PrecisionConfig(sites={"checkpoint": "bf16:stochastic"}))
    whole = table(run)
    shares = [table(run, heads=slice(i, i + 1)) for i in range(2)]
    for variant in run.variants:
        merged = {n: np.concatenate([s[variant][n] for s in shares]) for n in shares[0][variant]}
        order = np.lexsort((merged["head"], merged["flush"], merged["slot"]))
        merged = {name: x[order] for name, x in merged.items()}
        alike({variant: whole[variant]}, {variant: merged}, columns=(*ERRORS, "head"))


def test_a_prefill_is_the_same_decode() -> None:
    """Faults: tokens of the prefill run twice or left out, a state rounded at the hand-over, rows counted from 0."""
    accept = AcceptanceConfig("all")
    # windows of 4, all accepted: a flush every 12 tokens, so that both grids meet after 120
    late = config(tokens=60, prefill=120, slots=2, acceptance=accept)
    early = config(tokens=180, slots=2, acceptance=accept)
    after, both = table(late), table(early)
    for variant in ("exact_recurrent", "null_arm", "oracle", "exact_fold"):
        keep = both[variant]["tokens"] > 120
        assert after[variant]["tokens"].tolist() == both[variant]["tokens"][keep].tolist()
        assert after[variant]["flush"].min() == 0 and after[variant]["tokens"].min() == 132
        # a closed loop has one state after a prefill as after a decode; its outputs differ with the windows
        names = {"oracle": ("cond2", "gate_span"), "exact_fold": ("kept_fro", "kept_max")}.get(variant, ERRORS)
        for name in names:
            x, y = after[variant][name], both[variant][name][keep]
            np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=f"{variant} {name}")
    exact = table(replace(late, precision=EXACT, decode=replace(late.decode, prefill=130)))
    assert all(exact[v][n].max() < 1e-12 for v in late.variants for n in ERRORS)


def test_a_design_may_be_its_own_reference(tmp_path: Path) -> None:
    """Faults: `reference=own` read against the model's conventions, or `fp64` against the design's own."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("verify: tokens\nfold: replay\nconventions: {eps_at: mean, beta: bf16}\n")
    run = config(family="zero_key", precision=EXACT, variants=["exact_recurrent", str(mine)])
    own, model = (table(replace(run, reference=reference)) for reference in ("own", "fp64"))
    for name in ERRORS:
        assert max(rows["exact_recurrent"][name].max() for rows in (own, model)) < 1e-11, name
        # a write from a key of length 1e-5 is small against what it is measured by, so fp64 leaves 1e-13 here
        assert own["mine"][name].max() < 1e-11, name
    assert model["mine"]["served_fro"].max() > 0.05


def test_a_zero_state_is_flagged_and_measured_absolutely() -> None:
    """Fault: 0/0 in the first rows of a decode that starts from nothing and writes nothing."""
    rows = table(config(initial_state="zero", beta=0.0))
    for variant, columns in rows.items():
        assert columns["zero_state"].all()
        if variant != "oracle":
            assert all((columns[name] == 0).all() for name in ERRORS)


def test_a_design_that_breaks_says_where() -> None:
    """Fault: a row of NaN without a stage, a stage in a row that is finite, or another arm's stage."""
    rows = table(config(tokens=100, slots=2, family="resets"))
    for variant in Config().variants:
        columns = rows[variant]
        finite = np.all([np.isfinite(columns[name]) for name in ERRORS], axis=0)
        assert [s is None for s in columns["nonfinite_stage"]] == finite.tolist()
        assert finite.all() == (variant in ("exact_recurrent", "null_arm"))
        assert set(columns["nonfinite_stage"][~finite]) <= {"decay"}


def test_progress_counts_every_token() -> None:
    """Fault: a bar that ends early or late: prefill and all slots are tokens too."""
    seen: list[int] = []
    for _ in Runner(config(tokens=50, prefill=70, slots=3, ragged=True, variants=["null_arm"])).run(seen.append):
        pass
    assert sum(seen) == 3 * (50 + 70)


def test_runs_do_not_share_anything() -> None:
    """Fault: a cache that one run leaves for the next, under a key that does not name the difference."""
    first, other = (table(config(tokens=60, seed=seed)) for seed in (1, 2))
    alike(first, table(config(tokens=60, seed=1)))
    assert first["null_arm"]["served_fro"][0] != other["null_arm"]["served_fro"][0]


def test_what_is_made_ahead_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a block made ready twice or dropped by the thread beside; its error lost; a mode of torch left behind."""
    run = config(tokens=150, slots=2, seed=2)
    plain = table(run, steps=5)
    # the thread is a device's; what it does is the same anywhere
    monkeypatch.setattr(
        "harness.runner.Runner._given", lambda self, arms, made=Runner._given: pool.ahead(made(self, arms))
    )
    threaded = table(run, steps=5)
    for variant, columns in plain.items():
        for name, values in columns.items():
            np.testing.assert_array_equal(threaded[variant][name], values)

    def failing() -> Iterator[bool]:
        yield torch.is_inference_mode_enabled()
        raise ValueError("block 1")

    with torch.inference_mode():
        coming = pool.ahead(failing())
        assert next(coming) is True
        with pytest.raises(ValueError, match="block 1"):
            next(coming)
