"""How many tokens of a window are committed, and how long windows are: functions of (seed + slot, t).

A slot that has committed t tokens draws its next window from a counter hash, so the accepts of a decode
depend neither on the batch nor on the order in which slots are run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.config import AcceptanceConfig, DecodeConfig
from harness.errors import ConfigError, InputError
from harness.precision import mix, unit

Ints = NDArray[np.int64]

ACCEPT, LENGTH, JUNK = 1, 2, 3  # purposes, so that no two draws of one (seed, t) are related


def counter_hash(purpose: int, *parts: Tensor | Ints | int) -> Tensor:
    """64 mixed bits, as int64, of a purpose and integer parts, which broadcast; a pure function."""
    z = mix(torch.tensor(purpose))
    for part in parts:
        z = mix(z + (part if isinstance(part, Tensor) else torch.from_numpy(np.array(part, np.int64, order="C"))))
    return z


def accepted(
    config: AcceptanceConfig, seed: int, slot: Ints | int, t: Ints, lengths: Ints, step: Ints | int = 0
) -> Ints:
    """Tokens committed, 1 <= n <= m, of a window of m = `lengths` tokens that begins at committed count `t`.

    slot, t, lengths, step  int64, any shapes that broadcast; step counts the slot's windows from 0

    1. uniform    1..m, each as likely
    2. all        m
    3. none       1, the bonus token
    4. geometric  1 + the drafts before the first rejected one, each accepted with probability p
    5. fixed      sequence[step mod its length], at most m

    Raises ConfigError for an unknown kind, or one whose parameter is absent; InputError for an empty window.
    """
    slot, t, lengths, step = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (slot, t, lengths, step)))
    if (lengths < 1).any():
        at = int(np.flatnonzero(lengths < 1)[0])
        raise InputError(f"window of slot {slot.flat[at]} at token {t.flat[at]} is empty: nothing to commit")
    if config.kind == "all":
        return lengths.copy()
    if config.kind == "none":
        return np.ones_like(lengths)
    if config.kind == "fixed":
        if not config.sequence:
            raise ConfigError("acceptance.sequence: empty; a fixed acceptance needs counts")
        counts = np.asarray(config.sequence, np.int64)
        return np.minimum(counts[step % len(counts)], lengths)
    u = unit(counter_hash(ACCEPT, seed + slot, t)).numpy()
    if config.kind == "uniform":
        return 1 + np.floor(u * lengths).astype(np.int64)
    if config.kind == "geometric":
        if config.p is None:
            raise ConfigError("acceptance.p: absent; a geometric acceptance needs a probability")
        # one draw decides all drafts: the first j are accepted where u < p^j
        drafts = np.arange(1, lengths.max(initial=1))
        passed = (u[..., None] < config.p**drafts) & (drafts < lengths[..., None])
        return 1 + passed.sum(-1, dtype=np.int64)
    raise ConfigError(f"acceptance.kind: {config.kind!r} is not one of uniform, all, none, geometric, fixed")


def chances(config: AcceptanceConfig, length: int, step: int = 0) -> NDArray[np.float64]:
    """Probability [length + 1] that `accepted` commits n = 0..length tokens of a window of that many."""
    p = np.zeros(length + 1)
    if config.kind == "uniform":
        p[1:] = 1 / length
    elif config.kind == "geometric":
        assert config.p is not None
        p[1:] = config.p ** np.arange(length)
        p[1:-1] *= 1 - config.p
    else:
        # these draw nothing
        zero = np.zeros(1, np.int64)
        p[accepted(config, 0, 0, zero, zero + length, step)] = 1
    return p


def lengths(config: DecodeConfig, slot: Ints | int, t: Ints) -> Ints:
    """Window lengths m of slots at committed counts t: config.window, or ragged 1..config.window.

    slot, t  int64, shapes that broadcast. The end of the decode is the caller's to respect.
    """
    slot, t = np.broadcast_arrays(np.asarray(slot, np.int64), np.asarray(t, np.int64))
    if not config.ragged:
        return np.full(slot.shape, config.window, np.int64)
    u = unit(counter_hash(LENGTH, config.seed + slot, t)).numpy()
    return 1 + np.floor(u * config.window).astype(np.int64)
