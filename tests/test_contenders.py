"""What is timed on a GPU: bytes by hand, graphs in rounds, cursors where a decode has them, outputs compared."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_kernels import fake

from harness import cli
from harness.config import BenchConfig, Config, head_counts, validate
from harness.contenders import FLUSH, FOLD, RING, SNAPSHOT, STEP, Settled, Work, ours
from harness.errors import ConfigError, HarnessError
from harness.experiments import kernels
from harness.ring import RingSpec
from harness.timing import Row, bandwidths, measure, rotated, sets_needed, spread
from harness.tokens import Shape
from harness.traffic import Moved, Traffic, of_design
from harness.variants import CONFIGS, load
from harness.workload import SETTLE, flush_length, trace, unflagged

LAYER = Shape(16, 32, 128, 128)
RING16 = RingSpec(16, 4)


class FakeClock:
    """Seconds that say which row was replayed and how often."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def capture(self, row: Row):
        row.before()
        for call in row.calls:
            call()
        return lambda: None

    def seconds(self, row: Row, replay) -> float:
        self.order.append(id(row))
        return 1e-6 * row.divisor * len(self.order)


def work(B: int = 2, cache: int = 1) -> Work:
    return Work(Shape(2, 4, 3, 8), B, 4, RING16, cache, device="cpu")


def design_of(name: str, formats: dict) -> SimpleNamespace:
    spec = load(name)
    return SimpleNamespace(spec=spec, records=spec.records(spec.arithmetic()), formats=formats)


def test_bytes_are_those_worked_by_hand():
    """Fault: a history counted per key head instead of value head, a state written twice, a format of four bytes."""
    half, single = torch.bfloat16, torch.float32
    formats = {"checkpoint": single, "output": half, "d": half, "k_hat": half, "g": single}
    formats |= {"v": half, "k": half, "beta": single}
    state = 32 * 65536
    # q, k: 2·16·4·128·2; v: 32·4·128·2; g, beta: 2·32·4·4; output: as v
    inputs, output = 2 * 16384 + 32768 + 1024, 32768
    d, k_hat, g = 32 * 128 * 2, 16 * 128 * 2, 32 * 4
    fold = of_design(design_of("exact_fold", formats), LAYER, 4)
    # four tokens of d, k_hat, g, v (as d), k (as k_hat) and beta (as g) are written
    window = inputs + output + 4 * 2 * (d + k_hat + g)
    assert fold.verify(5) == Moved(state, window + 5 * (d + k_hat + g))
    assert fold.verify(10, flush=True) == Moved(2 * state, window + 10 * (d + k_hat + 2 * g))
    assert fold.fold(10) == Moved(2 * state, 10 * (d + k_hat + 2 * g))
    assert fold.commit(0).total == 0 and fold.commit(10) == fold.fold(10)
    wide = formats | {"d": single, "k_hat": single}
    product = of_design(design_of("chunked_tf32", wide), LAYER, 4)
    assert product.verify(10, flush=True).rest == inputs + output + (4 + 10) * (2 * d + 2 * k_hat + g)
    # a state per draft, and a commit that moves one of them
    snapshot = of_design(design_of("exact_recurrent", formats), LAYER, 4)
    assert snapshot.verify(0) == Moved(5 * state, inputs + output) and snapshot.commit(0) == Moved(2 * state)


def test_low_halves_count_where_they_are_read():
    """Fault: a verify that reads the high halves is charged for both, or a fold for one."""
    sizes = {"checkpoint": 4, "output": 2, "d": 2, "d_lo": 2, "k_hat": 2, "k_hat_lo": 2, "g": 4}
    t = of_design(design_of("compensated_fold", {n: SimpleNamespace(itemsize=s) for n, s in sizes.items()}), LAYER, 4)
    assert isinstance(t, Traffic) and t.read == ("d", "k_hat", "g")
    assert set(t.folded) == {"d", "d_lo", "k_hat", "k_hat_lo", "g"}


