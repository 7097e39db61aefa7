"""The fewest and the most units of each leaf in one competition over all leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from torch import Tensor

from sparsefn.engine.checks import Made
from sparsefn.engine.numbers import Real
from sparsefn.engine.selection import Counts
from sparsefn.engine.surroundings import at_compile_time, known

Shapes = Mapping[str, tuple[int, ...]]


@at_compile_time
def _ratio(x: float) -> tuple[int, int]:
    # As a float 0.07 * 100 is a little above 7. Any p / q below 2^26 is recovered.
    exact = Fraction(x)
    near = (exact.limit_denominator(2**bits) for bits in range(54))
    return next(
        (fraction for fraction in near if float(fraction) == x), exact
    ).as_integer_ratio()


class _Bounds(NamedTuple):
    floor: float
    ceiling: float


class Global(Made, _Bounds):
    """One competition over all leaves, each within its bounds (made by `global_`).

    >>> sf.budgets.global_(floor=0.1)
    global_(floor=0.1)
    """

    def bounds(self, shapes: Shapes, total: int | Tensor) -> dict[str, tuple[int, int]]:
        """The fewest and the most units that each leaf keeps.

        Raises ValueError if the total cannot meet them.

        >>> sf.budgets.global_(floor=0.07, ceiling=0.29).bounds({"a": (100,)}, 8)
        {'a': (7, 29)}

        Products are exact, of the simplest fraction that rounds to the float: 0.07 is
        7/100, as it was written.
        """
        sizes = {path: known(math.prod(shape)) for path, shape in shapes.items()}
        (a, b) = _ratio(known(self.floor))
        (c, d) = _ratio(known(self.ceiling))
        limits = {path: (-(-a * n // b), c * n // d) for path, n in sizes.items()}
        least = sum(low for low, _ in limits.values())
        most = sum(high for _, high in limits.values())
        if isinstance(total, int) and not least <= total <= most:
            raise ValueError(
                f"global_(floor={self.floor}, ceiling={self.ceiling}) keeps between "
                f"{least} and {most} units, but the sparsity asks for {total} over "
                f"{', '.join(map(repr, shapes))}"
            )
        return limits

    def __call__(self, shapes: Shapes, sparsity: Real) -> Counts:
        """Raise TypeError: the counts of a global budget depend on scores, not only on
        shapes.

        >>> sf.budgets.global_()({"a": (8,)}, 0.5)
        Traceback (most recent call last):
            ...
        TypeError: a global_ budget needs scores: its counts come out of one competition
        over all leaves
        """
        raise TypeError(
            "a global_ budget needs scores: its counts come out of one competition "
            "over all leaves"
        )
