"""A declared design on the device: the four calls, each a launch or two. Names its refusals before any launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from harness.errors import ConfigError, RingError
from harness.kernels import cursors as moves
from harness.kernels.fold import fold_product, fold_replay
from harness.kernels.numbers import INTERPRETED
from harness.kernels.options import options, unsupported
from harness.kernels.recurrent import recurrent_verify, take_draft
from harness.kernels.window import ring_verify
from harness.reference.emulated import Emulated
from harness.reference.state import EmulatedState, Verified
from harness.ring import RingSpec
from harness.tokens import Shape
from harness.window import Step, Windows

BV, WARPS = 32, 4  # rows of a state per program, warps per program, of a recurrence or a fold
# of a window: the fastest of eight measured on an H200 at 64 and 256 slots (H 16, HV 32, K = V = 128)
WINDOW_BV, WINDOW_WARPS = 64, 2
BLOCK = 128  # slots a program of the cursor kernels moves


class TritonState(EmulatedState):
    """Checkpoint and records in their own formats, and the cursors on the device as well, [3, slots] int32."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.on_device = torch.zeros(3, self.slots, dtype=torch.int32, device=self.device)
        self.every = torch.arange(self.slots, dtype=torch.int32, device=self.device)
        self.known: tuple[list[int], ...] = ()  # what the device holds
        self.kept: Tensor | None = None  # a state per draft of the window just verified

    def _host(self) -> tuple[list[int], ...]:
        c = self.cursors
        return list(c.write_pos), list(c.cache_base), [int(f) for f in c.is_flush]

    def sync(self) -> Tensor:
        """The cursors on the device, written there only if the host has moved them on its own."""
        host = self._host()
        if host != self.known:
            self.on_device.copy_(torch.tensor(host, dtype=torch.int32))
            self.known = host
        return self.on_device

    def moved(self) -> None:
        """The device has just done what the host did."""
        self.known = self._host()

    def widened(self) -> EmulatedState:
        """The same state on fp64 carriers, for what is read and not decoded."""
        wide = EmulatedState(self.shape, self.spec, 0, (), self.device)
        wide.slots, wide.cursors, wide.tokens, wide.seed = self.slots, self.cursors, self.tokens, self.seed
        wide.checkpoint = self.checkpoint.double()
        wide.records = {name: rows.double() for name, rows in self.records.items()}
        wide.version, wide.first_head = self.version, self.first_head
        return wide

    def clone(self) -> TritonState:
        new = super().clone()
        assert isinstance(new, TritonState)
        new.on_device = self.on_device.clone()
        return new


