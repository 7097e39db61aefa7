"""Places of a box in the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefn._engine.processes.extent import Extent


@st.composite
def boxes(draw: st.DrawFn) -> Extent:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(
        draw(st.integers(0, n - first)) for n, first in zip(shape, start, strict=True)
    )
    return Extent(shape, start, size, ())


@given(boxes())
def test_places_are_those_of_a_slice(extent: Extent) -> None:
    whole = np.arange(extent.numel).reshape(extent.shape)
    box = whole[
        tuple(slice(a, a + n) for a, n in zip(extent.start, extent.size, strict=True))
    ]
    assert np.array_equal(extent.places(np.arange(box.size)), box.reshape(-1))


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((3, 0), 0), ((2, 3), 6)])
def test_numel_is_that_of_the_whole(shape: tuple[int, ...], numel: int) -> None:
    assert Extent(shape, shape, (0,) * len(shape), ()).numel == numel
