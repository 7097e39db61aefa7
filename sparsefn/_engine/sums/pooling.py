"""The score of a unit from the scores of its elements, in one order of additions.

The elements of a unit stand in row-major order. With h the largest power of two below
their number, the elements from h on are added to the first elements; then h are left,
and the second half is added to the first half until one is left. Every step adds
element by element, which IEEE 754 rounds alike everywhere: on all devices, in every
layout of memory, on any number of threads, batched and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.numbers import folded, raised, root, whole_power
from sparsefn._engine.sums.folds import BlockFold, fold
from sparsefn._engine.torch_limits import is_exporting
from sparsefn._engine.transforms import Array, See, as_numpy, as_numpy_inside

Box = tuple[int, ...]

_JOINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], np.ufunc]] = {
    "add": (torch.add, np.add),
    "max": (torch.maximum, np.maximum),
    "min": (torch.minimum, np.minimum),
}


class Pooling(NamedTuple):
    """A reduction of the last dimension: "sum", "mean", "max", "min" or a norm.

    >>> from sparsefn._engine.sums.pooling import Pooling
    >>> Pooling("norm", 2)(torch.tensor([[3.0, -4.0], [0.0, 1.0]]))
    tensor([5., 1.])

    Scores of 16 bits are pooled in float32. There is no gradient, and zero is 0.0,
    never -0.0. The sum of bools is an int32 count, their maximum whether one is set.
    Raises TypeError for other scores that are not floats.
    """

    name: str
    order: float = 1.0

    def __call__(self, rows: Tensor) -> Tensor:
        box = (1,) * (rows.ndim - 1) + tuple(rows.shape[-1:])
        return pool(rows, box, self).squeeze(-1)


Reduction: TypeAlias = Callable[[Tensor], Tensor] | Pooling


def whole_boxes(sizes: Sequence[int], box: Box) -> Box:
    """How many whole boxes lie along each dimension: one where the box is empty.

    >>> from sparsefn._engine.sums.pooling import whole_boxes
    >>> whole_boxes((5, 0), (2, 0))
    (2, 1)
    """
    # of a list: compilers take no generator
    return tuple([n // b if b else 1 for n, b in zip(sizes, box, strict=True)])


def in_boxes(x: Tensor, box: Box) -> Tensor:
    """View x, whose sizes are divisible by box, as its grid of boxes followed by the
    dimensions of a box.

    >>> from sparsefn._engine.sums.pooling import in_boxes
    >>> in_boxes(torch.zeros(4, 9), (2, 3)).shape
    torch.Size([2, 3, 2, 3])
    """
    sizes: list[int] = []
    for count, b in zip(whole_boxes(x.shape, box), box, strict=True):
        sizes += [count, b]
    grid = range(0, 2 * x.ndim, 2)
    inside = range(1, 2 * x.ndim, 2)
    return x.reshape(sizes).permute(*grid, *inside)


def pool(x: Tensor, box: Box, how: Pooling) -> Tensor:
    """One number for each box of x, whose sizes box divides, laid out as their grid.

    >>> from sparsefn._engine.sums.pooling import Pooling, pool
    >>> pool(torch.ones(2, 6), (2, 3), Pooling("sum"))
    tensor([[6., 6.]])

    Of an empty tensor these are zeros.
    """
    if not x.is_floating_point() and (
        x.dtype != torch.bool or how.name in ("mean", "norm")
    ):
        raise TypeError(f"expected floating-point scores, got {x.dtype}")
    x = x.detach()
    name = how.name
    order = float(how.order)
    if not x.numel():
        return x.new_zeros(whole_boxes(x.shape, box), dtype=_dtype(x, name))
    seen = _in_memory(x, box, name, order, as_numpy)
    if seen is not None:
        return seen
    compiling = torch.compiler.is_compiling() and not is_exporting()
    if is_exporting() or (x.device.type != "cpu" and not compiling):
        return reference(x, box, name, order)
    pooled: Tensor = _operator(x, list(box), name, order)
    return pooled


def _dtype(x: Tensor, name: str) -> torch.dtype:
    if x.dtype == torch.bool:
        return torch.int32 if name == "sum" else torch.bool
    if x.dtype == torch.float64:
        return x.dtype
    return torch.float32


def _join(name: str, order: float) -> str:
    if name in ("max", "min"):
        return name
    if name == "norm" and not math.isfinite(order):
        return "max" if order > 0 else "min"
    return "add"


def reference(x: Tensor, box: Box, name: str, order: float) -> Tensor:
    """The result of `pool`, by operations on whole tensors.

    >>> from sparsefn._engine.sums.pooling import reference
    >>> reference(torch.ones(2, 6), (2, 3), "mean", 1.0)
    tensor([[1., 1.]])
    """
    parts = in_boxes(x, box).to(_dtype(x, name))
    grid = range(x.ndim)
    inside = range(x.ndim, 2 * x.ndim)
    parts = parts.permute(*inside, *grid)
    parts = parts.reshape(math.prod(box), *whole_boxes(x.shape, box))
    if name == "norm":
        if math.isinf(order):
            parts = parts.abs()
        else:
            parts = raised(parts.abs(), order)
    join, _ = _JOINS[_join(name, order)]
    total = folded(parts, join)
    if x.dtype == torch.bool:
        return total
    if name == "mean":
        size = math.prod(box)
        # a tensor over a Python number is a product with 1 / n on some devices
        n = torch.full((), size, dtype=total.dtype, device=total.device)
        total = total / n
    elif name == "norm":
        total = root(total, order)
    return total + 0  # which makes 0.0 of -0.0


# ---- the operator, inside which tensors are ordinary ---------------------------------


@torch.library.custom_op("sparsefn::pool", mutates_args=())
def _operator(x: Tensor, box: list[int], name: str, order: float) -> Tensor:
    """One number for each box of a tensor that has elements."""
    seen = _in_memory(x, tuple(box), name, order, as_numpy_inside)
    if seen is None:
        return reference(x, tuple(box), name, order)
    return seen


@_operator.register_fake
def _(x: Tensor, box: list[int], name: str, order: float) -> Tensor:
    grid = whole_boxes(x.shape, tuple(box))
    return torch.empty(grid, dtype=_dtype(x, name), device=x.device)


@_operator.register_vmap
def _(
    info: object,
    in_dims: tuple[int, ...],
    x: Tensor,
    box: list[int],
    name: str,
    order: float,
) -> tuple[Tensor, int]:
    return _operator(x.movedim(in_dims[0], 0), [1, *box], name, order), 0


# ---- ordinary CPU tensors ------------------------------------------------------------


def _in_memory(x: Tensor, box: Box, name: str, order: float, see: See) -> Tensor | None:
    seen = see([in_boxes(x, box)])
    if seen is None:
        return None
    parts = seen[0]
    rank = x.ndim
    size = math.prod(box)
    lift = None
    if x.dtype == torch.bool:
        if size < 256 or name != "sum":
            parts = parts.view(np.uint8)
        else:
            parts = parts.astype(np.int32)
    elif name == "norm" or parts.itemsize == 2:
        lift = partial(_lifted, name, order, x.dtype == torch.bfloat16)
    _, join = _JOINS[_join(name, order)]
    dtype = np.float32 if parts.itemsize == 2 else parts.dtype
    work = BlockFold(lift, join, dtype)
    grid = range(rank)
    inside = range(rank, 2 * rank)
    with np.errstate(all="ignore"):
        total = fold(parts.transpose(*inside, *grid), rank, work)
        if x.dtype == torch.bool:
            kind = np.int32 if name == "sum" else np.bool_
            return torch.from_numpy(total.astype(kind))
        if name == "mean":
            total /= size
        total += 0  # which makes 0.0 of -0.0
    if name == "norm":
        return root(torch.from_numpy(total), order)
    return torch.from_numpy(total)


def _lifted(name: str, order: float, brain: bool, block: Array) -> Array:
    if brain:  # words, the upper halves of float32
        block = np.left_shift(block, 16, dtype=np.int32).view(np.float32)
    elif block.dtype == np.float16:
        block = block.astype(np.float32)
    if name != "norm":
        return block
    if math.isinf(order):
        return np.abs(block)
    if order >= 1 and order == int(order):
        if order % 2:
            block = np.abs(block)
        return np.asarray(whole_power(block, int(order)))
    size = torch.from_numpy(np.abs(block))
    powers: Array = raised(size, order).numpy()
    return powers
