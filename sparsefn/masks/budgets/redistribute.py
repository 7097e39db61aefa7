"""How regrowth is split between leaves: shares, caps, counts, drop fractions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.leaves import as_tensor_on, lists, written
from sparsefn._engine.numbers import Real, like
from sparsefn._engine.processes import any_sharded, full_tensors
from sparsefn._engine.selection import (
    CountsByName,
    apportion,
    counts_of_rows,
    totals,
    vector,
)
from sparsefn._engine.sums import means, sums
from sparsefn.core.checks import Call, check_call, described
from sparsefn.core.rounding import rounded_down
from sparsefn.core.state import Score, check_score
from sparsefn.core.tree import Leaves

__all__ = [
    "Redistribute",
    "active",
    "allocate",
    "careful",
    "independently",
    "lost",
    "mean_active",
    "survivors",
]
__dir__ = __all__.copy


# (scores, masks before, masks after the drop), by path -> share of the regrowth, by
# path
Share = Callable[[Leaves, Leaves, Leaves], Leaves]
# (drop fraction, scores, masks), the latter two by path -> drop fraction, by path
Rate = Callable[[Real, Leaves, Leaves], Leaves]
# (growth scores, pruned entries as bools, wanted counts), a row for each group -> how
# many grow in each group
GrowCount = Callable[[Tensor, Tensor, Tensor], Tensor]


class Redistribute(NamedTuple):
    """How `drop_grow` splits its regrowth between the leaves.

    >>> by_gradient = sf.redistribute.Redistribute(
    ...     sf.redistribute.mean_active, score=sf.scores.gradient, most=0.99
    ... )
    >>> algorithm = sf.set(0.5, drop_fraction=0.5, redistribute=by_gradient)
    >>> state = algorithm.init({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})
    >>> masks = algorithm.update(
    ...     state, {"a": torch.ones(4, 4), "b": 3 * torch.ones(4, 4)}, 0
    ... ).masks
    >>> int(masks["a"].sum()), int(masks["b"].sum())
    (6, 10)

    Attributes:
        share: Function of (scores, masks before the drop, masks after it), each a dict
            of tensors by path, that gives the shares by path. They need not sum to 1:
            NaN counts as 0, and if all are 0 the numbers of free entries are the
            shares.
        score: A Score for `share`, its memory advanced on every step. None takes the
            growth scores.
        most: The fraction of its free entries that a leaf grows into at most. It passes
            this only once all other leaves have reached theirs, so that the total is
            exact.
        rate: Function of (drop fraction, scores, masks) that gives each leaf its own
            drop fraction, by path. None is one drop fraction for all.

    A function in place of a Redistribute is its `share`.
    """

    share: Share
    score: Score | None = None
    most: float = 1.0
    rate: Rate | None = None

    def shares(self, scores: Leaves, before: Leaves, after: Leaves) -> Leaves:
        """What `share` gives, as numbers that are complete on every process.

        Args:
            scores: Scores by path.
            before: Masks before the drop, by path.
            after: Masks after the drop, by path.

        Returns:
            0-d tensors by path.
        """
        given = self.share(scores, before, after)
        return dict(zip(given, full_tensors(list(given.values())), strict=True))

    def __repr__(self) -> str:
        usual = self._field_defaults
        given = {
            name: x
            for name, x in self._asdict().items()
            if name not in usual or x != usual[name]
        }
        return repr(Call(Redistribute, (given.pop("share"),), given))


def check_redistribute(redistribute: Redistribute | Share) -> Redistribute:
    """The Redistribute that was given, checked; a function is made one."""
    if isinstance(redistribute, Redistribute):
        plan = redistribute
    else:
        plan = Redistribute(redistribute)
    if not callable(plan.share):
        raise TypeError(
            "expected redistribute to be a function such as "
            f"sf.redistribute.mean_active, or a Redistribute, got {plan.share!r}"
        )
    check_call("redistribute", plan.share, "scores", "before", "after")
    if plan.score is not None:
        check_score("the score of redistribute", plan.score)
    if plan.rate is not None and not callable(plan.rate):
        raise TypeError(
            f"expected the rate of redistribute to be a function, got {plan.rate!r}"
        )
    check_most(plan.most)
    return plan


def check_most(most: float) -> None:
    """Raise unless `most` is a fraction."""
    if not 0.0 <= most <= 1.0:
        raise ValueError(f"expected most in [0, 1], got {most}")


def mean_active(scores: Leaves, before: Leaves, after: Leaves) -> Leaves:
    """A leaf's share of the regrowth: the mean score over its active weights.

    >>> mask = torch.tensor([True, False])
    >>> sf.redistribute.mean_active(
    ...     {"w": torch.tensor([3.0, 9.0])}, {"w": mask}, {"w": mask}
    ... )
    {'w': tensor(3., dtype=torch.float64)}

    Args:
        scores: Scores by path.
        before: Masks before the drop, by path.
        after: Not used.

    Returns:
        0-d float64 tensors by path; NaN for a leaf without active weights.

    Dettmers & Zettlemoyer 2019, arXiv 1907.04840, sec. 3.
    """
    del after
    values = [scores[path] for path in before]
    masks = list(before.values())
    if any_sharded(masks):
        return dict(zip(before, means(values, masks), strict=True))
    return _each(operator.truediv, before, sums(values, masks), _counts(masks))


def active(scores: Leaves, before: Leaves, after: Leaves) -> Leaves:
    """A leaf's share of the regrowth: how many weights it kept before the drop.

    >>> mask = torch.tensor([True, False])
    >>> sf.redistribute.active({}, {"w": mask}, {"w": mask})
    {'w': tensor(1)}

    Args:
        scores: Not used.
        before: Masks before the drop, by path.
        after: Not used.

    Returns:
        0-d int64 tensors by path.
    """
    del scores, after
    return dict(zip(before, _counts(list(before.values())), strict=True))


def survivors(scores: Leaves, before: Leaves, after: Leaves) -> Leaves:
    """A leaf's share of the regrowth: how many weights it keeps after the drop.

    >>> mask = torch.tensor([True, True])
    >>> sf.redistribute.survivors({}, {"w": mask}, {"w": torch.tensor([True, False])})
    {'w': tensor(1)}

    Args:
        scores: Not used.
        before: Not used.
        after: Masks after the drop, by path.

    Returns:
        0-d int64 tensors by path.

    Mostafa & Wang 2019, arXiv 1902.05967.
    """
    return active(scores, after, before)


def lost(scores: Leaves, before: Leaves, after: Leaves) -> Leaves:
    """A leaf's share of the regrowth: how many weights it dropped.

    >>> mask = torch.tensor([True, True])
    >>> sf.redistribute.lost({}, {"w": mask}, {"w": torch.tensor([True, False])})
    {'w': tensor(1)}

    Args:
        scores: Not used.
        before: Masks before the drop, by path.
        after: Masks after the drop, by path.

    Returns:
        0-d int64 tensors by path.

    A leaf grows as many as it dropped: the same as no redistribution, for a
    `Redistribute` that has a `rate`.
    """
    del scores
    n = len(before)
    counts = _counts([*before.values(), *(after[path] for path in before)])
    return _each(operator.sub, before, counts[:n], counts[n:])


@described
def careful(share: Share = mean_active, below: float = 0.2) -> Rate:
    """Smaller drop fractions for important leaves that are nearly dense.

    >>> rate = sf.redistribute.careful()
    >>> scores = {"a": torch.full((10,), 9.0), "b": torch.ones(10)}
    >>> rate(0.3, scores, {"a": torch.arange(10) < 9, "b": torch.arange(10) < 9})
    {'a': tensor(0.1000, dtype=torch.float64), 'b': tensor(0.3000, dtype=torch.float64)}

    Args:
        share: Function of (scores, masks, masks) that gives the importance of each
            leaf, as in `Redistribute`.
        below: The sparsity under which a leaf is nearly dense, a float in [0, 1].

    Returns:
        A `rate` of `Redistribute`. A leaf whose sparsity is under `below` and whose
        share is above the average drops at most its sparsity, so a dense one drops
        nothing.

    Raises:
        ValueError: `below` is outside [0, 1].

    Dettmers & Zettlemoyer 2019, arXiv 1907.04840, as in the authors' code.
    """
    if not 0.0 <= below <= 1.0:
        raise ValueError(f"careful: expected below in [0, 1], got {below}")

    def rate(fraction: Real, scores: Leaves, masks: Leaves) -> Leaves:
        if not masks:
            return {}
        counts = torch.stack(_counts(list(masks.values())))
        shares = share(scores, masks, masks)
        sizes = written([mask.numel() for mask in masks.values()], counts.device)
        sparsity = (sizes - counts).double() / sizes.clamp(min=1)
        own = like(counts, fraction)
        given = vector([shares[path] for path in masks], counts.device)
        known = torch.nan_to_num(given)
        high = known > known.mean()
        rates = torch.where(
            (sparsity < below) & high, torch.minimum(sparsity, own), own
        )
        return dict(zip(masks, rates.unbind(), strict=True))

    return rate


def allocate(
    shares: Mapping[str, float | Tensor],
    total: int | Tensor,
    room: Mapping[str, int | Tensor],
    most: float = 1.0,
) -> CountsByName:
    """Split a total between leaves by share, with a soft cap for each leaf.

    >>> shares, room = {"a": 0.9, "b": 0.05, "c": 0.05}, {"a": 15, "b": 110, "c": 110}
    >>> sf.redistribute.allocate(shares, 30, room, most=0.99)
    {'a': 14, 'b': 8, 'c': 8}
    >>> sf.redistribute.allocate(shares, 235, room, most=0.99)
    {'a': 15, 'b': 110, 'c': 110}

    Args:
        shares: Share of each leaf, by path.
        total: The sum of the counts: an int, or a 0-d integer tensor.
        room: The largest count of each leaf, by path.
        most: The fraction of its `room` that a leaf gets at most until all leaves have
            that much.

    Returns:
        Counts by path, whose sum is exact, as from `sf.budgets.apportion` with these
        caps: ints, or 0-d int64 tensors where a value is a tensor.

    Raises:
        ValueError: `most` is outside [0, 1], a share is negative or infinite, or the
            total is above the sum of `room`.
    """
    check_most(most)
    if most == 1.0 or not room:
        return apportion(shares, total, room)
    device = next(
        (
            n.device
            for n in (total, *room.values(), *shares.values())
            if isinstance(n, Tensor)
        ),
        None,
    )
    if device is None:
        caps = {path: rounded_down(most, n) for path, n in room.items()}
        first: int | Tensor = min(total, sum(caps.values()))
        filled = apportion(shares, first, caps)
        rest = apportion(
            shares, total - first, {path: n - filled[path] for path, n in room.items()}
        )
        return {path: filled[path] + rest[path] for path in shares}
    ones = [1] * len(room)
    places = counts_of_rows(list(room.values()), ones, device)
    reach = as_tensor_on(rounded_down(most, places), device)
    first = torch.minimum(as_tensor_on(total, device), reach.sum())
    some = apportion(shares, first, dict(zip(room, reach.unbind(), strict=True)))
    parts = counts_of_rows([some[path] for path in room], ones, device)
    more = apportion(
        shares, total - first, dict(zip(room, (places - parts).unbind(), strict=True))
    )
    made = dict(
        zip(
            room,
            (
                parts + counts_of_rows([more[path] for path in room], ones, device)
            ).unbind(),
            strict=True,
        )
    )
    return {path: made[path] for path in shares}


def independently(scores: Tensor, free: Tensor, wanted: Tensor) -> Tensor:
    """Each free weight grows independently of the others.

    >>> scores = torch.tensor([[0.7, 0.2, 0.6, 0.9]])
    >>> sf.redistribute.independently(
    ...     scores, torch.tensor([[True, True, True, False]]), torch.tensor([1])
    ... )
    tensor([1])

    Args:
        scores: Uniform growth scores in [0, 1), as `sf.scores.random` of single
            weights: floating-point tensor of shape (groups, weights of a group).
        free: Bool tensor of this shape: the pruned weights.
        wanted: Integer tensor of shape (groups,): how many grow on average.

    Returns:
        Int64 tensor of shape (groups,), how many grow. A weight grows if its score is
        at least 1 - wanted / free.
    """
    chance = wanted.double() / free.sum(-1).clamp(min=1)
    is_drawn = scores.double() >= (1 - chance)[..., None]
    return (free & is_drawn).sum(-1)


def _counts(masks: Sequence[Tensor]) -> list[Tensor]:
    if any_sharded(masks):
        return full_tensors([mask.sum() for mask in masks])
    rows = [mask.reshape(1, -1) for mask in masks]
    return list(totals(rows).unbind())


def _each(
    fn: Callable[[Any, Any], Any],
    paths: Leaves,
    a: list[Tensor],
    b: list[Tensor],
) -> Leaves:
    return dict(zip(paths, lists.foreach(fn, a, b), strict=True))
