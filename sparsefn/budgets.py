"""Distributions: (shapes, sparsity) -> how many units each leaf keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sparsefn.engine.apportion import Counts
from sparsefn.engine.apportion import apportion as apportion
from sparsefn.engine.checks import check_sparsity, is_number
from sparsefn.engine.described import Described, described
from sparsefn.engine.memory import on
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import n_kept as n_kept
from sparsefn.engine.rounding import rounded as rounded
from sparsefn.engine.rounding import rounded_down as rounded_down
from sparsefn.engine.rounding import rounded_up as rounded_up
from sparsefn.engine.transforms import at_compile_time, concrete, known
from sparsefn.tree import check_globs, glob_match

Shapes = Mapping[str, tuple[int, ...]]
Distribution = Callable[[Shapes, Real], Counts]
_COUNT_BITS = 40  # of a number of units


def compensated(sparsity: float, total: int, dense: int) -> float:
    """The sparsity of the other weights, where some stay dense and the overall sparsity is given.

    >>> round(sf.budgets.compensated(0.6, total=100, dense=20), 3)
    0.75

    `total` weights, `dense` of them dense, at `sparsity` over all: the others are at
    `sparsity * total / (total - dense)`. ValueError if they would keep less than nothing.
    """
    if isinstance(check_sparsity(sparsity), Tensor):
        raise TypeError("compensated: expected sparsity to be a float in [0, 1], got a tensor")
    if not 0 <= dense <= total:
        raise ValueError(f"compensated: expected 0 <= dense <= total, got {dense} of {total}")
    if sparsity > 0 and sparsity * total >= total - dense:
        raise ValueError(
            f"compensated: {dense} of {total} weights are dense, so the other {total - dense} would keep none "
            f"at sparsity {sparsity}; expected less than {1 - dense / max(total, 1):g}"
        )
    return sparsity * total / (total - dense) if sparsity else 0.0


@described
def uniform() -> Distribution:
    """The same sparsity in every leaf.

    >>> sf.budgets.uniform()({"a": (4, 4), "b": (10,)}, 0.5)
    {'a': 8, 'b': 5}
    """
    return per_leaf


def per_leaf(shapes: Shapes, sparsity: Real) -> Counts:
    """The counts of `uniform`.

    >>> per_leaf({"a": (4, 4)}, 0.5)
    {'a': 8}
    """
    return {path: n_kept(math.prod(shape), sparsity) for path, shape in shapes.items()}


def is_uniform(distribution: Distribution) -> bool:
    """Whether it is `uniform()`.

    >>> is_uniform(sf.budgets.uniform()), is_uniform(sf.budgets.erk())
    (True, False)
    """
    return distribution is per_leaf or (isinstance(distribution, Described) and distribution.__wrapped__ is per_leaf)


def _by_share(shapes: Shapes, sparsity: Real, density: Callable[[tuple[int, ...]], float]) -> Counts:
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    for path, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(
                f"Erdos-Renyi budgets need leaves of 2 dimensions or more, got shape {tuple(shape)} at {path!r}"
            )
    shares = {path: sizes[path] * density(shapes[path]) if sizes[path] else 0.0 for path in shapes}
    return apportion(shares, n_kept(sum(sizes.values()), sparsity), sizes)


@described
def erdos_renyi() -> Distribution:
    """Density of a leaf in proportion to (out + in) / (out * in); the total is exact.

    >>> sf.budgets.erdos_renyi()({"a": (100, 100), "b": (10, 100)}, 0.9)
    {'a': 710, 'b': 390}

    A leaf whose share exceeds its size is dense, and the other leaves share the rest. Leaves of fewer than 2
    dimensions are a ValueError.
    Mocanu et al. 2018, arXiv 1707.04780, eq. 3.
    """
    return lambda shapes, sparsity: _by_share(shapes, sparsity, lambda s: (s[0] + s[1]) / (s[0] * s[1]))


@described
def erk(power: float = 1.0) -> Distribution:
    """Erdos-Renyi-Kernel: density in proportion to (sum of dims / product of dims) ** power.

    >>> sf.budgets.erk()({"a": (64, 32, 3, 3), "b": (10, 64)}, 0.9)
    {'a': 1267, 'b': 640}

    The total is exact; a leaf whose share exceeds its size is dense, and the other leaves share the rest. Leaves of
    fewer than 2 dimensions are a ValueError. Evci et al. 2020, arXiv 1911.11134, sec. 3.
    """
    if not math.isfinite(power):
        raise ValueError(f"expected a finite power, got {power}")

    def density(shape: tuple[int, ...]) -> float:
        try:
            return float((sum(shape) / math.prod(shape)) ** power)
        except OverflowError as error:
            text = f"expected a power whose densities are finite, but {power} overflows for shape {tuple(shape)}"
            raise ValueError(text) from error

    return lambda shapes, sparsity: _by_share(shapes, sparsity, density)


@described
def by_path(table: Mapping[str, float]) -> Distribution:
    """A sparsity for the leaves of each glob, first match first; others get the algorithm's own.

    >>> sf.budgets.by_path({"head.*": 0.0})({"head.weight": (2, 5), "body.weight": (2, 5)}, 0.9)
    {'head.weight': 10, 'body.weight': 1}

    A glob that matches no leaf is a ValueError.
    """
    for glob, sparsity in table.items():
        check_sparsity(sparsity, f"the sparsity of {glob!r}")

    def counts(shapes: Shapes, sparsity: Real) -> Counts:
        check_globs("by_path", list(table), list(shapes))
        own = {p: next((s for g, s in table.items() if glob_match(p, g)), sparsity) for p in shapes}
        return {path: n_kept(math.prod(shape), own[path]) for path, shape in shapes.items()}

    return counts


@described
def owl(ratios: Mapping[str, float], spread: float = 0.08) -> Distribution:
    """More weights for blocks with more outliers: what each block keeps is within 2 * spread of the others.

    >>> owl = sf.budgets.owl({"0.*": 0.01, "1.*": 0.03, "2.*": 0.02}, spread=0.1)
    >>> owl({"0.weight": (10, 10), "1.weight": (10, 10), "2.weight": (10, 10)}, 0.5)
    {'0.weight': 40, '1.weight': 60, '2.weight': 50}

    `ratios` has the ratio of outliers of each block, by a glob for its leaves, as `sf.calibration.outlier_ratios`
    gives them; only their differences, relative to the largest one, matter. A block's leaves have one sparsity. The
    mean over blocks of what is kept is 1 - sparsity, so blocks of one size keep that share together. With equal ratios
    it is `uniform`. Leaves of all blocks need not be given at once. ValueError for a leaf that no glob matches, and
    where a block would keep less than nothing or more than all. Yin et al. 2023, arXiv 2310.05175, sec. 3.
    """
    if not isinstance(ratios, Mapping) or not ratios:
        raise TypeError(f"owl: expected ratios to be a dict of a ratio for each glob, got {ratios!r}")
    for glob, ratio in ratios.items():
        if not is_number(ratio) or not math.isfinite(ratio):
            raise ValueError(f"owl: expected a finite ratio of {glob!r}, got {ratio!r}")
    if not is_number(spread) or not 0.0 <= spread <= 0.5:
        raise ValueError(f"owl: expected spread in [0, 0.5], got {spread!r}")
    low, high = min(ratios.values()), max(ratios.values())
    more = {glob: 2 * spread * (r - low) / (high - low) if high > low else 0.0 for glob, r in ratios.items()}
    mean = math.fsum(more.values()) / len(more)

    def counts(shapes: Shapes, sparsity: Real) -> Counts:
        kept = {}
        for path, shape in shapes.items():
            glob = next((glob for glob in more if glob_match(path, glob)), None)
            if glob is None:
                raise ValueError(f"owl: expected a glob for each leaf, got none for {path!r} in {list(more)}")
            own = sparsity + (mean - more[glob])
            level = concrete(own)
            if level is not None and not 0.0 <= level <= 1.0:
                raise ValueError(f"owl: expected every block to keep a share in [0, 1], got {1 - level:g} for {glob!r}")
            kept[path] = n_kept(math.prod(shape), own)
        return kept

    return counts


@at_compile_time
def _ratio(x: float) -> tuple[int, int]:
    # As a float 0.07 * 100 is a little above 7. Any p / q below 2^26 is recovered.
    exact = Fraction(x)
    near = (exact.limit_denominator(2**bits) for bits in range(54))
    return next((fraction for fraction in near if float(fraction) == x), exact).as_integer_ratio()


class Global(NamedTuple):
    """One competition over all leaves, each within its bounds (made by `global_`).

    >>> sf.budgets.global_(floor=0.1)
    global_(floor=0.1)
    """

    floor: float
    ceiling: float

    def bounds(self, shapes: Shapes, total: int | Tensor) -> dict[str, tuple[int, int]]:
        """The fewest and the most units that each leaf keeps; raises if the total cannot meet them.

        >>> sf.budgets.global_(floor=0.07, ceiling=0.29).bounds({"a": (100,)}, 8)
        {'a': (7, 29)}

        Products are exact, of the simplest fraction that rounds to the float: 0.07 is 7/100, as it was written.
        """
        sizes = {path: known(math.prod(shape)) for path, shape in shapes.items()}
        (a, b), (c, d) = _ratio(known(self.floor)), _ratio(known(self.ceiling))
        limits = {path: (-(-a * n // b), c * n // d) for path, n in sizes.items()}
        least, most = (sum(limit[i] for limit in limits.values()) for i in (0, 1))
        if isinstance(total, int) and not least <= total <= most:
            raise ValueError(
                f"global_(floor={self.floor}, ceiling={self.ceiling}) keeps between {least} and {most} units, "
                f"but the sparsity asks for {total} over {', '.join(map(repr, shapes))}"
            )
        return limits

    def __call__(self, shapes: Shapes, sparsity: Real) -> Counts:
        """Raise TypeError: the counts of a global budget depend on scores, not only on shapes.

        >>> sf.budgets.global_()({"a": (8,)}, 0.5)
        Traceback (most recent call last):
            ...
        TypeError: a global_ budget needs scores: its counts come out of one competition over all leaves
        """
        raise TypeError("a global_ budget needs scores: its counts come out of one competition over all leaves")


@described
def global_(floor: float = 0.0, ceiling: float = 1.0) -> Distribution:
    """One competition over all leaves; the total is exact, the leaves' shares follow the scores.

    >>> algorithm = sf.one_shot(0.5, distribution=sf.budgets.global_())
    >>> state = algorithm.init({"a": torch.tensor([[4.0, 3.0]]), "b": torch.tensor([[1.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).masks
    {'a': tensor([[True, True]]), 'b': tensor([[False, False]])}

    Each leaf keeps at least ceil(floor * n) and at most floor(ceiling * n) of its n units. The products are exact,
    of the simplest fraction that rounds to the float: 0.07 of 100 is 7, and 1 / 3 of 3 is 1. Bounds that the total
    cannot meet are a ValueError.
    """
    for name, value in (("floor", floor), ("ceiling", ceiling)):
        if not is_number(value):
            raise TypeError(f"global_: expected {name} to be a float in [0, 1], got {type(value).__name__}")
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"global_: expected {name} in [0, 1], got {value}")
    if floor > ceiling:
        raise ValueError(f"global_: expected floor <= ceiling, got {floor} > {ceiling}")
    return cast(Distribution, Global(float(floor), float(ceiling)))  # no named tuple is a function to a type checker


def spread(count: int | Tensor, groups: int, room: Tensor | None = None, like: Tensor | None = None) -> int | Tensor:
    """A leaf's count split over its competing groups; the first groups take the remainder.

    >>> spread(6, 3), spread(7, 3)
    (2, tensor([3, 2, 2]))
    >>> spread(7, 3, room=torch.tensor([1, 8, 8]))
    tensor([1, 3, 3])

    With `room`, int64 (groups,), no group gets more than its room. An int gives a tensor where `like` is.
    """
    if groups <= 1:
        return count
    if room is not None:
        return _filled(on(count, room.device).minimum(room.sum()).clamp(min=0), room)
    if isinstance(count, int) and count % groups == 0:
        return count // groups
    device = next((x.device for x in (count, like) if isinstance(x, Tensor)), torch.device("cpu"))
    return count // groups + (torch.arange(groups, device=device) < count % groups)


def _filled(total: Tensor, room: Tensor) -> Tensor:
    # Every group gets the same level or its room, if that is less; the highest level is found bit by bit.
    level = torch.zeros_like(total)
    for bit in reversed(range(_COUNT_BITS)):
        higher = level + (1 << bit)
        level = torch.where(torch.minimum(room, higher).sum() <= total, higher, level)
    counts, higher = torch.minimum(room, level), room > level
    return counts + (higher & (higher.cumsum(-1) <= total - counts.sum()))


def check_fixed(sparsity: Real, density: float, name: str) -> None:
    """Raise ValueError if a pattern that fixes its own sparsity is asked for another one.

    >>> check_fixed(0.9, 0.5, "nm(2, 4)")
    Traceback (most recent call last):
        ...
    ValueError: nm(2, 4) fixes the sparsity at 0.5, got 0.9
    """
    level = concrete(sparsity)
    if level is not None and not abs(level - (1 - density)) <= 1e-6:  # compilers take no isclose
        raise ValueError(f"{name} fixes the sparsity at {1 - density:g}, got {level:g}")
