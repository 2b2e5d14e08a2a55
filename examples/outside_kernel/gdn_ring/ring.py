"""The chunked verify with a ring, as an outside implementation: plain torch in the dtype of the state it is given.

Its layout is its own: states lie K-major, [slots, HV, K, V], and a record is one row of [d, k_hat, g] per slot and row
of the ring, which starts as garbage and is never cleared. Of the harness it uses the cursors and nothing else.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class Ring:
    """What replayssm_harness.designs names."""

    variant = Path(__file__).with_name("gdn_ring.yaml")
    fp64 = True

    def create(self, shape: Any, ring: Any, initial: Tensor) -> Any:
        slots, L = len(initial), ring.length
        state = SimpleNamespace(S=initial.mT.contiguous(), mask=L - 1, group=shape.HV // shape.H)
        state.d = initial.new_full((slots, L, shape.HV, shape.V), torch.nan)
        state.k = initial.new_full((slots, L, shape.H, shape.K), torch.nan)
        state.g = initial.new_full((slots, L, shape.HV), torch.nan)
        return state

    def reset(self, state: Any, slots: Tensor, initial: Tensor) -> None:
        state.S[slots] = initial.mT

    def verify(self, state: Any, window: Any, cursors: Any) -> tuple[Tensor, Tensor]:
        slots, w = window.slots, cursors.write_pos[window.slots]
        full = cursors.is_flush[slots].bool()
        if full.any():
            state.S[slots[full]] = self.folded(state, slots[full], cursors)
        # a slot that has just folded has no history, but its records still go behind the old one
        S, W, d_ring, k_ring = self.history(state, slots, cursors, torch.where(full, 0, w))
        n, _, m, K = window.q.shape
        lane = torch.arange(m, device=S.device) < window.lengths[:, None]
        kind, wide = S.dtype, lane[:, None, :, None]
        q, k, v = (torch.where(wide, x.to(kind), 0) for x in (window.q, window.k, window.v))
        g, beta = (torch.where(lane[:, None], x.to(kind), 0) for x in (window.g, window.beta))
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5
        keys, queries = (x.repeat_interleave(state.group, 1) for x in (k, q))
        G = g.cumsum(-1)
        E = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
        # what history and checkpoint hold for each key and query, without a state of its own
        Wd = d_ring * W[..., None]
        seen, read = (x @ S + (x @ k_ring.mT) @ Wd for x in (keys, queries))
        decay = G.exp()[..., None]
        A = (beta[..., None] * E * (keys @ keys.mT)).tril(-1)
        R = beta[..., None] * (v - decay * seen)
        d = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)
        o = decay * read + (E * (queries @ keys.mT)) @ d
        # lanes behind a window's length are not written: their rows may hold history
        at, j = lane.nonzero(as_tuple=True)
        row = ((cursors.cache_base[slots] + w)[at] + j) & state.mask
        slot = slots[at]
        state.d[slot, row], state.k[slot, row], state.g[slot, row] = d[at, :, j], k[at, :, j], g[at, :, j]
        return o, d

    def commit(self, state: Any, slots: Tensor, accepted: Tensor, cursors: Any) -> None:
        full = slots[cursors.is_flush[slots].bool()]
        if len(full):
            state.S[full] = self.folded(state, full, cursors)

    def read(self, state: Any, which: str, slots: Tensor, cursors: Any) -> Tensor:
        # with fp32 records the state that outputs are computed on is the fold
        return self.folded(state, slots, cursors).mT

    def folded(self, state: Any, slots: Tensor, cursors: Any) -> Tensor:
        """S after the whole history, [n, HV, K, V]."""
        S, W, d, k = self.history(state, slots, cursors, cursors.write_pos[slots])
        return S + k.mT @ (d * W[..., None])

    def history(self, state: Any, slots: Tensor, cursors: Any, count: Tensor) -> tuple[Tensor, ...]:
        """S decayed to the end of `count` [n] records, what each record still weighs [n, HV, w], and d and k_hat."""
        j = torch.arange(max(int(count.max()), 1), device=slots.device)
        row, inside = (cursors.cache_base[slots][:, None] + j) & state.mask, j < count[:, None]
        # a select, as rows behind the history may hold NaN
        d, k, g = (
            torch.where(inside.view(*inside.shape, *(1,) * (x.ndim - 2)), x[slots[:, None], row], 0)
            for x in (state.d, state.k, state.g)
        )
        G = pad(g.transpose(1, 2).cumsum(-1), (1, 0))
        decays = (G[..., -1:] - G).exp()
        keys = k.transpose(1, 2).repeat_interleave(state.group, 1)
        return state.S[slots] * decays[..., :1, None], decays[..., 1:], d.transpose(1, 2), keys
