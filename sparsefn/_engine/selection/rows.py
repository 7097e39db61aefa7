"""Top-k of every row, by partitioning blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.selection.block_passes import Scratch, cut
from sparsefn._engine.selection.bracket import mostly_tied, write_best
from sparsefn._engine.selection.entries import Arrays
from sparsefn._engine.transforms import Array

_LONG = 1 << 13  # longer rows are selected from one by one

_KINDS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def select_rows(rows: Arrays, counts: Array) -> None:
    """Write into `out` the mask of the best of each row, as many as its count says, in
    the order of `write_best`.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import rows
    >>> (table,) = entries.arrays(
    ...     [entries.Entry(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 4.0]]))]
    ... )
    >>> rows.select_rows(table, np.array([2, 1]))
    >>> table.out
    array([[False,  True,  True],
           [ True, False, False]])

    Arrays are (rows, width), counts integers of any value: one for all rows, or one a
    row.
    """
    height, width = rows.out.shape
    if not rows.out.size:
        return
    if height == 1:
        return write_best([rows], int(counts.item()))
    counts = counts if counts.size == height else np.full(height, counts)
    if width > _LONG:
        for i in range(height):
            write_best([cut(rows, i)], int(counts[i]))
    else:
        _in_blocks(rows, counts.clip(0, width))


@np.errstate(all="ignore")  # a signalling NaN counts as any other NaN
def _in_blocks(rows: Arrays, counts: Array) -> None:
    height, width = rows.out.shape
    step = max(1, BLOCK // width)
    double = rows.wide is not None and rows.wide.dtype == np.float64
    scratch = Scratch(min(height, step) * width, double)
    for start in range(0, height, step):
        at = slice(start, start + step)
        buffer = scratch.scores[: rows.out[at].size].reshape(-1, width)
        scores = scratch.read(rows, at, buffer)
        keys = barred_keys(rows, at, scores)
        _winners(keys, counts[at], rows.out[at])


def select_each(tables: Sequence[tuple[Arrays, Array]]) -> None:
    """`select_rows` for several tables, on the threads of torch.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import rows
    >>> tensors = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0, 0.0]])
    >>> tables = entries.arrays([entries.Entry(scores) for scores in tensors])
    >>> rows.select_each([(at, np.array(1)) for at in tables])
    >>> [at.out.tolist() for at in tables]
    [[[False, True]], [[True, False, False]]]
    """
    work = sum(at.out.size for at, _ in tables)
    run_jobs(lambda table: select_rows(*table), tables, work)


def barred_keys(at: Arrays, where: slice, scores: Array) -> Array:
    """The `sort_keys` of some of the scores, the least integer where a unit does not
    compete.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import rows
    >>> (at,) = entries.arrays(
    ...     [entries.Entry(torch.zeros(3), deny=torch.tensor([False, True, False]))]
    ... )
    >>> rows.barred_keys(at, slice(1, 3), at.wide[1:3]).tolist()
    [-2147483648, 0]
    """
    keys = sort_keys(scores)
    barred = np.iinfo(keys.dtype).min
    if at.allow is not None:
        keys[~at.allow[where]] = barred
    if at.deny is not None:
        keys[at.deny[where]] = barred
    return keys


def sort_keys(scores: Array) -> Array:
    """Integers in the order of floats; not the integers of `reference.rank_keys`.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import rows
    >>> rows.sort_keys(np.array([np.nan, -np.inf, -0.0, 0.0], np.float32)).argsort(
    ...     kind="stable"
    ... )
    array([0, 1, 2, 3])
    """
    # The bits of positive floats have their order, and the bits of negative floats the
    # reverse, so that all bits but the sign are inverted there.
    keys = (scores + 0.0).view(_KINDS[scores.dtype])  # -0.0 becomes 0.0
    info = np.iinfo(keys.dtype)
    sign = keys >> (info.bits - 1)  # 0, or all bits set
    keys ^= sign & info.max
    keys[np.isnan(scores)] = info.min + 1
    return keys


def _winners(keys: Array, counts: Array, out: Array) -> None:
    width = keys.shape[1]
    # of the thresholds, in rows of rising keys
    threshold_index = np.minimum(width - counts, width - 1)
    index = int(threshold_index[0])
    if (threshold_index == index).all():
        # A partition at one index takes 15 times as long where many scores are equal: a
        # second pivot beside it avoids numpy's slow case on ties.
        kth: int | tuple[int, int] = index
        if mostly_tied(keys.reshape(-1)):
            kth = (max(index - 1, 0), index)
        threshold = np.partition(keys, kth, axis=1)[:, index, None]
    else:
        ordered = np.sort(keys, axis=1)
        threshold = np.take_along_axis(ordered, threshold_index[:, None], axis=1)
    np.greater_equal(keys, threshold, out=out)
    # no row has fewer than its count, so some have more, by ties
    if np.count_nonzero(out) > counts.sum():
        tied = np.flatnonzero(np.count_nonzero(out, axis=1) > counts)
        above = keys[tied] > threshold[tied]
        equal = keys[tied] == threshold[tied]
        missing = counts[tied] - np.count_nonzero(above, axis=1)
        rank_among_equal = np.cumsum(equal, axis=1, dtype=np.int32)
        equal &= rank_among_equal <= missing[:, None]
        out[tied] = above | equal
    out &= keys > np.iinfo(keys.dtype).min
