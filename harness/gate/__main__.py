"""Hold a suite of small decodes against its baseline, or accept what it measures as the new one.

  python -m harness.gate check  [key=value ...]
  python -m harness.gate accept reason="..." [key=value ...]

  suite=fast        fast (two cores, 20 s) | full | gpu (kernels, on a GPU)
  variants=a,b      names or files; default: every variant that ships, in suite=gpu the six default arms
  against=NAME      judge levels and tails by the baseline of NAME: "no worse than NAME"
  baselines=DIR     where SUITE.json lies; default results/baselines
  out=DIR           gate.json and gate.xml of a check; default results/runs/gate

Exit status: 0 pass, 1 regression, 2 could not judge. Rules: harness/gate/README.md.
"""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, HarnessError
from harness.gate import baselines, report, rules
from harness.gate.suite import SUITES, Case, default_of, suite
from harness.progress import meter
from harness.variants import load

KEYS = {"check": ("suite", "variants", "against", "baselines", "out"), "accept": ("suite", "variants", "baselines")}


def main(argv: list[str]) -> int:
    """Run one command line and return its exit status. Only bugs raise."""
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(__doc__)
            return 0 if argv else 2
        verb, options = argv[0], _options(argv)
        return _check(options) if verb == "check" else _accept(options)
    except HarnessError as error:
        print("harness.gate: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("harness.gate: interrupted", file=sys.stderr)
        return 130


def _options(argv: list[str]) -> dict[str, Any]:
    verb, *given = argv
    if verb not in KEYS:
        raise ConfigError(f"command line: {verb!r} is neither check nor accept; --help explains the options")
    known = (*KEYS[verb], *(("reason",) if verb == "accept" else ()))
    found: dict[str, Any] = {"suite": "fast", "variants": None, "baselines": str(baselines.FOLDER)}
    found |= {"against": None, "out": "results/runs/gate", "reason": ""}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            raise ConfigError(
                f"command line: {text!r} is no option of {verb}; have {', '.join(k + '=' for k in known)}"
            )
        found[key] = value
    if found["suite"] not in SUITES:
        raise ConfigError(f"suite: {found['suite']!r} is not one of {', '.join(SUITES)}")
    if verb == "accept" and not found["reason"].strip():
        raise ConfigError('reason: accept needs one, as reason="..."')
    listed = found["variants"]
    found["variants"] = (
        default_of(found["suite"])
        if listed is None
        else [v for v in listed.strip("[]").replace(" ", "").split(",") if v]
    )
    return found


def _measured(options: dict[str, Any]) -> tuple[rules.Measured, list[str], str, list[Case]]:
    """What the suite measures, the variants' own names, the device and the cases."""
    from harness.gate.measure import measure
    from harness.shards import device_of

    cases = suite(options["suite"], options["variants"])
    device = device_of(cases[0].config)
    done = count(1)
    with meter(len(cases), "cases") as at:
        measured = measure(cases, device, lambda case: at(next(done), note=case.name))
    return measured, [load(v).name for v in options["variants"]], device, cases


def _check(options: dict[str, Any]) -> int:
    folder, name, start = Path(options["baselines"]), options["suite"], time.monotonic()
    values = baselines.load(folder, name)["values"]
    if not values:
        raise HarnessError(f'{folder / f"{name}.json"}: no baseline; accept reason="..." makes one')
    if hole := rules.toothless(values):
        raise HarnessError(f"the gate has lost its teeth: {hole}")
    measured, variants, device, _ = _measured(options)
    if options["against"]:
        values, measured = _against(values, options["against"], variants), _errors(measured)
    findings = rules.compare(values, measured, variants)
    outcome = rules.status(findings)
    facts = {"suite": name, "status": outcome, "device": device, "variants": variants, "against": options["against"]}
    report.write(Path(options["out"]), facts, findings)
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(report.table(findings))
    word = {0: "pass", 1: "REGRESSION", 2: "could not judge"}[outcome]
    console.print(f"gate {name}: {word} ({time.monotonic() - start:.0f} s); {options['out']}/gate.json", soft_wrap=True)
    return outcome


def _against(values: dict[str, Any], other: str, variants: list[str]) -> dict[str, Any]:
    """The baseline of `other` as that of every variant, as far as two designs can be compared."""
    found = {case: dict.fromkeys(variants, entries[other]) for case, entries in values.items() if other in entries}
    if not found:
        raise ConfigError(f"against: {other!r} has no baseline")
    return _errors(found)


def _errors(values: dict[str, Any]) -> dict[str, Any]:
    """Levels and tails alone. A slope says something about a level of its own; records and formats differ."""
    kept = ("rows", "level", "tail")
    return {
        case: {v: {m: x for m, x in metrics.items() if m.partition(".")[0] in kept} for v, metrics in entries.items()}
        for case, entries in values.items()
        if not case.startswith("exact")
    }


def _accept(options: dict[str, Any]) -> int:
    measured, _, device, cases = _measured(options)
    if device == "cuda":
        import torch

        device = f"cuda, {torch.cuda.get_device_name()}"
    seed = cases[0].config.decode.seed
    path, changed = baselines.accept(
        Path(options["baselines"]), options["suite"], measured, options["reason"], device, seed
    )
    print(f"{path}: {changed} values accepted" if changed else f"{path}: nothing changed, nothing written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
