"""Where a slot's history stands over a long decode, by the rule of harness.ring: expectations, nothing is drawn.

A step finds w records, commits n of a window of m with the chances of the acceptance, and is left with n of them
after a flush and w + n otherwise. That is a Markov chain over 0..L; what is returned are its long-run shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.acceptance import chances
from harness.config import AcceptanceConfig, DecodeConfig
from harness.ring import RingSpec

Floats = NDArray[np.float64]
DOUBLINGS = 50  # 2^50 steps: longer than any chain over a ring remembers


@dataclass(frozen=True)
class Steady:
    """The mean step. Lengths are in records; shares are of the steps.

    window, committed  mean tokens of a window, and of it committed
    found              history length -> share of the steps that begin on it
    flushed            the same, of those that fold it in their verify (fold_when=next)
    folded             history length -> share of the steps whose commit folds it (fold_when=commit)
    """

    window: float
    committed: float
    found: Mapping[int, float]
    flushed: Mapping[int, float]
    folded: Mapping[int, float]


def steady(ring: RingSpec, decode: DecodeConfig, acceptance: AcceptanceConfig, current: bool = False) -> Steady:
    """The mean step of a ring; current: a flush folds the token at hand too, as in VariantSpec.fold_current.

    A fixed acceptance is followed in its order, from its first count on an empty history.
    """
    assert ring.flush_at is not None
    L, next_ = ring.length, ring.fold_when == "next"
    phases = len(acceptance.sequence or [0]) if acceptance.kind == "fixed" else 1
    moves, folds, counts = np.zeros((phases, L + 1, L + 1)), np.zeros((phases, L + 1, L + 1)), np.zeros(phases)
    for phase in range(phases):
        for n, chance in _counts(decode, acceptance, phase):
            counts[phase] += chance * n
            for w in range(L + 1):
                flush = next_ and w >= ring.flush_at
                after = (0 if current else n) if flush else w + n
                if after > L:
                    # no legal history is so long
                    continue
                if not next_ and after >= ring.flush_at:
                    folds[phase, w, after] += chance
                    after = 0
                moves[phase, w, after] += chance
    at = np.empty((phases, L + 1))
    at[0] = _long_run(moves)
    for phase in range(1, phases):
        at[phase] = at[phase - 1] @ moves[phase - 1]
    share = at.mean(0)
    folded = np.einsum("pw,pwn->n", at, folds) / phases
    found = {w: float(x) for w, x in enumerate(share) if x > 0}
    return Steady(
        window=(1 + decode.window) / 2 if decode.ragged else float(decode.window),
        committed=float(counts.mean()),
        found=found,
        flushed={w: x for w, x in found.items() if next_ and w >= ring.flush_at},
        folded={w: float(x) for w, x in enumerate(folded) if x > 0},
    )


def _counts(decode: DecodeConfig, acceptance: AcceptanceConfig, step: int) -> Iterator[tuple[int, float]]:
    """Every count n of a step and its chance, over the lengths that its window may have."""
    lengths = range(1, decode.window + 1) if decode.ragged else (decode.window,)
    for m in lengths:
        for n, p in enumerate(chances(acceptance, m, step)):
            if p > 0:
                yield n, float(p) / len(lengths)


def _long_run(moves: Floats) -> Floats:
    """Shares [L + 1] of the histories that the first phase finds, in a decode that began on an empty one."""
    cycle = moves[0]
    for move in moves[1:]:
        cycle = cycle @ move
    # resting every other time on average changes no share, and a chain that goes in circles then settles
    settled = (cycle + np.eye(len(cycle))) / 2
    for _ in range(DOUBLINGS):
        settled = settled @ settled
        # a row that leads beyond the ring is no history's
        total = settled.sum(1, keepdims=True)
        settled = np.divide(settled, total, out=settled, where=total > 0)
    return np.where(settled[0] > 1e-12, settled[0], 0.0)
