"""The best of each of many rows of scores in memory: partitions of whole blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsefn.engine.memory import BLOCK, Array, each
from sparsefn.engine.selection.bracket import select, tied
from sparsefn.engine.selection.entries import Part, Room, cut

_LONG = 1 << 13  # longer rows are looked at one by one
_SHORT = 1 << 12  # rows of no more are laid together
_MANY = 4  # fewer are not worth it

_KINDS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def select_rows(rows: Part, counts: Array, absolute: bool = False) -> None:
    """Write into `out` who is among the best of its row, as many as its count says: rows as `scan.select` has them.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import rows
    >>> from sparsefn.engine.selection import entries
    >>> table = entries.part(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 4.0]]))
    >>> rows.select_rows(table, np.array([2, 1]))
    >>> table.out
    array([[False,  True,  True],
           [ True, False, False]])

    Tensors are (rows, width), counts (rows,) integers of any value.
    """
    height, width = rows.out.shape
    if not rows.out.size:
        return
    if height == 1 or width > _LONG:
        for i in range(height):
            select([cut(rows, i)], int(counts[i]), absolute)
        return
    step = max(1, BLOCK // width)
    double = rows.wide is not None and rows.wide.dtype == np.float64
    room = Room(min(height, step) * width, absolute, double)
    for start in range(0, height, step):
        at = slice(start, start + step)
        shape = rows.out[at].shape
        scores = room.read(rows, at, room.scores[: shape[0] * width].reshape(shape))
        keys = _keys(scores)
        for flags, barring in ((rows.allow, False), (rows.deny, True)):
            if flags is not None:
                keys[flags[at] == barring] = np.iinfo(keys.dtype).min
        _winners(keys, np.clip(counts[at], 0, width), rows.out[at])


def select_each(parts: Sequence[Part], counts: Sequence[Array], absolute: bool = False) -> None:
    """`select_rows` for several tensors, on the threads of torch; many small rows of one width are laid together.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import rows
    >>> from sparsefn.engine.selection import entries
    >>> tensors = [entries.part(torch.tensor([[1.0, 3.0]])), entries.part(torch.tensor([[2.0, 1.0, 0.0]]))]
    >>> rows.select_each(tensors, [np.array([1]), np.array([1])])
    >>> [part.out.tolist() for part in tensors]
    [[[False, True]], [[True, False, False]]]
    """
    alike: dict[Any, list[int]] = {}
    for i, at in enumerate(parts):
        few = at.wide is not None and at.out.shape[0] == 1 and 0 < at.out.size <= _SHORT
        kind = (at.out.shape, at.wide.dtype, at.allow is None, at.deny is None) if few and at.wide is not None else i
        alike.setdefault(kind, []).append(i)
    jobs: list[list[int]] = []
    for some in alike.values():
        height = max(1, BLOCK // max(parts[some[0]].out.size, 1)) if len(some) >= _MANY else 1
        jobs += [some[first : first + height] for first in range(0, len(some), height)]

    def run(group: list[int]) -> None:
        if len(group) == 1:
            return select_rows(parts[group[0]], counts[group[0]], absolute)
        rows = _laid_together([parts[i] for i in group])
        select_rows(rows, np.concatenate([counts[i] for i in group]), absolute)
        for i, won in zip(group, rows.out, strict=True):
            parts[i].out[0] = won

    each(run, jobs, sum(at.out.size for at in parts))


def _laid_together(parts: Sequence[Part]) -> Part:
    return Part(*(None if row[0] is None else np.concatenate(row) for row in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _keys(scores: Array) -> Array:
    # The integers of `ranks.rank_keys`, but for their values: the order is the same.
    keys = (scores + 0.0).view(_KINDS[scores.dtype])  # -0.0 becomes 0.0
    info = np.iinfo(keys.dtype)
    keys ^= (keys >> (info.bits - 1)) & info.max
    keys[np.isnan(scores)] = info.min + 1
    return keys


def _winners(keys: Array, counts: Array, out: Array) -> None:
    width = keys.shape[1]
    places = np.minimum(width - counts, width - 1)
    first = int(places[0])
    if (places == first).all():
        # One place alone takes a faster partition, but 15 times as long on heavy ties.
        kth = (max(first - 1, 0), first) if tied(keys.reshape(-1)) else first
        threshold = np.partition(keys, kth, axis=1)[:, first, None]
    else:
        threshold = np.take_along_axis(np.sort(keys, axis=1), places[:, None], axis=1)
    np.greater(keys, threshold, out=out)
    equal = keys == threshold
    missing = counts - np.count_nonzero(out, axis=1)
    crowded = np.flatnonzero(np.count_nonzero(equal, axis=1) > missing)
    equal[crowded] &= np.cumsum(equal[crowded], axis=1, dtype=np.int32) <= missing[crowded, None]
    out |= equal
    out &= keys > np.iinfo(keys.dtype).min
