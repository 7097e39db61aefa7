"""Selection whose competitions processes deal out, where a caller asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsefn.engine.processes import check_alike, gathered, own
from sparsefn.engine.selection import fixed
from sparsefn.engine.selection.entries import Entry


def winners(
    entries: Sequence[Entry],
    counts: Sequence[fixed.Count] | Tensor,
    own_winners: Callable[..., list[Tensor]],
) -> list[Tensor]:
    """The winners of all entries, of which each process finds those of its
    competitions, inside of `processes.dealt`.

    >>> from sparsefn.engine.selection import Entry, dealt, winners
    >>> dealt.winners([Entry(torch.tensor([[1.0, 3.0], [4.0, 2.0]]))], [1], winners)
    [tensor([[False,  True],
            [ True, False]])]

    All have all entries. The rows of an entry go to the processes in runs that follow
    each other; where there is one competition, each finds its winners for itself.
    `own_winners` finds the winners of entries on this process.
    """
    laid = []
    for entry in entries:
        if len(entry.scores) == 1:
            entry = fixed.as_rows(entry)
        laid.append(entry)
    sizes = [fixed.competitions(x.scores.shape) for x in laid]
    each = counts
    if isinstance(counts, Tensor):
        each = torch.split(counts, sizes)
    tensors: list[Tensor | None] = []
    for entry in laid:
        tensors += entry[:3]
    check_alike("a selection", *tensors, *each)
    # entries of which each process has some rows
    several = [i for i, x in enumerate(laid) if len(x.scores) > 1 and x.scores.numel()]
    parts = list(laid)
    part_counts = list(each)
    for i in several:
        height = len(laid[i].scores)
        rows = own(height)
        parts[i] = _rows_of(laid[i], rows)
        part_counts[i] = _counts_of(each[i], height, rows)
    masks = own_winners(parts, part_counts)
    whole = gathered(*(masks[i] for i in several))
    for i, mask in zip(several, whole, strict=True):
        masks[i] = mask
    pairs = zip(masks, entries, strict=True)
    return [fixed.laid_back(mask, x.scores.shape) for mask, x in pairs]


def _rows_of(entry: Entry, rows: range) -> Entry:
    at = slice(rows.start, rows.stop)
    return entry._replace(
        scores=entry.scores[at],
        allow=None if entry.allow is None else entry.allow[at],
        deny=None if entry.deny is None else entry.deny[at],
    )


def _counts_of(count: fixed.Count, height: int, rows: range) -> fixed.Count:
    # The counts of the competitions of some rows; one count is for all.
    if not isinstance(count, Tensor) or count.numel() == 1:
        return count
    by_row = count.reshape(height, -1)
    return by_row[rows.start : rows.stop].reshape(-1)
