"""Many competitions on a device at once: entries that are alike are joined.

A launch takes a device some microseconds, in which it reads a million scores. So leaves
that compete by themselves are laid end to end and sorted together, rows of one length
are rows of one matrix, and short rows are one table of comparisons. Nothing is read by
Python: sizes are known, and counts stay where they are. Every way chooses the units
that `reference.top_of_rows` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from sparsefn._engine.leaves import MOST, end_to_end, packs, pays, repeated, split_like
from sparsefn._engine.selection import fixed_counts, reference
from sparsefn._engine.selection.entries import Count, Entry, counts_of_rows
from sparsefn._engine.selection.fixed_counts import competitions
from sparsefn._engine.selection.segments import SPAN


def takes(entries: Sequence[Entry]) -> bool:
    """Whether these are ordinary tensors on a device, and nothing hides them.

    >>> from sparsefn._engine.selection import batches
    >>> (
    ...     batches.takes([Entry(torch.ones(1, 2))]),
    ...     batches.takes([Entry(torch.ones(1, 2, device="meta"))]),
    ... )
    (False, True)
    """
    return pays([entry.scores for entry in entries])


def winners(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    """Masks of the best units of each row or segment of some entries; an entry has one
    count, or one a competition.

    >>> from sparsefn._engine.selection import batches
    >>> batches.winners(
    ...     [Entry(torch.tensor([[1.0, 3.0, 2.0]])), Entry(torch.tensor([[5.0, 4.0]]))],
    ...     [2, 1],
    ... )
    [tensor([[False,  True,  True]]), tensor([[ True, False]])]

    A joined competition has `lists.MOST` units at most, or the units of one entry. Its
    temporaries take 60 bytes a unit or so.
    """
    lengths = [_length_of_rows(entry) for entry in entries]
    kinds = []
    for entry, length in zip(entries, lengths, strict=True):
        kinds.append((length, entry.scores.device, entry.scores.dtype))
    masks: dict[int, Tensor] = {}
    for pack in packs(kinds, [entry.scores.numel() for entry in entries]):
        alike = [entries[i] for i in pack]
        own = [counts[i] for i in pack]
        length = lengths[pack[0]]
        if length == 0:
            won = [torch.zeros_like(entry.scores, dtype=torch.bool) for entry in alike]
        elif length == _ONE_ROW and (len(pack) > 1 or alike[0].segments):
            won = _of_segments(alike, own)
        else:
            won = _of_one_matrix(alike, own)
        masks |= zip(pack, won, strict=True)
    return [masks[i] for i in range(len(entries))]


def joint_masks(entries: Sequence[Entry], count: Count) -> list[Tensor]:
    """The winners of one competition of all entries, each mask with memory of its own.

    >>> from sparsefn._engine.selection import batches
    >>> batches.joint_masks(
    ...     [Entry(torch.tensor([[1.0, 3.0]])), Entry(torch.tensor([[3.0, 2.0]]))], 1
    ... )
    [tensor([[False,  True]]), tensor([[False, False]])]
    """
    won = reference.top_of_rows(fixed_counts.keys_of(entries)[None], count)[0]
    return split_like(won, [entry.scores for entry in entries])


def totals(flags: Sequence[Tensor]) -> Tensor:
    """How many flags are set in each row of some bool tensors, end to end: int64.

    >>> from sparsefn._engine.selection import batches
    >>> batches.totals(
    ...     [torch.tensor([[True, False, True]]), torch.tensor([[True], [False]])]
    ... )
    tensor([2, 1, 0])
    """
    lengths = [_ONE_ROW if len(rows) == 1 else rows.shape[1] for rows in flags]
    sums: dict[int, Tensor] = {}
    for pack in packs(lengths, [rows.numel() for rows in flags]):
        alike = [flags[i] for i in pack]
        if lengths[pack[0]] == _ONE_ROW and len(pack) > 1:
            sizes = [row.numel() for row in alike]
            of_rows = torch.split(totals_of_segments(end_to_end(alike), sizes), 1)
        else:
            matrix = alike[0] if len(alike) == 1 else torch.cat(alike)
            of_rows = torch.split(matrix.sum(-1), [len(rows) for rows in alike])
        sums |= zip(pack, of_rows, strict=True)
    return torch.cat([sums[i] for i in range(len(flags))])


def totals_of_segments(flags: Tensor, sizes: Sequence[int]) -> Tensor:
    """How many flags are set in each segment: int64.

    >>> from sparsefn._engine.selection import batches
    >>> batches.totals_of_segments(torch.tensor([True, True, False]), [2, 1])
    tensor([2, 0])

    They are sums up to the end of each segment, and their differences; there are fewer
    than 2^31 flags.
    """
    running = flags.cumsum(0, dtype=torch.int32)
    running = torch.cat([running.new_zeros(1), running])
    ends = accumulate(sizes, initial=0)
    return torch.stack([running[end] for end in ends]).to(torch.int64).diff()


# ---- one row after another -----------------------------------------------------------

_ONE_ROW = -1  # the length of a row that is joined with rows of any length


def _length_of_rows(entry: Entry) -> int:
    # Entries with the same one are joined.
    if not entry.scores.numel():
        return 0
    if entry.segments is not None:
        return _ONE_ROW
    width = entry.scores.shape[1]
    # a row of over half a pack is cheaper by topk alone
    if competitions(entry.scores.shape) == 1 and width <= MOST // 2:
        return _ONE_ROW
    return width


def _of_segments(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    # The rows of all entries are segments of one row.
    rows = [entry.segments or [entry.scores.numel()] for entry in entries]
    keys = fixed_counts.keys_of(entries)
    wanted = counts_of_rows(counts, list(map(len, rows)), keys.device)
    won = _best_of_segments(keys, list(chain(*rows)), wanted)
    return split_like(
        _eligible(won, keys, entries), [entry.scores for entry in entries]
    )


def _best_of_segments(keys: Tensor, sizes: Sequence[int], counts: Tensor) -> Tensor:
    # Units are sorted by segment, then by score: the first of a segment win.
    longest = max(sizes)
    counter = torch.arange(longest, dtype=torch.int32, device=keys.device)
    rank = torch.cat([counter[:size] for size in sizes])
    wanted = counts.clamp(0, longest).to(torch.int32)
    wins = rank < repeated(wanted, sizes)
    places = _places_in_order(keys, sizes)
    return torch.empty_like(wins).scatter_(0, places, wins)


def _places_in_order(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    # The places of keys, one segment after another, in each the largest key first, then
    # the lower place.
    # `segments.py` says why offsets less keys have this order.
    offsets = torch.arange(0, len(sizes) * SPAN, SPAN, device=keys.device)
    offset_of_unit = repeated(offsets, sizes)
    if keys.dtype == torch.int32:
        return torch.sort(offset_of_unit - keys, stable=True).indices
    places = torch.sort(keys, descending=True, stable=True).indices
    by_segment = torch.sort(offset_of_unit[places], stable=True).indices
    return places[by_segment]


# ---- rows of one length --------------------------------------------------------------


def _of_one_matrix(entries: Sequence[Entry], counts: Sequence[Count]) -> list[Tensor]:
    # The rows of all entries are the rows of one matrix.
    rows = [fixed_counts.as_rows(entry) for entry in entries]
    keys = fixed_counts.keys_of(rows).reshape(-1, rows[0].scores.shape[1])
    count = counts[0]
    is_one = all(not isinstance(other, Tensor) and other == count for other in counts)
    if not is_one:
        heights = [len(entry.scores) for entry in rows]
        count = counts_of_rows(counts, heights, keys.device)
    if fixed_counts.is_narrow(keys.shape) and keys.dtype == torch.int32:
        won = _eligible(_by_pairs(keys, count), keys, entries)
    else:
        won = reference.top_of_rows(keys, count)
    masks = split_like(won, [entry.scores for entry in rows])
    pairs = zip(masks, entries, strict=True)
    return [fixed_counts.laid_back(mask, entry.scores.shape) for mask, entry in pairs]


def _by_pairs(keys: Tensor, count: Count) -> Tensor:
    # Each unit against all of its row: a byte for each pair of units. The place is the
    # last digit of a number, so that no two of a row are equal.
    width = keys.shape[1]
    numbers = keys.to(torch.int64) * width - torch.arange(width, device=keys.device)
    is_better = numbers[:, None, :] > numbers[:, :, None]
    rank = is_better.sum(-1, dtype=torch.int8)
    if isinstance(count, Tensor):
        count = count.reshape(-1, 1)
    return rank < count


def _eligible(won: Tensor, keys: Tensor, entries: Sequence[Entry]) -> Tensor:
    # Units that do not compete are sorted last. They would win where the count is above
    # the number of units that do.
    for entry in entries:
        if entry.allow is not None or entry.deny is not None:
            return won & (keys > reference.BARRED[keys.dtype])
    return won
