"""Accept counts and window lengths: range, law, and what they may depend on."""

import numpy as np
import pytest

from harness.acceptance import accepted, lengths
from harness.config import AcceptanceConfig, DecodeConfig
from harness.errors import ConfigError, InputError

KINDS = [
    AcceptanceConfig("uniform"),
    AcceptanceConfig("all"),
    AcceptanceConfig("none"),
    AcceptanceConfig("geometric", p=0.7),
    AcceptanceConfig("geometric", p=0.0),
    AcceptanceConfig("geometric", p=1.0),
    AcceptanceConfig("fixed", sequence=[3, 1, 4]),
]
T = np.arange(20_000)


def draw(config: AcceptanceConfig, m: int, seed: int = 0, slot: int = 0) -> np.ndarray:
    return accepted(config, seed, np.int64(slot), T, np.int64(m), T)


@pytest.mark.parametrize("config", KINDS, ids=lambda c: f"{c.kind}{'' if c.p is None else c.p}")
def test_the_bonus_token_is_always_kept_and_the_window_never_exceeded(config: AcceptanceConfig) -> None:
    """Fault: 0 or m + 1 tokens committed, at ragged windows and windows of one token too."""
    m = 1 + T % 7
    n = accepted(config, 0, np.int64(0), T, m, T)
    assert n.shape == m.shape
    assert n.dtype == np.int64
    assert (n >= 1).all()
    assert (n <= m).all()


@pytest.mark.parametrize("m", [3, 4, 64])
def test_uniform_is_uniform(m: int) -> None:
    """Fault: the bonus token dropped from the range, or the last value never drawn; limits are 5 sigma."""
    counts = np.bincount(draw(KINDS[0], m), minlength=m + 1)
    assert counts[0] == 0
    expected = len(T) / m
    assert np.abs(counts[1:] - expected).max() < 5 * np.sqrt(expected)


def test_geometric_stops_at_the_first_rejection() -> None:
    """Fault: drafts counted although one before them was rejected; limits are 5 sigma."""
    n = draw(AcceptanceConfig("geometric", p=0.7), 4)
    for j in (1, 2, 3):
        p = 0.7**j
        assert abs((n > j).mean() - p) < 5 * np.sqrt(p * (1 - p) / len(T))
    assert (draw(AcceptanceConfig("geometric", p=0.0), 4) == 1).all()
    assert (draw(AcceptanceConfig("geometric", p=1.0), 4) == 4).all()


def test_all_none_and_fixed() -> None:
    """Fault: a fixed sequence indexed by tokens, not by windows, or not cut to a short window."""
    assert (draw(AcceptanceConfig("all"), 5) == 5).all()
    assert (draw(AcceptanceConfig("none"), 5) == 1).all()
    config = AcceptanceConfig("fixed", sequence=[3, 1, 4])
    step, t = np.arange(6), np.zeros(6, np.int64)
    assert accepted(config, 0, t, t, t + 4, step).tolist() == [3, 1, 4, 3, 1, 4]
    assert accepted(config, 0, t, t, t + 2, step).tolist() == [2, 1, 2, 2, 1, 2]


@pytest.mark.parametrize("config", [KINDS[0], KINDS[3]], ids=["uniform", "geometric"])
def test_a_count_depends_on_seed_plus_slot_and_t_only(config: AcceptanceConfig) -> None:
    """Fault: a running generator, so that batch or order changes the decode."""
    slot = np.arange(3)[:, None]
    batch = accepted(config, 5, slot, T[None, :99], np.int64(4))
    for s in range(3):
        alone = accepted(config, 5 + s, np.zeros(99, np.int64), T[:99][::-1], np.int64(4))
        assert (batch[s] == alone[::-1]).all()
    assert (batch[0] != batch[1]).any()


def test_ragged_lengths_cover_the_window_and_are_unrelated_to_accepts() -> None:
    """Fault: lengths drawn from the bits of the accepts, so that short windows are always fully accepted."""
    config = DecodeConfig(window=4, ragged=True)
    m = lengths(config, np.int64(0), T)
    assert set(np.unique(m)) == {1, 2, 3, 4}
    n = draw(KINDS[0], 4)
    assert abs(np.corrcoef(m, n)[0, 1]) < 5 / np.sqrt(len(T))
    assert (lengths(DecodeConfig(window=4), np.int64(0), T) == 4).all()
    other = lengths(DecodeConfig(window=4, ragged=True, seed=2), np.int64(1), T)
    assert (other == lengths(DecodeConfig(window=4, ragged=True), np.int64(3), T)).all()


def test_bad_settings_are_named() -> None:
    """Fault: an unknown kind or missing parameter ending in a traceback, an empty window in a count."""
    for config, message in (
        (AcceptanceConfig("some"), r"^acceptance\.kind: 'some'"),
        (AcceptanceConfig("geometric"), r"^acceptance\.p: absent"),
        (AcceptanceConfig("fixed"), r"^acceptance\.sequence: empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            draw(config, 4)
    with pytest.raises(InputError, match="slot 1 at token 30 is empty"):
        accepted(KINDS[0], 0, np.array([0, 1]), np.array([20, 30]), np.array([4, 0]))
