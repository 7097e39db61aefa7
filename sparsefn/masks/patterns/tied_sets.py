"""Tied sets: units that are made of rows and columns of several leaves."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from sparsefn._engine.processes import check_plain
from sparsefn._engine.sums import Box
from sparsefn._engine.transforms import Array, as_constant, at_compile_time, host_number
from sparsefn.core.checks import described, is_sequence, shown
from sparsefn.core.state import Where
from sparsefn.core.tree import Leaves, Tree, flatten
from sparsefn.core.tree.originals import check_weights
from sparsefn.core.tree.where import default_where, float_leaves, select_leaves
from sparsefn.masks.patterns.kinds import Reduce, reduction
from sparsefn.masks.patterns.members import Member, Members, family_of
from sparsefn.masks.patterns.places import (
    Place,
    Sets,
    Shapes,
    TiedSet,
    check_units_meet,
    checked_sets_of,
    classed,
    place_of,
    sets_of,
)
from sparsefn.masks.patterns.units import Grids, Pattern, Read, Units


@described
def tied(members: Members, reduce: Reduce = "mean") -> TiedPattern:
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

    `[glob, None, unit]` is a whole leaf, all of which belongs to the unit of that
    number, as a layer has its leaves. All members of such a set are whole leaves, and a
    set keeps at least one unit. `sf.shrinking.layers(model, example)` finds them:

    >>> layers = sf.patterns.tied(
    ...     [["0.weight", None, 0], ["0.bias", None, 0], ["1.weight", None, 1]]
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
    >>> paths = ["0.bias", "2.bias", "2.weight"]
    >>> [int(state.masks[path].sum()) for path in paths]
    [2, 2, 4]

    Each set then keeps exactly its count of units, and at least one, also where its
    budget says none: else it would take the entries of all units that meet it. A set is
    known in budgets by the path of its first leaf; others that begin with this leaf are
    `path:1`, `path:2` and so on. A unit is kept if one of its entries is.

    Args:
        members: The members of the sets, in one of these forms. A glob that is the path
            of a leaf is that leaf alone.
        reduce: How the scores of a unit become one, as in `sf.patterns.block`. They are
            of all of its entries, also of entries that other sets prune: members in
            their order, each row by row.

    Returns:
        The pattern, for algorithms alone, as a mask of one tensor has no other leaves.
        Where single entries are drawn or move between leaves (`snfs`, `redistribute`,
        `supermask("bernoulli")`) it is refused, as other patterns are.

    Raises:
        TypeError: `members` have another form.
        ValueError: There is no member, a block or the number of parts is below 1, unit
            numbers leave one out, some members of a set alone are whole leaves, or
            `reduce` is unknown. `init` raises it for a glob
            that no path matches, where no set has a leaf for each member, for members
            whose numbers of units differ, where other sets may prune a unit whole
            though they keep one of theirs, for a `where` that chooses all leaves of a
            set without choosing it, and for given masks that prune a unit in part (on
            the CPU, where values are read).

    Globs in `where` choose the sets of all leaves that they match, and so does the
    default; another function is asked about the first leaf of a set, for all of it.
    `sf.shrinking.groups(model, example)` finds the sets of a whole model, and
    `sf.shrink(model, state, example)` removes the units that are pruned.
    """
    if not is_sequence(members):
        raise TypeError(
            f"tied: expected a list of members [glob, dim], got {shown(members)}"
        )
    several = bool(members) and all(
        is_sequence(one) and len(one) > 0 and is_sequence(one[0]) for one in members
    )
    families = tuple(map(family_of, members if several else [members]))

    def of_one_tensor(shape: Box) -> NoReturn:
        raise ValueError(
            "tied: its units lie in several leaves; give it to an algorithm, as "
            "pattern="
        )

    # worked out once; of a cache the compiler warns
    found = functools.lru_cache(maxsize=16)(functools.partial(_sets_among, families))
    name = f"tied({shown(_as_lists(members))}, reduce={reduce!r})"
    return TiedPattern(
        name,
        of_one_tensor,
        lambda grid: grid,
        reduction(reduce),
        members=families,
        find=at_compile_time(lambda shapes: found(shapes)),
    )


