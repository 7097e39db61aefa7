"""Where the units of leaves lie: of a DTensor those of the box that this process gets
once no unit crosses a border.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.numbers import check_float
from sparsefn.engine.processes import (
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
from sparsefn.engine.selection import Count
from sparsefn.engine.surroundings import Array, eagerly
from sparsefn.patterns.boxes import in_line
from sparsefn.patterns.kinds import Box, Pattern
from sparsefn.patterns.tied import tied_sets
from sparsefn.patterns.units import Units, units_of, units_of_leaves
from sparsefn.tree import Leaves

Grids = dict[str, Units]  # by path, or by the name of a tied set


def grids(pattern: Pattern, leaves: Leaves) -> Grids:
    """The units of some leaves; errors name the leaf."""
    if pattern.members:
        made = tied_sets(pattern, leaves)
        known = set(paths_of(made))
        if others := [path for path in leaves if path not in known]:
            raise ValueError(
                "tied: expected every sparse leaf to be in a tied set whose leaves "
                f"are all sparse, but {others[0]!r} is not"
            )
        return made
    made = units_of_leaves(pattern, leaves)
    for path, leaf in leaves.items():
        if type(leaf) is Tensor:
            continue
        try:
            made[path] = with_alignment(made[path], leaf)
        except ValueError as error:
            raise ValueError(f"{error} at {path!r}") from None
    return made


def paths_of(grids: Grids) -> list[str]:
    """The paths of the leaves, those of tied sets as often as they are a member."""
    paths = []
    for path, units in grids.items():
        paths += [place.path for place in units.places] or [path]
    return paths


def with_alignment(units: Units, leaf: Tensor) -> Units:
    """The units of this process's part of a leaf.

    They are those of the whole where the leaf is no DTensor.

    >>> from sparsefn.patterns.grids import with_alignment
    >>> from sparsefn.patterns.units import units_of
    >>> units = units_of(sf.patterns.nm(2, 4), (3, 8))
    >>> with_alignment(units, torch.ones(3, 8)) is units
    True

    `whole` of the result has the units of the leaf, `alignment` says where the box
    lies, and `extent` where its units lie in the grid, if processes share the one group
    of the leaf. A leaf with several groups has each on one process.
    """
    if not is_sharded(leaf):
        return units
    if units.pattern.pick is not None:
        raise ValueError(f"{units.pattern}: expected plain tensors, got a DTensor")
    return units_at(units, alignment_of(leaf, cell_of(units)))


def cell_of(units: Units) -> Box:
    """The box of elements that must be whole on one process: a unit, or a group where
    there are several.

    >>> from sparsefn.patterns.grids import cell_of
    >>> from sparsefn.patterns.units import units_of
    >>> (
    ...     cell_of(units_of(sf.patterns.nm(2, 4), (3, 8))),
    ...     cell_of(units_of(sf.patterns.channel(0), (3, 8))),
    ... )
    ((1, 4), (1, 8))
    """
    if units.rows[0] <= 1:
        return units.unit
    return tuple(a * b for a, b in zip(units.unit, units.group, strict=True))


def units_at(units: Units, alignment: Alignment) -> Units:
    """The units of the box of an alignment."""
    several = units.rows[0] > 1
    box = alignment.box
    start = tuple(
        first // max(b, 1) for first, b in zip(box.start, units.unit, strict=True)
    )
    grid = tuple(
        -(-size // max(b, 1)) for size, b in zip(box.size, units.unit, strict=True)
    )
    group = units.group if several else grid
    groups = math.prod(_in_groups(grid, group)) if several else 1
    at = tuple(slice(first, first + n) for first, n in zip(start, grid, strict=True))
    whole_band = units.pattern.allowed
    band = None if whole_band is None else lambda grid: whole_band(units.grid)[at]
    return units._replace(
        pattern=dataclasses.replace(units.pattern, fixed=units.fixed, allowed=band),
        shape=box.size,
        grid=grid,
        group=group,
        rows=(groups, math.prod(group)),
        flat=group == grid or in_line(group, grid),
        whole=units,
        alignment=alignment,
        extent=None if several else Extent(units.grid, start, grid, box.groups),
    )


def _in_groups(grid: Box, group: Box) -> Box:
    return tuple(n // b if b else 1 for n, b in zip(grid, group, strict=True))


def group_places(units: Units) -> Tensor:
    """Which groups of the whole are here, by index: int64 of shape (groups,).

    >>> from sparsefn.patterns.grids import group_places
    >>> from sparsefn.patterns.units import units_of
    >>> group_places(units_of(sf.patterns.nm(2, 4), (3, 8)))
    tensor([0, 1, 2, 3, 4, 5])
    """
    here = np.arange(units.rows[0])
    extent = _group_extent(units)
    return torch.from_numpy(here if extent is None else extent.places(here))


def _group_extent(units: Units) -> Extent | None:
    # Where the groups of a DTensor that are here lie among all; None where it has one,
    # or the leaf is plain.
    if units.alignment is None or units.extent is not None:
        return None
    whole = units.of_all
    cell = [max(a * b, 1) for a, b in zip(whole.unit, whole.group, strict=True)]
    start = tuple(
        first // n for first, n in zip(units.alignment.box.start, cell, strict=True)
    )
    return Extent(
        _in_groups(whole.grid, whole.group),
        start,
        _in_groups(units.grid, units.group),
        (),
    )


def unit_extent(units: Units) -> Extent | None:
    """Where the units of a DTensor that are here lie among all, in the order of its
    rows; None for a plain leaf.

    >>> from sparsefn.patterns.grids import unit_extent
    >>> from sparsefn.patterns.units import units_of
    >>> unit_extent(units_of(sf.patterns.nm(1, 2), (1, 4)))
    """
    groups = _group_extent(units)
    if groups is None:
        return units.extent
    width = units.rows[1]
    return Extent((*groups.shape, width), (*groups.start, 0), (*groups.size, width), ())


def own_counts(units: Units, counts: Count) -> Count:
    """The counts of the groups that are here, of counts for all groups of the whole.

    >>> from sparsefn.patterns.grids import own_counts
    >>> from sparsefn.patterns.units import units_of
    >>> own_counts(units_of(sf.patterns.row_balanced(), (2, 8)), torch.tensor([3, 4]))
    tensor([3, 4])
    """
    if units.alignment is None or not isinstance(counts, Tensor) or not counts.ndim:
        return counts
    return counts[group_places(units).to(counts.device)]


def to_aligned(units: Mapping[str, Units], leaves: Leaves) -> Leaves:
    """The leaves, with those that are DTensors as the boxes that this process gets of
    them.

    >>> from sparsefn.patterns.grids import to_aligned
    >>> from sparsefn.patterns.units import units_of
    >>> to_aligned(
    ...     {"w": units_of(sf.patterns.unstructured(), (2,))}, {"w": torch.ones(2)}
    ... )
    {'w': tensor([1., 1.])}
    """
    alignments = {
        path: one.alignment
        for path, one in units.items()
        if one.alignment and path in leaves
    }
    if not alignments:
        return leaves
    boxes = realigned(
        [local_tensor(leaves[path]) for path in alignments], list(alignments.values())
    )
    return leaves | dict(zip(alignments, boxes, strict=True))


def from_aligned(units: Mapping[str, Units], boxes: Leaves, leaves: Leaves) -> Leaves:
    """The inverse of `to_aligned`: boxes of this process as DTensors that are laid out
    as the leaves.

    >>> from sparsefn.patterns.grids import from_aligned
    >>> from sparsefn.patterns.units import units_of
    >>> from_aligned(
    ...     {"w": units_of(sf.patterns.unstructured(), (2,))},
    ...     {"w": torch.ones(2)},
    ...     {"w": torch.zeros(2)},
    ... )
    {'w': tensor([1., 1.])}
    """
    alignments = {path: one.alignment for path, one in units.items() if one.alignment}
    if not alignments:
        return boxes
    parts = realigned(
        [boxes[path] for path in alignments], list(alignments.values()), back=True
    )
    return boxes | {
        path: sharded_like(x, leaves[path])
        for path, x in zip(alignments, parts, strict=True)
    }


def refuse_parts(what: str, units: Mapping[str, Units], shared: bool = False) -> None:
    """Raise ValueError for DTensors where a function reads whole rows; with `shared`,
    only for rows of several parts.

    >>> from sparsefn.patterns.grids import refuse_parts
    >>> from sparsefn.patterns.units import units_of
    >>> refuse_parts("grow_count", {"w": units_of(sf.patterns.unstructured(), (2,))})
    """
    for path, one in units.items():
        if (one.extent if shared else one.alignment) is not None:
            why = "it reads whole rows of scores"
            raise ValueError(
                f"{what}: expected plain tensors, got a DTensor at {path!r}: {why}"
            )


@eagerly
def of_all_groups(units: Sequence[Units], counts: Sequence[Tensor]) -> list[Tensor]:
    """The counts of the groups of whole leaves, from those that are here.

    >>> from sparsefn.patterns.grids import of_all_groups
    >>> from sparsefn.patterns.units import units_of
    >>> of_all_groups(
    ...     [units_of(sf.patterns.row_balanced(), (2, 8))], [torch.tensor([3, 4])]
    ... )
    [tensor([3, 4])]
    """

    def told(vector: Array) -> Exchange[Array]:
        return (yield Sum(vector))

    made = list(counts)
    exchanges = []
    alignments = [
        (i, one, one.alignment)
        for i, one in enumerate(units)
        if one.alignment is not None
    ]
    for i, one, alignment in alignments:
        vector = np.zeros(one.of_all.rows[0], np.int64)
        vector[group_places(one).numpy()] = counts[i].cpu().numpy()
        exchanges.append((alignment.box.groups, told(vector)))
    for (i, *_), vector in zip(
        alignments, in_step(exchanges) if exchanges else [], strict=True
    ):
        made[i] = torch.from_numpy(vector).to(counts[i].device)
    return made


def of_tensor(fn: Callable[..., Tensor], pattern: Pattern, *tensors: Tensor) -> Tensor:
    """A function of the units, scores and tensors of their shape; of the units that are
    here and parts of DTensors.
    """
    check_float("scores", tensors[0])
    units = units_of(pattern, tuple(tensors[0].shape))
    if not is_sharded(tensors[0]):
        return fn(units, *tensors)

    def run() -> Tensor:
        own = with_alignment(units, tensors[0])
        parts = [
            to_aligned({"": own}, {"": redistributed(x, tensors[0])})[""]
            for x in tensors
        ]
        return from_aligned({"": own}, {"": fn(own, *parts)}, {"": tensors[0]})[""]

    return agreed(
        {"call": fn.__name__},
        {"tensors": {str(i): x for i, x in enumerate(tensors)}},
        run,
    )
