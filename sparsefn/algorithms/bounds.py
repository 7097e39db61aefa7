"""One competition of several leaves, each with a least and a largest number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn.budgets.distributions import Global
from sparsefn.engine.selection import Count, Entry, totals_of, winners


def within_bounds(
    distribution: Global,
    sizes: Mapping[str, int],
    entries: list[Entry],
    count: Count,
    held: list[Tensor | None],
    least: int = 0,
) -> list[Tensor]:
    """Masks of the best units of one competition, within the bounds of each leaf.

    >>> from sparsefn.algorithms.bounds import within_bounds
    >>> entries = [Entry(torch.tensor([[4.0, 3.0]])), Entry(torch.tensor([[2.0, 1.0]]))]
    >>> within_bounds(
    ...     sf.budgets.global_(floor=0.5), {"a": 2, "b": 2}, entries, 2, [None, None]
    ... )
    [tensor([[ True, False]]), tensor([[ True, False]])]

    `sizes` are the numbers of units of the leaves, `held` their units that are kept
    already. No leaf keeps less than `least` units.
    """
    bounds = distribution.bounds(
        {path: (n,) for path, n in sizes.items()}, torch.zeros((), device="cpu")
    )
    limits: list[tuple[int, int]] = []
    for path, (low, high) in bounds.items():
        lowest = min(least, sizes[path])
        limits.append((max(low, lowest), max(high, lowest)))
    if any(most < n for (_, most), n in zip(limits, sizes.values(), strict=True)):
        # Only the best of a leaf compete, as many as it keeps at most.
        left = [
            most - n for (_, most), n in zip(limits, _had(held, entries), strict=True)
        ]
        within = winners(entries, left)
        entries = [
            x._replace(allow=most, deny=None)
            for x, most in zip(entries, within, strict=True)
        ]
    if not any(least for least, _ in limits):
        return winners(entries, [count], joint=True)
    # The best of a leaf, as many as it keeps at least, win before all others.
    left = [
        least - n for (least, _), n in zip(limits, _had(held, entries), strict=True)
    ]
    first = winners(entries, left)
    alike = [torch.zeros_like(x.scores[:1, :1]).expand(x.scores.shape) for x in entries]
    pairs = zip(entries, alike, first, strict=True)
    again = [
        x._replace(scores=score, allow=allow, deny=None, absolute=False)
        for x, score, allow in pairs
    ]
    first = winners(again, [count], joint=True)
    rest = [
        x._replace(deny=won if x.deny is None else x.deny | won)
        for x, won in zip(entries, first, strict=True)
    ]
    others = winners(rest, [count - totals_of(entries, first).sum()], joint=True)
    return [a | b for a, b in zip(first, others, strict=True)]


def with_least(
    least: int, counts: Sequence[Count] | Tensor, sizes: Sequence[int]
) -> list[Count]:
    """Counts of units, of each leaf or of all in one, of which no leaf has less than
    `least` or all that it has.

    >>> with_least(1, [0, torch.tensor(2)], [4, 4]), with_least(1, [2], [4, 0, 4, 4])
    ([1, tensor(2)], [3])
    """
    each = [min(least, n) for n in sizes]
    pairs = zip(counts, each if len(counts) == len(sizes) else [sum(each)], strict=True)
    return [
        n.clamp(min=low) if isinstance(n, Tensor) else max(n, low) for n, low in pairs
    ]


def _had(held: list[Tensor | None], entries: list[Entry]) -> list[Count]:
    # How many units of each leaf are held.
    if all(flags is None for flags in held):
        return [0] * len(held)
    flags = [x.reshape(1, -1) for x in held if x is not None]
    return list(totals_of(entries, flags).unbind())
