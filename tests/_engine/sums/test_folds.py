"""Arrays joined by halves."""

import itertools

import numpy as np
import pytest
import torch

from sparsefn._engine.numbers.numbers import folded
from sparsefn._engine.sums import folds
from sparsefn._engine.sums.folds import BlockFold, fold, slabs

ADD = BlockFold(None, np.add, np.float32)
SHAPES = [
    ((3, 3), (5, 7)),
    ((9,), (40,)),
    ((4, 4), (6, 6)),
    ((15, 8), (3, 2)),
    ((8, 15), (3, 2)),
    ((2, 1, 3), (4, 5)),
    ((700,), (3,)),
    ((37, 16), (5,)),
    ((1, 1), (8, 2)),
    ((130, 2, 2), (2, 3)),
    ((513,), ()),
    ((2, 3, 4), (70,)),
]


def arrays(shape):
    """The same numbers in every order of memory, with gaps, backwards and expanded."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    for order in list(itertools.permutations(range(x.ndim)))[::7]:
        back = np.argsort(order)
        yield x, np.ascontiguousarray(x.transpose(order)).transpose(back)
    yield x, np.stack([x, -x], -1)[..., 0]
    wide = np.broadcast_to(x[..., :1], x.shape)
    yield wide, wide


@pytest.mark.deep
@pytest.mark.parametrize(("box", "grid"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("block", "tall", "short"),
    [(1 << 16, 128, 64), (1, 2, 1), (64, 4, 3), (500, 16, 8)],
    ids=str,
)
def test_every_layout_is_folded_as_a_tensor_is(
    box, grid, block, tall, short, monkeypatch
):
    for name, value in (("_BLOCK", block), ("_TALL", tall), ("_SHORT", short)):
        monkeypatch.setattr(folds, name, value)
    for plain, x in arrays((*box, *grid)):
        want = folded(torch.from_numpy(np.array(plain)).reshape(-1, *grid)).numpy()
        before = x.copy()
        for work in (ADD, ADD._replace(lift=np.positive)):
            got = fold(x, len(box), work)
            assert (
                got.dtype == np.float32
                and got.flags.c_contiguous
                and not np.shares_memory(got, x)
            )
            assert np.array_equal(got, want)
        assert np.array_equal(x, before)


@pytest.mark.parametrize("grid", [(), (7,), (3, 5), (2, 3, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_slabs_cover_a_grid_once(grid, most):
    seen = np.zeros(grid, int)
    for at in slabs(grid, most):
        assert seen[at].size <= most
        seen[at] += 1
    assert (seen == 1).all()
