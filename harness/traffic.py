"""Bytes that a step must move through device memory, each counted once: state, history, window, outputs, records.

A verify reads the state, the history (d per value head, k_hat per key head, g per value head) and the window (q, k, v,
g, beta), and writes outputs and records. A flush also writes the state, and reads for it what its fold reads. A
snapshot verify writes a state per draft. Lengths, cursors and accepts, some integers a slot, are left out, and so is
whatever a kernel keeps for itself between two launches: that is its own choice.

A committed token costs the mean step of harness.steady, verify and commit, over the tokens it commits; every count
here is linear in lengths, so a mean length serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.arithmetic import Rounding
from harness.state import RECORDS
from harness.steady import Steady
from harness.tokens import Shape
from harness.variants import VariantSpec

# the sites whose format is that of something in memory
STORED = (
    *("checkpoint", "snapshot", "output"),
    *("store_v", "store_k", "store_k_hat", "store_d", "store_g", "store_beta"),
)


@dataclass(frozen=True)
class Moved:
    """Bytes: of states, and of all the rest."""

    state: float = 0
    rest: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.rest

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.state + other.state, self.rest + other.rest)

    def __mul__(self, n: float) -> Moved:
        return Moved(self.state * n, self.rest * n)


@dataclass(frozen=True)
class Traffic:
    """A design's bytes per slot, in windows of m tokens; m may be a mean.

    sizes    bytes a number, by field: checkpoint, output, every record, and snapshot where it is not as checkpoint
    written  the records a verify writes
    read     those of the history that a verify reads
    folded   those that a fold reads
    snapshot whether a verify writes a state per draft, of which a commit takes one
    """

    shape: Shape
    m: float
    sizes: Mapping[str, int]
    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    snapshot: bool = False

    @property
    def state(self) -> int:
        """One state of one slot."""
        s = self.shape
        return s.HV * s.V * s.K * self.sizes["checkpoint"]

    @property
    def draft(self) -> int:
        """One state that is kept for a draft."""
        s = self.shape
        return s.HV * s.V * s.K * self.sizes.get("snapshot", self.sizes["checkpoint"])

    def records(self, names: tuple[str, ...], n: float) -> float:
        """n records of each of these fields."""
        total = 0.0
        for name in names:
            heads, width = RECORDS[name]
            total += n * getattr(self.shape, heads) * (getattr(self.shape, width) if width else 1) * self.sizes[name]
        return total

    def window(self) -> float:
        """q, k, v in 16 bits, g and beta in 32, the outputs, and the records that are written."""
        s, m = self.shape, self.m
        inputs = 2 * m * (2 * s.H * s.K + s.HV * s.V) + 2 * 4 * m * s.HV
        return inputs + m * s.HV * s.V * self.sizes["output"] + self.records(self.written, m)

    def verify(self, w: float, flush: bool = False) -> Moved:
        """A window behind a history of w records; a flush folds them in the same step."""
        if flush:
            return Moved(2 * self.state, self.window() + self.records(self.folded, w))
        drafts = self.m * self.draft if self.snapshot else 0
        return Moved(self.state + drafts, self.window() + self.records(self.read, w))

    def fold(self, w: float) -> Moved:
        """A fold of w records by itself."""
        return Moved(2 * self.state, self.records(self.folded, w))

    def commit(self, w: float) -> Moved:
        """What a commit moves: one draft's state, or a fold of w records where the ring folds at once (else w = 0)."""
        if self.snapshot:
            return Moved(self.draft + self.state)
        return self.fold(w) if w else Moved()

    def per_token(self, mean: Steady) -> Moved:
        """What a committed token moves in the mean step, whose window is m."""
        total = Moved()
        for w, share in mean.found.items():
            total += self.verify(w, w in mean.flushed) * share
        for w, share in mean.folded.items():
            total += self.commit(w) * share
        return total * (1 / mean.committed)

    def held(self, L: int, max_window: int) -> int:
        """What a slot holds between two steps: the checkpoint, L rows of every record, a state per draft."""
        drafts = max_window * self.draft if self.snapshot else 0
        return self.state + drafts + round(self.records(self.written, L))


def stated(roundings: Mapping[str, Rounding]) -> dict[str, int]:
    """Bytes a number by field, of the roundings of the sites STORED: formats as a design states them, whatever
    carries its numbers in an emulation."""
    sizes = {site.removeprefix("store_"): roundings[site].nbytes for site in STORED}
    for name in ("k_hat", "d"):
        # their low parts are records of their own
        sizes[name] = sizes[f"{name}_lo"] = roundings[f"store_{name}"].high.nbytes
    return sizes


def of_design(design: Any, shape: Shape, m: float) -> Traffic:
    """The bytes of a design: in the formats of its tensors where it has its own, as kernels do, else as stated."""
    if hasattr(design, "formats"):
        sizes = {name: dtype.itemsize for name, dtype in design.formats.items()}
    else:
        sizes = stated(vars(design.arithmetic.sites))
    return of_spec(design.spec, tuple(design.records), sizes, shape, m)


def of_spec(spec: VariantSpec, written: tuple[str, ...], sizes: Mapping[str, int], shape: Shape, m: float) -> Traffic:
    """What a declaration moves, whose ring keeps the records `written`."""
    snapshot = spec.fold == "snapshot"
    low = ("d_lo", "k_hat_lo") if spec.history_read == "sum" else ()
    read = tuple(n for n in written if n in ("d", "k_hat", "g", *low))
    if spec.verify == "tokens":
        read = written
    if spec.fold == "replay":
        folded: tuple[str, ...] = ("v", "k", "g", "beta")
    else:
        folded = tuple(n for n in written if n in ("d", "d_lo", "k_hat", "k_hat_lo", "g"))
    return Traffic(shape, m, sizes, written, () if snapshot else read, () if snapshot else folded, snapshot)
