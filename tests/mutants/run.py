"""Plant every defect of the list in a copy of the tree, one at a time, and tell which test catches it.

  python tests/mutants/run.py [--jobs N] [--only TEXT] [--list] [--timeout S] [--report FILE.md]

Each worker keeps one folder: the tree in it is copied anew for every defect, and lies where it lay, so that compiled
code is loaded unless a file of harness/compiled is another. First everything named is run without a defect and has to
pass. A failing test catches; so does running out of time, and that is said. What cannot be imported, collected or
compiled proves nothing and is `broken`.

Exit status: 0 all caught, 1 one survived or is broken, 2 the tests do not pass without a defect.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from planted import AREAS, GATE, ROOT, Mutant, load
from rich import box
from rich.console import Console
from rich.table import Table

FAILED = re.compile(r"^(FAILED|ERROR) (\S+?(?:::.*?)?)(?: - (.*))?$", re.M)
# what stops a test before it has judged anything
UNJUDGED = re.compile(r"(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError|numba\.\S+)\b")
SHOWN = 44  # characters of a test's parameters, and half of those of what it says
VERSIONS = ("numpy", "numba", "torch", "triton", "pytest")
# the same everywhere: kernels in the interpreter, one thread, and a summary that is not cut to a terminal
ALIKE = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
ALIKE |= {"COLUMNS": "400"}


@dataclass(frozen=True)
class Verdict:
    """verdict: caught, SURVIVED or broken; by: what failed first; says: how."""

    mutant: Mutant
    verdict: str
    by: str = ""
    says: str = ""


def taken(into: Path) -> None:
    """What git tracks or would, as it is now: edits made while this runs reach no defect."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def copied(folder: Path) -> Path:
    """The tree of this folder anew, with its times: compiled code is kept by those."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(folder.parent / "tree", tree)
    return tree


def tested(folder: Path, tests: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Exit status and output of these tests in the folder's tree; None: out of time."""
    tree = folder / "tree"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
    # what is named is run even if it is slow
    command += ["-m", ""] if all("::" in t for t in tests) else []
    if GATE in tests:
        command = [sys.executable, "-m", "harness.gate", "check", f"out={folder / 'gate'}"]
    env = os.environ | ALIKE | {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(folder / "numba")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tree, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
    return process.returncode, out


def judged(mutant: Mutant, status: int | None, out: str, report: Path) -> Verdict:
    """The verdict on one run; report: what a gate wrote."""
    if status is None:
        return Verdict(mutant, "caught", "running out of time")
    if status == 0:
        return Verdict(mutant, "SURVIVED")
    if status < 0:
        return Verdict(mutant, "caught", "the process", f"died of signal {-status}")
    if status == 1 and mutant.tests == GATE:
        worse = [f for f in json.loads(report.read_text())["findings"] if f["verdict"] == "regression"]
        first = worse[0]
        where = f"{len(worse)} regressions, first {first['case']}, {first['variant']}, {first['metric']}"
        return Verdict(mutant, "caught", "python -m harness.gate check", where)
    found = FAILED.search(out)
    if status == 1 and found and found[1] == "FAILED":
        by, says = found[2].removeprefix("tests/"), found[3] or ""
        return Verdict(mutant, "broken" if UNJUDGED.match(says) else "caught", by, says)
    return Verdict(mutant, "broken", found[2] if found else (out.strip().splitlines() or [f"status {status}"])[-1])


def plant(mutant: Mutant, folders: queue.Queue[Path], timeout: float) -> Verdict:
    """One defect in one folder."""
    folder = folders.get()
    try:
        tree = copied(folder)
        (tree / mutant.file).write_text(mutant.applied(tree), encoding="utf-8")
        return judged(mutant, *tested(folder, [mutant.tests], timeout), folder / "gate/gate.json")
    finally:
        folders.put(folder)


def sound(folder: Path, tests: list[str], timeout: float) -> str | None:
    """What these tests say without a defect, None if they pass."""
    copied(folder)
    kinds = (lambda t: t == GATE), (lambda t: "::" in t), (lambda t: t.endswith(".py"))
    for some in ([t for t in tests if kind(t)] for kind in kinds):
        status, out = tested(folder, some, timeout) if some else (0, "")
        if status != 0:
            return out[-2000:] or f"no answer within {timeout:.0f} s"
    return None


def table(verdicts: list[Verdict]) -> Table:
    """A line each, in 80 columns."""
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), width=80)
    for name, ratio in (("defect", 5), ("", 0), ("by", 6)):
        drawn.add_column(name, no_wrap=True, ratio=ratio or None, overflow="ellipsis", min_width=0 if ratio else 8)
    for v in verdicts:
        style = "" if v.verdict == "caught" else "bold red"
        drawn.add_row(v.mutant.name, v.verdict, v.by, style=style)
    return drawn


