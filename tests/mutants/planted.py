"""The planted defects: one file of them an area, each one replacement of a text that occurs once.

name   the fault in a few words, unique
file   of the repository
old    a text that occurs in it exactly once
new    what stands there instead; the file still parses
tests  what has to fail: a node id or a file of pytest; or `gate`, for `python -m harness.gate check`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
AREAS = ("reference", "compiled", "kernels", "cursors", "metrics", "gate")
GATE = "gate"


@dataclass(frozen=True)
class Mutant:
    area: str
    name: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, root: Path = ROOT) -> str:
        """The text of the file with the defect. Raises ValueError where `old` does not occur exactly once."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.area}: {self.name}: its text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def load() -> list[Mutant]:
    """Every defect, area by area."""
    return [
        Mutant(area, **entry)
        for area in AREAS
        for entry in yaml.safe_load((HERE / f"{area}.yaml").read_text(encoding="utf-8"))
    ]
