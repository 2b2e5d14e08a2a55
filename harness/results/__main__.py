"""Look at results, compare them, and take tables out of them.

  python -m harness.results list    [PATH] [KEY=VALUE ...] [--state finished,failed] [--experiment NAME]
  python -m harness.results show    PATH|HASH [--level kept_median]
  python -m harness.results compare A B [...] [--tolerance 0.1]
  python -m harness.results compare --commits A B [--results DIR]
  python -m harness.results export  PATH FILE [--table levels] [--config varying] [--variants a,b] [--force]

PATH: a run, an experiment's folder, a sweep, a results_dir (default results/runs), or results/ and what was published
there. list prints what varies among the runs listed, and the sweeps. show takes the first digits of a hash, too.
compare joins two sweeps, or the runs of two commits or source digests, on their configurations. export takes .csv,
.parquet, .json, .jsonl, .md and .tex.

Exit status: 0; 1 where compare finds a level outside the tolerance, one that is not finite on one side only, a row
without a partner, or a run that cannot be read, and where show finds a failed or damaged job or a changed file;
2 refused, in one line. Levels that are not finite on both sides alike are counted apart and do not make it 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.commands import Parser, status
from harness.errors import HarnessError

RUNS = "results/runs"


def main(argv: list[str]) -> int:
    """Run one command line and return its exit status."""
    parser = Parser("results", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=argparse.ArgumentParser)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        own = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        # one line, as everything else that is refused
        own.error = parser.error  # type: ignore[method-assign]
        return own

    own = verb("list", "runs and sweeps")
    own.add_argument("words", nargs="*", metavar="PATH|KEY=VALUE", help=f"a folder, default {RUNS}, and filters")
    own.add_argument("--state", default="", metavar="LIST", help="finished, stale, failed, killed, running, ...")
    own.add_argument("--experiment", help="only this one")
    own = verb("show", "one run, or one sweep")
    own.add_argument("what", metavar="PATH|HASH", help="a folder, or the first digits of a content hash")
    own.add_argument("--level", default="kept_median", help="what the table of a sweep shows; a column of levels")
    own.add_argument("--results", default=RUNS, metavar="DIR", help="where a hash is looked for")
    own = verb("compare", "two results or more, the first beside each other")
    own.add_argument("what", nargs="+", metavar="A B", help="paths, as for list")
    own.add_argument("--commits", action="store_true", help="A and B are commits, or digests of the source")
    own.add_argument("--results", default=RUNS, metavar="DIR", help="whose runs are of these commits")
    own.add_argument("--tolerance", type=float, default=None, help="of a ratio; default 0.1: within 1/1.1..1.1")
    own = verb("export", "a table of runs as a file")
    own.add_argument("path", type=Path, metavar="PATH", help="whose rows")
    own.add_argument("file", type=Path, metavar="FILE", help="its suffix says what is written")
    own.add_argument("--table", default="levels", help="levels, flushes, quantiles, points, ...")
    own.add_argument("--config", default="varying", metavar="WHICH", help="varying, all, or a list of keys")
    own.add_argument("--variants", metavar="LIST", help="rows of these variants only")
    own.add_argument("--columns", metavar="LIST", help="these columns of the table only")
    own.add_argument("--force", action="store_true", help="overwrite FILE")
    return status(lambda: _run(parser.parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    return {"list": _list, "show": _show, "compare": _compare, "export": _export}[options.verb](options)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [word for word in text.split(",") if word]


def _list(options: argparse.Namespace) -> int:
    from harness.results import holdings, listing, printing

    paths = [word for word in options.words if "=" not in word]
    if len(paths) > 1:
        raise HarnessError(f"list: one PATH, not {', '.join(paths)}")
    filters = dict(word.split("=", 1) for word in options.words if "=" in word)
    path = Path(paths[0] if paths else RUNS)
    states = _listed(options.state) or []
    entries = listing.find(path, states, options.experiment, filters)
    narrowed = states or options.experiment or filters
    listing.show(path, entries, [] if narrowed else holdings.sweeps_of(path), printing.console())
    return 0


def _show(options: argparse.Namespace) -> int:
    from harness.results import printing, showing

    return showing.show(showing.find(options.what, Path(options.results)), options.level, printing.console())


def _compare(options: argparse.Namespace) -> int:
    from harness.results import compared, comparing, printing, sides

    tolerance = comparing.TOLERANCE if options.tolerance is None else options.tolerance
    if not 0 <= tolerance < float("inf"):
        raise HarnessError(f"--tolerance: {tolerance} is not a number from 0 on")
    if len(options.what) < 2:
        raise HarnessError(f"compare: nothing to compare {options.what[0]} with")
    side = [
        sides.side_at(what, Path(options.results)) if options.commits else sides.side_of(Path(what))
        for what in options.what
    ]
    found = [comparing.compare(side[0], other, options.commits) for other in side[1:]]
    for comparison in found:
        compared.show(comparison, tolerance, printing.console())
    return 0 if all(comparison.same(tolerance) for comparison in found) else 1


def _export(options: argparse.Namespace) -> int:
    from harness.results.exporting import export
    from harness.results.gather import gather

    config = options.config if options.config in ("varying", "all") else _listed(options.config) or []
    gathered = gather([options.path], options.table, config, _listed(options.columns), _listed(options.variants))
    count = export(gathered, options.file, options.force)
    print(f"{options.file}: {count} rows, {len(gathered.schema)} columns")
    for directory, state in gathered.held.left_out:
        print(f"left out: {directory}: {state}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
