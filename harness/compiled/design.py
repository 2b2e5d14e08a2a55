"""A declared design with its step compiled: the same four calls, state and roundings as reference.Emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import EXACT, PRODUCTS, SITES, Arithmetic, Operand, block_masks
from harness.compiled import kernels, tokens
from harness.compiled.common import CODES
from harness.compiled.operands import TokenRows, array, empty, stored_rows, token_rows, token_scalars, window_rows
from harness.compiled.rounding import code
from harness.reference.emulated import Emulated, everyone
from harness.reference.inverse import INVERSES
from harness.reference.state import EmulatedState, Lazy, Verified
from harness.state import Rows
from harness.variants import VariantSpec
from harness.window import Step, normalise


def unsupported(spec: VariantSpec, a: Arithmetic) -> str | None:
    """Why a design cannot be compiled, or None."""
    for name in SITES:
        r = getattr(a.sites, name)
        if r.mode == "stochastic":
            return f"site {name} is stochastic"
        if r.parts == 2 and name not in ("store_d", "store_k_hat"):
            return f"site {name} keeps two parts"
    for name in PRODUCTS:
        dot = getattr(a.dots, name)
        if dot.x3 or dot.right.parts == 2 or (dot.left.parts == 2 and name != "state"):
            return f"product {name} reads two parts"
        if dot.block and name not in ("recurrent", "inverse", "gram"):
            return f"product {name} accumulates in blocks"
    recurs = spec.verify == "tokens" or spec.fold == "replay" or spec.fold_current
    if recurs and not a.dots.recurrent.right.keeps(a.sites.key):
        return "the recurrence reads its keys rounded"
    return None


def codes(a: Arithmetic) -> np.ndarray:
    """[len(CODES), 6] the roundings of a step, each left out where the value already has its format."""
    s, d = a.sites, a.dots
    high = s.store_k_hat if s.store_k_hat.parts == 1 else EXACT
    table = {
        "decay": code(s.decay),
        "score_left": code(d.history_score.left, high),
        "score_acc": code(d.history_score.accumulate),
        "score": code(s.history_score, d.history_score.accumulate),
        "score_right": code(d.history.right, s.history_score),
        "history_d": code(s.history_d),
        "history_left": code(d.history.left, s.history_d),
        "history_acc": code(d.history.accumulate),
        "state_acc": code(d.state.accumulate),
        "rhs": code(s.rhs),
        "solve_left": code(d.solve.left, s.rhs),
        "solve_acc": code(d.solve.accumulate),
        "inverse": code(s.inverse),
        "d": code(s.d),
        "output_left": code(d.output.left, s.d),
        "output_acc": code(d.output.accumulate),
        "output": code(s.output),
        "store_d": code(s.store_d if s.store_d.parts == 1 else s.store_d.high, s.d if s.store_d.parts == 1 else None),
        "fold_d": code(s.fold_d),
        "fold_left": code(d.fold.left, s.fold_d),
        "fold_k": code(s.fold_k, high),
        "fold_right": code(d.fold.right, s.fold_k),
        "fold_acc": code(d.fold.accumulate),
        "checkpoint": code(s.checkpoint),
        "step": code(s.step),
        "recurrent_left": code(d.recurrent.left, s.step),
        "recurrent_acc": code(d.recurrent.accumulate),
    }
    return np.stack([table[name] for name in CODES])


class Pass:
    """A token pass in waiting: run once the number of tokens of every slot is known, or asked for whole."""

    def __init__(self, design: Compiled, S: Tensor, rows: TokenRows):
        self.design, self.S, self.rows = design, S, rows
        n, HV, V, _ = S.shape
        self.lanes = 0
        self.whole = {name: empty(n, HV, V, rows.k.shape[2]) for name in ("o", "d")}

    def run(self, lengths: Sequence[int]) -> Tensor:
        """The states after lengths[s] tokens of every slot, [n, HV, V, K]."""
        out = empty(*self.S.shape)
        self.design.pass_tokens(self.S, self.rows, np.array(lengths), out, *self.whole.values())
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
        return self.whole["o"][..., : self.lanes]

    @property
    def d(self) -> Tensor:
        return self.whole["d"][..., : self.lanes]


class Compiled(Emulated):
    """`spec` in `arithmetic` on `ring`, on the CPU; `unsupported` must have nothing to say."""

    engine = "compiled"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.codes = codes(self.arithmetic)
        self.exact = self.arithmetic.sites.decay.exact
        self.cumulative = self.spec.gate_record == "cumulative"
        self.explicit = INVERSES[self.spec.inverse].explicit
        # what a chunked window stores and its inputs decide
        given = [name for name in self.records if name not in ("k_hat", "g", "d", "d_lo")]
        self.inputs = ("k_hat", "g", *given)
        self._none = np.empty((1, 1, 0, 1))
        self._masks: dict[int, np.ndarray] = {}

    def pass_tokens(self, S: Tensor, rows: TokenRows, lengths: np.ndarray, out: Tensor, o: Tensor, d: Tensor) -> None:
        """tokens.token_pass in this design's arithmetic."""
        tokens.token_pass(array(S), *rows, lengths, self.masks(S.shape[-1]), self.codes, array(out), array(o), array(d))

    def masks(self, n: int) -> np.ndarray:
        """[blocks, n] which block of the recurrence's sum takes each of n products."""
        if n not in self._masks:
            dot = self.arithmetic.dots.recurrent
            found = block_masks(n, dot.block, dot.strided, torch.device("cpu")) if dot.blocked(n) else torch.ones(n, 1)
            self._masks[n] = np.ascontiguousarray(found.T.numpy(), dtype=np.float64)
        return self._masks[n]

    def _C(self, state: EmulatedState) -> np.ndarray:
        """The checkpoint as products read it, [slots, HV, V, K]."""
        return array(self._operand(state)[0]).reshape(state.checkpoint.shape)

    def _low(self, read: bool) -> tuple[bool, bool]:
        """Whether the low parts of k_hat and of d are read: where they are wanted and kept."""
        return read and "k_hat_lo" in self.records, read and "d_lo" in self.records

    def _ring(self, state: EmulatedState) -> tuple[np.ndarray, ...]:
        field = state.arrays
        lo = (field.get("k_hat_lo", self._none), field.get("d_lo", self._none))
        return field["k_hat"], lo[0], field["d"], lo[1], field["g"]

    def _verify_window(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Verified:
        rows = window_rows(step.windows, self.arithmetic, self.spec.inverse)[step.index]
        o, d = empty(*rows.v.shape), empty(*rows.v.shape)
        low = self._low(self.spec.history_read == "sum")
        kernels.verify_window(
            self._C(state), *rows, self.explicit, *self._ring(state), *low, self.cumulative, self.exact,
            np.array(state.cursors.cache_base), np.array(history), step.windows.lengths[step.index],
            self.codes, array(o), array(d),
        )  # fmt: skip
        return Verified(o, d)

    def _verify_tokens(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Lazy:
        base = self._base(state, range(state.slots), history)
        run: Any = Pass(self, base, token_rows(step.windows, self.arithmetic)[step.index])
        state.drafts = Lazy(run, state.shape, max(step.lengths))
        return state.drafts

    def _accepted(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int], run: Any) -> Tensor:
        lengths = [0] * state.slots
        for slot, n in zip(slots, accepted, strict=True):
            lengths[slot] = n
        value: Tensor = run.run(lengths)
        return value if everyone(slots, state.slots) else value[list(slots)]

    def _write(self, state: EmulatedState, step: Step, history: Sequence[int], result: Verified | Lazy) -> None:
        if self.spec.verify == "tokens" or self.cumulative:
            return super()._write(state, step, history, result)
        cursors, live, ring = state.cursors, step.windows.lengths[step.index], state.arrays
        first = np.array(cursors.cache_base) + np.array(cursors.write_pos)
        k_hat, g, *rest = stored_rows(step.windows, self.arithmetic, self.inputs)[step.index]
        assert result.d is not None
        d = array(result.d)
        tokens.write_window(ring["k_hat"], ring["d"], ring["g"], k_hat, g, d, first, live, self.codes)
        if "d_lo" in ring:
            tokens.write_low(ring["d"], ring["d_lo"], d, first, live, self.codes)
        for name, value in zip(self.inputs[2:], rest, strict=True):
            field = ring[name]
            if field.ndim == 3:
                field, value = field[..., None], value[..., None]
            tokens.write_rows(field, value, first, live)
        return None

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        if self.spec.fold == "product":
            return self._gathered(state, slots, lengths, array(state.checkpoint), True)
        rows, a = Rows(state, slots, lengths), self.arithmetic
        v, k, g, beta = (rows.read(name) for name in ("v", "k", "g", "beta"))
        k_hat = a.sites.key(normalise(k, a.conventions)).contiguous()
        scalars = token_scalars(v, beta, a.sites.decay(g.exp()), a)
        operands = TokenRows(k_hat.numpy(), self._none, *(x.contiguous().numpy() for x in scalars))
        S = state.checkpoint if everyone(slots, state.slots) else state.checkpoint[list(slots)]
        out, unused = empty(*S.shape), empty(*S.shape[:3], k.shape[2])
        self.pass_tokens(S, operands, np.array(lengths), out, unused, unused)
        if not a.sites.checkpoint.keeps(a.sites.step):
            tokens.round_all(out.view(-1, S.shape[-1]).numpy(), self.codes[CODES.index("checkpoint")], code(EXACT))
        return out

    def _served(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._gathered(state, slots, lengths, self._C(state), False)

    def _gathered(
        self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], C: np.ndarray, kept: bool
    ) -> Tensor:
        out = empty(len(slots), *state.checkpoint.shape[1:])
        base = np.array([state.cursors.cache_base[slot] for slot in slots])
        low = self._low(kept or self.spec.history_read == "sum")
        kernels.fold_product(
            C, *self._ring(state), *low, self.cumulative, self.exact, np.array(slots), base,
            np.array(lengths), self.codes, kept, array(out),
        )  # fmt: skip
        return out

    def _read_operand(self, state: EmulatedState, C: Tensor) -> Operand:
        a = self.arithmetic
        site, left, of = a.sites.state_operand, a.dots.state.left, a.sites.checkpoint
        if left.parts == 2 or (site.keeps(of) and left.keeps(of)):
            return super()._read_operand(state, C)
        rounded = C.contiguous().clone()
        tokens.round_all(rounded.view(-1, C.shape[-1]).numpy(), code(site, of), code(left))
        return (rounded.view(-1, state.shape.group * state.shape.V, state.shape.K),)


def distance(X: Tensor, S: Tensor) -> Tensor:
    """metrics.state_errors on the CPU, in one pass."""
    out = empty(*S.shape[:2], 2)
    tokens.distance(array(X.contiguous()), array(S), array(out))
    return out
