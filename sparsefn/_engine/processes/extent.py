"""Where the part of a tensor that one process holds lies in the whole, in numbers."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

from torch import Tensor

from sparsefn._engine.transforms import Array

Index = TypeVar("Index", Array, Tensor)


class Extent(NamedTuple):
    """The box of a tensor, or of its grid of units, that is here, and the process
    groups that share the whole.

    >>> from sparsefn._engine.processes.extent import Extent
    >>> Extent(shape=(4, 6), start=(0, 3), size=(4, 3), groups=("1",)).numel
    24

    `shape` is the shape of the whole, `start` and `size` say which box is here. The
    processes of each group in `groups`, by name, hold parts of their own; all other
    processes that hold the tensor have copies.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    groups: tuple[str, ...]

    @property
    def numel(self) -> int:
        """How many entries the whole has."""
        return math.prod(self.shape)

    def places(self, index: Index) -> Index:
        """Row-major indices in the whole of row-major indices in the box.

        Both grow in the same order.

        >>> import numpy as np
        >>> from sparsefn._engine.processes.extent import Extent
        >>> Extent((4, 6), (1, 3), (2, 3), ()).places(np.array([0, 2, 3]))
        array([ 9, 11, 15])
        """
        first, *others = self.runs
        places = 0 * index
        step = 1
        for start, size, extent in reversed(others):
            over = index // max(size, 1)
            places += (index - over * size + start) * step
            index = over
            step = step * extent
        places += (index + first[0]) * step
        return places

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Start, size and extent of each dimension, where whole dimensions are one with
        the dimension before them.

        >>> from sparsefn._engine.processes.extent import Extent
        >>> Extent((4, 6), (1, 0), (2, 6), ()).runs
        [(6, 12, 24)]
        """
        runs = [(0, 1, 1)]
        for start, size, extent in zip(self.start, self.size, self.shape, strict=True):
            if size == extent or runs[-1][2] == 1:
                before, many, whole = runs.pop()
                runs.append((before * extent + start, many * size, whole * extent))
            else:
                runs.append((start, size, extent))
        return runs
