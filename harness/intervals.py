"""Where the tokens of a block lie that a design is measured on: every design commits the same, so one list serves all.

A design's tokens are numbered through: those that earlier blocks left, slot by slot, then the block's own [B, T]. An
interval is what a slot has committed between two grid points; the oracle has those that end in this block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from harness.metrics import per_interval, token_errors
from harness.reference.calls import within
from harness.schedule import Block
from harness.tokens import on_device


class Intervals:
    """Of one block. `before` [B] is how many tokens since its last grid point each slot brings along.

    left  [B] how many it hands on
    at, of  [N] the tokens of the intervals that end here, slot by slot: numbers, and places in the oracle's [B, T']
    rest  [R] numbers of those that wait for their interval's end
    places, size  [n, widest], [n] as per_interval takes them, in the order of Block.grid
    """

    def __init__(self, before: np.ndarray, block: Block, device: torch.device):
        counts, grid = block.committed[0], block.grid
        size = grid.tokens - grid.begin
        end = np.zeros_like(before)
        np.add.at(end, grid.slot, size)
        total, self.width = before + counts, int(counts.max())
        slot, t = np.repeat(np.arange(len(total)), total), within(total)
        old = t < before[slot]
        number = np.where(
            old, (before.cumsum() - before)[slot] + t, before.sum() + slot * self.width + t - before[slot]
        )
        done = t < end[slot]
        self.left = total - end
        self.at, self.of, self.rest = on_device(device, number[done], (slot * end.max() + t)[done], number[~done])
        if len(size):
            first = grid.point == 0
            origin = np.zeros_like(before)
            origin[grid.slot[first]] = grid.begin[first]
            last = (end.cumsum() - end - origin)[grid.slot] + grid.tokens
            places = np.maximum(last[:, None] + np.arange(-size.max(), 0), 0)
            self.places, self.size = on_device(device, places, size)

    def joined(self, old: Tensor | None, new: Tensor) -> Tensor:
        """The numbered tokens [.., HV, V]: `old` left by earlier blocks, then a block's new [B, T, HV, V]."""
        new = new[:, : self.width].flatten(0, 1)
        return new if old is None or not len(old) else torch.cat((old, new))

    def errors(self, x_hat: Tensor, x: Tensor) -> Tensor:
        """Median and maximum over every interval, [2, HV, n], of numbered tokens against the oracle's [B, T', ...]."""
        return per_interval(token_errors(x_hat, x.flatten(0, 1), self.at, self.of), self.places, self.size)
