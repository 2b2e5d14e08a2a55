"""Steps whose outcome is known before, compiled: where every window begins, and what a block does to the cursors.

Both are a few integer operations a step and slot, a hundred times faster here than in Python; threads go on meanwhile.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from harness.compiled.common import I1, I2, I3, compiled
from harness.ring import Cursors


class Course(NamedTuple):
    """What the cursors of every slot are in every step, [W, B] each; idle slots keep theirs.

    Where a history lies, ends and whether it is flagged, as the verify finds them; after the commit where it lies and
    how many records are folded at once; then all three when that is done.
    """

    base: np.ndarray
    end: np.ndarray
    flag: np.ndarray
    new_base: np.ndarray
    folded: np.ndarray
    last_base: np.ndarray
    last_end: np.ndarray
    last_flag: np.ndarray


def course(
    cursors: Cursors, lengths: np.ndarray, accepted: np.ndarray, fold_current: bool = False
) -> tuple[Course, Cursors]:
    """Verify and commit through W steps, lengths and accepted [W, B], 0 for an idle slot; and the cursors after.

    fold_current: a flag folds the token at hand too. Raises RingError as harness.ring.Cursors does.
    """
    spec, B = cursors.spec, cursors.slots
    lengths, accepted = (np.ascontiguousarray(x, dtype=np.int64) for x in (lengths, accepted))
    state = np.array([cursors.write_pos, cursors.cache_base, cursors.is_flush], dtype=np.int64)
    out = np.zeros((len(Course._fields), *lengths.shape), dtype=np.int64)
    rules = np.array([spec.length, spec.max_window, cursors.flush_at, spec.fold_when == "commit", fold_current])
    if max(cursors.window, default=-1) >= 0 or not _course(state, lengths, accepted, rules.astype(np.int64), out):
        _refuse(copy.deepcopy(cursors), lengths, accepted, fold_current)
    after = Cursors(spec, B)
    after.write_pos, after.cache_base, after.is_flush = state[0].tolist(), state[1].tolist(), (state[2] > 0).tolist()
    return Course(*out), after


def _refuse(cursors: Cursors, lengths: np.ndarray, accepted: np.ndarray, fold_current: bool) -> None:
    """Step by step, to the RingError that says what is wrong."""
    for row, counts in zip(lengths, accepted, strict=True):
        slots = np.flatnonzero(row).tolist()
        cursors.verify(slots, row[slots].tolist())
        cursors.absorb(cursors.step(slots, counts[slots].tolist(), fold_current))
    raise AssertionError("the compiled cursors refuse what the readable ones accept")


@compiled(f"{I2}, {I2}, {I2}, {I1}, {I3}", "boolean")
def _course(state, lengths, accepted, rules, out):
    L, widest, flush_at, at_commit, current = rules
    for b in range(lengths.shape[1]):
        w, base, flag = state[0, b], state[1, b], state[2, b]
        for i in range(lengths.shape[0]):
            m, n = lengths[i, b], accepted[i, b]
            out[0, i, b], out[1, i, b], out[2, i, b] = base, w, flag
            folded = 0
            if m != 0:
                token = current and flag
                if not (0 <= w <= L and 0 <= base < L and 1 <= m <= widest and w + m <= L and 0 <= n <= m):
                    return False
                if token and n == 0:
                    return False
                if flag:
                    base = (base + w) & (L - 1) if n > 0 else base
                    w = n
                else:
                    w += n
                over = w >= flush_at
                flag = 1 if over and not at_commit else 0
                out[3, i, b] = base
                if token or (over and at_commit):
                    folded = 0 if token else w
                    base, w, flag = (base + w) & (L - 1), 0, 0
            else:
                out[3, i, b] = base
            out[4, i, b], out[5, i, b], out[6, i, b], out[7, i, b] = folded, base, w, flag
        state[0, b], state[1, b], state[2, b] = w, base, flag
    return True


@compiled(f"{I1}, int64, {I2}, {I2}, {I1}, {I3}")
def positions(first, end, sizes, counts, number, out):
    """out [3, W, B]: begin, length and accepted tokens of W steps of every slot from first [B] on; length 0 at the end.

    sizes [B, span] window lengths by token, from first on. counts [B, span] accepted tokens likewise; or, with
    number [B] >= 0, those of every step in turn, of which number have been taken.
    """
    for b in range(first.shape[0]):
        t = first[b]
        for i in range(out.shape[1]):
            out[0, i, b], out[1, i, b], out[2, i, b] = t, 0, 0
            if t < end:
                at = t - first[b]
                m = sizes[b, at]
                n = counts[b, at] if number[b] < 0 else counts[b, (number[b] + i) % counts.shape[1]]
                n = min(n, m, end - t)
                out[1, i, b], out[2, i, b] = m, n
                t += n
