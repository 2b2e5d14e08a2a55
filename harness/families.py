"""Input families by name: how the keys, values, gates and initial state of one head are drawn.

Everything comes from `Draw`, whose streams are keyed by (seed, head, block, purpose): a head's values do not
depend on which other heads, blocks, slots or value rows are drawn, nor on the number of threads.

Sources: regimes of captured layers (huawei-csl/gdn-tri-inverse, profiling/data) and of public bug reports,
named at each family. Constants are off the dyadic grid, where unstable inverses look exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# 16-bit quantile tables: one gather per value, the same bits on every machine, finer than the 8 significand
# bits of bf16; normal tails end at 4.3 standard deviations
_U = (np.arange(65536) + 0.5) / 65536
NORMAL: Floats = ndtri(_U).astype(np.float32)
SILU: Floats = (ndtri(_U) / (1 + np.exp(-ndtri(_U)))).astype(np.float32)  # silu(x) of normal x
WIDE: Floats = (np.sign(_U - 0.5) * 10 ** (5 * np.abs(2 * _U - 1) - 3)).astype(np.float32)  # +-10^U(-3,2)
UNIFORM: Floats = _U.astype(np.float32)


@dataclass(frozen=True)
class Draw:
    """The draws of `count` tokens of a slot: one block, the pool of junk, or one period of a loop.

    part names which of these, number is the block's; V is the value rows, K the key width.
    """

    seed: int
    part: str
    number: int
    count: int
    V: int
    K: int
    coherence: float

    def sample(self, table: Floats, name: str, head: int, *size: int) -> Floats:
        """[size] entries of a quantile table at uniform places, new in every block.

        A shorter first axis draws the same leading values.
        """
        return _sample(table, f"{self.part}.{name}", head, self.number, self.seed, size)

    def fixed(self, table: Floats, name: str, head: int, *size: int) -> Floats:
        """As `sample`, but the same in every part and block of the slot: what belongs to the head."""
        return _sample(table, f"head.{name}", head, 0, self.seed, size)


def _sample(table: Floats, name: str, head: int, number: int, seed: int, size: tuple[int, ...]) -> Floats:
    # torch seeds its CPU generator with 32 bits only; SeedSequence hashes the whole key
    key = np.random.SeedSequence((zlib.crc32(name.encode()), head, number, seed))
    n = int(np.prod(size))
    places = np.random.SFC64(key).random_raw(-(-n // 4)).view(np.uint16)[:n].reshape(size)
    return np.take(table, places, out=np.empty(size, np.float32), mode="wrap")


Keys = Callable[[Draw, str, int], Floats]  # (draw, "q" | "k", key head) -> [count, K]
Values = Callable[[Draw, int, Floats], Floats]  # (draw, value head, its keys [count, K]) -> [V, count]
Pair = tuple[Doubles, Doubles]  # (g, beta), [count] each
Gates = Callable[[Draw, int, Doubles, Doubles], Pair]  # (draw, value head, trained g, trained beta) -> its own
State = Callable[[Draw, int], Floats]  # (draw, value head) -> [V, K]


def gaussian(d: Draw, name: str, head: int) -> Floats:
    return d.sample(NORMAL, name, head, d.count, d.K)


def silu(d: Draw, name: str, head: int) -> Floats:
    """SiLU of Gaussians: E cos .12 between tokens."""
    return d.sample(SILU, name, head, d.count, d.K)


def _toward_mean(d: Draw, name: str, head: int, noise: Floats) -> Floats:
    w = np.float32(d.coherence)
    return w * d.fixed(NORMAL, f"mean.{name}", head, d.K) + np.sqrt(1 - w * w) * noise


def coherent(d: Draw, name: str, head: int) -> Floats:
    """SiLU of mean direction + 4-tap AR(1) + noise; the AR(1) starts anew in every block."""
    taps = np.float32(0.63) ** np.arange(4, dtype=np.float32)
    taps *= np.sqrt(np.float32(0.5) / (taps @ taps))
    z = d.sample(NORMAL, f"{name}.ar", head, d.count + 3, d.K)
    noise = np.sqrt(np.float32(0.5)) * d.sample(NORMAL, name, head, d.count, d.K)
    for lag, tap in enumerate(taps):
        noise += tap * z[3 - lag : 3 - lag + d.count]
    x = _toward_mean(d, name, head, noise)
    return x / (1 + np.exp(-x))


def near_collinear(d: Draw, name: str, head: int) -> Floats:
    """Keys of pairwise cosine about coherence^2; queries are SiLU'd Gaussians."""
    return _toward_mean(d, name, head, gaussian(d, name, head)) if name == "k" else silu(d, name, head)


