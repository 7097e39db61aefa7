"""Counts that rise in steps: multiples of a number, equal in some leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsefn.core.tree import check_globs, first_match


class Steps(NamedTuple):
    """Leaves that keep equally many units, and by how many these rise.

    >>> steps = Steps.among({"a": 10, "b": 10, "c": 5}, 4, ["[ab]"])
    >>> steps.sizes, steps.counts([2, 1]), steps.counts([3, 2])
    ([3, 2], [8, 8, 4], [10, 10, 5])

    A leaf with fewer units than a multiple, or a rest of one, is whole at its last
    step.
    """

    of: int
    members: list[list[int]]  # numbers of leaves that are equal
    units: list[int]  # of one of them

    @classmethod
    def among(
        cls, sizes: Mapping[str, int], of: int, equal_across: Sequence[str]
    ) -> Steps:
        """The steps of leaves of these numbers of units.

        Raises ValueError where equal leaves have other numbers of units, or a glob
        matches no leaf.
        """
        check_globs("in_multiples", list(equal_across), list(sizes))
        alike: dict[str, list[int]] = {}
        names = list(sizes)
        for i, name in enumerate(names):
            glob = first_match(name, equal_across)
            # a leaf that is by itself has the name of no glob
            alike.setdefault(f"={name}" if glob is None else glob, []).append(i)
        members = list(alike.values())
        for first, *others in members:
            for other in others:
                if sizes[names[other]] != sizes[names[first]]:
                    raise ValueError(
                        "in_multiples: expected leaves of equal numbers of units in "
                        f"equal_across, got {sizes[names[first]]} at {names[first]!r} "
                        f"and {sizes[names[other]]} at {names[other]!r}"
                    )
        return cls(of, members, [sizes[names[first]] for first, *_ in members])

    @property
    def sizes(self) -> list[int]:
        """How many steps it is from no unit to all."""
        return [-(-units // self.of) for units in self.units]

    def counts(self, kept: Sequence[int]) -> list[int]:
        """The units that each leaf keeps at so many steps."""
        found = [0] * sum(map(len, self.members))
        for members, units, n in zip(self.members, self.units, kept, strict=True):
            for i in members:
                found[i] = min(n * self.of, units)
        return found

    def scores(self, of_units: Sequence[Any]) -> list[Any]:
        """The scores of all steps, from scores of the units of each leaf: the mean over
        the units that a step adds, of which the best come first.
        """
        found = []
        for members in self.members:
            best = np.stack([-np.sort(-of_units[i].reshape(-1)) for i in members])
            added = range(0, best.shape[1], self.of)
            if self.of == 1 and len(members) == 1:
                found.append(best[0])
            else:
                found.append(np.array([best[:, n : n + self.of].mean() for n in added]))
        return found
