"""Patterns: which elements form a unit, and which units compete; the units of leaves as
rows of competing units, and back to masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparsefn._engine.processes import Extent
from sparsefn._engine.selection import (
    Count,
    Counts,
    Entry,
    dealt_winners,
    winners,
)
from sparsefn._engine.sums import Box, Pooling, Reduction, pool
from sparsefn.core.checks import Made, call_of
from sparsefn.core.state import Where
from sparsefn.core.tree import Leaves, Tree
from sparsefn.core.tree.where import select_leaves
from sparsefn.masks.patterns.boxes import (
    Tensors,
    boxes_of,
    grid_of,
    over_boxes,
    over_elements,
    over_parts,
    unboxed,
)

SomeFlags = TypeVar("SomeFlags", Tensor, Tensor | None)
Read: TypeAlias = Callable[["Units", Tensor], Tensor]
Select: TypeAlias = Callable[[Sequence[Entry], Counts], list[Tensor]]


@dataclass(frozen=True)
class Pattern(Made):
    """Which elements are kept or pruned together, as a unit, and which units compete.

    >>> sf.patterns.nm(2, 4)
    nm(2, 4, axis=-1)
    >>> sf.patterns.nm(2, 4) == sf.patterns.nm(2, 4, axis=-1)
    True

    Attributes:
        name: The text of `repr`. Patterns of one name are equal.
        unit: Function of a shape: the box of elements that form one unit, with one
            entry a dimension.
        group: Function of the grid of units: the box of units that compete, with one
            entry a dimension.
        reduce: Function of the scores of units along the last dimension that gives a
            score for each unit. None where a unit is one element.
        fixed: How many units a group keeps, where the pattern says it: an int, a 0-d
            tensor or a function of the grid.
        allowed: Function of the grid: bool tensor of the units that may be kept at all.
            None is all of them.
        zeros: How many elements a pruned unit loses: its worst. None is all of them.

    The units of this class are boxes of one tensor, and are chosen one by one. Another
    kind is a subclass that overrides what differs.
    """

    name: str
    unit: Callable[[Box], Box] = field(compare=False)
    group: Callable[[Box], Box] = field(compare=False)
    reduce: Reduction | None = field(default=None, compare=False)
    fixed: int | Tensor | Callable[[Box], int] | None = field(
        default=None, compare=False
    )
    allowed: Callable[[Box], Tensor] | None = field(default=None, compare=False)
    zeros: int | None = field(default=None, compare=False)
    # Whether units are kept or pruned one by one, so that they may drop and grow.
    one_by_one: ClassVar[bool] = True

    def __repr__(self) -> str:
        return self.name

    @property
    def elementwise(self) -> bool:
        """Whether every element is a unit, so that its scores are only compared."""
        return self.reduce is None and self.zeros is None

    @property
    def partial(self) -> bool:
        """Whether a pruned unit may keep some of its elements."""
        return self.zeros is not None

    def leaves_in(self, params: Tree, where: Where) -> Leaves:
        """The leaves that `where` chooses.

        Args:
            params: Tree of floating-point tensors.
            where: A function of (path, leaf), a glob or a sequence of globs.

        Returns:
            The leaves by path.
        """
        return select_leaves(params, where)

    def grids(self, leaves: Leaves) -> Grids:
        """The units of some leaves.

        Args:
            leaves: Tensors by path.

        Returns:
            The grids of units, by path.

        Raises:
            ValueError: The pattern does not fit a leaf, which is named.
        """
        units = units_of_leaves(self, leaves)
        return Grids(units)

    def winners(self, entries: Sequence[Entry], counts: Counts) -> list[Tensor]:
        """The best units of each group, as many as its count says.

        Args:
            entries: The scores of the units of each leaf, and which of them compete.
            counts: How many units the groups of each leaf keep.

        Returns:
            Flags of the kept units, a bool tensor for each entry.
        """
        return winners(entries, counts)

    def check_masks(self, masks: Mapping[str, Tensor], leaves: Leaves) -> None:
        """Raise for given masks that prune a unit in part, where that cannot be.

        Args:
            masks: Bool tensors by path.
            leaves: The leaves of these masks, by path.
        """


# Not frozen, which would take a microsecond for each; nothing writes to it.
@dataclass
class Units:
    """Where a pattern puts the units of a tensor, worked out from its shape alone.

    >>> units_of(sf.patterns.nm(2, 4), (3, 8)).rows
    (6, 4)

    `unit` is the box of elements of a unit, `grid` how many units there are along each
    dimension, `group` the box of the grid whose units compete. `rows` is (groups, units
    of a group). `single` says that a unit is one element. `budgeted` is the grid as
    budgets see it, without the dimensions that a unit spans.
    """

    pattern: Pattern
    shape: Box
    unit: Box
    grid: Box
    group: Box
    rows: tuple[int, int]
    single: bool
    budgeted: Box

    @classmethod
    def of(cls, pattern: Pattern, shape: Box, **more: object) -> Self:
        """The units of a tensor of this shape.

        ValueError for a shape that the pattern does not fit.

        >>> (
        ...     units_of(sf.patterns.channel(0), (3, 8)).rows,
        ...     units_of(sf.patterns.kernel(), (8, 4, 3, 3)).budgeted,
        ... )
        ((1, 3), (8, 4))
        """
        unit = pattern.unit(shape)
        single = _is_single(unit)
        grid = shape if single else grid_of(shape, unit)
        group = pattern.group(grid)
        budgeted = shape
        if not single:
            pairs = zip(grid, unit, shape, strict=True)
            budgeted = tuple(n for n, b, size in pairs if not b == size != 1)
        # `whole_boxes`, spelt out, as it runs for each leaf
        groups = [size // b if b else 1 for size, b in zip(grid, group, strict=True)]
        rows = (math.prod(groups), math.prod(group))
        return cls(pattern, shape, unit, grid, group, rows, single, budgeted, **more)

    @property
    def of_all(self) -> Units:
        """The units of the whole leaf."""
        return self

    @property
    def extent(self) -> Extent | None:
        """Where the units lie among all units of their one group, if several processes
        share it.
        """
        return None

    @property
    def fixed(self) -> int | Tensor | None:
        """How many units each group keeps, where the pattern says it."""
        fixed = self.pattern.fixed
        return fixed(self.grid) if callable(fixed) else fixed

    @property
    def allowed(self) -> Tensor | None:
        """Which units of the grid the pattern may keep; None: all of them."""
        allowed = self.pattern.allowed
        return None if allowed is None else allowed(self.grid)

    @property
    def row_extent(self) -> Extent | None:
        """Where the units lie among all units of a DTensor, in the rows' order."""
        return None

    def own_counts(self, counts: Count) -> Count:
        """The counts of this process's groups, of the counts for all groups."""
        return counts


