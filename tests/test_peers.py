"""Kernels of other projects are handed what ours hold: each against the recurrence in fp64, in Triton's interpreter.

Run with a folder of sglang's kernel files and of fla-core on PYTHONPATH; what is not there is skipped.
"""

import numpy as np
import pytest
import torch
from fake_kernels import fake

from harness.contenders import Settled, Work, ours
from harness.errors import HarnessError
from harness.peers import fla, sglang
from harness.peers.seat import Seat, seat
from harness.ring import RingSpec
from harness.rivals import of_fla, of_sglang
from harness.tokens import Shape
from harness.workload import Gate, Window, draw, head_major

SHAPE, B, M, L = Shape(2, 6, 16, 32), 3, 4, 16  # K 32 is the least that its products take
HISTORY, BASE = (0, 5, 10), (3, 14, 9)  # an empty history, one that wraps, one that is flushed
# fp32 throughout, so an argument in a wrong place stands out: sums of some 40 terms over some 14 tokens
TIGHT = 64 * 2.0**-24


@pytest.fixture
def kernels() -> sglang.Kernels:
    try:
        return sglang.load()
    except HarnessError as error:
        pytest.skip(str(error))


@pytest.fixture
def function():
    pytest.importorskip("fla", reason="fla-core is not on the path")
    return fla.load()


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def recurrence(S, tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs and d [T, HV, V] and the last state of one slot; tokens of [heads, T, ...] arrays, fp64."""
    S, outs, writes = S.copy(), [], []
    group = SHAPE.group
    for t in range(tokens["v"].shape[1]):
        k, q = (unit(tokens[name][:, t]).repeat(group, 0) for name in ("k", "q"))
        S *= np.exp(tokens["g"][:, t])[:, None, None]
        d = tokens["beta"][:, t, None] * (tokens["v"][:, t] - np.einsum("hvk,hk->hv", S, k))
        S += d[:, :, None] * k[:, None]
        outs.append(np.einsum("hvk,hk->hv", S, q) / np.sqrt(SHAPE.K))
        writes.append(d)
    return np.array(outs), np.array(writes), S


class Held:
    """A state as a design holds it, with histories of its own and NaN in every row outside them."""

    def __init__(self, history=HISTORY) -> None:
        rng = torch.Generator().manual_seed(3)
        self.gate = Gate.draw(SHAPE.HV, rng)
        self.checkpoint = torch.randn(B, SHAPE.HV, SHAPE.V, SHAPE.K, generator=rng)
        self.on_device = torch.tensor([history, BASE, [0] * B], dtype=torch.int32)
        wide = {"v": SHAPE.V, "d": SHAPE.V, "k": SHAPE.K, "k_hat": SHAPE.K}
        keyed = ("k", "k_hat")
        self.records = {
            name: torch.full((B, SHAPE.H if name in keyed else SHAPE.HV, L, *size), torch.nan)
            for name, size in [(n, (w,)) for n, w in wide.items()] + [("g", ()), ("beta", ())]
        }
        past = window(self.gate, rng, max(history) or 1)
        self.past = [of_slot(past, i, w) for i, w in enumerate(history)]
        for i, w in enumerate(history):
            rows = [(BASE[i] + j) % L for j in range(w)]
            _, d, _ = recurrence(self.checkpoint[i].double().numpy(), self.past[i])
            made = self.past[i] | {
                "k_hat": unit(self.past[i]["k"]),
                "d": d.reshape(w, SHAPE.HV, SHAPE.V).swapaxes(0, 1),
            }
            for name, ring in self.records.items():
                ring[i][:, rows] = torch.from_numpy(made[name]).float()
        self.window = window(self.gate, rng, M)

    def seat(self) -> Seat:
        return seat(self.window, self.gate, self)

    def expected(self, i: int):
        """Outputs of the window and the state behind the history, of slot i."""
        _, _, S = recurrence(self.checkpoint[i].double().numpy(), self.past[i])
        out, _, _ = recurrence(S, of_slot(self.window, i, M))
        return out, S


def window(gate: Gate, rng: torch.Generator, m: int) -> Window:
    return Window(*(x if x.dtype == torch.int32 else x.float() for x in draw(SHAPE, gate, B, m, rng)))


def of_slot(w: Window, i: int, n: int) -> dict[str, np.ndarray]:
    return {name: getattr(w, name)[i, :, :n].double().numpy() for name in ("q", "k", "v", "g", "beta")}


def close(found: torch.Tensor, exact: np.ndarray) -> None:
    found = found.double().numpy()
    assert np.linalg.norm(found - exact) <= TIGHT * np.linalg.norm(exact)


@pytest.mark.parametrize("mode", sglang.MODES)
def test_sglang_verifies_a_window_behind_our_records(kernels, mode):
    """Fault: rings, cursors or gates of the adapter in another order, so that the ratio compares two functions."""
    held = Held()
    bound = sglang.ring(kernels, held.seat(), mode, "verify", "ieee")
    bound.run()
    out = head_major(bound.out(), B)
    for i in range(B):
        close(out[i].swapaxes(0, 1), held.expected(i)[0])


def test_sglang_flushes_the_flagged_slots_alone(kernels):
    """Fault: the flush step is timed on slots that return at once, or folds another history."""
    held = Held()
    held.on_device[2] = torch.tensor([0, 1, 1])
    bound = sglang.ring(kernels, held.seat(), "raw", "flush", "ieee")
    bound.run()
    out = head_major(bound.out(), B)
    assert torch.equal(bound.tensors["checkpoint"][0], held.checkpoint[0]) and not out[0].any()
    for i in (1, 2):
        expected, S = held.expected(i)
        close(out[i].swapaxes(0, 1), expected)
        close(bound.tensors["checkpoint"][i], S)


def test_sglang_steps_as_a_decode_does(kernels):
    """Fault: the amortised step never folds, folds at every step, or does not start from the cursors it was handed."""
    held = Held((0, 0, 0))
    # unused rows are read by this commit: what it is handed in the benchmark is finite
    for rows in held.records.values():
        rows.zero_()
    counts = torch.tensor([[1, 4, 2], [2, 4, 2], [3, 4, 3], [4, 1, 3], [1, 1, 4], [1, 1, 4]], dtype=torch.int32)
    calls, back, bound = sglang.step(kernels, held.seat(), list(counts))
    # a replay before: cursors are put back; no state was written yet
    calls[0]()
    back()
    for call in calls:
        call()
    out = head_major(bound.out(), B)
    for i in range(B):
        S, tokens = held.checkpoint[i].double().numpy(), of_slot(held.window, i, M)
        for n in counts[:-1, i].tolist():
            _, _, S = recurrence(S, {name: x[:, :n] for name, x in tokens.items()})
        # a residual of a residual is dropped: one rounding of d in fp32 for each of five steps
        close(out[i].swapaxes(0, 1), recurrence(S, tokens)[0])
    # 1 2 3 4 reaches 10 and folds, as does 4 4 4
    assert not torch.equal(bound.tensors["checkpoint_state"], held.checkpoint)


@pytest.mark.parametrize("peer", ["sglang", "fla"])
def test_recurrent_peers_decode_the_same_window(peer, request):
    """Fault: state handed over transposed, raw gates taken for decays, heads shared in another order."""
    held = Held((0, 0, 0))
    if peer == "sglang":
        bound = sglang.snapshots(request.getfixturevalue("kernels"), held.seat())
    else:
        bound = fla.recurrent(request.getfixturevalue("function"), held.seat())
    bound.run()
    out = head_major(bound.out(), B)
    for i in range(B):
        close(out[i].swapaxes(0, 1), held.expected(i)[0])
        if peer == "sglang":
            first = {name: x[:, :1] for name, x in of_slot(held.window, i, M).items()}
            close(bound.tensors["drafts"][i, 0], recurrence(held.checkpoint[i].double().numpy(), first)[2])
    assert torch.equal(bound.tensors["checkpoint"], held.checkpoint)


def test_a_missing_peer_is_named(tmp_path):
    """Fault: a folder without the kernels is a traceback, or a peer that is silently left out."""
    with pytest.raises(HarnessError, match=r"sglang: no .*gdn_replayssm_spec_decode\.py under "):
        sglang.load(str(tmp_path))


def test_rows_of_peers_compute_what_ours_do(kernels, function):
    """Fault: seats taken after a state has moved on, a flush checked on histories that are not there, a row lost."""
    work = Work(SHAPE, B, M, RingSpec(L, M), 1 << 16, device="cpu")
    for name in ("exact_recurrent", "exact_fold"):
        settled = Settled(fake(name, []), work)
        work.seats[name] = settled.seats()
        ours(settled, None)
    found = {name: make() for name, make in (of_sglang(kernels, work) | of_fla(function, work)).items()}
    assert len(found) == 6 and len(work.seats["exact_fold"]) > 1
    for name, line in found.items():
        assert len(line.row.calls) >= line.sets and line.moved.total > 0, name
        # d, k_hat and outputs are bf16 numbers, which the interpreter truncates
        assert (line.error is None) == (name == "sglang step") and (line.error or 0) < 2 * 2.0**-8, name
    step = found["sglang step"].row
    step.before()
    for call in step.calls[: 2 * found["sglang step"].sets]:
        call()
