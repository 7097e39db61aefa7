"""Units of which shards hold parts: each is moved to one process, where it competes as
a whole, and back.

An alignment is the box of elements that a process looks at: its own, with every border
moved up to a multiple of the unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsefn._engine.processes.agreements import agree
from sparsefn._engine.processes.extent import Extent
from sparsefn._engine.processes.lines import group_of, waiting
from sparsefn._engine.processes.shards import (
    Box,
    Layout,
    extent_of,
    is_sharded,
    layout_of,
    words_of,
)

Ranks = tuple[int, ...]  # of one process in the groups over which a tensor is split
Boxes: TypeAlias = dict[Ranks, Box]
Piece: TypeAlias = tuple[Ranks, Ranks]  # from one process to another


class Alignment(NamedTuple):
    """Where the elements of a DTensor lie, and the box of whole units that this process
    looks at.

    `extent` is as the shards are, `box` as the units are. The rest is for `moved`: the
    layout, and the boxes of all processes before and after.
    """

    extent: Extent
    box: Extent
    layout: Layout
    old: Boxes
    new: Boxes

    @property
    def moves(self) -> bool:
        """Whether an element goes from any process to another."""
        return self.old != self.new


def alignment_of(x: Tensor, cell: Sequence[int]) -> Alignment:
    """Where the units of a DTensor are whole on one process; `cell` is the size of a
    unit along each dimension.

    Every border moves up to a multiple of the cell. Where that leaves a process without
    elements that has some now, the tensor is cut between whole cells along other
    dimensions instead, if that keeps more processes busy. Replicas do the same on each
    copy. All is worked out from shapes. Raises the errors of `extent_of`.
    """
    extent = extent_of(x)
    layout = layout_of(x)
    old, new = _boxes(layout.shape, layout.cuts, layout.sizes, tuple(cell))
    box = layout.extent(new[layout.at])
    return Alignment(extent, box, layout, old, new)


@lru_cache(maxsize=1024)
def _boxes(
    shape: tuple[int, ...],
    cuts: tuple[tuple[int, int], ...],
    sizes: tuple[int, ...],
    cell: tuple[int, ...],
) -> tuple[Boxes, Boxes]:
    """The boxes of all processes, as they are and with whole cells."""
    ranks = list(itertools.product(*map(range, sizes)))

    def cut(shape: tuple[int, ...], cuts: tuple[tuple[int, int], ...]) -> Boxes:
        layout = Layout(shape, cuts, sizes, (), ())
        return {at: layout.box(at) for at in ranks}

    def in_cells(box: Box) -> Box:
        made = []
        for (start, end), size in zip(box, cell, strict=True):
            made.append((-(-start // size), -(-end // size)))
        return tuple(made)

    def in_elements(box: Box) -> Box:
        made = []
        for (start, end), size, n in zip(box, cell, shape, strict=True):
            made.append((min(start * size, n), min(end * size, n)))
        return tuple(made)

    def scaled(boxes: Boxes) -> Boxes:
        return {at: in_elements(box) for at, box in boxes.items()}

    def busy(boxes: Boxes) -> tuple[int, int]:
        counts = [_numel(box) for box in boxes.values()]
        return sum(n > 0 for n in counts), -max(counts)

    old = cut(shape, cuts)
    new = scaled({at: in_cells(box) for at, box in old.items()})
    if busy(new)[0] < busy(old)[0]:
        grid = tuple(-(-n // c) for n, c in zip(shape, cell, strict=True))
        groups = [group for group, _ in cuts]
        others = []
        for dims in itertools.product(range(len(shape)), repeat=len(groups)):
            own_cuts = tuple(zip(groups, dims, strict=True))
            others.append(scaled(cut(grid, own_cuts)))
        best = max(others, key=busy)
        if busy(best)[0] > busy(new)[0]:
            new = best
    return old, new


def realigned(
    tensors: Sequence[Tensor],
    alignments: Sequence[Alignment | None],
    back: bool = False,
) -> list[Tensor]:
    """The parts of tensors that this process holds, moved to the boxes of their
    alignments, or back from there.

    >>> from sparsefn._engine.processes.alignment import realigned
    >>> realigned([torch.tensor([1, 2])], [None])
    [tensor([1, 2])]

    `tensors` are plain ones of the sizes of `alignment.extent` (`alignment.box` to go
    back). Where no element moves, or the alignment is None, a tensor is handed on as it
    is. All tensors travel in the same messages: one for each group over which a tensor
    that moves is split, and none where none moves. All processes of these groups must
    call it.
    """
    routes = {}
    for i, alignment in enumerate(alignments):
        if alignment is not None and alignment.moves:
            routes[i] = _Route(tensors[i], alignment, back)
    if not routes:
        return list(tensors)
    # On a mesh of two dimensions an element goes along one of them first and then along
    # the other. So it needs no groups but the mesh's, and no process outside the mesh,
    # nor another replica, takes part. Names differ between processes: what is the same
    # on all is the order in which groups appear.
    groups: dict[str, None] = {}
    for route in routes.values():
        groups |= dict.fromkeys(route.names)
    agree(tuple(groups))
    for name in groups:
        by_device: dict[torch.device, list[_Route]] = {}
        for route in routes.values():
            if name in route.names:
                by_device.setdefault(route.device, []).append(route)
        for taking in by_device.values():
            _exchange(name, taking)
    moved = list(tensors)
    for i, route in routes.items():
        moved[i] = route.arrived()
    return moved


def check_grid(leaves: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming paths and meshes, for DTensors whose meshes are no
    dimensions of one grid of processes.

    >>> from sparsefn._engine.processes.alignment import check_grid
    >>> check_grid({"w": torch.ones(2)})

    The processes of one competition are counted group by group, as the rows and columns
    of a grid.
    """
    seen: dict[str, tuple[str, set[int]]] = {}
    for path, leaf in leaves.items():
        if not is_sharded(leaf):
            continue
        for name in layout_of(leaf).names:
            ranks = set(torch.distributed.get_process_group_ranks(group_of(name)))
            for other, (first, others) in seen.items():
                if other != name and len(ranks & others) > 1:
                    raise ValueError(
                        "expected leaves of one competition to be cut along "
                        f"dimensions of one mesh, but {first!r} is "
                        f"{words_of(leaves[first])} and {path!r} is {words_of(leaf)}; "
                        "give them one mesh, or a budget for each leaf, such as "
                        "sf.budgets.erk()"
                    )
            seen.setdefault(name, (path, ranks))


