"""The score of a unit from the scores of its elements, in one order of additions.

The elements of a unit stand in row-major order. With h the largest power of two below their number, those from h on
are added to the first ones; then h are left, and the second half is added to the first until one is left. Every
step adds element by element, which IEEE 754 rounds alike everywhere: on all devices, in every layout of memory, on
any number of threads, batched and compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from sparsefn.arrays import BLOCK, Array, See, array, each, memory
from sparsefn.elementary import raised, root
from sparsefn.numerics import folded, whole_power

Box = tuple[int, ...]

_JOINS: dict[str, tuple[Any, Any]] = {
    "add": (torch.add, np.add),
    "max": (torch.maximum, np.maximum),
    "min": (torch.minimum, np.minimum),
}
_BLOCK = BLOCK // 2  # elements at a time: they are added in place, beside a copy of them
_TALL = 128  # elements of a unit in one block, where units lie side by side in memory
_SHORT = 64  # entries: rows of fewer are added across units, as a loop of its own for each costs more


@dataclass(frozen=True)
class Pooling:
    """A reduction of the last dimension: "sum", "mean", "max", "min", "norm" of some order.

    >>> from sparsefn.pooling import Pooling
    >>> Pooling("norm", 2)(torch.tensor([[3.0, -4.0], [0.0, 1.0]]))
    tensor([5., 1.])

    Scores of 16 bits are pooled in float32. There is no gradient, and zero is 0.0, never -0.0. The sum of bools is
    an int32 count, their maximum whether one is set. Raises TypeError for other scores that are not floats.
    """

    name: str
    order: float = 1.0

    def __call__(self, rows: Tensor) -> Tensor:
        return pool(rows, (1,) * (rows.ndim - 1) + tuple(rows.shape[-1:]), self).squeeze(-1)


def split(x: Tensor, box: Box) -> Tensor:
    """View x, whose sizes are divisible by box, as its grid of boxes followed by the dimensions of a box.

    >>> from sparsefn.pooling import split
    >>> split(torch.zeros(4, 9), (2, 3)).shape
    torch.Size([2, 3, 2, 3])
    """
    sizes = [n for size, b in zip(x.shape, box, strict=True) for n in (size // b if b else 1, b)]
    return x.reshape(sizes).permute(*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2))


def pool(x: Tensor, box: Box, how: Pooling) -> Tensor:
    """One number for each box of x, whose sizes are divisible by box, laid out as their grid.

    >>> from sparsefn.pooling import Pooling, pool
    >>> pool(torch.ones(2, 6), (2, 3), Pooling("sum"))
    tensor([[6., 6.]])

    Of an empty tensor these are zeros.
    """
    if not x.is_floating_point() and (x.dtype != torch.bool or how.name in ("mean", "norm")):
        raise TypeError(f"expected floating-point scores, got {x.dtype}")
    x, name, order = x.detach(), how.name, float(how.order)
    if not x.numel():
        return x.new_zeros(_grid(x, box), dtype=_dtype(x, name))
    seen = _in_memory(x, box, name, order, array)
    if seen is not None:
        return seen
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    plain = torch.compiler.is_exporting() or (x.device.type != "cpu" and not compiling)
    return reference(x, box, name, order) if plain else _operator(x, list(box), name, order)


def _grid(x: Tensor, box: Box) -> list[int]:
    return [size // b if b else 1 for size, b in zip(x.shape, box, strict=True)]


def _dtype(x: Tensor, name: str) -> torch.dtype:
    if x.dtype == torch.bool:
        return torch.int32 if name == "sum" else torch.bool
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _join(name: str, order: float) -> str:
    if name in ("max", "min"):
        return name
    return "add" if name != "norm" or math.isfinite(order) else "max" if order > 0 else "min"


def reference(x: Tensor, box: Box, name: str, order: float) -> Tensor:
    """What `pool` gives, by operations on whole tensors.

    >>> from sparsefn.pooling import reference
    >>> reference(torch.ones(2, 6), (2, 3), "mean", 1.0)
    tensor([[1., 1.]])
    """
    parts = split(x, box).to(_dtype(x, name))
    parts = parts.permute(*range(x.ndim, 2 * x.ndim), *range(x.ndim)).reshape(math.prod(box), *_grid(x, box))
    if name == "norm":
        parts = parts.abs() if math.isinf(order) else raised(parts.abs(), order)
    total = folded(parts, _JOINS[_join(name, order)][0])
    if x.dtype == torch.bool:
        return total
    if name == "mean":  # a tensor over a Python number is a product with 1 / n on some devices
        total = total / torch.full((), math.prod(box), dtype=total.dtype, device=total.device)
    return (root(total, order) if name == "norm" else total) + 0  # which makes 0.0 of -0.0


# ---- the operator, for tensors that are plain inside ----------------------------------------------


@torch.library.custom_op("sparsefn::pool", mutates_args=())
def _operator(x: Tensor, box: list[int], name: str, order: float) -> Tensor:
    """One number for each box of a tensor that has elements."""
    seen = _in_memory(x, tuple(box), name, order, memory)
    return reference(x, tuple(box), name, order) if seen is None else seen


@_operator.register_fake
def _(x: Tensor, box: list[int], name: str, order: float) -> Tensor:
    return torch.empty(_grid(x, tuple(box)), dtype=_dtype(x, name), device=x.device)


@_operator.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: Tensor, box: list[int], name: str, order: float) -> tuple[Tensor, int]:
    return _operator(x.movedim(in_dims[0], 0), [1, *box], name, order), 0


# ---- plain CPU tensors ----------------------------------------------------------------------------


class _Work(NamedTuple):
    """What becomes of the elements of a block, if anything, and how two of them become one."""

    lift: Callable[[Array], Array] | None
    join: Any
    dtype: Any


def _in_memory(x: Tensor, box: Box, name: str, order: float, see: See) -> Tensor | None:
    parts = see(split(x, box))
    if parts is None:
        return None
    rank, size, lift = x.ndim, math.prod(box), None
    if x.dtype == torch.bool:
        parts = parts.view(np.uint8) if size < 256 or name != "sum" else parts.astype(np.int32)
    elif name == "norm" or parts.itemsize == 2:
        lift = partial(_lifted, name, order, x.dtype == torch.bfloat16)
    work = _Work(lift, _JOINS[_join(name, order)][1], np.float32 if parts.itemsize == 2 else parts.dtype)
    with np.errstate(all="ignore"):
        total = _joined(parts.transpose(*range(rank, 2 * rank), *range(rank)), rank, work)
        if x.dtype == torch.bool:
            return torch.from_numpy(total.astype(np.int32 if name == "sum" else np.bool_))
        if name == "mean":
            total /= size
        total += 0  # which makes 0.0 of -0.0
    return root(torch.from_numpy(total), order) if name == "norm" else torch.from_numpy(total)


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
        return np.asarray(whole_power(np.abs(block) if order % 2 else block, int(order)))
    powers: Array = raised(torch.from_numpy(np.abs(block)), order).numpy()
    return powers


def _joined(x: Array, rank: int, work: _Work) -> Array:
    """An array without its first dimensions, whose entries are joined: some units at a time, that stay in cache."""
    x, rank = _merged(x, rank)
    size, grid = math.prod(x.shape[:rank]), x.shape[rank:]
    if x.size <= _BLOCK:
        return np.array(_block(x, rank, work), order="C")
    tall = _cut(x, rank, size)
    if tall:
        some = np.concatenate([_joined(part, 1, work) for part in tall])
        return _joined(some, rank, work._replace(lift=None))
    out: Array = np.empty(grid, work.dtype)
    along = sorted(range(len(grid)), key=lambda d: -abs(x.strides[rank + d]))  # as the units lie in memory
    x, target = x.transpose(*range(rank), *(rank + d for d in along)), out.transpose(along)
    places = list(slabs(target.shape, max(1, _BLOCK // size)))
    elements = (slice(None),) * rank

    def run(share: list[tuple[slice, ...]]) -> None:
        with np.errstate(all="ignore"):
            for at in share:
                target[at] = _block(x[(*elements, *at)], rank, work)

    share = -(-len(places) // torch.get_num_threads())
    each(run, [places[i : i + share] for i in range(0, len(places), share)], x.size)
    return out


def _merged(x: Array, rank: int) -> tuple[Array, int]:
    # The first dimensions as few as their strides allow: one of length 1 at least.
    sizes, strides = [1], [x.itemsize]
    for size, stride in zip(x.shape[:rank], x.strides[:rank], strict=True):
        if size > 1 and sizes == [1]:
            sizes, strides = [size], [stride]
        elif size > 1 and strides[-1] == size * stride:
            sizes, strides = [*sizes[:-1], sizes[-1] * size], [*strides[:-1], stride]
        elif size > 1:
            sizes, strides = [*sizes, size], [*strides, stride]
    shape = (*sizes, *x.shape[rank:])
    if len(sizes) == 1 and sizes[0] in x.shape[:rank]:
        return x.reshape(shape), 1  # a view, and quicker
    return as_strided(x, shape, (*strides, *x.strides[rank:])), len(sizes)


def _cut(x: Array, rank: int, size: int) -> list[Array]:
    # Of tall units every so-many-th element, (elements, units ...): the first steps join those with each other alone.
    first, inner = x.shape[0], size // x.shape[0]
    beside = min((stride for n, stride in zip(x.shape[rank:], x.strides[rank:], strict=True) if n > 1), default=0)
    if first <= _TALL or inner & (inner - 1) or not (size > _BLOCK or 0 < beside < x.strides[0]):
        return []
    apart = 1 << (-(-first // _TALL) - 1).bit_length()
    rows, rest = divmod(first, apart)
    every: Array = x[: rows * apart].reshape(rows, apart, *x.shape[1:])
    if not rest:
        return [every]
    strides = (apart * x.strides[0], *x.strides)
    return [as_strided(x, (rows + 1, rest, *x.shape[1:]), strides), every[:, rest:]]


def slabs(grid: Box, most: int) -> Iterator[tuple[slice, ...]]:
    """Parts of a grid that cover it, of so many cells or less.

    >>> from sparsefn.pooling import slabs
    >>> list(slabs((2, 3), 2))
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), ...
    """
    along = next((d for d in range(len(grid)) if math.prod(grid[d + 1 :]) <= most), 0)
    step = most // math.prod(grid[along + 1 :])
    parts = [slice(i, i + step) for i in range(0, grid[along], step)] if grid else []
    for before in itertools.product(*(range(n) for n in grid[:along])):
        for part in parts:
            yield (*(slice(i, i + 1) for i in before), part)


def _block(x: Array, rank: int, work: _Work) -> Array:
    grid, own = x.shape[rank:], work.lift is not None
    if work.lift is not None:
        x = work.lift(x)
    while x.ndim > len(grid):
        inner = math.prod(x.shape[1 : x.ndim - len(grid)])
        if inner & (inner - 1):  # halves would cut through the rows of a box
            x = (x if own else np.array(x, order="C")).reshape(-1, *grid)
            own = True
        x, own = _halved(x, own, work.join), True
    return x


def _halved(x: Array, own: bool, join: Any) -> Array:
    """Join the entries of the first dimension; the array may be written to where it is `own`."""
    beside = min((stride for n, stride in zip(x.shape[1:], x.strides[1:], strict=True) if n > 1), default=0)
    in_line = x.strides[0] < beside
    while len(x) > 1:
        half = 1 << (len(x) - 1).bit_length() - 1
        rest = len(x) - half
        if in_line and half < _SHORT and x[0].size >= _SHORT:
            sums: Array = np.empty((half, *x.shape[1:]), x.dtype)
            for i in range(half):
                if i < rest:
                    join(x[i], x[i + half], out=sums[i])
                else:
                    sums[i] = x[i]
            x, in_line = sums, False
        elif own:
            join(x[:rest], x[half:], out=x[:rest])
            x = x[:half]
        else:
            sums = np.empty_like(x[:half])
            join(x[:rest], x[half:], out=sums[:rest])
            sums[rest:] = x[rest:half]
            x = sums
        own = True
    total: Array = x[0]
    return total