def one_key(d: Draw, name: str, head: int) -> Floats:
    """The same key at every token; queries are SiLU'd Gaussians."""
    return one_token(d, name, head) if name == "k" else silu(d, name, head)


def one_token(d: Draw, name: str, head: int) -> Floats:
    return np.tile(d.fixed(SILU, name, head, d.K), (d.count, 1))


def tiny_keys(d: Draw, name: str, head: int) -> Floats:
    """Key scales 1, .01, .001, .0001 and 0, a fifth of the tokens each; queries never 0."""
    scales = np.array([1, 1e-2, 1e-3, 1e-4, 0 if name == "k" else 1], np.float32)
    pick = (5 * d.sample(UNIFORM, f"{name}.scale", head, d.count)).astype(np.int64).clip(max=4)
    return silu(d, name, head) * scales[pick, None]


def normal_values(d: Draw, head: int, k: Floats) -> Floats:
    return d.sample(NORMAL, "v", head, d.V, d.count)


def wide_values(d: Draw, head: int, k: Floats) -> Floats:
    return d.sample(WIDE, "v", head, d.V, d.count)


def repeating_values(d: Draw, head: int, k: Floats) -> Floats:
    return d.fixed(NORMAL, "v", head, d.V, 16)[:, np.arange(d.count) % 16]


