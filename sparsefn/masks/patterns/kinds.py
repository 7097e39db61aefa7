"""How elements form units, and how units form competing groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sparsefn._engine.selection import Counts, Entry, tiles
from sparsefn._engine.sums import Box as Box
from sparsefn._engine.sums import Pooling, Reduction
from sparsefn._engine.transforms import host_number
from sparsefn.core.checks import check_int, described, is_number, is_sequence
from sparsefn.core.tree import Leaves
from sparsefn.masks.patterns.units import Grids, units_of_leaves
from sparsefn.masks.patterns.units import Pattern as Pattern

Reduce = Literal["mean", "sum", "max", "min", "l2"] | Callable[[Tensor], Tensor]

_REDUCTIONS: dict[str, Pooling] = {
    **{name: Pooling(name) for name in ("mean", "sum", "max", "min")},
    "l2": Pooling("norm", 2),
}


def _ones(shape: Box) -> Box:
    return (1,) * len(shape)


def reduction(reduce: Reduce) -> Reduction:
    """The function of a unit's scores that a name means, or the given function.

    >>> reduction("sum")(torch.tensor([[1.0, 2.0]]))
    tensor([3.])
    """
    if callable(reduce):
        return reduce
    if reduce not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(
            f"expected reduce to be one of {known} or a callable, got {reduce!r}"
        )
    return _REDUCTIONS[reduce]


def axis_of(name: str, axis: int, shape: Box, parts: int = 1) -> int:
    """The dimension that an axis is, of a shape that can be divided along it.

    >>> axis_of("nm(2, 4)", -1, (3, 8), parts=4)
    1

    Raises ValueError for a shape without this axis, and for one that is not divisible
    by `parts` along it.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{name}: no axis {axis} in shape {shape}")
    if shape[axis] % parts:
        raise ValueError(
            f"{name}: expected axis {axis} divisible by {parts}, got shape {shape}"
        )
    return axis % len(shape)


@described
def unstructured() -> Pattern:
    """Every element is a unit, and all units of a tensor compete.

    >>> sf.masks.topk_mask(
    ...     torch.tensor([0.3, 0.1, 0.2]), 2, pattern=sf.patterns.unstructured()
    ... )
    tensor([ True, False,  True])

    Returns:
        The pattern, which is the default.
    """
    return Pattern("unstructured()", _ones, lambda grid: grid)


@described
def nm(n: int | Tensor, m: int, axis: int = -1) -> Pattern:
    """Exactly n of every m consecutive elements along an axis are kept.

    >>> sf.masks.topk_mask(
    ...     torch.tensor([4.0, 1.0, 2.0, 3.0]), None, pattern=sf.patterns.nm(2, 4)
    ... )
    tensor([ True, False, False,  True])

    Args:
        n: How many are kept: an int in [0, m], or a 0-d int64 tensor, one a member of
            an ensemble. A tensor is clamped; give the algorithm no sparsity, which is
            not compared with it.
        m: How many consecutive elements form a group.
        axis: The dimension of the tensor as it is: `sf.modules.pattern_axis` says which
            one a layer sums over.

    Returns:
        The pattern, which fixes the count of a group.

    Raises:
        TypeError: A number is not an int, or a tensor `n` not 0-d int64.
        ValueError: `n` is outside [0, m] or `m` below 1; when a mask is made, the axis
            is missing or not divisible by `m`.

    Mishra et al. 2021, arXiv 2104.08378.
    """
    check_int("", "m", m, 1)
    check_int("", "axis", axis)
    if isinstance(n, Tensor):
        if n.dtype != torch.int64 or n.ndim:
            raise TypeError(
                f"nm: expected n to be a 0-d int64 tensor, got {n.dtype} of shape "
                f"{tuple(n.shape)}"
            )
    else:
        check_int("", "n", n, 0)
        if n > m:
            raise ValueError(f"nm: expected n <= m, got n={n}, m={m}")
    known = host_number(n)
    name = f"nm({'tensor' if known is None else known}, {m}, axis={axis})"

    def group(grid: Box) -> Box:
        at = axis_of(name, axis, grid, m)
        return tuple(m if i == at else 1 for i in range(len(grid)))

    return Pattern(name, _ones, group, fixed=n)


