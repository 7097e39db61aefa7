"""Exact selection: a tensor of scores -> a mask, ties to the lowest index, NaN last.

Units compete by score (larger first), then by lower row-major index. NaN ranks below
-inf, -0.0 equals 0.0. Patterns turn tensors into rows of units here;
`sparsefn._engine.selection.dispatch` selects the best of each row.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from sparsefn._engine.draws import flipped_leaves
from sparsefn._engine.leaves import brought, pays
from sparsefn._engine.numbers import check_float
from sparsefn._engine.processes import (
    agreed,
    any_sharded,
    extent_of,
    is_sharded,
    local_tensor,
    sharded_like,
)
from sparsefn._engine.selection import Count, Entry, totals, winners
from sparsefn._engine.sums import Pooling
from sparsefn._engine.transforms import host_number
from sparsefn.core import random
from sparsefn.core.checks import Step, is_int
from sparsefn.core.tree import Leaves, Tree, flatten
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.patterns.shards import of_tensor
from sparsefn.masks.patterns.units import (
    Units,
    active_rows,
    allowed_rows,
    check_single,
    competing,
    unit_mask,
)

__all__ = [
    "bernoulli_mask",
    "drop_lowest",
    "grow_highest",
    "straight_through",
    "threshold_mask",
    "topk_mask",
    "topk_masks",
]
__dir__ = __all__.copy


def _check_count(name: str, count: Count | None, groups: int, available: int) -> Count:
    if isinstance(count, Tensor):
        if count.is_floating_point() or count.dtype == torch.bool:
            raise TypeError(f"expected {name} of an integer dtype, got {count.dtype}")
        if count.ndim == 1 and not available:
            # shapes do not tell how many empty groups there are
            return count.new_zeros(groups, dtype=torch.int64)
        if count.ndim and tuple(count.shape) != (groups,):
            raise ValueError(
                f"expected {name} of shape () or ({groups},), got {tuple(count.shape)}"
            )
        return count.to(torch.int64)
    if not is_int(count):
        raise TypeError(
            f"expected {name} to be an int or an integer tensor, got {count!r}"
        )
    if not 0 <= count <= available:
        raise ValueError(f"expected 0 <= {name} <= {available}, got {count}")
    return count


def kept_count(units: Units, n_keep: Count | None) -> Count:
    """The count that was given, checked, or the pattern's."""
    fixed = units.fixed
    if fixed is None:
        return _check_count("n_keep", n_keep, *units.rows)
    if isinstance(n_keep, Tensor):
        _check_count("n_keep", n_keep, *units.rows)
    elif n_keep is not None and (isinstance(fixed, Tensor) or n_keep != fixed):
        raise ValueError(f"{units.pattern} fixes n_keep at {fixed}, got {n_keep}")
    return _check_count("n_keep", fixed, *units.rows)


def topk_mask(
    scores: Tensor, n_keep: Count | None, *, pattern: Pattern = unstructured()
) -> Tensor:
    """Keep exactly the n_keep best units of each competing group.

    >>> sf.masks.topk_mask(torch.tensor([1.0, 3.0, 3.0, 2.0]), 1)
    tensor([False,  True, False, False])

    Args:
        scores: Floating-point tensor of any shape. NaN ranks below every number.
        n_keep: How many units each group keeps: an int, a 0-d integer tensor, or one
            count a group. A tensor is clamped to the units of a group. None where the
            pattern fixes the count, as `nm` and `nearly_diagonal` do; a tensor is then
            ignored.
        pattern: Which elements form a unit, and which units compete. Default: each
            element is a unit, and all compete.

    Returns:
        Bool tensor of the shape of `scores`. Ties go to the lowest row-major index.

    Raises:
        TypeError: `scores` is not floating-point, or `n_keep` neither an int nor an
            integer tensor.
        ValueError: An int `n_keep` is outside [0, units of a group] or is not the
            pattern's count, a tensor has another shape, or the pattern does not fit
            the shape of `scores`.
    """

    def keep(units: Units, here: Tensor) -> Tensor:
        count = units.own_counts(kept_count(units.of_all, n_keep))
        entry = Entry(
            competing(units, here), allowed_rows(units, here, None), extent=units.extent
        )
        (kept,) = pattern.winners([entry], [count])
        return unit_mask(units, kept, here)

    return of_tensor(keep, pattern, scores)


