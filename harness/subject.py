"""A kernel under test: the layer and the inputs it is tested on, and the two designs it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic
from harness.config import DecodeConfig
from harness.decode import Stream
from harness.looks import Look, looks
from harness.reference.emulated import Emulated
from harness.ring import RingSpec
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec
from harness.window import Windows

IDLE, ABORTED, RESETS = 0.25, 0.1, 0.05  # shares of windows without a token, of those given up, of tokens that reset
RESET = 160  # minus the log decay of such a token


@dataclass(frozen=True)
class Case:
    """Tokens [W, B, m, ..] in windows of lengths [W, B] of which accepted [W, B] are kept, from initial states."""

    tokens: Tokens
    lengths: np.ndarray
    accepted: np.ndarray
    initial: Tensor


class Subject:
    """A design under test, the layer and the inputs it is tested on, and what it is compared with."""

    def __init__(self, design: Emulated, shape: Shape, slots: int, steps: int, seed: int, device: str):
        self.design, self.shape, self.steps, self.device = design, shape, steps, device
        self.m, self.aborts = design.ring.max_window, not design.spec.fold_current
        self.stream = Stream(DecodeConfig(slots=slots, tokens=1 << 20, seed=seed), shape, device=device)
        self.initial, self.seed = self.stream.initial_state(), seed
        # one piece per window, folded as it is committed: harness.reference.oracle, step by step
        ring = RingSpec(design.ring.length, self.m, 1, "commit")
        self.exact = Emulated(VariantSpec("exact"), ring, Arithmetic(conventions=design.arithmetic.conventions))
        self.emulation = Emulated(design.spec, design.ring, design.arithmetic)

    def draw(self, part: int, steps: int) -> Tokens:
        """Tokens [steps, B, m, ..]; those of another part are others."""
        B, m = len(self.initial), self.m
        tokens = self.stream.tokens(torch.full((B,), part * self.steps * m), steps * m)
        return tokens.map(lambda x: x.reshape(B, steps, m, *x.shape[2:]).transpose(0, 1).contiguous())

    def full(self) -> Case:
        """Whole windows, all accepted, from an empty ring through its first fold; slot 0 meets resets of g = -160."""
        assert self.design.ring.flush_at is not None
        tokens, rng = self.draw(0, steps := -(-self.design.ring.flush_at // self.m) + 1), self.draws(0)
        tokens.g[:, 0][torch.from_numpy(rng.random(tokens.g[:, 0].shape) < RESETS)] = -RESET
        lengths = np.full((steps, len(self.initial)), self.m)
        return Case(tokens, lengths, lengths, self.initial)

    @cached_property
    def ragged(self) -> Case:
        """Windows of 1 to m tokens and idle slots between them, any number accepted, some windows given up."""
        size, rng = (self.steps, len(self.initial)), self.draws(1)
        lengths = np.where(rng.random(size) < IDLE, 0, rng.integers(1, self.m + 1, size))
        accepted = np.minimum(rng.integers(1, self.m + 1, size), lengths)
        if self.aborts:
            accepted[rng.random(size) < ABORTED] = 0
        return Case(self.draw(1, self.steps), lengths, accepted, self.initial)

    def draws(self, part: int) -> np.random.Generator:
        """Numbers of a part, whatever others have drawn."""
        return np.random.default_rng([self.seed, part])

    def follow(
        self, design: Emulated, case: Case, *, state: Any = None, lanes: np.ndarray | None = None, **how: Any
    ) -> Iterator[Look]:
        """harness.looks of a design on a case, from a new pool unless there is a state."""
        if state is None:
            state = self.pool(design, case.initial)
        windows = Windows(case.tokens, case.lengths, self.shape)
        yield from looks(design, state, windows, case.accepted, case.lengths if lanes is None else lanes, **how)

    def pool(self, design: Emulated, initial: Tensor) -> Any:
        """A new state."""
        return design.create(self.shape, len(initial), initial, device=self.device)
