"""sglang's GDN kernels: ring verify, flush step and commit of ReplaySSM, and the recurrent verify with snapshots.

Loaded file by file from an installed sglang, or from a folder that holds the same paths; nothing else of sglang is
imported, so that none of its dependencies is needed. What the files ask of it at load, which device this is, is
answered here.

Source: sgl-project/sglang 0.5.23, sglang/kernels/ops/attention/linear: gdn_replayssm_spec_decode.py,
fused_sigmoid_gating_recurrent.py. Its rings keep d and k_hat in the activation format, in one of two modes: raw
(beside them raw v, k and beta, for a serial fold) and compact (their low halves, for a compensated open-loop fold).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.errors import HarnessError
from harness.peers.seat import Bound, Seat
from harness.plugins import import_file

NAME = "sglang"
FOLDER = Path("sglang/kernels/ops/attention/linear")
SPEC, RECURRENT = "gdn_replayssm_spec_decode", "fused_sigmoid_gating_recurrent"
MODES = ("raw", "compact")


@dataclass(frozen=True)
class Kernels:
    """sglang's own functions."""

    version: str | None
    decode: Callable[..., Any]  # verify and flush of a ring
    advance: Callable[..., Any]  # cursors of a commit
    commit: Callable[..., Any]  # compensated fold of flagged slots
    recurrent: Callable[..., Any]


def _root(folder: str | None) -> Path:
    if folder is not None:
        return Path(folder)
    # the top package alone: what is beside the kernels is not imported
    spec = importlib.util.find_spec(NAME)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise HarnessError(
            f"{NAME}: not installed; pip install --no-deps sglang==0.5.23, or name a folder: bench.sglang"
        )
    return Path(places[0]).parent


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@contextmanager
def _answers() -> Iterator[None]:
    """The modules that the kernel files import from, holding the few names they use, for as long as they load."""
    major, minor = _capability()
    told: dict[str, dict[str, Any]] = {
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": major >= 8 or not major},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: major >= 9},
        "sglang.srt.utils": {
            "is_cuda": torch.cuda.is_available,
            "is_hip": lambda: False,
            "is_gfx95_supported": lambda: False,
            "is_sm90_supported": lambda: major == 9,
            "get_device_sm": lambda: 10 * major + minor,
        },
    }
    before = {name: sys.modules.get(name) for name in told}
    for name, values in told.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def _module(root: Path, name: str) -> ModuleType:
    path = root / FOLDER / f"{name}.py"
    if not path.is_file():
        raise HarnessError(f"{NAME}: no {FOLDER / name}.py under {root}")
    return import_file(path)


def load(folder: str | None = None) -> Kernels:
    """sglang's functions from `folder`, or from the installed package. Raises HarnessError naming what is missing."""
    root = _root(folder)
    try:
        with _answers():
            spec, recurrent = _module(root, SPEC), _module(root, RECURRENT)
        return Kernels(
            version(root),
            spec.gdn_replayssm_spec_decode,
            spec.commit_gdn_replayssm_spec,
            spec.commit_gdn_replayssm_circular,
            recurrent.fused_sigmoid_gating_delta_rule_update,
        )
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"{NAME} {version(root)}: {error}") from error


def version(root: Path) -> str | None:
    """The version whose kernels lie under root."""
    found = next(iter(metadata.distributions(name=NAME, path=[str(root)])), None)
    return found.version if found else None


def rings(seat: Seat, mode: str) -> dict[str, Tensor | None]:
    """Its three rings of side records: raw v, k and beta; or the low halves of d and k_hat, zero for what is there."""
    r = seat.records
    if mode == "raw":
        return {"rawv_cache": r["v"], "rawk_cache": r["k"], "beta_cache": r["beta"]}
    low = {"rawv_cache": torch.zeros_like(r["d"]), "rawk_cache": torch.zeros_like(r["k_hat"])}
    return low | {"beta_cache": None}


