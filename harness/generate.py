"""Runs of tokens of every slot at once, as their family draws them, rounded to the activation format.

A family whose keys or values are entries of one quantile table is drawn by a compiled kernel. On a device that is not
the CPU only the places in the table are drawn there; the device looks them up, which is exact anywhere. Everything
else, gates among it, is computed on the CPU, a slot and a head at a time where the bits may depend on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness import pool
from harness.families import NORMAL, TABLES, Draw, Family, Floats, trained
from harness.gates import gate_map, head_class
from harness.precision import Format, round_to
from harness.tokens import Shape, Tokens

TOGETHER = 16  # slots whose gates are mapped at once: few enough that no operation is split over threads
PART = 1 << 26  # table look-ups of one operation on a device

Host = Callable[[], list[Any]]  # waits for what is being drawn on the CPU


class Generator:
    """Draws for the slots seeds[0..] of a layer of `shape`, for some of its key and value heads.

    lookup  leave the tables to the device, and draw with threads; None: where it is not the CPU
    """

    def __init__(
        self,
        family: Family,
        shape: Shape,
        heads: tuple[list[int], list[int]],
        seeds: list[int],
        coherence: float,
        activation: Format,
        device: torch.device,
        lookup: bool | None = None,
    ):
        self.family, self.shape, self.format, self.device = family, shape, activation, device
        self.keys, self.values = heads
        self.seeds, self.coherence = seeds, coherence
        self.lookup = device.type != "cpu" if lookup is None else lookup

    def draw(self, slot: int, part: str, number: int, count: int) -> Draw:
        """The draws of one slot."""
        return Draw(self.seeds[slot], part, number, count, self.shape.V, self.shape.K, self.coherence)

    def start(self, part: str, number: int, count: int) -> Host:
        """Begin to draw `count` tokens of every slot on the CPU."""
        fields = [self._field(name, part, number, count) for name in ("q", "k", "v")]
        gates = [partial(self._gates, head, part, number, count) for head in self.values]
        sizes = [len(tasks) for tasks, _ in fields]
        wait = pool.start([*(task for tasks, _ in fields for task in tasks), *gates], self.lookup)

        def result() -> list[Any]:
            done = wait()
            drawn = []
            for size, (_, join) in zip(sizes, fields, strict=True):
                drawn.append(join(done[:size]))
                done = done[size:]
            return [*drawn, *(torch.stack(x, -1) for x in zip(*done, strict=True))]

        return result

    def finish(self, host: Host) -> Tokens:
        """The tokens on the device, leading axes [slots, count]."""
        q, k, v, g, beta = host()
        return Tokens(q(), k(), v(), g.to(self.device), beta.to(self.device))

    # --- keys and values --------------------------------------------------------------------------------------

    def _field(self, name: str, part: str, number: int, count: int) -> tuple[list[Any], Any]:
        """Tasks that draw q, k or v of every slot, and what makes [slots, count, heads, width] of their results."""
        by_value = name == "v"
        table = TABLES.get(self.family.values if by_value else self.family.keys)
        if table is None:
            tasks = [partial(self._drawn, name, part, number, count, slot) for slot in range(len(self.seeds))]
            return tasks, lambda drawn: lambda: _wide(torch.stack(drawn), self.device)
        heads, width = (self.values, self.shape.V) if by_value else (self.keys, self.shape.K)
        keys = stream_keys(f"{part}.{name}", heads, number, self.seeds)
        if not self.lookup:
            out = torch.empty(len(self.seeds), count, len(heads), width, dtype=torch.float64)
            one: list[Any] = [partial(self._looked_up, keys, by_value, table, out)]
            return one, lambda _: lambda: out
        numbers = -(-count * width // 4)
        pinned = self.device.type == "cuda"
        places = torch.empty(len(keys), numbers, dtype=torch.int64, pin_memory=pinned)
        raw = places.numpy().view(np.uint64)
        drawing: list[Any] = [partial(_places, keys[rows], raw[rows]) for rows in pool.shares(len(keys), True)]
        rounded = self._table(table)

        def join(_: list[Any]) -> Callable[[], Tensor]:
            size = (len(self.seeds), len(heads), *((width, count) if by_value else (count, width)))
            return lambda: look_up(places.to(self.device, non_blocking=True), rounded, size, by_value)

        return drawing, join

    def _looked_up(self, keys: np.ndarray, by_value: bool, table: Floats, out: Tensor) -> None:
        from harness.compiled import draws

        (draws.values_of if by_value else draws.keys_of)(keys, self._table(table).numpy(), out.numpy())

    def _table(self, table: Floats) -> Tensor:
        """The entries in the activation format, [65536] fp64 on the CPU."""
        found = self._tables.get(id(table))
        if found is None:
            found = self._tables[id(table)] = round_to(torch.from_numpy(table).double(), self.format, "nearest")
        return found

    @cached_property
    def _tables(self) -> dict[int, Tensor]:
        return {}

    def _drawn(self, name: str, part: str, number: int, count: int, slot: int) -> Tensor:
        """One of q, k, v of one slot by the functions of the family, [count, heads, width]."""
        draw, family = self.draw(slot, part, number, count), self.family
        if name != "v":
            return self._narrow(np.stack([family.keys(draw, name, head) for head in self.keys])).permute(1, 0, 2)
        group = self.shape.group
        # values may be made from the keys they are written under
        k = {head: family.keys(draw, "k", head) for head in self.keys} if family.predicted else {}
        none = np.empty((0, 0), np.float32)
        v = [family.values(draw, head, k.get(head // group, none)) for head in self.values]
        return self._narrow(np.stack(v)).permute(2, 0, 1)

    def _narrow(self, x: np.ndarray) -> Tensor:
        """x in the activation format, in few bytes where that loses nothing."""
        raw = torch.from_numpy(x)
        if raw.dtype == torch.float32 and self.format.name == "bf16":
            # fp32 draws: the cast rounds once, to the same bits as round_to, and narrow numbers are moved
            return raw.to(torch.bfloat16)
        return round_to(raw.double(), self.format, "nearest")

    # --- gates ------------------------------------------------------------------------------------------------

    def _gates(self, head: int, part: str, number: int, count: int) -> tuple[Tensor, Tensor]:
        """(g, beta) [slots, count] fp64 of one value head, from rounded a and b of its trained class."""
        c, B = head_class(head), len(self.seeds)
        z = np.empty((B, -(-2 * count // 4)), np.uint64)
        _places(stream_keys(f"{part}.gates", [head], number, self.seeds), z)
        places = z.view(np.uint16)[:, : 2 * count].reshape(B, 2, count)
        normal = torch.from_numpy(NORMAL[places].astype(np.float64))
        A_log, dt_bias = (torch.tensor([x], dtype=torch.float64) for x in (c.A_log, c.dt_bias))
        found = []
        # a vectorised exp may differ in the last bit between body and tail of an array
        for some in normal.split(TOGETHER if count % 64 == 0 else 1):
            a, b = c.a_sd * some[:, 0], c.b + c.b_sd * some[:, 1]
            a, b = (round_to(x, self.format, "nearest")[..., None] for x in (a, b))
            found.append([x[..., 0] for x in gate_map(a, b, A_log, dt_bias)])
        g, beta = (torch.cat(x) for x in zip(*found, strict=True))
        if self.family.gates is not trained:
            own = [
                self.family.gates(self.draw(b, part, number, count), head, g[b].numpy(), beta[b].numpy())
                for b in range(B)
            ]
            g, beta = (torch.from_numpy(np.stack(x)) for x in zip(*own, strict=True))
        return g, beta


def stream_keys(name: str, heads: list[int], number: int, seeds: list[int]) -> np.ndarray:
    """Keys of the streams of harness.families._sample as harness.compiled.draws reads them, slots first, then heads."""
    rows = []
    for seed in seeds:
        # numpy splits an integer into words of 32 bits, the lowest first
        words = [seed & 0xFFFFFFFF]
        while seed := seed >> 32:
            words.append(seed & 0xFFFFFFFF)
        rows.append(words)
    most = max(map(len, rows))
    keys = np.zeros((len(seeds), len(heads), 4 + most), np.uint32)
    keys[..., 0] = np.array([3 + len(words) for words in rows])[:, None]
    keys[..., 1], keys[..., 2], keys[..., 3] = zlib.crc32(name.encode()), heads, number
    keys[..., 4:] = np.array([words + [0] * (most - len(words)) for words in rows])[:, None]
    return keys.reshape(-1, 4 + most)


def look_up(places: Tensor, table: Tensor, size: tuple[int, ...], by_value: bool) -> Tensor:
    """table [65536] at places [slots*heads, numbers] int64, four in each, as [slots, count, heads, width] tokens.

    size: how the streams go, [slots, heads, count, width], or with by_value [slots, heads, width, count].
    """
    B, n = size[0], int(np.prod(size[2:]))
    streams = places.view(torch.int16)[:, :n].view(size)
    streams = streams.permute(0, 3, 1, 2) if by_value else streams.permute(0, 2, 1, 3)
    out = torch.empty(streams.shape, dtype=table.dtype, device=places.device)
    table = table.to(places.device)
    at_once = max(1, PART * B // streams.numel())
    for here, there in zip(streams.split(at_once), out.split(at_once), strict=True):
        index = here.contiguous().to(torch.int32).bitwise_and_(0xFFFF)
        torch.index_select(table, 0, index.view(-1), out=there.view(-1))
    return out


def _places(keys: np.ndarray, out: np.ndarray) -> None:
    from harness.compiled import draws

    draws.places(np.ascontiguousarray(keys), out)


def _wide(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device).to(torch.float64)
