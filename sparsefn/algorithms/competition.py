"""The rule of a competition: which units of which leaves compete with each other, and how many they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from sparsefn.budgets import Distribution, Global, check_fixed, is_uniform
from sparsefn.counts import Counted
from sparsefn.engine.checks import check_call
from sparsefn.engine.described import shown, uncalled
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import as_fraction
from sparsefn.engine.seats import check_grid
from sparsefn.engine.selection.winners import Count
from sparsefn.patterns.kinds import Pattern
from sparsefn.patterns.seated import seated
from sparsefn.patterns.tied import checked_sets, tied_sets
from sparsefn.patterns.units import Units, units_of
from sparsefn.state import Level, Schedule, Where
from sparsefn.tree import Leaves, Tree
from sparsefn.where import float_leaves, select_leaves

Grids = dict[str, Units]  # of a tied set under the path of its first leaf
# What an algorithm was told about its counts: a sparsity at each step, a count by scores, or nothing.
Goal = Schedule | Counted | None


class Competition(NamedTuple):
    """Which units compete with each other: the pattern inside a leaf, the distribution among leaves."""

    pattern: Pattern
    distribution: Distribution

    def check(self) -> Competition:
        """The competition itself, if its parts are a pattern and a distribution."""
        if not isinstance(self.pattern, Pattern):
            got = uncalled(self.pattern) or repr(self.pattern)
            raise TypeError(f"expected pattern to be one such as sf.patterns.nm(2, 4), got {got}")
        if not callable(self.distribution):
            table = "; write sf.budgets.by_path(...) around it" if isinstance(self.distribution, Mapping) else ""
            got = f"{self.distribution!r}{table}"
            raise TypeError(f"expected distribution to be one such as sf.budgets.erk(), got {got}")
        check_call("distribution", self.distribution, "shapes", "sparsity")
        return self

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)

    @property
    def elementwise(self) -> bool:
        """Whether every element is a unit by itself, so that its scores are only compared."""
        return self.pattern.reduce is None and self.pattern.zeros is None

    def select(self, params: Tree, where: Where) -> Leaves:
        """The leaves that `where` chooses, or all leaves of each tied set of which it chooses one.

        Globs are matched with all leaves of a set; a function is asked about the first.
        """
        if not self.pattern.members:
            return select_leaves(params, where)
        leaves = float_leaves(params)
        sets = checked_sets(self.pattern, list(leaves))
        members = {path: paths for paths in sets for path in (paths[:1] if callable(where) else paths)}
        hit = select_leaves({path: leaves[path] for path in leaves if path in members}, where)
        chosen = {path for name in hit for path in members[name]}
        return {path: leaf for path, leaf in leaves.items() if path in chosen}

    def grids(self, leaves: Leaves) -> Grids:
        """Where the units of the leaves lie; errors name the leaf."""
        if self.pattern.members:
            made = tied_sets(self.pattern, leaves)
            known = paths_of(made)
            if others := [path for path in leaves if path not in known]:
                raise ValueError(
                    f"{self.pattern}: expected every sparse leaf to be in a tied set whose leaves are all sparse, but "
                    f"{others[0]!r} is not"
                )
        else:
            made = {path: self._grid(path, leaf) for path, leaf in leaves.items()}
        if isinstance(self.distribution, Global) and made:
            if any(units.of_all.rows[0] > 1 for units in made.values()):
                raise ValueError(f"global_ needs a pattern with one competing group a leaf, got {self.pattern}")
            check_grid(leaves)
            if self.pattern.fixed is not None:
                raise ValueError(f"global_ needs a pattern that leaves the count open, got {self.pattern}")
        return made

    def _grid(self, path: str, leaf: Tensor) -> Units:
        try:
            units = units_of(self.pattern, tuple(leaf.shape))
            return units if type(leaf) is Tensor else seated(units, leaf)
        except ValueError as error:
            raise ValueError(f"{error} at {path!r}") from None

    def goal(self, sparsity: Level | Counted | None, what: str = "sparsity") -> Goal:
        """A sparsity as a Schedule, or the count that was given in its place, checked to fit the competition."""
        if not isinstance(sparsity, Counted):
            return as_fraction(sparsity, what)
        if self.pattern.fixed is not None:
            raise ValueError(
                f"{what}: expected a pattern that leaves the count open, got {self.pattern} and {shown(sparsity)}"
            )
        if not (self.joint or is_uniform(self.distribution)):
            raise ValueError(
                f"{what}: expected distribution to be uniform() or global_() with {shown(sparsity)}, which decides "
                f"every count, got {shown(self.distribution)}"
            )
        return sparsity


def fixed_count(path: str, units: Units, sparsity: Real | None) -> Count:
    """How many units a pattern keeps in each group of a leaf; raises where the sparsity is another one."""
    count, width = units.fixed, units.rows[1]
    assert count is not None
    try:
        if sparsity is not None and not isinstance(count, Tensor):
            check_fixed(sparsity, count / width if width else 1.0, str(units.pattern))
    except ValueError as error:
        raise ValueError(f"{error} at {path!r}") from None
    return count


def paths_of(grids: Grids) -> list[str]:
    """The paths of the leaves, those of tied sets included."""
    return [at for path, units in grids.items() for at in ([place.path for place in units.places] or [path])]
