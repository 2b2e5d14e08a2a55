"""A declared design run on fp64 with its roundings emulated: create, verify, commit, read.

These four calls are all the runner knows of a design; a Triton or outside implementation brings the same four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import EXACT, Arithmetic, Operand
from harness.errors import ConfigError, RingError
from harness.precision import mix
from harness.reference import fold
from harness.reference.state import EmulatedState, Lazy, Verified
from harness.reference.steps import token_steps, window_steps
from harness.reference.verify import History, TokenPass, window
from harness.ring import RingSpec
from harness.state import Lanes, Rows, run_of
from harness.tokens import Shape, on_device
from harness.variants import VariantSpec
from harness.window import Step


class Emulated:
    """`spec` in `arithmetic` on `ring`. Raises ConfigError where they do not go together."""

    backend = "emulated"
    engine = "torch"
    origin: dict[str, Any] | None = None  # of an implementation from outside: what it was made from
    fused: Any = None  # a whole block of steps at once, where an engine has that

    def __init__(self, spec: VariantSpec, ring: RingSpec, arithmetic: Arithmetic | None = None):
        self.spec, self.ring = spec, ring
        self.arithmetic = spec.arithmetic() if arithmetic is None else arithmetic
        self.records = spec.records(self.arithmetic)
        if spec.fold_current and ring.max_window != 1:
            raise ConfigError(f"variant {spec.name}: fold_current needs ring.max_window=1")

    def on(self, ring: RingSpec) -> Emulated:
        """The same design on another ring."""
        return type(self)(self.spec, ring, self.arithmetic)

    def filler(self, ring: RingSpec) -> Emulated:
        """What runs a prefill in windows of `ring`."""
        return self.on(ring)

    def exactly(self) -> Emulated | None:
        """The same without a rounding; None where it computes in formats of its own."""
        return type(self)(self.spec, self.ring, Arithmetic(conventions=self.arithmetic.conventions))

    def create(
        self, shape: Shape, slots: int, initial: Tensor, *, seed: int = 0, first_head: int = 0, device: Any = "cpu"
    ) -> EmulatedState:
        """A state of `slots` slots, each at initial[slot] [HV, V, K] as the checkpoint's format holds it."""
        state = self._state(shape, slots, device)
        state.first_head = first_head
        state.seed = [seed + slot for slot in range(slots)]
        self.reset(state, range(slots), initial)
        return state

    def _state(self, shape: Shape, slots: int, device: Any) -> EmulatedState:
        return EmulatedState(shape, self.ring, slots, self.records, device)

    def tensors(self, device: Any) -> dict[str, str]:
        """What a state is made of, field -> dtype: here fp64 carriers of whatever format, of a kernel its own."""
        state = self._state(Shape(1, 1, 1, 1), 1, device)
        held = {"checkpoint": state.checkpoint, **state.records}
        return {name: str(x.dtype).removeprefix("torch.") for name, x in held.items()}

    def reset(self, state: EmulatedState, slots: Sequence[int], initial: Tensor) -> None:
        """Hand `slots` to new sequences starting at initial [n, HV, V, K]."""
        expected = (len(slots), state.shape.HV, state.shape.V, state.shape.K)
        if initial.shape != expected or initial.dtype != torch.float64:
            raise RingError(f"slots {list(slots)}: initial state is not fp64 {list(expected)}")
        key = self._key(state, slots, [0] * len(slots), 1)
        state.reset(slots, self.arithmetic.sites.checkpoint(initial, key))
        state.operand = state.folded = None

    def verify(self, state: EmulatedState, step: Step) -> Verified | Lazy:
        """Outputs of one window per slot of the step; writes its records, moves no cursor.

        A flagged slot folds its history first and then decodes on the folded state.
        """
        cursors = state.cursors
        flush = cursors.verify(step.slots, step.lengths)
        if not step.slots:
            nothing = torch.empty(state.slots, state.shape.HV, state.shape.V, 0, dtype=torch.float64)
            return Verified(nothing, nothing)
        history = [0] * state.slots  # of each slot, as this verify sees it; idle ones show none
        for slot in step.slots:
            history[slot] = cursors.write_pos[slot]
        if flush and not self.spec.fold_current:
            self._set(state, flush, self._fold(state, flush))
            for slot in flush:
                history[slot] = 0
        result = (self._verify_tokens if self.spec.verify == "tokens" else self._verify_window)(state, step, history)
        if flush and self.spec.fold_current:
            self._fold_current(state, flush, step, result)
        if self.records:
            self._write(state, step, history, result)
        state.version += 1
        return result

    def commit(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Keep accepted[i] tokens of the window just verified on slots[i]; 0 only for an aborted request."""
        cursors = state.cursors
        full = cursors.step(slots, accepted, self.spec.fold_current)
        if not slots:
            return
        for slot, n in zip(slots, accepted, strict=True):
            state.tokens[slot] += n
        state.version += 1
        if state.drafts is not None:
            # lane i needs no later lane, so rejected ones that nobody has read stay unevaluated
            run, state.drafts = state.drafts.close(), None
            if self.spec.fold == "snapshot":
                self._take(state, slots, accepted, run)
            run.advance(max(accepted))
            run.close()
        if self.spec.fold == "snapshot":
            cursors.absorb(full)
        elif full:
            self._set(state, full, self._fold(state, full))
            cursors.absorb(full)

    def read(self, state: EmulatedState, which: str, slots: Sequence[int]) -> Tensor:
        """A state after the committed tokens, [n, HV, V, K]: `served`, what the next output is computed on, or
        `kept`, the checkpoint if the slot folded now. Neither changes anything; the result may share memory with the
        state, so use it before the next call."""
        state.cursors.idle(slots, "read")
        if which == "kept":
            return self._fold(state, slots)
        if which != "served":
            raise RingError(f"read: {which!r} is neither served nor kept")
        lengths = [state.cursors.write_pos[slot] for slot in slots]
        if self.spec.verify == "tokens":
            return self._base(state, slots, lengths)
        if not any(lengths):
            return _pick(self._operand(state)[0].view_as(state.checkpoint), slots)
        return self._served(state, slots, lengths)

    def _served(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        C = _pick(self._operand(state)[0].view_as(state.checkpoint), slots)
        n, HV, V, K = C.shape
        h, a = self._history(state, Rows(state, slots, lengths)), self.arithmetic
        Wd = a.dots.history.lhs(a.sites.history_d(h.d * h.W), a.sites.history_d)[0]
        k = h.k_hat[0]
        writes = torch.bmm(Wd.reshape(k.shape[0], -1, k.shape[1]), k).view(n * HV, V, K)
        return torch.addcmul(writes, C.reshape(n * HV, V, K), h.total).view(n, HV, V, K)

    def snapshot(self, state: EmulatedState, source: int, target: int, prefix: int) -> None:
        """Write the state after the first `prefix` history records of `source` into `target`, its ring empty."""
        state.cursors.idle([source], "snapshot")
        w = state.cursors.write_pos[source]
        if not 0 <= prefix <= w:
            raise RingError(f"slot {source}: a prefix of {prefix} records of {w}")
        value = self._fold(state, [source], [prefix])
        seed, tokens = state.seed[source], state.tokens[source] - (w - prefix)
        state.reset([target], value)
        state.seed[target], state.tokens[target] = seed, tokens
        state.operand = None

    def copy(self, state: EmulatedState, source: int, target: int, ring: bool = False) -> None:
        """State.copy, derived data included."""
        state.copy(source, target, ring)
        state.operand = None

    def _verify_window(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Verified:
        rows = Rows(state, range(state.slots), history) if any(history) else None
        read = self._history(state, rows) if rows else None
        operands = window_steps(step.windows, self.arithmetic, self.spec.inverse)[step.index]
        o, d = window(self._operand(state), read, operands, self.spec.inverse, self.arithmetic)
        s = state.shape
        return Verified(o.view(-1, s.HV, s.V, o.shape[-1]), d.view(-1, s.HV, s.V, d.shape[-1]))

    def _verify_tokens(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Lazy:
        s, a = state.shape, self.arithmetic
        base = self._base(state, range(state.slots), history).reshape(-1, s.V, s.K)
        operands = token_steps(step.windows, a)[step.index]
        key = self._key(state, range(state.slots), state.tokens)
        of = EXACT if any(history) else a.sites.checkpoint
        run = TokenPass(base, operands, a, of=of, key=key)
        state.drafts = Lazy(run, s, max(step.lengths))
        return state.drafts

    def _base(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The state a token pass starts from: the checkpoint, or the history folded onto it in registers."""
        return self._unrounded(state, Rows(state, slots, lengths)) if any(lengths) else _pick(state.checkpoint, slots)

    def _history(self, state: EmulatedState, rows: Rows) -> History:
        s, a = state.shape, self.arithmetic
        n, w = len(rows.slots), rows.count
        k, d = self._stored(rows, "k_hat"), self._stored(rows, "d")
        W, total = self._decays(rows)
        # the sum of two parts is no number of their format
        of = EXACT if a.sites.store_k_hat.parts == 2 else a.sites.store_k_hat
        return History(
            a.dots.history_score.lhs(k.reshape(n * s.H, w, s.K), of),
            d.reshape(n * s.HV, w, s.V).transpose(1, 2),
            W.reshape(n * s.HV, 1, w),
            total.reshape(n * s.HV, 1, 1),
        )

    def _stored(self, rows: Rows, name: str, whole: bool = False) -> Tensor:
        value = rows.read(name)
        if f"{name}_lo" in self.records and (whole or self.spec.history_read == "sum"):
            return value + rows.read(f"{name}_lo")
        return value

    def _decays(self, rows: Rows) -> tuple[Tensor, Tensor]:
        g = rows.read("g")
        last = rows.last(g) if self.spec.gate_record == "cumulative" else None
        return fold.record_decays(g, last, self.arithmetic)

    def _write(self, state: EmulatedState, step: Step, history: Sequence[int], result: Verified | Lazy) -> None:
        lanes, a = Lanes(state, step.slots, step.lengths), self.arithmetic
        for name in self.records:
            if name in ("d", "d_lo"):
                assert result.d is not None
                value, r = result.d.transpose(-1, -2), a.sites.store_d
                lanes.write(name, r(value, of=a.sites.d) if r.parts == 1 else r.pair(value)[name == "d_lo"])
            elif name == "g" and self.spec.gate_record == "cumulative":
                lanes.write(name, self._cumulative(state, step, history))
            else:
                lanes.write(name, step.windows.stored(a, name)[step.index])

    def _cumulative(self, state: EmulatedState, step: Step, history: Sequence[int]) -> Tensor:
        a = self.arithmetic
        g = step.windows.gates(a)[0][step.index]
        if any(history):
            rows = Rows(state, range(state.slots), history)
            g = torch.cat((g[..., :1] + rows.last(rows.read("g")), g[..., 1:]), -1)
        return a.sites.store_g(a.sites.decay(g.cumsum(-1)))

    def _fold(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """The checkpoint after the history (or its first `lengths` records), rounded as the design stores it."""
        memo = (state.version, tuple(slots))
        if lengths is None and state.folded and state.folded[:2] == memo:
            return state.folded[2]
        w = [state.cursors.write_pos[slot] for slot in slots]
        given = w if lengths is None else lengths
        old = _pick(state.checkpoint, slots)
        if not any(given):
            return old
        end = [state.tokens[slot] - w[i] + given[i] for i, slot in enumerate(slots)]
        value = self._folded(state, slots, given, end)
        if 0 in given:
            (empty,) = on_device(value.device, np.array(given) == 0)
            value = torch.where(empty[:, None, None, None], old, value)
        if lengths is None:
            state.folded = (*memo, value)
        return value

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        value = self._unrounded(state, Rows(state, slots, lengths))
        return self.arithmetic.sites.checkpoint(value, self._key(state, slots, end, 1))

    def _unrounded(self, state: EmulatedState, rows: Rows) -> Tensor:
        C, a = _pick(state.checkpoint, rows.slots), self.arithmetic
        if self.spec.fold == "replay":
            uneven = on_device(C.device, np.array(rows.lengths))[0] if rows.uneven else None
            start = [state.tokens[slot] - state.cursors.write_pos[slot] for slot in rows.slots]
            v, k, g, beta = (rows.read(name) for name in ("v", "k", "g", "beta"))
            return fold.replay(C, v, k, g, beta, a, lengths=uneven, key=self._key(state, rows.slots, start))
        d, k_hat = self._stored(rows, "d", whole=True), self._stored(rows, "k_hat", whole=True)
        return fold.product(C, d, k_hat, *self._decays(rows), a)

    def _fold_current(self, state: EmulatedState, flush: Sequence[int], step: Step, result: Verified | Lazy) -> None:
        d = result.d
        assert d is not None
        s, a = state.shape, self.arithmetic
        operands = token_steps(step.windows, a)[step.index]
        S = self._base(state, flush, [state.cursors.write_pos[slot] for slot in flush])
        eg, k, write = (
            _pick(x.view(state.slots, -1, *x.shape[1:]), flush) for x in (operands.eg[0], operands.k[0], d[..., :1])
        )
        write = write.reshape(len(flush) * s.H, -1, 1)
        S = a.sites.decayed.into(S * eg)
        S = S.view(len(flush) * s.H, -1, s.K).baddbmm_(write, k.reshape(-1, 1, s.K)).view(S.shape)
        end = [state.tokens[slot] + 1 for slot in flush]
        self._set(state, flush, a.sites.checkpoint(S, self._key(state, flush, end, 1)))

    def _accepted(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int], run: TokenPass) -> Tensor:
        """The states of `slots` after their accepted tokens, [n, HV, V, K]."""
        shape, counts = state.checkpoint.shape, sorted(set(accepted))
        if everyone(slots, state.slots) and len(counts) == 1:
            return run.advance(counts[0]).view(shape)
        value = torch.empty((len(slots), *shape[1:]), dtype=state.checkpoint.dtype, device=state.device)
        for n in counts:
            of_n = [i for i, count in enumerate(accepted) if count == n]
            value[of_n] = run.advance(n).view(shape)[[slots[i] for i in of_n]]
        return value

    def _take(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int], run: TokenPass) -> None:
        value, sites = self._accepted(state, slots, accepted, run), self.arithmetic.sites
        key = self._key(state, slots, [state.tokens[slot] for slot in slots], 1)
        of = sites.step
        for site in (sites.snapshot, sites.checkpoint):
            if not site.keeps(of):
                value, of = site(value, key), site
        self._set(state, slots, value)

    def _operand(self, state: EmulatedState) -> Operand:
        if state.operand is None:
            state.operand = self._read_operand(state, state.checkpoint)
        return state.operand

    def _read_operand(self, state: EmulatedState, C: Tensor) -> Operand:
        a, s = self.arithmetic, state.shape
        C, site, of = C.reshape(-1, s.group * s.V, s.K), a.sites.state_operand, a.sites.checkpoint
        return a.dots.state.lhs(C, of) if site.keeps(of) else a.dots.state.lhs(site(C), site)

    def _set(self, state: EmulatedState, slots: Sequence[int], value: Tensor) -> None:
        if everyone(slots, state.slots):
            state.checkpoint, state.operand = value.contiguous(), None
            return
        (at,) = on_device(state.device, np.array(slots))
        state.checkpoint[at] = value
        if state.operand is None or state.operand[0].data_ptr() == state.checkpoint.data_ptr():
            return
        for mine, theirs in zip(state.operand, self._read_operand(state, value), strict=True):
            shape = (-1, state.shape.H, *mine.shape[1:])
            mine.view(shape)[at] = theirs.view(shape)

    def _key(self, state: EmulatedState, slots: Sequence[int], tokens: Sequence[int], site: int = 0) -> Tensor | None:
        """[n*HV] draw key of (sequence, head, token count, site), or None where nothing here is stochastic."""
        s = self.arithmetic.sites
        if "stochastic" not in (s.step.mode, s.checkpoint.mode, s.snapshot.mode):
            return None
        head = torch.arange(state.first_head, state.first_head + state.shape.HV)
        sequence = mix(torch.tensor([state.seed[slot] * 2 + site for slot in slots]))
        keys = mix(sequence[:, None] + head) + torch.tensor(tokens)[:, None]
        return keys.reshape(-1).to(state.device)


def _pick(x: Tensor, slots: Sequence[int]) -> Tensor:
    # most steps concern every slot: no copy then
    return x if everyone(slots, x.shape[0]) else x[on_device(x.device, np.array(slots))[0]]


def everyone(slots: Sequence[int], count: int) -> bool:
    """Whether these are all the slots there are, in order."""
    return len(slots) == count and run_of(slots) is not None