def test_replays_go_in_rounds_and_are_divided_by_their_units():
    """Fault: a drift of the clocks meets one row alone; or a graph of many calls is quoted as one."""
    clock = FakeClock()
    rows = {"one": Row([lambda: None] * 4), "pair": Row([lambda: None] * 4, count=2)}
    seconds = measure(rows, 3, clock)
    a, b = (id(row) for row in rows.values())
    assert clock.order == [a, b] * 3
    assert seconds == {"one": pytest.approx([1e-6, 3e-6, 5e-6]), "pair": pytest.approx([2e-6, 4e-6, 6e-6])}
    found = spread([3e-6, 1e-6, 2e-6, 5e-6, 4e-6])
    assert [found[n] for n in ("us_low", "us", "us_high")] == pytest.approx([2, 3, 4])
    assert spread([2e-6])["us_high"] == pytest.approx(2)


def test_buffers_exceed_the_cache_twice_and_every_set_is_used_equally():
    """Fault: a small batch is timed out of the L2 cache."""
    for nbytes, cache in ((2 << 20, 60 << 20), (1, 1), (1 << 30, 60 << 20), (60 << 20, 60 << 20)):
        sets = sets_needed(nbytes, cache)
        assert sets * nbytes > 2 * cache and (sets - 1) * nbytes <= 2 * cache
    calls = rotated([lambda: "a", lambda: "b", lambda: "c"], 7)
    assert [c() for c in calls] == list("abc") * 3


def test_bandwidth_counts_a_copy_twice():
    """Fault: a copy is credited with the bytes it reads only."""
    found = bandwidths(1, SimpleNamespace(capture=lambda row: None, seconds=lambda row, replay: 4e-6), [1000], "cpu")
    assert found == {"read": pytest.approx(4000 / 1e-6), "copy": pytest.approx(8000 / 1e-6)}


def test_slots_are_where_a_decode_has_them():
    """Fault: a verify timed on empty histories, or only ever on one side of a flush."""
    drawn = unflagged(RING16, 4000, 4, 0)
    w, _, flag = trace(RING16, drawn, 4).cursors[-1]
    assert drawn.shape == (SETTLE, 4000) and not flag.any()
    assert (w.min(), w.max()) == (1, 8)
    # mean over the renewals of a walk with steps 1..4 from its first step up to 8: by enumeration 4.61
    assert abs(w.mean() - exact_mean()) < 5 * 2.3 / 4000**0.5
    assert flush_length(RING16, 4) == 10
    assert flush_length(RingSpec(16, 4, 1, "commit"), 4) == 2


def exact_mean() -> float:
    """Mean of w over the unflagged steps between two flushes, accepts uniform in 1..4."""
    visits = np.zeros(9)
    visits[1:5] = 0.25
    for w in range(1, 9):
        for n in range(1, 5):
            if w + n <= 8:
                visits[w + n] += visits[w] / 4
    return float((visits * np.arange(9)).sum() / visits.sum())


