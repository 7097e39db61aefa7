"""The oracle: slow counting that does not share code with the library."""

import math

import pytest

import sparsefn as sf
from sparsefn.testing import oracle


def test_units_and_groups_of_partial_blocks():
    layout = oracle.computed_layout(sf.patterns.block((2, 2)))
    assert oracle.unit_groups(layout, (3, 3)) == [[[0, 1, 3, 4], [2, 5], [6, 7], [8]]]
    assert oracle.unit_grid(layout, (3, 3)) == (2, 2)
    assert not oracle.computed_layout(sf.patterns.row_balanced()).ungrouped


def test_scores_of_units():
    layout = oracle.computed_layout(sf.patterns.channel(0, norm=2))
    assert oracle.score(layout, {"w": [3.0, 4.0]}, ("w", [0, 1])) == 5.0


@pytest.mark.parametrize(
    ("scores", "eligible", "count", "won"),
    [
        ([1.0, 3.0, 3.0, 2.0], [True] * 4, 1, {1}),
        ([math.nan, -math.inf], [True] * 2, 1, {1}),
        ([0.0, -0.0, 1.0], [True, True, False], 1, {0}),
        ([1.0], [False], 1, set()),
    ],
)
def test_winners(scores, eligible, count, won):
    assert oracle.best_of(scores, eligible, count) == won


def test_counts():
    assert [oracle.half_to_even(0.5, n) for n in (1, 3, 5)] == [0, 2, 2]
    assert oracle.even_shares(7, 3) == [3, 2, 2]


def test_a_pattern_that_takes_no_shape_is_refused():
    impossible = sf.patterns.nm(1, 997)
    with pytest.raises(
        ValueError,
        match=r"no leaf shape was found that nm\(1, 997, axis=-1\) takes; give a "
        r"Layout with its Form",
    ):
        oracle.computed_layout(impossible)