def ring(kernels: Kernels, seat: Seat, mode: str, launch: str, precision: str = "tf32") -> Bound:
    """A window on the seat's checkpoint and rings. launch: verify, of the unflagged slots; flush, of the rest.

    A flush folds the history by serial replay and needs mode raw.
    """
    out = torch.zeros_like(seat.v)
    side, r = rings(seat, mode), seat.records
    w, base, flag = seat.cursors[0], seat.cursors[1], seat.cursors[2].to(torch.int8)

    def run() -> None:
        kernels.decode(
            seat.q, seat.k, seat.v, seat.a, seat.b, seat.A_log, seat.dt_bias, seat.checkpoint, r["d"], r["k_hat"],
            r["g"], out=out, query_start_loc=seat.starts, ssm_state_indices=seat.slots, replay_indices=seat.slots,
            write_pos=w, cache_base=base, is_flush=flag, max_cache_len=r["d"].shape[2], max_spec_len=seat.m,
            null_block_id=-1, launch_mode=launch, dot_precision=precision, **side,
        )  # fmt: skip

    tensors = {"checkpoint": seat.checkpoint, "d": r["d"], "k_hat": r["k_hat"], "g": r["g"]}
    return Bound(run, lambda: out, tensors | {name: x for name, x in side.items() if x is not None})


def step(
    kernels: Kernels, seat: Seat, accepts: list[Tensor]
) -> tuple[list[Callable[[], None]], Callable[[], None], Bound]:
    """Verify and commit in mode compact, one call per tensor of accepts [B] int32; what puts the cursors back; buffers.

    Its serving folds all layers in one launch, this one layer; a flagged slot is folded by the commit that flags it.
    """
    cursors = seat.cursors.clone()
    flag = torch.zeros_like(seat.slots, dtype=torch.int8)
    side, r, out = rings(seat, "compact"), seat.records, torch.zeros_like(seat.v)
    w, base, L = cursors[0], cursors[1], r["d"].shape[2]
    low = {"d_residual_cache": side["rawv_cache"], "k_residual_cache": side["rawk_cache"]}
    layers = {"checkpoint_state": seat.checkpoint, "d_cache": r["d"], "k_cache": r["k_hat"], "g_cache": r["g"]} | low
    one = {name: x[None] for name, x in layers.items() if x is not None}

    def once(n: Tensor) -> None:
        kernels.decode(
            seat.q, seat.k, seat.v, seat.a, seat.b, seat.A_log, seat.dt_bias, seat.checkpoint, r["d"], r["k_hat"],
            r["g"], out=out, query_start_loc=seat.starts, ssm_state_indices=seat.slots, replay_indices=seat.slots,
            write_pos=w, cache_base=base, is_flush=flag, max_cache_len=L, max_spec_len=seat.m,
            null_block_id=-1, launch_mode="verify", dot_precision="tf32", **side,
        )  # fmt: skip
        kernels.advance(w, base, flag, n, seat.slots, L, seat.m, null_block_id=-1)
        kernels.commit(
            **one, state_batch_indices=seat.slots, replay_indices=seat.slots, write_pos=w, cache_base=base,
            is_flush=flag, accept_lens=n, null_block_id=-1,
        )  # fmt: skip

    def back() -> None:
        cursors.copy_(seat.cursors)
        flag.zero_()

    calls: list[Callable[[], None]] = [partial(once, n) for n in accepts]
    tensors = {name: x for name, x in layers.items() if x is not None}
    return calls, back, Bound(calls[0], lambda: out, tensors)


def snapshots(kernels: Kernels, seat: Seat) -> Bound:
    """Token by token from the seat's checkpoint, the state after every draft kept; the checkpoint stays."""
    kept = torch.empty(len(seat.slots), seat.m, *seat.checkpoint.shape[1:], device=seat.checkpoint.device)
    found: list[Tensor] = []

    def run() -> None:
        found[:] = [
            kernels.recurrent(
                A_log=seat.A_log, a=seat.a, dt_bias=seat.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
                q=seat.q[None], k=seat.k[None], v=seat.v[None], b=seat.b, initial_state_source=seat.checkpoint,
                initial_state_indices=seat.slots, use_qk_l2norm_in_kernel=True, cu_seqlens=seat.starts,
                disable_state_update=True, intermediate_states_buffer=kept, intermediate_state_indices=seat.slots,
                cache_steps=seat.m,
            )
        ]  # fmt: skip

    return Bound(run, lambda: found[0].squeeze(0), {"checkpoint": seat.checkpoint, "drafts": kept})