units_of = Units.of


# As `Units`, not frozen.
@dataclass
class Grids:
    """The units of some leaves by path, or by the name of a tied set.

    `local` are the units that this process looks at, `full` the units of the whole
    leaves, and `extents` say where `local` lies in `full`. `select` finds the best
    units. Each grid keeps `least` units.

    Scores and flags of all units are a list of tensors: in this class one a grid.
    `segments` are the lengths of groups that lie end to end in them; None where groups
    are rows.
    """

    local: dict[str, Units]
    select: Select = dealt_winners
    least: int = 0
    segments: Sequence[Sequence[int] | None] | None = None

    def __post_init__(self) -> None:
        self.full = self.local
        self.extents: Sequence[Extent | None] = [None] * len(self.local)

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves; of tied sets one for each membership."""
        return [*self.local]

    @property
    def sizes(self) -> list[int]:
        """How many elements the units of each tensor have."""
        return [math.prod(units.shape) for units in self.local.values()]

    def by_grid(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The scores or flags of all units, as one tensor a grid."""
        return tensors

    @property
    def unpacked(self) -> Grids:
        """The same, each with a tensor of its own."""
        return self

    def at(self, places: Sequence[int]) -> Self:
        """The grids of some of the tensors."""
        names = [[*self.local][i] for i in places]
        here = {name: self.local[name] for name in names}
        return type(self)(here, self.select, self.least)

    def read(self, leaves: Leaves, fn: Read) -> list[Tensor]:
        """What a function makes of the units and the leaf of each grid."""
        return [fn(units, leaves[path]) for path, units in self.local.items()]

    def masks(
        self, kept: Sequence[Tensor], like: Leaves, scores: Leaves, among: Leaves
    ) -> Leaves:
        """The masks of leaves from the flags of their units, with the best elements
        `among` some of pruned units where the pattern leaves them any.
        """
        pairs = zip(self.local.items(), kept, strict=True)
        return {
            path: unit_mask(units, flags, scores.get(path), among.get(path))
            for (path, units), flags in pairs
        }


