"""Tensors as rows of units: the one mechanism behind every pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from sparsefn.patterns import Box, Pattern

Flags = TypeVar("Flags", Tensor, Tensor | None)


def _boxes(x: Tensor, box: Box) -> Tensor:
    """View x, whose sizes are divisible by box, as (number of boxes, elements of a box): one box where it is empty."""
    split = [n for size, b in zip(x.shape, box, strict=True) for n in (size // b if b else 1, b)]
    order = [*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2)]
    grid = math.prod(split[::2])
    return x.reshape(split).permute(order).reshape(grid, math.prod(box))


def _unboxes(rows: Tensor, box: Box, shape: Box) -> Tensor:
    """Inverse of `_boxes`."""
    grid = [size // b if b else 1 for size, b in zip(shape, box, strict=True)]
    order = [i for d in range(len(box)) for i in (d, d + len(box))]
    return rows.reshape([*grid, *box]).permute(order).reshape(shape)


def _grid(shape: Box, box: Box) -> Box:
    return tuple(-(-size // b) for size, b in zip(shape, box, strict=True))


def over_boxes(x: Tensor, box: Box, fn: Callable[[Tensor], Tensor], dim: int = 0) -> Tensor:
    """A function of (boxes, elements) at each box of x, whose far borders may be partial boxes.

    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.sum(-1))
    tensor([[4., 2.]])
    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.cumsum(-1))
    tensor([[1., 2., 1.],
            [3., 4., 2.]])

    It gives a number a box, laid out as their grid, or one an element.
    """
    if dim == x.ndim:
        shape, out = tuple(x.shape), fn(_boxes(x, box))
        one_each = out.ndim == 1 or out.shape[1] == 1
        return out.reshape(_grid(shape, box)) if one_each else _unboxes(out, box, shape)
    size, edge = x.shape[dim], x.shape[dim] % box[dim]
    border = (*box[:dim], edge, *box[dim + 1 :])
    parts = [over_boxes(x.narrow(dim, 0, size - edge), box, fn, dim + 1)] if size >= box[dim] or not size else []
    if edge:
        parts.append(over_boxes(x.narrow(dim, size - edge, edge), border, fn, dim + 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unit_grid(pattern: Pattern, shape: Box) -> Box:
    """Shape of the grid of units of a tensor, without the dimensions that a unit spans.

    >>> unit_grid(sf.patterns.kernel(), (8, 4, 3, 3))
    (8, 4)

    Budgets see this shape.
    """
    box = pattern.unit(shape)
    spanned = [b == s != 1 for b, s in zip(box, shape, strict=True)]
    return tuple(n for n, gone in zip(_grid(shape, box), spanned, strict=True) if not gone)


def to_rows(pattern: Pattern, x: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Units of x as (groups, units of a group), reduced by the pattern or by `reduce`.

    >>> to_rows(sf.patterns.nm(2, 4), torch.arange(8.0))
    tensor([[0., 1., 2., 3.],
            [4., 5., 6., 7.]])
    """
    shape = tuple(x.shape)
    box = pattern.unit(shape)
    if pattern.reduce is not None:
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()  # a mean rounded to 16 bits would make ties
        # Some reductions refuse nothing: a maximum of it does not exist.
        x = over_boxes(x, box, reduce or pattern.reduce) if x.numel() else x.new_zeros(_grid(shape, box))
    return _boxes(x, pattern.group(tuple(x.shape)))


def active_rows(pattern: Pattern, mask: Tensor) -> Tensor:
    """Which units are kept, as (groups, units of a group): those that have more than a pruned unit has left.

    >>> mask = torch.tensor([True, True, True, False])
    >>> active_rows(sf.patterns.block((2,)), mask), active_rows(sf.patterns.block((2,), zeros=1), mask)
    (tensor([[True, True]]), tensor([[ True, False]]))
    """
    if pattern.zeros is None:
        return to_rows(pattern, mask, lambda unit: unit.any(-1))
    lost = pattern.zeros
    return to_rows(pattern, mask, lambda unit: unit.sum(-1) > max(unit.shape[-1] - lost, 0))


def allowed_rows(pattern: Pattern, like: Tensor, eligible: Flags) -> Flags:
    """Those of the eligible units, (groups, units of a group), that the pattern may keep; None means all units.

    >>> allowed_rows(sf.patterns.nearly_diagonal(1), torch.zeros(2, 2), None)
    tensor([[ True, False, False,  True]])
    """
    if pattern.allowed is None:
        return eligible
    grid = _grid(tuple(like.shape), pattern.unit(tuple(like.shape)))
    allowed = _boxes(pattern.allowed(grid).to(like.device), pattern.group(grid))
    return allowed if eligible is None else eligible & allowed


def fixed_count(pattern: Pattern, shape: Box) -> int | Tensor | None:
    """How many units each group of a tensor of this shape keeps, where the pattern says it.

    >>> fixed_count(sf.patterns.nm(2, 4), (8,)), fixed_count(sf.patterns.nearly_diagonal(3), (2, 2))
    (2, 4)
    """
    fixed = pattern.fixed
    return fixed(_grid(shape, pattern.unit(shape))) if callable(fixed) else fixed


def from_rows(pattern: Pattern, rows: Tensor, shape: Box) -> Tensor:
    """Spread rows of units over the elements of a tensor of this shape: the inverse of `to_rows`.

    >>> from_rows(sf.patterns.block((2, 2)), torch.tensor([[True, False]]), (2, 3))
    tensor([[ True,  True, False],
            [ True,  True, False]])
    """
    box = pattern.unit(shape)
    grid = _grid(shape, box)
    x = _unboxes(rows, pattern.group(grid), grid)
    for dim, (b, size) in enumerate(zip(box, shape, strict=True)):
        if b > 1:
            x = x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], b, *x.shape[dim + 1 :])
            x = x.flatten(dim, dim + 1).narrow(dim, 0, size)
    return x.contiguous()  # not a view of the rows: the strides of a state's masks are what compiled code sees
