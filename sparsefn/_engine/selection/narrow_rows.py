"""Top-k of rows of few units, as N:M patterns have them: a unit's rank is the number of
better units in its row.

That is, of unit i, the units j < i with key_j >= key_i and the units j > i with
key_j > key_i. Ranks start at i, as if each unit lost to all before it. Then each later
unit that is better moves one rank from itself to i. Each unit is compared with the next
one of its row, then with the next but one, and so on: passes over whole blocks, with
nothing sorted and no layout changed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.selection.entries import Arrays, eligible
from sparsefn._engine.transforms import Array

# units of a row: there are as many passes, so that wider rows are better partitioned
WIDEST = 32
# units of a row: of more, compiled code is slower than the passes over memory
PAIRED = 4
_BLOCK = 2 * BLOCK  # scores at a time: they are read in place, and all else is bytes

_Block: TypeAlias = tuple[slice, slice, slice]


def top_by_pairs(keys: Tensor, count: int | Tensor) -> Tensor:
    """The units of the largest keys of each row, by torch operations on pairs of units,
    which a compiler fuses.

    >>> from sparsefn._engine.selection import narrow_rows
    >>> narrow_rows.top_by_pairs(torch.tensor([[[1], [4], [4], [2]]]), 1).squeeze(2)
    tensor([[False,  True, False, False]])

    Keys are (rows, units, columns); the count is an int, or a tensor that spreads to
    (rows, columns).
    """
    units = keys.unbind(1)
    ranks = []
    for i, unit in enumerate(units):
        ranks.append(torch.full_like(unit, i, dtype=torch.int32))
    for i, unit in enumerate(units):
        for j in range(i + 1, len(units)):
            later_is_better = (units[j] > unit).to(torch.int32)
            ranks[i] = ranks[i] + later_is_better
            ranks[j] = ranks[j] - later_is_better
    # compared first: compiled code then stores bytes alone
    return torch.stack([rank < count for rank in ranks], 1)


def top_of_groups(at: Arrays, count: Array) -> None:
    """Write the mask of the best units of each row, or of columns, into `out`.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import narrow_rows
    >>> (at,) = entries.arrays(
    ...     [
    ...         entries.Entry(
    ...             torch.tensor([[[1.0], [-4.0], [4.0], [2.0]]]), absolute=True
    ...         )
    ...     ]
    ... )
    >>> narrow_rows.top_of_groups(at, np.array(2))
    >>> at.out.reshape(-1)
    array([False,  True,  True, False])

    Arrays are (rows, units, columns) of at most 255 units; the count has any values, of
    shape () or (1,) for all, or (rows * columns,). Units rank as in
    `reference.top_of_rows`.
    """
    height, units, columns = at.out.shape
    if not at.out.size:
        return
    # one number is compared much faster
    if count.size == 1 or count.min() == count.max():
        limit: int | Array = min(max(int(count.flat[0]), 0), units)
    else:
        own = count.clip(0, units).astype(np.uint8).reshape(height, 1, columns)
        limit = np.broadcast_to(own, at.out.shape)
    words, infinity = _words(at)
    allow = eligible(at.allow, at.deny)

    def select(share: list[_Block]) -> None:
        shape = at.out[share[0]].shape
        buffers: Array = np.empty(
            (2, max(at.out[block].size for block in share)), words.dtype
        )
        flags: Array = np.empty(buffers.shape, np.uint8)
        place, has_later = _places(shape)
        for block in share:
            out = at.out[block]
            open_ = None if allow is None else allow[block]
            if out.shape != shape:
                shape = out.shape
                place, has_later = _places(shape)
            keys = _keys(words[block], infinity, at.absolute, open_, buffers)
            rank, is_better = flags[:, : keys.size]
            rank[:] = place
            for lag, fits in enumerate(has_later, 1):
                distance = lag * shape[2]
                end = keys.size - distance
                later = keys[distance:]
                later_is_better = is_better[:end]
                np.greater(later, keys[:end], out=later_is_better.view(np.bool_))
                # the last units of a row meet the first units of the next
                np.bitwise_and(later_is_better, fits[:end], out=later_is_better)
                np.add(rank[:end], later_is_better, out=rank[:end])
                np.subtract(rank[distance:], later_is_better, out=rank[distance:])
            own_limit = limit if isinstance(limit, int) else limit[block]
            np.less(rank.reshape(shape), own_limit, out=out)
            if open_ is not None:
                np.bitwise_and(out, open_, out=out)

    blocks = _blocks(height, units, columns)
    step = -(-len(blocks) // torch.get_num_threads())
    shares = [blocks[i : i + step] for i in range(0, len(blocks), step)]
    run_jobs(select, shares, at.out.size)


def _words(at: Arrays) -> tuple[Array, int]:
    # The scores as signed words of their size, and inf as one.
    if at.wide is not None:
        word = np.dtype(np.int32 if at.wide.itemsize == 4 else np.int64)
        return at.wide.view(word), int(np.array(np.inf, at.wide.dtype).view(word))
    assert at.narrow is not None
    words = at.narrow.view(torch.int16).numpy()
    return words, 0x7C00 if at.narrow.dtype == torch.float16 else 0x7F80


def _blocks(height: int, units: int, columns: int) -> list[_Block]:
    # Some rows; where one row has very many columns, some of its columns.
    wide = min(columns, max(1, _BLOCK // units))
    high = max(1, _BLOCK // (units * wide)) if wide == columns else 1
    blocks = []
    for i in range(0, height, high):
        rows = slice(i, min(i + high, height))
        for j in range(0, columns, wide):
            blocks.append((rows, slice(None), slice(j, min(j + wide, columns))))
    return blocks


def _places(shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    # The place of each unit in its row, and for each lag, which units have one so far
    # behind them.
    units = shape[1]
    place: Array = np.empty(shape, np.uint8)
    place[:] = np.arange(units, dtype=np.uint8)[:, None]
    flat = place.reshape(-1)
    has_later = [(flat < units - lag).view(np.uint8) for lag in range(1, units)]
    return flat, has_later


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
        # the largest integer where a unit is eligible, the least where not
        bound = spare
        bound.reshape(words.shape)[:] = allow
        np.subtract(bound, 1, out=bound)
        np.bitwise_xor(bound, ~least, out=bound)
        keys = np.minimum(keys, bound, out=buffers[0, : keys.size])
    return keys
