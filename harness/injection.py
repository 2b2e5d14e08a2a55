"""||delta_n|| / ||delta_0||: what is left of a perturbation after n flushes, of every design beside exact arithmetic.

One sequence is decoded several times side by side, as slots of one state: untouched, with the checkpoint perturbed, and
with one record of the ring perturbed, all at the same committed token. delta is the difference of the kept states (the
checkpoint if the slot folded now). In exact arithmetic it is multiplied by e^g (I - beta k k') a token, so the gain is
at most e^G, G the log decays since. A fold that does not contract would keep the gain near 1, or raise it. Once delta
is as small as what roundings put between two equal decodes it says no more; `left`, ||delta_n|| / ||S||, tells.

Records are perturbed where a fold or a verify reads them: d, or for a replay also the raw v. A d that a replay forms
anew never reaches its checkpoint; its gain is then told against the served state at the injection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.config import AcceptanceConfig, Config, PrecisionConfig
from harness.decode import Stream
from harness.designs import designs as emulated
from harness.designs import engine_of
from harness.metrics import norms
from harness.reference.calls import by_calls
from harness.reference.emulated import Emulated
from harness.reference.state import EmulatedState
from harness.ring import RingSpec
from harness.schedule import Block, Schedule
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec

WARM = 512  # tokens before: what the heads of middle memory hold is then theirs and not the initial state's
# the same in every slot, whoever flushes; rejected drafts among them
ACCEPTS = [2, 4, 1, 3]
EXACT = PrecisionConfig(name="exact", base="exact")


class Several:
    """A stream of one slot as several equal ones."""

    def __init__(self, stream: Stream, slots: int):
        self.stream, self.slots, self.device = stream, slots, stream.device

    def tokens(self, start: Tensor, count: int) -> Tokens:
        """As Stream.tokens."""
        return self.stream.tokens(start[:1], count).map(lambda x: x.expand(self.slots, *x.shape[1:]))

    def junk(self, slot: Tensor, t: Tensor, lane: Tensor) -> Tokens:
        """As Stream.junk."""
        return self.stream.junk(torch.zeros_like(slot), t, lane)


@dataclass
class Twins:
    """A design's slots 0, untouched, and 1.., perturbed, and what has become of the differences."""

    design: Emulated
    state: EmulatedState
    fields: list[str]  # what is perturbed in slot 1, 2, ..: checkpoint, d, v
    first: Tensor | None = None  # [fields, HV] size of the difference at the injection
    found: list[Tensor] | None = None  # per grid point behind it, the same
    size: list[Tensor] = field(default_factory=list)  # [1, HV] norm of the untouched state there

    def inject(self, size: float) -> None:
        """Perturb by `size` in rms of each value, as the design stores it."""
        draw, sites, state = torch.Generator().manual_seed(1), self.design.arithmetic.sites, self.state
        for slot, name in enumerate(self.fields, 1):
            if name == "checkpoint":
                value, rounding = state.checkpoint[slot], sites.checkpoint
            else:
                value = state.records[name][slot, :, state.cursors.cache_base[slot]]
                rounding = getattr(sites, f"store_{name}")
            rms = value.square().mean((-1, -2) if value.ndim == 3 else -1, keepdim=True).sqrt()
            noise = torch.randn(value.shape, dtype=value.dtype, generator=draw)
            value.copy_(rounding(value + size * rms * noise))
        state.version += 1
        state.operand = state.folded = None
        kept = self.differences("kept")
        self.first, self.found = torch.where(kept > 0, kept, self.differences("served")), []

    def gain(self) -> Tensor:
        """[points, fields, HV] since the injection."""
        assert self.found and self.first is not None
        return torch.stack(self.found) / self.first

    def differences(self, which: str) -> Tensor:
        """||difference to slot 0||_F, [fields, HV]."""
        S = self.design.read(self.state, which, range(1 + len(self.fields)))
        return norms(S[1:] - S[:1])[0]


