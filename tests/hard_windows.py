"""Windows on which inverses of I + A part: keys of one cosine, A, the exact T, and the error of a method in a format.

Errors are of the strictly lower part, max|T_hat - T|, beside |T| <= beta.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dot, Dots, Rounding, Sites
from harness.reference.inverse import inverse_of

F64 = torch.float64
SIGMOID_8 = 1 / (1 + math.exp(-8))


def arithmetic(site: str, dot: Dot | str) -> Arithmetic:
    """The inverse stored as `site` says, with products by `dot`; nothing else takes part."""
    dot = Dot.parse("inverse", dot) if isinstance(dot, str) else dot
    return Arithmetic(Sites(inverse=Rounding.parse("inverse", site)), Dots(inverse=dot))


HALF, TF32_NEAREST = Rounding("fp16"), Rounding("tf32")
IN: dict[str, Arithmetic] = {
    "fp32": arithmetic("fp32", "ieee"),
    "tf32": arithmetic("fp32", "tf32"),
    "bf16": arithmetic("bf16", "bf16"),
    "fp16": arithmetic("fp16", "fp16"),
    "fp16, fp16 sums": arithmetic("fp16", Dot(HALF, HALF, HALF)),
    "fp32, bf16 products": arithmetic("fp32", "bf16"),
    "fp32, tf32 to nearest": arithmetic("fp32", Dot(TF32_NEAREST, TF32_NEAREST, Rounding("fp32"))),
}
# what an operand of a product loses; a truncated tf32 loses up to 2^-10
U = {"fp32": 2.0**-24, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp32, bf16 products": 2.0**-8}


def keys(cosine: float, m: int, norm: float = 1.0, silu: bool = False) -> Tensor:
    """[4, m, 128] keys of pairwise cosine about `cosine`; silu: independent ones as a SiLU leaves them."""
    draw = torch.Generator().manual_seed(m)
    common, noise = (torch.randn(4, n, 128, dtype=F64, generator=draw) for n in (1, m))
    k = torch.nn.functional.silu(noise) if silu else math.sqrt(cosine) * common + math.sqrt(1 - cosine) * noise
    return norm * k / k.norm(dim=-1, keepdim=True)


def matrix(k: Tensor, beta: float, g: float | Tensor) -> Tensor:
    """A [4, m, m] of keys k."""
    G = torch.as_tensor(g, dtype=F64).expand(k.shape[-2]).cumsum(0)
    return (beta * (G[:, None] - G[None]).tril().exp() * (k @ k.mT)).tril(-1)


def exact(A: Tensor) -> Tensor:
    """(I+A)^-1 row by row in fp64, 1e-15 n away from it at most."""
    return inverse_of("substitution").form(A, Arithmetic())


def error(A: Tensor, method: str, a: Arithmetic | str) -> float:
    """Largest error of a strictly lower entry; NaN where one is not finite."""
    X = inverse_of(method).form(A, IN[a] if isinstance(a, str) else a)
    worst = (X - exact(A)).tril(-1).abs().amax()
    return worst.item() if torch.isfinite(X).all() else math.nan
