"""What the tests of the designs share: random tokens, the recurrence as a plain loop, a design run beside it.

`recurrence` is written from the formulas alone, in NumPy, and calls nothing of the package. `Beside` asserts after
every step of a design that outputs, writes, served and kept state are those of the loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.arithmetic import Conventions
from harness.compiled.codes import unsupported
from harness.compiled.design import Compiled
from harness.config import PrecisionConfig, RingConfig
from harness.reference.emulated import Emulated
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec, load
from harness.window import Step, Windows

SHAPE = Shape(2, 6, 40, 24)  # no two sizes equal: a transposed state or a skipped head shows
EXACT = PrecisionConfig(name="exact", base="exact")
TOL = 1e-12  # fp64 identities: some hundred operations of 1.1e-16 on numbers of size 1 to 10, with room
RESETS = (-160.0, -np.inf)
Gates = tuple[float, ...]
TABLE = tuple[Tokens, np.ndarray]  # tokens [W, B, m, ...] and lengths [W, B]
MAKERS: dict[str, type[Emulated]] = {"torch": Emulated, "compiled": Compiled}
_engine = "torch"


@pytest.fixture(params=MAKERS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test once per engine: `design` makes what the engine can run, and the readable design otherwise."""
    monkeypatch.setitem(globals(), "_engine", request.param)
    return str(request.param)


def draw(rng: np.random.Generator, *lead: int, shape: Shape = SHAPE, resets: Gates = ()) -> Tokens:
    """Random tokens with leading axes `lead`: all magnitudes of g, beta in [0, 1.6], one token in ten a reset."""
    g = -(10.0 ** rng.uniform(-6, 0.5, (*lead, shape.HV)))
    if resets:
        g = np.where(rng.random(g.shape) < 0.1, rng.choice(resets, g.shape), g)
    q, k = rng.standard_normal((2, *lead, shape.H, shape.K))
    v, beta = rng.standard_normal((*lead, shape.HV, shape.V)), rng.uniform(0, 1.6, g.shape)
    return Tokens(*(torch.from_numpy(x) for x in (q, k, v, g, beta)))


def bf16(tokens: Tokens) -> Tokens:
    """q, k, v as the activation format holds them."""
    q, k, v = (x.to(torch.bfloat16).to(torch.float64) for x in (tokens.q, tokens.k, tokens.v))
    return replace(tokens, q=q, k=k, v=v)


def start(rng: np.random.Generator, slots: int, shape: Shape = SHAPE) -> torch.Tensor:
    """Nonzero initial states [slots, HV, V, K] holding fp32 numbers."""
    S = rng.standard_normal((slots, shape.HV, shape.V, shape.K)).astype(np.float32)
    return torch.from_numpy(S).to(torch.float64)


def unit(x: np.ndarray, c: Conventions) -> np.ndarray:
    """x over its norm, with eps where `c` says."""
    square = (x * x).sum(-1, keepdims=True)
    if c.eps_at == "outside":
        return x / (np.sqrt(square) + c.eps)
    return x / np.sqrt(square + {"sum": 1, "mean": x.shape[-1]}[c.eps_at] * c.eps)


