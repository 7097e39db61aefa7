"""Distributions: (shapes, sparsity) -> how many units each leaf keeps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import CountsByName
from sparsefn._engine.selection import apportion as apportion
from sparsefn._engine.selection import spread as spread
from sparsefn._engine.transforms import as_constant, at_compile_time, host_number
from sparsefn.core.checks import (
    Described,
    Made,
    check_int,
    check_sparsity,
    described,
    is_number,
    natural,
)
from sparsefn.core.rounding import n_kept as n_kept
from sparsefn.core.rounding import rounded as rounded
from sparsefn.core.rounding import rounded_down as rounded_down
from sparsefn.core.rounding import rounded_up as rounded_up
from sparsefn.core.tree import check_globs, first_match, glob_match

Shapes = Mapping[str, tuple[int, ...]]
Distribution = Callable[[Shapes, Real], CountsByName]
Density = Callable[[tuple[int, ...]], float]  # of a shape


def compensated(sparsity: float, total: int, dense: int) -> float:
    """The sparsity that the other weights need where some stay dense.

    >>> round(sf.budgets.compensated(0.6, total=100, dense=20), 3)
    0.75

    Args:
        sparsity: Fraction of zeros over all weights, a float in [0, 1].
        total: The number of all weights.
        dense: The number of weights that stay dense.

    Returns:
        `sparsity * total / (total - dense)`.

    Raises:
        TypeError: `sparsity` is not a float.
        ValueError: `sparsity` is outside [0, 1], `dense` outside [0, total], or the
            other weights would keep none.
    """
    if isinstance(check_sparsity(sparsity), Tensor):
        raise TypeError(
            "compensated: expected sparsity to be a float in [0, 1], got a tensor"
        )
    if not 0 <= dense <= total:
        raise ValueError(
            f"compensated: expected 0 <= dense <= total, got {dense} of {total}"
        )
    if sparsity > 0 and sparsity * total >= total - dense:
        raise ValueError(
            f"compensated: {dense} of {total} weights are dense, so the other "
            f"{total - dense} would keep none at sparsity {sparsity}; expected less "
            f"than {1 - dense / max(total, 1):g}"
        )
    return sparsity * total / (total - dense) if sparsity else 0.0


@described
def uniform(dense_first: bool | str = False) -> Distribution:
    """The same sparsity in every leaf.

    >>> sf.budgets.uniform()({"a": (4, 4), "b": (10,)}, 0.5)
    {'a': 8, 'b': 5}

    >>> sf.budgets.uniform(dense_first="stem.*")(
    ...     {"fc.weight": (4, 4), "stem.weight": (4, 1)}, 0.5
    ... )
    {'fc.weight': 8, 'stem.weight': 4}

    Args:
        dense_first: Whether the first leaf stays dense, which is what papers call
            uniform. True is the first in the order of paths, as `sf.report.plan` lists
            them; where the name of the first layer is not, give its path or a glob.

    Returns:
        The distribution. Every other leaf is at the sparsity itself, so that less is
        pruned over all: `compensated` says what to ask for instead.

    Raises:
        TypeError: `dense_first` is neither a bool nor a glob.
        ValueError: When a budget is made, the glob matches no leaf.

    Evci et al. 2020, arXiv 1911.11134, sec. 3.
    """
    if not isinstance(dense_first, bool | str):
        raise TypeError(
            "uniform: expected dense_first to be a bool or a glob, got "
            f"{type(dense_first).__name__}"
        )
    if dense_first is False:
        return per_leaf

    def counts(shapes: Shapes, sparsity: Real) -> CountsByName:
        if isinstance(dense_first, str):
            check_globs("uniform", [dense_first], list(shapes))
            first = [path for path in shapes if glob_match(path, dense_first)]
        else:
            first = sorted(shapes, key=natural)[:1]
        return per_leaf(shapes, sparsity) | {
            path: math.prod(shapes[path]) for path in first
        }

    return counts


def per_leaf(shapes: Shapes, sparsity: Real) -> CountsByName:
    """The counts of `uniform`."""
    return {path: n_kept(math.prod(shape), sparsity) for path, shape in shapes.items()}


def is_uniform(distribution: Distribution) -> bool:
    """Whether it is `uniform()`."""
    return distribution is per_leaf or (
        isinstance(distribution, Described) and distribution.__wrapped__ is per_leaf
    )


def _by_share(shapes: Shapes, sparsity: Real, density: Density) -> CountsByName:
    given = tuple([(path, tuple(shape)) for path, shape in shapes.items()])
    if type(sparsity) is not float or torch.compiler.is_compiling():
        return _shared.__wrapped__(given, sparsity, density)
    return dict(_shared(given, sparsity, density))


@functools.lru_cache(maxsize=64)  # an update asks again and again
def _shared(
    given: tuple[tuple[str, tuple[int, ...]], ...], sparsity: Real, density: Density
) -> CountsByName:
    shapes = dict(given)
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    flat = [
        f"shape {shape} at {path!r}" for path, shape in shapes.items() if len(shape) < 2
    ]
    if flat:
        raise ValueError(
            "Erdos-Renyi budgets need leaves of 2 dimensions or more, got "
            f"{', '.join(flat)}: leave them out of `where`"
        )
    shares = {}
    for path in shapes:
        if sizes[path]:
            shares[path] = sizes[path] * density(shapes[path])
        else:
            shares[path] = 0.0
    return apportion(shares, n_kept(sum(sizes.values()), sparsity), sizes)


@described
def erdos_renyi() -> Distribution:
    """Density of a leaf in proportion to (out + in) / (out * in); the total is exact.

    >>> sf.budgets.erdos_renyi()({"a": (100, 100), "b": (10, 100)}, 0.9)
    {'a': 710, 'b': 390}

    Returns:
        The distribution. A leaf whose share exceeds its size is dense, and the other
        leaves share the rest.

    Raises:
        ValueError: When a budget is made, a leaf has fewer than 2 dimensions.

    Mocanu et al. 2018, arXiv 1707.04780, eq. 3.
    """

    def density(shape: tuple[int, ...]) -> float:
        return (shape[0] + shape[1]) / (shape[0] * shape[1])

    return lambda shapes, sparsity: _by_share(shapes, sparsity, density)


@described
def erk(power: float = 1.0) -> Distribution:
    """Erdos-Renyi-Kernel: the density of a leaf follows from its dimensions.

    >>> sf.budgets.erk()({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9)
    {'a': 1267, 'b': 640}

    Args:
        power: The exponent: density is in proportion to
            (sum of dims / product of dims) ** power.

    Returns:
        The distribution. The total is exact; a leaf whose share exceeds its size is
        dense, and the other leaves share the rest.

    Raises:
        TypeError: `power` is not a number.
        ValueError: `power` is not finite; when a budget is made, a leaf has fewer than
            2 dimensions, or a density overflows.

    Evci et al. 2020, arXiv 1911.11134, sec. 3.
    """
    if not is_number(power):
        raise TypeError(
            f"erk: expected power to be a number, got {type(power).__name__}"
        )
    if not math.isfinite(power):
        raise ValueError(f"expected a finite power, got {power}")

    def density(shape: tuple[int, ...]) -> float:
        try:
            return float((sum(shape) / math.prod(shape)) ** power)
        except OverflowError as error:
            text = (
                f"expected a power whose densities are finite, but {power} overflows "
                f"for shape {tuple(shape)}"
            )
            raise ValueError(text) from error

    return lambda shapes, sparsity: _by_share(shapes, sparsity, density)


@described
def by_path(table: Mapping[str, float]) -> Distribution:
    """A sparsity for the leaves of each glob, of which the first match counts.

    >>> sf.budgets.by_path({"head.*": 0.0})(
    ...     {"head.weight": (2, 5), "body.weight": (2, 5)}, 0.9
    ... )
    {'head.weight': 10, 'body.weight': 1}

    Args:
        table: Sparsities, floats in [0, 1], by glob.

    Returns:
        The distribution. Other leaves get the algorithm's own sparsity.

    Raises:
        TypeError: `table` is no dict, or a sparsity is not a float.
        ValueError: A sparsity is outside [0, 1]; when a budget is made, a glob matches
            no leaf.
    """
    if not isinstance(table, Mapping):
        raise TypeError(
            "by_path: expected table to be a dict of a sparsity for each glob, got "
            f"{table!r}"
        )
    for glob, sparsity in table.items():
        check_sparsity(sparsity, f"the sparsity of {glob!r}")

    def counts(shapes: Shapes, sparsity: Real) -> CountsByName:
        check_globs("by_path", list(table), list(shapes))
        kept = {}
        for path, shape in shapes.items():
            glob = first_match(path, table)
            own = sparsity if glob is None else table[glob]
            kept[path] = n_kept(math.prod(shape), own)
        return kept

    return counts


@described
def owl(ratios: Mapping[str, float], spread: float = 0.08) -> Distribution:
    """A budget that gives more weights to blocks with more outliers.

    >>> owl = sf.budgets.owl({"0.*": 0.01, "1.*": 0.03, "2.*": 0.02}, spread=0.1)
    >>> owl({"0.weight": (10, 10), "1.weight": (10, 10), "2.weight": (10, 10)}, 0.5)
    {'0.weight': 40, '1.weight': 60, '2.weight': 50}

    Args:
        ratios: The ratio of outliers of each block, by a glob for its leaves, as
            `sf.calibration.outlier_ratios` gives them. Only their differences, relative
            to the largest one, matter; with equal ratios it is `uniform`.
        spread: Half of the largest difference between the shares that two blocks keep,
            in [0, 0.5].

    Returns:
        The distribution. A block's leaves have one sparsity. The mean over blocks of
        what is kept is 1 - sparsity, so blocks of one size keep that share together.
        Leaves of all blocks need not be given at once.

    Raises:
        TypeError: `ratios` is no dict, or a ratio or `spread` is no number.
        ValueError: `ratios` is empty, a ratio is not finite, or `spread` is outside
            [0, 0.5]; when a budget is made, no glob matches a leaf, or a block would
            keep less than nothing or more than all.

    Yin et al. 2023, arXiv 2310.05175, sec. 3.
    """
    if not isinstance(ratios, Mapping):
        raise TypeError(
            "owl: expected ratios to be a dict of a ratio for each glob, got "
            f"{ratios!r}"
        )
    if not ratios:
        raise ValueError("owl: expected a ratio for one glob or more, got {}")
    for glob, ratio in ratios.items():
        if not is_number(ratio):
            raise TypeError(
                f"owl: expected the ratio of {glob!r} to be a number, got {ratio!r}"
            )
        if not math.isfinite(ratio):
            raise ValueError(f"owl: expected a finite ratio of {glob!r}, got {ratio!r}")
    if not is_number(spread):
        raise TypeError(f"owl: expected spread to be a number, got {spread!r}")
    if not 0.0 <= spread <= 0.5:
        raise ValueError(f"owl: expected spread in [0, 0.5], got {spread!r}")
    low = min(ratios.values())
    high = max(ratios.values())
    more = {
        glob: 2 * spread * (r - low) / (high - low) if high > low else 0.0
        for glob, r in ratios.items()
    }
    mean = math.fsum(more.values()) / len(more)

    def counts(shapes: Shapes, sparsity: Real) -> CountsByName:
        kept = {}
        for path, shape in shapes.items():
            glob = first_match(path, more)
            if glob is None:
                raise ValueError(
                    f"owl: expected a glob for each leaf, got none for {path!r} in "
                    f"{list(more)}"
                )
            own = sparsity + (mean - more[glob])
            level = host_number(own)
            if level is not None and not 0.0 <= level <= 1.0:
                raise ValueError(
                    "owl: expected every block to keep a share in [0, 1], got "
                    f"{1 - level:g} for {glob!r}"
                )
            kept[path] = n_kept(math.prod(shape), own)
        return kept

    return counts


@described
def at_least(distribution: Distribution, least: int) -> Distribution:
    """The counts of a distribution, where no leaf keeps fewer than `least` units.

    >>> sf.budgets.at_least(sf.budgets.uniform(), 6)(
    ...     {"a": (100, 10), "b": (10, 10), "c": (4,)}, 0.98
    ... )
    {'a': 12, 'b': 6, 'c': 4}

    Args:
        distribution: A distribution that gives counts, such as `uniform()`. `global_`
            has a `floor` of its own.
        least: The fewest units of a leaf. A leaf of fewer units is dense.

    Returns:
        The distribution. The total stays exact, as what these leaves get is taken from
        the others, in proportion to what they keep above `least`. Counts are of whole
        leaves: a pattern such as `sf.patterns.row_balanced` gives every output its
        inputs.

    Raises:
        TypeError: `distribution` is `global_` or no function, or `least` is not an int.
        ValueError: `least` is below 1; when a budget is made, the total is too small.
            Where its value is not known, the total rises.
    """
    check_int("at_least", "least", least, 1)
    if isinstance(distribution, Global) or not callable(distribution):
        raise TypeError(
            "at_least: expected a distribution like uniform() or global_(floor=...), "
            f"got {distribution!r}"
        )

    def counts(shapes: Shapes, sparsity: Real) -> CountsByName:
        asked = counts_given(distribution, shapes, sparsity)
        floors = {path: min(least, math.prod(shape)) for path, shape in shapes.items()}
        rest = sum(asked.values()) - sum(floors.values())
        short = host_number(rest)
        if short is not None and short < 0:
            raise ValueError(
                f"at_least: expected {sum(floors.values())} units or more, got "
                f"{sum(asked.values())}"
            )
        above = {path: _positive(asked[path] - floors[path]) for path in shapes}
        more = apportion(above, _positive(rest), above)
        return {path: floors[path] + more[path] for path in shapes}

    return counts


def _positive(count: int | Tensor) -> int | Tensor:
    if isinstance(count, Tensor):
        return count.clamp(min=0)
    return max(count, 0)


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
        sizes = {path: as_constant(math.prod(shape)) for path, shape in shapes.items()}
        (a, b) = _ratio(as_constant(self.floor))
        (c, d) = _ratio(as_constant(self.ceiling))
        limits = {}
        for path, n in sizes.items():
            limits[path] = (-(-a * n // b), c * n // d)
        least = sum(low for low, _ in limits.values())
        most = sum(high for _, high in limits.values())
        if isinstance(total, int) and not least <= total <= most:
            raise ValueError(
                f"global_(floor={self.floor}, ceiling={self.ceiling}) keeps between "
                f"{least} and {most} units, but the sparsity asks for {total} over "
                f"{', '.join(map(repr, shapes))}"
            )
        return limits

    def __call__(self, shapes: Shapes, sparsity: Real) -> CountsByName:
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


@described
def global_(floor: float = 0.0, ceiling: float = 1.0) -> Distribution:
    """One competition over all leaves, whose shares follow the scores.

    >>> algorithm = sf.one_shot(0.5, distribution=sf.budgets.global_())
    >>> state = algorithm.init(
    ...     {"a": torch.tensor([[4.0, 3.0]]), "b": torch.tensor([[1.0, 2.0]])}
    ... )
    >>> algorithm.update(state, state.params, 0).masks
    {'a': tensor([[True, True]]), 'b': tensor([[False, False]])}

    Args:
        floor: The least fraction of a leaf's n units that it keeps: ceil(floor * n).
        ceiling: The largest fraction: floor(ceiling * n).

    Returns:
        The distribution. The total is exact. So are the products, of the simplest
        fraction that rounds to the float: 0.07 of 100 is 7, and 1 / 3 of 3 is 1.

    Raises:
        TypeError: A bound is no number.
        ValueError: A bound is outside [0, 1], or `floor` is above `ceiling`; when a
            budget is made, the total cannot meet the bounds.
    """
    for name, value in (("floor", floor), ("ceiling", ceiling)):
        if not is_number(value):
            raise TypeError(
                f"global_: expected {name} to be a float in [0, 1], got "
                f"{type(value).__name__}"
            )
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"global_: expected {name} in [0, 1], got {value}")
    if floor > ceiling:
        raise ValueError(f"global_: expected floor <= ceiling, got {floor} > {ceiling}")
    # no named tuple is a function to a type checker
    return cast(Distribution, Global(float(floor), float(ceiling)))


def counts_given(
    distribution: Distribution, shapes: Shapes, sparsity: Real
) -> CountsByName:
    """The counts of a distribution, which may be anybody's function.

    >>> counts_given(lambda shapes, sparsity: {}, {"w": (2, 3)}, 0.5)
    Traceback (most recent call last):
        ...
    ValueError: distribution: expected how many units each leaf keeps, got nothing for
    'w'
    """
    counts = distribution(shapes, sparsity)
    if not isinstance(counts, Mapping):
        raise TypeError(
            "distribution: expected a dict of how many units each leaf keeps, got "
            f"{type(counts).__name__}"
        )
    if not shapes.keys() <= counts.keys():
        path = next(path for path in shapes if path not in counts)
        raise ValueError(
            "distribution: expected how many units each leaf keeps, got nothing for "
            f"{path!r}"
        )
    return counts


def check_fixed(sparsity: Real, density: float, name: str) -> None:
    """Raise ValueError if a pattern that fixes its own sparsity is asked for another
    one.
    """
    level = host_number(sparsity)
    # compilers take no isclose
    if level is not None and not abs(level - (1 - density)) <= 1e-6:
        raise ValueError(f"{name} fixes the sparsity at {1 - density:g}, got {level:g}")
