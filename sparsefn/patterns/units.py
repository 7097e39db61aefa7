"""Tensors as rows of units, and back: the one mechanism behind every pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from sparsefn.engine.folds import slabs
from sparsefn.engine.pooling import Pooling, pool, split
from sparsefn.engine.transforms import visible
from sparsefn.patterns.kinds import Box, Pattern

Flags = TypeVar("Flags", Tensor, Tensor | None)
Tensors: TypeAlias = tuple[Tensor, ...]

_SLAB = 1 << 18  # elements that are laid out anew at a time: few enough for a core's cache


def _boxes(x: Tensor, box: Box) -> Tensor:
    """View x, whose sizes are divisible by box, as (number of boxes, elements of a box): one box where it is empty."""
    if box == x.shape:
        return x.reshape(1, -1)
    size = math.prod(box)
    if size and _in_line(box, x.shape):
        return x.reshape(x.numel() // size, size)
    parts = split(x, box)
    return parts.reshape(math.prod(parts.shape[: x.ndim]), size)


def _in_line(box: Box, shape: Box) -> bool:
    # Whether the elements of each box follow one another: from the end whole dimensions, part of one, then ones.
    whole = True
    for b, size in zip(reversed(box), reversed(shape), strict=True):
        if b != 1 and not whole:
            return False
        whole = whole and b == size
    return True


def _unboxes(rows: Tensor, box: Box, shape: Box) -> Tensor:
    """Inverse of `_boxes`."""
    if box == shape or _in_line(box, shape):
        return rows.reshape(shape)
    grid = [size // b if b else 1 for size, b in zip(shape, box, strict=True)]
    order = [i for d in range(len(box)) for i in (d, d + len(box))]
    return rows.reshape([*grid, *box]).permute(order).reshape(shape)


def _grid(shape: Box, box: Box) -> Box:
    return tuple(-(-size // b) for size, b in zip(shape, box, strict=True))


def _units(pattern: Pattern, shape: Box) -> Box:
    # The grid of the units of a tensor of this shape.
    box = pattern.unit(shape)
    return shape if _single(box) else _grid(shape, box)


def over_boxes(x: Tensor, box: Box, fn: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """A function of (boxes, elements) at each box of x, whose far borders may be partial boxes.

    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.sum(-1))
    tensor([[4., 2.]])
    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.cumsum(-1))
    tensor([[1., 2., 1.],
            [3., 4., 2.]])

    The function returns one number a box, which are laid out as the grid of boxes, or one an element. It gets
    contiguous rows, and those of `others`, tensors of the shape of x, at the same boxes. Of a large CPU tensor it gets
    some boxes at a time, so what it returns for one must not depend on the others.
    """
    if isinstance(fn, Pooling):
        return _over_parts((x,), box, lambda parts, box: pool(parts[0], box, fn), 0)
    return _over_parts((x, *others), box, partial(_of_whole_boxes, fn), 0)


def _over_parts(xs: Tensors, box: Box, fn: Callable[[Tensors, Box], Tensor], dim: int) -> Tensor:
    # A function of tensors that boxes fill, at the inner parts of xs and at their borders.
    if dim == xs[0].ndim:
        return fn(xs, box)
    size, edge = xs[0].shape[dim], xs[0].shape[dim] % box[dim]
    if not edge:
        return _over_parts(xs, box, fn, dim + 1)
    border = (*box[:dim], edge, *box[dim + 1 :])
    last = _over_parts(tuple(x.narrow(dim, size - edge, edge) for x in xs), border, fn, dim + 1)
    if size < box[dim]:
        return last
    inner = tuple(x.narrow(dim, 0, size - edge) for x in xs)
    return torch.cat([_over_parts(inner, box, fn, dim + 1), last], dim)


def _of_whole_boxes(fn: Callable[..., Tensor], xs: Tensors, box: Box) -> Tensor:
    x = xs[0]
    if x.numel() > _SLAB and visible(xs) is not None and not any(x.requires_grad for x in xs):
        return _by_slabs(fn, xs, box)
    shape, out = tuple(x.shape), fn(*(_boxes(x, box).contiguous() for x in xs))
    one_each = out.ndim == 1 or out.shape[1] == 1
    return out.reshape(_grid(shape, box)) if one_each else _unboxes(out, box, shape)


def _by_slabs(fn: Callable[..., Tensor], xs: Tensors, box: Box) -> Tensor:
    parts, size, shape = [split(x, box) for x in xs], math.prod(box), xs[0].shape
    grid = parts[0].shape[: len(shape)]
    # Threads wait for each other after every operation, for long on a busy machine: for them slabs are few and large.
    most = _SLAB if torch.get_num_threads() == 1 else 16 * _SLAB
    result: Tensor | None = None
    for at in slabs(grid, max(1, most // size)):
        out = fn(*(part[at].reshape(-1, size).contiguous() for part in parts))
        one_each = out.ndim == 1 or out.shape[1] == 1
        if result is None:
            result = out.new_empty(grid if one_each else shape)
            target = result if one_each else split(result, box)
        target[at] = out.reshape(target[at].shape)
    assert result is not None
    return result


def _single(box: Box) -> bool:
    # max(box, default=1) == 1, which compilers do not take of symbolic sizes.
    return not any(n > 1 for n in box) and (not box or any(n == 1 for n in box))


def unit_grid(pattern: Pattern, shape: Box) -> Box:
    """Shape of the grid of units of a tensor, without the dimensions that a unit spans.

    >>> unit_grid(sf.patterns.kernel(), (8, 4, 3, 3))
    (8, 4)

    Budgets see this shape.
    """
    box = pattern.unit(shape)
    if _single(box):
        return shape
    spanned = [b == s != 1 for b, s in zip(box, shape, strict=True)]
    return tuple(n for n, gone in zip(_grid(shape, box), spanned, strict=True) if not gone)


def row_shape(pattern: Pattern, shape: Box) -> tuple[int, int]:
    """Groups and units of a group of a tensor, from its shape alone.

    >>> row_shape(sf.patterns.nm(2, 4), (3, 8)), row_shape(sf.patterns.channel(0), (3, 8))
    ((6, 4), (1, 3))
    """
    grid = _units(pattern, shape)
    group = pattern.group(grid)
    counts = [size // b if b else 1 for size, b in zip(grid, group, strict=True)]  # a list: compilers take no generator
    return math.prod(counts), math.prod(group)


def to_columns(pattern: Pattern, x: Tensor) -> Tensor | None:
    """Elements as (rows, units of a group, columns) where each of several groups lies along one dimension, else None.

    >>> to_columns(sf.patterns.nm(1, 2, axis=0), torch.ones(4, 3)).shape
    torch.Size([2, 2, 3])

    A view where x is contiguous. The groups of `to_rows` are its rows and in each its columns, in this order.
    """
    shape = tuple(x.shape)
    if pattern.reduce is not None or not _single(pattern.unit(shape)):
        return None
    group = pattern.group(shape)
    along = [d for d, size in enumerate(group) if size != 1]
    if len(along) != 1 or not group[along[0]] or group == shape:
        return None
    d, units = along[0], group[along[0]]
    return x.reshape(math.prod(shape[:d]) * (shape[d] // units), units, math.prod(shape[d + 1 :]))


def to_rows(pattern: Pattern, x: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Units of x as (groups, units of a group), reduced by the pattern or by `reduce`.

    >>> to_rows(sf.patterns.nm(2, 4), torch.arange(8.0))
    tensor([[0., 1., 2., 3.],
            [4., 5., 6., 7.]])

    The result has no gradient where units are reduced: a mask has none. 16-bit scores are reduced in 32 bits.
    """
    if pattern.reduce is None:
        return _boxes(x, pattern.group(tuple(x.shape)))
    shape = tuple(x.shape)
    box, fn = pattern.unit(shape), reduce or pattern.reduce
    short = x.dtype in (torch.float16, torch.bfloat16)  # a mean rounded to 16 bits would make ties
    if x.numel():
        x = over_boxes(
            x.detach(), box, (lambda rows: fn(rows.float())) if short and not isinstance(fn, Pooling) else fn
        )
    else:  # some reductions refuse empty tensors: there is no maximum
        x = x.new_zeros(_grid(shape, box), dtype=torch.float32 if short else x.dtype)
    return _boxes(x, pattern.group(tuple(x.shape)))


