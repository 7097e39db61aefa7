"""Top-k of short competitions that lie end to end: all of them in one sort.

One number of each unit is sorted, its order: segment * 2^32 - key. As |key| <= 2^31,
segments never mix, and in each the largest key is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from sparsefn._engine.selection.block_passes import Scratch, cut
from sparsefn._engine.selection.bracket import write_best
from sparsefn._engine.selection.entries import Arrays
from sparsefn._engine.selection.rows import barred_keys
from sparsefn._engine.transforms import Array

SPAN = 1 << 32  # of the orders of a segment


@np.errstate(all="ignore")  # a signalling NaN counts as any other NaN
def select_segments(at: Arrays, counts: Array, sizes: Sequence[int]) -> None:
    """Write into `out` the mask of the best of each segment, as many as its count says,
    in the order of `write_best`.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import segments
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0]))])
    >>> segments.select_segments(at, np.array([2, 1]), [3, 2])
    >>> at.out
    array([False,  True,  True,  True, False])

    `counts` are integers of any value: one for all segments, or one a segment.
    """
    if not at.out.size:
        return
    counts = np.broadcast_to(counts.reshape(-1), len(sizes))
    ends = list(accumulate(sizes, initial=0))
    if at.wide is not None and at.wide.dtype == np.float64:
        for i, count in enumerate(counts.tolist()):
            write_best([cut(at, slice(ends[i], ends[i + 1]))], count)
        return
    lengths = np.array(sizes)
    starts = np.array(ends[:-1])
    buffer = np.empty(at.out.size, np.float32)
    scores = Scratch(0, double=False).read(at, slice(None), buffer)
    keys = barred_keys(at, slice(None), scores)
    offsets = np.arange(len(sizes)) * SPAN
    order = np.repeat(offsets, lengths) - keys
    wanted = np.clip(counts, 0, lengths)
    last = np.maximum(starts + wanted - 1, 0)
    threshold = np.sort(order)[last]
    # a count of 0: below every order of its segment
    threshold = np.where(wanted > 0, threshold, offsets - SPAN // 2)
    threshold_of_unit = np.repeat(threshold, lengths)
    np.less_equal(order, threshold_of_unit, out=at.out)
    # no segment has fewer than its count, so some have more, by ties
    if np.count_nonzero(at.out) > wanted.sum():
        tied = order == threshold_of_unit
        missing = wanted - count_segments(at.out & ~tied, sizes)
        ties_so_far = np.cumsum(tied, dtype=np.int64)
        ties_before = np.concatenate([[0], ties_so_far])[starts]
        rank = ties_so_far - np.repeat(ties_before, lengths)
        tied &= rank > np.repeat(missing, lengths)
        at.out[tied] = False
    at.out[keys == np.iinfo(keys.dtype).min] = False


def count_segments(flags: Array, sizes: Sequence[int]) -> Array:
    """How many flags are set in each segment: int64.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import segments
    >>> segments.count_segments(np.array([True, True, False]), [2, 0, 1])
    array([2, 0, 0])
    """
    running = np.cumsum(flags, dtype=np.int64)
    ends = list(accumulate(sizes, initial=0))
    return np.diff(np.concatenate([[0], running])[ends])