def units_of_leaves(pattern: Pattern, leaves: Mapping[str, Tensor]) -> dict[str, Units]:
    """The units of some leaves, by path.

    There is one error for all leaves that the pattern does not fit.

    >>> units_of_leaves(sf.patterns.channel(0), {"w": torch.ones(2, 3)})["w"].grid
    (2, 1)
    >>> units_of_leaves(
    ...     sf.patterns.nm(2, 4),
    ...     {"a": torch.ones(8, 3), "b": torch.ones(8, 6), "c": torch.ones(8, 4)},
    ... )
    Traceback (most recent call last):
        ...
    ValueError: nm(2, 4, axis=-1): expected axis -1 divisible by 4, got shape (8, 3) at
    'a', nor does it fit 'b' of shape (8, 6); leave them out with where=lambda path,
    leaf: sf.default_where(path, leaf) and path not in ['a', 'b']
    """
    made: dict[str, Units] = {}
    faults: dict[str, str] = {}
    for path, leaf in leaves.items():
        try:
            made[path] = units_of(pattern, tuple(leaf.shape))
        except ValueError as error:
            faults[path] = str(error)
    if not faults:
        return made
    path, *others = faults
    text = f"{faults[path]} at {path!r}"
    if others:
        text += (
            ", nor does it fit "
            f"{', '.join(f'{p!r} of shape {tuple(leaves[p].shape)}' for p in others)}"
        )
    left = _left_out_along_inputs(pattern, leaves)
    if left is None or len(left) >= len(faults):
        text += (
            f"; leave {'them' if others else 'it'} out with {_where_not(list(faults))}"
        )
    else:
        text += "; write axis=1, along which the inputs of convolutions lie"
        text += f", and leave out what is left with {_where_not(left)}" if left else ""
    raise ValueError(text)


def _left_out_along_inputs(
    pattern: Pattern, leaves: Mapping[str, Tensor]
) -> list[str] | None:
    # The leaves that the pattern would not fit along axis 1, where it is an N:M pattern
    # along another one.
    call = call_of(pattern)
    if call is None or pattern.fixed is None or "axis" not in call.arguments():
        return None
    other = call.make(**{**call.arguments(), "axis": 1})
    return [
        path for path, leaf in leaves.items() if not _fits(other, tuple(leaf.shape))
    ]


def _fits(pattern: Pattern, shape: Box) -> bool:
    try:
        units_of(pattern, shape)
    except ValueError:
        return False
    return True


def _where_not(paths: list[str]) -> str:
    return (
        f"where=lambda path, leaf: sf.default_where(path, leaf) and path not in {paths}"
    )


def _is_single(box: Box) -> bool:
    # Whether a box is one element; a dimension may be empty.
    return not box or max(box) == 1