def threshold_mask(scores: Tensor, tau: float | Tensor, *, min_keep: int = 0) -> Tensor:
    """Keep the scores above tau, and at least the min_keep best.

    >>> sf.masks.threshold_mask(torch.tensor([1.0, 3.0, 2.0]), 5.0, min_keep=1)
    tensor([False,  True, False])

    Args:
        scores: Floating-point tensor of any shape. NaN is above nothing.
        tau: The threshold: a number, or a tensor that broadcasts to `scores`.
        min_keep: The number of best scores that are kept in any case.

    Returns:
        Bool tensor of the shape of `scores`. Its count depends on the data.

    Raises:
        TypeError: `scores` is not floating-point, or `min_keep` is not an int.
        ValueError: `min_keep` is outside [0, number of scores].
    """
    check_float("scores", scores)
    floor = _check_count("min_keep", min_keep, 1, scores.numel())
    above = scores.detach() > tau
    return above | topk_mask(scores, floor) if min_keep else above


def _checked(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        raise ValueError(
            f"expected a bool mask of shape {tuple(scores.shape)}, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    return mask


def checked_count(name: str, count: Count, available: Tensor) -> Count:
    """The count itself, if it is an integer and no group has fewer eligible units:
    `available` has their numbers.

    >>> checked_count("n_drop", 2, torch.tensor([2, 5]))
    2

    A tensor is not compared: selection clamps it. Nor is an int with numbers on a
    device, which would wait.
    """
    groups = available.shape[0]
    least = None
    if isinstance(count, int) and groups and available.device.type == "cpu":
        least = host_number(available.amin())
    return _check_count(name, count, groups, sys.maxsize if least is None else least)


def drop_lowest(
    scores: Tensor,
    mask: Tensor,
    n_drop: Count,
    *,
    pattern: Pattern = unstructured(),
) -> Tensor:
    """Clear the n_drop worst kept units of each group; pruned units do not compete.

    >>> sf.masks.drop_lowest(
    ...     torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, True, False]), 1
    ... )
    tensor([False,  True, False])

    Args:
        scores: Floating-point tensor of any shape. Among ties the higher index goes
            first, NaN before all.
        mask: Bool tensor of the shape of `scores`. A unit is kept if any element is,
            or with the `zeros` of a block, if more are kept than of a pruned block.
        n_drop: How many units each group drops, as `n_keep` of `topk_mask`. Where the
            mask is on a device an int is clamped, too, as nothing waits.
        pattern: As in `topk_mask`, with units that are chosen one by one.

    Returns:
        Bool tensor, the mask without the dropped units, and without units that the
        pattern never keeps.

    Raises:
        TypeError: `scores` is not floating-point, or `n_drop` neither an int nor an
            integer tensor.
        ValueError: An int `n_drop` is outside [0, kept units of a group], a tensor has
            another shape, the mask is not bool or has another shape, or the pattern
            does not fit, or chooses units together, as `transposable` does.
    """

    check_single("drop_lowest", pattern)

    def keep(units: Units, scores: Tensor, mask: Tensor) -> Tensor:
        active = active_rows(units, mask)
        had = totals([active], [units.extent])
        left = had - units.own_counts(checked_count("n_drop", n_drop, had))
        rows = Entry(
            competing(units, scores),
            allowed_rows(units, scores, active),
            extent=units.extent,
        )
        (kept,) = winners([rows], [left])
        return mask & unit_mask(units, kept, scores, mask)

    return of_tensor(keep, pattern, scores, _checked(mask, scores))


def grow_highest(
    scores: Tensor,
    mask: Tensor,
    n_grow: Count,
    *,
    pattern: Pattern = unstructured(),
    exclude: Tensor | None = None,
) -> Tensor:
    """Fill the n_grow best pruned units of each group.

    >>> sf.masks.grow_highest(
    ...     torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, False, False]), 1
    ... )
    tensor([ True,  True, False])

    Args:
        scores: Floating-point tensor of any shape. NaN ranks below every number.
        mask: Bool tensor of the shape of `scores`. Kept units, as in `drop_lowest`, do
            not compete.
        n_grow: How many units each group grows, as `n_drop` of `drop_lowest`.
        pattern: As in `drop_lowest`.
        exclude: Bool tensor of the shape of `scores`. A unit with a True element does
            not compete.

    Returns:
        Bool tensor, the mask with the grown units.

    Raises:
        TypeError: `scores` is not floating-point, or `n_grow` neither an int nor an
            integer tensor.
        ValueError: An int `n_grow` is outside [0, eligible units of a group], a tensor
            has another shape, `mask` or `exclude` is not bool or has another shape, or
            the pattern does not fit, or chooses units together.
    """

    check_single("grow_highest", pattern)

    def grow(units: Units, scores: Tensor, mask: Tensor, *excluded: Tensor) -> Tensor:
        barred = active_rows(units, mask)
        for flags in excluded:
            barred = barred | competing(units, flags, Pooling("max"))
        open_ = allowed_rows(units, scores, None)
        available = ~barred if open_ is None else open_ & ~barred
        free = totals([available], [units.extent])
        count = units.own_counts(checked_count("n_grow", n_grow, free))
        (grown,) = winners(
            [Entry(competing(units, scores), open_, barred, extent=units.extent)],
            [count],
        )
        return mask | unit_mask(units, grown)

    excluded = () if exclude is None else (_checked(exclude, scores),)
    return of_tensor(grow, pattern, scores, _checked(mask, scores), *excluded)


def topk_masks(scores: Tree, n_keep: int | Tensor) -> Tree:
    """One competition over all leaves: exactly n_keep elements are kept in total.

    >>> sf.masks.topk_masks(
    ...     {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([3.0, 2.0])}, 2
    ... )
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}

    Args:
        scores: Tree of floating-point tensors. NaN ranks below every number.
        n_keep: How many elements all leaves keep together: an int, or a 0-d integer
            tensor, which is clamped.

    Returns:
        Tree of bool tensors like `scores`. Ties go to the earlier leaf in optree's
        order, then to the lower index.

    Raises:
        TypeError: A leaf is not a floating-point tensor, or `n_keep` neither an int nor
            an integer tensor.
        ValueError: An int `n_keep` is outside [0, number of elements].
    """
    leaves, rebuild = flatten(scores)
    if not leaves:
        return scores
    for path, leaf in leaves.items():
        check_float("scores", leaf, path)
    count = _check_count(
        "n_keep", n_keep, 1, sum(leaf.numel() for leaf in leaves.values())
    )

    def run() -> Tree:
        parts = [
            (local_tensor(leaf), extent_of(leaf) if is_sharded(leaf) else None)
            for leaf in leaves.values()
        ]
        won = winners(
            [Entry(part.reshape(1, -1), extent=extent) for part, extent in parts],
            [count],
            joint=True,
        )
        rows = zip(won, parts, leaves.values(), strict=True)
        return rebuild(
            [
                sharded_like(mask.reshape(part.shape), leaf)
                for mask, (part, _), leaf in rows
            ]
        )

    return agreed({"call": "topk_masks"}, {"scores": leaves}, run)


def bernoulli_mask(probs: Tensor, key: Tensor) -> Tensor:
    """Keep each element with its own probability, drawn from an explicit key.

    >>> sf.masks.bernoulli_mask(torch.tensor([0.0, 1.0]), sf.random.key(0))
    tensor([False,  True])

    Args:
        probs: Floating-point tensor of probabilities. Above 1 always keeps, below 0 and
            NaN never do.
        key: A key from `sf.random.key`.

    Returns:
        Bool tensor of the shape of `probs`.

    Raises:
        TypeError: `probs` is not floating-point, or `key` is not an int64 tensor.
        ValueError: The last dimension of `key` is not of size 2.
    """
    return random.bernoulli(key, probs)


def bernoulli_masks(probs: Leaves, key: Tensor, step: Step) -> Leaves:
    """`bernoulli_mask` of some leaves, drawn from (key, path, step)."""
    values = list(probs.values())
    if key.ndim == 1 and not any_sharded(values) and pays(values):
        return flipped_leaves(key, probs, step)
    keys = {path: random.leaf_key(key, path, step) for path in probs}
    return {
        path: bernoulli_mask(x, brought(keys[path], x.device))
        for path, x in probs.items()
    }


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of `hard` with the gradient of `soft`.

    >>> soft = torch.tensor([0.3, 0.8])
    >>> torch.func.grad(
    ...     lambda s: sf.masks.straight_through((s > 0.5).float(), s).sum()
    ... )(soft)
    tensor([1., 1.])

    Args:
        hard: Tensor of any dtype, such as a bool mask.
        soft: Floating-point tensor that broadcasts with `hard`. Where it is inf or NaN
            the result is NaN.

    Returns:
        `hard` in the dtype of `soft`.

    The detach form, right under grad, vmap, jvp and compile (a custom autograd Function
    is silently ignored by a compiled `torch.func.grad`).

    Bengio et al. 2013, arXiv 1308.3432.
    """
    return hard.detach().to(soft.dtype) + (soft - soft.detach())
