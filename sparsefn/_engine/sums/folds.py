"""Arrays joined by halves, as `numbers.folded` joins tensors, in small blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.transforms import Array

# elements at a time: they are added in place, beside a copy of them
_BLOCK = BLOCK // 2
_TALL = 128  # elements of a unit in one block, where units lie side by side in memory
# entries: rows of fewer are added across units, as a loop of its own for each costs
# more
_SHORT = 64


class BlockFold(NamedTuple):
    """The function of the elements of a block, if there is one, and the function that
    joins two of them.
    """

    lift: Callable[[Array], Array] | None
    join: np.ufunc
    dtype: DTypeLike


def fold(x: Array, rank: int, work: BlockFold) -> Array:
    """The entries along the first `rank` dimensions, row-major, joined into one.

    >>> import numpy as np
    >>> from sparsefn._engine.sums.folds import BlockFold, fold
    >>> fold(np.arange(6.0).reshape(3, 2), 1, BlockFold(None, np.add, np.float64))
    array([6., 9.])

    Returns a new array of the other dimensions.
    """
    x, rank = _without_ones(x, rank)
    size = math.prod(x.shape[:rank])
    grid = x.shape[rank:]
    if x.size <= _BLOCK:
        return np.array(_block(x, rank, work), order="C")
    tall = _cut(x, rank, size)
    if tall:
        some = np.concatenate([fold(part, 1, work) for part in tall])
        return fold(some, rank, work._replace(lift=None))
    out: Array = np.empty(grid, work.dtype)
    # as the units lie in memory
    along = sorted(range(len(grid)), key=lambda d: -abs(x.strides[rank + d]))
    x = x.transpose(*range(rank), *(rank + d for d in along))
    target = out.transpose(along)
    places = list(slabs(target.shape, max(1, _BLOCK // size)))
    elements = (slice(None),) * rank

    def run(share: list[tuple[slice, ...]]) -> None:
        for at in share:
            units = x[(*elements, *at)]
            target[at] = _block(units, rank, work)

    size_of_share = -(-len(places) // torch.get_num_threads())
    starts = range(0, len(places), size_of_share)
    shares = [places[start : start + size_of_share] for start in starts]
    run_jobs(run, shares, x.size)
    return out


def _without_ones(x: Array, rank: int) -> tuple[Array, int]:
    # The array with the first `rank` dimensions squeezed; at least one of them stays.
    ones = [d for d in range(rank) if x.shape[d] == 1]
    if len(ones) == rank:
        ones = ones[1:]
    return x.squeeze(tuple(ones)), rank - len(ones)


def _cut(x: Array, rank: int, size: int) -> list[Array]:
    # Of tall units every `stride`-th element, (elements, units ...): the first steps
    # join these with each other alone.
    first = x.shape[0]
    inner = size // first
    if first <= _TALL or inner & (inner - 1):
        return []
    if size <= _BLOCK and not 0 < _least_stride(x, rank) < x.strides[0]:
        return []
    blocks = -(-first // _TALL)
    stride = 1 << (blocks - 1).bit_length()
    rows, rest = divmod(first, stride)
    whole_rows = x[: rows * stride]
    every: Array = whole_rows.reshape(rows, stride, *x.shape[1:])
    if not rest:
        return [every]
    shape = (rows + 1, rest, *x.shape[1:])
    strides = (stride * x.strides[0], *x.strides)
    with_one_more = as_strided(x, shape, strides)
    return [with_one_more, every[:, rest:]]


def _least_stride(x: Array, rank: int) -> int:
    # Of the dimensions of units: 0 where there is one unit.
    pairs = zip(x.shape[rank:], x.strides[rank:], strict=True)
    return min((stride for n, stride in pairs if n > 1), default=0)


def slabs(grid: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Parts of a grid that cover it, of so many cells or less.

    >>> from sparsefn._engine.sums.folds import slabs
    >>> list(slabs((2, 3), 2))
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None)),
    (slice(1, 2, None), ...
    """
    if not grid:
        yield ()
        return
    along = next(d for d in range(len(grid)) if math.prod(grid[d + 1 :]) <= most)
    step = most // math.prod(grid[along + 1 :])
    parts = [slice(i, i + step) for i in range(0, grid[along], step)]
    for before in itertools.product(*map(range, grid[:along])):
        leading = [slice(i, i + 1) for i in before]
        for part in parts:
            yield (*leading, part)


def _block(x: Array, rank: int, work: BlockFold) -> Array:
    grid = x.shape[rank:]
    own = work.lift is not None
    if work.lift is not None:
        x = work.lift(x)
    while x.ndim > len(grid):
        inner = math.prod(x.shape[1 : x.ndim - len(grid)])
        if inner & (inner - 1):  # halves would cut through the rows of a box
            if not own:
                x = np.array(x, order="C")
            x = x.reshape(-1, *grid)
            own = True
        x = _halved(x, own, work.join)
        own = True
    return x


def _halved(x: Array, own: bool, join: np.ufunc) -> Array:
    """Join the entries of the first dimension.

    The array may be written to where it is `own`.
    """
    in_line = x.strides[0] < _least_stride(x, 1)
    while len(x) > 1:
        half = 1 << (len(x) - 1).bit_length() - 1
        rest = len(x) - half
        if in_line and half < _SHORT and x[0].size >= _SHORT:
            sums: Array = np.empty((half, *x.shape[1:]), x.dtype)
            for i in range(half):
                if i < rest:
                    join(x[i], x[i + half], out=sums[i])
                else:
                    sums[i] = x[i]
            x = sums
            in_line = False
        else:
            if own:
                sums = x[:half]
            else:
                sums = np.empty_like(x[:half])
            join(x[:rest], x[half:], out=sums[:rest])
            if not own:
                sums[rest:] = x[rest:half]
            x = sums
        own = True
    total: Array = x[0]
    return total
