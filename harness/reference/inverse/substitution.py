"""Forward substitution: T_i = e_i - sum_{l<i} A_il T_l, or on the right-hand side d_i = r_i - sum_{l<i} A_il d_l.

Row by row, one rounding per multiply-add, terms in ascending l. Error of T at most about n u for |T| <= 1
(Higham, Accuracy and Stability of Numerical Algorithms, ch. 8), whatever the powers of A do.
Source: sgl-project/sglang gdn_replayssm_spec_decode.py (rows of T); NVIDIA/TensorRT-LLM cached_replay.py (the solve).
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arithmetic import Arithmetic


def inverse(A: Tensor, a: Arithmetic) -> Tensor:
    """T = (I+A)^-1. A [N, m, m] strictly lower; T [N, m, m] unit lower, each sum rounded at site `inverse`."""
    r = a.sites.inverse
    T = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A).clone()
    for i in range(1, A.shape[-1]):
        T[:, i, :i] = r(-A[:, i, :i])
        for l in range(1, i):
            T[:, i, :l] = r(torch.addcmul(T[:, i, :l], A[:, i, l, None], T[:, l, :l], value=-1))
    return T


def solve(R: Tensor, A: Tensor, a: Arithmetic) -> Tensor:
    """D with (I+A) D' = R'. R, D [N, V, m]; A [N, m, m] strictly lower; rounded at site `inverse`."""
    r = a.sites.inverse
    D = R.clone()
    for i in range(1, R.shape[-1]):
        column = R[:, :, i]
        for j in range(i):
            column = r(torch.addcmul(column, A[:, i, j, None], D[:, :, j], value=-1))
        D[:, :, i] = column
    return D
