"""Budgets in parameters, FLOPs, bytes or measured time: as many units as fit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, Protocol

from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import CountsByName
from sparsefn._engine.transforms import at_compile_time, host_number
from sparsefn.core.checks import is_number, shown
from sparsefn.masks.budgets.count_steps import Steps
from sparsefn.masks.budgets.distributions import Shapes
from sparsefn.masks.budgets.filling import (
    Number,
    Prefer,
    UnitCosts,
    check_prefer,
    fill_up,
    levels_of,
)

Table = Mapping[str, "Sequence[Number] | Mapping[int, Number]"]


class Costed(Protocol):
    """A model whose costs are known, as `sf.shrinking.groups` and `weights` give it."""

    def priced(
        self,
        unit: str,
        bits: int | None,
        compressed: bool,
        only: Sequence[int] | None,
    ) -> UnitCosts:
        """Its cost by kept units."""


@dataclasses.dataclass(frozen=True, eq=False)
class Within:
    """A distribution whose counts cost at most a limit (made by `within`).

    Attributes:
        limit: What all counts cost at most, in the unit.
        unit: What is counted: "flops", "params", "bytes", or the name of a measure.
        priced: What the model costs for each choice of counts.
        prefer: Which units go first.
        multiple_of: By how many units counts rise.
        equal_across: Globs of leaves or sets that keep equally many units.
    """

    limit: Number
    unit: str
    priced: UnitCosts = dataclasses.field(repr=False)
    prefer: Prefer = dataclasses.field(repr=False)
    multiple_of: int | Mapping[str, int] = 1
    equal_across: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many units of each leaf or set are kept at the limit, where all of them
        may lose some.
        """
        return dict(self._solved(tuple(self.priced.sizes), 1.0))

    @property
    def cost(self) -> Number:
        """What these units cost."""
        counts = self.counts
        if counts != self.priced.sizes:
            masks = sum(self.priced.masks.values())
        else:
            masks = 0
        return self.priced.cost(list(counts.values())) + masks

    def __repr__(self) -> str:
        made = f"within({self.limit}, unit={self.unit!r})"
        if self.multiple_of == 1 and not self.equal_across:
            return made
        across = f", equal_across={[*self.equal_across]}" if self.equal_across else ""
        return f"in_multiples({made}, {self.multiple_of}{across})"

    def __str__(self) -> str:
        rows = [
            f"{name}: {n} of {self.priced.sizes[name]}"
            for name, n in self.counts.items()
        ]
        return "\n".join([*rows, f"{self.cost} of {self.limit} {self.unit}"])

    def __call__(self, shapes: Shapes, sparsity: Real) -> CountsByName:
        """The counts of these leaves, as far on the way to the limit as the sparsity
        says; other leaves of the model stay whole.
        """
        for path, shape in shapes.items():
            size = self.priced.sizes.get(path)
            if size != math.prod(shape):
                known = "no such leaf or set" if size is None else f"{size} units"
                raise ValueError(
                    "within: expected the leaves or sets of the model that was "
                    f"priced, but {path!r} of shape {tuple(shape)} has {known} there"
                )
        level = host_number(sparsity)
        if level is None:
            raise ValueError(
                "within: expected a sparsity whose value is known, got one inside a "
                "transform of torch, or of a schedule inside sf.captured; leave these "
                "out"
            )
        counts = _solved(self, tuple(shapes), float(level))
        return {path: counts[path] for path in shapes}

    @functools.cached_property
    def _solved(self) -> Callable[[tuple[str, ...], float], dict[str, int]]:
        # an update asks again and again
        return functools.lru_cache(maxsize=64)(self._solve)

    def _solve(self, free: tuple[str, ...], way: float) -> dict[str, int]:
        names = list(self.priced.sizes)
        sizes = list(self.priced.sizes.values())
        steps = Steps.among(self.priced.sizes, self.multiple_of, self.equal_across)
        may = [all(names[i] in free for i in members) for members in steps.members]
        levels, last = levels_of(self.priced, self.prefer, may, steps)
        masks = sum(self.priced.masks.get(name, 0) for name in free)
        whole = self.priced.cost(sizes)

        def cost(kept: Sequence[int]) -> Number:
            return self.priced.cost(steps.counts(kept)) + masks

        start = Fraction(whole) + masks
        limit = start
        if whole > self.limit:
            limit = start - Fraction(way) * (start - Fraction(self.limit))
        least = cost(levels(0))
        if least > limit:
            one = "one unit"
            if self.multiple_of != 1:
                one = f"a multiple of {self.multiple_of} units"
            raise ValueError(
                f"within: expected a limit of {least} {self.unit} or more, which is "
                f"what {one} of each leaf or set that may lose units costs with the "
                f"rest of the model, got {shown(self.limit)}"
            )
        kept = fill_up(cost, levels, last, limit)
        return dict(zip(names, steps.counts(kept), strict=True))


@at_compile_time
def _solved(made: Within, free: tuple[str, ...], way: float) -> dict[str, int]:
    return made._solved(free, way)


