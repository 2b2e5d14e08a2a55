"""Reading what runs left behind: `load` as one tidy table, and `python -m harness.results` to look at it."""

from harness.results.frames import load

__all__ = ["load"]
