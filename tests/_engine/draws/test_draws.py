"""A draw of a box is the slice of the whole draw, by every way there is. (Draws of
DTensors: test_shards.py.)
"""

import math
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsefn import random
from sparsefn._engine.draws import draws, threefry, words
from sparsefn._engine.processes.extent import Extent

KEY = random.key(3)
KINDS = [
    ("uniform", torch.float32),
    ("uniform", torch.float64),
    ("normal", torch.bfloat16),
    ("words", torch.int64),
]


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(
        draw(st.integers(0, n - first)) for n, first in zip(shape, start, strict=True)
    )
    return Extent(shape, start, size, ())


def box_of(whole, extent):
    return whole.reshape(extent.shape)[
        tuple(slice(a, a + n) for a, n in zip(extent.start, extent.size, strict=True))
    ]


@settings(deadline=None, max_examples=50)
@given(boxes(), st.sampled_from(KINDS))
def test_a_box_is_a_slice_of_the_whole(extent, kind):
    n = math.prod(extent.size)
    whole = threefry.draw(KEY, None, extent.numel, *kind)
    want = box_of(whole, extent).reshape(-1)
    assert torch.equal(threefry.draw(KEY, extent, n, *kind), want)
    # by an index of the box's size
    hidden = torch.vmap(lambda key: threefry.draw(key, extent, n, *kind))(KEY[None])
    assert torch.equal(hidden[0], want)


@settings(deadline=None, max_examples=50)
@given(boxes())
def test_coins_of_a_box(extent):
    n = math.prod(extent.size)
    chances = random.uniform(random.key(1), extent.shape)
    want = box_of(random.bernoulli(KEY, chances), extent).reshape(-1)
    mine = box_of(chances, extent)
    assert torch.equal(draws.flips(KEY, mine.contiguous(), extent, n), want)
    assert torch.equal(draws.flips(KEY, mine, extent, n), want)
    hidden = torch.vmap(lambda p: draws.flips(KEY, p, extent, n))(mine[None])
    assert torch.equal(hidden[0], want)


@pytest.mark.parametrize(
    "extent",
    [Extent((50, 30), (7, 0), (40, 30), ()), Extent((50, 30), (3, 5), (44, 21), ())],
)
def test_boxes_of_many_blocks(monkeypatch, extent):
    monkeypatch.setattr(words, "BLOCK", 64)
    whole = random.uniform(KEY, extent.shape)
    assert torch.equal(
        threefry.draw(KEY, extent, math.prod(extent.size), "uniform", torch.float32),
        box_of(whole, extent).reshape(-1),
    )
    keys = random.split(KEY, 3)
    many = threefry.draw(keys, extent, math.prod(extent.size), "uniform", torch.float32)
    assert torch.equal(
        many[1],
        threefry.draw(
            keys[1], extent, math.prod(extent.size), "uniform", torch.float32
        ),
    )


def test_far_boxes():
    # Beyond 2^32 elements the counter has two words.
    extent = Extent((1 << 20, 1 << 20), (1 << 19, 5), (2, 7), ())
    index = torch.arange(2)[:, None] * (1 << 20) + (1 << 39) + torch.arange(5, 12)
    assert torch.equal(
        threefry.draw(KEY, extent, 14, "uniform", torch.float32),
        random.uniform(KEY, (2, 7), index=index).reshape(-1),
    )


@pytest.mark.parametrize(
    "extent",
    [
        Extent(
            ((1 << 16) + 1, (1 << 16) - 1), (1 << 16, 9), (1, 65526), ()
        ),  # the last places below 2^32
        Extent(
            (1 << 16, 1 << 16), ((1 << 16) - 3, 1 << 15), (3, 1 << 15), ()
        ),  # 2^32 of them
        Extent((3, 1 << 32), (0, (1 << 32) - 5000), (2, 5000), ()),  # before and after
        Extent((1, 1, (1 << 32) + 4100), (0, 0, (1 << 32) - 4100), (1, 1, 8200), ()),
    ],
)
def test_boxes_about_two_to_the_32(extent):
    n = math.prod(extent.size)
    index = extent.places(torch.arange(n))
    assert torch.equal(
        threefry.draw(KEY, extent, n, "normal", torch.float64),
        random.normal(KEY, (n,), torch.float64, index=index),
    )


@pytest.mark.parametrize("n", [1 << 15, 1 << 18, 1 << 20])
def test_a_shard_takes_no_more_memory_than_a_leaf_of_its_size(n):
    extents = [
        Extent((2 * n,), (n,), (n,), ()),
        Extent((64, n // 8), (0, n // 32), (64, n // 64), ()),
    ]
    peaks = []
    for index in (None, *extents):
        tracemalloc.start()
        try:
            threefry.draw(KEY, index, n, "uniform", torch.float32)
            peaks.append(tracemalloc.get_traced_memory()[1] / n)
        finally:
            tracemalloc.stop()
    assert max(peaks[1:]) < 1.05 * peaks[0], peaks


@pytest.mark.parametrize("name", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_like_a_plain_leaf(name, dtype):
    like, of_shape = getattr(random, name + "_like"), getattr(random, name)
    leaf = torch.zeros(3, 4, dtype=torch.float16)
    assert torch.equal(like(KEY, leaf, dtype), of_shape(KEY, (3, 4), dtype))
    keys = random.split(KEY, 2)
    assert torch.equal(like(keys, leaf, dtype), of_shape(keys, (3, 4), dtype))
    with pytest.raises(
        TypeError,
        match="expected dtype float16, bfloat16, float32 or float64, got torch.int64",
    ):
        like(KEY, leaf, torch.int64)
