"""To be replaced on merge: what a design costs, from its manifest."""

from __future__ import annotations

from typing import Any


def of_manifest(manifest: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{variant: {bytes_held, bytes_token}}."""
    return {}
