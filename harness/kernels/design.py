"""A declared design on the device: the four calls, each a launch or two. Names its refusals before any launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from harness.errors import ConfigError, RingError
from harness.kernels import block as whole
from harness.kernels.measure import decays
from harness.kernels.numbers import INTERPRETED, Choices
from harness.kernels.options import options, unsupported
from harness.kernels.route import FIELDS
from harness.kernels.steps import Inputs, Steps, check
from harness.reference.calls import Seen
from harness.reference.emulated import Emulated
from harness.reference.state import EmulatedState, Verified
from harness.reference.verify import History
from harness.ring import Cursors
from harness.state import Rows
from harness.tokens import Shape
from harness.window import Step, Windows


class TritonState(EmulatedState):
    """Checkpoint and records in their own formats, and the cursors on the device as well, [3, slots] int32."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.on_device = torch.zeros(3, self.slots, dtype=torch.int32, device=self.device)
        self.every = torch.arange(self.slots, dtype=torch.int32, device=self.device)
        self.known: tuple[list[int], ...] = ()  # what the device holds
        self.plan = torch.zeros(FIELDS, self.slots, dtype=torch.int32, device=self.device)
        self.counts = torch.zeros(2, dtype=torch.int32, device=self.device)
        self.routed = False  # whether plan and counts are those of the cursors
        self.steps: Steps | None = None  # of the windows verified last

    def _host(self) -> tuple[list[int], ...]:
        c = self.cursors
        return list(c.write_pos), list(c.cache_base), [int(f) for f in c.is_flush]

    def sync(self) -> None:
        """Put the cursors on the device, if the host has moved them on its own."""
        host = self._host()
        if host != self.known:
            self.on_device.copy_(torch.tensor(host, dtype=torch.int32))
            self.known, self.routed = host, False

    def moved(self) -> None:
        """The device has just done what the host did."""
        self.known = self._host()

    def widened(self, slots: Sequence[int]) -> EmulatedState:
        """A state of its own of some slots, on fp64 carriers, for what is read and not decoded."""
        wide = EmulatedState(self.shape, self.spec, 0, (), self.device)
        which = list(slots)
        wide.slots, wide.version, wide.first_head = len(which), self.version, self.first_head
        wide.cursors = Cursors(self.spec, len(which))
        for name in ("write_pos", "cache_base", "is_flush"):
            setattr(wide.cursors, name, [getattr(self.cursors, name)[s] for s in which])
        wide.tokens, wide.seed = [self.tokens[s] for s in which], [self.seed[s] for s in which]
        wide.checkpoint = self.checkpoint[which].double()
        wide.records = {name: rows[which].double() for name, rows in self.records.items()}
        return wide

    def clone(self) -> TritonState:
        new = super().clone()
        assert isinstance(new, TritonState)
        for name in ("on_device", "plan", "counts"):
            setattr(new, name, getattr(self, name).clone())
        new.steps = None
        return new


