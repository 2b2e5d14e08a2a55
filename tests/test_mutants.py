"""The list of planted defects is one that can be planted; `make mutants` plants them."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import yaml
from mutants.planted import AREAS, GATE, ROOT, Mutant, load

LISTED = load()
FEWEST = {"reference": 10, "compiled": 8, "kernels": 8, "cursors": 7, "metrics": 7, "gate": 6}


@pytest.mark.parametrize("mutant", LISTED, ids=lambda m: f"{m.area}: {m.name}")
def test_a_defect_can_be_planted_and_has_its_test(mutant: Mutant) -> None:
    """Faults: a text that the code no longer has, or has twice; a defect that is none; one that only breaks the syntax
    and is caught by any test; a test renamed, so that nothing is run."""
    text = mutant.applied()
    assert text != (ROOT / mutant.file).read_text(encoding="utf-8")
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / mutant.file).read_text(encoding="utf-8")))
    else:
        assert yaml.safe_load(text) != yaml.safe_load((ROOT / mutant.file).read_text(encoding="utf-8"))
    if mutant.tests == GATE:
        return
    file, _, name = mutant.tests.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not name or name.partition("[")[0] in there


def test_every_area_has_its_defects_under_names_of_their_own() -> None:
    """Fault: a list that shrinks until it says nothing of a part of the project."""
    counts = Counter(m.area for m in LISTED)
    assert set(counts) == set(FEWEST) == set(AREAS) and all(counts[area] >= n for area, n in FEWEST.items())
    assert len({m.name for m in LISTED}) == len(LISTED) >= 48
