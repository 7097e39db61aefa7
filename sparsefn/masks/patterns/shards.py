"""Units of DTensors: the units of the box that this process gets once no unit crosses a
border.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.numbers import check_float
from sparsefn._engine.processes import (
    Alignment,
    Exchange,
    Extent,
    Sum,
    agreed,
    alignment_of,
    in_step,
    is_sharded,
    local_tensor,
    realigned,
    redistributed,
    sharded_like,
)
from sparsefn._engine.selection import Count, winners
from sparsefn._engine.sums import Box
from sparsefn._engine.transforms import Array, without_compiler
from sparsefn.core.tree import Leaves
from sparsefn.masks.patterns.units import Grids, Pattern, Read, Units, units_of


@dataclass
class ShardedUnits(Units):
    """The units of a DTensor that this process gets: `alignment` says where their box
    lies, and `full` are the units of the leaf.

    A leaf with several groups has each group on one process; the only group of a leaf
    may be shared.
    """

    full: Units
    alignment: Alignment

    @property
    def of_all(self) -> Units:
        """The units of the whole leaf."""
        return self.full

    @property
    def fixed(self) -> int | Tensor | None:
        """How many units each group of the whole keeps, where the pattern says it."""
        return self.full.fixed

    @property
    def allowed(self) -> Tensor | None:
        """Which units of the grid the pattern may keep; None: all of them."""
        allowed = self.full.allowed
        if allowed is None:
            return None
        start = _in_cells(self.alignment.box.start, self.unit)
        pairs = zip(start, self.grid, strict=True)
        return allowed[tuple(slice(first, first + n) for first, n in pairs)]

    @property
    def cells(self) -> Extent:
        """Where the units of the only group lie among all, or where groups do."""
        whole = self.full
        cell = _cell(whole)
        start = _in_cells(self.alignment.box.start, cell_of(whole))
        return Extent(
            _in_boxes(whole.grid, cell),
            start,
            _in_boxes(self.grid, cell),
            self.alignment.box.groups,
        )

    @property
    def extent(self) -> Extent | None:
        """Where the units lie in their only group's grid; None for several groups."""
        return None if self.full.rows[0] > 1 else self.cells

    @property
    def row_extent(self) -> Extent:
        """Where the units lie among all units of the leaf, in the order of the rows."""
        cells = self.cells
        if self.full.rows[0] <= 1:
            return cells
        n = self.rows[1]
        return Extent((*cells.shape, n), (*cells.start, 0), (*cells.size, n), ())

    def group_places(self) -> Tensor:
        """Which of several groups are here, by index: int64 of shape (groups,)."""
        return torch.from_numpy(self.cells.places(np.arange(self.rows[0])))

    def own_counts(self, counts: Count) -> Count:
        """The counts of the groups that are here, of counts for all groups."""
        if self.extent is not None or not isinstance(counts, Tensor) or not counts.ndim:
            return counts
        return counts[self.group_places().to(counts.device)]


def cell_of(units: Units) -> Box:
    """The box of elements that must be whole on one process: a unit, or a group where
    there are several.

    >>> from sparsefn.masks.patterns.shards import cell_of
    >>> from sparsefn.masks.patterns.units import units_of
    >>> (
    ...     cell_of(units_of(sf.patterns.nm(2, 4), (3, 8))),
    ...     cell_of(units_of(sf.patterns.channel(0), (3, 8))),
    ... )
    ((1, 4), (1, 8))
    """
    return tuple(a * b for a, b in zip(units.unit, _cell(units), strict=True))


def _cell(units: Units) -> Box:
    # The same box, in units.
    return units.group if units.rows[0] > 1 else (1,) * len(units.grid)