class Triton(Emulated):
    """`spec` in `arithmetic` on `ring`, by the kernels beside this. Raises ConfigError for what they do not compute."""

    backend = "triton"
    engine = "triton"

    def __init__(self, *args: Any, exp: str = "fast"):
        super().__init__(*args)
        self.exp = exp
        why = unsupported(self.spec, self.arithmetic)
        if why:
            raise ConfigError(f"backend: {self.spec.name} has no Triton kernel: {why}")
        self.options = options(self.spec, self.arithmetic)
        self.formats = dict(self.options.formats)

    def _state(self, shape: Shape, slots: int, device: Any) -> TritonState:
        if torch.device(device).type != "cuda" and not INTERPRETED:
            raise ConfigError(f"device: {device}: Triton kernels need a GPU, or TRITON_INTERPRET=1")
        return TritonState(shape, self.ring, slots, self.records, device, self.formats)

    def on(self, ring: RingSpec) -> Triton:
        """The same design on another ring."""
        return Triton(self.spec, ring, self.arithmetic, exp=self.exp)

    def inputs(self, windows: Windows) -> list[tuple[Tensor, ...]]:
        """q, k, v in the activation format, g and beta in fp32, lengths, of every step."""

        def compute() -> list[tuple[Tensor, ...]]:
            wide = [x.to(torch.bfloat16) for x in (windows.q, windows.k, windows.v)]
            exact = all(
                torch.equal(x.double(), y) for x, y in zip(wide, (windows.q, windows.k, windows.v), strict=True)
            )
            # an input that is no bf16 number is handed over in fp32
            q, k, v = (
                x.contiguous() if exact else y.float().contiguous()
                for x, y in zip(wide, (windows.q, windows.k, windows.v), strict=True)
            )
            lengths = torch.from_numpy(windows.lengths).to(torch.int32).to(q.device)
            return list(zip(q, k, v, windows.g.float(), windows.beta.float(), lengths, strict=True))

        return windows.memo(("triton inputs",), compute)

    def verify(self, state: EmulatedState, step: Step) -> Verified:
        """As Emulated.verify; a flagged slot's fold happens in the same pass, on the device."""
        assert isinstance(state, TritonState)
        state.cursors.verify(step.slots, step.lengths)
        s, o = state.shape, self.options
        if not step.slots:
            nothing = torch.empty(state.slots, s.HV, s.V, 0, dtype=torch.float64, device=state.device)
            return Verified(nothing, nothing)
        if state.slots != step.windows.B or step.windows.g.device != state.checkpoint.device:
            raise RingError(f"step: windows of {step.windows.B} slots on {step.windows.g.device}, "
                            f"a state of {state.slots} on {state.checkpoint.device}")  # fmt: skip
        q, k, v, g, beta, lengths = self.inputs(step.windows)[step.index]
        B, m = state.slots, step.windows.m
        w, base, flag = state.sync()
        out = torch.empty(B, s.HV, m, s.V, dtype=self.formats["output"], device=state.device)
        d = torch.empty(B, s.HV, m, s.V, dtype=torch.float32, device=state.device)
        eps, scale, grid = self.arithmetic.conventions.eps, s.K**-0.5, (triton.cdiv(s.V, BV), B, s.HV)
        BK = width(s.K)
        if self.spec.verify == "tokens":
            state.kept = torch.empty(
                B, m, *state.checkpoint.shape[1:], dtype=state.checkpoint.dtype, device=state.device
            )
            recurrent_verify[grid](
                q, k, v, g, beta, lengths, state.every, out, d, state.checkpoint, state.kept, eps, scale, m, s.H, s.HV,
                s.K, s.V, BK, BV, True, self.exp, num_warps=WARPS,
            )  # fmt: skip
        else:
            replayed = self.spec.fold == "replay"
            if replayed:
                self._replay(state, state.every, torch.where(lengths > 0, w * flag, 0), state.checkpoint, True)
            r, L = state.records, state.spec.length
            none = state.on_device
            rows = min(WINDOW_BV, width(s.V))
            ring_verify[(triton.cdiv(s.V, rows), B, s.HV)](
                q, k, v, g, beta, lengths, state.every, out, d, state.checkpoint, r["k_hat"], r["d"], r["g"],
                r.get("d_lo", none), r.get("v", none), r.get("k", none), r.get("beta", none), w, base, flag,
                eps, scale, m, s.H, s.HV, s.K, s.V, L, BK, rows, max(4, triton.next_power_of_2(m)), width(L), o.key,
                o.dot, o.fold_dot, o.inverse, replayed, o.low, o.read_low, replayed, INTERPRETED, self.exp,
                num_warps=WINDOW_WARPS,
            )  # fmt: skip
        state.version += 1
        state.folded = None
        return Verified(out.double().mT, d.double().mT)

    def commit(self, state: EmulatedState, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """As Emulated.commit."""
        assert isinstance(state, TritonState)
        full = state.cursors.commit(slots, accepted)
        if not slots:
            return
        for slot, n in zip(slots, accepted, strict=True):
            state.tokens[slot] += n
        state.version += 1
        state.folded = None
        s, n = state.shape, len(slots)
        which, counts = (torch.tensor(x, dtype=torch.int32, device=state.device) for x in (list(slots), list(accepted)))
        w, base, flag = state.on_device
        folded, grid = torch.zeros_like(which), (triton.cdiv(n, BLOCK),)
        commits = state.spec.fold_when == "commit"
        moves.advance_cursors[grid](
            which, counts, w, base, flag, folded, n, state.spec.flush_at, state.spec.length, commits, BLOCK
        )
        if self.spec.fold == "snapshot":
            at = torch.zeros(state.slots, dtype=torch.int32, device=state.device)
            at[which.long()] = counts
            assert state.kept is not None
            take_draft[(triton.cdiv(s.V, BV), state.slots, s.HV)](
                state.checkpoint, state.kept, state.every, at, state.kept.shape[1], s.HV, s.K, s.V,
                width(s.K), BV, num_warps=WARPS,
            )  # fmt: skip
            state.kept = None
        elif full:
            self._fold_slots(state, which, folded, state.checkpoint, True)
        if commits:
            moves.absorb[grid](which, folded, w, base, n, state.spec.length, BLOCK)
            state.cursors.absorb(full)
        state.moved()

    def read(self, state: EmulatedState, which: str, slots: Sequence[int]) -> Tensor:
        """As Emulated.read: `kept` by the fold kernel, `served` formed on fp64 carriers from what the device holds."""
        assert isinstance(state, TritonState)
        if which == "kept":
            return super().read(state, which, slots).double()
        return super().read(state.widened(), which, slots)

    def _folded(self, state: EmulatedState, slots: Sequence[int], lengths: Sequence[int], end: Sequence[int]) -> Tensor:
        assert isinstance(state, TritonState)
        state.sync()
        which, counts = (torch.tensor(x, dtype=torch.int32, device=state.device) for x in (list(slots), list(lengths)))
        out = torch.empty(len(slots), *state.checkpoint.shape[1:], dtype=state.checkpoint.dtype, device=state.device)
        self._fold_slots(state, which, counts, out, False)
        return out

    def _fold_slots(self, state: TritonState, slots: Tensor, lengths: Tensor, out: Tensor, in_place: bool) -> None:
        if self.spec.fold == "replay":
            self._replay(state, slots, lengths, out, in_place)
            return
        s, r, L, o = state.shape, state.records, state.spec.length, self.options
        fold_product[(triton.cdiv(s.V, BV), len(slots), s.HV)](
            state.checkpoint, r["k_hat"], r["d"], r["g"], r.get("d_lo", state.on_device), slots, lengths,
            state.on_device[1], out, s.H, s.HV, s.K, s.V, L, width(s.K), BV, width(L), o.fold_dot,
            o.low, in_place, INTERPRETED, self.exp, num_warps=WARPS,
        )  # fmt: skip

    def _replay(self, state: TritonState, slots: Tensor, lengths: Tensor, out: Tensor, in_place: bool) -> None:
        s, r = state.shape, state.records
        fold_replay[(triton.cdiv(s.V, BV), len(slots), s.HV)](
            state.checkpoint, r["k"], r["v"], r["g"], r["beta"], slots, lengths, state.on_device[1], out,
            self.arithmetic.conventions.eps, s.H, s.HV, s.K, s.V, state.spec.length, width(s.K), BV,
            in_place, self.exp, num_warps=WARPS,
        )  # fmt: skip


def width(n: int) -> int:
    """A power of two that holds n and may be the inner dimension of a product."""
    return max(16, triton.next_power_of_2(n))
