"""Where the units of a group lie in one leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Member(NamedTuple):
    """Where the units of a group lie in one leaf: along `dim`, the unit of each index,
    -1 for none.
    """

    leaf: str
    dim: int
    units: npt.NDArray[np.int64]

    def tied(self) -> list[Any]:
        """The member as `sf.patterns.tied` takes it: [leaf, dim], with a block and
        parts, or with the units of all indices.
        """
        units = self.units
        count = int(self.units.max()) + 1
        steps = np.nonzero(np.diff(units))[0]
        block = int(steps[0]) + 1 if len(steps) else len(units)
        parts = len(units) // (block * count)
        if parts and np.array_equal(
            units, np.tile(np.repeat(np.arange(count), block), parts)
        ):
            if parts > 1:
                return [self.leaf, self.dim, block, parts]
            return [self.leaf, self.dim, block] if block > 1 else [self.leaf, self.dim]
        return [self.leaf, self.dim, units.tolist()]

    def __str__(self) -> str:
        _, _, *rest = self.tied()
        here = f"{self.leaf}[{self.dim}]"
        if not rest:
            return here
        if isinstance(rest[0], list):
            return f"{here} ({int((self.units >= 0).sum())} of {len(self.units)})"
        parts = f" in {rest[1]} parts" if rest[1:] else ""
        return f"{here} (blocks of {rest[0]}{parts})"