def recurrence(S: Any, tokens: Tokens, c: Conventions | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S <- e^g S; d = beta (v - S k_hat); S <- S + d k_hat'; o = S q_hat, token by token.

    S [HV, V, K]; tokens [T, ...]. Returns every state [T+1, HV, V, K] and o, d [T, HV, V].
    """
    c = c or Conventions()
    q, k, v, g = (np.asarray(getattr(tokens, name)) for name in ("q", "k", "v", "g"))
    beta = np.asarray(c.beta(tokens.beta))
    states, outputs, writes = [np.asarray(S)], [], []
    HV, _, K = states[0].shape
    key_head = np.arange(HV) // (HV // k.shape[1])
    for t in range(len(g)):
        k_hat, q_hat = unit(k[t], c)[key_head], (unit(q[t], c) / np.sqrt(K))[key_head]
        decayed = np.exp(g[t])[:, None, None] * states[-1]
        seen = {"before": decayed, "after": states[-1]}[c.decay]
        d = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", seen, k_hat))
        states.append(decayed + d[:, :, None] * k_hat[:, None, :])
        outputs.append(np.einsum("hvk,hk->hv", states[-1], q_hat))
        writes.append(d)
    return np.stack(states), np.stack(outputs), np.stack(writes)


def close(what: str, x: Any, y: Any, tolerance: float = TOL) -> None:
    """Assert |x - y| <= tolerance max(1, max|y|); NaN in either fails."""
    x, y = np.asarray(x), np.asarray(y)
    assert x.shape == y.shape, f"{what}: {x.shape} against {y.shape}"
    error = np.abs(x - y).max(initial=0.0) / max(1.0, np.abs(y).max(initial=0.0))
    assert error <= tolerance, f"{what}: off by {error:.2e}"


def design(
    spec: VariantSpec | str, ring: RingConfig | None = None, precision: PrecisionConfig | None = EXACT
) -> Emulated:
    """A design by name or declaration. A design that decodes one token a step gets a ring of max_window 1."""
    spec = load(spec) if isinstance(spec, str) else spec
    ring = ring or RingConfig()
    ring = replace(ring, max_window=1, flush_at=None) if spec.fold_current else ring
    arithmetic = spec.arithmetic(precision)
    maker = Emulated if unsupported(spec, arithmetic) else MAKERS[_engine]
    return maker(spec, spec.ring(ring), arithmetic)


def windows(tokens: Tokens, lengths: Any, shape: Shape = SHAPE, pad: float = float("nan")) -> Windows:
    """Windows of tokens [W, B, m, ...], with `pad` in every lane behind a window's length."""
    lengths = np.asarray(lengths)
    padded = torch.from_numpy(np.arange(tokens.g.shape[2]) >= lengths[..., None]).to(tokens.g.device)
    tokens = tokens.map(lambda x: x.masked_fill(padded.view(*padded.shape, *(1,) * (x.ndim - 3)), pad))
    return Windows(tokens, lengths, shape)


class Beside:
    """A design and the loop, step by step on the same tokens. truth[b]: the last states of slot b, newest last."""

    def __init__(
        self, maker: Emulated, initial: torch.Tensor, shape: Shape = SHAPE, tolerance: float = TOL, judge: Any = None
    ):
        self.design, self.tolerance = maker, tolerance
        self.conventions = judge or maker.arithmetic.conventions
        self.state = maker.create(shape, len(initial), initial)
        self.truth: list[list[np.ndarray] | None] = [[S.numpy()] for S in initial]

    def step(self, table: TABLE, ready: Windows, i: int, accepted: dict[int, int], late: bool = False) -> None:
        """Step i of the windows `ready`, made of `table`: verify, commit accepted[slot], compare.

        late: the result is looked at after the commit, when it holds accepted lanes only.
        """
        step = Step(ready, i)
        result = self.design.verify(self.state, step)
        counts = [accepted[slot] for slot in step.slots]
        late = late and any(counts)
        o, d = (None, None) if late else (result.o, result.d)
        self.design.commit(self.state, step.slots, counts)
        o, d = (result.o, result.d) if late else (o, d)
        for slot, m, n in zip(step.slots, step.lengths, counts, strict=True):
            past = self.truth[slot]
            if past is None:
                continue
            lanes = n if late else m
            mine = table[0].map(lambda x, slot=slot, m=m: x[i, slot, :m])
            states, outputs, writes = recurrence(past[-1], mine, self.conventions)
            close(f"o of slot {slot}", o[slot, :, :, :lanes].permute(2, 0, 1), outputs[:lanes], self.tolerance)
            if d is not None:
                close(f"d of slot {slot}", d[slot, :, :, :lanes].permute(2, 0, 1), writes[:lanes], self.tolerance)
            self.truth[slot] = (past + list(states[1 : n + 1]))[-self.design.ring.length - 1 :]
        self.compare()

    def compare(self) -> None:
        """Served and kept state of every slot that is followed."""
        truth = {slot: past[-1] for slot, past in enumerate(self.truth) if past}
        for which in ("served", "kept") if truth else ():
            read = self.design.read(self.state, which, list(truth))
            close(which, read, np.stack(list(truth.values())), self.tolerance)

    def poison(self, value: float) -> None:
        """`value` in every ring row outside the histories."""
        cursors, L = self.state.cursors, self.design.ring.length
        for slot in range(self.state.slots):
            used = [(cursors.cache_base[slot] + j) & (L - 1) for j in range(cursors.write_pos[slot])]
            free = [row for row in range(L) if row not in used]
            for rows in self.state.records.values():
                rows[slot, :, free] = value


def decode(
    maker: Emulated, initial: Any, ready: Windows, accepted: Any, seed: int = 0, also: Any = None, state: Any = None
) -> list[list[torch.Tensor]]:
    """Run every step of `ready` with accepted [W, B]. Per slot, for each of its steps: outputs of the accepted lanes,
    then served and kept state. also(state, step number) is called between steps; state: one there is already."""
    state = state or maker.create(ready.shape, len(initial), initial, seed=seed)
    found: list[list[torch.Tensor]] = [[] for _ in initial]
    for i in range(len(accepted)):
        step = Step(ready, i)
        result = maker.verify(state, step)
        counts = accepted[i][step.slots].tolist()
        maker.commit(state, step.slots, counts)
        states = [maker.read(state, which, step.slots) for which in ("served", "kept")]
        for j, (slot, n) in enumerate(zip(step.slots, counts, strict=True)):
            found[slot] += [result.o[slot, :, :, :n].clone(), *(x[j].clone() for x in states)]
        if also:
            also(state, i)
    return found


def same(x: list[list[torch.Tensor]], y: list[list[torch.Tensor]]) -> bool:
    """Whether two traces agree in every bit; NaN agrees with nothing."""
    return [len(a) for a in x] == [len(a) for a in y] and all(
        torch.equal(a, b) for one, other in zip(x, y, strict=True) for a, b in zip(one, other, strict=True)
    )


def fuzz(maker: Emulated, seed: int, steps: int = 40, slots: int = 3, resets: Gates = RESETS, **how: Any) -> None:
    """Random steps of `maker` beside the loop: ragged and idle windows, aborts, poisoned reuse, copies, snapshots.

    how: shape, and judge, the conventions of the loop where they are not the design's own, as in Beside.
    """
    shape = how.get("shape", SHAPE)
    rng = np.random.default_rng(seed)
    m = maker.ring.max_window
    lengths = rng.integers(0, m + 1, (steps, slots))
    lengths[rng.random((steps, slots)) < 0.3] = m
    lengths[lengths.sum(1) == 0, 0] = 1
    table = draw(rng, steps, slots, m, shape=shape, resets=resets), lengths
    ready = windows(*table, shape=shape)
    pair = Beside(maker, start(rng, slots, shape), **how)
    for i in range(steps):
        accepted = {b: int(rng.integers(1, n + 1)) for b, n in enumerate(lengths[i]) if n}
        if rng.random() < 0.1 and not maker.spec.fold_current:
            accepted[next(iter(accepted))] = 0
        pair.poison(rng.choice([np.nan, 1e30]))
        pair.step(table, ready, i, accepted, late=bool(rng.random() < 0.3))
        between(pair, rng, start(rng, 1, shape)[0])
        pair.compare()


def between(pair: Beside, rng: np.random.Generator, S: torch.Tensor) -> None:
    """Now and then what an engine does between steps: hand a slot on, copy it, snapshot a prefix, force a fold."""
    cursors, slots = pair.state.cursors, pair.state.slots
    a, b = (int(x) for x in rng.choice(slots, 2, replace=False)) if slots > 1 else (0, 0)
    kind = rng.choice(["reset", "foul", "copy", "snapshot", "force", ""], p=[0.1, 0.08, 0.08, 0.12, 0.07, 0.55])
    if kind == "reset" or pair.truth[a] is None:
        pair.design.reset(pair.state, [a], S[None])
        pair.truth[a] = [S.numpy()]
    elif kind == "foul":
        # a tenant that nothing is asked of, and whose traces nobody may find
        pair.design.reset(pair.state, [a], torch.full_like(S[None], rng.choice([np.nan, 1e30])))
        pair.truth[a] = None
    elif kind == "force":
        cursors.force_flush([a])
    elif kind == "copy" and a != b:
        pair.design.copy(pair.state, a, b, ring=True)
        pair.truth[b] = list(pair.truth[a])
    elif kind == "snapshot" and a != b:
        w = cursors.write_pos[a]
        prefix = int(rng.integers(0, w + 1))
        pair.design.snapshot(pair.state, a, b, prefix)
        past = pair.truth[a]
        pair.truth[b] = past[: len(past) - (w - prefix)]
