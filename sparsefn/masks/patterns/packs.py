"""Leaves that lie end to end: many small ones take as few operations as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsefn._engine import backends
from sparsefn._engine.leaves import MOST, end_to_end, lists, split_like
from sparsefn.core.tree import Leaves
from sparsefn.masks.patterns.units import Grids, Read, Select, Units

PACK_ON_CPU = 1 << 16  # elements of a pack on the CPU


@dataclass
class PackedGrids(Grids):
    """The units of leaves that lie end to end in packs: every entry is a unit, and the
    entries of a leaf compete.

    `packs` are the paths of the leaves in each tensor of scores or flags.
    """

    packs: Sequence[Sequence[str]] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.full = self.local
        self.extents = [None] * len(self.packs)

    @property
    def sizes(self) -> list[int]:
        """How many elements each tensor has."""
        made = []
        for paths in self.packs:
            made.append(sum(self.local[path].rows[1] for path in paths))
        return made

    def by_grid(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The scores or flags of all units, as one tensor a leaf."""
        made: list[Tensor] = []
        for x, sizes in zip(tensors, self.segments or (), strict=True):
            rows = [x]
            if sizes is not None:
                rows = list(torch.split(x[None], list(sizes), -1))
            made += rows
        return made

    @property
    def unpacked(self) -> Grids:
        """The same units, with one tensor for each leaf."""
        return Grids(self.local, self.select)

    def at(self, places: Sequence[int]) -> PackedGrids:
        """The grids of some of the tensors."""
        packs = [self.packs[i] for i in places]
        paths = [path for pack in packs for path in pack]
        units = {path: self.local[path] for path in paths}
        return _grids_of(packs, units, self.select)

    def read(self, leaves: Leaves, fn: Read) -> list[Tensor]:
        """What a function makes of the units of each leaf; for leaves that lie end to
        end, their entries.
        """
        made = []
        for paths in self.packs:
            if len(paths) == 1:
                made.append(fn(self.local[paths[0]], leaves[paths[0]]))
                continue
            some = [leaves[path] for path in paths]
            for path, leaf in zip(paths, some, strict=True):
                want = self.local[path].shape
                if leaf.shape != want:  # it would shift the leaves after it
                    raise ValueError(
                        f"expected masks and scores of the shape of the params, {want} "
                        f"at {path!r}, got {tuple(leaf.shape)}"
                    )
            made.append(end_to_end(some))
        return made

    def masks(
        self, kept: Sequence[Tensor], like: Leaves, scores: Leaves, among: Leaves
    ) -> Leaves:
        """The masks of leaves from the flags of their units."""
        masks: Leaves = {}
        for paths, flags in zip(self.packs, kept, strict=True):
            made = split_like(flags, [like[path] for path in paths])
            masks |= zip(paths, made, strict=True)
        return masks


def packed(grids: Grids, leaves: Leaves) -> Grids:
    """The grids, with packs where leaves are many, and small enough. Nothing may hide
    them.

    >>> from sparsefn.masks.patterns.packs import packed
    >>> leaves = {path: torch.ones(2, 2) for path in "abcdefghijkl"}
    >>> (pack,) = packed(sf.patterns.unstructured().grids(leaves), leaves).packs
    >>> len(pack)
    12
    """
    if type(grids) is not Grids:
        return grids
    packs: list[list[str]] = []
    last: object = None
    room = 0
    for (path, units), leaf in zip(grids.local.items(), leaves.values(), strict=True):
        kind = _kind(units, leaf)
        n = units.rows[1]
        if kind is None or kind != last or n > room:
            packs.append([])
            room = PACK_ON_CPU if leaf.is_cpu else MOST
        packs[-1].append(path)
        room -= n
        last = kind
    made: list[list[str]] = []
    for paths in packs:
        few = leaves[paths[0]].is_cpu and len(paths) < lists.FEWEST
        made += [[path] for path in paths] if few else [paths]
    if len(made) == len(leaves):
        return grids
    return _grids_of(made, grids.local, grids.select)


def _grids_of(
    packs: Sequence[Sequence[str]], units: dict[str, Units], select: Select
) -> PackedGrids:
    segments: list[list[int] | None] = []
    for paths in packs:
        sizes = [units[path].rows[1] for path in paths]
        segments.append(sizes if len(paths) > 1 else None)
    return PackedGrids(units, select, segments=segments, packs=packs)


def _kind(units: Units, leaf: Tensor) -> object:
    # What leaves of one pack have in common; None for a leaf that stays by itself.
    pattern = units.pattern
    (groups, n) = units.rows
    if not pattern.elementwise or pattern.allowed is not None or groups != 1:
        return None
    if type(leaf) is not Tensor or not n:
        return None
    device = leaf.device
    if device.type == "cpu":
        alone = n > lists.SMALL
    else:
        alone = n > MOST // 2 or backends.has_backend("winners", device.type)
    return None if alone else (leaf.dtype, device)
