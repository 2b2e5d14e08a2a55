"""Execute notebooks in place, leaving in the files what the cells say and nothing of when or where they were run.

  python notebooks/run.py [NAME.ipynb ...]   default: all of this folder

A second execution on the same machine changes no byte.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def executed(path: Path, timeout: int = 120) -> nbformat.NotebookNode:
    """The notebook at path, executed in its own folder by a kernel of its own, on this source.

    Raises nbclient.exceptions.CellExecutionError for a cell that raises.
    """
    notebook = nbformat.read(str(path), as_version=4)
    # an installed package may be another one than the tree that the notebook lies in
    source = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        # a warning at every start about sockets of this machine
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"})
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for number, cell in enumerate(notebook.cells, 1):
        cell.metadata, cell.id = nbformat.from_dict({}), f"cell-{number}"
    return notebook


def main(argv: list[str]) -> int:
    for path in [Path(name) for name in argv] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(executed(path.resolve()), str(path))
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
