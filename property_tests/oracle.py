"""Slow and plain Python: which units there are, who competes with whom, and who wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import sparsefn as sf
from property_tests.strategies import Form

Box = tuple[int, ...]
Unit = tuple[str, list[int]]  # path, row-major indices of the elements
Shapes = Mapping[str, Box]


class Layout(NamedTuple):
    """A pattern of the library, and the same told again."""

    pattern: sf.patterns.Pattern
    unit: Callable[[Box], Box] = lambda shape: (1,) * len(shape)
    group: Callable[[Box], Box] = lambda grid: grid
    reduce: Callable[[list[float]], float] | None = None
    fixed: int | None = None
    form: Form = Form()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rows(parts: int) -> Callable[[Box], Box]:
    return lambda grid: (grid[0] // parts, *grid[1:])


ELEMENTS = Layout(sf.patterns.unstructured())
NM = Layout(sf.patterns.nm(2, 4), group=lambda grid: (*(1 for _ in grid[1:]), 4), fixed=2, form=Form(columns=4))
BLOCK = Layout(
    sf.patterns.block((2, 2)), unit=lambda shape: (*(1 for _ in shape[2:]), 2, 2), reduce=mean, form=Form(least=2)
)
CHANNEL = Layout(
    sf.patterns.channel(0), unit=lambda shape: (1, *shape[1:]), reduce=lambda unit: sum(abs(x) for x in unit)
)
KERNEL = Layout(
    sf.patterns.kernel("max"), unit=lambda shape: (*(1 for _ in shape[:2]), *shape[2:]), reduce=lambda unit: _max(unit)
)
OUT_GROUPS = Layout(sf.patterns.out_groups(2), group=_rows(2), form=Form(rows=2))
ROW_BALANCED = Layout(sf.patterns.row_balanced(), group=lambda grid: (1, *grid[1:]))
LAYOUTS = (ELEMENTS, NM, BLOCK, CHANNEL, KERNEL, OUT_GROUPS, ROW_BALANCED)


def _max(unit: list[float]) -> float:
    return math.nan if any(math.isnan(x) for x in unit) else max(unit)


def _positive(box: Box) -> Box:
    return tuple(max(size, 1) for size in box)


def _boxes(shape: Box, box: Box) -> list[list[Box]]:
    starts = product(*(range(0, size, step) if step else [0] for size, step in zip(shape, box, strict=True)))
    return [
        list(product(*(range(i, min(i + step, size)) for i, step, size in zip(start, box, shape, strict=True))))
        for start in starts
    ]


def _flat(place: Box, shape: Box) -> int:
    index = 0
    for i, size in zip(place, shape, strict=True):
        index = index * size + i
    return index


def grid(layout: Layout, shape: Box) -> Box:
    """How many units there are along each dimension."""
    return tuple(-(-size // step) for size, step in zip(shape, _positive(layout.unit(shape)), strict=True))


def budget_shape(layout: Layout, shape: Box) -> Box:
    """What a distribution sees: the grid without the dimensions that one unit spans."""
    unit = _positive(layout.unit(shape))
    return tuple(n for n, step, size in zip(grid(layout, shape), unit, shape, strict=True) if size == 1 or step != size)


def groups(layout: Layout, shape: Box) -> list[list[list[int]]]:
    """Competing groups of a leaf, each a list of units, each a list of element indices, all in row-major order."""
    units = [[_flat(place, shape) for place in box] for box in _boxes(shape, _positive(layout.unit(shape)))]
    cells = grid(layout, shape)
    return [[units[_flat(place, cells)] for place in box] for box in _boxes(cells, layout.group(cells))]


def competitions(layout: Layout, shapes: Shapes, joint: bool) -> list[list[Unit]]:
    """The units that compete with each other: a group of a leaf, or everything in one when `joint`."""
    found = [[(path, unit) for unit in group] for path, shape in shapes.items() for group in groups(layout, shape)]
    return [[unit for group in found for unit in group]] if joint else found


def score(layout: Layout, values: Mapping[str, Sequence[float]], unit: Unit) -> float:
    """The score of a unit, from the scores of its elements."""
    path, indices = unit
    elements = [values[path][i] for i in indices]
    return elements[0] if layout.reduce is None else layout.reduce(elements)


def winners(scores: Sequence[float], eligible: Sequence[bool], count: int) -> set[int]:
    """The best `count` of the eligible: larger first, NaN after everything, then the lower index."""
    order = sorted(
        (i for i in range(len(scores)) if eligible[i]),
        key=lambda i: (math.isnan(scores[i]), 0.0 if math.isnan(scores[i]) else -scores[i], i),
    )
    return set(order[: max(count, 0)])


def rounded(fraction: float, n: int) -> int:
    """round_half_even, as Python rounds."""
    return round(fraction * n)


def spread(count: int, parts: int) -> list[int]:
    """A count over competing groups: the first ones take the remainder."""
    return [count // parts + (i < count % parts) for i in range(parts)] if parts else []
