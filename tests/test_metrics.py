"""Errors of states and tokens: relative, absolute at zero, and never made smaller by what is not a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.intervals import Intervals
from harness.metrics import SinceLast, per_interval, state_errors, token_errors
from harness.schedule import Block, Grid

NAN, INF = float("nan"), float("inf")


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size))


def of_tokens(x_hat: torch.Tensor, x: torch.Tensor) -> np.ndarray:
    """token_errors of every token, [HV, T]."""
    every = torch.arange(len(x))
    return token_errors(x_hat, x, every, every).numpy()


def of_intervals(errors: np.ndarray, ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """per_interval of intervals that follow one another, interval i ending before ends[i]: [n, HV] each."""
    size = np.diff(ends, prepend=0)
    places = np.maximum(np.array(ends)[:, None] + np.arange(-size.max(), 0), 0)
    middle, worst = per_interval(torch.from_numpy(errors), torch.from_numpy(places), torch.from_numpy(size)).numpy()
    return middle.T, worst.T


def test_state_errors_are_the_formula() -> None:
    """Faults: a norm over heads, or over one axis; a maximum without its sign; a scale of the wrong state."""
    S, S_hat = random(3, 2, 5, 4), random(3, 2, 5, 4, seed=1)
    found = state_errors(S_hat, S)
    assert found.shape == (3, 2, 2)
    for i in range(3):
        for h in range(2):
            E, T = (S_hat - S)[i, h].numpy(), S[i, h].numpy()
            expected = [np.linalg.norm(E) / np.linalg.norm(T), abs(E).max() / abs(T).max()]
            np.testing.assert_allclose(found[i, h], expected, rtol=1e-15 * 8)  # a dozen rounded operations
    one = torch.tensor([[-4.0, 2.0]], dtype=torch.float64).view(1, 1, 1, 2)
    assert state_errors(0 * one, one)[..., 1] == 1 and state_errors(0 * one, -one)[..., 1] == 1


def test_a_zero_state_is_measured_absolutely() -> None:
    """Fault: 0/0 = NaN at the first flush of a zero state, or an error divided by a tiny guard."""
    S = torch.zeros(2, 3, 4, dtype=torch.float64)
    S_hat = S.clone()
    S_hat[1, 2, 3] = -0.25
    assert state_errors(S_hat[None], S[None]).tolist() == [[[0, 0], [0.25, 0.25]]]
    assert of_tokens(S_hat.permute(2, 0, 1), S.permute(2, 0, 1)).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0.25]]


def test_token_errors_are_the_formula() -> None:
    """Fault: tokens and value rows exchanged."""
    x, x_hat = random(2, 5, 7), random(2, 5, 7, seed=1)
    expected = np.linalg.norm((x_hat - x).numpy(), axis=1) / np.linalg.norm(x.numpy(), axis=1)
    np.testing.assert_allclose(of_tokens(x_hat.permute(2, 0, 1), x.permute(2, 0, 1)), expected, rtol=1e-14)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_state_that_is_not_finite_has_no_small_error(bad: float) -> None:
    """Fault: Python's max, or a comparison, that lets NaN pass as the smaller number."""
    S = random(1, 2, 5, 4)
    for row, column in ((0, 0), (2, 1), (4, 3)):
        wrong = S.clone()
        wrong[0, 1, row, column] = bad
        assert torch.isfinite(state_errors(wrong, S)).tolist() == [[[True, True], [False, False]]]
        assert np.isfinite(of_tokens(wrong[0].permute(2, 0, 1), S[0].permute(2, 0, 1))).sum() == 7


