"""How elements form units, and how units form competing groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sparsefn.engine.checks import Made, check_int, described
from sparsefn.engine.selection import Entry
from sparsefn.engine.sums import Box as Box
from sparsefn.engine.sums import Pooling, Reduction
from sparsefn.engine.surroundings import concrete
from sparsefn.patterns.places import Sets

Reduce = Literal["mean", "sum", "max", "min", "l2"] | Callable[[Tensor], Tensor]
# (glob, dim, block, parts), or the unit of each index in the place of a block
Member: TypeAlias = tuple[str, int, int | tuple[int, ...], int]

_REDUCTIONS: dict[str, Pooling] = {
    **{name: Pooling(name) for name in ("mean", "sum", "max", "min")},
    "l2": Pooling("norm", 2),
}


@dataclass(frozen=True)
class Pattern(Made):
    """Which elements are kept or pruned together, as a unit, and which units compete.

    >>> sf.patterns.nm(2, 4)
    nm(2, 4, axis=-1)
    >>> sf.patterns.nm(2, 4) == sf.patterns.nm(2, 4, axis=-1)
    True

    `unit(shape)` is the box of elements that form one unit, `group(grid)` the box of
    units that compete (both with one entry a dimension), `reduce` turns the scores in a
    unit, along the last dimension, into the unit's score. Where the pattern says so,
    `fixed` is the count that a group keeps (an int, a 0-d tensor or a function of the
    grid), `allowed(grid)` marks the units that may be kept at all, and `zeros` is how
    many elements a pruned unit loses: its worst, where None is all of them.
    `members` are those of `sf.patterns.tied`, whose units lie in several leaves, and
    `sets` finds their sets. `pick` chooses the units of a group together, where the
    best ones by themselves would not fit each other: a function of an `Entry`.
    """

    name: str
    unit: Callable[[Box], Box] = field(compare=False)
    group: Callable[[Box], Box] = field(compare=False)
    reduce: Reduction | None = field(default=None, compare=False)
    fixed: int | Tensor | Callable[[Box], int] | None = field(
        default=None, compare=False
    )
    allowed: Callable[[Box], Tensor] | None = field(default=None, compare=False)
    zeros: int | None = field(default=None, compare=False)
    members: tuple[tuple[Member, ...], ...] = field(default=(), compare=False)
    sets: Sets | None = field(default=None, compare=False)
    pick: Callable[[Entry], Tensor] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return self.name


def _ones(shape: Box) -> Box:
    return (1,) * len(shape)


def reduction(reduce: Reduce) -> Reduction:
    """The function of a unit's scores that a name means, or the one that is given.

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
    """
    return Pattern("unstructured()", _ones, lambda grid: grid)


@described
def nm(n: int | Tensor, m: int, axis: int = -1) -> Pattern:
    """Exactly n of every m consecutive elements along an axis are kept.

    >>> sf.masks.topk_mask(
    ...     torch.tensor([4.0, 1.0, 2.0, 3.0]), None, pattern=sf.patterns.nm(2, 4)
    ... )
    tensor([ True, False, False,  True])

    The axis counts in the tensor as it is: `sf.modules.pattern_axis` says which one a
    layer sums over.
    0 <= n <= m, else ValueError; the axis must be divisible by m, else ValueError when
    a mask is made. `n` may be a 0-d int64 tensor, one a member of an ensemble: it is
    clamped, and give the algorithm no sparsity, which is not compared with it. Mishra
    et al. 2021, arXiv 2104.08378.
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
    known = concrete(n)
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

    Blocks start at index 0; those at the far borders may be partial and are reduced
    over the elements that exist. `reduce` is "mean", "sum", "max", "min", "l2", whose
    sums have one order everywhere, or a callable over the last dimension of contiguous
    rows, the scores of some blocks at a time where there are many: its own sums may
    depend on threads and compilers. A tensor of fewer dimensions is a ValueError.

    With `zeros`, a pruned block loses its `zeros` worst elements only (all, if it has
    no more); counts and sparsities stay those of blocks. Where no block is kept, all
    are pruned so:

    >>> sf.masks.topk_mask(
    ...     torch.tensor([4.0, 1.0, 2.0, 3.0]),
    ...     0,
    ...     pattern=sf.patterns.block((4,), zeros=2),
    ... )
    tensor([ True, False, False,  True])
    """
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
        zeros = None if zeros == math.prod(box) else zeros
    name = name if zeros is None else f"{name[:-1]}, zeros={zeros})"

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

    The axis counts in the tensor as it is: `sf.modules.channel_axis` says along which
    one a layer's outputs lie. `norm` is the order p of the vector norm: any float, inf
    included. With `groups`, slices compete inside each of several equal blocks of them,
    such as the 4 gates of an LSTM, and an int count is a count of each block; an axis
    that they do not divide is a ValueError.
    """
    check_int("", "axis", axis)
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

    On a 2-D leaf a kernel is one element.
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

    An int count is a count of each group. Dimension 0 must be divisible by g, else
    ValueError.
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

    An int count is a count of each group. Dimension 1 must be divisible by g, else
    ValueError.
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

    An int count is a count of each row. `axis` is that of the outputs: 1 for the Conv1D
    of transformers, (0, 1) for experts in one leaf, [experts, out, in], and (0, 2)
    where they are stored as [experts, in, out]. Lasby et al. 2024, arXiv 2305.02299.
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    shown = axes[0] if len(axes) == 1 else axes
    name = f"row_balanced({f'axis={shown}' if shown else ''})"

    def group(grid: Box) -> Box:
        outputs = {axis_of(name, one, grid) for one in axes}
        return tuple(1 if i in outputs else s for i, s in enumerate(grid))

    return Pattern(name, _ones, group)
