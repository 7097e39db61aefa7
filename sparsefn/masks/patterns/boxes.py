"""Tensors as boxes: a function of every box, and whole boxes as rows and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sparsefn._engine.sums import Box, Pooling, in_boxes, pool, slabs, whole_boxes
from sparsefn._engine.transforms import as_numpy

Tensors: TypeAlias = tuple[Tensor, ...]

# elements that are rearranged at a time: few enough for a core's cache
_SLAB = 1 << 18


def boxes_of(x: Tensor, box: Box) -> Tensor:
    """View x, whose sizes are divisible by box, as (number of boxes, elements of a
    box): one box where it is empty.

    >>> boxes_of(torch.arange(4).reshape(2, 2), (2, 1))
    tensor([[0, 2],
            [1, 3]])
    """
    if box == x.shape:
        return x.reshape(1, -1)
    size = math.prod(box)
    if size and in_line(box, x.shape):
        return x.reshape(x.numel() // size, size)
    parts = in_boxes(x, box)
    return parts.reshape(math.prod(parts.shape[: x.ndim]), size)


def in_line(box: Box, shape: Box) -> bool:
    """Whether the elements of each box follow one another: from the end whole
    dimensions, part of one, then ones.

    >>> in_line((1, 2), (3, 4)), in_line((2, 2), (4, 4))
    (True, False)
    """
    whole = True
    for b, size in zip(reversed(box), reversed(shape), strict=True):
        if b != 1 and not whole:
            return False
        whole = whole and b == size
    return True


def unboxed(rows: Tensor, box: Box, shape: Box) -> Tensor:
    """The tensor of a shape from the rows of its boxes: the inverse of `boxes_of`.

    >>> unboxed(torch.tensor([[0, 2], [1, 3]]), (2, 1), (2, 2))
    tensor([[0, 1],
            [2, 3]])
    """
    if box == shape or in_line(box, shape):
        return rows.reshape(shape)
    order = []
    for d in range(len(box)):
        order += [d, d + len(box)]
    parts = rows.reshape([*whole_boxes(shape, box), *box])
    return parts.permute(order).reshape(shape)


def grid_of(shape: Box, box: Box) -> Box:
    """How many boxes there are along each dimension; the last one may be partial.

    >>> grid_of((2, 3), (2, 2))
    (1, 2)
    """
    return tuple(-(-size // b) for size, b in zip(shape, box, strict=True))


def over_boxes(
    x: Tensor,
    box: Box,
    fn: Callable[..., Tensor] | Pooling,
    *others: Tensor,
) -> Tensor:
    """A function of (boxes, elements) at each box of x, whose far borders may be
    partial boxes.

    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.sum(-1))
    tensor([[4., 2.]])
    >>> over_boxes(torch.ones(2, 3), (2, 2), lambda boxes: boxes.cumsum(-1))
    tensor([[1., 2., 1.],
            [3., 4., 2.]])

    The function returns one number a box, which are laid out as the grid of boxes, or
    one an element. It gets contiguous rows of x, and the rows of `others`, tensors of
    the shape of x, at the same boxes. Of a large CPU tensor it gets some boxes at a
    time, so what it returns for one box must not depend on other boxes.
    """
    if isinstance(fn, Pooling):
        return over_parts((x,), box, lambda parts, box: pool(parts[0], box, fn))
    of_boxes = partial(_of_whole_boxes, fn)
    return over_parts((x, *others), box, of_boxes)


def over_parts(
    xs: Tensors,
    box: Box,
    fn: Callable[[Tensors, Box], Tensor],
    dim: int = 0,
) -> Tensor:
    """A function of tensors that boxes fill and the box, at the inner parts of xs and
    at their borders.

    >>> over_parts(
    ...     (torch.ones(5),),
    ...     (2,),
    ...     lambda parts, box: parts[0].reshape(-1, *box).sum(-1),
    ... )
    tensor([2., 2., 1.])
    """
    if dim == xs[0].ndim:
        return fn(xs, box)
    size = xs[0].shape[dim]
    edge = size % box[dim]
    if not edge:
        return over_parts(xs, box, fn, dim + 1)
    partial_box = (*box[:dim], edge, *box[dim + 1 :])
    border = tuple(x.narrow(dim, size - edge, edge) for x in xs)
    last = over_parts(border, partial_box, fn, dim + 1)
    if size < box[dim]:
        return last
    inner = tuple(x.narrow(dim, 0, size - edge) for x in xs)
    first = over_parts(inner, box, fn, dim + 1)
    return torch.cat([first, last], dim)


def _of_whole_boxes(fn: Callable[..., Tensor], xs: Tensors, box: Box) -> Tensor:
    x = xs[0]
    if (
        x.numel() > _SLAB
        and as_numpy(xs) is not None
        and not any(x.requires_grad for x in xs)
    ):
        return _by_slabs(fn, xs, box)
    shape = tuple(x.shape)
    rows = [boxes_of(x, box).contiguous() for x in xs]
    out = fn(*rows)
    one_each = out.ndim == 1 or out.shape[1] == 1
    if one_each:
        return out.reshape(grid_of(shape, box))
    return unboxed(out, box, shape)


def _by_slabs(fn: Callable[..., Tensor], xs: Tensors, box: Box) -> Tensor:
    parts = [in_boxes(x, box) for x in xs]
    size = math.prod(box)
    shape = xs[0].shape
    grid = parts[0].shape[: len(shape)]
    # Threads wait for each other after every operation, for long on a busy machine: for
    # them slabs are few and large.
    most = _SLAB
    if torch.get_num_threads() > 1:
        most = 16 * _SLAB
    result: Tensor | None = None
    for at in slabs(grid, max(1, most // size)):
        rows = [part[at].reshape(-1, size).contiguous() for part in parts]
        out = fn(*rows)
        if result is None:
            one_each = out.ndim == 1 or out.shape[1] == 1
            result = out.new_empty(grid if one_each else shape)
            target = result if one_each else in_boxes(result, box)
        target[at] = out.reshape(target[at].shape)
    assert result is not None
    return result


def over_elements(x: Tensor, box: Box, shape: Box) -> Tensor:
    """Each entry of a grid at every element of its box, in a tensor of this shape.

    >>> over_elements(torch.tensor([[True, False]]), (2, 2), (2, 3))
    tensor([[ True,  True, False],
            [ True,  True, False]])
    """
    # the largest result is then made last, from whole rows
    for dim in reversed(range(len(shape))):
        x = _repeated(x, dim, box[dim], shape[dim])
    return x


def _repeated(x: Tensor, dim: int, times: int, size: int) -> Tensor:
    if times <= 1:
        return x
    edge = size % times
    if not edge:
        return _spread_along(x, dim, times)
    # Whole units and the last one apart: where one index serves both, inductor's
    # vectors of bools are garbage.
    whole = x.shape[dim] - 1
    last = _spread_along(x.narrow(dim, whole, 1), dim, edge)
    if size <= times:
        return last
    first = _spread_along(x.narrow(dim, 0, whole), dim, times)
    return torch.cat([first, last], dim)


def _spread_along(x: Tensor, dim: int, times: int) -> Tensor:
    shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
    repeated = x.unsqueeze(dim + 1).expand(shape)
    return repeated.flatten(dim, dim + 1)
