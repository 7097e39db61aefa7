"""Patterns that keep the same entries whatever their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn.engine.checks import check_int, described
from sparsefn.patterns.kinds import Box, Pattern


@described
def nearly_diagonal(nearliness: int) -> Pattern:
    """The entries near the diagonal of a matrix are kept, whatever their scores.

    >>> sf.masks.topk_mask(
    ...     torch.rand(3, 4), None, pattern=sf.patterns.nearly_diagonal(3)
    ... )
    tensor([[ True,  True, False, False],
            [ True,  True,  True, False],
            [False,  True,  True,  True]])
    >>> sf.static(None, pattern=sf.patterns.nearly_diagonal(1)).init(
    ...     {"w": torch.rand(2, 2)}
    ... ).masks
    {'w': tensor([[ True, False],
            [False,  True]])}

    They are within nearliness // 2 of it. `nearliness` is odd, the number of diagonals;
    0 and less keep nothing. Rows and columns beyond the band of an oblong matrix are
    all False. An even one above 0 is a ValueError; when a mask is made, so are a tensor
    that is not 2-D and nearliness // 2 >= min(rows, columns).
    """
    check_int("", "nearliness", nearliness)
    if nearliness > 0 and nearliness % 2 == 0:
        raise ValueError(
            f"nearly_diagonal: expected an odd nearliness, got {nearliness}"
        )
    name = f"nearly_diagonal({nearliness})"
    reach = nearliness // 2 if nearliness > 0 else -1

    def group(grid: Box) -> Box:
        if len(grid) != 2:
            raise ValueError(f"{name}: expected 2 dimensions, got shape {grid}")
        if reach >= min(grid):
            raise ValueError(
                f"{name}: expected nearliness // 2 < {min(grid)}, the smaller side of "
                f"shape {grid}"
            )
        return grid

    def band(grid: Box) -> Tensor:
        return (
            torch.ones(grid, dtype=torch.bool, device="cpu").triu_(-reach).tril_(reach)
        )

    def count(grid: Box) -> int:
        rows, columns = group(grid)  # which refuses other shapes
        above = sum(min(rows, columns - diagonal) for diagonal in range(reach + 1))
        return above + sum(
            min(rows - diagonal, columns) for diagonal in range(1, reach + 1)
        )

    return Pattern(
        name, lambda shape: (1,) * len(shape), group, fixed=count, allowed=band
    )
