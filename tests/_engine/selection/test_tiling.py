"""Square tiles: the best pattern of all, or a good one, and always a valid one."""

import itertools
import math

import pytest
import torch

from sparsefn._engine.selection.entries import Entry
from sparsefn._engine.selection.tiling import patterns_of, tiles


def draw(count, m, seed=0, dtype=torch.float32):
    return torch.randn(
        count, m * m, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )


def valid(mask, n, m):
    square = mask.reshape(-1, m, m)
    return bool((square.sum(1) == n).all() and (square.sum(2) == n).all())


def by_search(scores, n, m):
    """The first of the best patterns, in Python: fewest NaN, most inf, fewest -inf,
    largest exact sum.
    """
    best, mask = None, None
    for chosen in itertools.product(itertools.combinations(range(m), n), repeat=m):
        if any(sum(j in row for row in chosen) != n for j in range(m)):
            continue
        values = [float(scores[i * m + j]) for i, row in enumerate(chosen) for j in row]
        rank = (
            -sum(map(math.isnan, values)),
            values.count(math.inf),
            -values.count(-math.inf),
            math.fsum(x for x in values if math.isfinite(x)),
        )
        if best is None or rank > best:
            best, mask = rank, [j in row for row in chosen for j in range(m)]
    return mask


@pytest.mark.parametrize(
    ("n", "m"), [(0, 2), (1, 2), (1, 3), (2, 3), (3, 3), (1, 4), (2, 4), (3, 4)]
)
def test_it_is_the_first_of_the_best(n, m):
    scores = draw(6, m)
    scores[1] = scores[1].sign()  # ties
    scores[2] = 0.0
    scores[3, ::3] = math.nan
    scores[4, ::4], scores[4, 1::5] = math.inf, -math.inf
    scores[5] = math.nan
    mask = tiles(Entry(scores), n, m)
    assert valid(mask, n, m)
    assert mask.tolist() == [by_search(row, n, m) for row in scores]


@pytest.mark.parametrize(("n", "m"), [(2, 4), (2, 5), (1, 6), (3, 8)])
def test_what_is_kept_is_the_best_of_itself(n, m):
    scores = draw(20, m)
    mask = tiles(Entry(scores), n, m)
    assert torch.equal(tiles(Entry(scores, allow=mask), n, m), mask)
    assert torch.equal(
        tiles(Entry(-scores.abs(), absolute=True), n, m),
        tiles(Entry(scores.abs()), n, m),
    )
    few = tiles(Entry(scores, allow=mask, deny=scores > 1), n, m)
    assert not (few & ~(mask & (scores <= 1))).any()


@pytest.mark.parametrize(("n", "m"), [(1, 8), (4, 8), (7, 8), (2, 6), (3, 7), (5, 16)])
def test_large_tiles_are_valid_and_no_exchange_of_two_rows_gains(n, m):
    scores = draw(30, m, dtype=torch.float64)
    scores[1] = 0.0
    mask = tiles(Entry(scores), n, m)
    assert valid(mask, n, m)
    kept, worth = mask.reshape(-1, m, m), scores.reshape(-1, m, m)
    for i, k in itertools.combinations(range(m), 2):
        more = worth[:, k] - worth[:, i]
        give = torch.where(kept[:, i] & ~kept[:, k], more, -math.inf).amax(1)
        take = torch.where(kept[:, k] & ~kept[:, i], -more, -math.inf).amax(1)
        assert not (give + take > 0).any()


def test_large_tiles_avoid_nan():
    scores = draw(8, 8)
    scores[:, 0] = math.nan
    mask = tiles(Entry(scores), 4, 8)
    assert valid(mask, 4, 8) and not mask[:, 0].any()


def test_greedy_choices_are_near_the_best_of_six():
    # Against all 67,950 patterns it would take long; against one in a row of 6, of
    # which all are tried.
    from sparsefn._engine.selection.tiling import _by_swaps

    scores = draw(200, 6).abs().double()
    best, near = tiles(Entry(scores), 1, 6), _by_swaps(scores, 1, 6)
    shares = (scores * near).sum(1) / (scores * best).sum(1)
    assert shares.max() <= 1.0 and shares.mean() > 0.97 and shares.min() > 0.8


def test_counts_of_patterns():
    assert [
        len(patterns_of(*pair)) for pair in ((1, 4), (2, 4), (2, 5), (5, 6), (0, 3))
    ] == [24, 90, 2040, 720, 1]
    assert patterns_of(2, 6) is None and patterns_of(1, 7) is None


@pytest.mark.parametrize(("n", "m"), [(2, 4), (2, 8)])
def test_batched_compiled_and_split_runs_have_the_same_bits(n, m, monkeypatch):
    scores = draw(12, m)
    scores[0, 1] = math.nan
    expected = tiles(Entry(scores), n, m)
    batched = torch.vmap(lambda rows: tiles(Entry(rows), n, m))(
        scores.reshape(3, 4, -1)
    )
    assert torch.equal(batched.reshape(12, -1), expected)
    compiled = torch.compile(
        lambda rows: tiles(Entry(rows), n, m), backend="eager", fullgraph=True
    )
    if m == 4:
        assert torch.equal(compiled(scores), expected)
    monkeypatch.setattr("sparsefn._engine.selection.tiling._AT_A_TIME", 1)
    assert torch.equal(tiles(Entry(scores), n, m), expected)
    assert tiles(Entry(scores[:0]), n, m).shape == (0, m * m)