def active_rows(pattern: Pattern, mask: Tensor) -> Tensor:
    """Which units are kept, as (groups, units of a group): a kept unit has more elements than a pruned one keeps.

    >>> mask = torch.tensor([True, True, True, False])
    >>> active_rows(sf.patterns.block((2,)), mask), active_rows(sf.patterns.block((2,), zeros=1), mask)
    (tensor([[True, True]]), tensor([[ True, False]]))
    """
    lost = pattern.zeros
    if pattern.reduce is None or not mask.numel():
        return to_rows(pattern, mask)

    def is_active(parts: Tensors, box: Box) -> Tensor:
        if lost is None:
            return pool(parts[0], box, Pooling("max"))
        return pool(parts[0], box, Pooling("sum")) > max(math.prod(box) - lost, 0)

    kept = _over_parts((mask,), pattern.unit(tuple(mask.shape)), is_active, 0)
    return _boxes(kept, pattern.group(tuple(kept.shape)))


def allowed_rows(pattern: Pattern, like: Tensor, eligible: Flags) -> Flags:
    """The eligible units that the pattern may keep, as (groups, units of a group); None means all units.

    >>> allowed_rows(sf.patterns.nearly_diagonal(1), torch.zeros(2, 2), None)
    tensor([[ True, False, False,  True]])
    """
    if pattern.allowed is None:
        return eligible
    grid = _units(pattern, tuple(like.shape))
    allowed = _boxes(pattern.allowed(grid).to(like.device), pattern.group(grid))
    return allowed if eligible is None else eligible & allowed


