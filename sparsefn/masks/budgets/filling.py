"""The most units whose cost is at most a limit, and in which order units come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsefn.core.checks import is_number, shown
from sparsefn.core.tree import check_globs, first_match
from sparsefn.masks.budgets.count_steps import Steps

Number = int | float
Prefer = Literal["uniform", "global"] | Mapping[str, Number | Tensor]
# a place on the way from one unit each to all -> kept units of each leaf
Levels = Callable[[int], list[int]]


class UnitCosts(NamedTuple):
    """What a model costs by how many units of each leaf or tied set are kept.

    >>> sf.budgets.UnitCosts({"w": 4}, lambda kept: 10 * kept[0], dict).cost([3])
    30

    Attributes:
        sizes: How many units each leaf or set has, by its path.
        cost: Function from the kept units of each, in the order of `sizes`, to the
            cost. It never falls when a count rises.
        scores: Function without arguments to the scores of all units by path, NumPy
            arrays, which `prefer="global"` of `sf.budgets.within` asks for.
        masks: What a leaf costs besides where it may lose units, by path. Default: 0.

    An object with a method `priced(unit, bits, compressed, only)` that returns one is
    a model for `sf.budgets.within`, as `sf.shrinking.groups` makes it.
    """

    sizes: Mapping[str, int]
    cost: Callable[[Sequence[int]], Number]
    scores: Callable[[], Mapping[str, npt.NDArray[np.float64]]]
    masks: Mapping[str, int] = {}


def fill_up(
    cost: Callable[[Sequence[int]], Number],
    levels: Levels,
    last: int,
    limit: Number | Fraction,
) -> list[int]:
    """The most units whose cost is at most the limit: up to the highest level that
    fits, then one by one.

    >>> fill_up(lambda kept: 3 * kept[0] + 5 * kept[1], lambda k: [k, k], 10, 30)
    [5, 3]

    From one level to the next each count rises by one at most, and from one unit each
    to all.
    """
    full: dict[int, int] = {}  # counts that cannot rise

    def at(level: int) -> list[int]:
        return [full.get(i, n) for i, n in enumerate(levels(level))]

    low = 0
    while low < last:
        high = last
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if cost(at(middle)) <= limit else (low, middle - 1)
            )
        if low == last:
            break
        kept = at(low)
        low += 1
        for i, n in enumerate(at(low)):
            if n > kept[i]:
                kept[i] = n
                if cost(kept) > limit:
                    kept[i] = full[i] = n - 1
    return at(last)


def levels_of(
    priced: UnitCosts, prefer: Prefer, free: Sequence[bool], steps: Steps
) -> tuple[Levels, int]:
    """The way from one step each to all, and its last place; leaves that are not free
    are whole all along. Equal leaves are preferred as the first of them is.
    """
    every = list(priced.sizes)
    names = [every[first] for first, *_ in steps.members]
    sizes = steps.sizes
    scores = _scores(priced, prefer)
    if scores is not None:
        of_steps = steps.scores([scores[name] for name in every])
        return _by_scores(
            [x if may else None for x, may in zip(of_steps, free, strict=True)],
            sizes,
        )
    shares = []
    for name, may in zip(names, free, strict=True):
        if may:
            shares.append(_weight(name, prefer))
        else:
            shares.append(Fraction(0))
    smallest = min((share for share in shares if share > 0), default=Fraction(1))
    rates = [size * share / smallest for size, share in zip(sizes, shares, strict=True)]
    last = 128 << int(max([*rates, Fraction(1)])).bit_length()
    ratios = [rate.as_integer_ratio() for rate in rates]

    def levels(level: int) -> list[int]:
        lost = [a * (last - level) // (b * last) for a, b in ratios]
        return [
            max(size - n, min(size, 1)) for size, n in zip(sizes, lost, strict=True)
        ]

    return levels, last


def _weight(name: str, prefer: Prefer) -> Fraction:
    table = prefer if isinstance(prefer, Mapping) else {}
    glob = first_match(name, table)
    return Fraction(1 if glob is None else table[glob])  # type: ignore[arg-type]


def _scores(priced: UnitCosts, prefer: Prefer) -> Mapping[str, Any] | None:
    if prefer == "global":
        return priced.scores()
    if isinstance(prefer, Mapping) and any(
        isinstance(x, Tensor) for x in prefer.values()
    ):
        return {
            name: x.detach().double().cpu().numpy()
            for name, x in prefer.items()
            if isinstance(x, Tensor)
        }
    return None


def _by_scores(scores: Sequence[Any], sizes: Sequence[int]) -> tuple[Levels, int]:
    # Units come in the order of their scores, but the best of each leaf first; of equal
    # ones the first.
    ranked = []
    for x in scores:
        if x is None:
            ranked.append(np.zeros(0))
        else:
            ranked.append(-np.sort(-x.reshape(-1))[1:])
    owners = np.repeat(np.arange(len(ranked)), [len(x) for x in ranked])
    every = np.concatenate([*ranked, np.zeros(0)])
    order = owners[np.argsort(-every, kind="stable")]
    places: list[npt.NDArray[np.int64]] = [
        np.nonzero(order == i)[0] for i in range(len(ranked))
    ]

    def levels(level: int) -> list[int]:
        fixed = (
            size if x is None else min(size, 1)
            for x, size in zip(scores, sizes, strict=True)
        )
        return [
            n + int(np.searchsorted(at, level))
            for n, at in zip(fixed, places, strict=True)
        ]

    return levels, len(order)


def check_prefer(priced: UnitCosts, prefer: object) -> None:
    """Raise ValueError for a preference that is unknown or does not fit the leaves."""
    wanted = (
        "within: expected prefer to be 'uniform', 'global', a dict of weights >= 0 by "
        "glob, or of scores by path"
    )
    if isinstance(prefer, str) and prefer in ("uniform", "global"):
        return
    if not isinstance(prefer, Mapping) or not prefer:
        raise ValueError(f"{wanted}, got {shown(prefer)}")
    if all(isinstance(x, Tensor) for x in prefer.values()):
        for name, size in priced.sizes.items():
            if name not in prefer or prefer[name].numel() != size:
                got = f"shape {tuple(prefer[name].shape)}" if name in prefer else "none"
                raise ValueError(
                    f"within: expected {size} scores at {name!r}, got {got}"
                )
        return
    for glob, weight in prefer.items():
        if not is_number(weight) or not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{wanted}, got {shown(weight)} for {glob!r}")
    check_globs("within", list(prefer), list(priced.sizes))