def test_rows_of_a_design_run_where_they_say():
    """Fault: a flush step on unflagged slots, a verify on flagged ones, a step that never flushes."""
    log: list = []
    x = work(cache=300)
    base = ours(Settled(fake("exact_recurrent", log), x), None)
    lines = ours(Settled(fake("exact_fold", log), x), "exact_recurrent")
    assert [c.what for c in base] == [SNAPSHOT, STEP] and [c.what for c in lines] == [RING, FLUSH, FOLD, STEP]
    seen = {}
    for c in lines:
        log.clear()
        for _ in range(2):
            # a second replay starts where the first did
            c.row.before()
            first = list(log)
            for call in c.row.calls:
                call()
        assert not first or log[: len(log) // 2] == log[len(log) // 2 :]
        seen[c.what] = list(log)
    assert all(kind == "verify" and flag == [0, 0] and max(w) <= 8 for kind, w, flag in seen[RING])
    assert all(flag == [1, 1] and w == [10, 10] for _, w, flag in seen[FLUSH])
    assert all(entry == ("fold", [10, 10]) for entry in seen[FOLD])
    assert [kind for kind, *_ in seen[STEP][:4]] == ["verify", "commit"] * 2
    flags = [flag for kind, *rest in seen[STEP] if kind == "verify" for flag in rest[1]]
    step = lines[-1]
    assert step.facts["flushes_a_step"] == sum(flags) / len(flags) and 0.15 < sum(flags) / len(flags) < 0.35
    assert step.row.divisor == len(step.row.calls) // 2
    # bytes of the step lie between those of a verify and those of a flush
    assert lines[0].moved.state < step.moved.state < lines[1].moved.state
    assert [c.error < 1e-12 for c in lines[:2]] == [True, True]


def test_a_design_that_loses_its_place_is_refused():
    """Fault: cursors on the device that drift from the ring's are timed all the same."""
    with pytest.raises(HarnessError, match="exact_fold: cursors on the device"):
        Settled(fake("exact_fold", [], lose=1), work())


def test_a_failing_peer_loses_its_row_only(monkeypatch):
    """Fault: a kernel that does not compile here ends the run; or its row is left out without a word."""

    def broken() -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "of_fla", lambda function, x: {"fla verify": broken})
    made = [fake(name, []) for name in ("exact_recurrent", "exact_fold")]
    peers = {"fla": (object(), {"version": "0"})}
    found = kernels.case(work(), made, peers, 3, FakeClock(), 1e12)
    assert found["failed"] == {"fla verify": "RuntimeError: no such instruction"}
    assert [(r["what"], r["who"]) for r in found["rows"]][:3] == [
        (SNAPSHOT, "exact_recurrent"), (STEP, "exact_recurrent"), (RING, "exact_fold")]  # fmt: skip
    for r in found["rows"]:
        assert len(r["samples"]) == 3 and r["share"] == pytest.approx(r["bytes"] / r["us"] * 1e6 / 1e12)
        assert r["state_share"] < r["share"] or r["what"] == SNAPSHOT


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bench.parts=[kernels]", "device=cpu"], "bench.parts: kernels are timed on a GPU, and the device is cpu"),
        (["bench.parts=[gpu]"], "bench.parts: 'gpu' is not one of harness, kernels"),
        (["bench.peers=[vllm]"], "bench.peers: 'vllm' is not one of sglang, fla"),
        (["bench.heads=[16/24]"], "bench.heads: '16/24' is not key heads/value heads"),
        (["bench.batches=[0]"], "bench.batches: 0 is below 1"),
        (["bench.batches=[]"], "bench.batches: empty"),
    ],
)
def test_what_cannot_be_timed_is_one_line(monkeypatch, tmp_path, capsys, overrides, message):
    """Fault: kernels without a GPU, or a typo, end in a traceback or in a run directory."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment=bench", *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harness: error: {message}")
    assert not list(tmp_path.rglob("*.status.json"))


def test_head_counts():
    """Fault: H and HV swapped."""
    assert head_counts("16/64") == (16, 64)
    for text in ("16", "64/16", "a/b", "0/0", "16/32/64"):
        with pytest.raises(ConfigError, match=r"bench\.heads"):
            head_counts(text)
    validate(Config(bench=BenchConfig(parts=["harness"])))


def test_the_two_references_are_always_timed_and_the_rest_named(tmp_path):
    """Fault: ratios without their denominator because a user asked for one variant; a variant dropped silently; a
    kernel of the harness timed under the name of one from outside."""
    shorter = tmp_path / "shorter.yaml"
    shorter.write_text((CONFIGS / "variant" / "exact_recurrent.yaml").read_text().replace("ieee/64", "ieee/32"))
    refused = tmp_path / "refused.yaml"
    refused.write_text("sites: {default: fp32, gram: fp16}\ndots: {default: ieee}\n")
    outside = tmp_path / "outside.yaml"
    outside.write_text("design: kernel.py:Mine\n" + (CONFIGS / "variant" / "chunked_fp32.yaml").read_text())
    variants = ["chunked_tf32", "null_arm", str(shorter), str(refused), str(outside)]
    made, left_out = kernels.contenders(Config(variants=variants), "cpu")
    assert [d.spec.name for d in made] == ["exact_recurrent", "exact_fold", "chunked_tf32", "null_arm"]
    assert left_out[str(shorter)] == "the kernel is that of exact_recurrent"
    assert left_out[str(refused)].startswith("site gram")
    assert left_out[str(outside)].startswith("it is computed outside")
