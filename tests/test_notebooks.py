"""Notebooks: each runs, asks and answers, holds no logic, is small, and says what is committed in it."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
OUTPUT, FILE = 300_000, 400_000  # bytes of one output, of a notebook
# what a cell may be made of: an import, a name for a call, a call. No loop, no choice, no arithmetic, no definition
ALLOWED = (
    *(ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.Assign, ast.Expr, ast.Call, ast.keyword, ast.Name),
    *(ast.Attribute, ast.Constant, ast.List, ast.Load, ast.Store),
)
DRAWING = {"plt", "matplotlib", "pyplot", "seaborn", "plotly"}
NUMBER = re.compile(r"(?<![\w.])\d")  # not those of bf16 and loop24


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(str(FOLDER / name), as_version=4)


def logic(source: str) -> list[str]:
    """What of a cell does not belong into one."""
    tree = ast.parse(source)
    found = [type(node).__name__ for node in ast.walk(tree) if not isinstance(node, ALLOWED)]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [node.id] if isinstance(node, ast.Name) else []
        found += [name for name in names if name.split(".")[0] in DRAWING]
    statements = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return found + ["several results"] * (sum(isinstance(node, ast.Expr) for node in statements) > 1)


def said(notebook: nbformat.NotebookNode) -> list[tuple[int, str, str]]:
    """(cell, type, text) of every output that is text, in the order in which a file has them."""
    found = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type in ("stream", "error"):
                found.append((number, output.output_type, output.get("text", output.get("evalue", ""))))
            found += [
                (number, kind, text)
                for kind, text in sorted(output.get("data", {}).items())
                if kind.startswith("text/")
            ]
    return found


def test_all_five_are_there():
    """Fault: a notebook renamed, and nothing tests it any more."""
    five = ("captured_trace", "conditioning_map", "drift_per_flush", "error_budget", "pareto")
    assert [f"{name}.ipynb" for name in five] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_is_not_stale(name, monkeypatch):
    """Faults: a cell that raises, numbers in a notebook that the published runs no longer give, a warning in it."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    from run import executed

    before = read(name)
    counts = [cell.execution_count for cell in before.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], f"{name} is not executed, or not from its start: make notebooks"
    after = executed(FOLDER / name)
    assert said(after) == said(before), f"{name} is stale: make notebooks"
    assert not [output for output in said(after) if output[1] in ("stream", "error")]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_asks_first_and_answers_last(name):
    """Faults: a figure without a question, a prediction added after the result, an answer typed by hand."""
    cells = read(name).cells
    opening = cells[0].source
    assert cells[0].cell_type == "markdown" and opening.startswith("# ")
    assert 0 < opening.index("**Question.**") < opening.index("**Predicted")
    assert cells[-2].source == "## Answer" and cells[-1].source.startswith("answers.")
    # a number in the prose below could not follow the data
    prose = [cell.source for cell in cells[1:] if cell.cell_type == "markdown"]
    assert not [text for text in prose if NUMBER.search(text)]


@pytest.mark.parametrize("name", NAMES)
def test_cells_hold_no_logic_and_notebooks_are_small(name):
    """Faults: an analysis that no test of the package reaches, a file that swells the repository, a path of a host."""
    notebook = read(name)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or not logic(cell.source), (name, cell.source)
        assert not cell.metadata
        sizes = [len(json.dumps(output)) for output in cell.get("outputs", [])]
        assert max(sizes, default=0) <= OUTPUT
    text = (FOLDER / name).read_text()
    assert len(text) <= FILE and str(ROOT) not in text and os.path.expanduser("~/") not in text
    assert set(notebook.metadata) == {"kernelspec"}


@pytest.mark.parametrize(
    "source",
    [
        "for x in y: f(x)",
        "def f(): pass",
        "a + b",
        "x = f(a) / 2",
        "[f(x) for x in y]",
        "import matplotlib.pyplot as plt",
        "from matplotlib import pyplot",
        "plt.show()",
        "f(a[0])",
        "f(lambda x: x)",
        "f(x if y else z)",
        "f(a)\ng(b)",
        "f(f'{a}')",
    ],
)
def test_logic_in_a_cell_is_seen(source):
    """Fault: the rule passes what it is there to refuse."""
    assert logic(source)


def test_a_call_is_no_logic():
    """Fault: the rule refuses what every notebook needs."""
    for source in ("import pandas as pd", "x = load('a', table='b')", "f(x.query('a == 1'), rows=None, names=['a'])"):
        assert not logic(source)
