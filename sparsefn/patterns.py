"""How elements form units, and how units form competing groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsefn.elementary import sqrt

Box = tuple[int, ...]
Reduce = str | Callable[[Tensor], Tensor]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "l2": lambda x: _norm(x, 2),
}


@dataclass(frozen=True)
class Pattern:
    """What is kept or pruned as one, and what competes with what.

    >>> sf.patterns.nm(2, 4)
    nm(2, 4, axis=-1)
    >>> sf.patterns.nm(2, 4) == sf.patterns.nm(2, 4, axis=-1)
    True

    `unit(shape)` is the box of elements that form one unit, `group(grid)` the box of units that
    compete (both with one entry a dimension), `reduce` turns the scores in a unit, along the last
    dimension, into the unit's score, and `fixed` is the count a group keeps where the pattern says it.
    """

    name: str
    unit: Callable[[Box], Box] = field(compare=False)
    group: Callable[[Box], Box] = field(compare=False)
    reduce: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    fixed: int | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return self.name


def _norm(x: Tensor, order: float) -> Tensor:
    return sqrt((x * x).sum(-1)) if order == 2 else torch.linalg.vector_norm(x, order, dim=-1)


def _ones(shape: Box) -> Box:
    return (1,) * len(shape)


def _reduction(reduce: Reduce) -> Callable[[Tensor], Tensor]:
    if callable(reduce):
        return reduce
    if reduce not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"expected reduce to be one of {known} or a callable, got {reduce!r}")
    return _REDUCTIONS[reduce]


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be an int, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} >= {least}, got {value}")


def _axis(name: str, axis: int, shape: Box) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{name}: no axis {axis} in shape {shape}")
    return axis % len(shape)


def unstructured() -> Pattern:
    """Every element stands for itself and competes with its whole tensor.

    >>> sf.topk_mask(torch.tensor([0.3, 0.1, 0.2]), 2, pattern=sf.patterns.unstructured())
    tensor([ True, False,  True])
    """
    return Pattern("unstructured()", _ones, lambda grid: grid)


def nm(n: int, m: int, axis: int = -1) -> Pattern:
    """Exactly n of every m consecutive elements along an axis are kept.

    >>> sf.topk_mask(torch.tensor([4.0, 1.0, 2.0, 3.0]), None, pattern=sf.patterns.nm(2, 4))
    tensor([ True, False, False,  True])

    0 <= n <= m, else ValueError; the axis must be divisible by m, else ValueError when a mask is
    made. Mishra et al. 2021, arXiv 2104.08378.
    """
    _whole("m", m, 1)
    _whole("n", n, 0)
    _whole("axis", axis, -(10**6))
    if n > m:
        raise ValueError(f"nm: expected n <= m, got n={n}, m={m}")
    name = f"nm({n}, {m}, axis={axis})"

    def group(grid: Box) -> Box:
        at = _axis(name, axis, grid)
        if grid[at] % m:
            raise ValueError(f"{name}: expected axis {axis} divisible by {m}, got shape {grid}")
        return tuple(m if i == at else 1 for i in range(len(grid)))

    return Pattern(name, _ones, group, fixed=n)


def block(shape: Sequence[int], reduce: Reduce = "mean") -> Pattern:
    """Boxes of elements along the last dimensions are kept or pruned whole.

    >>> scores = torch.tensor([[1.0, 1.0, 9.0], [1.0, 1.0, 0.0]])
    >>> sf.topk_mask(scores, 1, pattern=sf.patterns.block((2, 2)))
    tensor([[False, False,  True],
            [False, False,  True]])

    Blocks start at index 0; those at the far borders may be partial and are reduced over the
    elements that exist. `reduce` is "mean", "sum", "max", "min", "l2" or a callable over the last
    dimension, applied to the scores as given. A block larger than the tensor is a ValueError.
    """
    box = tuple(shape)
    for size in box:
        _whole("block sizes", size, 1)
    name = f"block({box}, reduce={reduce!r})"

    def unit(size: Box) -> Box:
        larger = any(b > s for b, s in zip(box[::-1], size[::-1], strict=False))
        if len(box) > len(size) or (larger and 0 not in size):
            raise ValueError(f"{name}: the block is larger than the tensor of shape {size}")
        return (1,) * (len(size) - len(box)) + box

    return Pattern(name, unit, lambda grid: grid, _reduction(reduce))


def channel(axis: int = 0, norm: float = 1) -> Pattern:
    """Whole slices along an axis are kept or pruned, scored by the norm of their scores.

    >>> sf.topk_mask(torch.tensor([[1.0, 1.0], [3.0, 0.0]]), 1, pattern=sf.patterns.channel(0))
    tensor([[False, False],
            [ True,  True]])

    `norm` is the order p of the vector norm: any float, inf included.
    """
    _whole("axis", axis, -(10**6))
    name = f"channel(axis={axis}, norm={norm})"

    def unit(size: Box) -> Box:
        at = _axis(name, axis, size)
        return tuple(1 if i == at else max(s, 1) for i, s in enumerate(size))

    return Pattern(name, unit, lambda grid: grid, lambda x: _norm(x, norm))


def kernel(reduce: Reduce = "mean") -> Pattern:
    """The entries of each (out, in) pair of a convolution are kept or pruned together.

    >>> scores = torch.arange(8.0).reshape(1, 2, 2, 2)
    >>> sf.topk_mask(scores, 1, pattern=sf.patterns.kernel()).sum((2, 3))
    tensor([[0, 4]])

    On a 2-D leaf a kernel is one element.
    """

    def unit(size: Box) -> Box:
        return tuple(1 if i < 2 else max(s, 1) for i, s in enumerate(size))

    return Pattern(f"kernel(reduce={reduce!r})", unit, lambda grid: grid, _reduction(reduce))


def _split(name: str, groups: int, axis: int) -> Pattern:
    _whole("groups", groups, 1)

    def group(grid: Box) -> Box:
        at = _axis(name, axis, grid)
        if grid[at] % groups:
            raise ValueError(f"{name}: expected axis {axis} divisible by {groups}, got shape {grid}")
        return tuple(s // groups if i == at else s for i, s in enumerate(grid))

    return Pattern(name, _ones, group)


def out_groups(groups: int) -> Pattern:
    """Elements compete inside each of g equal blocks of output rows (dimension 0).

    >>> sf.topk_mask(torch.tensor([[5.0, 4.0], [1.0, 2.0]]), 1, pattern=sf.patterns.out_groups(2))
    tensor([[ True, False],
            [False,  True]])

    An int count is a count of each group. Dimension 0 must be divisible by g, else ValueError.
    """
    return _split(f"out_groups({groups})", groups, 0)


def in_groups(groups: int) -> Pattern:
    """Elements compete inside each of g equal blocks of input columns (dimension 1).

    >>> sf.topk_mask(torch.tensor([[5.0, 1.0], [4.0, 2.0]]), 1, pattern=sf.patterns.in_groups(2))
    tensor([[ True, False],
            [False,  True]])

    An int count is a count of each group. Dimension 1 must be divisible by g, else ValueError.
    """
    return _split(f"in_groups({groups})", groups, 1)


def row_balanced() -> Pattern:
    """Elements compete inside their own output row: a constant fan-in.

    >>> sf.topk_mask(torch.tensor([[5.0, 4.0], [1.0, 2.0]]), 1, pattern=sf.patterns.row_balanced())
    tensor([[ True, False],
            [False,  True]])

    An int count is a count of each row. Lasby et al. 2024, arXiv 2305.02299.
    """
    return Pattern("row_balanced()", _ones, lambda grid: tuple(1 if i == 0 else s for i, s in enumerate(grid)))