def designs(config: Config) -> list[Emulated]:
    """The variants of the run, emulated on the CPU. Raises ConfigError where they do not go together."""
    return emulated(replace(config, backend="emulated"))


def gains(config: Config) -> Iterator[dict[str, Any]]:
    """One row per (variant, what is perturbed, value head, flush since)."""
    shape = Shape.of(config.model)
    decode = replace(config.decode, slots=1, tokens=WARM + config.operator.tokens, prefill=0)
    stream = Stream(decode, shape)
    initial = stream.initial_state()
    for own in designs(config):
        spec, a = own.spec, own.spec.arithmetic(EXACT)
        exact = engine_of(config, spec, a, "cpu")(spec, own.ring, a)
        mine, theirs = (started(d, shape, initial) for d in (own, exact))
        run(theirs, config, decode, stream)
        tokens = run(mine, config, decode, stream)
        yield from rows(spec.name, mine, theirs, tokens, log_decays(stream, tokens))


def started(design: Emulated, shape: Shape, initial: Tensor) -> Twins:
    """Slots for every field that a perturbation of the design may sit in."""
    fields = ["checkpoint", *(x for x in ("d", "v") if x in design.records and holds_history(design.spec, design.ring))]
    slots = 1 + len(fields)
    return Twins(design, design.create(shape, slots, initial.expand(slots, -1, -1, -1).clone()), fields)


def holds_history(spec: VariantSpec, ring: RingSpec) -> bool:
    """Whether records outlive the commit of their window."""
    return spec.fold != "snapshot" and (ring.flush_at != 1 or ring.fold_when == "next")


def run(twins: Twins, config: Config, decode: Any, stream: Stream) -> list[int]:
    """Decode, inject at the first step behind WARM tokens with records in the ring; tokens at all points since."""
    slots = twins.state.slots
    ring = RingSpec.of(config.ring)
    # counts go by steps, so that every slot accepts alike
    accepts = AcceptanceConfig("fixed", sequence=[min(n, decode.window) for n in ACCEPTS])
    schedule = Schedule(replace(decode, slots=slots), accepts, ring, 0, decode.tokens)
    tokens: list[int] = []
    same = Several(stream, slots)
    for block in schedule.blocks(64):

        def look(i: int, block: Block = block) -> None:
            point = block.points[i, 0] >= 0
            if twins.found is not None and point:
                twins.found.append(twins.differences("kept"))
                twins.size.append(norms(twins.design.read(twins.state, "kept", [0]))[0])
                tokens.append(twins.state.tokens[0])
            elif twins.found is None and not point and block.t[i, 0] >= WARM:
                if twins.design.ring.flush_at == 1 or twins.state.cursors.write_pos[0]:
                    twins.inject(config.operator.perturbation)
                    tokens.append(twins.state.tokens[0])

        by_calls(twins.design, twins.state, block.windows(same, twins.state.shape), block, look)  # type: ignore[arg-type]
    return tokens


def log_decays(stream: Stream, tokens: list[int]) -> Tensor:
    """Sum of g from the injection, tokens[0], to every point behind it, [points, HV]."""
    g = stream.tokens(torch.tensor([tokens[0]]), tokens[-1] - tokens[0]).g[0]
    return g.cumsum(0)[[t - tokens[0] - 1 for t in tokens[1:]]]


def rows(name: str, own: Twins, exact: Twins, tokens: list[int], bound: Tensor) -> Iterator[dict[str, Any]]:
    """Gains of one design."""
    mine, theirs = own.gain(), exact.gain()
    left = torch.stack(own.found or []) / torch.stack(own.size)
    for f, what in enumerate(own.fields):
        for p, h in torch.cartesian_prod(torch.arange(len(mine)), torch.arange(mine.shape[-1])).tolist():
            yield {
                "variant": name,
                "what": what,
                "head": h,
                "flush": p + 1,
                "tokens": tokens[p + 1] - tokens[0],
                "gain": mine[p, f, h].item(),
                "exact": theirs[p, f, h].item(),
                "left": left[p, f, h].item(),
                "bound": bound[p, h].exp().item(),
            }