def fixed_count(pattern: Pattern, shape: Box) -> int | Tensor | None:
    """How many units each group of a tensor of this shape keeps, where the pattern says it.

    >>> fixed_count(sf.patterns.nm(2, 4), (8,)), fixed_count(sf.patterns.nearly_diagonal(3), (2, 2))
    (2, 4)
    """
    fixed = pattern.fixed
    return fixed(_units(pattern, shape)) if callable(fixed) else fixed


def from_rows(pattern: Pattern, rows: Tensor, shape: Box) -> Tensor:
    """Spread rows of units over the elements of a tensor of this shape: the inverse of `to_rows` and `to_columns`.

    >>> from_rows(sf.patterns.block((2, 2)), torch.tensor([[True, False]]), (2, 3))
    tensor([[ True,  True, False],
            [ True,  True, False]])
    """
    if rows.ndim == 3:
        return rows.reshape(shape)
    box = pattern.unit(shape)
    single = _single(box)
    grid = shape if single else _grid(shape, box)
    x = _unboxes(rows, pattern.group(grid), grid)
    if not single:
        for dim in reversed(range(len(shape))):  # the largest result is then made last, from whole rows
            x = _repeated(x, dim, box[dim], shape[dim])
    return x.contiguous()  # not a view of the rows: the strides of a state's masks are what compiled code sees


def _repeated(x: Tensor, dim: int, times: int, size: int) -> Tensor:
    if times <= 1:
        return x
    edge = size % times
    if not edge:
        return _spread(x, dim, times)
    # Whole units and the last one apart: where one index serves both, inductor's vectors of bools are garbage.
    last = _spread(x.narrow(dim, x.shape[dim] - 1, 1), dim, edge)
    return torch.cat([_spread(x.narrow(dim, 0, x.shape[dim] - 1), dim, times), last], dim) if size > times else last


def _spread(x: Tensor, dim: int, times: int) -> Tensor:
    return x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], times, *x.shape[dim + 1 :]).flatten(dim, dim + 1)
