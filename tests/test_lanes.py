"""The best of each row in memory, against the integers of `ranks`."""

import numpy as np
import pytest
import torch

from sparsefn import arrays, lanes, parts, ranks

KINDS = {
    "continuous": lambda x: x,
    "ties": lambda x: x.round(),
    "zeros": lambda x: torch.where(x > 1.0, x, 0.0),
    "signed zeros": lambda x: torch.where(x > 0, -0.0, 0.0),
    "equal": lambda x: torch.ones_like(x),
    "NaN": lambda x: torch.where(x > 0.3, torch.nan, x),
    "-NaN and -inf": lambda x: torch.where(x > 0.3, -torch.nan, torch.where(x < -0.3, -torch.inf, x)),
}
SHAPES = [(1, 1), (4, 1), (3, 7), (300, 40), (2, 9000), (0, 5), (5, 0), (3 * arrays.BLOCK // 1000, 1000)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_integers(shape, kind):
    rows, width = shape
    x = KINDS[kind](torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    flags = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1)) > 0.4
    own = torch.arange(rows) % (width + 2) - 1
    for absolute, (allow, deny) in ((False, (None, None)), (True, (flags[0], None)), (False, (flags[0], flags[1]))):
        open_ = (flags[0] if allow is not None else torch.ones(shape) > 0) & (
            flags[1] == 0 if deny is not None else True
        )
        keys = ranks.rank_keys(x.abs() if absolute else x, open_)
        for counts in (own, torch.full((rows,), width // 3), torch.full((rows,), width + 1), torch.zeros(rows).long()):
            at = parts.part(x, allow, deny)
            lanes.select_rows(at, counts.numpy(), absolute)
            assert np.array_equal(at.out, ranks.top(keys, counts).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype):
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    at = parts.part(x)
    lanes.select_rows(at, np.full(50, 10), absolute=True)
    assert np.array_equal(at.out, ranks.top(ranks.rank_keys(x.abs()), 10).numpy())


def test_rows_need_not_lie_end_to_end():
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x[::2, 3:], x.flip(0)):
        at = parts.part(view)
        lanes.select_rows(at, np.full(len(view), 5))
        assert np.array_equal(at.out, ranks.top(ranks.rank_keys(view), 5).numpy())


def test_the_scores_are_not_written_to():
    x = torch.tensor([[1.0, -0.0, torch.nan], [2.0, 3.0, -1.0]])
    before = x.clone()
    lanes.select_rows(parts.part(x, x > 0), np.array([1, 2]), absolute=True)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert x[0, 1].signbit()
