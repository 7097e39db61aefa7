"""Winners by torch operations of fixed shapes: for exported programs, for the operator,
and for other devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from sparsefn._engine.leaves import end_to_end
from sparsefn._engine.selection import narrow_rows, reference
from sparsefn._engine.selection.entries import Count, Entry, eligible

# ---- shapes --------------------------------------------------------------------------


def competitions(shape: Sequence[int]) -> int:
    """How many competitions an entry of this shape holds.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.competitions((3, 10)), fixed_counts.competitions((3, 10, 2))
    (3, 6)
    """
    return math.prod(shape[::2])


def is_narrow(shape: Sequence[int]) -> bool:
    """Whether units are compared one with another, and nothing is sorted.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> (
    ...     fixed_counts.is_narrow((9, 4)),
    ...     fixed_counts.is_narrow((1, 4)),
    ...     fixed_counts.is_narrow((9, 100)),
    ... )
    (True, False, False)
    """
    return 0 < shape[1] <= narrow_rows.WIDEST and competitions(shape) > 1


def is_few(shape: Sequence[int]) -> bool:
    """Whether the pairs of a row's units are so few that compiled code compares them.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.is_few((9, 4)), fixed_counts.is_few((9, 8))
    (True, False)
    """
    return is_narrow(shape) and shape[1] <= narrow_rows.PAIRED


def grouped(x: Tensor) -> Tensor:
    """Scores or flags as (competitions, units): the units of a column then follow one
    another.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.grouped(torch.ones(2, 4, 3)).shape
    torch.Size([6, 4])
    """
    if x.ndim < 3:
        return x
    return x.transpose(1, 2).reshape(competitions(x.shape), x.shape[1])


def as_rows(entry: Entry) -> Entry:
    """The entry, `grouped`.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.as_rows(Entry(torch.ones(3, 10, 2))).scores.shape
    torch.Size([6, 10])
    """
    if entry.scores.ndim == 2:
        return entry
    rows: list[Tensor | None] = []
    for x in entry[:3]:
        rows.append(None if x is None else grouped(x))
    scores, allow, deny = rows
    assert scores is not None
    return Entry(scores, allow, deny, entry.absolute)


def laid_back(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """A mask of `as_rows` in the shape of the entry.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.laid_back(torch.ones(6, 10), (3, 10, 2)).shape
    torch.Size([3, 10, 2])
    """
    if mask.ndim == len(shape):
        return mask
    rows, units, columns = shape
    return mask.reshape(rows, columns, units).transpose(1, 2).contiguous()


# ---- winners -------------------------------------------------------------------------


def of_rows(entry: Entry, count: Count) -> Tensor:
    """The winners of one entry.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.of_rows(
    ...     Entry(torch.tensor([[1.0, 3.0, -3.0, 2.0]]), absolute=True), 2
    ... )
    tensor([[False,  True,  True, False]])
    """
    shape = entry.scores.shape
    few = is_few(shape)
    if not few:
        entry = as_rows(entry)
    open_ = eligible(entry.allow, entry.deny)
    keys = reference.rank_keys(entry.scores, open_, absolute=entry.absolute)
    if not few:
        won = reference.top_of_rows(keys, count)
        return laid_back(won, shape)
    if isinstance(count, Tensor):
        one = count.numel() == 1
        count = count.reshape(() if one else (shape[0], *shape[2:]))
    won = narrow_rows.top_by_pairs(keys, count)
    if open_ is None:
        return won
    return won & open_


def keys_of(entries: Sequence[Entry]) -> Tensor:
    """The keys of some entries as one row, in the wider integers if there are any.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.keys_of(
    ...     [
    ...         Entry(torch.zeros(1, 1)),
    ...         Entry(torch.tensor([[-0.0, 1.0]]), torch.tensor([[True, False]])),
    ...     ]
    ... )
    tensor([          0,           0, -2147483648], dtype=torch.int32)
    """
    double = any(entry.scores.dtype == torch.float64 for entry in entries)
    wide = torch.float64 if double else torch.float32
    keys = []
    for (_, absolute), run in groupby(entries, _kind):
        alike = list(run)
        scores = end_to_end([x.scores for x in alike])
        allow = _flags(alike, True)
        deny = _flags(alike, False)
        open_ = eligible(allow, deny)
        keys.append(reference.rank_keys(scores, open_, wide, absolute))
    if len(keys) == 1:
        return keys[0]
    return torch.cat(keys)


def _kind(entry: Entry) -> tuple[torch.dtype, bool]:
    return entry.scores.dtype, entry.absolute


def _flags(entries: Sequence[Entry], allowed: bool) -> Tensor | None:
    # What some entries allow, or deny; None where none says so.
    given = [entry.allow if allowed else entry.deny for entry in entries]
    if all(flags is None for flags in given):
        return None
    device = entries[0].scores.device
    usual = torch.full((), allowed, dtype=torch.bool, device=device)
    every = []
    for flags, x in zip(given, entries, strict=True):
        if flags is None:
            flags = usual.expand(x.scores.numel())
        every.append(flags)
    return end_to_end(every)


def jointly(entries: Sequence[Entry], count: Count) -> list[Tensor]:
    """The winners of one competition of all entries.

    >>> from sparsefn._engine.selection import fixed_counts
    >>> fixed_counts.jointly(
    ...     [
    ...         Entry(torch.tensor([[1.0, 3.0]])),
    ...         Entry(torch.tensor([[3.0, 2.0]]).double()),
    ...     ],
    ...     1,
    ... )
    [tensor([[False,  True]]), tensor([[False, False]])]
    """
    row = keys_of(entries)[None]
    won = reference.top_of_rows(row, count)[0]
    parts = torch.split(won, [entry.scores.numel() for entry in entries])
    masks = []
    for mask, entry in zip(parts, entries, strict=True):
        masks.append(mask.reshape(entry.scores.shape))
    return masks
