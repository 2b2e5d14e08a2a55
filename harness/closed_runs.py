"""E+ = E M + noise: what a window operator M says of one inverse, beside decodes that are run with that inverse.

A point is a window size, a cosine of the keys, beta and g; a run is a decode of one point by one inverse in one
format, on keys of one head. Everything but the inverse is exact, all drafts are accepted and every window is folded
at once, which with exact storage changes nothing but that a flush is a window: the state error of a run is multiplied
by M once a flush. Three numbers are set side by side:

  radius, norm   of M of single windows (harness.conditioning.window_operator), at up to LOOKS windows of a run
  joint          mean growth of log ||x M_1 M_2 ...||, a row x through every window: windows differ, so this, and not
                 the radius of one of them, is the rate of the product (its largest Lyapunov exponent)
  growth         of log ||S_hat - S|| / ||S|| in the decode itself, per window

Both rates are least-squares slopes over the second half of a run, or of what comes before OVERFLOW. A run has diverged
if it is not finite in the end, or its slope makes FACTOR of that half: neither a random walk (1.4) nor a constant push
(2) does. A predicted rate below `resolved`, log FACTOR over that half, is one that a run cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.arithmetic import Arithmetic, Dots, Sites
from harness.arms import decode_block
from harness.conditioning import between_keys, window_operator
from harness.config import AcceptanceConfig, Config, DecodeConfig
from harness.decode import Stream
from harness.designs import engine_of, oracle_engine
from harness.errors import ConfigError
from harness.inverted import parse_format
from harness.operator_config import gate_point
from harness.reference.emulated import Emulated
from harness.reference.inverse import parse
from harness.reference.oracle import Oracle
from harness.ring import RingSpec
from harness.schedule import Schedule
from harness.tokens import Shape, Tokens
from harness.variants import VariantSpec
from harness.window import Windows

LOOKS = 8
OVERFLOW = 1e200
FACTOR = 4.0
ROWS = 4  # value rows of a closed run: rows of a state are independent
AT_ONCE = 512  # tokens decoded between two rounds of bookkeeping


def inner(form: str) -> Arithmetic:
    """Exact but for the inverse, which is in `form`, site/product. Raises ConfigError naming it."""
    a = parse_format(form, "operator.formats")
    return Arithmetic(Sites(inverse=a.sites.inverse), Dots(inverse=a.dots.inverse))


@dataclass(frozen=True)
class Point:
    """Where an operator is taken."""

    window: int
    cosine: float
    beta: float
    g: float


class Joined:
    """Streams of one slot each, side by side as slots."""

    def __init__(self, streams: list[Stream]):
        self.streams, self.device = streams, streams[0].device

    def tokens(self, start: Tensor, count: int) -> Tokens:
        """`count` tokens of every stream from start [slots], leading axes [slots, count]."""
        parts = [s.tokens(start[i : i + 1], count) for i, s in enumerate(self.streams)]
        return Tokens(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Tokens)))

    def initial_state(self) -> Tensor:
        """[slots, heads, V, K]."""
        return torch.cat([s.initial_state() for s in self.streams])


def points(config: Config, window: int) -> list[Point]:
    """Every cosine at every beta and g, for one window size."""
    gates = [gate_point(text) for text in config.operator.gates]
    return [Point(window, cosine, beta, g) for beta, g in gates for cosine in config.operator.cosines]


def methods(config: Config) -> list[tuple[str, str]]:
    """(inverse, format) of every run. Raises ConfigError for an inverse that is unknown or forms no T."""
    for name in config.operator.inverses:
        if not parse("operator.inverses", name).explicit:
            raise ConfigError(f"operator.inverses: {name!r} forms no T, so a window has no operator to take")
    return [(name, kind) for name in config.operator.inverses for kind in config.operator.formats]


def stream(config: Config, decode: DecodeConfig, shape: Shape, p: Point) -> Stream:
    """Keys of pairwise cosine p.cosine: a common direction of weight sqrt(cosine) and noise."""
    own = replace(decode, family="near_collinear", coherence=math.sqrt(p.cosine), beta=p.beta, g=p.g, gates=None)
    return Stream(own, shape)


def runs(config: Config, window: int) -> Iterator[dict[str, Any]]:
    """One row per (point, inverse, format, head) of a window size."""
    operator, here, made = config.operator, points(config, window), designs(config, window)
    shape = Shape(operator.heads, operator.heads, ROWS, config.model.key_dim)
    count = operator.tokens // window
    decode = replace(config.decode, tokens=count * window, slots=1, window=window, ragged=False, prefill=0)
    joined = Joined([stream(config, decode, shape, p) for p in here])
    initial = joined.initial_state()
    states = [d.create(shape, len(here), initial) for d in made]
    oracle = Oracle(shape, initial, maker=oracle_engine(config, "cpu"))
    along = Along(len(made), len(here), shape)
    schedule = Schedule(replace(decode, slots=len(here)), AcceptanceConfig("all"), made[0].ring, 0, decode.tokens)
    errors, looks = np.empty((len(made), len(here), count, operator.heads)), []
    looked = set(np.linspace(0, count - 1, min(LOOKS, count)).astype(int).tolist())
    done = 0
    for block in schedule.blocks(max(1, AT_ONCE // window)):
        windows, pieces = block.windows(joined, shape), block.pieces(joined, shape)  # type: ignore[arg-type]
        assert pieces is not None
        S = oracle.advance(pieces.windows, pieces.points).S
        for i, (d, state) in enumerate(zip(made, states, strict=True)):
            seen = decode_block(d, state, windows, block, S)
            errors[i, :, done : done + windows.W] = seen.errors[..., 2]
        along.advance(windows, made)
        if some := [w for w in range(windows.W) if done + w in looked]:
            part = steps_of(windows, some)
            found = [window_operator(part, d.arithmetic, d.spec.inverse) for d in made]
            looks.append(np.stack([torch.stack(x).numpy() for x in found]))
        done += windows.W
    operators = np.concatenate(looks, 2)  # [designs, 2, windows, points, heads]
    logs = np.stack(along.logs, -1)
    for i, b, h in np.ndindex(len(made), len(here), operator.heads):
        yield asdict(here[b]) | row(methods(config)[i], h, operators[i, :, :, b, h], logs[i, b, h], errors[i, b, :, h])


def designs(config: Config, window: int) -> list[Emulated]:
    """A chunked design per method, folding every window."""
    ring = RingSpec(1 << (window - 1).bit_length(), window, 1, "commit")
    made = []
    for name, kind in methods(config):
        spec, a = VariantSpec(f"{name} {kind}", inverse=name), inner(kind)
        made.append(engine_of(config, spec, a, "cpu")(spec, ring, a))
    return made


def steps_of(windows: Windows, steps: list[int]) -> Windows:
    """Some of the steps, nothing computed yet."""
    return Windows(windows.tokens.map(lambda x: x[steps]), windows.lengths[steps], windows.shape)


class Along:
    """Rows x through the window operators of every design, and log ||x|| / ||x_0|| behind every window."""

    def __init__(self, designs: int, slots: int, shape: Shape):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(2, shape.K, dtype=torch.float64, generator=draw)
        self.x = (x / x.norm()).expand(designs, slots, shape.HV, 2, shape.K).clone()
        self.log = torch.zeros(designs, slots, shape.HV, dtype=torch.float64)
        self.logs: list[np.ndarray] = []  # [designs, slots, heads] each

    def advance(self, windows: Windows, made: list[Emulated]) -> None:
        """One batch of windows."""
        X = [between_keys(windows, d.arithmetic, d.spec.inverse) for d in made]
        k, last = windows.keys(Arithmetic())[0], windows.decays(Arithmetic())[0][..., -1]
        for w in range(windows.W):
            inside = self.x @ k[w].mT @ torch.stack([x[w] for x in X]) @ k[w]
            self.x = last[w][..., None, None] * self.x - inside
            norm = self.x.flatten(-2).norm(dim=-1)
            self.log = self.log + norm.log()
            self.x = self.x / norm[..., None, None]
            self.logs.append(self.log.numpy())


def row(
    method: tuple[str, str], head: int, operators: np.ndarray, log: np.ndarray, error: np.ndarray
) -> dict[str, Any]:
    """What is kept of one run: operators [2, looks], log and error [windows]."""
    with np.errstate(divide="ignore"):
        growth = rate(np.log(error), math.log(OVERFLOW))
    joint = rate(log, math.inf)
    norm, radius = operators
    finite = bool(np.isfinite(error).all())
    second = len(error) - len(error) // 2
    return {
        "inverse": method[0],
        "format": method[1],
        "head": head,
        "count": len(error),
        # NaN of a T that is not finite goes through max and median
        "norm_max": norm.max(),
        "radius_max": radius.max(),
        "radius": np.median(radius),
        "norm": np.median(norm),
        "joint": joint,
        "growth": growth,
        "error": error[-1],
        "largest": np.max(error),
        "first_nonfinite": -1 if finite else int(np.flatnonzero(~np.isfinite(error))[0]),
        "diverged": not finite or growth * second > math.log(FACTOR),
        "resolved": math.log(FACTOR) / second,
    }


def rate(log: np.ndarray, limit: float) -> float:
    """Least-squares slope over the second half of the entries before the first that is above limit or no number.

    NaN where fewer than four are left; entries of -inf, exact zeros, take no part.
    """
    bad = np.flatnonzero(~(log <= limit))
    n = int(bad[0]) if len(bad) else len(log)
    at = np.arange(n // 2, n)
    if n < 4:
        return math.nan
    at = at[np.isfinite(log[at])]
    # a single window is too noisy an end where errors of windows are draws of one distribution
    return float(np.polyfit(at, log[at], 1)[0]) if len(at) > 1 else 0.0
