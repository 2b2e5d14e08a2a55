"""Each check of the conformance command against a kernel with the fault it is named for, and without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import conformance
from harness.arithmetic import Arithmetic
from harness.checks import ALLOWED, CHECKS, Outcome, held
from harness.config import PrecisionConfig, RingConfig
from harness.nearest import nearest
from harness.outside import Outside
from harness.plugins import import_file
from harness.reference.emulated import Emulated
from harness.subject import Subject
from harness.tokens import Shape
from harness.variants import load, names

EXAMPLE = Path(__file__).parents[1] / "examples/outside_kernel/gdn_ring"
VARIANT = str(EXAMPLE / "gdn_ring.yaml")
SMALL = ["--dims", "6/16", "--steps", "24"]
Ring: Any = import_file(EXAMPLE / "ring.py").Ring


class Late(Ring):
    """Commits whole windows: the drafts that were refused stay."""

    def commit(self, state: Any, slots: Tensor, accepted: Tensor, cursors: Any) -> None:
        super().commit(state, slots, accepted, cursors)
        # rows behind the accepted ones, read as if they were history
        state.extra = torch.zeros_like(cursors.write_pos)
        state.extra[slots] = (state.lengths - accepted).int()

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        state.lengths = window.lengths
        return super().verify(state, window, cursors)

    def history(self, state: Any, slots: Tensor, cursors: Any, count: Tensor) -> Any:
        more = getattr(state, "extra", torch.zeros_like(cursors.write_pos))[slots]
        return super().history(state, slots, cursors, torch.where(count > 0, count + more, count))


class Masked(Ring):
    """Multiplies the row behind a history by zero instead of leaving it out."""

    def create(self, *args: Any) -> Any:
        state = super().create(*args)
        state.d.zero_()
        return state

    def history(self, state: Any, slots: Tensor, cursors: Any, count: Tensor) -> Any:
        S, *rest = super().history(state, slots, cursors, count)
        row = (cursors.cache_base + cursors.write_pos)[slots] & state.mask
        return S + 0 * state.d[slots, row].sum((1, 2)).view(-1, 1, 1, 1), *rest


class Padded(Ring):
    """Sums the gates of lanes behind a window's length."""

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        o, d = super().verify(state, window, cursors)
        return o + 0 * window.g.sum(-1)[..., None, None], d


class Flat(Ring):
    """Forgets the wrap: a history that would pass the ring's end is read from before it."""

    def history(self, state: Any, slots: Tensor, cursors: Any, count: Tensor) -> Any:
        base = cursors.cache_base.clamp(max=state.mask + 1 - int(count.max()))
        return super().history(state, slots, cursors._replace(cache_base=base), count)


class Sticky(Ring):
    """Keeps the state of the tenant before, if that is a number."""

    def reset(self, state: Any, slots: Tensor, initial: Tensor) -> None:
        old = state.S[slots]
        state.S[slots] = torch.where(initial.mT.isnan(), old, old + 0 * initial.mT)


class Decayed(Ring):
    """Folds without the decay of the records."""

    def folded(self, state: Any, slots: Tensor, cursors: Any) -> Tensor:
        S, W, d, k = self.history(state, slots, cursors, cursors.write_pos[slots])
        return S + k.mT @ (d * (W[..., None] != 0))


class Shuffled(Ring):
    """Reads key head i mod H."""

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        return super().verify(state, window._replace(q=window.q.flip(1)), cursors)


class Lost(Ring):
    """Leaves the finite numbers in one head."""

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        o, d = super().verify(state, window, cursors)
        o[:, 4, 0] = torch.nan
        return o, d


class Coarse(Ring):
    """Keeps its state in bf16 and says fp32."""

    fp64 = False

    def folded(self, *args: Any) -> Tensor:
        return super().folded(*args).bfloat16().float()


class Busy(Ring):
    """Touches a slot outside the step."""

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        rest = [s for s in range(len(state.S)) if s not in window.slots.tolist()]
        state.S[rest] *= 1.001
        return super().verify(state, window, cursors)


