"""Rows of scores in falling order, for scores and counts that depend on the order;
nothing is selected here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def falling(rows: Tensor) -> Tensor:
    """The places of the entries of each row, the largest entry first: int64.

    >>> from sparsefn._engine.numbers.ranks import falling
    >>> falling(torch.tensor([1.0, float("nan"), 3.0, 1.0]))
    tensor([2, 0, 3, 1])

    Equal entries stay in the order of their places, and NaN is last: the order in which
    entries are selected.
    """
    return torch.sort(-rows, dim=-1, stable=True).indices


def back(rows: Tensor, order: Tensor) -> Tensor:
    """The rows that `rows.gather(-1, order)` came from.

    >>> from sparsefn._engine.numbers.ranks import back
    >>> back(torch.tensor([5.0, 6.0]), torch.tensor([1, 0]))
    tensor([6., 5.])
    """
    return torch.empty_like(rows).scatter(-1, order, rows)


def running_sums(rows: Tensor) -> Tensor:
    """Sums of each row up to and with each entry: the same bits on every device.

    >>> from sparsefn._engine.numbers.ranks import running_sums
    >>> running_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([ 1.,  3.,  6., 10.])

    Sums of 2, 4, 8, ... entries are added to one another, which fixes the order: Hillis
    and Steele 1986, "Data parallel algorithms", doi 10.1145/7902.7903. `torch.cumsum`
    adds in another order on each device. The sums of entries that are not negative
    never fall.
    """
    sums = rows
    width = rows.shape[-1]
    reach = 1
    while reach < width:
        first = sums[..., :reach]
        later = sums[..., reach:] + sums[..., :-reach]
        sums = torch.cat([first, later], -1)
        reach *= 2
    if not width:
        return sums
    return sums.cummax(-1).values


def ranks_within(rows: Tensor, *classes: Tensor) -> Tensor:
    """How many entries of its row and class each entry is better than: int64, 0 for the
    worst of a class.

    >>> from sparsefn._engine.numbers.ranks import ranks_within
    >>> ranks_within(
    ...     torch.tensor([5.0, 2.0, 3.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    ... )
    tensor([2, 1, 0, 0])

    Entries are of one class if all `classes` are equal there. Of equal entries the
    first is the better one, as in selection, and NaN is worst.
    """
    order = falling(rows).flip(-1)  # the worst first
    for kind in classes:
        by_kind = torch.sort(kind.gather(-1, order), dim=-1, stable=True).indices
        order = order.gather(-1, by_kind)
    place = torch.arange(rows.shape[-1], device=rows.device).expand(rows.shape)
    starts = place == 0
    for kind in classes:
        kind = kind.gather(-1, order)
        changes = kind[..., 1:] != kind[..., :-1]
        later = starts[..., 1:] | changes
        starts = torch.cat([starts[..., :1], later], -1)
    first = place
    if rows.shape[-1]:
        first = torch.where(starts, place, 0).cummax(-1).values
    return back(place - first, order)