def units_at(units: Units, alignment: Alignment) -> ShardedUnits:
    """The units of the box of an alignment."""
    size = alignment.box.size
    grid = tuple(-(-n // max(b, 1)) for n, b in zip(size, units.unit, strict=True))
    group = units.group if units.rows[0] > 1 else grid
    return ShardedUnits(
        units.pattern,
        size,
        units.unit,
        grid,
        group,
        (math.prod(_in_boxes(grid, group)), math.prod(group)),
        units.single,
        units.budgeted,
        units,
        alignment,
    )


def _in_cells(start: Box, cell: Box) -> Box:
    return tuple(first // max(n, 1) for first, n in zip(start, cell, strict=True))


def _in_boxes(sizes: Box, box: Box) -> Box:
    # How many whole boxes lie along each dimension; a dimension may be empty.
    return tuple(n // b if b else 1 for n, b in zip(sizes, box, strict=True))


class ShardedGrids(Grids):
    """The units of leaves of which some are DTensors: each process reads, chooses and
    writes its own units of a DTensor, all processes together.
    """

    def __post_init__(self) -> None:
        self.full = {path: units.of_all for path, units in self.local.items()}
        self.extents = [units.extent for units in self.local.values()]

    def to_local(self, leaves: Leaves) -> Leaves:
        """The leaves, with DTensors as the boxes that this process gets of them."""
        alignments = self._alignments(leaves)
        if not alignments:
            return leaves
        boxes = realigned(
            [local_tensor(leaves[path]) for path in alignments],
            list(alignments.values()),
        )
        return leaves | dict(zip(alignments, boxes, strict=True))

    def from_local(self, boxes: Leaves, leaves: Leaves) -> Leaves:
        """The inverse of `to_local`: boxes of this process as DTensors like the
        leaves.
        """
        alignments = self._alignments(boxes)
        parts = realigned(
            [boxes[path] for path in alignments], list(alignments.values()), back=True
        )
        return boxes | {
            path: sharded_like(x, leaves[path])
            for path, x in zip(alignments, parts, strict=True)
        }

    def _alignments(self, leaves: Leaves) -> dict[str, Alignment]:
        shards = shards_of(self).items()
        return {path: units.alignment for path, units in shards if path in leaves}

    def read(self, leaves: Leaves, fn: Read) -> list[Tensor]:
        """What a function makes of the units and the leaf of each grid."""
        return super().read(self.to_local(leaves), fn)

    def masks(
        self, kept: Sequence[Tensor], like: Leaves, scores: Leaves, among: Leaves
    ) -> Leaves:
        """The masks of leaves from the flags of their units, laid out as the leaves."""
        made = super().masks(kept, like, self.to_local(scores), self.to_local(among))
        return self.from_local(made, like)


def shards_of(grids: Grids) -> dict[str, ShardedUnits]:
    """The units of DTensors."""
    here = grids.local.items()
    return {path: units for path, units in here if isinstance(units, ShardedUnits)}


def counts_of_all(grids: Grids, counts: Leaves) -> Leaves:
    """The counts of all groups of leaves, from the counts of this process's groups."""
    shards = {p: units for p, units in shards_of(grids).items() if p in counts}
    return counts | _counts_of_all(shards, counts) if shards else counts


@without_compiler
def _counts_of_all(shards: dict[str, ShardedUnits], counts: Leaves) -> Leaves:
    def summed(vector: Array) -> Exchange[Array]:
        return (yield Sum(vector))

    exchanges = []
    for path, units in shards.items():
        vector = np.zeros(units.full.rows[0], np.int64)
        vector[units.group_places().numpy()] = counts[path].cpu().numpy()
        exchanges.append((units.alignment.box.groups, summed(vector)))
    return {
        path: torch.from_numpy(vector).to(counts[path].device)
        for path, vector in zip(shards, in_step(exchanges), strict=True)
    }


def check_whole_rows(what: object, grids: Grids, shared: bool = False) -> None:
    """Raise ValueError for DTensors where a function reads whole rows; with `shared`,
    only for rows of several parts.
    """
    for path, units in shards_of(grids).items():
        if not shared or units.extent is not None:
            raise ValueError(
                f"{what}: expected plain tensors, got a DTensor at {path!r}: it reads "
                "whole rows of scores; leave the leaf out with where="
            )


def on_shards(grids: Grids, leaves: Leaves) -> Grids:
    """The grids of leaves, with the units of this process's parts of DTensors; errors
    name the leaf.

    >>> from sparsefn.masks.patterns.shards import on_shards
    >>> leaves = {"w": torch.ones(3, 8)}
    >>> grids = sf.patterns.nm(2, 4).grids(leaves)
    >>> on_shards(grids, leaves) is grids
    True
    """
    shards: dict[str, Units] = {}
    for path, leaf in leaves.items():
        if type(leaf) is not Tensor and is_sharded(leaf):
            try:
                shards[path] = shard_of(grids.local[path], leaf)
            except ValueError as error:
                raise ValueError(f"{error} at {path!r}") from None
    if not shards:
        return grids
    return ShardedGrids(grids.local | shards, winners)


def shard_of(units: Units, leaf: Tensor) -> ShardedUnits:
    """The units of this process's part of a DTensor."""
    if not units.pattern.one_by_one:
        raise ValueError(f"{units.pattern}: expected plain tensors, got a DTensor")
    return units_at(units, alignment_of(leaf, cell_of(units)))


def of_tensor(fn: Callable[..., Tensor], pattern: Pattern, *tensors: Tensor) -> Tensor:
    """The result of a function of units, scores and tensors of their shape; for
    DTensors it gets the units and parts of this process.
    """
    check_float("scores", tensors[0])
    units = units_of(pattern, tuple(tensors[0].shape))
    if not is_sharded(tensors[0]):
        return fn(units, *tensors)

    def run() -> Tensor:
        own = shard_of(units, tensors[0])
        grids = ShardedGrids({"": own})
        parts = [
            grids.to_local({"": redistributed(x, tensors[0])})[""] for x in tensors
        ]
        return grids.from_local({"": fn(own, *parts)}, {"": tensors[0]})[""]

    return agreed(
        {"call": fn.__name__},
        {"tensors": {str(i): x for i, x in enumerate(tensors)}},
        run,
    )
