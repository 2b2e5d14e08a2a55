"""Faults planted in the package, each of which the identity must notice: a check that cannot fail guards nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXACT, SHAPE, close, design, draw, fuzz, windows

from harness.arithmetic import Arithmetic, Conventions
from harness.conditioning import conditioning, window_operator
from harness.config import PrecisionConfig, RingConfig
from harness.reference import fold
from harness.reference.emulated import Emulated
from harness.reference.inverse import INVERSES, Inverse, substitution
from harness.ring import Cursors
from harness.state import Lanes, Rows, State
from harness.tokens import Shape
from harness.variants import VariantSpec
from harness.window import Windows

Patch = pytest.MonkeyPatch


@dataclass
class Fault:
    """plant(monkeypatch) breaks the package; the rest says what is run while it is broken."""

    plant: Callable[[Patch], None]
    spec: dict[str, Any] = field(default_factory=dict)
    ring: RingConfig = field(default_factory=RingConfig)
    shape: Shape = SHAPE
    precision: PrecisionConfig = field(default_factory=lambda: EXACT)
    judge: Conventions = field(default_factory=Conventions)

    def check(self) -> None:
        """The identity on the design at hand; AssertionError where it does not hold."""
        for seed in range(3):
            maker = design(VariantSpec(name="planted", **self.spec), self.ring, self.precision)
            fuzz(maker, seed, steps=25, shape=self.shape, resets=(-160.0,), judge=self.judge)


def after(target: Any, name: str, then: Callable[..., Any]) -> Callable[[Patch], None]:
    """Patch target.name: then(result, *arguments) runs behind it, and its value, unless None, is the new result."""

    def plant(patch: Patch) -> None:
        real = getattr(target, name)

        def broken(*args: Any, **keys: Any) -> Any:
            result = real(*args, **keys)
            other = then(result, *args)
            return result if other is None else other

        patch.setattr(target, name, broken)

    return plant


def instead(target: Any, name: str, how: Callable[..., Any]) -> Callable[[Patch], None]:
    """Patch target.name by how(real, *arguments)."""

    def plant(patch: Patch) -> None:
        real = getattr(target, name)
        patch.setattr(target, name, lambda *args, **keys: how(real, *args, **keys))

    return plant


def base_off_by_one(real: Any, self: Cursors, slots: Any, accepted: Any) -> Any:
    flushed = [s for s in slots if self.flushed[s]]
    full = real(self, slots, accepted)
    for slot in flushed:
        self.cache_base[slot] = (self.cache_base[slot] + 1) & (self.spec.length - 1)
    return full


def commit_as(count: Callable[[int, int], int]) -> Callable[[Patch], None]:
    """count(n, m): what is kept where n of a window of m are accepted."""

    def how(real: Any, self: Cursors, slots: Any, accepted: Any) -> Any:
        return real(self, slots, [count(n, self.window[s]) for s, n in zip(slots, accepted, strict=True)])

    return instead(Cursors, "commit", how)


def stale_state(real: Any, self: State, slots: Any, initial: torch.Tensor) -> None:
    old = self.checkpoint[list(slots)].clone()
    real(self, slots, initial)
    if torch.isfinite(old).all():
        self.checkpoint[list(slots)] = old


def stale_cursors(real: Any, self: Cursors, slots: Any) -> None:
    old = [(s, self.write_pos[s]) for s in slots]
    real(self, slots)
    for slot, w in old:
        self.write_pos[slot] = w


def last_record_dropped(real: Any, C: Any, d: torch.Tensor, *rest: Any) -> torch.Tensor:
    d = d.clone()
    d[:, :, -1:] = 0
    return real(C, d, *rest)


def misread(real: Any, self: Rows, name: str) -> torch.Tensor:
    mask, self.behind = getattr(self, "behind", None), None
    value = real(self, name)
    self.behind = mask
    return value


def row_late(result: Any, self: Lanes, *_: Any) -> None:
    if self.span is None:
        self.row = (self.row + 1) & (self.state.spec.length - 1)
    else:
        self.span = slice(self.span.start + 1, self.span.stop + 1)


def series_one_short(A: torch.Tensor, a: Any) -> torch.Tensor:
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    return (eye - A) @ (eye + A @ A) if A.shape[-1] > 4 else eye - A


def inverse_as(form: Callable[..., torch.Tensor]) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(INVERSES, "substitution", Inverse(form))


def one_short(real: Any, self: Emulated, state: Any, source: int, target: int, prefix: int) -> None:
    real(self, state, source, target, max(prefix - 1, 0))


def nothing(real: Any, *_: Any) -> None:
    """In place of what ought to be done."""


def transposed(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return result.transpose(-1, -2).reshape(result.shape)


COMMIT = RingConfig(16, 4, fold_when="commit")
REPLAY, TOKENS = {"fold": "replay"}, {"verify": "tokens", "fold": "replay"}
NOTHING: Callable[[Patch], None] = lambda patch: None  # noqa: E731
TWO = PrecisionConfig(base="exact", sites={"store_d": "fp32x2", "store_k_hat": "fp32x2"})
FAULTS = {
    "base off by one": Fault(instead(Cursors, "commit", base_off_by_one)),
    "dropped bonus token": Fault(commit_as(lambda n, m: max(n - 1, 0))),
    "rejected lane kept": Fault(commit_as(lambda n, m: min(n + 1, m))),
    "flush before the accepts are known": Fault(commit_as(lambda n, m: m), ring=COMMIT),
    "folded, not absorbed": Fault(instead(Cursors, "absorb", nothing), ring=RingConfig(32, 4, 1, "commit")),
    "transposed on fold": Fault(after(fold, "product", transposed)),
    "transposed on fold, K = V": Fault(after(fold, "product", transposed), shape=Shape(2, 6, 8, 8)),
    "transposed on replay": Fault(after(fold, "replay", transposed), REPLAY, shape=Shape(2, 6, 8, 8)),
    "decay after the error": Fault(NOTHING, {**TOKENS, "conventions": {"decay": "after"}}),
    "eps on the mean": Fault(NOTHING, {"conventions": {"eps_at": "mean"}}),
    "stale state": Fault(instead(State, "reset", stale_state)),
    "stale cursors": Fault(instead(Cursors, "reset", stale_cursors)),
    "writes not decayed": Fault(after(fold, "record_decays", lambda x, *_: (torch.ones_like(x[0]), x[1]))),
    "checkpoint not decayed": Fault(after(fold, "record_decays", lambda x, *_: (x[0], torch.ones_like(x[1])))),
    "last record dropped": Fault(instead(fold, "product", last_record_dropped)),
    "history beyond its length": Fault(instead(Rows, "read", misread)),
    "history beyond its length, replay": Fault(instead(Rows, "read", misread), REPLAY),
    "records a row late": Fault(after(Lanes, "__init__", row_late)),
    "copy without cursors": Fault(instead(Cursors, "copy", nothing)),
    "snapshot one short": Fault(instead(Emulated, "snapshot", one_short)),
    "series one power short": Fault(inverse_as(series_one_short), ring=RingConfig(32, 8)),
    "transposed inverse": Fault(inverse_as(lambda A, a: substitution.inverse(A, a).transpose(1, 2))),
    "low part not read": Fault(NOTHING, {"history_read": "hi"}, precision=TWO),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_identity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault of the check: one of the faults above passing as the recurrence."""
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        fault.check()


