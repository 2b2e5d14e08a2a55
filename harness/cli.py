"""The command line of runs: `harness [-m] [key=value ...]`.

Reads the options, answers --help without importing anything heavy, hands the rest to the Hydra application
of harness.app, and turns whatever comes back into an exit status: 0 done, 1 a job of a sweep failed, 2 bad
input, 130 interrupted. A bug keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from harness import __version__
from harness.errors import ConfigError, HarnessError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}; --help explains the options")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="harness", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--expect", type=int)
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(argv)
    if options.cfg is None and (options.package or options.resolve):
        parser.error("--package and --resolve go with --cfg")
    if options.cfg and options.multirun:
        parser.error("--cfg shows one configuration; leave out -m")
    if not options.multirun and (options.plan or options.expect is not None):
        parser.error("--plan and --expect go with -m")
    return options


def _dispatch(argv: list[str]) -> int:
    options = _parse(argv)
    if options.help:
        from harness import manual

        print(manual.page())
        return 0
    if options.version:
        print(f"harness {__version__}")
        return 0
    from harness import app
    from harness.sweeps.plan import lengthened

    options.overrides = lengthened(options.overrides)
    if options.multirun:
        return app.run_sweep(options.overrides, options.expect, options.plan)
    if options.cfg:
        flags = ("--cfg", options.cfg, *(("--package", options.package) if options.package else ()))
        app.show(options.overrides, (*flags, "--resolve") if options.resolve else flags)
        return 0
    return app.run_single(options.overrides)


def main(argv: list[str]) -> int:
    """Run one command line and return its exit status. Only bugs raise."""
    try:
        status = _dispatch(argv)
        sys.stdout.flush()
        return status
    except HarnessError as error:
        print("harness: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("; ".join(["harness: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of a pipe left, as `harness --help | head` does; nothing is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
