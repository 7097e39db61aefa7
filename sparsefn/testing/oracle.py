"""Selection in slow and simple Python: units of a leaf, competing groups, winners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from sparsefn.masks import topk_mask
from sparsefn.masks.patterns import Pattern, unstructured
from sparsefn.testing.byte_trees import Form, shapes

Box = tuple[int, ...]
Unit = tuple[str, list[int]]  # path, row-major indices of the elements
Shapes = Mapping[str, Box]


class Layout(NamedTuple):
    """A pattern as plain functions: its units, its competing groups, its leaf shapes.

    >>> sf.testing.Layout(
    ...     sf.patterns.row_balanced(), group=lambda grid: (1, *grid[1:])
    ... ).form.rows
    1

    Attributes:
        pattern: The pattern.
        unit: Function from the shape of a leaf to the shape of a unit. Default: single
            elements.
        group: Function from the grid, the number of units along each dimension, to the
            shape of a competing group, in units. Default: all of a leaf.
        reduce: Function from the scores of a unit's elements to the unit's score. None
            where a unit is one element.
        fixed: How many units a group keeps, or a function of the grid that says so.
            None where the pattern leaves it open.
        allowed: Function of the grid: whether each unit, in row-major order, may be
            kept. Default: all.
        zeros: How many elements a pruned unit loses. None for all.
        form: Leaf shapes that the pattern accepts.
    """

    pattern: Pattern
    unit: Callable[[Box], Box] = lambda shape: (1,) * len(shape)
    group: Callable[[Box], Box] = lambda grid: grid
    reduce: Callable[[list[float]], float] | None = None
    fixed: int | Callable[[Box], int] | None = None
    allowed: Callable[[Box], Sequence[bool]] | None = None
    zeros: int | None = None
    form: Form = Form()

    @property
    def ungrouped(self) -> bool:
        """Whether all units of a leaf compete with each other."""
        shape = min(shape for shape in shapes(self.form) if _all_above_one(shape))
        return len(unit_groups(self, shape)) == 1


def _all_above_one(shape: Box) -> bool:
    return all(size > 1 for size in shape)


ELEMENTS = Layout(unstructured())


def computed_layout(pattern: Pattern) -> Layout:
    """The layout computed from a pattern's own functions.

    Leaf shapes are the first that it accepts.

    >>> computed_layout(sf.patterns.nm(2, 4)).form
    Form(rows=1, columns=4, least=0, ndims=(2, 3, 4))
    """
    reduce = pattern.reduce
    band = pattern.allowed

    def one(values: list[float]) -> float:
        assert reduce is not None
        row = torch.tensor([values], dtype=torch.float64, device="cpu")
        return float(reduce(row)[0])

    def allowed(grid: Box) -> list[bool]:
        assert band is not None
        flags: list[bool] = band(grid).reshape(-1).tolist()
        return flags

    fixed = pattern.fixed
    if isinstance(fixed, torch.Tensor):
        fixed = int(fixed)
    return Layout(
        pattern,
        pattern.unit,
        pattern.group,
        None if reduce is None else one,
        fixed,
        None if band is None else allowed,
        pattern.zeros,
        _form(pattern),
    )


def _form(pattern: Pattern) -> Form:
    sides = (1, 2, 3, 4, 5, 6, 8, 16)
    for ndims, least in product(((2, 3, 4), (2,), (4,)), (0, 1, 2)):
        for rows, columns in product(sides, (*sides, 32)):
            form = Form(rows, columns, least, ndims)
            if all(_fits(pattern, shape) for shape in shapes(form)):
                return form
    raise ValueError(
        f"no leaf shape was found that {pattern} takes; give a Layout with its Form "
        "as the pattern"
    )


def _fits(pattern: Pattern, shape: Box) -> bool:
    scores = torch.zeros(shape, device="cpu")
    try:
        topk_mask(scores, scores.new_zeros((), dtype=torch.int64), pattern=pattern)
    except ValueError:
        return False
    return True


def _positive(box: Box) -> Box:
    return tuple(max(size, 1) for size in box)


def _boxes(shape: Box, box: Box) -> list[list[int]]:
    """The indices of the places in each box, boxes and places in row-major order."""
    places = np.arange(math.prod(shape)).reshape(shape)
    along: list[Sequence[int]] = []
    for size, step in zip(shape, box, strict=True):
        along.append(range(0, size, step) if step else [0])
    boxes = []
    for start in product(*along):
        pairs = zip(start, box, strict=True)
        inside = tuple(slice(i, i + step) for i, step in pairs)
        boxes.append(places[inside].reshape(-1).tolist())
    return boxes


def unit_grid(layout: Layout, shape: Box) -> Box:
    """The number of units along each dimension."""
    unit = _positive(layout.unit(shape))
    pairs = zip(shape, unit, strict=True)
    return tuple(-(-size // step) for size, step in pairs)


def budget_shape(layout: Layout, shape: Box) -> Box:
    """The shape given to a distribution: the grid without the dimensions that one unit
    spans.
    """
    unit = _positive(layout.unit(shape))
    found = []
    for n, step, size in zip(unit_grid(layout, shape), unit, shape, strict=True):
        if size == 1 or step != size:
            found.append(n)
    return tuple(found)


def unit_groups(layout: Layout, shape: Box) -> list[list[list[int]]]:
    """Competing groups of a leaf, each a list of units, each a list of element indices,
    all in row-major order.

    Units that the pattern never keeps are left out.
    """
    units = _boxes(shape, _positive(layout.unit(shape)))
    cells = unit_grid(layout, shape)
    free: Sequence[bool] = [True] * len(units)
    if layout.allowed is not None:
        free = layout.allowed(cells)
    groups = []
    for group in _boxes(cells, layout.group(cells)):
        groups.append([units[i] for i in group if free[i]])
    return groups


def is_active(layout: Layout, kept: Sequence[bool], unit: Sequence[int]) -> bool:
    """Whether a unit is kept: it keeps more entries than a pruned unit does."""
    if layout.zeros is None:
        left = 0
    else:
        left = max(len(unit) - layout.zeros, 0)
    return sum(kept[i] for i in unit) > left


def fixed(layout: Layout, shape: Box) -> int | None:
    """How many units a group of a leaf keeps, if the pattern fixes it."""
    if callable(layout.fixed):
        return layout.fixed(unit_grid(layout, shape))
    return layout.fixed


def competing_units(layout: Layout, shapes: Shapes, joint: bool) -> list[list[Unit]]:
    """The units that compete with each other: a group of a leaf, or everything in one
    when `joint`.
    """
    found = []
    for path, shape in shapes.items():
        for group in unit_groups(layout, shape):
            found.append([(path, unit) for unit in group])
    if joint:
        return [[unit for group in found for unit in group]]
    return found


def score(layout: Layout, values: Mapping[str, Sequence[float]], unit: Unit) -> float:
    """The score of a unit, from the scores of its elements."""
    path, indices = unit
    elements = [values[path][i] for i in indices]
    if layout.reduce is None:
        return elements[0]
    return layout.reduce(elements)


def best_of(scores: Sequence[float], eligible: Sequence[bool], count: int) -> set[int]:
    """The best `count` eligible units: larger scores first, NaN last, then the lower
    index.
    """
    free = [i for i, flag in enumerate(eligible) if flag]
    # sorts ties by index, and NaN to the end
    order = sorted(free, key=lambda i: (math.isnan(scores[i]), -scores[i]))
    return set(order[: max(count, 0)])


def half_to_even(fraction: float, n: int) -> int:
    """round_half_even, as Python rounds."""
    return round(fraction * n)


def even_shares(count: int, parts: int) -> list[int]:
    """A count over competing groups: the first groups take the remainder."""
    return [count // parts + (i < count % parts) for i in range(parts)]
