"""Every method in every format on one batch of windows: what it costs in accuracy, and where it leaves the numbers.

A row per (input, method, format) holds every number of COLUMNS twice: the upper median over the windows of the input,
and, as NAME_max, the largest. A value that is not finite counts as worse than any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness import inversion
from harness.arithmetic import Arithmetic, Dot, Dots, Rounding, Sites
from harness.errors import ConfigError
from harness.points import Batch
from harness.reference.inverse import Inverse, inverse_of, substitution
from harness.tokens import Shape
from harness.watch import Log, watched

ROWS = 4  # right-hand sides per window
COLUMNS = {
    "error_T": "max |T_hat - T| of a strictly lower entry, over max |T|",
    "error_D": "max |D_hat - D| over max |D|, D = R T' of N(0, 1) right-hand sides",
    "left": "max |T_hat L - I|, strictly lower",
    "right": "max |L T_hat - I|, strictly lower",
    "excess": "max |T_hat_ij| - beta_i e^{G_i-G_j}, strictly lower",
    "per_skeel": "error_T over u and Skeel's condition number",
    "per_power": "error_T over u max_p max (|A|^p)_ij, the largest power 1 at least",
}
Row = dict[str, Any]


def parse_format(text: str, key: str = "conditioning.formats") -> Arithmetic:
    """The arithmetic of `site/product`: what is stored, how products are computed. ConfigError naming the format."""
    key = f"{key}: {text!r}"
    site, slash, dot = str(text).partition("/")
    if not slash:
        raise ConfigError(f"{key} is not site/product, as fp32/tf32")
    product = Dot.parse(key, dot)
    stored = Rounding.parse(key, site)
    if stored.mode == "stochastic":
        raise ConfigError(f"{key}: an inverse is not rounded stochastically")
    return Arithmetic(Sites(inverse=stored), Dots(inverse=product, solve=product))


def difficulties(batch: Batch) -> list[Row]:
    """A row per input: harness.inversion.difficulty of its windows, median and largest; whether it is in the domain."""
    P, D, m = batch.A.shape[:3]
    A, bound = batch.flat
    found = batch.difficulty | {"max_T": inversion.largest(batch.T), "bound": inversion.largest(bound)}
    legal = inversion.in_domain(A, bound).view(P, D).all(1)
    rows = []
    for i, x in enumerate(batch.inputs):
        row: Row = {"input": x.name, "coherence": x.coherence, "beta": x.beta, "g": x.g, "window": m, "draws": D}
        row["in_domain"] = bool(legal[i])
        for name, values in found.items():
            row |= _spread(name, values.view(P, D)[i])
        rows.append(row)
    return rows


def inversions(batch: Batch, methods: list[str], text: str, seed: int) -> list[Row]:
    """A row per method and input, in the format `text`."""
    P, D, m = batch.A.shape[:3]
    (A, bound), T, known, a = batch.flat, batch.T, batch.difficulty, parse_format(text)
    R = torch.randn(P * D, ROWS, m, dtype=A.dtype, generator=torch.Generator().manual_seed(seed))
    exact = substitution.solve(R, A, inversion.EXACT)
    skeel, power = known["skeel"], known["power"].clamp_min(1.0)
    rows: list[Row] = []
    for name in methods:
        method = inverse_of(name)
        u = inversion.roundoff(a, products=m > method.alone)
        X = method.form(A, a)
        found = {"error_D": inversion.error_of_writes(inversion.writes(method, X, R, a), exact)}
        if method.explicit:
            found |= inversion.quality(X, A, T, bound)
            found["per_skeel"] = found["error_T"] / (u * skeel)
            found["per_power"] = found["error_T"] / (u * power)
        stages = _stages(method, a, A, R, ~found["error_D"].isfinite().view(P, D))
        for i, x in enumerate(batch.inputs):
            row: Row = {"input": x.name, "window": m, "method": name, "format": text, "u": u}
            row["nonfinite"] = int((~found["error_D"].isfinite()).view(P, D)[i].sum())
            row["stage"] = stages.get(i)
            for metric in COLUMNS:
                row |= _spread(metric, found[metric].view(P, D)[i] if metric in found else None)
            rows.append(row)
    return rows


def _spread(name: str, x: Tensor | None) -> Row:
    """Median and largest of the windows [D]; None where a method has no such number."""
    if x is None:
        return {name: None, f"{name}_max": None}
    # what is no number ranks above inf, and is told apart by the count of what is not finite
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return {name: float(x.quantile(0.5, interpolation="higher")), f"{name}_max": float(x.amax())}


def _stages(method: Inverse, a: Arithmetic, A: Tensor, R: Tensor, bad: Tensor) -> dict[int, str]:
    """Input number -> where its first failing window leaves the finite numbers: site or product, and the how many-th.

    bad [P, D]: which windows fail. An A that is not finite itself fails at A.
    """
    D, found = bad.shape[1], {}
    for i in bad.any(1).nonzero().flatten().tolist():
        n = i * D + int(bad[i].nonzero()[0])
        one, log = slice(n, n + 1), Log(Shape(1, 1, 1, 1), [0], 1)
        again = watched(a, log)
        if A[n].isfinite().all():
            inversion.writes(method, method.form(A[one], again), R[one], again)
            _, count, name = log.first.get((0, 0), (0, 0, "the result"))
            found[i] = f"{name} {count}"
        else:
            found[i] = "A"
    return found