def test_the_same_checks_pass_without_the_faults() -> None:
    """Fault of the check: one that fails on anything, and so proves nothing."""
    checks = {repr((f.spec, f.ring, f.shape)): f for f in FAULTS.values() if f.plant is not NOTHING}
    for fault in checks.values():
        fault.check()


def ragged_conditioning() -> None:
    """What is said of a window of 4 in a batch of 9 against the same window alone."""
    rng = np.random.default_rng(0)
    tokens = draw(rng, 1, 2, 9)
    both, alone = windows(tokens, [[9, 4]], pad=-1.0), windows(tokens.map(lambda x: x[:, 1:, :4]), [[4]])
    close("conditioning", conditioning(both)[:, 1:], conditioning(alone))
    for x, y in zip(*(window_operator(x, Arithmetic(), "substitution") for x in (both, alone)), strict=True):
        close("operator", x[:, 1:], y)


@pytest.mark.parametrize("name", ["g", "beta", "k"])
def test_a_padded_lane_taken_along_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: gate, beta or key of a padded lane, which would reach the matrix of a window that ends before it."""
    ragged_conditioning()

    def unpadded(result: Any, self: Windows, tokens: Any, lengths: Any, *_: Any) -> None:
        # the window of 4 is the last slot of both batches; alone it has no lane behind it
        if name == "k":
            self.k[0, -1, :, 4:] = 1.0
            self.beta[0, -1, :, 4:] = 1.0
        else:
            getattr(self, name)[0, -1, :, 4:] = -1.0 if name == "g" else 1.0
            self.k[0, -1, :, 4:] += float(name == "beta")

    after(Windows, "__init__", unpadded)(monkeypatch)
    with pytest.raises(AssertionError):
        ragged_conditioning()