def write_erase(d: Draw, head: int, k: Floats) -> Floats:
    v = d.sample(NORMAL, "v", head, d.V, -(-d.count // 2)).repeat(2, axis=1)[:, : d.count]
    v[:, 1::2] *= -1
    return v


def value_map(d: Draw, head: int) -> Floats:
    return d.fixed(NORMAL, "map", head, d.V, d.K)


def on_manifold(d: Draw, head: int, k: Floats) -> Floats:
    """v = M khat (1 + .01 xi), M the initial state: the memory predicts v to 1 %."""
    khat = k / np.sqrt((k * k).sum(-1, keepdims=True) + np.float32(1e-6))
    # einsum, as a BLAS product of a row depends on how many rows there are
    v = np.einsum("vk,tk->vt", value_map(d, head), khat)
    return v * (1 + np.float32(0.01) * d.sample(NORMAL, "xi", head, d.V, d.count))


def wide_state(d: Draw, head: int) -> Floats:
    return d.fixed(WIDE, "state", head, d.V, d.K)


def trained(d: Draw, head: int, g: Doubles, beta: Doubles) -> Pair:
    return g, beta


def constant(g: float | None = None, beta: float | None = None) -> Gates:
    """Gates with g or beta fixed; the other stays as trained."""

    def fix(trained: Doubles, value: float | None) -> Doubles:
        return trained if value is None else np.full_like(trained, value)

    return lambda d, head, g_t, beta_t: (fix(g_t, g), fix(beta_t, beta))


def _uniform(d: Draw, name: str, head: int) -> Doubles:
    return d.sample(UNIFORM, name, head, d.count).astype(np.float64)


def strong_decay(d: Draw, head: int, g: Doubles, beta: Doubles) -> Pair:
    """alpha log-uniform in 1e-4..0.4."""
    low, high = np.log(1e-4), np.log(0.4)
    return low + (high - low) * _uniform(d, "alpha", head), beta


def resets(d: Draw, head: int, g: Doubles, beta: Doubles) -> Pair:
    """One token in 48 at g = -160, whose exp is 0 in fp32 only; one in 48 at exactly -inf."""
    u = 48 * _uniform(d, "reset", head)
    return np.where(u < 1, -160.0, np.where(u < 2, -np.inf, g)), beta


def mixed(d: Draw, head: int, g: Doubles, beta: Doubles) -> Pair:
    """No decay, hardly any, slow, fast and memoryless tokens side by side; beta from .04 to .997."""
    levels = np.array([0, -1.1e-9, -1.5e-3, -0.11, -4.3, -63.7])
    writes = np.array([0.04, 0.47, 0.93, 0.997])
    g = levels[(6 * _uniform(d, "level", head)).astype(np.int64)] * (0.5 + _uniform(d, "jitter", head))
    return g, writes[(4 * _uniform(d, "write", head)).astype(np.int64)]


@dataclass(frozen=True)
class Family:
    """One input family.

    coherence   default weight of the common key direction; None where the family has no such direction
    period      whole tokens repeat with this period after the first quarter of the run; 0: never
    state       the initial state it needs; None: decode.initial_state
    predicted   values are made from the keys they are written under
    """

    doc: str
    keys: Keys = silu
    values: Values = normal_values
    gates: Gates = trained
    state: State | None = None
    coherence: float | None = None
    period: int = 0
    predicted: bool = False


FAMILIES: dict[str, Family] = {
    "silu": Family("SiLU'd Gaussian keys, positively coherent (E cos .12)"),
    "iid": Family("Gaussian keys, the input on which every inverse looks good", gaussian),
    "coherent": Family("SiLU of mean direction + AR(1) + noise; median cos .6", coherent, coherence=0.77),
    "near_collinear": Family("keys of pairwise cosine .99", near_collinear, coherence=0.995),
    # MoonshotAI/FlashKDA#34, vllm-project/FlashKDA#10: NaN for 16 identical tokens
    "identical": Family("one key throughout, beta .9997, g -1e-5", one_key, gates=constant(-1.03e-5, 0.9997)),
    # the repeated-token test of ROCm/aiter#4952
    "repeat16": Family(
        "one token throughout, values of period 16, beta .835, g -1e-3",
        one_token,
        repeating_values,
        constant(-1.0e-3, 0.835),
    ),
    # looping text, as in sgl-project/sglang#28695
    "loop24": Family("silu, then a text of period 24 after the first quarter of the run", period=24),
    "decay_one": Family("g -1e-9: nothing is forgotten", gates=constant(g=-1.0e-9)),
    "decay_stagnate": Family("g -1.5e-3: a bf16 state rounds the decay away", gates=constant(g=-1.5e-3)),
    # ohdearquant/lattice#716: alpha down to 1.3e-4 in a trained layer
    "strong_decay": Family("alpha 1e-4..0.4, memory of about a token", gates=strong_decay),
    # ohdearquant/lattice#235, NVIDIA/TensorRT-LLM#14652
    "resets": Family("ordinary gates with some g of -160 and of -inf", gates=resets),
    # fla-org/flash-linear-attention#461: tokens of gate exactly 1 among others
    "mixed_gates": Family("all magnitudes of g and beta within one window", gates=mixed),
    # mudler/vllm.cpp#3223: values that the memory already predicts, and states of wide range
    "manifold": Family("v within 1 % of S k: d is a cancellation", values=on_manifold, state=value_map, predicted=True),
    "wide_state": Family("state and values +-10^U(-3,2)", values=wide_values, state=wide_state),
    # osaurus-ai/vmlx-swift#434
    "zero_key": Family("key scales 1 to 1e-4 and exactly 0: the norm's eps matters", tiny_keys),
    # arXiv 2411.12537: negative eigenvalues, the only family whose (I+A)^-1 itself is large
    "beta_two": Family("beta 1.97 on coherent keys", coherent, gates=constant(beta=1.97), coherence=0.77),
    "alternating": Family("v, then -v on one key: write and erase", one_key, write_erase, constant(-1.1e-4, 0.97)),
}

# what takes every number of a run from one table, so that it can be drawn without going head by head
TABLES: dict[Keys | Values, Floats] = {silu: SILU, gaussian: NORMAL, normal_values: NORMAL, wide_values: WIDE}
