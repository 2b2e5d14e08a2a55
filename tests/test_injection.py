"""Perturbations and folds: gains contract as the recurrence does, constants are those of an fp32 loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from harness import fold_constants, injection
from harness.arithmetic import Arithmetic
from harness.config import Config, ModelConfig
from harness.metrics import norms
from harness.operator_config import OperatorConfig
from harness.reference import fold

F64 = torch.float64


def followed(monkeypatch: pytest.MonkeyPatch, *variants: str, perturbation: float = 0.25, **keys: Any) -> pd.DataFrame:
    monkeypatch.setattr(injection, "WARM", 64)
    operator = OperatorConfig(tokens=256, perturbation=perturbation)
    model = ModelConfig(key_heads=2, value_heads=6, key_dim=24, value_dim=16, rows=None)
    config = Config(operator=operator, model=model, variants=list(variants), **keys)
    with torch.inference_mode():
        return pd.DataFrame(injection.gains(config))


ARMS = ("exact_recurrent", "chunked_fp32", "exact_fold", "compensated_fold")


def test_without_a_perturbation_twins_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: slots that see other tokens, accept otherwise or flush elsewhere, whose difference is no gain."""
    rows = followed(monkeypatch, *ARMS, perturbation=0.0)
    # 0 / 0: nothing injected, and nothing there
    assert len(rows) and rows["gain"].isna().all() and (rows["left"] == 0).all()


def test_a_perturbation_contracts_as_the_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a gain told against another injection, e^G of other tokens; a record that is never read."""
    rows = followed(monkeypatch, *ARMS)
    assert set(rows["what"]) == {"checkpoint", "d", "v"}
    # a head that has forgotten the record before the injection shows rounding alone
    inside = rows[(rows["bound"] > 1e-3) & (rows["exact"] > 0)]
    # 60 tokens of fp64 roundings
    assert (inside["exact"] <= inside["bound"] * (1 + 1e-9)).all()
    # what two decodes differ by in the end, of the state: a rounding u a flush; compensated_fold reads in tf32
    u = np.where(inside["variant"] == "compensated_fold", 2.0**-10, 2.0**-24)
    apart = (inside["gain"] - inside["exact"]).abs() / inside["gain"] * inside["left"]
    assert len(inside) and (apart <= inside["flush"].max() * u).all()


def test_a_fold_without_decay_shows_as_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault of the check: a checkpoint that does not contract and passes."""
    real = fold.record_decays

    def undecayed(*args: Any) -> tuple[Tensor, Tensor]:
        W, total = real(*args)
        return W, torch.ones_like(total)

    monkeypatch.setattr(fold, "record_decays", undecayed)
    rows = followed(monkeypatch, "chunked_fp32", engine="torch")
    last = rows[(rows["flush"] == rows["flush"].max()) & (rows["what"] == "checkpoint")]
    assert (last["exact"] > last["bound"]).any()


def test_a_replay_forgets_a_wrong_d(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: d perturbed in a copy, or read by a fold that ought to form its own."""
    rows = followed(monkeypatch, "exact_fold")
    # below a roundoff of the state two decodes may have met
    by = {what: part["gain"] for what, part in rows[rows["bound"] > 2.0**-24].groupby("what")}
    # where a head remembers nothing there is no v to forget
    assert (by["d"] == 0).all() and (by["v"].dropna() > 0).all() and (by["v"] > 0.5).any()


def test_the_chain_is_an_fp32_loop() -> None:
    """Faults: sums rounded once where a loop rounds each, an exact fold of other records to compare with."""
    rng = np.random.default_rng(0)
    w, H, V, K = 9, 2, 5, 7
    C, k, v = (
        torch.from_numpy(rng.standard_normal(s).astype(np.float32)).double()
        for s in ((1, H, V, K), (1, H, w, K), (1, H, w, V))
    )
    g, beta = torch.full((1, H, w), -0.0078125, dtype=F64), torch.full((1, H, w), 0.9375, dtype=F64)
    found = fold_constants.folds(C, k, v, g, beta)
    a = Arithmetic()
    k_hat = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    S, writes = C, []
    for t in range(w):
        S = S * np.exp(-0.0078125)
        writes.append(0.9375 * (v[:, :, t] - torch.einsum("bhvk,bhk->bhv", S, k_hat[:, :, t])))
        S = S + torch.einsum("bhv,bhk->bhvk", writes[-1], k_hat[:, :, t])
    d, keys, g32 = torch.stack(writes, 2).float(), k_hat.float(), g.float()
    exact = fold.product(C, d.double(), keys.double(), *fold.record_decays(g32.double(), None, a), a)
    G = torch.cumsum(g32.double(), -1).float()
    W = (G[..., -1:] - G).double().exp().float()
    low = C.float() * G[..., -1].double().exp().float()[..., None, None]
    for j in range(w):
        # the product is exact in fp64 and enters the sum as it is: a fused multiply-add
        write = (d[:, :, j] * W[..., j, None])[..., None].double() * keys[:, :, j, None, :].double()
        low = (low.double() + write).float()
    want = norms(low.double() - exact)[0] / norms(exact)[0] * 2.0**24
    # the last bit of a sum of squares
    np.testing.assert_allclose(found["chain"], want[0], rtol=1e-9)


def test_no_fold_exceeds_its_bound() -> None:
    """Fault: a constant in other units. (w + 2) s is Higham's; a replay has no such bound and is several sqrt(w)."""
    rows = pd.DataFrame(fold_constants.constants(Config(operator=OperatorConfig(rings=[4, 32], cosines=[0.0, 1.0]))))
    for name in ("once", "chain"):
        assert (rows[name] <= (rows["ring"] + 2) * rows["scale"]).all()
        assert (rows[name] > 0.1).all()
    assert (rows["once"] < rows["chain"]).all() and (rows["once"] < rows["replay"]).all()
