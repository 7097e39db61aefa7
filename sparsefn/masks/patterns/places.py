"""Which leaves form a tied set, and where its units lie in them: worked out from paths
and shapes alone.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.sums import Box
from sparsefn._engine.transforms import Array, at_compile_time


class Place(NamedTuple):
    """Where the units of a tied set lie in one leaf: along `dim`, which is `parts` runs
    of (units, block) entries.

    >>> Place("fc.weight", (6, 4), dim=0, units=3, block=2, parts=1).along(
    ...     torch.tensor([7, 8, 9])
    ... )
    tensor([7, 7, 8, 8, 9, 9])

    Where units lie otherwise, `numbers` has the unit of each index, -1 for none; of a
    `whole` leaf it is one unit. Of a part of the units, `taken` are their indices, unit
    by unit, and `shape` is the shape of the leaf at them alone.
    """

    path: str
    shape: Box
    dim: int
    units: int
    block: int = 1
    parts: int = 1
    numbers: Array | None = None
    taken: Array | None = None
    whole: bool = False

    def entries(self) -> int:
        """How many entries each unit has here."""
        return math.prod(self.shape) // max(self.units, 1)

    def along(self, units: Tensor) -> Tensor:
        """One number for each unit as one for each index along the dimension; 1 where
        an index has no unit.

        >>> Place("qkv.weight", (4, 1), dim=0, units=2, block=1, parts=2).along(
        ...     torch.tensor([7, 8])
        ... )
        tensor([7, 8, 7, 8])
        """
        if self.numbers is not None:
            more = torch.cat([units.reshape(-1), units.new_ones(1)])
            places = torch.as_tensor(self.numbers % len(more), device=more.device)
            return more[places]
        column = units.reshape(1, self.units, 1)
        return column.expand(self.parts, self.units, self.block).reshape(-1)

    def unit_numbers(self) -> Array:
        """The unit of each index along the dimension, -1 for none."""
        if self.numbers is None:
            of_part = np.arange(self.units).repeat(self.block)
            return np.tile(of_part, self.parts)
        return self.numbers


class TiedSet(NamedTuple):
    """The places of a tied set, and its name: the path of its first leaf, which is
    numbered if it has one already.

    `classes` are the units of a set with arbitrary indices: a class holds the units
    with equally many indices in each leaf. `order` is the place of each unit in the
    classes.
    """

    name: str
    places: tuple[Place, ...]
    classes: tuple[tuple[Place, ...], ...] = ()
    order: Array | None = None


Shapes: TypeAlias = tuple[tuple[str, Box], ...]  # by path
Sets: TypeAlias = Callable[[Shapes], tuple[TiedSet, ...]]


def place_of(
    path: str,
    shape: Box,
    dim: int | None,
    block: int | tuple[int, ...],
    parts: int,
) -> Place:
    """Where a member of `sf.patterns.tied` has its units in a leaf.

    ValueError where it does not fit.

    >>> (
    ...     place_of("w", (4,), 0, 1, 2).units,
    ...     place_of("w", (4,), 0, (1, 1, 0, -1), 1).units,
    ... )
    (2, 2)
    """
    if dim is None:
        if not shape:
            raise ValueError(
                f"tied: expected a leaf of at least one dimension at {path!r}, got "
                "shape (), whose mask says that it is dense: leave it out"
            )
        unit = np.full(shape[0], block, np.int64)
        return Place(path, shape, 0, parts, numbers=unit, whole=True)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"tied: no dimension {dim} in shape {shape} at {path!r}")
    dim %= len(shape)
    size = shape[dim]
    if isinstance(block, tuple):
        if len(block) != size:
            raise ValueError(
                f"tied: expected a unit number for each of {size} indices along "
                f"dimension {dim} of {path!r}, got {len(block)}"
            )
        numbers = np.array(block, np.int64)
        return Place(path, shape, dim, int(numbers.max()) + 1, numbers=numbers)
    run = block * parts
    if size % run:
        if parts > 1:
            times = f"{parts} parts of blocks of {block}"
        else:
            times = f"blocks of {block}"
        raise ValueError(
            f"tied: expected dimension {dim} divisible into {times}, got shape "
            f"{shape} at {path!r}"
        )
    return Place(path, shape, dim, size // run, block, parts)


def classed(name: str, places: Sequence[Place]) -> TiedSet:
    """A tied set of these places, with the classes of its units if their indices are
    arbitrary.

    >>> import numpy as np
    >>> made = classed(
    ...     "w", [Place("w", (4,), 0, units=3, numbers=np.array([2, 0, 2, 1]))]
    ... )
    >>> (
    ...     [[place.taken.tolist() for place in places] for places in made.classes],
    ...     made.order.tolist(),
    ... )
    ([[[1, 3]], [[0, 2]]], [0, 1, 2])
    """
    if all(place.numbers is None for place in places):
        return TiedSet(name, tuple(places))
    numbers = [place.unit_numbers() for place in places]
    counts = []
    for each in numbers:
        counts.append(np.bincount(each[each >= 0], minlength=places[0].units))
    sizes = np.stack(counts, 1)
    _, kinds = np.unique(sizes, axis=0, return_inverse=True)
    kinds = kinds.reshape(-1)
    by_kind = kinds.argsort(kind="stable")
    ends = np.cumsum(np.bincount(kinds))
    classes = []
    for units in np.split(by_kind, ends[:-1]):
        own_sizes = sizes[units[0]].tolist()
        taken = []
        for place, each, size in zip(places, numbers, own_sizes, strict=True):
            if size or not place.whole:
                taken.append(_taken(place, each, units, size))
        classes.append(tuple(taken))
    return TiedSet(name, tuple(places), tuple(classes), by_kind.argsort())


def _taken(place: Place, numbers: Array, units: Array, size: int) -> Place:
    # The place of some units, each of which has `size` indices.
    taken = numbers.argsort(kind="stable")
    taken = taken[np.isin(numbers[taken], units)]
    shape = (*place.shape[: place.dim], len(taken), *place.shape[place.dim + 1 :])
    return Place(place.path, shape, place.dim, len(units), size, taken=taken)


def check_units_meet(sets: Sequence[TiedSet]) -> None:
    """Raise ValueError where units of other sets may prune all entries of a unit,
    though each set keeps one.

    >>> check_units_meet(
    ...     [
    ...         TiedSet("w", (Place("w", (4, 4), 0, 4),)),
    ...         TiedSet("w:1", (Place("w", (4, 4), 0, 4),)),
    ...     ]
    ... )
    Traceback (most recent call last):
        ...
    ValueError: tied: expected a leaf of the set of 'w' with entries for all
    combinations of units of its sets, got 'w'
    """
    along: dict[str, dict[int, list[Place]]] = {}
    for one in sets:
        for place in one.places:
            if place.whole:  # takes along what other units have in it
                continue
            by_dim = along.setdefault(place.path, {})
            by_dim.setdefault(place.dim, []).append(place)
    met = {}
    for path, dims in along.items():
        met[path] = {dim: _met(places) for dim, places in dims.items()}
    for name, places, *_ in sets:
        if places[0].whole:
            continue
        if not any(_stays(place, met[place.path]) for place in places):
            leaves = ", ".join(dict.fromkeys(repr(place.path) for place in places))
            raise ValueError(
                f"tied: expected a leaf of the set of {name!r} with entries for all "
                f"combinations of units of its sets, got {leaves}"
            )


def _met(places: Sequence[Place]) -> list[list[Place]]:
    # The places that meet at some indices along one dimension, where all combinations
    # of their units have an index.
    if len(places) == 1:
        return [[*places]]
    numbers = [place.unit_numbers() for place in places]
    rows = np.unique(np.stack(numbers, 1), axis=0)
    kinds, counts = np.unique(rows >= 0, axis=0, return_counts=True)
    met = []
    for kind, n in zip(kinds.tolist(), counts, strict=True):
        here = [place for place, flag in zip(places, kind, strict=True) if flag]
        if n == math.prod(place.units for place in here):
            met.append(here)
    return met


def _stays(place: Place, met: Mapping[int, list[list[Place]]]) -> bool:
    # Whether each unit has an entry here whose other units may be any.
    own = any(one is place for some in met[place.dim] for one in some)
    return own and all(met.values())


# ---- by path: wildcards that match the same text -------------------------------------


def sets_of(
    globs: tuple[str, ...], paths: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """The paths of each tied set that has one for every glob, in their order.

    >>> sets_of(("*.a", "*.b"), ("0.a", "0.b", "1.a"))
    (('0.a', '0.b'),)
    """
    by_stem = [_matched(glob, paths) for glob in globs]
    sets = []
    for stem in by_stem[0]:
        if all(stem in found for found in by_stem):
            sets.append(tuple([found[stem] for found in by_stem]))
    return tuple(sets)


@at_compile_time
def checked_sets_of(
    globs: tuple[str, ...], paths: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """The paths of each tied set; ValueError where a glob matches no path, or no set
    has a path for each glob.
    """
    stems = []
    for glob in globs:
        hits = list(_matched(glob, paths))
        if not hits:
            near = difflib.get_close_matches(glob.replace("*", ""), paths, 3, 0.0)
            known = ", ".join(map(repr, near)) or "none"
            raise ValueError(f"tied: no path matches {glob!r}; the nearest are {known}")
        stems.append((glob, hits))
    sets = sets_of(globs, paths)
    if not sets:
        members = []
        for glob, hits in stems:
            texts = ", ".join(repr("|".join(hit)) for hit in hits[:3])
            members.append(f"{glob!r} has {texts}")
        raise ValueError(
            "tied: expected globs whose wildcards match the same text in every "
            f"member, but {'; '.join(members)}"
        )
    return sets


def _stem(glob: str, path: str) -> tuple[str, ...] | None:
    # What the wildcards of a glob match; None where it does not match. Each part is
    # translated by fnmatch, whose regular expressions are `(?s:...)` and an end; a part
    # that is no wildcard is only escaped.
    expression = ""
    for part in re.split(r"(\*|\?|\[!?\]?[^\]]*\])", glob):
        word = fnmatch.translate(part)[4:-3]
        is_wildcard = word != re.escape(part)
        expression += f"({word})" if is_wildcard else word
    hit = re.fullmatch(expression, path, re.DOTALL)
    if hit is None:
        return None
    return hit.groups()


def _matched(glob: str, paths: Sequence[str]) -> dict[tuple[str, ...], str]:
    # The paths that a glob matches, by what its wildcards match; a path that is spelt
    # alike alone.
    if glob in paths:
        return {(): glob}
    found = {}
    for path in paths:
        stem = _stem(glob, path)
        if stem is not None:
            found[stem] = path
    return found
