"""A design with the interface of the kernels, in fp64 on the CPU: for tests of what is timed, bound and compared."""

from types import SimpleNamespace

import pytest
import torch

from harness.config import RingConfig
from harness.state import RECORDS
from harness.variants import load

pytest.importorskip("triton")
from harness.kernels.steps import Inputs


class FakeSteps:
    """The recurrence in fp64, one state per draft, behind the interface of the kernels; cursors moved by the rule."""

    def __init__(self, state, m, log) -> None:
        self.state, self.m, self.log, self.nbytes = state, m, log, {"checkpoint": 8, "scratch": 1}

    def verify(self, x: Inputs) -> None:
        w, _, flag = self.state.on_device.tolist()
        self.log.append(("verify", w, flag))
        group = x.v.shape[1] // x.k.shape[1]
        q, k = (t.double() / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x.q, x.k))
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
        S, outs, self.drafts = self.state.served.clone(), [], []
        for t in range(self.m):
            S = S * x.g[:, :, t, None, None].double().exp()
            d = x.beta[:, :, t, None] * (x.v[:, :, t].double() - torch.einsum("bhvk,bhk->bhv", S, k[:, :, t]))
            S = S + d[..., None] * k[:, :, t, None]
            outs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, :, t]) / q.shape[-1] ** 0.5)
            self.drafts.append(S)
            self.keep(t, x, d, k)
        self.out = torch.stack(outs, 2)

    def keep(self, t: int, x: Inputs, d, k_hat) -> None:
        """Records behind each slot's history, for peers; a flagged slot's checkpoint is what it serves."""
        w, base, flag = self.state.on_device.tolist()
        group = x.v.shape[1] // x.k.shape[1]
        made = {"d": d, "k_hat": k_hat[:, ::group, t], "g": x.g[:, :, t], "beta": x.beta[:, :, t]}
        made |= {"v": x.v[:, :, t], "k": x.k[:, :, t]}
        for i in range(len(w)):
            for name, ring in self.state.records.items():
                ring[i][:, (base[i] + w[i] + t) % 16] = made[name][i].to(ring.dtype)
            if t == 0 and flag[i]:
                self.state.checkpoint[i] = self.state.served[i]

    def place(self, cursors) -> None:
        self.state.on_device.copy_(cursors)

    def commit(self, accepted) -> None:
        self.log.append(("commit", accepted.tolist()))
        w, base, flag = self.state.on_device
        for i, n in enumerate(accepted.tolist()):
            self.state.served[i] = self.drafts[n - 1][i]
            if not self.state.records:
                self.state.checkpoint[i] = self.state.served[i]
            base[i] = (base[i] + w[i] * flag[i]) % 16
            w[i] = n + w[i] * (1 - flag[i])
        flag.copy_(w >= 9)

    def fold(self, lengths, out=None) -> None:
        self.log.append(("fold", lengths.tolist()))


def fake(name: str, log: list, lose: int = 0) -> SimpleNamespace:
    """A design of this name. lose: its cursors miss so many records."""
    spec = load(name)
    arithmetic = spec.arithmetic()

    def create(shape, slots, initial, device):
        cursors = torch.zeros(3, slots, dtype=torch.int32)
        cursors[1] -= lose
        records = {}
        for field in spec.records(arithmetic):
            heads, width = RECORDS[field]
            size = (getattr(shape, width),) if width else ()
            dtype = torch.float32 if field in ("g", "beta") else torch.bfloat16
            records[field] = torch.zeros(slots, getattr(shape, heads), 16, *size, dtype=dtype)
        held = initial.float()
        return SimpleNamespace(on_device=cursors, served=initial.clone(), checkpoint=held, records=records)

    formats = dict.fromkeys(("checkpoint", "output", "d", "k_hat", "g", "v", "k", "beta"), torch.float32)
    return SimpleNamespace(
        spec=spec, ring=spec.ring(RingConfig()), records=spec.records(arithmetic), formats=formats, create=create,
        steps=lambda state, m: FakeSteps(state, m, log),
    )  # fmt: skip
