"""The library's patterns, told again in other words: what laws compare them with."""

from __future__ import annotations

import math
from collections.abc import Callable

import sparsefn as sf
from sparsefn.testing.byte_trees import Form
from sparsefn.testing.oracle import ELEMENTS, Box, Layout


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rows(parts: int) -> Callable[[Box], Box]:
    return lambda grid: (grid[0] // parts, *grid[1:])


NM = Layout(
    sf.patterns.nm(2, 4),
    group=lambda grid: (*(1 for _ in grid[1:]), 4),
    fixed=2,
    form=Form(columns=4),
)
BLOCK = Layout(
    sf.patterns.block((2, 2)),
    unit=lambda shape: (*(1 for _ in shape[2:]), 2, 2),
    reduce=mean,
    form=Form(least=2),
)
CHANNEL = Layout(
    sf.patterns.channel(0),
    unit=lambda shape: (1, *shape[1:]),
    reduce=lambda unit: sum(abs(x) for x in unit),
)
KERNEL = Layout(
    sf.patterns.kernel("max"),
    unit=lambda shape: (*(1 for _ in shape[:2]), *shape[2:]),
    reduce=lambda unit: _max(unit),
)
OUT_GROUPS = Layout(sf.patterns.out_groups(2), group=_rows(2), form=Form(rows=2))
ROW_BALANCED = Layout(sf.patterns.row_balanced(), group=lambda grid: (1, *grid[1:]))
GATES = CHANNEL._replace(
    pattern=sf.patterns.channel(0, groups=2),
    group=lambda grid: (grid[0] // 2, *grid[1:]),
    form=Form(rows=2),
)
HOLES = BLOCK._replace(pattern=sf.patterns.block((2, 2), zeros=3), zeros=3)
BAND = Layout(
    sf.patterns.nearly_diagonal(3),
    fixed=lambda grid: sum(_near(grid)),
    allowed=lambda grid: _near(grid),
    form=Form(rows=2, columns=2, least=1, ndims=(2,)),
)
TILES = Layout(
    sf.patterns.transposable(1, 2),
    group=lambda grid: (2, 2, *(1 for _ in grid[2:])),
    fixed=2,
    form=Form(rows=2, columns=2),
)
# leaves that a floor can bind
LARGE = Layout(sf.patterns.unstructured(), form=Form(rows=4, columns=4, least=2))
LAYOUTS = (ELEMENTS, NM, BLOCK, CHANNEL, KERNEL, OUT_GROUPS, ROW_BALANCED, GATES)


def _max(unit: list[float]) -> float:
    return math.nan if any(math.isnan(x) for x in unit) else max(unit)


def _near(grid: Box) -> list[bool]:
    rows, columns = grid
    return [abs(row - column) <= 1 for row in range(rows) for column in range(columns)]
