"""What a gate found: a table of one screen, JSON, and JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate.rules import Finding, Value, tier_of
from harness.provenance import write_json

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 18  # lines of the table: one screen
ORDER = ("regression", "unjudged", "improvement", "pass")
FEWEST = 5  # of what passed, shown where there is nothing else: how near the nearest came


def table(findings: Sequence[Finding]) -> Table:
    """Regressions first, then what has no baseline, improvements, and, where all pass, the nearest to failing."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left", caption_style="")
    drawn.add_column("variant", no_wrap=True, max_width=17, overflow="ellipsis")
    drawn.add_column("input", no_wrap=True, max_width=19, overflow="ellipsis")
    drawn.add_column("metric", no_wrap=True)
    for name in ("old", "new"):
        drawn.add_column(name, no_wrap=True, justify="right", max_width=9, overflow="ellipsis")
    drawn.add_column("allowed", no_wrap=True, max_width=13, overflow="ellipsis")
    ranked = sorted(findings, key=lambda f: (ORDER.index(f.verdict), -abs(f.excess)))
    worth = [f for f in ranked if f.verdict != "pass"] or ranked[:FEWEST]
    for f in worth[:SHOWN]:
        style = {"regression": "bold red", "unjudged": "yellow", "improvement": "green"}.get(f.verdict, "")
        cells = (f.variant, f.case, f.metric, text(f.old), text(f.new), str(tier_of(f.metric)))
        drawn.add_row(*cells, style=style)
    counts = Counter(f.verdict for f in findings)
    lines = [", ".join(f"{counts[v]} {v}" for v in ORDER if counts[v]) or "nothing was measured"]
    if len(worth) > SHOWN:
        lines.append(f"{len(worth) - SHOWN} more lines in gate.json")
    if counts["pass"] == len(findings) and findings:
        lines.append("all pass; shown are those nearest to their allowance")
    if counts["improvement"]:
        lines.append('better than the baseline: keep it with accept reason="..."')
    if counts["unjudged"]:
        lines.append('no baseline to judge by: accept reason="..." makes one')
    drawn.caption = "\n".join(lines)
    return drawn


def text(value: Value | None) -> str:
    """Four digits of a number, the beginning of a digest."""
    if value is None:
        return "absent"
    return value if isinstance(value, str) else f"{value:.3g}"


def write(folder: Path, facts: dict[str, Any], findings: Sequence[Finding]) -> None:
    """gate.json and gate.xml in folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [vars(f) | {"allowance": str(tier_of(f.metric))} for f in findings]
    write_json(folder / "gate.json", facts | {"findings": rows})
    groups: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.case, f.variant), []).append(f)
    suites = ET.Element("testsuites")
    top = ET.SubElement(suites, "testsuite", name=f"gate {facts['suite']}", tests=str(len(groups)))
    failed = unjudged = 0
    for (case, variant), mine in groups.items():
        one = ET.SubElement(top, "testcase", classname=case, name=variant)
        wrong = [f for f in mine if f.verdict in ("regression", "unjudged")]
        if wrong:
            bad = [f for f in wrong if f.verdict == "regression"]
            kind = "failure" if bad else "error"
            failed, unjudged = failed + bool(bad), unjudged + (not bad)
            lines = [f"{f.metric}: {text(f.old)} -> {text(f.new)}, {tier_of(f.metric)}" for f in bad or wrong]
            ET.SubElement(one, kind, message=lines[0]).text = "\n".join(lines)
    top.set("failures", str(failed))
    top.set("errors", str(unjudged))
    ET.ElementTree(suites).write(folder / "gate.xml", encoding="utf-8", xml_declaration=True)