def within(
    limit: Number,
    model: Costed,
    unit: Literal["params", "flops", "bytes"] | Table = "params",
    *,
    prefer: Prefer = "uniform",
    bits: int | None = None,
    compressed: bool = False,
    only: Sequence[int] | None = None,
) -> Within:
    """As many units of each leaf or tied set as cost at most `limit`.

    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    ... ).eval()
    >>> groups = sf.shrinking.groups(net, torch.ones(1, 8))
    >>> budget = sf.budgets.within(100, groups, "params")
    >>> budget.counts, budget.cost, groups.cost({0: range(7, 16)})
    ({'0.weight': 7}, 95, 95)
    >>> algorithm = sf.gmp(1.0, pattern=groups.pattern(), distribution=budget)

    Args:
        limit: The highest cost, in the unit that `unit` counts.
        model: What the model is made of: `sf.shrinking.groups(model, example)` for
            units, with `pattern=groups.pattern(only)`,
            `sf.shrinking.layers(model, example)` for whole layers, or
            `sf.shrinking.weights(model, example)` for single weights.
        unit: What is counted, each time from all sizes, as what a unit costs depends on
            what others keep. "params" are entries of parameters, shared ones once; of
            single weights, the weights that are not zero. "flops" are of one call on
            the example, as `sf.report.flops` counts them. "bytes" are of the
            parameters. A table has the cost of each leaf or set by its path, as a
            sequence by kept count, from 0 on, or a dict by count, in which counts that
            are missing cost what the next larger one does. The sum counts, such as of
            measured times. Where fewer units cost more than more units do, they count
            as much as the largest cost below. The set of `layers` is the last of
            `counts`. Its key is the path of the first layer's first leaf, or that path
            with ":1" behind it where a set of widths has the path. Its cost goes by how
            many layers stay, and widths of layers that go still count.
        prefer: What loses units. "uniform": the same share of units everywhere. A dict
            of weights by glob: shares in proportion to the weights (0: stays whole,
            others 1). "global": the units of the smallest mean magnitude in all of the
            model as it is. A dict of a tensor of scores for each leaf or set: the
            units of the lowest scores.
        bits: How many bits an entry takes, for "bytes". None takes the dtypes.
        compressed: Whether "bytes" are what the masked model takes with a bit for each
            weight of the leaves that lose some, as `sf.checkpoint.compress` stores
            them. Single weights need it.
        only: The numbers of the groups that may lose units, as in
            `groups.pattern(only)`. Single weights have no groups.

    Returns:
        The distribution. The sparsity of an algorithm is how far on the way to the
        limit it is: at 1.0 the cost is at most the limit, at 0.0 the model is whole,
        and between them the bound falls in proportion. Each leaf or set keeps a unit at
        least, and one more unit of any would pass the limit; what `where` leaves out
        stays whole. Whole layers cost what as many of the dearest ones do. Where
        widths are chosen with them, the widths rise again as a layer goes: prune in
        rounds with `sf.gmp(..., regrow=True)`, which keeps these counts.

    Raises:
        TypeError: `limit` is no number, or `model` is none of the three.
        ValueError: `limit` cannot be met (the text has the least cost), `unit` or
            `prefer` is unknown or does not fit, `only` has a number of no group or is
            given for single weights, or leaves have other sizes.

    All is deterministic: the common bound is the highest that fits, then units are
    added one by one in the order of `prefer` until none fits.
    """
    if not is_number(limit):
        raise TypeError(
            f"within: expected limit to be a number, got {type(limit).__name__}"
        )
    if not (math.isfinite(limit) and limit >= 0):
        raise ValueError(f"within: expected a limit >= 0, got {limit}")
    if not hasattr(model, "priced"):
        raise TypeError(
            "within: expected sf.shrinking.groups(model, example), "
            "sf.shrinking.layers(model, example) for whole layers, or "
            "sf.shrinking.weights(model, example) for single weights, got "
            f"{type(model).__name__}"
        )
    if isinstance(unit, Mapping):
        priced = _by_table(model.priced("params", None, False, only), unit)
        name = "by the table"
    else:
        priced = model.priced(unit, bits, compressed, only)
        name = unit
    made = Within(limit, name, priced, prefer)
    check_prefer(priced, prefer)
    return made


def _by_table(priced: UnitCosts, table: Table) -> UnitCosts:
    missing = [name for name in table if name not in priced.sizes]
    if missing:
        raise ValueError(
            f"within: expected a table for {', '.join(map(repr, priced.sizes))}, got "
            f"{missing[0]!r}"
        )
    rows = [
        _row(name, table[name], size) if name in table else None
        for name, size in priced.sizes.items()
    ]

    def cost(kept: Sequence[int]) -> Number:
        return sum(row[n] for row, n in zip(rows, kept, strict=True) if row is not None)

    return UnitCosts(priced.sizes, cost, priced.scores)


def _row(
    name: str, given: Sequence[Number] | Mapping[int, Number], size: int
) -> list[Number]:
    if isinstance(given, Mapping):
        found = given
    else:
        found = dict(enumerate(given))
    if size not in found:
        raise ValueError(
            f"within: expected the cost of all {size} units in the table of {name!r}, "
            f"got {sorted(found)}"
        )
    row: list[Number] = [found[size]] * (size + 1)
    for n in range(size - 1, -1, -1):
        row[n] = found.get(n, row[n + 1])
    return list(itertools.accumulate(row, max))
