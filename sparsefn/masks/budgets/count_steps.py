"""Counts that rise in steps: multiples of a number, equal in some leaves."""

from __future__ import annotations

import math
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

    members: list[list[int]]  # numbers of leaves that are equal
    units: list[int]  # of one of them
    lengths: list[int]  # of a step, in units

    @classmethod
    def among(
        cls,
        sizes: Mapping[str, int],
        of: int | Mapping[str, int],
        equal_across: Sequence[str],
    ) -> Steps:
        """The steps of leaves of these numbers of units; `of` may be by glob.

        Raises ValueError where equal leaves have other numbers of units, or a glob
        matches no leaf.
        """
        by_glob = {"*": of} if isinstance(of, int) else of
        if sizes:
            check_globs("in_multiples", [*by_glob, *equal_across], list(sizes))
        names = list(sizes)
        alike: dict[str, list[int]] = {}
        alone = []
        for i, name in enumerate(names):
            glob = first_match(name, equal_across)
            if glob is None:
                alone.append([i])
            else:
                alike.setdefault(glob, []).append(i)
        members = sorted([*alike.values(), *alone])
        for first, *others in members:
            for other in others:
                if sizes[names[other]] != sizes[names[first]]:
                    raise ValueError(
                        "in_multiples: expected leaves of equal numbers of units in "
                        f"equal_across, got {sizes[names[first]]} at {names[first]!r} "
                        f"and {sizes[names[other]]} at {names[other]!r}"
                    )
        lengths = []
        for equal in members:
            globs = [first_match(names[i], by_glob) for i in equal]
            own = [by_glob[glob] for glob in globs if glob is not None]
            lengths.append(math.lcm(*own))
        return cls(members, [sizes[names[first]] for first, *_ in members], lengths)

    @property
    def sizes(self) -> list[int]:
        """How many steps it is from no unit to all."""
        pairs = zip(self.units, self.lengths, strict=True)
        return [-(-units // length) for units, length in pairs]

    def widths(self, kept: Sequence[int]) -> list[int]:
        """The units that one of the equal leaves keeps at so many steps."""
        rows = zip(kept, self.lengths, self.units, strict=True)
        return [min(n * length, units) for n, length, units in rows]

    def counts(self, kept: Sequence[int]) -> list[int]:
        """The units that each leaf keeps at so many steps."""
        found = [0] * sum(map(len, self.members))
        for members, width in zip(self.members, self.widths(kept), strict=True):
            for i in members:
                found[i] = width
        return found

    def scores(self, of_units: Sequence[Any]) -> list[Any]:
        """The scores of all steps, from scores of the units of each leaf: the mean over
        the units that a step adds, of which the best come first.
        """
        found = []
        for members, length in zip(self.members, self.lengths, strict=True):
            best = np.stack([-np.sort(-of_units[i].reshape(-1)) for i in members])
            starts = range(0, best.shape[1], length)
            if length == 1 and len(members) == 1:
                found.append(best[0])
            else:
                added = [best[:, n : n + length].mean() for n in starts]
                found.append(np.array(added))
        return found