class _Route:
    """The pieces of a tensor on this process, as bytes of any dtype, in one message."""

    def __init__(self, x: Tensor, alignment: Alignment, back: bool) -> None:
        self.names = alignment.layout.names
        self.sizes = alignment.layout.sizes
        self.at = alignment.layout.at
        self.old = alignment.old
        self.new = alignment.new
        if back:
            self.old = alignment.new
            self.new = alignment.old
        self.dtype = x.dtype
        self.device = x.device
        self.gone = frozenset[int]()
        own = self.old[self.at]
        held = x.detach().contiguous().view(torch.uint8)
        self.pieces: dict[Piece, Tensor] = {}
        for piece in self.held(self.gone):
            self.pieces[piece] = held[self.slices(piece, own)]

    def held(self, gone: frozenset[int]) -> list[Piece]:
        """Which pieces this process holds after they have gone along these groups: the
        same order on all processes.
        """
        of_sources: list[Iterable[int]] = []
        of_targets: list[Iterable[int]] = []
        for i, (n, at) in enumerate(zip(self.sizes, self.at, strict=True)):
            if i in gone:
                of_sources.append(range(n))
                of_targets.append((at,))
            else:
                of_sources.append((at,))
                of_targets.append(range(n))
        sources = itertools.product(*of_sources)
        targets = itertools.product(*of_targets)
        pieces = itertools.product(sources, targets)
        return [piece for piece in pieces if _numel(self.box(piece))]

    def box(self, piece: Piece) -> Box:
        source, target = piece
        made = []
        pairs = zip(self.old[source], self.new[target], strict=True)
        for (start, end), (new_start, new_end) in pairs:
            made.append((max(start, new_start), min(end, new_end)))
        return tuple(made)

    def shape(self, piece: Piece) -> list[int]:
        """The sizes of a piece, of the last dimension in bytes."""
        sizes = [b - a for a, b in self.box(piece)]
        return [*sizes[:-1], sizes[-1] * self.dtype.itemsize]

    def slices(self, piece: Piece, within: Box) -> tuple[slice, ...]:
        """Where a piece is in the bytes of a box."""
        slices = []
        for (start, end), (first, _) in zip(self.box(piece), within, strict=True):
            slices.append(slice(start - first, end - first))
        last = slices.pop()
        width = self.dtype.itemsize
        in_bytes = slice(last.start * width, last.stop * width)
        return (*slices, in_bytes)

    def arrived(self) -> Tensor:
        """The tensor, once its pieces have gone along all groups."""
        box = self.new[self.at]
        sizes = [b - a for a, b in box]
        made = torch.empty(sizes, dtype=self.dtype, device=self.device)
        in_bytes = made.view(torch.uint8)
        for piece, part in self.pieces.items():
            in_bytes[self.slices(piece, box)] = part
        return made


def _exchange(name: str, routes: Sequence[_Route]) -> None:
    """One all_to_all over a group.

    Pieces that stay where they are do not go through it.
    """
    group = group_of(name)
    device = routes[0].device
    none = torch.empty(0, dtype=torch.uint8, device=device)
    sent = [[none] for _ in range(group.size())]  # to each rank
    awaited: list[list[tuple[_Route, Piece]]] = [[] for _ in sent]  # from each rank
    for route in routes:
        i = route.names.index(name)
        me = route.at[i]
        for piece in route.held(route.gone):
            _, targets = piece
            target = targets[i]
            if target != me:
                part = route.pieces.pop(piece)
                sent[target].append(part.reshape(-1))
        route.gone |= {i}
        for piece in route.held(route.gone):
            sources, _ = piece
            source = sources[i]
            if source != me:
                awaited[source].append((route, piece))
    given = [sum(map(len, parts)) for parts in sent]
    out = torch.cat(list(itertools.chain.from_iterable(sent)))
    expected = list(itertools.chain.from_iterable(awaited))
    lengths = [math.prod(route.shape(piece)) for route, piece in expected]
    left = iter(lengths)
    taken = []
    for pieces in awaited:
        own_lengths = itertools.islice(left, len(pieces))
        taken.append(sum(own_lengths))
    got = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    with waiting():
        torch.distributed.all_to_all_single(got, out, taken, given, group=group)
    parts = torch.split(got, lengths)
    for (route, piece), part in zip(expected, parts, strict=True):
        route.pieces[piece] = part.reshape(route.shape(piece))


def _numel(box: Box) -> int:
    return math.prod(max(b - a, 0) for a, b in box)
