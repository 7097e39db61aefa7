"""Distributions whose counts are multiples of a number, and equal in some leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import CountsByName, apportion
from sparsefn._engine.transforms import at_compile_time, host_number
from sparsefn.core.checks import check_int, described, is_sequence
from sparsefn.masks.budgets.count_steps import Steps
from sparsefn.masks.budgets.distributions import (
    Distribution,
    Global,
    Shapes,
    counts_given,
)
from sparsefn.masks.budgets.within import Within


@described
def in_multiples(
    distribution: Distribution,
    of: int | Mapping[str, int],
    *,
    equal_across: str | Sequence[str] = (),
) -> Distribution:
    """The counts of a distribution as multiples of a number, equal in some leaves.

    >>> eights = sf.budgets.in_multiples(sf.budgets.uniform(), 8)
    >>> eights({"0.up": (40,), "1.up": (44,), "head": (20,)}, 0.5)
    {'0.up': 16, '1.up': 24, 'head': 8}
    >>> alike = sf.budgets.in_multiples(
    ...     sf.budgets.by_path({"0.*": 0.2}), 8, equal_across="*.up"
    ... )
    >>> alike({"0.up": (40,), "1.up": (40,)}, 0.6)
    {'0.up': 24, '1.up': 24}

    Widths of layers in multiples of 8, 16 or 64 are what kernels are fast at, and a
    config of transformers has one width for all layers.

    Args:
        distribution: `sf.budgets.within(...)`, or a distribution that gives counts,
            such as `uniform()`.
        of: The number whose multiples are kept, 1 or more; or a dict of such numbers by
            glob, of which the first match counts. Other leaves have multiples of 1.
        equal_across: A glob, or a list of globs. The leaves or tied sets that one of
            them matches keep equally many units; they must have equally many. The
            first match counts.

    Returns:
        The distribution. Every leaf keeps a multiple of `of`, one at least, or all of
        its units. The total is at most the total of the distribution: leaves keep the
        next lower multiple, then the leaves that lost the largest part of a multiple
        by this keep the next higher one, where it fits. `within(...)` adds multiples
        in place of units: the cost is at most the limit, and one more multiple of any
        leaf would pass it.

    Raises:
        TypeError: `distribution` is `global_` or no function, `of` holds something else
            than ints, or `equal_across` something else than globs.
        ValueError: `of` is empty or below 1, or `distribution` is what `in_multiples`
            made of a `within(...)`; when a budget is made, the total or the
            limit is too small, a glob matches no leaf, equal leaves have different
            numbers of units, or the value of the sparsity is not known.

    `within(..., prefer="global")` compares the units of all leaves, which `global_`
    does by scores.
    """
    if isinstance(of, Mapping):
        if not of:
            raise ValueError("in_multiples: expected of to have a glob or more, got {}")
        for glob, number in of.items():
            check_int("in_multiples", f"of for {glob!r}", number, 1)
    else:
        check_int("in_multiples", "of", of, 1)
    if isinstance(equal_across, str):
        globs: Sequence[str] = (equal_across,)
    else:
        globs = equal_across
    if not is_sequence(globs) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            "in_multiples: expected equal_across to be a glob or a list of globs, got "
            f"{equal_across!r}"
        )
    if isinstance(distribution, Global) or not callable(distribution):
        raise TypeError(
            "in_multiples: expected a distribution like uniform() or "
            f'within(..., prefer="global"), got {distribution!r}'
        )
    if isinstance(distribution, Within):
        if distribution.multiple_of != 1 or distribution.equal_across:
            raise ValueError(
                f"in_multiples: expected within(...), got {distribution!r}: give all "
                'numbers and globs in one call, such as {"0.*": 8, "*": 5}'
            )
        made = dataclasses.replace(
            distribution, multiple_of=of, equal_across=tuple(globs)
        )
        Steps.among(made.priced.sizes, of, globs)  # raises for globs that do not fit
        return made

    def counts(shapes: Shapes, sparsity: Real) -> CountsByName:
        level = host_number(sparsity)
        if level is None:
            raise ValueError(
                "in_multiples: expected a sparsity whose value is known, got one "
                "inside a transform of torch, or of a schedule inside sf.captured; "
                "leave these out"
            )
        sizes = {path: math.prod(shape) for path, shape in shapes.items()}
        given = counts_given(distribution, shapes, float(level))
        asked = [min(int(given[path]), size) for path, size in sizes.items()]
        kept = _nearest(asked, sizes, of, globs)
        return dict(zip(sizes, kept, strict=True))

    return counts


@at_compile_time
def _nearest(
    asked: Sequence[int],
    sizes: dict[str, int],
    of: int | Mapping[str, int],
    globs: Sequence[str],
) -> list[int]:
    # Below, an entry of a list is of a set of equal leaves, and counts units of all.
    steps = Steps.among(sizes, of, globs)
    every = list(sizes)
    names = [min(every[i] for i in members) for members in steps.members]
    n_leaves = [len(members) for members in steps.members]

    def units(kept: Sequence[int]) -> list[int]:
        return [
            n * width for n, width in zip(n_leaves, steps.widths(kept), strict=True)
        ]

    least = units([min(n, 1) for n in steps.sizes])
    rest = sum(asked) - sum(least)
    if rest < 0:
        mend = "a lower sparsity keeps more"
        small = [i for i, n in enumerate(steps.sizes) if n == 1]
        # what that leaf would lose in single units
        if small and rest + least[small[0]] - n_leaves[small[0]] >= 0:
            name = names[small[0]]
            others = f"'*': {of}" if isinstance(of, int) else "..."
            mend = (
                f"{name!r} has {sizes[name]}, no more than one multiple, and stays "
                f"whole: write {{{name!r}: 1, {others}}}, or a lower sparsity"
            )
        raise ValueError(
            f"in_multiples: expected {sum(least)} units or more, which is a multiple "
            f"of {of} for each leaf, got {sum(asked)}: {mend}"
        )
    # what each set wants of the total, where some get more than they asked for
    above = {}
    for name, members, low in zip(names, steps.members, least, strict=True):
        above[name] = max(sum(asked[i] for i in members) - low, 0)
    more = apportion(above, rest, above)
    wanted = [low + int(more[name]) for name, low in zip(names, least, strict=True)]
    # the next lower multiples
    whole = units(steps.sizes)
    kept = []
    for i, last in enumerate(steps.sizes):
        if wanted[i] == whole[i]:
            kept.append(last)
        else:
            kept.append(wanted[i] // (n_leaves[i] * steps.lengths[i]))
    lower = units(kept)
    higher = units([n + 1 for n in kept])
    # the next higher ones, first where the largest part of a multiple was lost
    lost = [
        (Fraction(lower[i] - wanted[i], higher[i] - lower[i]), names[i], i)
        for i in range(len(kept))
        if wanted[i] > lower[i]
    ]
    free = sum(wanted) - sum(lower)
    for _, _, i in sorted(lost):
        step = higher[i] - lower[i]
        if step <= free:
            kept[i] += 1
            free -= step
    return steps.counts(kept)
