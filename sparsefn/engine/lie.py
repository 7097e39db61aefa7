"""Where the part of a tensor that one process holds lies in the whole: numbers alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sparsefn.engine.transforms import Array


class Lie(NamedTuple):
    """The box of a tensor, or of its grid of units, that is here, and the process groups that share the whole.

    >>> from sparsefn.engine.lie import Lie
    >>> Lie(shape=(4, 6), start=(0, 3), size=(4, 3), groups=("1",)).numel
    24

    `shape` is that of the whole, `start` and `size` say which box is here. The processes of each group in `groups`, by
    name, hold parts of their own; all others that hold the tensor have copies.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    groups: tuple[str, ...]

    @property
    def numel(self) -> int:
        """How many entries the whole has."""
        return math.prod(self.shape)

    def places(self, index: Array) -> Array:
        """Row-major indices in the whole of row-major indices in the box; both grow in the same order.

        >>> import numpy as np
        >>> from sparsefn.engine.lie import Lie
        >>> Lie((4, 6), (1, 3), (2, 3), ()).places(np.array([0, 2, 3]))
        array([ 9, 11, 15])
        """
        places: Array = np.zeros_like(index)
        step = 1
        for start, size, extent in zip(reversed(self.start), reversed(self.size), reversed(self.shape), strict=True):
            index, along = np.divmod(index, max(size, 1))
            places += (along + start) * step
            step *= extent
        return places