class Restless(Ring):
    """Gives another result each time."""

    def verify(self, state: Any, window: Any, cursors: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        o, d = super().verify(state, window, cursors)
        return o * (1 + self.calls * torch.finfo(o.dtype).eps), d


class Writing(Ring):
    """Folds for good when it is read."""

    def read(self, state: Any, which: str, slots: Tensor, cursors: Any) -> Tensor:
        S = super().read(state, which, slots, cursors)
        state.S[slots] = S.mT
        return S


class Sorted(Ring):
    """Reads slots in their own order, whatever is asked."""

    def read(self, state: Any, which: str, slots: Tensor, cursors: Any) -> Tensor:
        return super().read(state, which, slots.sort()[0], cursors)


class Shared(Ring):
    """A copy with the same ring."""

    def clone(self, state: Any) -> Any:
        return SimpleNamespace(**vars(state))


class Raising(Ring):
    """Cannot do what it is asked."""

    def commit(self, *args: Any) -> None:
        raise RuntimeError("no such kernel")


class Thin(Ring):
    """Returns d of another shape."""

    def verify(self, *args: Any) -> Any:
        o, d = super().verify(*args)
        return o, d[..., :1]


FAULTS: dict[str, tuple[type, ...]] = {
    "identity": (Decayed, Shuffled, Lost),
    "cursor": (Late, Flat),
    "poison": (Masked, Padded),
    "idle": (Busy,),
    "rejection": (Late,),
    "reuse": (Sticky,),
    "read": (Writing, Sorted),
    "repeat": (Restless,),
    "clone": (Shared,),
    "departure": (Coarse, Lost),
}


def subject(monkeypatch: pytest.MonkeyPatch, maker: Callable[[], Any]) -> Subject:
    """The example with another kernel in its place."""
    spec = load(VARIANT)
    arithmetic = spec.arithmetic(PrecisionConfig(exp="rounded"))
    monkeypatch.setattr(import_file(EXAMPLE / "ring.py"), "Ring", maker)
    return Subject(Outside(spec, spec.ring(RingConfig()), arithmetic), Shape(2, 6, 6, 16), 3, 24, 0, "cpu")


def outcome(monkeypatch: pytest.MonkeyPatch, maker: Callable[[], Any], check: str) -> Outcome:
    return conformance.judge(subject(monkeypatch, maker), [check])[check]


@pytest.mark.parametrize(("check", "kernel"), [(c, k) for c, some in FAULTS.items() for k in some])
def test_a_planted_fault_fails_the_check_named_for_it(
    check: str, kernel: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault of the check: it passes what it is there to find, or does not say where."""
    found = outcome(monkeypatch, kernel, check)
    assert found.result == "FAIL" and found.first is not None, found
    assert found.first.units is None or not found.first.units <= ALLOWED


def test_every_fault_has_its_check() -> None:
    """Fault: a check that nothing has ever failed."""
    assert list(FAULTS) == list(CHECKS)


def test_the_example_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a check that fails on anything; the example of the documentation being wrong."""
    found = conformance.judge(subject(monkeypatch, Ring), list(CHECKS))
    assert {name: o.result for name, o in found.items()} == dict.fromkeys(CHECKS, "pass"), found
    # two orders of the same fp32 sums, a good deal of them: nothing is compared with itself
    assert 0.1 < found["departure"].worst["served"].units < ALLOWED
    assert 0 < found["cursor"].worst["kept"].units < 1


def test_the_place_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a slot, head or step numbered within what was compared; a later quantity of the step named first."""

    class Once(Ring):
        fp64 = False

        def verify(self, state: Any, window: Any, cursors: Any) -> Any:
            state.steps = getattr(state, "steps", 0) + 1
            o, d = super().verify(state, window, cursors)
            if state.steps > 5 and 1 in window.slots.tolist():
                at = window.slots.tolist().index(1)
                o[at, 4, 0] += 1.0
                d[at, 2, 0] += 1.0
            return o, d

    s = subject(monkeypatch, Once)
    found = conformance.judge(s, ["departure", "cursor"])
    step = next(i for i in range(5, 24) if s.ragged.lengths[i, 1])
    for name in found:
        assert found[name].first is not None and found[name].first[:4] == (step, 1, 4, "o"), found[name]


@pytest.mark.parametrize("name", [n for n in names() if not load(n).fold_current])
def test_designs_of_the_harness_pass(name: str) -> None:
    """Fault: a check that refuses a legitimate design: snapshots, replays, cumulative gates, folds at commit."""
    spec = load(name)
    s = Subject(Emulated(spec, spec.ring(RingConfig()), spec.arithmetic()), Shape(1, 2, 4, 8), 3, 12, 0, "cpu")
    found = conformance.judge(s, list(CHECKS))
    assert {n: o.result for n, o in found.items()} == dict.fromkeys(CHECKS, "pass"), found


def test_another_function_is_told_from_another_rounding() -> None:
    """Fault: a unit that grows with the error it is to judge: `decay: after` declared as `before`."""
    spec, other = load("chunked_fp32"), load("chunked_fp32")
    other.conventions = {"decay": "after"}
    s = Subject(Emulated(other, spec.ring(RingConfig()), other.arithmetic()), Shape(1, 2, 4, 8), 3, 12, 0, "cpu")
    s.exact.arithmetic, s.emulation = Arithmetic(), Emulated(spec, spec.ring(RingConfig()), spec.arithmetic())
    found = conformance.judge(s, ["identity", "departure"])
    assert {o.result for o in found.values()} == {"FAIL"}


def test_what_is_raised_or_misshapen_is_a_failure_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a traceback instead of a verdict; the checks behind it left out."""
    found = conformance.judge(subject(monkeypatch, Raising), list(CHECKS))
    assert all(o.result == "FAIL" and "RuntimeError: no such kernel (test_conf" in o.note for o in found.values())
    found = conformance.judge(subject(monkeypatch, Thin), ["repeat"])
    assert found["repeat"].note.startswith("variant gdn_ring: design: d of verify is [")


def test_the_nearest_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: the coarsest rounding, which explains everything, named; a departure explained by a wrong formula."""

    class Keys(Ring):
        def verify(self, state: Any, window: Any, cursors: Any) -> Any:
            found = super().verify(state, window, cursors)
            state.k = state.k.bfloat16().float()
            return found

    s = subject(monkeypatch, Keys)
    near = nearest(s, held(s, s.ragged, emulated=True).first.step)
    assert near is not None and near[0] == "sites: {store_k_hat: bf16}"
    s = subject(monkeypatch, Decayed)
    assert nearest(s, held(s, s.ragged, emulated=True).first.step) is None


def test_without_a_reset_reuse_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what cannot be asked counted as passed, or as a failure."""

    class Fixed(Ring):
        def __getattribute__(self, name: str) -> Any:
            if name == "reset":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert outcome(monkeypatch, Fixed, "reuse") == Outcome("skipped", "it has no call reset")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults: a wrong exit status, a line no terminal shows, a file that says other than the table."""
    told = tmp_path / "found.json"
    assert conformance.main([VARIANT, *SMALL, "--check", "repeat,departure", "--json", str(told)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 80
    assert out.startswith("gdn_ring: outside, Ring, on cpu")
    found = json.loads(told.read_text())
    assert {n: o["result"] for n, o in found["checks"].items()} == {"repeat": "pass", "departure": "pass"}
    monkeypatch.setattr(import_file(EXAMPLE / "ring.py"), "Ring", Coarse)
    assert conformance.main([VARIANT, *SMALL, "--check", "repeat,departure", "--json", str(told)]) == 1
    found = json.loads(told.read_text())
    first = found["checks"]["departure"]["first"]
    assert found["nearest"].startswith("declared as sites: {checkpoint: bf16}, it would be within ")
    out = capsys.readouterr().out
    text = f"step {first['step']}, slot {first['slot']}, head {first['head']}, {first['quantity']}: off by"
    assert text in " ".join(out.split()) and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chunked_fp23"], "variants: 'chunked_fp23' is unknown"),
        ([VARIANT, "--check", "identiy"], "--check: 'identiy' is not one of identity, cursor"),
        ([VARIANT, "--ring", "15/4"], "ring.length: 15 is not a power of two"),
        ([VARIANT, "--heads", "2"], "--heads: '2' is not two sizes"),
        (["exact_fold", "--backend", "outside"], "backend: exact_fold names no outside implementation"),
        ([], "command line: the following arguments are required"),
    ],
)
def test_what_cannot_be_judged_is_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: nothing judged and status 0, or 1 as if a check had failed."""
    assert conformance.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"harness: error: {message}") and err.count("\n") == 1
