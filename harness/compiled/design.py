"""A declared design with its step compiled: the same four calls, state and roundings as reference.Emulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Operand
from harness.compiled import block, measure, passes, window
from harness.compiled.codes import codes, column_order, flags
from harness.compiled.common import BASE, END, FLAGS, HISTORY, KEEP, LIVE, PLAN, POINT
from harness.compiled.operands import Tokens, array, empty, given, replay_operands, stored, token_operands
from harness.reference.emulated import Emulated, everyone
from harness.reference.state import EmulatedState, Lazy, Verified
from harness.state import RECORDS
from harness.window import Step, Windows


class Pass:
    """A token pass in waiting: run once the number of tokens of every slot is known, or asked for whole."""

    def __init__(self, design: Compiled, S: Tensor, q: np.ndarray, operands: Tokens):
        self.design, self.S, self.q, self.operands = design, S, q, operands
        n, HV, V, _ = S.shape
        self.lanes = 0
        self.whole = {name: empty(n, HV, q.shape[2], V) for name in ("o", "d")}

    def run(self, lengths: Sequence[int]) -> Tensor:
        """The states after lengths[s] tokens of every slot, [n, HV, V, K]."""
        out = self.design.pass_tokens(self.S, self.q, self.operands, lengths, *self.whole.values())
        self.lanes = max(self.lanes, *lengths)
        return out

    def advance(self, lanes: int, keep: bool = False) -> None:
        """Outputs and writes of the first `lanes` lanes of every slot."""
        del keep
        if lanes > self.lanes:
            self.run([lanes] * len(self.S))

    def close(self) -> None:
        self.S = torch.empty(0)

    @property
    def o(self) -> Tensor:
        return self.whole["o"][:, :, : self.lanes].mT

    @property
    def d(self) -> Tensor:
        return self.whole["d"][:, :, : self.lanes].mT


class Compiled(Emulated):
    """`spec` in `arithmetic` on `ring`, on the CPU; `unsupported` must have nothing to say."""

    engine = "compiled"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.codes = codes(self.arithmetic)
        self.flags = flags(self.spec, self.arithmetic)
        # a verify alone writes what is stored, not what a replay makes of it
        self.verify_flags = self.flags * (np.array(FLAGS) != "replay")
        self.cumulative = self.spec.gate_record == "cumulative"

    @cached_property
    def fused(self) -> Any:
        from harness.compiled.lockstep import fused

        return fused(self)

    def order(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """column_order of the recurrence's sum over n products."""
        return column_order(self.arithmetic.dots.recurrent, n)

    def pass_tokens(
        self, S: Tensor, q: np.ndarray, operands: Tokens, lengths: Sequence[int], o: Tensor, d: Tensor
    ) -> Tensor:
        """passes.token_pass in this design's arithmetic: the states after lengths[s] tokens of slot s."""
        out = empty(*S.shape)
        passes.token_pass(
            array(S.contiguous()), operands.k, q, *operands[1:], np.array(lengths), *self.order(S.shape[-1]),
            self.flags, self.codes, array(out), array(o), array(d),
        )  # fmt: skip
        return out

    def ring_of(self, state: EmulatedState, derived: Tokens | None = None) -> tuple[np.ndarray, ...]:
        """The fields of fold.RING: records with all four axes, empty where this design keeps none."""
        B, s = state.slots, state.shape
        none = {"H": np.empty((B, s.H, 0, s.K)), "HV": np.empty((B, s.HV, 0, s.V))}
        fields = []
        for name in ("k_hat", "k_hat_lo", "d", "d_lo", "g", "v", "k", "beta"):
            field = state.arrays.get(name, none[RECORDS[name][0]])
            fields.append(field if field.ndim == 4 else field[..., None])
        if derived is None:
            return (*fields, none["H"], none["HV"], none["HV"])
        return (*fields, derived.k, derived.v, derived.eg[..., None])

    def operands(self, windows: Windows, steps: slice, replay: bool = False) -> tuple[Any, Any]:
        """What decode_windows is given and stores, of some steps."""
        a = self.arithmetic
        both = given(windows, a, self.spec.inverse), stored(windows, a, self.records, self.cumulative, replay)
        return tuple(x[steps] for x in both[0]), tuple(x[steps] for x in both[1])

    def derived(self, state: EmulatedState) -> Tokens | None:
        """What a replay makes of the records in every row of the ring."""
        if self.spec.fold != "replay":
            return None
        v, k, g, beta = (state.records[name] for name in ("v", "k", "g", "beta"))
        made = replay_operands(v, k, g, beta, self.arithmetic)
        return made._replace(k=array(self.arithmetic.sites.key(torch.from_numpy(made.k))))

    def _verify_window(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Verified:
        i, s, cursors, live = step.index, state.shape, state.cursors, step.windows.lengths[step.index]
        m = step.windows.m
        plan = np.zeros((1, state.slots, len(PLAN)), dtype=np.int64)
        columns = LIVE, BASE, END, HISTORY, KEEP, POINT
        for column, values in zip(columns, (live, cursors.cache_base, cursors.write_pos, history, m, -1), strict=True):
            plan[0, :, column] = values
        o, d = (empty(state.slots, m, s.HV, s.V) for _ in range(2))
        nothing = np.empty((0, 1, 1, 1, 1)), np.empty((0, 1, 1, 1))
        block.decode_windows(
            array(state.checkpoint), self.ring_of(state), *self.operands(step.windows, slice(i, i + 1)), plan,
            self.verify_flags, *self.order(s.K), self.codes, False, nothing[0], array(o), array(d), nothing[1],
        )  # fmt: skip
        return Verified(o.permute(0, 2, 3, 1), d.permute(0, 2, 3, 1))

    def _verify_tokens(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Lazy:
        i, a, windows = step.index, self.arithmetic, step.windows
        base = self._base(state, range(state.slots), history)
        _, v, beta, eg = token_operands(windows, a)
        k, q = (array(x[i].contiguous()) for x in windows.keys(a))
        run: Any = Pass(self, base, q, Tokens(k, v[i], beta[i], eg[i]))
        state.drafts = Lazy(run, state.shape, max(step.lengths))
        return state.drafts

    def _accepted(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int], run: Any) -> Tensor:
        lengths = [0] * state.slots
        for slot, n in zip(slots, accepted, strict=True):
            lengths[slot] = n
        value: Tensor = run.run(lengths)
        return value if everyone(slots, state.slots) else value[list(slots)]

    def _write(self, state: EmulatedState, step: Step, history: Sequence[int], result: Verified | Lazy) -> None:
        # a window has written its records already
        if self.spec.verify == "tokens":
            super()._write(state, step, history, result)

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        return self._gathered(state, slots, lengths, array(state.checkpoint), True)

    def _served(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._gathered(state, slots, lengths, array(self._operand(state)[0]), False)

    def _gathered(
        self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], C: np.ndarray, kept: bool
    ) -> Tensor:
        out = empty(len(slots), *state.checkpoint.shape[1:])
        base = np.array([state.cursors.cache_base[slot] for slot in slots])
        ring = self.ring_of(state, self.derived(state) if kept else None)
        block.fold_slots(
            C.reshape(state.checkpoint.shape), ring, np.array(slots), base, np.array(lengths), self.flags,
            *self.order(state.shape.K), self.codes, kept, array(out),
        )  # fmt: skip
        return out

    def _read_operand(self, state: EmulatedState, C: Tensor) -> Operand:
        shape = -1, state.shape.group * state.shape.V, state.shape.K
        read = empty(*C.shape)
        window.read_checkpoint(
            array(C.contiguous()).reshape(-1, shape[2]), self.flags, self.codes, array(read).reshape(-1, shape[2])
        )
        return (read.view(shape),)


def distance(X: Tensor, S: Tensor) -> Tensor:
    """metrics.state_errors on the CPU, in one pass."""
    out = empty(*S.shape[:2], 2)
    measure.distance(array(X.contiguous()), array(S.contiguous()), array(out))
    return out


def token_distances(x_hat: Tensor, x: Tensor, at: Tensor, of: Tensor) -> Tensor:
    """metrics.token_errors on the CPU, in one pass."""
    out = empty(x.shape[1], len(at))
    measure.token_distance(array(x_hat.contiguous()), array(x.contiguous()), array(at), array(of), array(out))
    return out
