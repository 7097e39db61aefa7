"""Many competitions on a device at once: entries that are alike are joined.

A launch takes a device some microseconds, in which it reads a million scores. So leaves
that compete by themselves are laid end to end and sorted together, rows of one length
are rows of one matrix, and short rows are one table of comparisons. Nothing is read by
Python: sizes are known, and counts stay where they are. Every way chooses the units
that `reference.top_of_rows` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sparsefn.engine.checks import counts_of_rows
from sparsefn.engine.leaves import MOST, apart, end_to_end, packs, pays
from sparsefn.engine.selection import fixed, reference
from sparsefn.engine.selection.entries import Entry
from sparsefn.engine.selection.fixed import Count, competitions


def takes(entries: Sequence[Entry]) -> bool:
    """Whether these are ordinary tensors on a device, and nothing hides them.

    >>> from sparsefn.engine.selection import joined
    >>> (
    ...     joined.takes([Entry(torch.ones(1, 2))]),
    ...     joined.takes([Entry(torch.ones(1, 2, device="meta"))]),
    ... )
    (False, True)
    """
    return pays([entry.scores for entry in entries])


def winners(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    """Masks of the best units of each row of some entries; the counts of an entry are
    one, or one a competition.

    >>> from sparsefn.engine.selection import joined
    >>> joined.winners(
    ...     [Entry(torch.tensor([[1.0, 3.0, 2.0]])), Entry(torch.tensor([[5.0, 4.0]]))],
    ...     [2, 1],
    ... )
    [tensor([[False,  True,  True]]), tensor([[ True, False]])]

    A joined competition has `lists.MOST` units at most, or those of one entry. Its
    temporaries take 60 bytes a unit or so.
    """
    masks: dict[int, Tensor] = {}
    ways = [_way(entry) for entry in entries]
    kinds = [
        (way, entry.scores.device, entry.scores.dtype)
        for way, entry in zip(ways, entries, strict=True)
    ]
    for pack in packs(kinds, [entry.scores.numel() for entry in entries]):
        alike = [entries[i] for i in pack]
        own = [counts[i] for i in pack]
        masks |= zip(pack, ways[pack[0]][0](alike, own), strict=True)
    return [masks[i] for i in range(len(entries))]


def joint_masks(entries: Sequence[Entry], count: Count) -> list[Tensor]:
    """The winners of one competition of all entries, each mask with memory of its own.

    >>> from sparsefn.engine.selection import joined
    >>> joined.joint_masks(
    ...     [Entry(torch.tensor([[1.0, 3.0]])), Entry(torch.tensor([[3.0, 2.0]]))], 1
    ... )
    [tensor([[False,  True]]), tensor([[False, False]])]
    """
    won = reference.top_of_rows(fixed.keys_of(entries)[None], count)[0]
    return apart(won, [entry.scores for entry in entries])


def totals(flags: Sequence[Tensor]) -> Tensor:
    """How many flags are set in each row of some bool tensors, end to end: int64.

    >>> from sparsefn.engine.selection import joined
    >>> joined.totals(
    ...     [torch.tensor([[True, False, True]]), torch.tensor([[True], [False]])]
    ... )
    tensor([2, 1, 0])
    """
    sums: dict[int, Tensor] = {}
    for pack in packs(
        [x.shape[1] if len(x) != 1 else -1 for x in flags], [x.numel() for x in flags]
    ):
        rows = [flags[i] for i in pack]
        if len(rows) > 1 and len(rows[0]) == 1:
            # a pack has fewer than 2^31 elements
            running = end_to_end(rows).cumsum(0, dtype=torch.int32)
            running = torch.cat([running.new_zeros(1), running])
            ends = [0, *accumulate(x.numel() for x in rows)]
            sums_so_far = torch.stack([running[end] for end in ends])
            made = torch.split(sums_so_far.to(torch.int64).diff(), 1)
        else:
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            made = torch.split(whole.sum(-1), [len(x) for x in rows])
        sums |= zip(pack, made, strict=True)
    return torch.cat([sums[i] for i in range(len(flags))])


# ---- ways ----------------------------------------------------------------------------

Way = Callable[[Sequence[Entry], Sequence[Count]], list[Tensor]]


def _way(entry: Entry) -> tuple[Way, int]:
    # How an entry is selected from, and the length of the rows that are laid together.
    rows = competitions(entry.scores.shape)
    width = entry.scores.shape[1]
    if not entry.scores.numel():
        return _nothing, 0
    return (_segments, 0) if rows == 1 and width <= MOST // 2 else (_matrix, width)


def _nothing(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    del counts
    return [torch.zeros_like(entry.scores, dtype=torch.bool) for entry in entries]


def _segments(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    # Rows of any lengths, end to end: sorted by row, then by score. In that order the
    # winners of a row are its first.
    if len(entries) == 1:
        return _matrix(entries, counts)
    sizes = [entry.scores.numel() for entry in entries]
    keys = fixed.keys_of(entries)
    counter = torch.arange(max(sizes), dtype=torch.int32, device=keys.device)
    place = torch.cat([counter[:size] for size in sizes])
    wanted = (
        counts_of_rows(counts, [1] * len(sizes), keys.device)
        .clamp(0, max(sizes))
        .to(torch.int32)
        .unbind()
    )
    first = place < torch.cat(
        [count.expand(size) for count, size in zip(wanted, sizes, strict=True)]
    )
    won = torch.empty_like(first).scatter_(0, _by_row(keys, sizes), first)
    return apart(_open(won, keys, entries), [entry.scores for entry in entries])


def _by_row(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    # The places of keys in the order of their rows, in each row the largest key first,
    # then the lower place.
    span = 1 << 32  # of a key of 32 bits
    number = torch.arange(0, len(sizes) * span, span, device=keys.device)
    row = torch.cat(
        [one.expand(size) for one, size in zip(number.unbind(), sizes, strict=True)]
    )
    if keys.dtype == torch.int32:
        return torch.sort(row - keys, stable=True).indices
    order = torch.sort(keys, descending=True, stable=True).indices
    return order[torch.sort(row[order], stable=True).indices]


def _matrix(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    # Rows of one length.
    rows = [fixed.as_rows(entry) for entry in entries]
    keys = fixed.keys_of(rows).reshape(-1, rows[0].scores.shape[1])
    count = counts[0]
    if any(isinstance(other, Tensor) or other != count for other in counts):
        count = counts_of_rows(
            counts, [len(entry.scores) for entry in rows], keys.device
        )
    if fixed.is_narrow(keys.shape) and keys.dtype == torch.int32:
        won = _open(_by_table(keys, count), keys, entries)
    else:
        won = reference.top_of_rows(keys, count)
    masks = apart(won, [entry.scores for entry in rows])
    return [
        fixed.laid_back(mask, entry.scores.shape)
        for mask, entry in zip(masks, entries, strict=True)
    ]


def _by_table(keys: Tensor, count: Count) -> Tensor:
    # Each unit against all of its row: a byte for each pair of units. With the place in
    # the number there are no ties.
    width = keys.shape[1]
    numbers = keys.to(torch.int64) * width - torch.arange(width, device=keys.device)
    better = (numbers[:, None, :] > numbers[:, :, None]).sum(-1, dtype=torch.int8)
    return better < (count.reshape(-1, 1) if isinstance(count, Tensor) else count)


def _open(won: Tensor, keys: Tensor, entries: Sequence[Entry]) -> Tensor:
    # Units that do not compete are sorted last. They would win where the count is above
    # the number of units that do.
    if all(entry.allow is None and entry.deny is None for entry in entries):
        return won
    return won & (keys > reference.BARRED[keys.dtype])
