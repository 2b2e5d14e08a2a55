"""fused_recurrent_gated_delta_rule of flash-linear-attention: the recurrence in fp32, the last state returned.

It keeps no state per draft, so a decoder that verifies drafts would need more than this: a lower bound for one that
does.

Source: fla-org/flash-linear-attention 0.6.0 (fla-core), fla/ops/gated_delta_rule/fused_recurrent.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from torch import Tensor

from harness.errors import HarnessError
from harness.peers.seat import Bound, Seat

NAME, PACKAGE = "fla", "fla-core"
MODULE, FUNCTION = "fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule"


def load() -> Callable[..., Any]:
    """Its function. Raises HarnessError naming the package where it is missing or has no such function."""
    # another installed backend would answer in its place
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    try:
        return getattr(import_module(MODULE), FUNCTION)
    except ModuleNotFoundError as error:
        raise HarnessError(f"{NAME}: no module {error.name}; pip install {PACKAGE}") from error
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"{NAME} {version()}: no {MODULE}.{FUNCTION} ({error})") from error


def version() -> str | None:
    """The installed version, None without one."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def recurrent(function: Callable[..., Any], seat: Seat) -> Bound:
    """A window token by token from the seat's checkpoint, which stays."""
    B = len(seat.slots)
    q, k, v, g, beta = (x.unflatten(0, (B, seat.m)) for x in (seat.q, seat.k, seat.v, seat.g, seat.beta))
    found: list[Tensor] = []

    def run() -> None:
        o, last = function(
            q, k, v, g, beta=beta, initial_state=seat.checkpoint, output_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip
        found[:] = [o, last]

    return Bound(run, lambda: found[0].flatten(0, 1), {"checkpoint": seat.checkpoint, "final state": seat.checkpoint})
