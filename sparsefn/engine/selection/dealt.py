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
    `own_winners` finds those of entries on this process.
    """
    laid = [fixed.as_rows(x) if len(x.scores) == 1 else x for x in entries]
    sizes = [fixed.competitions(x.scores.shape) for x in laid]
    each = torch.split(counts, sizes) if isinstance(counts, Tensor) else counts
    check_alike("a selection", *(x for entry in laid for x in entry[:3]), *each)
    several = [i for i, x in enumerate(laid) if len(x.scores) > 1 and x.scores.numel()]
    parts = [
        own(len(x.scores)) if i in several else range(len(x.scores))
        for i, x in enumerate(laid)
    ]
    cut = [_of(*row) for row in zip(laid, each, parts, strict=True)]
    found = own_winners([x for x, _ in cut], [n for _, n in cut])
    for i, mask in zip(several, gathered(*(found[i] for i in several)), strict=True):
        found[i] = mask
    return [
        fixed.laid_back(mask, x.scores.shape)
        for mask, x in zip(found, entries, strict=True)
    ]


def _of(entry: Entry, count: fixed.Count, part: range) -> tuple[Entry, fixed.Count]:
    # Some of the rows of an entry, and the counts of their competitions.
    rows = len(entry.scores)
    at = slice(part.start, part.stop)
    scores, allow, deny = (None if x is None else x[at] for x in entry[:3])
    assert scores is not None
    if isinstance(count, Tensor) and count.numel() > 1:
        count = count.reshape(rows, -1)[at].reshape(-1)
    return Entry(scores, allow, deny, entry.absolute), count
