"""`python -m harness` and the console script `harness`; see harness.cli, or --help."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of this process; the exit status."""
    from harness import cli

    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
