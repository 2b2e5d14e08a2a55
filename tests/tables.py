"""Made-up tables of published sweeps, with exact zeros, NaN and infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

VARIANTS = ("exact_recurrent", "chunked_fp32", "chunked_bf16")
LEVEL = dict(zip(VARIANTS, (1e-6, 4e-7, 5e-3), strict=True))
Q = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
TOKENS = (10, 100, 1000, 10000)


def quantiles(
    precisions: tuple[str, ...] = ("own", "bf16", "exact"), lengths: tuple[int, ...] = (32, 16)
) -> pd.DataFrame:
    """Table `quantiles`: exact is zero; chunked_bf16 in bf16 ends in NaN, chunked_fp32 there in one infinite row."""
    rows = []
    for precision in precisions:
        for length in lengths:
            for variant in VARIANTS:
                for tokens in TOKENS:
                    level = {"own": LEVEL[variant], "exact": 0.0}.get(precision, 1e-2) * (tokens / 1e4) ** 0.3
                    for q in Q:
                        error = level * 10 ** (q - 0.5)
                        if precision == "bf16" and tokens == TOKENS[-1]:
                            error = np.nan if variant == "chunked_bf16" else error
                            error = np.inf if variant == "chunked_fp32" and q == 1 else error
                        found = {"precision.name": precision, "ring.length": length, "variant": variant}
                        rows.append(found | {"tokens": tokens, "rows": 9, "quantile": q, "kept_fro": error})
    frame = pd.DataFrame(rows).astype({"quantile": "float32", "kept_fro": "float32", "variant": "category"})
    frame.attrs["config"] = {"decode.family": "loop24"}
    return frame


def budget_levels(parts: dict[str, dict[str, float]], whole: dict[str, float], **more: Any) -> pd.DataFrame:
    """Table `levels` of a sweep over precision.keep: variant -> {site: error alone}, variant -> error of all."""
    rows = []
    for variant, sites in parts.items():
        runs = [("own", "", whole[variant]), ("exact", "", 1e-15)] + [("exact", s, x) for s, x in sites.items()]
        for name, keep, error in runs:
            found = {"precision.name": name, "precision.keep": keep, "decode.seed": 0, "variant": variant}
            rows.append(found | {"kept_median": error} | more)
    return pd.DataFrame(rows)


def cost_levels(*points: tuple[str, float, float], **more: Any) -> pd.DataFrame:
    """Table `levels`: (variant, bytes_token, kept_max)."""
    rows = [{"variant": v, "ring.length": 16, "bytes_token": x, "kept_max": y} | more for v, x, y in points]
    return pd.DataFrame(rows)
