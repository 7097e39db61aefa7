"""Selection whose competitions processes deal out, where a caller asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn._engine.selection import fixed_counts
from sparsefn._engine.selection.entries import Count, Entry


def winners(
    entries: Sequence[Entry],
    counts: Sequence[Count],
    own_winners: Callable[..., list[Tensor]],
) -> list[Tensor]:
    """The winners of all entries, inside of `processes.dealt`: each process finds the
    winners of its competitions.

    >>> from sparsefn._engine.selection import Entry, per_process, winners
    >>> per_process.winners(
    ...     [Entry(torch.tensor([[1.0, 3.0], [4.0, 2.0]]))], [1], winners
    ... )
    [tensor([[False,  True],
            [ True, False]])]

    All processes have all entries. The rows of an entry go to the processes in runs
    that follow each other; where there is one competition, each process finds its
    winners for itself. `own_winners` finds the winners of entries on this process.
    """
    laid = []
    for entry in entries:
        if entry.segments is None and len(entry.scores) == 1:
            entry = fixed_counts.as_rows(entry)
        laid.append(entry)
    tensors: list[Tensor | None] = []
    for entry in laid:
        tensors += entry[:3]
    check_alike("a selection", *tensors, *counts)
    # entries of which each process has some rows
    several = []
    for i, entry in enumerate(laid):
        if entry.segments is None and len(entry.scores) > 1 and entry.scores.numel():
            several.append(i)
    parts = list(laid)
    part_counts = list(counts)
    for i in several:
        height = len(laid[i].scores)
        rows = own(height)
        parts[i] = _rows_of(laid[i], rows)
        part_counts[i] = _counts_of(counts[i], height, rows)
    masks = own_winners(parts, part_counts)
    whole = gathered(*(masks[i] for i in several))
    for i, mask in zip(several, whole, strict=True):
        masks[i] = mask
    pairs = zip(masks, entries, strict=True)
    return [fixed_counts.laid_back(mask, x.scores.shape) for mask, x in pairs]


def _rows_of(entry: Entry, rows: range) -> Entry:
    at = slice(rows.start, rows.stop)
    return entry._replace(
        scores=entry.scores[at],
        allow=None if entry.allow is None else entry.allow[at],
        deny=None if entry.deny is None else entry.deny[at],
    )


def _counts_of(count: Count, height: int, rows: range) -> Count:
    # The counts of the competitions of some rows; one count is for all.
    if not isinstance(count, Tensor) or count.numel() == 1:
        return count
    by_row = count.reshape(height, -1)
    return by_row[rows.start : rows.stop].reshape(-1)