def tied_members(
    pattern: Pattern, params: Tree
) -> dict[str, list[tuple[str, int, Tensor]]]:
    """Where the units of a tied pattern lie in some params, set by set.

    >>> heads = sf.patterns.tied([["*.v.weight", 0, 2], ["*.out.weight", 1, 2]])
    >>> params = {"0.v.weight": torch.ones(4, 3), "0.out.weight": torch.ones(3, 4)}
    >>> sf.patterns.tied_members(heads, params)["0.v.weight"]
    [('0.v.weight', 0, tensor([0, 0, 1, 1])), ('0.out.weight', 1, tensor([0, 0, 1, 1]))]

    Args:
        pattern: A pattern that `sf.patterns.tied` made.
        params: Tree of tensors; only paths and shapes count.

    Returns:
        The members of each tied set, by its name in budgets, as (path of a leaf,
        dimension, units). `units` is an int64 tensor on the CPU with the unit of each
        index, -1 for none. Empty for a pattern whose units lie in single leaves.

    Raises:
        TypeError: `pattern` is no pattern.
        ValueError: A member does not fit the shape of its leaf, members have different
            numbers of units, or other sets may prune a unit whole.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(
            "tied_members: expected a pattern such as sf.patterns.tied([['*.up', 0]]), "
            f"got {shown(pattern)}"
        )
    if not isinstance(pattern, TiedPattern):
        return {}
    found = {}
    for name, units in pattern.sets(flatten(params)[0]).items():
        members = []
        for place in units.places:
            # no part of a cache
            numbers = torch.tensor(place.unit_numbers(), device="cpu")
            members.append((place.path, place.dim, numbers))
        found[name] = members
    return found


def _as_lists(given: object) -> object:
    if is_sequence(given):
        return [_as_lists(one) for one in given]
    return given


def _sets_among(
    families: tuple[tuple[Member, ...], ...], shapes: Shapes
) -> tuple[TiedSet, ...]:
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


@dataclass(frozen=True, repr=False)
class TiedPattern(Pattern):
    """A pattern whose units lie in several leaves (made by `sf.patterns.tied`).

    Attributes:
        members: The members of each set, as in `sf.patterns.tied`.
        find: Function of the shapes of leaves by path that finds the sets.
    """

    members: tuple[tuple[Member, ...], ...] = field(kw_only=True, compare=False)
    find: Sets = field(kw_only=True, compare=False)

    def sets(self, leaves: Leaves) -> dict[str, TiedUnits]:
        """The units of each tied set of some leaves, by its name.

        >>> params = {
        ...     "0.a": torch.ones(4, 2),
        ...     "0.b": torch.ones(3, 4),
        ...     "1.a": torch.ones(4, 2),
        ... }
        >>> {
        ...     name: units.rows
        ...     for name, units in sf.patterns.tied([["*.a", 0], ["*.b", 1]])
        ...     .sets(params)
        ...     .items()
        ... }
        {'0.a': (1, 4)}
        """
        shapes = []
        for path, leaf in leaves.items():
            shape = tuple([as_constant(size) for size in leaf.shape])
            shapes.append((path, shape))
        made = {}
        for tied in self.find(tuple(shapes)):
            parts = tuple([self._as_rows(some) for some in tied.classes])
            made[tied.name] = self._as_rows(tied.places, parts, tied.order)
            for place in tied.places:
                check_plain(self.name, place.path, leaves[place.path])
        return made

    def has_units_of(self, other: Pattern) -> bool:
        """Whether the units of another pattern are the same; their scores may not."""
        return isinstance(other, TiedPattern) and other.members == self.members

    def _as_rows(
        self,
        places: tuple[Place, ...],
        classes: tuple[TiedUnits, ...] = (),
        order: Array | None = None,
    ) -> TiedUnits:
        rows = Pattern(
            self.name, lambda shape: (1, max(shape[1], 1)), self.group, self.reduce
        )
        shape = (places[0].units, sum([place.entries() for place in places]))
        return TiedUnits.of(rows, shape, places=places, classes=classes, order=order)

    def grids(self, leaves: Leaves) -> Grids:
        """The units of the sets of some leaves, each of which must be in one."""
        sets = self.sets(leaves)
        grids = _grids(sets)
        known = set(grids.paths)
        others = [path for path in leaves if path not in known]
        if others:
            raise ValueError(
                "tied: expected every sparse leaf to be in a tied set whose leaves "
                f"are all sparse, but {others[0]!r} is not"
            )
        return grids

    def leaves_in(self, params: Tree, where: Where) -> Leaves:
        """The leaves of the tied sets that `where` chooses.

        Globs are matched with all leaves of a set, and so is the default; another
        function is asked about the first.
        """
        leaves = float_leaves(params)
        sets = self.paths_among(list(leaves))
        first_only = callable(where) and where is not default_where
        asked = sets
        if first_only:
            asked = [paths[:1] for paths in sets]
        known = {path for paths in asked for path in paths}
        hit = select_leaves(
            {path: leaf for path, leaf in leaves.items() if path in known}, where
        )
        chosen: set[str] = set()
        left: list[tuple[str, ...]] = []
        for paths, own in zip(sets, asked, strict=True):
            if any(path in hit for path in own):
                chosen.update(paths)
            else:
                left.append(paths)
        for paths in left:
            if all(path in chosen for path in paths):
                raise ValueError(
                    f"where: expected the tied set of {paths[0]!r} to be chosen, too: "
                    "each of its leaves is in another one that is"
                )
        check_weights("where", chosen, leaves)
        return {path: leaf for path, leaf in leaves.items() if path in chosen}

    def paths_among(self, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """The paths of each set; ValueError where a member matches no path, or no set
        has a leaf for each member.

        >>> sf.patterns.tied([["*.up.weight", 0]]).paths_among(
        ...     ["0.upp.weight", "1.bias"]
        ... )
        Traceback (most recent call last):
            ...
        ValueError: tied: no path matches '*.up.weight'; the nearest are
        '0.upp.weight', '1.bias'
        """
        sets: list[tuple[str, ...]] = []
        for family in self.members:
            globs = tuple([glob for glob, *_ in family])
            sets += checked_sets_of(globs, tuple(paths))
        return sets

    def check_masks(self, masks: Mapping[str, Tensor], leaves: Leaves) -> None:
        """Raise ValueError for given masks that prune a unit of a tied set in part.

        >>> masks = {
        ...     "a": torch.tensor([[True], [False]]),
        ...     "b": torch.tensor([[True, True]]),
        ... }
        >>> sf.patterns.tied([["a", 0], ["b", 1]]).check_masks(masks, masks)
        Traceback (most recent call last):
            ...
        ValueError: tied: expected masks that prune whole units, but unit 1 of the set
        of 'a' is kept at 'b', pruned at 'a'

        A unit is kept if one of its entries is. Values are read where nothing hides
        them and that takes no waiting.
        """
        sets = self.sets(leaves)
        grids = _grids(sets)
        given = {}
        for units in sets.values():
            for place in units.places:
                given[place.path] = masks[place.path].expand(place.shape)
        kept = grids.read(given, lambda _, rows: rows.any(1)[None])
        for path, whole in grids.masks(kept, given, {}, {}).items():
            lost = whole & ~given[path]
            if host_number(lost.any()):
                raise ValueError(
                    "tied: expected masks that prune whole units, but "
                    f"{_lost(sets, given, path, lost)}"
                )


@dataclass
class TiedUnits(Units):
    """The units of a tied set, as the rows of a matrix that is made of its leaves, at
    `places`. Where they lie anyhow there is a matrix for each of `classes`, and `order`
    is where each unit is among them.
    """

    places: tuple[Place, ...]
    classes: tuple[TiedUnits, ...] = ()
    order: Array | None = None

    def joined(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The entries of each unit as a row: (units, entries of a unit).

        >>> leaves = {
        ...     "a": torch.tensor([[1.0], [2.0]]),
        ...     "b": torch.tensor([[3.0, 4.0]]),
        ... }
        >>> sf.patterns.tied([["a", 0], ["b", 1]]).sets(leaves)["a"].joined(leaves)
        tensor([[1., 3.],
                [2., 4.]])
        """
        rows = []
        for place in self.places:
            x = leaves[place.path]
            d = place.dim
            if place.taken is not None:
                taken = torch.as_tensor(place.taken, device=x.device)
                x = x.index_select(d, taken)
            along = (place.parts, place.units, place.block)
            split = x.reshape(*x.shape[:d], *along, *x.shape[d + 1 :])
            row = split.movedim(d + 1, 0).reshape(place.units, place.entries())
            rows.append(row)
        return torch.cat([row.to(rows[0].device) for row in rows], 1)

    def read(
        self, leaves: Mapping[str, Tensor], fn: Callable[[TiedUnits, Tensor], Tensor]
    ) -> Tensor:
        """What a function makes of the units and of their entries, a row each:
        (1, units).

        >>> leaves = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> (units,) = sf.patterns.tied([["a", 0, [0, 1, 1, -1]]]).sets(leaves).values()
        >>> units.read(leaves, lambda units, rows: rows.mean(1)[None])
        tensor([[1.0000, 2.5000]])

        `fn` gets all units at once, or one class at a time: the units with equally many
        entries in each leaf.
        """
        if self.order is None:
            return fn(self, self.joined(leaves))
        of_classes = [fn(some, some.joined(leaves)) for some in self.classes]
        made = torch.cat(of_classes, 1)
        order = torch.as_tensor(self.order, device=made.device)
        return made.index_select(1, order)


