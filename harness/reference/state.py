"""What an emulated design holds between and during its steps."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from harness.arithmetic import Operand
from harness.reference.verify import TokenPass
from harness.state import State
from harness.tokens import Shape


class Verified(NamedTuple):
    """What verify returns: outputs and writes of the window's lanes, [slots, HV, V, m]; d may be None."""

    o: Tensor
    d: Tensor | None


class Lazy:
    """A token pass as a Verified: o and d hold every lane, or, once committed, the lanes up to the last accepted."""

    def __init__(self, run: TokenPass, shape: Shape, lanes: int):
        self.run, self.shape, self.lanes = run, shape, lanes

    def close(self) -> TokenPass:
        """End the step: from now on o and d hold what has been evaluated."""
        self.lanes = 0
        return self.run

    def _lanes(self, name: str) -> Tensor:
        if self.lanes:
            self.run.advance(self.lanes, keep=True)
        x = getattr(self.run, name)
        return x.view(-1, self.shape.HV, self.shape.V, x.shape[-1])

    @property
    def o(self) -> Tensor:
        return self._lanes("o")

    @property
    def d(self) -> Tensor:
        return self._lanes("d")


class EmulatedState(State):
    """The shared state, and what is derived from its checkpoint until that changes."""

    operand: Operand | None = None  # the checkpoint as products read it
    drafts: Lazy | None = None  # the token pass in progress, between verify and commit
    folded: tuple[int, tuple[int, ...], Tensor] | None = None  # (version, slots, result) of the last fold
    first_head: int = 0

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The records as numpy sees them, the same memory."""
        return {name: rows.numpy() for name, rows in self.records.items()}

    def clone(self) -> EmulatedState:
        """An independent copy between steps."""
        new = copy.copy(self)
        new.__dict__.pop("arrays", None)
        new.checkpoint = self.checkpoint.clone()
        new.records = {name: rows.clone() for name, rows in self.records.items()}
        new.cursors = copy.deepcopy(self.cursors)
        new.tokens, new.seed = list(self.tokens), list(self.seed)
        new.operand = new.folded = None
        return new
