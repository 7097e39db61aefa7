"""Counts that scores decide: how many units are kept by a threshold, or by a share of
the sum of the scores.

Give them to algorithms in place of a sparsity, and to `drop_grow` in place of a drop
fraction. Selection still decides which units are kept, so that the count is exact: the
best units by that count are the units above the threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.leaves import placed
from sparsefn._engine.numbers import Real, falling, running_sums
from sparsefn._engine.torch_limits import widened
from sparsefn.core import rounding
from sparsefn.core.checks import Made, check_int, check_sparsity, described
from sparsefn.core.state import Level, Step

__all__ = ["Counted", "above", "below", "in_rows", "mass"]
__dir__ = __all__.copy


# Flags of units, a row for each group -> how many are set in each group
Total = Callable[[Tensor], Tensor]


class _Count(NamedTuple):
    count: Callable[..., Tensor]  # type: ignore[assignment]  # a tuple has a method of that name
    of: Literal["kept", "dropped"] = "kept"
    whole: bool = True


class Counted(Made, _Count):
    """How many units each competing group keeps, as a function of its scores.

    >>> half = sf.counts.Counted(lambda scores, active, step: active.sum(-1) // 2)
    >>> algorithm = sf.gmp(half, init="dense")
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, state.params, 0).masks
    {'w': tensor([[ True,  True, False, False]])}

    Attributes:
        count: Function of (scores, active, step): the scores of units and a bool for
            each unit that may be kept, both of shape (groups, units of a group), and
            the step. It gives an integer tensor of shape (groups,). With `global_()`
            there is one group.
        of: What is counted: units that are "kept" or "dropped". The others are then
            dropped or kept, wherever the count is used.
        whole: Whether groups must be whole. With False `count` adds up flags of units
            alone: it is called with a fourth argument, which counts the flags that are
            set in each group, and so serves a group that lies on several processes.
    """


def in_rows(flags: Tensor) -> Tensor:
    """How many flags are set in each row.

    >>> sf.counts.in_rows(torch.tensor([[True, False, True]]))
    tensor([2])

    Args:
        flags: Bool tensor of shape (groups, units of a group).

    Returns:
        Int64 tensor of shape (groups,).

    It is the fourth argument of a count whose groups are whole.
    """
    return flags.sum(-1)


@described
def above(tau: Level, at_least: int = 0) -> Counted:
    """As many units are kept as score above a threshold.

    >>> sf.counts.above(0.5).count(
    ...     torch.tensor([[0.9, 0.1, 0.6]]), torch.tensor([[True, True, False]]), 0
    ... )
    tensor([1])
    >>> algorithm = sf.gmp(sf.counts.above(2.0))
    >>> algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])}).masks
    {'w': tensor([[ True,  True, False, False]])}

    Args:
        tau: The threshold: a number, a Schedule or a 0-d tensor. It is compared in
            float32 or wider. A unit that scores exactly tau is not above it, nor is
            NaN.
        at_least: How many units each group keeps in any case, the best, where it has
            them.

    Returns:
        The count of kept units.

    Raises:
        TypeError: `tau` is no number, or `at_least` is not an int.
        ValueError: `tau` is not finite or not 0-d, or `at_least` is negative.
    """
    level = rounding.as_number(tau, "tau")
    check_int("above", "at_least", at_least, 0)

    def count(
        scores: Tensor, active: Tensor, step: Step, total: Total = in_rows
    ) -> Tensor:
        return total(_above(scores, level(step)) & active).clamp(min=at_least)

    return Counted(count, whole=False)


@described
def below(tau: Level, spare: int = 0) -> Counted:
    """As many units are dropped as do not score above a threshold.

    >>> sf.counts.below(0.5).count(
    ...     torch.tensor([[0.9, 0.1, 0.6]]), torch.tensor([[True, True, False]]), 0
    ... )
    tensor([1])
    >>> algorithm = sf.set(
    ...     0.5, drop_fraction=sf.counts.below(0.1, spare=1), key=sf.random.key(0)
    ... )

    Args:
        tau: The threshold, as in `above`: a unit that scores exactly tau, or NaN, is
            dropped.
        spare: How many units each group keeps in any case, the best.

    Returns:
        The count of dropped units.

    Raises:
        TypeError: `tau` is no number, or `spare` is not an int.
        ValueError: `tau` is not finite or not 0-d, or `spare` is negative.

    With a threshold that follows the number of dropped weights this is the rule of
    Mostafa & Wang 2019, arXiv 1902.05967.
    """
    level = rounding.as_number(tau, "tau")
    check_int("below", "spare", spare, 0)

    def count(
        scores: Tensor, active: Tensor, step: Step, total: Total = in_rows
    ) -> Tensor:
        under = total(~_above(scores, level(step)) & active)
        if spare:
            most = (total(active) - spare).clamp(min=0)
            return torch.minimum(under, most)
        return under

    return Counted(count, "dropped", whole=False)


@described
def mass(share: float | Tensor) -> Counted:
    """As few units are kept as hold a share of the sum of the scores.

    >>> rows = torch.tensor([[5.0, 3.0, 1.0, 1.0]])
    >>> sf.counts.mass(0.75).count(rows, torch.ones(1, 4, dtype=torch.bool), 0)
    tensor([2])

    Args:
        share: The share: a float in [0, 1], or a 0-d floating-point tensor, which is
            clamped.

    Returns:
        The count of kept units. The sum is over the active units of each group, in
        float64, with the same bits on every device. Scores that are negative or NaN
        count as 0.

    Raises:
        TypeError: `share` is neither a float nor a 0-d floating-point tensor.
        ValueError: A float `share` is outside [0, 1]; when a mask is made, a group of a
            DTensor lies on several processes.
    """
    fraction = check_sparsity(share, "share")

    def count(scores: Tensor, active: Tensor, step: Step) -> Tensor:
        del step
        given = torch.where(
            active & (scores > 0), widened(scores.detach()).double(), 0.0
        )
        sums = running_sums(given.gather(-1, falling(given)))
        wanted = _on(fraction, given).clamp(0.0, 1.0) * sums[..., -1:]
        below = (sums < wanted).sum(-1, keepdim=True)
        return (below + (wanted > 0)).sum(-1)

    return Counted(count)


def _above(scores: Tensor, tau: Real) -> Tensor:
    scores = widened(scores.detach())
    return scores > _on(tau, scores)


def _on(value: Real, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return placed(value, like.device).to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)
