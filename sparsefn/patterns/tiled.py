"""Patterns of square tiles, whose rows and columns both keep n of m."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sparsefn.engine.checks import check_int, described
from sparsefn.engine.selection import tiles
from sparsefn.patterns.kinds import Box, Pattern, axis_of


@described
def transposable(n: int, m: int, axes: Sequence[int] = (0, 1)) -> Pattern:
    """Exactly n in every row and in every column of each m x m tile are kept.

    >>> scores = torch.tensor([[9.0, 8.0], [7.0, 1.0]])
    >>> sf.masks.topk_mask(scores, None, pattern=sf.patterns.transposable(1, 2))
    tensor([[False,  True],
            [ True, False]])

    The weight and its transpose are both N:M. The tile with the largest sum of
    scores is kept: sums are in float64, added in one order. NaN never wins: tiles with
    fewer NaN come first. Of equal sums the lowest pattern wins: the one whose first row
    keeps the earlier columns, then its second row. It is exact where there are at most
    2,048 patterns: for m up to 5, and n of 1 or m - 1 with m = 6. For other sizes it is
    a greedy choice and then exchanges between two rows as long as one gains: the same
    mask everywhere, but not always the best one.

    `axes` are the two dimensions of a tile: outputs and inputs of linear layers and
    convolutions by default. Both must be divisible by m. Units are picked together and
    not one by one, so algorithms that drop and grow units take no such pattern, nor do
    DTensors. Give algorithms no sparsity. Raises ValueError for n outside [0, m] and
    for axes that are not two different ones, and, when a mask is made, for a shape that
    does not fit.
    Hubara et al. 2021, arXiv 2102.08124.
    """
    check_int("transposable", "m", m, 1)
    check_int("transposable", "n", n, 0)
    if n > m:
        raise ValueError(f"transposable: expected n <= m, got n={n}, m={m}")
    first, second = _pair(axes)
    name = (
        f"transposable({n}, {m})"
        if (first, second) == (0, 1)
        else f"transposable({n}, {m}, axes={(first, second)})"
    )

    def group(grid: Box) -> Box:
        at = {axis_of(name, axis, grid, m) for axis in (first, second)}
        if len(at) < 2:
            raise ValueError(f"{name}: expected two different axes in shape {grid}")
        return tuple(m if i in at else 1 for i in range(len(grid)))

    return Pattern(
        name,
        lambda shape: (1,) * len(shape),
        group,
        fixed=n * m,
        pick=partial(tiles, n=n, m=m),
    )


def _pair(axes: Sequence[int]) -> tuple[int, int]:
    pair = tuple(axes)
    for axis in pair:
        check_int("transposable", "axes", axis)
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ValueError(f"transposable: expected two different axes, got {pair}")
    return pair