@described
def block(
    shape: Sequence[int], reduce: Reduce = "mean", zeros: int | None = None
) -> Pattern:
    """Boxes of elements along the last dimensions are kept or pruned whole.

    >>> scores = torch.tensor([[1.0, 1.0, 9.0], [1.0, 1.0, 0.0]])
    >>> sf.masks.topk_mask(scores, 1, pattern=sf.patterns.block((2, 2)))
    tensor([[False, False,  True],
            [False, False,  True]])

    Where no block is kept, all are pruned as `zeros` says:

    >>> sf.masks.topk_mask(
    ...     torch.tensor([4.0, 1.0, 2.0, 3.0]),
    ...     0,
    ...     pattern=sf.patterns.block((4,), zeros=2),
    ... )
    tensor([ True, False, False,  True])

    Args:
        shape: The sizes of a block. Blocks start at index 0; at the far borders they
            may be partial, and are reduced over the elements that exist.
        reduce: How the scores of a block become one: "mean", "sum", "max", "min" or
            "l2", whose sums have one order everywhere, or a callable over the last
            dimension of contiguous rows, the scores of some blocks at a time where
            there are many. Its own sums may depend on threads and compilers.
        zeros: How many elements a pruned block loses, its worst: all of them, if it has
            no more. Counts and sparsities still refer to blocks. Default: all.

    Returns:
        The pattern.

    Raises:
        TypeError: `shape` is not a sequence, or a size or `zeros` is not an int.
        ValueError: A size is below 1, `zeros` is outside [0, elements of a block] or
            `reduce` is unknown; when a mask is made, the tensor has fewer dimensions.
    """
    if not is_sequence(shape):
        raise TypeError(
            "block: expected shape to be a tuple of sizes such as (4, 4), got "
            f"{shape!r}"
        )
    box = tuple(shape)
    for size in box:
        check_int("", "block sizes", size, 1)
    name = f"block({box}, reduce={reduce!r})"
    if zeros is not None:
        check_int("", "zeros", zeros, 0)
        if zeros > math.prod(box):
            raise ValueError(
                f"{name}: expected zeros <= {math.prod(box)}, the elements of a "
                f"block, got {zeros}"
            )
        if zeros == math.prod(box):
            zeros = None
    if zeros is not None:
        name = f"{name[:-1]}, zeros={zeros})"

    def unit(size: Box) -> Box:
        if len(box) > len(size):
            raise ValueError(
                f"{name}: expected {len(box)} dimensions or more, got shape {size}"
            )
        return (1,) * (len(size) - len(box)) + box

    return Pattern(name, unit, lambda grid: grid, reduction(reduce), zeros=zeros)


@described
def channel(axis: int = 0, norm: float = 1, groups: int = 1) -> Pattern:
    """Whole slices along an axis are kept or pruned, by the norm of their scores.

    >>> sf.masks.topk_mask(
    ...     torch.tensor([[1.0, 1.0], [3.0, 0.0]]), 1, pattern=sf.patterns.channel(0)
    ... )
    tensor([[False, False],
            [ True,  True]])

    Args:
        axis: The dimension of the tensor as it is: `sf.modules.channel_axis` says along
            which one a layer's outputs lie.
        norm: The order p of the vector norm: any float, inf included.
        groups: The number of equal blocks of slices, such as the 4 gates of an LSTM.
            Slices compete inside each block, and an int count is a count of each.

    Returns:
        The pattern.

    Raises:
        TypeError: `axis` or `groups` is not an int, or `norm` is NaN or no number.
        ValueError: `groups` is below 1; when a mask is made, the axis is missing or not
            divisible by `groups`.
    """
    check_int("", "axis", axis)
    if not is_number(norm) or math.isnan(norm):
        raise TypeError(
            "channel: expected norm to be a number, such as 1, 2 or math.inf, got "
            f"{norm!r}"
        )
    name = f"channel(axis={axis}, norm={norm}" + (
        ")" if groups == 1 else f", groups={groups})"
    )

    def unit(size: Box) -> Box:
        at = axis_of(name, axis, size)
        return tuple(1 if i == at else max(s, 1) for i, s in enumerate(size))

    return Pattern(name, unit, _blocks(name, groups, axis), Pooling("norm", norm))