def test_intervals_are_numpys_median_and_maximum() -> None:
    """Faults: an interval one token early or late; the median of an even count; padding counted as an error."""
    rng = np.random.default_rng(2)
    errors, ends = 10.0 ** rng.uniform(-17, 2, (3, 40)), [1, 3, 4, 17, 18, 40]
    middle, worst = of_intervals(errors, ends)
    for i, (b, e) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        np.testing.assert_array_equal(worst[i], errors[:, b:e].max(1))
        np.testing.assert_allclose(middle[i], np.median(errors[:, b:e], 1), rtol=1e-15)
    exact = of_intervals(np.zeros((2, 5)), [2, 5])
    assert (exact[0] == 0).all() and (exact[1] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_never_lowers_an_interval(bad: float) -> None:
    """Fault: nanmedian or nanmax, under which a design looks better the more of its tokens are broken."""
    rng = np.random.default_rng(3)
    clean = rng.random((1, 12))
    middle, worst = of_intervals(clean, [5, 12])
    for at in range(12):
        errors = clean.copy()
        errors[0, at] = bad
        low, high = of_intervals(errors, [5, 12])
        i = int(at >= 5)
        assert not np.isfinite(high[i, 0])
        assert low[i, 0] >= middle[i, 0]
        assert low[1 - i, 0] == middle[1 - i, 0] and high[1 - i, 0] == worst[1 - i, 0]
    half = clean.copy()
    half[0, :3] = bad
    assert not np.isfinite(of_intervals(half, [5, 12])[0][0, 0])


def naive(values: np.ndarray, live: np.ndarray, ends: list[list[int]], slots: int) -> list[np.ndarray]:
    """Maxima between grid points, one window at a time."""
    found = []
    for b in range(slots):
        since, rows = np.full(values.shape[2:], -np.inf), []
        for i in range(len(values)):
            if live[i, b]:
                since = np.where(np.isnan(since) | np.isnan(values[i, b]), np.nan, np.maximum(since, values[i, b]))
            if i in ends[b]:
                rows.append(since)
                since = np.full(values.shape[2:], -np.inf)
        found.append(rows)
    return found


@pytest.mark.parametrize("size", [1, 3, 7, 60])
def test_maxima_since_the_last_grid_point_do_not_know_the_blocks(size: int) -> None:
    """Faults: a carry lost at a block's end, kept after a grid point, or shared by slots; idle windows counted."""
    rng = np.random.default_rng(4)
    W, B = 60, 3
    values = rng.standard_normal((W, B, 2, 4))
    values[rng.random(values.shape) < 0.02] = NAN
    live = rng.random((W, B)) < 0.7
    ends = [sorted(rng.choice(np.flatnonzero(live[:, b]), n, replace=False).tolist()) for b, n in enumerate((6, 1, 0))]
    values[~live] = 1e9
    expected, since = naive(values, live, ends, B), SinceLast(B)
    found: list[list[np.ndarray]] = [[] for _ in range(B)]
    for first in range(0, W, size):
        points = np.full((min(size, W - first), B), -1)
        for b, mine in enumerate(ends):
            here = [e - first for e in mine if first <= e < first + size]
            points[here, b] = range(len(here))
        rows = since.add(values[first : first + size], live[first : first + size], points)
        for b, row in zip(np.nonzero(points >= 0)[1], rows, strict=True):
            found[b].append(row)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_every_interval_has_the_tokens_of_its_slot(steps: int) -> None:
    """Faults: tokens that wait laid behind another slot's or dropped, an interval off by what a slot brought along, a
    block without a grid point, a slot without one among others, rows by slots instead of steps."""
    rng = np.random.default_rng(steps)
    W, B, HV, V = 40, 3, 2, 5
    accepted = rng.integers(1, 4, (W, B))
    accepted[30:, 1] = 0
    at = (rng.random((W, B)) < [0.3, 0.5, 0.04]) & (accepted > 0)
    reached = accepted.cumsum(0)
    x_hat, x = random(B, reached[-1].max(), HV, V), random(B, reached[-1].max(), HV, V, seed=1)
    errors = np.linalg.norm((x_hat - x).numpy(), axis=-1) / np.linalg.norm(x.numpy(), axis=-1)
    begin, left, old, count = [0] * B, np.zeros(B, dtype=np.int64), None, 0
    for first in range(0, W, steps):
        here, origin, expected = slice(first, first + steps), list(begin), []
        for i, row in enumerate(at[here]):
            slots = np.flatnonzero(row).tolist()
            ends = [int(reached[first + i, b]) for b in slots]
            for b, end in zip(slots, ends, strict=True):
                mine = errors[b, begin[b] : end]
                expected.append([np.median(mine, 0), mine.max(0)])
                begin[b] = end
        grid = Grid.of(at[here], reached[here], np.array(origin), np.zeros(B, dtype=int))
        block = Block(reached[here] - accepted[here], accepted[here], accepted[here], grid)
        counts = block.committed[0]
        intervals = Intervals(left, block, x.device)
        spans = [slice(t, t + n) for t, n in zip(reached[first] - accepted[first], counts, strict=True)]
        # what lies behind a slot's last token is anything
        new = torch.full((B, counts.max(), HV, V), NAN, dtype=torch.float64)
        exact = torch.full((B, max(e - o for e, o in zip(begin, origin, strict=True)), HV, V), NAN, dtype=torch.float64)
        for b in range(B):
            new[b, : counts[b]] = x_hat[b, spans[b]]
            exact[b, : begin[b] - origin[b]] = x[b, origin[b] : begin[b]]
        tokens = intervals.joined(old, new)
        if expected:
            found = intervals.errors(tokens, exact).permute(2, 0, 1)
            np.testing.assert_allclose(found, expected, rtol=1e-14)
        left, old, count = intervals.left, tokens[intervals.rest], count + len(expected)
    assert count == at.sum() > 20 and left.tolist() == (reached[-1] - begin).tolist()
