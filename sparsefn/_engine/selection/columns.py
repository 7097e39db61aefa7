"""The best of a few units in each column, by few launches, for loops over columns that
choose again and again.

Each unit of a column is compared with each other one. Nothing is sorted, no layout
changes, and no size depends on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn._engine.leaves import pays
from sparsefn._engine.selection.dispatch import winners
from sparsefn._engine.selection.entries import Entry
from sparsefn._engine.selection.fixed_counts import is_narrow


def best_of_columns(
    units: int, count: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """The function that gives the mask of the `count` best units of each column of
    scores (units, columns) on a device.

    >>> from sparsefn._engine.selection import best_of_columns
    >>> scores = torch.tensor([[1.0], [3.0], [3.0], [float("nan")]])
    >>> best_of_columns(4, 2, scores.device)(scores).T
    tensor([[False,  True,  True, False]])

    Scores are 0 or more, or NaN, and may be of fewer units. The masks are the same as
    from `winners`.
    """
    places = torch.arange(units, device=device)
    earlier = places[:, None, None] < places[:, None]

    def best(scores: Tensor) -> Tensor:
        if pays([scores]) and is_narrow((1, *scores.shape)):
            n = len(scores)
            return _by_pairs(scores, earlier[:n, :n], count)
        return winners([Entry(scores[None])], [count])[0][0]

    return best


def _by_pairs(scores: Tensor, earlier: Tensor, count: int) -> Tensor:
    # Tables of (one unit, another one, columns): of equal units the earlier one wins.
    sizes = torch.nan_to_num(scores, nan=-1.0, posinf=math.inf)
    wins = sizes[:, None] > sizes
    draws = sizes[:, None] >= sizes
    beaten = torch.where(earlier, draws, wins).sum(0)
    return beaten < count