def to_columns(units: Units, x: Tensor) -> Tensor | None:
    """Elements as (rows, units of a group, columns) where each of several groups lies
    along one dimension, else None.

    >>> to_columns(
    ...     units_of(sf.patterns.nm(1, 2, axis=0), (4, 3)), torch.ones(4, 3)
    ... ).shape
    torch.Size([2, 2, 3])

    A view where x is contiguous. The groups of `to_rows` are its rows and in each its
    columns, in this order.
    """
    shape = units.shape
    group = units.group
    if group == shape or not units.single:
        return None
    if units.pattern.reduce is not None or units.pattern.allowed is not None:
        return None
    along = [d for d, size in enumerate(group) if size != 1]
    if len(along) != 1 or not group[along[0]]:
        return None
    d = along[0]
    width = group[along[0]]
    return x.reshape(
        math.prod(shape[:d]) * (shape[d] // width), width, math.prod(shape[d + 1 :])
    )


def to_rows(units: Units, x: Tensor, reduce: Reduction | None = None) -> Tensor:
    """Units of x as (groups, units of a group), reduced by the pattern or by `reduce`.

    >>> to_rows(units_of(sf.patterns.nm(2, 4), (8,)), torch.arange(8.0))
    tensor([[0., 1., 2., 3.],
            [4., 5., 6., 7.]])

    The result has no gradient where units are reduced: a mask has none. 16-bit scores
    are reduced in 32 bits.
    """
    if units.pattern.reduce is None:
        whole = units.group == units.grid
        return x.reshape(units.rows) if whole else boxes_of(x, units.group)
    fn = reduce or units.pattern.reduce
    # a mean rounded to 16 bits would make ties
    short = x.dtype in (torch.float16, torch.bfloat16)
    if x.numel():
        widened = short and not isinstance(fn, Pooling)
        x = over_boxes(
            x.detach(), units.unit, (lambda rows: fn(rows.float())) if widened else fn
        )
    else:  # some reductions refuse empty tensors: there is no maximum
        x = x.new_zeros(units.grid, dtype=torch.float32 if short else x.dtype)
    return boxes_of(x, units.group)


def active_rows(units: Units, mask: Tensor) -> Tensor:
    """Which units are kept, as selection reads them: a kept unit has more elements than
    a pruned one keeps.

    >>> mask = torch.tensor([True, True, True, False])
    >>> for pattern in (sf.patterns.block((2,)), sf.patterns.block((2,), zeros=1)):
    ...     print(active_rows(units_of(pattern, (4,)), mask))
    tensor([[True, True]])
    tensor([[ True, False]])
    """
    lost = units.pattern.zeros
    if units.pattern.reduce is None or not mask.numel():
        return competing(units, mask)

    def is_active(parts: Tensors, box: Box) -> Tensor:
        if lost is None:
            return pool(parts[0], box, Pooling("max"))
        return pool(parts[0], box, Pooling("sum")) > max(math.prod(box) - lost, 0)

    return boxes_of(over_parts((mask,), units.unit, is_active), units.group)


def allowed_rows(units: Units, like: Tensor, eligible: SomeFlags) -> SomeFlags:
    """The eligible units that the pattern may keep, as (groups, units of a group).

    None means all units.

    >>> allowed_rows(
    ...     units_of(sf.patterns.nearly_diagonal(1), (2, 2)), torch.zeros(2, 2), None
    ... )
    tensor([[ True, False, False,  True]])
    """
    open_ = units.allowed
    if open_ is None:
        return eligible
    allowed = boxes_of(open_.to(like.device), units.group)
    return allowed if eligible is None else eligible & allowed


def competing(units: Units, x: Tensor, reduce: Reduction | None = None) -> Tensor:
    """The units of x as selection reads them: columns where the groups lie so, else
    rows.

    >>> competing(units_of(sf.patterns.channel(0), (2, 3)), torch.ones(2, 3))
    tensor([[3., 3.]])
    """
    columns = to_columns(units, x)
    return to_rows(units, x, reduce) if columns is None else columns


def check_single(name: str, pattern: Pattern) -> None:
    """Raise ValueError for a pattern whose units are picked together, where they are
    dropped and grown.

    >>> check_single("rigl", sf.patterns.nm(2, 4))
    """
    if not pattern.one_by_one:
        raise ValueError(
            f"{name}: expected a pattern whose units are kept or pruned one by one, "
            f"got {pattern}"
        )


def from_rows(units: Units, rows: Tensor) -> Tensor:
    """Spread rows of units over the elements of the tensor: the inverse of `to_rows`
    and `to_columns`.

    >>> from_rows(
    ...     units_of(sf.patterns.block((2, 2)), (2, 3)), torch.tensor([[True, False]])
    ... )
    tensor([[ True,  True, False],
            [ True,  True, False]])
    """
    if rows.ndim == 3:
        return rows.reshape(units.shape)
    whole = units.group == units.grid
    x = rows.reshape(units.grid) if whole else unboxed(rows, units.group, units.grid)
    x = x if units.single else over_elements(x, units.unit, units.shape)
    # not a view of the rows: the strides of a state's masks are what compiled code sees
    return x.contiguous()


def unit_mask(
    units: Units,
    kept: Tensor,
    scores: Tensor | None = None,
    among: Tensor | None = None,
) -> Tensor:
    """The elements of the kept units, and of each other unit the best elements, as many
    as the pattern leaves it.

    >>> units = units_of(sf.patterns.block((2,), zeros=1), (4,))
    >>> unit_mask(
    ...     units, torch.tensor([[True, False]]), torch.tensor([1.0, 2.0, 4.0, 3.0])
    ... )
    tensor([ True,  True,  True, False])

    With `among`, only elements that this mask keeps are left.
    """
    mask = from_rows(units, kept)
    lost = units.pattern.zeros
    if lost is None or scores is None:
        return mask

    def spared(elements: Tensor, allow: Tensor | None = None) -> Tensor:
        return winners([Entry(elements, allow)], [max(elements.shape[-1] - lost, 0)])[0]

    return mask | over_boxes(
        scores.detach(), units.unit, spared, *(() if among is None else (among,))
    )
