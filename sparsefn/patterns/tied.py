"""Tied sets: units that are made of rows and columns of several leaves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeGuard

import torch
from torch import Tensor

from sparsefn.engine.checks import check_int, described, is_int, shown
from sparsefn.engine.processes import check_plain
from sparsefn.engine.surroundings import at_compile_time, concrete, known
from sparsefn.patterns.kinds import Box, Member, Pattern, Reduce, reduction
from sparsefn.patterns.matching import sets_of
from sparsefn.patterns.places import (
    Place,
    Sets,
    Shapes,
    TiedSet,
    check_units_meet,
    classed,
    place_of,
)
from sparsefn.patterns.units import Units, units_of
from sparsefn.tree import Leaves

# Members, or lists of them.
Members: TypeAlias = Sequence[Sequence[str | int | Sequence[str | int | Sequence[int]]]]


@described
def tied(members: Members, reduce: Reduce = "mean") -> Pattern:
    """Rows and columns of several leaves form one unit, kept or pruned together.

    >>> mlp = sf.patterns.tied(
    ...     [["*.up.weight", 0], ["*.up.bias", 0], ["*.down.weight", 1]]
    ... )
    >>> params = {
    ...     "0.up.weight": torch.tensor([[1.0], [3.0], [2.0]]),
    ...     "0.up.bias": torch.zeros(3),
    ...     "0.down.weight": torch.tensor([[1.0, 1.0, 5.0]]),
    ... }
    >>> algorithm = sf.one_shot(2 / 3, pattern=mlp)
    >>> algorithm.update(algorithm.init(params), params, 0).masks["0.down.weight"]
    tensor([[False, False,  True]])

    Each member is `[glob, dim]`: an index along that dimension of a leaf belongs to the
    unit of that number. Leaves in which the wildcards of the globs match the same text
    form one tied set: here the rows of `0.up.weight`, the entries of `0.up.bias` and
    the columns of `0.down.weight`. A text for which a member has no leaf makes no set.
    All units of a set compete. The set counts in budgets, as a leaf of that many rows,
    under the path of its first leaf.

    `[glob, dim, block]` makes a unit of `block` indices that follow one another, such
    as a head. With grouped queries a unit is a head of keys and values, and the heads
    of queries that read it:

    >>> width, readers = 4, 2
    >>> heads = sf.patterns.tied(
    ...     [
    ...         ["*.q_proj.weight", 0, readers * width],
    ...         ["*.k_proj.weight", 0, width],
    ...         ["*.v_proj.weight", 0, width],
    ...         ["*.o_proj.weight", 1, readers * width],
    ...     ]
    ... )

    `[glob, dim, block, parts]` is for a fused leaf: the dimension is as many equal
    parts one after the other, each with a block of every unit. The queries, keys and
    values of GPT-2 are `["*.c_attn.weight", 1, width, 3]`.

    `[glob, dim, numbers]` has the unit of each index, -1 for an index of none, whose
    entries no unit of this set takes along. Units may then have different numbers of
    indices; each has one in every member:

    >>> pairs = sf.patterns.tied(
    ...     [["fc.weight", 0, [0, 1, 1, 0, -1]], ["fc.bias", 0, [0, 1, 1, 0, -1]]]
    ... )

    A leaf may be in several sets, or in one along two dimensions: an entry stays if all
    of its units do. A kernel between two layers has its rows in one set and its columns
    in another. A list of such lists of members is one pattern of all their sets, for
    models whose units are not everywhere named alike:

    >>> net = sf.patterns.tied(
    ...     [
    ...         [["0.weight", 0], ["0.bias", 0], ["2.weight", 1]],
    ...         [["2.weight", 0], ["2.bias", 0], ["4.weight", 1]],
    ...     ]
    ... )
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    >>> state = sf.static(0.5, pattern=net).init(sf.modules.params_of(model))
    >>> (
    ...     int(state.masks["0.bias"].sum()),
    ...     int(state.masks["2.bias"].sum()),
    ...     int(state.masks["2.weight"].sum()),
    ... )
    (2, 2, 4)

    Each set then keeps exactly its count of units, and at least one, also where its
    budget says none: else it would take the entries of all units that meet it. A set is
    known in budgets by the path of its first leaf; others that begin with this leaf are
    `path:1`, `path:2` and so on. A glob that is the path of a leaf is that leaf alone.

    A unit's score is that of all of its entries, also of those that other sets prune,
    pooled by `reduce` as in `sf.patterns.block`: members in their order, each row by
    row. It is kept if one of its entries is. Globs in `where` choose the sets of all
    leaves that they match, and so does the default; another function is asked about the
    first leaf of a set, for all of it. Only algorithms take it: a mask of one tensor
    has no other leaves. Where single entries are drawn or move between leaves (`snfs`,
    `redistribute`, `supermask("bernoulli")`) it is refused, as other patterns are.
    `sf.shrinking.groups(model, example)` finds the sets of a whole model, and
    `sf.shrink(model, state, example)` removes the units that are pruned.

    Raises TypeError for members of another form, ValueError for unit numbers that leave
    one out. `init` raises ValueError for a glob that no path matches, where no set has
    a leaf for each member, for members whose numbers of units differ, where other sets
    may prune a unit whole though they keep one of theirs, for a `where` that chooses
    all leaves of a set without choosing it, and for given masks that prune a unit in
    part (on the CPU, where values are read).
    """
    if not _is_list(members):
        raise TypeError(
            f"tied: expected a list of members [glob, dim], got {shown(members)}"
        )
    several = bool(members) and all(
        _is_list(one) and len(one) > 0 and _is_list(one[0]) for one in members
    )
    families = tuple(
        tuple(map(_member, family)) for family in (members if several else [members])
    )
    if not all(families):
        raise ValueError("tied: expected at least one member [glob, dim], got none")

    def of_one_tensor(shape: Box) -> NoReturn:
        raise ValueError(
            "tied: its units lie in several leaves; give it to an algorithm, as "
            "pattern="
        )

    name = f"tied({shown(_as_lists(members))}, reduce={reduce!r})"
    return Pattern(
        name,
        of_one_tensor,
        lambda grid: grid,
        reduction(reduce),
        members=families,
        sets=_sets_among(families),
    )


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _as_lists(given: object) -> object:
    return [_as_lists(one) for one in given] if _is_list(given) else given


def _member(given: object) -> Member:
    wanted = (
        f"tied: expected members such as ['*.up_proj.weight', 0], got {shown(given)}"
    )
    if not _is_list(given) or not 2 <= len(given) <= 4:
        raise TypeError(
            f"{wanted}: a glob, a dimension, and perhaps a block and the number of "
            "parts"
        )
    if not isinstance(given[0], str):
        raise TypeError(f"{wanted}, whose first entry is no glob")
    check_int("tied", "the dimension of a member", given[1])
    if len(given) == 3 and _is_list(given[2]):
        return given[0], given[1], _numbers(given[2]), 1
    for what, size in zip(("block", "parts"), given[2:], strict=False):
        check_int("tied", f"the {what} of a member", size, 1)
    glob, dim, block, parts = [*given, 1, 1][:4]
    return glob, dim, block, parts


def _numbers(given: Sequence[object]) -> tuple[int, ...]:
    numbers = tuple([number for number in given if is_int(number) and number >= -1])
    if len(numbers) < len(given):
        wrong = next(number for number in given if not is_int(number) or number < -1)
        raise ValueError(
            "tied: expected unit numbers from 0 on, and -1 for none, got "
            f"{shown(wrong)}"
        )
    missing = set(range(max(numbers, default=-1) + 1)).difference(numbers)
    if missing or not any(number >= 0 for number in numbers):
        raise ValueError(
            "tied: expected each unit among unit numbers, got none of unit "
            f"{min(missing, default=0)}"
        )
    return numbers


def _sets_among(families: tuple[tuple[Member, ...], ...]) -> Sets:
    # The tied sets among leaves of these shapes, which are worked out once.
    @functools.lru_cache(maxsize=16)
    def found(shapes: Shapes) -> tuple[TiedSet, ...]:
        leaves = dict(shapes)
        sets = dict[str, TiedSet]()
        begun = Counter[str]()
        faults: dict[str, None] = {}
        for members in families:
            globs = tuple(glob for glob, *_ in members)
            for paths in sets_of(globs, tuple(leaves)):
                places = []
                try:
                    for path, member in zip(paths, members, strict=True):
                        places.append(place_of(path, leaves[path], *member[1:]))
                    _check_as_many(places)
                except ValueError as error:
                    faults[str(error)] = None
                    continue
                names = (
                    f"{paths[0]}:{i}" if i else paths[0]
                    for i in itertools.count(begun[paths[0]])
                )
                name = next(name for name in names if name not in sets)
                sets[name] = classed(name, places)
            # whether or not others lack a leaf
            begun.update(path for (path,) in sets_of(globs[:1], tuple(leaves)))
        if faults:  # of all sets at once
            first, *others = faults
            raise ValueError(
                "; ".join([first, *(text.removeprefix("tied: ") for text in others)])
            )
        check_units_meet(tuple(sets.values()))
        return tuple(sets.values())

    # of a cache the compiler warns
    return at_compile_time(lambda shapes: found(shapes))


def _check_as_many(places: Sequence[Place]) -> None:
    for place in places:
        if place.units != places[0].units:
            a, b = (
                f"{p.path!r} of shape {p.shape} has {p.units} along dimension {p.dim}"
                for p in (places[0], place)
            )
            raise ValueError(
                f"tied: expected members with the same number of units, but {a}, and "
                f"{b}"
            )


def tied_sets(pattern: Pattern, leaves: Leaves) -> dict[str, Units]:
    """The units of each tied set of some leaves, by its name.

    >>> params = {
    ...     "0.a": torch.ones(4, 2),
    ...     "0.b": torch.ones(3, 4),
    ...     "1.a": torch.ones(4, 2),
    ... }
    >>> {
    ...     name: units.rows
    ...     for name, units in tied_sets(
    ...         sf.patterns.tied([["*.a", 0], ["*.b", 1]]), params
    ...     ).items()
    ... }
    {'0.a': (1, 4)}
    """
    if pattern.sets is None:
        return {}
    shapes = []
    for path, leaf in leaves.items():
        shape = tuple([known(size) for size in leaf.shape])
        shapes.append((path, shape))
    of_rows = dataclasses.replace(
        pattern, unit=lambda shape: (1, max(shape[1], 1)), members=(), sets=None
    )
    made = {}
    for name, places, classes, order in pattern.sets(tuple(shapes)):
        parts = tuple([_as_rows(of_rows, some) for some in classes])
        made[name] = _as_rows(of_rows, places)._replace(classes=parts, order=order)
        for place in places:
            check_plain(pattern.name, place.path, leaves[place.path])
    return made


def _as_rows(pattern: Pattern, places: tuple[Place, ...]) -> Units:
    width = sum([place.entries() for place in places])
    return units_of(pattern, (places[0].units, width))._replace(places=places)


def joined(units: Units, leaves: Mapping[str, Tensor]) -> Tensor:
    """The entries of each unit of a tied set as a row: (units, entries of a unit).

    >>> leaves = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[3.0, 4.0]])}
    >>> joined(tied_sets(sf.patterns.tied([["a", 0], ["b", 1]]), leaves)["a"], leaves)
    tensor([[1., 3.],
            [2., 4.]])
    """
    rows = []
    for place in units.places:
        x = leaves[place.path]
        d = place.dim
        if place.taken is not None:
            x = x.index_select(d, torch.as_tensor(place.taken, device=x.device))
        split = x.reshape(
            *x.shape[:d], place.parts, place.units, place.block, *x.shape[d + 1 :]
        )
        rows.append(split.movedim(d + 1, 0).reshape(place.units, place.entries()))
    return torch.cat([row.to(rows[0].device) for row in rows], 1)


def over_units(
    units: Units, leaves: Mapping[str, Tensor], read: Callable[[Units, Tensor], Tensor]
) -> Tensor:
    """What a function makes of the units of a tied set and of their entries, a row
    each: (1, units).

    >>> leaves = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    >>> (units,) = tied_sets(
    ...     sf.patterns.tied([["a", 0, [0, 1, 1, -1]]]), leaves
    ... ).values()
    >>> over_units(units, leaves, lambda units, rows: rows.mean(1)[None])
    tensor([[1.0000, 2.5000]])

    It gets the units at once, or those together that have as many entries in each leaf.
    """
    if units.order is None:
        return read(units, joined(units, leaves))
    made = torch.cat([read(some, joined(some, leaves)) for some in units.classes], 1)
    return made.index_select(1, torch.as_tensor(units.order, device=made.device))


def check_whole_units(
    pattern: Pattern, masks: Mapping[str, Tensor], leaves: Leaves
) -> None:
    """Raise ValueError for given masks that prune a unit of a tied set in part.

    >>> masks = {
    ...     "a": torch.tensor([[True], [False]]),
    ...     "b": torch.tensor([[True, True]]),
    ... }
    >>> check_whole_units(sf.patterns.tied([["a", 0], ["b", 1]]), masks, masks)
    Traceback (most recent call last):
        ...
    ValueError: tied: expected masks that prune whole units, but unit 1 of the set of
    'a' is kept at 'b', pruned at 'a'

    A unit is kept if one of its entries is. Values are read where nothing hides them
    and that takes no waiting.
    """
    sets = tied_sets(pattern, leaves)
    given = {
        p.path: masks[p.path].expand(p.shape)
        for units in sets.values()
        for p in units.places
    }
    kept = [
        over_units(units, given, lambda _, rows: rows.any(1)[None])
        for units in sets.values()
    ]
    for path, whole in parted(sets, kept, given).items():
        lost = whole & ~given[path]
        if concrete(lost.any()):
            raise ValueError(
                "tied: expected masks that prune whole units, but "
                f"{_lost(sets, given, path, lost)}"
            )


def _lost(sets: Mapping[str, Units], given: Leaves, path: str, lost: Tensor) -> str:
    # The first lost entry of a leaf, in words: the unit that it is of, and where that
    # is kept.
    at = lost.nonzero()[0].tolist()
    for name, units in sets.items():
        for place in units.places:
            unit = place.unit_numbers()[at[place.dim]] if place.path == path else -1
            if unit >= 0:
                open_ = (
                    (p, given[p.path].nonzero()[:, p.dim].cpu().numpy())
                    for p in units.places
                )
                kept = next(
                    p.path for p, indices in open_ if unit in p.unit_numbers()[indices]
                )
                return (
                    f"unit {unit} of the set of {name!r} is kept at {kept!r}, pruned "
                    f"at {path!r}"
                )
    return f"the entry of no unit at {at} of {path!r} is pruned"


def parted(
    sets: Mapping[str, Units], kept: Sequence[Tensor], like: Mapping[str, Tensor]
) -> Leaves:
    """The masks of the leaves of tied sets, from the flags of the units of each: where
    all units of an entry are kept.

    >>> leaves = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[3.0, 4.0]])}
    >>> parted(
    ...     tied_sets(sf.patterns.tied([["a", 0], ["b", 1]]), leaves),
    ...     [torch.tensor([[True, False]])],
    ...     leaves,
    ... )["b"]
    tensor([[ True, False]])
    """
    masks: Leaves = {}
    for units, flags in zip(sets.values(), kept, strict=True):
        for place in units.places:
            path = place.path
            shape = place.shape
            device = like[place.path].device
            if not math.prod(units.shape):  # leaves without entries
                masks[path] = like[path].new_zeros(shape, dtype=torch.bool)
                continue
            line = place.along(flags).reshape(
                [size if d == place.dim else 1 for d, size in enumerate(shape)]
            )
            line = line.to(device)
            masks[path] = (
                masks[path] & line if path in masks else line.expand(shape).contiguous()
            )
    return masks
