"""The rule of a competition: which units of which leaves compete with each other, and
how many they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.processes import check_grid
from sparsefn._engine.selection import Count, Entry, totals_of, winners
from sparsefn.core.checks import check_call, shown, uncalled
from sparsefn.core.rounding import as_fraction
from sparsefn.core.state import Level, Schedule, Step
from sparsefn.core.tree import Leaves
from sparsefn.masks.budgets.counts import Counted, Total
from sparsefn.masks.budgets.distributions import (
    Distribution,
    Global,
    check_fixed,
    is_uniform,
)
from sparsefn.masks.patterns.units import Grids, Pattern, Units

# What decides the counts of an algorithm: a sparsity at each step, a count by scores,
# or nothing.
Goal = Schedule | Counted | None


class Competition(NamedTuple):
    """Which units compete: the pattern inside a leaf, the distribution among leaves."""

    pattern: Pattern
    distribution: Distribution

    def check(self) -> Competition:
        """The competition itself, if its parts are a pattern and a distribution."""
        if not isinstance(self.pattern, Pattern):
            got = uncalled(self.pattern) or repr(self.pattern)
            raise TypeError(
                f"expected pattern to be one such as sf.patterns.nm(2, 4), got {got}"
            )
        if not callable(self.distribution):
            table = (
                "; write sf.budgets.by_path(...) around it"
                if isinstance(self.distribution, Mapping)
                else ""
            )
            got = f"{self.distribution!r}{table}"
            raise TypeError(
                f"expected distribution to be one such as sf.budgets.erk(), got {got}"
            )
        check_call("distribution", self.distribution, "shapes", "sparsity")
        return self

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)

    def check_grids(self, grids: Grids, leaves: Leaves) -> None:
        """Raise for leaves that cannot meet in one competition."""
        if any(units.rows[0] > 1 for units in grids.full.values()):
            raise ValueError(
                "global_ needs a pattern with one competing group a leaf, got "
                f"{self.pattern}"
            )
        check_grid(leaves)
        if grids.full and self.pattern.fixed is not None:
            raise ValueError(
                "global_ needs a pattern that leaves the count open, got "
                f"{self.pattern}"
            )

    def goal(self, sparsity: Level | Counted | None, what: str = "sparsity") -> Goal:
        """A sparsity as a Schedule, or the count that was given in its place, checked
        to fit the competition.
        """
        if not isinstance(sparsity, Counted):
            return as_fraction(sparsity, what)
        if self.pattern.fixed is not None:
            raise ValueError(
                f"{what}: expected a pattern that leaves the count open, got "
                f"{self.pattern} and {shown(sparsity)}"
            )
        if what == "sparsity" and not (self.joint or is_uniform(self.distribution)):
            raise ValueError(
                "sparsity: expected distribution to be uniform() or global_() with "
                f"{shown(sparsity)}, which decides every count, got "
                f"{shown(self.distribution)}"
            )
        return sparsity


def fixed_count(path: str, units: Units, sparsity: Real | None) -> Count:
    """How many units a pattern keeps in each group of a leaf.

    Raises where the sparsity is another one.
    """
    count = units.fixed
    width = units.rows[1]
    assert count is not None
    try:
        if sparsity is not None and not isinstance(count, Tensor):
            check_fixed(sparsity, count / width if width else 1.0, str(units.pattern))
    except ValueError as error:
        raise ValueError(
            f"{error} at {path!r}; give None in the place of the sparsity"
        ) from None
    return count


def count_of(
    goal: Counted, scores: Tensor, active: Tensor, step: Step, total: Total, paths: str
) -> Tensor:
    """The count that scores decide in each group, checked: errors name the leaves."""
    count: object = goal.count(scores, active, step, *(() if goal.whole else (total,)))
    if (
        not isinstance(count, Tensor)
        or count.is_floating_point()
        or count.dtype == torch.bool
    ):
        got = count.dtype if isinstance(count, Tensor) else type(count).__name__
        raise TypeError(
            f"expected {shown(goal)} to give an integer tensor, got {got} at {paths}"
        )
    if count.shape != scores.shape[:1]:
        name = shown(goal)
        groups = scores.shape[0]
        shape = tuple(count.shape)
        raise ValueError(
            f"expected {name} to give a count for each of {groups} groups, got shape "
            f"{shape} at {paths}"
        )
    return count


# ---- bounds of the leaves in one competition -----------------------------------------


def bounded_winners(
    distribution: Global,
    sizes: Mapping[str, int],
    entries: list[Entry],
    count: Count,
    held: list[Tensor] | None,
    least: int = 0,
) -> list[Tensor]:
    """Masks of the best units of one competition, within the bounds of each leaf.

    >>> from sparsefn.algorithms.competition import bounded_winners
    >>> entries = [Entry(torch.tensor([[4.0, 3.0]])), Entry(torch.tensor([[2.0, 1.0]]))]
    >>> bounded_winners(
    ...     sf.budgets.global_(floor=0.5), {"a": 2, "b": 2}, entries, 2, None
    ... )
    [tensor([[ True, False]]), tensor([[ True, False]])]

    `sizes` are the numbers of units of the leaves, `held` their units that are kept
    already. No leaf keeps less than `least` units.
    """
    bounds = distribution.bounds(
        {path: (n,) for path, n in sizes.items()}, torch.zeros((), device="cpu")
    )
    fewest = []
    most = []
    for path, (low, high) in bounds.items():
        lowest = min(least, sizes[path])
        fewest.append(max(low, lowest))
        most.append(max(high, lowest))
    if any(high < n for high, n in zip(most, sizes.values(), strict=True)):
        # Only the best units of a leaf compete, as many as it keeps at most.
        best = winners(entries, _beyond(held, entries, most))
        entries = [
            x._replace(allow=allow, deny=None)
            for x, allow in zip(entries, best, strict=True)
        ]
    if not any(fewest):
        return winners(entries, [count], joint=True)
    # The best units of a leaf, as many as it keeps at least, win before all other
    # units.
    first = winners(entries, _beyond(held, entries, fewest))
    alike = [torch.zeros_like(x.scores[:1, :1]).expand(x.scores.shape) for x in entries]
    pairs = zip(entries, alike, first, strict=True)
    again = [
        x._replace(scores=score, allow=allow, deny=None, absolute=False)
        for x, score, allow in pairs
    ]
    first = winners(again, [count], joint=True)
    rest = [
        x._replace(deny=won if x.deny is None else x.deny | won)
        for x, won in zip(entries, first, strict=True)
    ]
    others = winners(rest, [count - totals_of(entries, first).sum()], joint=True)
    return [a | b for a, b in zip(first, others, strict=True)]


def with_least(
    least: int, counts: Sequence[Count] | Tensor, sizes: Sequence[int]
) -> list[Count]:
    """Counts of units, of each leaf or of all in one, of which no leaf has less than
    `least` or all that it has.

    >>> with_least(1, [0, torch.tensor(2)], [4, 4]), with_least(1, [2], [4, 0, 4, 4])
    ([1, tensor(2)], [3])
    """
    each = [min(least, n) for n in sizes]
    pairs = zip(counts, each if len(counts) == len(sizes) else [sum(each)], strict=True)
    return [
        n.clamp(min=low) if isinstance(n, Tensor) else max(n, low) for n, low in pairs
    ]


def _beyond(
    held: list[Tensor] | None, entries: list[Entry], bounds: list[int]
) -> Sequence[Count]:
    # How many units of each leaf are missing to a bound.
    if held is None:
        return bounds
    had = totals_of(entries, [flags.reshape(1, -1) for flags in held])
    return [bound - n for bound, n in zip(bounds, had.unbind(), strict=True)]
