"""Launches that a GPU records once and repeats: from Python a launch costs as much as a small step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Repeated:
    """A function of no arguments that reads and writes the same memory at every call.

    The first call launches one by one, which also compiles; on a GPU the second records what the later ones repeat.
    What the function returns is returned again, with what the repeated launches have put into it.
    """

    def __init__(self, launch: Callable[[], Any], on_gpu: bool):
        self.launch, self.on_gpu, self.runs = launch, on_gpu, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def __call__(self) -> Any:
        """Run once more."""
        if self.runs and self.on_gpu:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                # other threads move memory meanwhile
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.result = self.launch()
            self.graph.replay()
        else:
            self.result = self.launch()
        self.runs += 1
        return self.result
