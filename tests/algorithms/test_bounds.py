"""Bounds of the leaves in one competition, against a choice by hand."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsefn as sf
from sparsefn.algorithms.bounds import within_bounds
from sparsefn.engine.selection.dispatch import Entry


def by_hand(scores, limits, held, count):
    """One unit after the other: the least of every leaf first, then the best that its
    leaf still takes.
    """
    order = sorted(
        itertools.chain(
            *([(-s, i, j) for j, s in enumerate(row)] for i, row in enumerate(scores))
        )
    )
    room = [
        [low - had, high - had] for (low, high), had in zip(limits, held, strict=True)
    ]
    first, taken = [], []
    for entry in order:
        if room[entry[1]][1] > 0:
            room[entry[1]][1] -= 1
            taken.append(entry)
    for entry in taken:
        if room[entry[1]][0] > 0:
            room[entry[1]][0] -= 1
            first.append(entry)
    first.sort(key=lambda entry: entry[1:])
    rest = [entry for entry in taken if entry not in first]
    return {entry[1:] for entry in [*first, *rest][: max(count, 0)]}


@given(st.data())
def test_leaves_keep_what_their_bounds_allow(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    scores = [
        data.draw(
            st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=n, max_size=n)
        )
        for n in sizes
    ]
    floor, ceiling = data.draw(
        st.sampled_from([(0.0, 1.0), (0.25, 1.0), (0.0, 0.5), (0.25, 0.75)])
    )
    distribution = sf.budgets.global_(floor=floor, ceiling=ceiling)
    named = {str(i): n for i, n in enumerate(sizes)}
    limits = list(
        distribution.bounds(
            {path: (n,) for path, n in named.items()}, torch.zeros(())
        ).values()
    )
    count = data.draw(st.integers(sum(low for low, _ in limits), sum(sizes)))
    won = within_bounds(
        distribution,
        named,
        [Entry(torch.tensor([row])) for row in scores],
        count,
        [None] * len(sizes),
    )
    found = {
        (i, j)
        for i, mask in enumerate(won)
        for j, kept in enumerate(mask[0].tolist())
        if kept
    }
    assert found == by_hand(scores, limits, [0] * len(sizes), count)


@pytest.mark.parametrize(
    "held", [[None, None], [torch.tensor([[True, False, False, False]])] * 2]
)
def test_units_held_already_count_towards_the_bounds(held):
    entries = [Entry(torch.arange(4.0)[None], deny=flags) for flags in held]
    won = within_bounds(
        sf.budgets.global_(floor=0.5), {"a": 4, "b": 4}, entries, 2, held
    )
    assert sum(int(mask.sum()) for mask in won) == 2
    assert [int(mask.sum()) for mask in won] == (
        [1, 1] if held[0] is not None else [2, 0]
    )
