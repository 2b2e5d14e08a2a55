"""The benchmark: the peer decodes what we decode, ratios are what they say, and nothing is measured only once."""

import json

import numpy as np
import pytest
import torch

from harness import cli
from harness.config import AcceptanceConfig, Config, DecodeConfig, ModelConfig
from harness.decode import Stream
from harness.errors import HarnessError
from harness.experiments import bench
from harness.peers import transformers_recurrent as peer
from harness.tokens import Shape

SHAPE = Shape(2, 6, 5, 8)  # no two sizes equal, so that a transposed state or a skipped head shows


def recurrence(tokens, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """o [B, T, HV, V] and the last state, in fp64, from the formulas of the model alone."""
    q, k, v, g, beta = (getattr(tokens, name).numpy() for name in ("q", "k", "v", "g", "beta"))
    S, out = S.copy(), np.zeros_like(v)
    for b, t, h in np.ndindex(v.shape[:3]):
        key, query = (x[b, t, h // 3] / np.sqrt((x[b, t, h // 3] ** 2).sum() + 1e-6) for x in (k, q))
        S[b, h] *= np.exp(g[b, t, h])
        S[b, h] += beta[b, t, h] * np.outer(v[b, t, h] - S[b, h] @ key, key)
        out[b, t, h] = S[b, h] @ query / np.sqrt(8)
    return out, S


def test_the_peer_decodes_the_same_tokens_from_the_same_state():
    """Fault: heads or axes mixed up in the adapter, so that the ratio compares two different decodes."""
    pytest.importorskip("transformers")
    stream = Stream(DecodeConfig(family="resets", slots=2), SHAPE)
    tokens, initial = stream.tokens(torch.tensor([0, 0]), 60), stream.initial_state()
    assert torch.isneginf(tokens.g).any()
    found = peer.decode(peer.load(), peer.inputs(tokens, initial))
    for mine, exact in zip(found, recurrence(tokens, initial.numpy()), strict=True):
        assert mine.dtype == torch.float32
        # T roundings of the state and K of every sum, at fp32
        assert np.abs(mine.numpy() - exact).max() <= (60 + 8) * 2.0**-24 * np.abs(exact).max()


def fake(**arguments):
    """A peer that takes no time to install."""
    return arguments["value"], arguments["initial_state"]


def absent(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name="transformers")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(*overrides) -> (bench.json, stdout), of a small bench in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "WARM_UP", 20)

    def call(*overrides: str) -> tuple[dict, str]:
        before = set(tmp_path.glob("results/runs/bench/*/bench.json"))
        small = ("model=tiny", "decode.tokens=40", "workers=1", "device=cpu", "variants=[chunked_fp32,null_arm]")
        assert cli.main(["experiment=bench", *small, *overrides]) == 0
        (new,) = set(tmp_path.glob("results/runs/bench/*/bench.json")) - before
        return json.loads(new.read_text()), capsys.readouterr().out

    return call


def test_a_bench_is_measured_anew_and_leaves_the_threads_alone(run, monkeypatch):
    """Fault: a second bench is `already done`; or what runs after it in the process has one thread."""
    monkeypatch.setattr(peer, "load", lambda: fake)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = [run()[0] for _ in range(2)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    peers = ["transformers, 2 threads", "transformers, 1 thread"]
    for result in results:
        assert list(result["measured"]) == ["all arms", "chunked_fp32", "null_arm", *peers]
        assert result["size"]["tokens"] == 40 and (result["threads"], result["workers"]) == (2, 1)
        assert all(list(line["passes"]) == peers for line in result["measured"].values())


def test_without_the_peer_ratios_are_not_measured(run, monkeypatch):
    """Fault: a missing optional package is a traceback, or leaves a ratio of something else."""
    monkeypatch.setattr(peer, "import_module", absent)
    with pytest.raises(HarnessError, match=r"transformers.*replayssm-harness\[bench\]"):
        peer.load()
    result, out = run()
    assert [line["passes"] for line in result["measured"].values()] == [{}, {}, {}]
    assert out.count("not measured") == 4 and "pip install 'replayssm-harness[bench]'" in out


def test_rates_and_ratios_are_those_of_the_medians():
    """Fault: a mean, a minimum, or another number of tokens or heads behind the quoted figure."""
    decode = DecodeConfig(tokens=300, prefill=100, slots=2)
    config = Config(model=ModelConfig(value_heads=16), decode=decode, acceptance=AcceptanceConfig())
    seconds = {"all arms": [9.0, 4.0, 5.0], "transformers, 2 threads": [1.0, 8.0, 2.0]}
    seconds["transformers, 1 thread"] = [4.0, 4.0, 4.0]
    facts = {"device": "cpu", "threads": 2, "peer": {"version": "5"}}
    result = bench.results(config, seconds, facts)
    line = result["measured"]["all arms"]
    assert (line["median"], line["tokens_heads_per_second"]) == (5.0, 400 * 2 * 16 / 5.0)
    assert line["passes"] == {"transformers, 2 threads": 2.5, "transformers, 1 thread": 1.25}
    # the ratio that is quoted is the one that flatters least
    assert result["faster_peer"] == "transformers, 2 threads"


def test_passes_are_interleaved(monkeypatch):
    """Fault: a busy spell of the machine falls on one implementation alone."""
    order: list[str] = []
    work = {name: lambda name=name: order.append(name) for name in ("a", "b", "c")}
    assert {len(x) for x in bench.measure(work, repeats=3).values()} == {3}
    assert order == ["a", "b", "c"] * 3