@described
def kernel(reduce: Reduce = "mean") -> Pattern:
    """The entries of each (out, in) pair of a convolution are kept or pruned together.

    >>> scores = torch.arange(8.0).reshape(1, 2, 2, 2)
    >>> sf.masks.topk_mask(scores, 1, pattern=sf.patterns.kernel()).sum((2, 3))
    tensor([[0, 4]])

    Args:
        reduce: How the scores of a kernel become one, as in `block`.

    Returns:
        The pattern. On a 2-D leaf a kernel is one element.

    Raises:
        ValueError: `reduce` is unknown.
    """

    def unit(size: Box) -> Box:
        return tuple(1 if i < 2 else max(s, 1) for i, s in enumerate(size))

    return Pattern(
        f"kernel(reduce={reduce!r})", unit, lambda grid: grid, reduction(reduce)
    )


def _blocks(name: str, groups: int, axis: int) -> Callable[[Box], Box]:
    check_int("", "groups", groups, 1)

    def group(grid: Box) -> Box:
        at = axis_of(name, axis, grid, groups)
        return tuple(s // groups if i == at else s for i, s in enumerate(grid))

    return group


@described
def out_groups(groups: int) -> Pattern:
    """Elements compete inside each of g equal blocks of output rows (dimension 0).

    >>> sf.masks.topk_mask(
    ...     torch.tensor([[5.0, 4.0], [1.0, 2.0]]), 1, pattern=sf.patterns.out_groups(2)
    ... )
    tensor([[ True, False],
            [False,  True]])

    Args:
        groups: The number g of blocks.

    Returns:
        The pattern. An int count is a count of each group.

    Raises:
        TypeError: `groups` is not an int.
        ValueError: `groups` is below 1; when a mask is made, dimension 0 is not
            divisible by it.
    """
    name = f"out_groups({groups})"
    return Pattern(name, _ones, _blocks(name, groups, 0))


@described
def in_groups(groups: int) -> Pattern:
    """Elements compete inside each of g equal blocks of input columns (dimension 1).

    >>> sf.masks.topk_mask(
    ...     torch.tensor([[5.0, 1.0], [4.0, 2.0]]), 1, pattern=sf.patterns.in_groups(2)
    ... )
    tensor([[ True, False],
            [False,  True]])

    Args:
        groups: The number g of blocks.

    Returns:
        The pattern. An int count is a count of each group.

    Raises:
        TypeError: `groups` is not an int.
        ValueError: `groups` is below 1; when a mask is made, dimension 1 is missing or
            not divisible by it.
    """
    name = f"in_groups({groups})"
    return Pattern(name, _ones, _blocks(name, groups, 1))


@described
def row_balanced(axis: int | Sequence[int] = 0) -> Pattern:
    """Elements compete inside their own output row: a constant fan-in.

    >>> sf.masks.topk_mask(
    ...     torch.tensor([[5.0, 4.0], [1.0, 2.0]]),
    ...     1,
    ...     pattern=sf.patterns.row_balanced(),
    ... )
    tensor([[ True, False],
            [False,  True]])

    Args:
        axis: The dimension of the outputs, or several: 1 for the Conv1D of
            transformers, (0, 1) for experts in one leaf, [experts, out, in], and (0, 2)
            where they are stored as [experts, in, out].

    Returns:
        The pattern. An int count is a count of each row.

    Raises:
        TypeError: An axis is not an int.
        ValueError: When a mask is made, the tensor has no such axis.

    Lasby et al. 2024, arXiv 2305.02299.
    """
    if is_sequence(axis):
        axes = tuple(axis)
    else:
        axes = (axis,)
    for one in axes:
        check_int("row_balanced", "axis", one)
    shown = axes[0] if len(axes) == 1 else axes
    name = f"row_balanced({f'axis={shown}' if shown else ''})"

    def group(grid: Box) -> Box:
        outputs = {axis_of(name, one, grid) for one in axes}
        return tuple(1 if i in outputs else s for i, s in enumerate(grid))

    return Pattern(name, _ones, group)


@described
def nearly_diagonal(nearliness: int) -> Pattern:
    """The entries near the diagonal of a matrix are kept, for any scores.

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

    Args:
        nearliness: The number of diagonals, which is odd: entries within
            nearliness // 2 of the main one are kept. 0 and less keep nothing.

    Returns:
        The pattern, which fixes the count. Rows and columns beyond the band of an
        oblong matrix are all False.

    Raises:
        TypeError: `nearliness` is not an int.
        ValueError: `nearliness` is even and above 0; when a mask is made, the tensor is
            not 2-D, or nearliness // 2 >= min(rows, columns).
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

    return Pattern(name, _ones, group, fixed=count, allowed=band)


@dataclass(frozen=True, repr=False)
class PickedPattern(Pattern):
    """A pattern that chooses the units of a group together, as the best ones by
    themselves would not fit each other: `pick` marks the units of an `Entry`.
    """

    pick: Callable[[Entry], Tensor] = field(kw_only=True, compare=False)
    one_by_one = False

    def grids(self, leaves: Leaves) -> Grids:
        """The units of some leaves; errors name the leaf."""
        units = units_of_leaves(self, leaves)
        return Grids(units, self.winners)

    def winners(self, entries: Sequence[Entry], counts: Counts) -> list[Tensor]:
        """What `pick` chooses: the pattern says the counts."""
        return [self.pick(entry) for entry in entries]


@described
def transposable(n: int, m: int, axes: Sequence[int] = (0, 1)) -> Pattern:
    """Exactly n in every row and in every column of each m x m tile are kept.

    >>> scores = torch.tensor([[9.0, 8.0], [7.0, 1.0]])
    >>> sf.masks.topk_mask(scores, None, pattern=sf.patterns.transposable(1, 2))
    tensor([[False,  True],
            [ True, False]])

    Args:
        n: How many are kept in each row and column of a tile.
        m: The size of a tile along both dimensions.
        axes: The two dimensions of a tile: by default outputs and inputs of linear
            layers and convolutions.

    Returns:
        The pattern, which fixes the count, so give algorithms no sparsity. Its units
        are picked together and not one by one, so algorithms that drop and grow units
        do not take it, nor do DTensors.

    Raises:
        TypeError: A number is not an int.
        ValueError: `n` is outside [0, m], or `axes` are not two different ones; when a
            mask is made, an axis is missing or not divisible by `m`.

    The weight and its transpose are both N:M. The tile with the largest sum of
    scores is kept: sums are in float64, added in one order. NaN never wins: tiles with
    fewer NaN come first. Of equal sums the lowest pattern wins: the one whose first row
    keeps the earlier columns, then its second row. It is exact where there are at most
    2,048 patterns: for m up to 5, and n of 1 or m - 1 with m = 6. For other sizes it is
    a greedy choice and then exchanges between two rows as long as one gains: the same
    mask everywhere, but not always the best one.

    Hubara et al. 2021, arXiv 2102.08124.
    """
    check_int("transposable", "m", m, 1)
    check_int("transposable", "n", n, 0)
    if n > m:
        raise ValueError(f"transposable: expected n <= m, got n={n}, m={m}")
    if not is_sequence(axes):
        raise TypeError(
            f"transposable: expected axes to be two ints such as (0, 1), got {axes!r}"
        )
    pair = tuple(axes)
    for axis in pair:
        check_int("transposable", "axes", axis)
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ValueError(f"transposable: expected two different axes, got {pair}")
    name = f"transposable({n}, {m}{'' if pair == (0, 1) else f', axes={pair}'})"

    def group(grid: Box) -> Box:
        at = {axis_of(name, axis, grid, m) for axis in pair}
        if len(at) < 2:
            raise ValueError(f"{name}: expected two different axes in shape {grid}")
        return tuple(m if i in at else 1 for i in range(len(grid)))

    return PickedPattern(name, _ones, group, fixed=n * m, pick=partial(tiles, n=n, m=m))
