"""Counts from fractions: the one rounding rule of the library."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import cast, overload

import torch
from torch import Tensor, nn

from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import counts_of_rows
from sparsefn._engine.transforms import as_constant
from sparsefn.core.checks import (
    Level,
    Schedule,
    Step,
    check_call,
    check_sparsity,
    number,
)

# (fraction, number of units) -> how many units that is
CountRule = Callable[[Real, Tensor], "int | Tensor"]


def rounded(fraction: Real, n: int | Tensor) -> int | Tensor:
    """round_half_even(fraction * n) in float64: the one rounding rule of the library.

    >>> sf.budgets.rounded(0.5, 5), sf.budgets.rounded(0.5, torch.tensor([5, 7]))
    (2, tensor([2, 4]))

    Args:
        fraction: A float or a float tensor. NaN in a tensor counts as 0.
        n: Number of units: an int or an int tensor.

    Returns:
        The count, an int for a float and an int, else an int64 tensor.

    Raises:
        ValueError: A float is NaN.
    """
    return _whole(fraction, n, round, torch.round)


def rounded_up(fraction: Real, n: int | Tensor) -> int | Tensor:
    """ceil(fraction * n) in float64: a count that is never too small.

    >>> sf.budgets.rounded_up(0.21, 5)
    2
    >>> algorithm = sf.rigl(0.5, drop_fraction=0.3, count=sf.budgets.rounded_up)

    Args:
        fraction: As in `rounded`.
        n: As in `rounded`.

    Returns:
        The count, as from `rounded`.

    Raises:
        ValueError: A float is NaN.
    """
    return _whole(fraction, n, math.ceil, torch.ceil)


def rounded_down(fraction: Real, n: int | Tensor) -> int | Tensor:
    """floor(fraction * n) in float64, which `int()` gives elsewhere.

    >>> sf.budgets.rounded_down(0.99, 15)
    14

    Args:
        fraction: As in `rounded`.
        n: As in `rounded`.

    Returns:
        The count, as from `rounded`.

    Raises:
        ValueError: A float is NaN.
    """
    return _whole(fraction, n, math.floor, torch.floor)


def _whole(
    fraction: Real,
    n: int | Tensor,
    round_float: Callable[[float], int],
    round_tensor: Callable[[Tensor], Tensor],
) -> int | Tensor:
    if not isinstance(fraction, Tensor):
        if fraction != fraction:
            raise ValueError(f"expected a fraction in [0, 1], got {fraction}")
        if not isinstance(n, Tensor):
            return round_float(as_constant(fraction) * n)
        fraction = torch.full((), fraction, dtype=torch.float64, device=n.device)
    # what NaN casts to depends on the processor
    part = torch.nan_to_num(fraction.double() * n, nan=0.0)
    return round_tensor(part).to(torch.int64)


def of_groups(
    count: CountRule,
    rates: Sequence[Real],
    n: Tensor,
    groups: Sequence[int],
) -> Tensor:
    """The counts of all groups at the rates of their leaves: `count(rate, n)`, which
    may give an int.

    >>> from sparsefn.core.rounding import of_groups, rounded
    >>> of_groups(rounded, [0.5, 0.25], torch.tensor([2, 4, 8]), [2, 1])
    tensor([1, 2, 2])

    The library's own rules take the groups of all leaves at once, other rules the
    groups of one leaf.
    """
    if count in (rounded, rounded_up, rounded_down):
        alike = [rate is rates[0] for rate in rates]
        if all(alike):
            return cast(Tensor, count(rates[0], n))
        there = [
            x.double()
            for x in rates
            if isinstance(x, Tensor) and x.device == n.device and not x.ndim
        ]
        if len(there) == len(n):
            return cast(Tensor, count(torch.stack(there), n))
    given = [
        count(rate, own)
        for rate, own in zip(rates, torch.split(n, list(groups)), strict=True)
    ]
    return counts_of_rows(given, groups, n.device)


def n_kept(n: int, sparsity: Real) -> int | Tensor:
    """How many of n units are kept at a sparsity: n - round_half_even(sparsity * n).

    >>> sf.budgets.n_kept(10, 0.9), sf.budgets.n_kept(5, 0.5)
    (1, 3)

    Args:
        n: Number of units.
        sparsity: A float in [0, 1], or a 0-d float tensor. The value of a tensor is not
            read: it is clamped, and NaN in it is sparsity 0, so that everything is
            kept.

    Returns:
        The count, an int for a float, a 0-d int64 tensor for a tensor.

    Raises:
        TypeError: `sparsity` is an int or of another type, or a tensor is not 0-d or
            not of floats.
        ValueError: A float is outside [0, 1] or NaN.
    """
    checked = check_sparsity(sparsity)
    return n - rounded(
        checked.clamp(0.0, 1.0) if isinstance(checked, Tensor) else checked, n
    )


@overload
def as_fraction(sparsity: Level, what: str = ...) -> Schedule: ...
@overload
def as_fraction(sparsity: Level | None, what: str = ...) -> Schedule | None: ...
def as_fraction(sparsity: Level | None, what: str = "sparsity") -> Schedule | None:
    """A checked float, 0-d tensor or Schedule as a Schedule; None stays None."""
    if sparsity is None:
        return None
    if isinstance(sparsity, nn.Module):
        got = (
            f"{type(sparsity).__name__}; a module goes into sf.attach(algorithm, "
            "model, optimizer)"
        )
        raise TypeError(
            f"expected {what} to be a float in [0, 1], a schedule or a 0-d tensor, "
            f"got {got}"
        )
    if callable(sparsity):
        check_call(what, sparsity, "step")
        return sparsity
    value = check_sparsity(sparsity, what)
    return lambda step: value


def fraction_at(level: Schedule, step: Step) -> Real:
    """The sparsity at a step; a schedule that leaves [0, 1] is clamped to it, and NaN
    in a tensor is 0.
    """
    value = level(step)
    if isinstance(value, Tensor):
        return value.nan_to_num(0.0).clamp(0.0, 1.0)
    if not isinstance(value, int | float | numbers.Real):
        raise TypeError(
            "expected a sparsity schedule to give numbers, got "
            f"{type(value).__name__} at step {step}"
        )
    if value != value:
        raise ValueError(
            f"expected a sparsity schedule to give numbers, got {value} at step {step}"
        )
    return float(min(max(value, 0.0), 1.0))


def as_number(value: Level, what: str) -> Schedule:
    """A checked finite number, 0-d tensor or Schedule of any range as a Schedule.

    >>> from sparsefn.core import rounding
    >>> rounding.as_number(2, "power")(0)
    2.0
    """
    if callable(value):
        check_call(what, value, "step")
        return lambda step: number(what, value(step))
    constant = number(what, value)
    return lambda step: constant