class Triton(Emulated):
    """`spec` in `arithmetic` on `ring`, by the kernels beside this. Raises ConfigError for what they do not compute."""

    backend = "triton"
    engine = "triton"

    def __init__(self, *args: Any):
        super().__init__(*args)
        why = unsupported(self.spec, self.arithmetic)
        if why:
            raise ConfigError(f"backend: {self.spec.name} has no Triton kernel: {why}")
        self.options = options(self.spec, self.arithmetic)
        self.formats = dict(self.options.formats)
        given = {f.name: getattr(self.options, f.name) for f in fields(self.options) if f.name != "formats"}
        self.choices = Choices(**given, exp=self.arithmetic.exp, interpreted=INTERPRETED)

    def exactly(self) -> None:
        """As Emulated.exactly."""
        return None

    def _state(self, shape: Shape, slots: int, device: Any) -> TritonState:
        if torch.device(device).type != "cuda" and not INTERPRETED:
            raise ConfigError(f"device: {device}: Triton kernels need a GPU, or TRITON_INTERPRET=1")
        return TritonState(shape, self.ring, slots, self.records, device, self.formats)

    def steps(self, state: TritonState, m: int, keep_d: bool = False) -> Steps:
        """Windows of at most m tokens on every slot of a state, to be launched without the host's bookkeeping."""
        return Steps(self, state, m, keep_d)

    def inputs(self, windows: Windows) -> Inputs:
        """What Windows.given says, and lengths: of all steps, a leading axis more."""

        def compute() -> Inputs:
            given = windows.given()
            return Inputs(*given, torch.from_numpy(windows.lengths).to(torch.int32).to(given[0].device))

        return windows.memo(("triton inputs",), compute)

    def ready(self, state: TritonState, windows: Windows) -> Inputs:
        """`inputs`. Raises RingError where they are not those of the state."""
        if state.slots != windows.B or windows.g.device != state.checkpoint.device:
            raise RingError(f"step: windows of {windows.B} slots on {windows.g.device}, "
                            f"a state of {state.slots} on {state.checkpoint.device}")  # fmt: skip
        inputs = self.inputs(windows)
        check(inputs.step(0), state, windows.m)
        return inputs

    def fused(self, state: EmulatedState, windows: Windows, block: Any, S: Tensor, emit: bool = False) -> Seen:
        """A block of steps, read against the exact states S [P, B, HV, V, K], by launches alone: as by_calls."""
        assert isinstance(state, TritonState) and not emit
        return whole.decode(self, state, windows, block, S)

    def verify(self, state: EmulatedState, step: Step) -> Verified:
        """As Emulated.verify; a flagged slot's fold happens in the same pass, on the device."""
        assert isinstance(state, TritonState)
        state.cursors.verify(step.slots, step.lengths)
        if not step.slots:
            s = state.shape
            nothing = torch.empty(state.slots, s.HV, s.V, 0, dtype=torch.float64, device=state.device)
            return Verified(nothing, nothing)
        x = self.ready(state, step.windows).step(step.index)
        state.sync()
        steps = self._steps(state, step.windows.m)
        steps.verify(x)
        state.version += 1
        state.folded = None
        return Verified(steps.out.double().mT, steps.d.double().mT)

    def commit(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """As Emulated.commit."""
        assert isinstance(state, TritonState)
        state.cursors.absorb(state.cursors.step(slots, accepted, self.spec.fold_current))
        if not slots:
            return
        counts = [-1] * state.slots
        for slot, n in zip(slots, accepted, strict=True):
            state.tokens[slot] += n
            counts[slot] = n
        state.version += 1
        state.folded = None
        assert state.steps is not None
        state.steps.commit(torch.tensor(counts, dtype=torch.int32, device=state.device))
        state.moved()

    def _steps(self, state: TritonState, m: int) -> Steps:
        """The steps of windows of m tokens; only those of one width are kept."""
        if state.steps is None or state.steps.m != m:
            state.steps = self.steps(state, m, keep_d=True)
        return state.steps

    def read(self, state: EmulatedState, which: str, slots: Sequence[int]) -> Tensor:
        """As Emulated.read: `kept` by the fold kernel, `served` formed on fp64 carriers from what the device holds."""
        assert isinstance(state, TritonState)
        if which == "kept":
            return super().read(state, which, slots).double()
        state.cursors.idle(slots, "read")
        lengths = [state.cursors.write_pos[slot] for slot in slots]
        if which == "served" and self.spec.verify == "tokens" and any(lengths):
            # where the next window starts from, in registers
            return self._copied(state, slots, lengths, torch.float32).double()
        return super().read(state.widened(slots), which, range(len(slots)))

    def _history(self, state: EmulatedState, rows: Rows) -> History:
        # the device rounds W d to fp32 before a product rounds it to its own format
        h = super()._history(state, rows)
        return h._replace(d=(h.d * h.W).float().double(), W=torch.ones_like(h.W))

    def _decays(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """As Emulated's, but by the kernels' own sum and exponential."""
        g = rows.state.records["g"][list(rows.slots)].float()
        base = [rows.state.cursors.cache_base[slot] for slot in rows.slots]
        W, total = decays(g, rows.lengths, base, self.choices)
        return W[..., : rows.count].double(), total[..., None].double()

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        assert isinstance(state, TritonState)
        return self._copied(state, slots, lengths, state.checkpoint.dtype)

    def _copied(self, state: TritonState, slots: Sequence[int], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
        """States of slots [n, HV, V, K] after lengths[i] records, by the fold kernel."""
        state.sync()
        which, counts = (torch.tensor(x, dtype=torch.int32, device=state.device) for x in (list(slots), list(lengths)))
        out = torch.empty(len(slots), *state.checkpoint.shape[1:], dtype=dtype, device=state.device)
        (state.steps or self._steps(state, 1)).fold(counts, out, which)
        return out
