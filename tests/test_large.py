"""States and drafts of more than 2^31 numbers: a product of sizes in 32 bits wraps, and meets another slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import bf16, draw, start, windows

from harness.config import RingConfig
from harness.tokens import Shape
from harness.variants import load
from harness.window import Step

pytest.importorskip("triton")
from test_kernels import DEVICE, made

from harness.kernels.design import Triton, TritonState

# what is large is the checkpoint, or the drafts of windows of `m`: in the interpreter few programs of large tiles, on a
# GPU the tiles of a layer
if DEVICE == "cpu":
    WIDE, LONG = (Shape(1, 4, 1024, 1024), RingConfig(16, 4), 1, 4), (Shape(1, 1, 256, 512), RingConfig(64, 16), 16, 1)
else:
    WIDE = Shape(16, 32, 128, 128), RingConfig(16, 4), 1, 4
    LONG = (WIDE[0], RingConfig(16, 4), 4, 4)
CASES = {"chunked_tf32": WIDE, "exact_fold": WIDE, "exact_recurrent": LONG}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_last_slot_of_a_large_state_is_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an offset of a state, a draft or a record in 32 bits (fla#1080, state-spaces/mamba#1015)."""
    # memory that nobody touches takes no room
    monkeypatch.setattr(
        TritonState, "_poison", lambda self, dtype, *size: torch.empty(size, dtype=dtype, device=DEVICE)
    )
    shape, ring, m, steps = CASES[name]
    of_slot = shape.HV * shape.V * shape.K * (m if name == "exact_recurrent" else 1)
    slots = 2**31 // of_slot + 2
    maker = made(Triton, load(name), ring)
    assert isinstance(maker, Triton)
    rng = np.random.default_rng(0)
    initial = start(rng, 1, shape).to(DEVICE)
    tokens = bf16(draw(rng, steps, 1, m, shape=shape)).map(lambda x: x.to(DEVICE))
    alone = maker.create(shape, 1, initial, device=DEVICE)
    crowd = maker._state(shape, slots, DEVICE)
    assert isinstance(alone, TritonState)
    assert isinstance(crowd, TritonState)
    crowd.seed = list(range(slots))
    maker.reset(crowd, [slots - 1], initial)
    lengths = np.zeros((steps, slots), dtype=int)
    lengths[:, -1] = m
    spread = tokens.map(
        lambda x: torch.cat((x.new_zeros(1, 1, *x.shape[2:]).expand(steps, slots - 1, *x.shape[2:]), x), 1)
    )
    one, many = windows(tokens, lengths[:, -1:], shape), windows(spread, lengths, shape, pad=0.0)
    for i in range(steps):
        seen = []
        for state, ready in ((alone, one), (crowd, many)):
            step = Step(ready, i)
            found = maker.verify(state, step)
            seen.append(found.o[-1])
            maker.commit(state, step.slots, [m])
        assert torch.equal(*seen), f"step {i}"
    assert crowd.checkpoint.numel() * (m if name == "exact_recurrent" else 1) > 2**31
    assert torch.equal(crowd.checkpoint[-1], alone.checkpoint[-1])
    for field, rows in alone.records.items():
        # behind the records written so far may stand anything
        assert torch.equal(crowd.records[field][-1, :, : m * steps], rows[-1, :, : m * steps]), field
