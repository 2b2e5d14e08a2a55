"""An outside implementation (harness.protocol) as a design of a run: it computes, the harness keeps the books.

Cursors, token counts and the layout of a batch are kept here; the implementation is handed plain tensors of the slots
in a step, and what it returns is checked and taken to fp64. Its declaration says what it claims to compute: from that
come its ring, its conventions and the emulation to hold beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import plugins
from harness.arithmetic import Arithmetic
from harness.errors import ConfigError, RingError
from harness.protocol import RingCursors, Window
from harness.reference.emulated import Emulated
from harness.reference.state import Verified
from harness.ring import Cursors, RingSpec
from harness.tokens import Shape
from harness.variants import VariantSpec
from harness.window import Step, Windows


class OutsideState:
    """The implementation's own state, and what is kept beside it for each of its slots."""

    def __init__(self, shape: Shape, ring: RingSpec, slots: int, device: torch.device, own: Any, cloned: Any):
        self.shape, self.slots, self.device = shape, slots, device
        self.own, self._cloned = own, cloned
        self.cursors = Cursors(ring, slots)
        self.tokens = [0] * slots

    def clone(self) -> OutsideState:
        """An independent copy between steps."""
        new = copy.copy(self)
        new.own, new.cursors, new.tokens = self._cloned(self.own), copy.deepcopy(self.cursors), list(self.tokens)
        return new

    def on_device(self, flush: Sequence[int] | None = None) -> RingCursors:
        """The cursors as the implementation sees them; flush: the slots flagged, where not those of the cursors."""
        c = self.cursors
        flags = c.is_flush if flush is None else [slot in flush for slot in range(self.slots)]
        rows = torch.tensor([c.write_pos, c.cache_base, [int(f) for f in flags]], dtype=torch.int32)
        return RingCursors(*rows.to(self.device).unbind(0))


