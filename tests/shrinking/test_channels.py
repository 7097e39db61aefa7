"""CoupledChannels: union-find with products; joins are sufficient, and what stays has a
reason.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn.shrinking.channels import (
    CoupledChannels,
    Rank,
    factors_of,
    kinds_of,
    preferred_groups,
    product,
)


def kept(channels, label, alive):
    return alive[channels.resolve(label)].all(1).tolist()


def test_new_labels_have_a_channel_for_each_index():
    channels = CoupledChannels()
    assert channels.new(2).tolist() == [[1], [2]]
    assert channels.new(3).tolist() == [[3], [4], [5]]
    assert channels.count == 6


def test_tables_grow():
    channels = CoupledChannels()
    label = channels.new(10_000)
    channels.join(label, label[::-1], "joined")
    assert len(np.unique(channels.resolve(label))) == 5_000


def test_joined_labels_are_one():
    channels = CoupledChannels()
    a, b, c = channels.new(3), channels.new(3), channels.new(2)
    channels.join(a, b, "joined")
    channels.join(b[1:], c, "joined")
    assert channels.resolve(c).tolist() == channels.resolve(a)[1:].tolist()
    assert (channels.find(a) == channels.find(b)).all()


def test_a_join_with_what_stays_freezes_the_rest():
    for one, two in ((None, 0), (0, None)):
        channels = CoupledChannels()
        label = channels.new(2)
        channels.join(
            label if one == 0 else None, label if two == 0 else None, "no label"
        )
        assert channels.free(label) is None
        assert [channels.reasons[i] for i in channels.reason[label].ravel()] == [
            "no label"
        ] * 2
    CoupledChannels().join(None, None, "joined")


def test_the_first_reason_stays_and_what_is_joined_has_the_reason_of_the_join():
    channels = CoupledChannels()
    a, b = channels.new(3), channels.new(3)
    channels.freeze(b, "it is summed", np.array([False, True, False]))
    channels.freeze(b, "it is an output", np.array([False, True, True]))
    channels.join(a, b, "joined")
    assert [channels.reasons[i] for i in channels.reason[b].ravel()] == [
        "",
        "it is summed",
        "it is an output",
    ]
    assert [channels.reasons[i] for i in channels.reason[a].ravel()] == [
        "",
        "joined",
        "joined",
    ]
    assert channels.free(a).tolist() == [[1], [0], [0]]
    channels.freeze(None, "nothing")
    assert "nothing" not in channels.reasons


def test_a_joined_channel_is_the_product_of_its_factors():
    channels = CoupledChannels()
    whole, heads, widths = (
        channels.new(6),
        channels.new(2, rank=1),
        channels.new(3, rank=2),
    )
    channels.join(whole, product(heads, 2, widths, 3), "joined")
    alive = np.ones(channels.count, bool)
    alive[heads[0]] = alive[widths[2]] = False
    assert kept(channels, whole, alive) == [False] * 3 + [True, True, False]


def test_products_of_one_label_with_itself_hold_each_channel_once():
    channels = CoupledChannels()
    a = channels.new(2)
    assert channels.resolve(np.concatenate([a, a, channels.new(2)], 1)).tolist() == [
        [1, 3],
        [2, 4],
    ]


def test_what_one_side_has_more_stays():
    channels = CoupledChannels()
    a, b = channels.new(2), channels.new(2)
    channels.join(a, np.concatenate([a, b], 1), "further factors")
    assert channels.free(b) is None and channels.free(a) is not None
    assert channels.reasons[channels.reason[b[0, 0]]] == "further factors"


def test_two_divisions_that_do_not_fit_stay():
    channels = CoupledChannels()
    a, b, c, d = channels.new(2), channels.new(2), channels.new(2), channels.new(2)
    e = channels.new(2)
    channels.join(np.concatenate([a, b], 1), np.concatenate([c, d, e], 1), "joined")
    assert channels.free(np.concatenate([a, b, c, d, e], 1)) is None
    assert (
        channels.reasons[channels.reason[a[0, 0]]] == "joined, and divided in two ways"
    )


def test_no_channel_becomes_its_own_factor():
    channels = CoupledChannels()
    a, b = channels.new(2), channels.new(2)
    channels.join(a, np.concatenate([a[::-1], b], 1), "turned")
    channels.resolve(a)  # ends
    assert channels.find(a).shape == (2, 1)


def test_ranks_and_reasons_of_the_united():
    channels = CoupledChannels()
    a, b = channels.new(2, rank=2), channels.new(2)
    channels.join(b, a, "joined")
    assert channels.rank[channels.find(a)].ravel().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("a", "b"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_product(a, b):
    one, two = np.array([[1], [2]]), np.array([[3], [4], [5]])
    made = product(one if a else None, 2, two if b else None, 3)
    if not a and not b:
        assert made is None
        return
    rows = [[i + 1, j + 3] for i in range(2) for j in range(3)]
    assert made.tolist() == [row[0 if a else 1 :][: 1 + (a and b)] for row in rows]


@st.composite
def joins(draw):
    """Rows of up to three of twelve channels, in pairs."""
    row = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    return draw(st.lists(st.tuples(row, row), min_size=1, max_size=6))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(joins(), st.sets(st.integers(1, 12)), st.data())
def test_whatever_goes_both_sides_of_each_join_agree(pairs, frozen, data):
    channels = CoupledChannels()
    channels.new(12)
    sides = []
    for pair in pairs:
        a, b = (np.array([row + [0] * (3 - len(row))]) for row in pair)
        sides.append((a, b))
        channels.join(a, b, "joined")
    for i in frozen:
        channels.freeze(np.array([[i]]), "frozen")
    alive = np.array(
        data.draw(
            st.lists(st.booleans(), min_size=channels.count, max_size=channels.count)
        )
    )
    alive |= channels.reason[: channels.count] > 0
    for a, b in sides:
        assert kept(channels, a, alive) == kept(channels, b, alive)
    for i in frozen:
        assert kept(channels, np.array([[i]]), alive) == [True]


def test_groups_are_channels_of_one_kind_and_one_factor_of_a_product_is_preferred():
    channels = CoupledChannels()
    rows, inputs = channels.new(6), channels.new(3)
    heads, widths = channels.new(2, Rank.HEADS), channels.new(3, Rank.WIDTHS)
    channels.join(rows, product(heads, 2, widths, 3), "")
    channels.freeze(inputs, "it is an input", np.array([True, False, False]))
    labels = [channels.resolve(rows), channels.resolve(inputs)]
    kinds = kinds_of(channels, labels)
    assert [kinds[own].ravel().tolist() for own in (heads, widths, inputs)] == [
        [2, 2],
        [3, 3, 3],
        [0, 1, 1],
    ]
    factors = factors_of(labels, kinds)
    assert dict(factors) == {1: {2}, 2: {1}}
    units = [np.nonzero(kinds == kind)[0] for kind in (1, 2, 3)]
    assert preferred_groups(channels, units, [1.0, 1.0, 9.0], factors) == {0, 1}
