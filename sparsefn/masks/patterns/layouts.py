"""Units of leaves by the shapes of the leaves, in a bounded cache."""

from __future__ import annotations

from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import Count
from sparsefn._engine.transforms import is_eager
from sparsefn.core.tree import Leaves
from sparsefn.masks.patterns.packs import packed
from sparsefn.masks.patterns.units import Grids, Pattern


class UnitLayout:
    """Grids of leaves of certain shapes, and the counts at the last sparsity that gave
    numbers.
    """

    def __init__(self, grids: Grids) -> None:
        self.grids = grids
        self.counts: dict[Real | None, list[Count]] = {}


class UnitLayouts:
    """A cache of the layouts of one pattern; a full cache starts again.

    >>> from sparsefn.masks.patterns.layouts import UnitLayouts
    >>> layouts = UnitLayouts(sf.patterns.unstructured())
    >>> layouts.of({"w": torch.ones(2)}) is layouts.of({"w": torch.zeros(2)})
    True
    """

    most = 64

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.known: dict[object, UnitLayout] = {}

    def of(self, leaves: Leaves) -> UnitLayout | None:
        """The layout of some plain leaves; None for other leaves, and where a
        transform, a mode or the compiler hides them.
        """
        kinds = [(x.shape, x.dtype, x.device) for x in leaves.values()]
        plain = set(map(type, leaves.values())) <= {Tensor}
        if not plain or not is_eager():
            return None
        key = (*leaves, *kinds)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= self.most:
                self.known = {}
            found = UnitLayout(packed(self.pattern.grids(leaves), leaves))
            self.known[key] = found
        return found