class Outside(Emulated):
    """`spec` as its `design:` computes it, on `ring`. Raises ConfigError for one that cannot be found or called.

    wide  hand it fp64 tensors: for an implementation that says it computes in what it is given
    pad   what lies in the lanes behind a window's length
    """

    backend = "outside"

    def __init__(self, spec: VariantSpec, ring: RingSpec, arithmetic: Arithmetic | None = None, wide: bool = False):
        super().__init__(spec, ring, arithmetic)
        self.key = f"variant {spec.name}: design"
        plugin = plugins.find(self.key, spec.design)
        self.own, self.engine, self.origin = plugin.make(), plugin.name, plugin.origin()
        self.wide, self.pad = wide, 0.0
        self.shows_d: bool | None = None  # known after the first verify

    def on(self, ring: RingSpec) -> Outside:
        """The same implementation on another ring."""
        return Outside(self.spec, ring, self.arithmetic, self.wide)

    def filler(self, ring: RingSpec) -> Emulated:
        """The emulation of its declaration: a verify kernel is made for windows, not for a prefill's pieces."""
        return Emulated(self.spec, ring, self.arithmetic)

    def exactly(self) -> Emulated | None:
        """The same in fp64 throughout, if it says that it can."""
        if not getattr(self.own, "fp64", False):
            return None
        return Outside(self.spec, self.ring, Arithmetic(conventions=self.arithmetic.conventions), wide=True)

    def create(
        self, shape: Shape, slots: int, initial: Tensor, *, seed: int = 0, first_head: int = 0, device: Any = "cpu"
    ) -> Any:
        """A state of `slots` slots at initial [slots, HV, V, K]."""
        given = self._floats(initial.to(device))
        own = self.own.create(shape, self.ring, given)
        cloned = getattr(self.own, "clone", copy.deepcopy)
        return OutsideState(shape, self.ring, slots, given.device, own, cloned)

    def reset(self, state: Any, slots: Sequence[int], initial: Tensor) -> None:
        """Hand `slots` to new sequences. Raises RingError where the implementation cannot."""
        if not hasattr(self.own, "reset"):
            raise RingError(f"slots {list(slots)}: {self.engine} has no call reset")
        state.cursors.reset(slots)
        self.own.reset(state.own, self._ints(state, slots), self._floats(initial.to(state.device)))
        for slot in slots:
            state.tokens[slot] = 0

    def verify(self, state: Any, step: Step) -> Verified:
        """As Emulated.verify; rows of idle slots are zero."""
        s, m = state.shape, self.ring.max_window
        state.cursors.verify(step.slots, step.lengths)
        out = torch.zeros(2, state.slots, s.HV, m, s.V, dtype=torch.float64, device=state.device)
        if step.slots:
            slots = self._ints(state, step.slots)
            lanes = [x[step.index][slots] for x in self._lanes(step.windows)]
            window = Window(slots, self._ints(state, step.lengths), *lanes)
            found = self.own.verify(state.own, window, state.on_device())
            if not (isinstance(found, tuple) and len(found) == 2):
                raise ConfigError(
                    f"{self.key}: verify returned {type(found).__name__}, not (o, d); without d, (o, None)"
                )
            size = len(step.slots), s.HV, m, s.V
            out[0, step.slots] = self._taken("o of verify", found[0], size, state.device)
            shows = found[1] is not None
            if self.shows_d not in (None, shows):
                raise ConfigError(f"{self.key}: verify returned d in some steps and None in others")
            self.shows_d = shows
            if shows:
                out[1, step.slots] = self._taken("d of verify", found[1], size, state.device)
        return Verified(out[0].mT, out[1].mT if self.shows_d else None)

    def commit(self, state: Any, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """As Emulated.commit."""
        cursors = state.cursors
        full = cursors.step(slots, accepted, self.spec.fold_current)
        if not slots:
            return
        for slot, n in zip(slots, accepted, strict=True):
            state.tokens[slot] += n
        self.own.commit(state.own, self._ints(state, slots), self._ints(state, accepted), state.on_device(full))
        cursors.absorb(full)

    def read(self, state: Any, which: str, slots: Sequence[int]) -> Tensor:
        """As Emulated.read."""
        state.cursors.idle(slots, "read")
        if which not in ("served", "kept"):
            raise RingError(f"read: {which!r} is neither served nor kept")
        s = state.shape
        S = self.own.read(state.own, which, self._ints(state, slots), state.on_device())
        return self._taken(f"read {which}", S, (len(slots), s.HV, s.V, s.K), state.device)

    def snapshot(self, state: Any, source: int, target: int, prefix: int) -> None:
        """Refused: no call of the protocol does it."""
        raise RingError(f"slot {source}: {self.engine} takes no snapshots")

    def copy(self, state: Any, source: int, target: int, ring: bool = False) -> None:
        """Refused: no call of the protocol does it."""
        raise RingError(f"slot {source}: {self.engine} copies no slots")

    def _lanes(self, windows: Windows) -> list[Tensor]:
        """q, k, v, g, beta of all steps, [W, B, heads, max_window, ..], `pad` behind every length."""

        def compute() -> list[Tensor]:
            whole = windows.q, windows.k, windows.v, windows.g, windows.beta
            m, lanes = self.ring.max_window, []
            behind = torch.arange(m) >= torch.from_numpy(windows.lengths)[..., None]
            behind = behind.to(windows.g.device)[:, :, None]
            for x in whole if self.wide else windows.given():
                more = (0, 0) * (x.ndim - 4) + (0, m - windows.m)
                lanes.append(F.pad(x, more).masked_fill_(behind if x.ndim == 4 else behind[..., None], self.pad))
            return lanes

        return windows.memo(("outside", self.wide, self.ring.max_window, self.pad), compute)

    def _floats(self, x: Tensor) -> Tensor:
        return x.to(torch.float64 if self.wide else torch.float32).contiguous()

    def _ints(self, state: Any, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32).to(state.device)

    def _taken(self, what: str, x: Any, size: tuple[int, ...], device: torch.device) -> Tensor:
        """A copy of x on fp64. Raises ConfigError where it is no tensor of this size and device."""
        if not isinstance(x, Tensor) or tuple(x.shape) != size or x.device.type != device.type:
            found = f"{list(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(f"{self.key}: {what} is {found}, not {list(size)} on {device}")
        return x.to(torch.float64, copy=True)
