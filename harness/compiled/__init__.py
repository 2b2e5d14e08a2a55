"""The readable designs compiled for the CPU: same sites, same modes, loops over heads and rows instead of tensors.

What a torch step costs there is the number of its operations, not their size; these kernels have one call a step.
harness.reference says what they compute, and the tests hold the two together.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

config: Any = numba.config


def _keep_compiled_code_by_source() -> None:
    """Numba keeps compiled code by its own file alone; what it took from the others here would go stale unseen."""
    here = Path(__file__).parent
    # the table of the exponential is a constant of the kernels, too
    files = [*sorted(here.glob("*.py")), here.parent / "exponential.py"]
    sources = b"".join(path.read_bytes() for path in files)
    own = str(here / "__pycache__") if os.access(here, os.W_OK) else ""
    folder = config.CACHE_DIR or own
    if folder:
        config.CACHE_DIR = str(Path(folder) / f"kernels-{hashlib.sha256(sources).hexdigest()[:16]}")


_keep_compiled_code_by_source()