def markdown(verdicts: list[Verdict], command: str) -> str:
    """The report: what was run, then a table of each area."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in VERSIONS)
    caught = sum(v.verdict == "caught" for v in verdicts)
    lines = [
        "# Planted defects",
        "",
        f"{caught} of {len(verdicts)} are caught. Each is planted alone in a copy of the tree, where the test named",
        "for it is run; the tables have what failed first. The list is tests/mutants/*.yaml.",
        "",
        f"    {command}",
        "",
        f"{datetime.now(UTC).date()}, Python {platform.python_version()}, {versions}.",
    ]
    for area in AREAS:
        mine = [v for v in verdicts if v.mutant.area == area]
        if mine:
            lines += ["", f"## {area}", "", "| defect | file | caught by | which says |", "|---|---|---|---|"]
            lines += [f"| {v.mutant.name} | {v.mutant.file} | {shown(v)} |" for v in mine]
    return "\n".join(lines) + "\n"


def shown(v: Verdict) -> str:
    """Two cells: what caught it, and what that says; neither in full."""
    test, bracket, rest = v.by.partition("[")
    by = f"`{test}{bracket}{rest if len(rest) < SHOWN else rest[:SHOWN] + '…]'}`" if v.by else ""
    says = v.says.removeprefix("AssertionError:").strip()
    says = f"`{says[: 2 * SHOWN]}`" if says else ""
    cells = " | ".join(x.replace("|", "\\|") for x in (by, says))
    return cells if v.verdict == "caught" else f"**{v.verdict}** {cells}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="texts, split at |, of which area, name and file contain one")
    parser.add_argument("--list", action="store_true", help="show the list and run nothing")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one defect")
    parser.add_argument("--report", type=Path, help="write the tables as Markdown")
    given = parser.parse_args(argv)
    mutants = [m for m in load() if any(x in f"{m.area}: {m.name}, {m.file}" for x in given.only.split("|"))]
    if not mutants:
        parser.error(f"--only: {given.only!r} names no defect")
    console = Console(markup=False, highlight=False, width=80)
    if given.list:
        for m in mutants:
            console.print(f"{m.area}: {m.name}, {m.file}", soft_wrap=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as top, ThreadPoolExecutor(given.jobs) as pool:
        taken(Path(top) / "tree")
        places = [Path(top) / str(i) for i in range(given.jobs)]
        tests = [*dict.fromkeys(m.tests for m in mutants)]
        shares = [tests[i :: given.jobs] for i in range(given.jobs)]
        for bad in pool.map(lambda at: sound(*at, 3 * given.timeout), zip(places, shares, strict=True)):
            if bad:
                print(f"without any defect:\n{bad}", file=sys.stderr)
                return 2
        folders: queue.Queue[Path] = queue.Queue()
        for place in places:
            folders.put(place)
        # those that compile take longest
        order = sorted(mutants, key=lambda m: "harness/compiled/" not in m.file)
        running = {m: pool.submit(plant, m, folders, given.timeout) for m in order}
        for done, _ in enumerate(as_completed(running.values()), 1):
            if sys.stderr.isatty():
                print(f"\r{done} of {len(mutants)}", end="" if done < len(mutants) else "\n", file=sys.stderr)
        verdicts = [running[m].result() for m in mutants]
    console.print(table(verdicts))
    caught = sum(v.verdict == "caught" for v in verdicts)
    console.print(f"{caught} of {len(verdicts)} caught")
    if given.report:
        given.report.write_text(
            markdown(verdicts, shlex.join(["python", "tests/mutants/run.py", *argv])), encoding="utf-8"
        )
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
