"""What the commands beside `harness` share: how they read a line, and how they refuse one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from harness.errors import HarnessError


class Parser(argparse.ArgumentParser):
    """`python -m harness.<name>`, described by a module's docstring; a bad line is a HarnessError."""

    def __init__(self, name: str, text: str | None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(f"python -m harness.{name}", description=text, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise HarnessError(f"command line: {message}")


def status(work: Callable[[], int]) -> int:
    """What `work` returns, or 2 where it refuses, in one line."""
    try:
        return work()
    except HarnessError as error:
        print("harness: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
