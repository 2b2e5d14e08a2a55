"""The table that ends a sweep, in 80 columns: every job of a small one, the failures of a large one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from harness.sweeps import sweep

LONG = 40  # jobs; of a longer sweep the table lists those that failed
SHOWN = {"skipped": "already done"}


def report(folder: Path) -> int:
    """Print the table of a sweep; 1 if a job failed or is missing, else 0."""
    from rich.console import Console

    jobs = sweep.rows(folder)
    states = {row["state"] for row in jobs}
    console = Console(width=80, markup=False, highlight=False)
    console.print(table(jobs, folder.parent.parent))
    console.print(f"records: {folder}", soft_wrap=True)
    return 0 if jobs and states <= set(sweep.DONE) else 1


def table(jobs: list[dict[str, Any]], root: Path) -> Any:
    """jobs as sweep.rows gives them; directories are shown as seen from root."""
    from rich.table import Table

    # what every job was given tells none of them apart
    first = jobs[0]["overrides"] if len(jobs) > 1 else []
    shared = [o for o in first if all(o in row["overrides"] for row in jobs)]
    count = Counter(row["state"] for row in jobs)
    title = ", ".join(f"{n} {state}" for state, n in count.items())
    title += "; all with " + " ".join(shared) if shared else ""
    listed = [row for row in jobs if len(jobs) <= LONG or row["state"] not in sweep.DONE]
    if len(listed) < len(jobs):
        title += "; listed are those that are not done" if listed else ""
    drawn = Table(title=title, title_justify="left", expand=True, show_header=bool(listed))
    drawn.add_column("job", justify="right")
    drawn.add_column("overrides", overflow="fold", ratio=3)
    drawn.add_column("state")
    drawn.add_column(f"directory under {root}, or error", overflow="fold", ratio=4)
    for row in listed:
        own = " ".join(o for o in row["overrides"] if o not in shared)
        what = row.get("error") or _under(row, root)
        drawn.add_row(str(row["job"]), own, SHOWN.get(row["state"], row["state"]), what)
    return drawn


def _under(row: dict[str, Any], root: Path) -> str:
    directory = str(row.get("directory") or "")
    inside = os.path.relpath(directory, root) if directory else ""
    return directory if inside.startswith("..") else inside
