"""Top-k of rows of few units, as N:M patterns have them: a unit's rank is the number of
better units in its row.

Each unit is compared with the next one of its row, then with the next but one, and so
on: passes over whole blocks, with nothing sorted and no layout changed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.selection.entries import Arrays, eligible
from sparsefn._engine.surroundings import Array

# units of a row: there are as many passes, so that wider rows are better partitioned
WIDEST = 32
PAIRED = (
    4  # units of a row: of more, compiled code is slower than the passes over memory
)
_BLOCK = 2 * BLOCK  # scores at a time: they are read in place, and all else is bytes

_Block: TypeAlias = tuple[slice, slice, slice]


def top_by_pairs(keys: Tensor, count: int | Tensor) -> Tensor:
    """The units of the largest keys of each row, by torch operations on pairs of units,
    which a compiler fuses.

    >>> from sparsefn._engine.selection import groups
    >>> groups.top_by_pairs(torch.tensor([[[1], [4], [4], [2]]]), 1).squeeze(2)
    tensor([[False,  True, False, False]])

    Keys are (rows, units, columns); the count is an int, or a tensor that spreads to
    (rows, columns).
    """
    units = keys.unbind(1)
    ranks = [
        torch.full_like(unit, place, dtype=torch.int32)
        for place, unit in enumerate(units)
    ]
    for i, first in enumerate(units):
        for j in range(i + 1, len(units)):
            beaten = (units[j] > first).to(torch.int32)
            ranks[i] = ranks[i] + beaten
            ranks[j] = ranks[j] - beaten
    # compared first: compiled code then stores bytes alone
    return torch.stack([rank < count for rank in ranks], 1)


def top_of_groups(at: Arrays, count: Array) -> None:
    """Write the mask of the best units of each row, or of columns, into `out`.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import groups
    >>> (at,) = entries.arrays(
    ...     [
    ...         entries.Entry(
    ...             torch.tensor([[[1.0], [-4.0], [4.0], [2.0]]]), absolute=True
    ...         )
    ...     ]
    ... )
    >>> groups.top_of_groups(at, np.array(2))
    >>> at.out.reshape(-1)
    array([False,  True,  True, False])

    Arrays are (rows, units, columns) of at most 255 units; the count has any values, of
    shape () or (1,) for all, or (rows * columns,). The order is that of
    `reference.top_of_rows`.
    """
    height, units, width = at.out.shape
    if not at.out.size:
        return
    # one number is compared much faster
    if count.size == 1 or count.min() == count.max():
        limit: int | Array = min(max(int(count.flat[0]), 0), units)
    else:
        own = count.clip(0, units).astype(np.uint8).reshape(height, 1, width)
        limit = np.broadcast_to(own, at.out.shape)
    words, infinity = _words(at)
    allow = eligible(at.allow, at.deny)

    def select(share: list[_Block]) -> None:
        shape = at.out[share[0]].shape
        buffers: Array = np.empty(
            (2, max(at.out[block].size for block in share)), words.dtype
        )
        flags: Array = np.empty(buffers.shape, np.uint8)
        place, fits = _places(shape)
        for block in share:
            out = at.out[block]
            open_ = None if allow is None else allow[block]
            if out.shape != shape:
                shape = out.shape
                place, fits = _places(shape)
            keys = _keys(words[block], infinity, at.absolute, open_, buffers)
            rank, beaten = flags[:, : keys.size]
            rank[:] = place.reshape(-1)  # as if each unit lost to all before it
            for lag, inside in enumerate(fits, 1):
                end = keys.size - lag * out.shape[2]
                worse = beaten[:end]
                np.greater(keys[-end:], keys[:end], out=worse.view(np.bool_))
                # the last units of a row meet those of the next
                np.bitwise_and(worse, inside[:end], out=worse)
                np.add(rank[:end], worse, out=rank[:end])
                np.subtract(rank[-end:], worse, out=rank[-end:])
            np.less(
                rank.reshape(out.shape),
                limit if isinstance(limit, int) else limit[block],
                out=out,
            )
            if open_ is not None:
                np.bitwise_and(out, open_, out=out)

    blocks = _blocks(height, units, width)
    step = -(-len(blocks) // torch.get_num_threads())
    run_jobs(
        select, [blocks[i : i + step] for i in range(0, len(blocks), step)], at.out.size
    )


def _words(at: Arrays) -> tuple[Array, int]:
    # The scores as signed words of their size, and inf as one.
    if at.wide is not None:
        word = np.dtype(np.int32 if at.wide.itemsize == 4 else np.int64)
        return at.wide.view(word), int(np.array(np.inf, at.wide.dtype).view(word))
    assert at.narrow is not None
    return at.narrow.view(
        torch.int16
    ).numpy(), 0x7C00 if at.narrow.dtype == torch.float16 else 0x7F80


def _blocks(height: int, units: int, width: int) -> list[_Block]:
    # Some rows; where one row has very many columns, some of its columns.
    wide = min(width, max(1, _BLOCK // units))
    high = max(1, _BLOCK // (units * wide)) if wide == width else 1
    starts = [(i, j) for i in range(0, height, high) for j in range(0, width, wide)]
    return [
        (slice(i, min(i + high, height)), slice(None), slice(j, min(j + wide, width)))
        for i, j in starts
    ]


def _places(shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    # The place of each unit in its row, and for each lag, which units have one so far
    # behind them.
    place: Array = np.empty(shape, np.uint8)
    place[:] = np.arange(shape[1], dtype=np.uint8)[:, None]
    flat = place.reshape(-1)
    return place, [(flat < shape[1] - lag).view(np.uint8) for lag in range(1, shape[1])]


def _keys(
    words: Array, infinity: int, absolute: bool, allow: Array | None, buffers: Array
) -> Array:
    # Integers in the order of `reference.rank_keys`. The words of floats above zero
    # have that order already.
    bits = 8 * words.itemsize
    least = -1 << (bits - 1)
    keys: Array = buffers[0, : words.size]
    spare: Array = buffers[1, : words.size]
    if absolute:
        np.bitwise_and(words, ~least, out=keys.reshape(words.shape))
    elif words.flags.c_contiguous:
        keys = words.reshape(-1)
    else:
        keys.reshape(words.shape)[:] = words
    if keys.min() < 0:
        np.right_shift(keys, bits - 1, out=spare)
        sizes = np.bitwise_and(keys, ~least, out=buffers[0, : keys.size])
        nan = sizes > infinity if sizes.max() > infinity else None
        np.bitwise_xor(sizes, spare, out=sizes)
        keys = np.subtract(sizes, spare, out=sizes)
    else:
        nan = keys > infinity if keys.max() > infinity else None
    if nan is not None:
        keys = np.where(nan, least + 1, keys)
    if allow is not None:
        bound = (
            spare  # the largest integer where a unit is eligible, the least where not
        )
        bound.reshape(words.shape)[:] = allow
        np.subtract(bound, 1, out=bound)
        np.bitwise_xor(bound, ~least, out=bound)
        keys = np.minimum(keys, bound, out=buffers[0, : keys.size])
    return keys