class TiedGrids(Grids):
    """The units of tied sets, by the name of the set."""

    @property
    def sets(self) -> list[TiedUnits]:
        """The units of each set."""
        return [units for units in self.local.values() if isinstance(units, TiedUnits)]

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves, one for each place in a set."""
        return [place.path for units in self.sets for place in units.places]

    def read(self, leaves: Leaves, fn: Read) -> list[Tensor]:
        """What a function makes of the units of each set and of their entries."""
        return [units.read(leaves, fn) for units in self.sets]

    def masks(
        self,
        kept: Sequence[Tensor],
        like: Leaves,
        scores: Leaves,
        among: Leaves,
    ) -> Leaves:
        """The masks of the leaves, from the flags of the units of each set: where all
        units of an entry are kept.

        >>> leaves = {
        ...     "a": torch.tensor([[1.0], [2.0]]),
        ...     "b": torch.tensor([[3.0, 4.0]]),
        ... }
        >>> grids = sf.patterns.tied([["a", 0], ["b", 1]]).grids(leaves)
        >>> grids.masks([torch.tensor([[True, False]])], leaves, {}, {})["b"]
        tensor([[ True, False]])
        """
        masks: Leaves = {}
        for units, flags in zip(self.sets, kept, strict=True):
            for place in units.places:
                path = place.path
                shape = place.shape
                if not math.prod(units.shape):  # leaves without entries
                    masks[path] = like[path].new_zeros(shape, dtype=torch.bool)
                    continue
                sizes = [1] * len(shape)
                sizes[place.dim] = shape[place.dim]
                line = place.along(flags).reshape(sizes)
                line = line.to(like[path].device)
                if path in masks:
                    masks[path] = masks[path] & line
                else:
                    masks[path] = line.expand(shape).contiguous()
        return masks


def _grids(sets: dict[str, TiedUnits]) -> TiedGrids:
    units: dict[str, Units] = {**sets}
    paths = [place.path for one in sets.values() for place in one.places]
    # where sets meet in a leaf, or units are whole leaves, each set keeps a unit
    whole = any(place.whole for one in sets.values() for place in one.places)
    least = int(whole or len(paths) > len(set(paths)))
    return TiedGrids(units, least=least)


def _lost(sets: Mapping[str, TiedUnits], given: Leaves, path: str, lost: Tensor) -> str:
    # The first lost entry of a leaf, in words: the unit that it is of, and where that
    # is kept.
    at = lost.nonzero()[0].tolist()
    for name, units in sets.items():
        for place in units.places:
            if place.path == path:
                unit = place.unit_numbers()[at[place.dim]]
            else:
                unit = -1
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
