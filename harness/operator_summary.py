"""What experiment=window_operator found, as summary.json; harness.operator_tables prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.config import Config
from harness.operator_config import gate_point
from harness.provenance import plain

if TYPE_CHECKING:
    import pandas as pd

# column of a run that is above 1, or as a logarithm above 0, where it predicts growth
PREDICTORS = {
    "radius": "radius, median",
    "radius_max": "radius, worst",
    "norm_max": "norm, worst",
    "joint": "product",
}
FLUSHES = (1, 10, 100)
NEAR = 0.05  # of a rate, called agreement
SHOWN = 0.9  # cosine of keys that are coherent and no two alike, where radii are told one by one


def summarise(config: Config, closed: pd.DataFrame, injected: pd.DataFrame, folds: pd.DataFrame) -> dict[str, Any]:
    """summary.json: agreement of every predictor, rates, safe windows, gains and constants."""
    return plain(
        {
            "gate": config.operator.gates[0],
            "runs": len(closed),
            "diverged": int(closed["diverged"].sum()),
            "agreement": agreement(closed),
            "hidden": hidden(closed),
            "rates": rates(closed),
            "safe_windows": safe(config, closed),
            "operators": operators(config, closed),
            "gains": gains(injected),
            "folds": constants(folds),
        }
    )


def agreement(closed: pd.DataFrame) -> list[dict[str, Any]]:
    """Per predictor and kind of keys: counts of predicted (above 1, or T not finite) against diverged.

    near: predicted to grow by less than a run can tell from a random walk, and left out of the four counts.
    """
    found = []
    alike = closed["cosine"] == 1
    for column, what in PREDICTORS.items():
        for keys, part in (("identical", closed[alike]), ("varying", closed[~alike])):
            x = part[column].to_numpy(float)
            x = x if column == "joint" else np.log(x)
            # a last bit above 1 is rounding of the eigenvalue, which costs half the digits where keys are identical
            says = ~(x <= 1e-6)
            near = (x > 1e-6) & (x < part["resolved"].to_numpy())
            did = part["diverged"].to_numpy()
            told = {
                "both": says & did,
                "neither": ~says & ~did,
                "predicted only": says & ~did & ~near,
                "diverged only": ~says & did,
                "near": near & ~did,
            }
            found.append({"by": what, "keys": keys} | {name: int(mask.sum()) for name, mask in told.items()})
    return found


def hidden(closed: pd.DataFrame) -> dict[str, Any] | None:
    """The run that grew fastest although no single window that was looked at has a radius above 1."""
    some = closed[closed["diverged"] & (closed["radius_max"] <= 1)]
    return None if some.empty else {str(k): v for k, v in some.loc[some["growth"].idxmax()].items()}


def rates(closed: pd.DataFrame) -> list[dict[str, Any]]:
    """Per cosine, over runs that diverged and stayed finite long enough: measured growth over each predicted one."""
    found = []
    for cosine, part in closed[closed["diverged"]].groupby("cosine"):
        part = part[np.isfinite(part["growth"]) & np.isfinite(part["joint"]) & (part["growth"] > part["resolved"])]
        if not len(part):
            continue
        by_joint = (part["growth"] / part["joint"]).to_numpy()
        by_radius = (part["growth"] / np.log(part["radius"])).to_numpy()
        found.append(
            {
                "cosine": cosine,
                "runs": len(part),
                "growth/joint": quantiles(by_joint),
                "within": float((np.abs(by_joint - 1) <= NEAR).mean()),
                "growth/log radius": quantiles(by_radius),
            }
        )
    return found


def quantiles(x: np.ndarray) -> list[float]:
    """5, 50 and 95 %."""
    return [float(q) for q in np.quantile(x, (0.05, 0.5, 0.95))]


def short(form: str) -> str:
    """site/product as one word where that is enough: fp32/ieee as fp32, fp32/tf32 as tf32, bf16/bf16 as bf16."""
    site, _, product = form.partition("/")
    return {("fp32", "ieee"): "fp32", ("fp32", "tf32"): "tf32", (product, site): site}.get((site, product), form)


def first_gate(config: Config, closed: pd.DataFrame) -> pd.DataFrame:
    """The runs at the first of operator.gates."""
    beta, g = gate_point(config.operator.gates[0])
    return closed[(closed["beta"] == beta) & (closed["g"] == g)]


def safe(config: Config, closed: pd.DataFrame) -> list[dict[str, Any]]:
    """Per method and cosine, at the first gate: widest window up to which radii stay at 1, and no run diverges."""
    found = []
    for (inverse, kind), part in first_gate(config, closed).groupby(["inverse", "format"], sort=False):
        entry: dict[str, Any] = {"inverse": inverse, "format": kind}
        for cosine, runs in part.groupby("cosine"):
            by_window = runs.groupby("window")
            fine = by_window["radius_max"].apply(lambda x: bool((x <= 1 + 1e-6).all()))
            bounded = ~by_window["diverged"].any()
            entry[f"{cosine:g}"] = [widest(fine), widest(bounded)]
        found.append(entry)
    return found


def widest(good: pd.Series) -> int:
    """The largest window, by rising size, before the first that is not good; 1 where none is."""
    last = 1
    for window, ok in good.items():
        if not ok:
            break
        last = int(window)
    return last


def operators(config: Config, closed: pd.DataFrame) -> list[dict[str, Any]]:
    """Per method and window at the first gate, keys of cosine .9 or the nearest there is: medians over heads.

    norm and radius of single windows, and as factors per window joint, e^joint, and growth, e^growth.
    """
    keys = ["inverse", "format", "cosine", "window"]
    here = first_gate(config, closed)
    cosine = min(config.operator.cosines, key=lambda x: abs(x - SHOWN))
    part = here[here["cosine"] == cosine].assign(
        joint=lambda x: np.exp(x["joint"].clip(upper=700)), growth=lambda x: np.exp(x["growth"].clip(upper=700))
    )
    medians = part.groupby(keys, sort=False)[["norm", "radius", "joint", "growth", "error"]].median().reset_index()
    rows: list[dict[str, Any]] = medians.to_dict("records")
    return rows


def remembering(injected: pd.DataFrame) -> list[int]:
    """Heads whose gates alone keep more than half of anything to the end, e^G > 1/2; if none do, the longest."""
    last = injected[injected["flush"] == injected["flush"].max()]
    return sorted({int(head) for head in last["head"][last["bound"] >= min(0.5, last["bound"].max())]})


def gains(injected: pd.DataFrame) -> list[dict[str, Any]]:
    """Per variant and perturbed value, after 1, 10, 100 and all flushes, over the heads that remember.

    gain, exact: medians; of_bound: the worst gain / e^G, over all flushes. left, left_max: over all heads.
    """
    found, long = [], remembering(injected)
    for (variant, what), part in injected.groupby(["variant", "what"], sort=False):
        last = int(part["flush"].max())
        kept = part[part["head"].isin(long)]
        worst = float((kept["gain"] / kept["bound"]).max())
        for flush in [n for n in (*FLUSHES, last) if n <= last]:
            here = part[part["flush"] == flush]
            keeps = kept[kept["flush"] == flush]
            found.append(
                {
                    "variant": variant,
                    "what": what,
                    "flush": flush,
                    "tokens": int(here["tokens"].iloc[0]),
                    "heads": len(keeps),
                    "gain": float(keeps["gain"].median()),
                    "exact": float(keeps["exact"].median()),
                    "of_bound": worst,
                    "left": float(here["left"].median()),
                    "left_max": float(here["left"].max()),
                }
            )
    return found


def constants(folds: pd.DataFrame) -> list[dict[str, Any]]:
    """Per ring and cosine: medians over heads of c by product once and in a chain, by replay, and of s."""
    names = ["once", "chain", "replay", "scale"]
    rows: list[dict[str, Any]] = folds.groupby(["ring", "cosine"])[names].median().reset_index().to_dict("records")
    return rows
