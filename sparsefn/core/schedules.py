"""Schedules: pure functions from a step to a number, the same bits for tensors.

An int step gives a Python float, a 0-d int64 tensor a 0-d float64 tensor; inside
`torch.compile` every result is a tensor. Every number among the arguments may be an
int, a float or a 0-d float tensor (then every result is a float64 tensor), so that an
ensemble can have one per member.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sparsefn._engine.numbers import (
    Real,
    between,
    divide,
    elementary,
    floor,
    held,
    like,
    real_where,
)
from sparsefn.core.checks import (
    check_int,
    check_kind,
    check_positive,
    check_whole,
    described,
    numbers,
    uncalled,
)
from sparsefn.core.state import Level, Schedule, Step, Trigger

__all__ = [
    "as_schedule",
    "constant",
    "cosine",
    "cosine_decay",
    "cycling",
    "exponential",
    "linear",
    "linear_decay",
    "min_max_end",
    "piecewise",
    "polynomial",
    "power",
]
__dir__ = __all__.copy


def _step(step: Step) -> Step:
    step = check_kind(step)
    if torch.compiler.is_compiling() and not isinstance(step, Tensor):
        # one graph for all steps
        return torch.full((), step, dtype=torch.int64, device="cpu")
    return step


def _time(step: Step) -> Real:
    step = _step(step)
    if isinstance(step, Tensor):
        return step.to(torch.float64)
    return float(step)


def _pick(values: list[Real], holds: list[bool | Tensor], step: Step) -> Real:
    """The last of `values` whose condition holds; the first if none does."""
    value = like(step, values[0]) if isinstance(step, Tensor) else values[0]
    for condition, other in zip(holds[1:], values[1:], strict=True):
        value = real_where(condition, other, value)
    return value


@described
def constant(value: Real) -> Schedule:
    """The same number at every step.

    >>> sf.schedules.constant(0.9)(100)
    0.9

    Args:
        value: The number.

    Returns:
        Schedule of that value.

    Raises:
        TypeError: `value` is neither a number nor a float tensor.
        ValueError: `value` is NaN, infinite, or a tensor that is not 0-d.
    """
    (number,) = numbers(value=value)
    return lambda step: _pick([number], [True], _step(step))


@described
def linear(init: Real, slope: Real) -> Schedule:
    """`init + slope * step`, without a last step.

    >>> sf.schedules.linear(0.5, 0.25)(2)
    1.0

    Args:
        init: Value at step 0.
        slope: What each step adds.

    Returns:
        Schedule of that line. `linear_decay` and `polynomial(power=1)` have a last
        step.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`.
    """
    a, b = numbers(init=init, slope=slope)
    return lambda step: a + _time(step) * b


@described
def exponential(init: Real, gamma: Real, final: Real = 1) -> Schedule:
    """`final - (final - init) * exp(gamma * step)`: towards `final` for gamma < 0.

    >>> sf.schedules.exponential(0.0, gamma=-0.5)(0)
    0.0

    Args:
        init: Value at step 0.
        gamma: Rate in each step.
        final: Limit for a negative `gamma`.

    Returns:
        Schedule of that curve.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`.
    """
    a, b, rate = numbers(init=init, final=final, gamma=gamma)

    def schedule(step: Step) -> Real:
        t = _time(step)
        moved = (b - a) * elementary.exp(rate * t)
        # NaN came from 0 * inf
        return real_where(t == 0.0, a, b - real_where(moved != moved, 0.0, moved))

    return schedule


@described
def power(init: Real, beta: Real) -> Schedule:
    """`init * beta ** step`, for beta >= 0.

    >>> sf.schedules.power(0.8, 0.5)(2)
    0.2

    Args:
        init: Value at step 0.
        beta: Factor of each step.

    Returns:
        Schedule of that product.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`, or `beta` is negative.
    """
    a, b = numbers(init=init, beta=beta)
    if not isinstance(b, Tensor) and b < 0:
        raise ValueError(f"expected beta >= 0, got {beta}")
    return lambda step: a * elementary.real_power(b, _time(step))


@described
def cosine(init: Real, half_period: Real, minimum: Real = 0) -> Schedule:
    """A wave that falls from `init` to `minimum` in `half_period` steps, then rises.

    >>> [sf.schedules.cosine(1.0, 2)(step) for step in range(5)]
    [1.0, 0.5, 0.0, 0.5, 1.0]

    Args:
        init: Value at step 0, and at every even multiple of `half_period`.
        half_period: Number of steps from `init` to `minimum`, above 0.
        minimum: Value at every odd multiple of `half_period`.

    Returns:
        Schedule of
        `minimum + (init - minimum) * (1 + cos(pi * step / half_period)) / 2`.
        `cosine_decay` stays at the bottom.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`, or `half_period` is not positive.
    """
    a, b, half = numbers(init=init, minimum=minimum, half_period=half_period)
    check_positive("half_period", half)

    def schedule(step: Step) -> Real:
        t = _time(step)
        # exact for a whole half_period: bits repeat
        t = t - half * (2.0 * floor(divide(t, half) * 0.5))
        wave = elementary.cospi(divide(t, half))
        return between(a, b, (1.0 + wave) * 0.5)

    return schedule


@described
def cosine_decay(init: Real, steps: Real, final: Real = 0) -> Schedule:
    """Half a cosine wave from `init` at step 0 to `final` at `steps`, and then `final`.

    >>> [sf.schedules.cosine_decay(0.5, 2)(step) for step in (0, 1, 2, 3)]
    [0.5, 0.25, 0.0, 0.0]

    Args:
        init: Value at step 0.
        steps: Number of steps down to `final`, above 0.
        final: Value at the end.

    Returns:
        Schedule of that curve.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`, or `steps` is not positive.

    The drop fraction of Evci, Gale, Menick, Castro and Elsen, "Rigging the lottery",
    2020, arXiv 1911.11134, section 3(2).
    """
    a, b, end = numbers(init=init, final=final, steps=steps)
    check_positive("steps", end)

    def schedule(step: Step) -> Real:
        t = held(_time(step), 0.0, end)
        wave = elementary.cospi(divide(t, end))
        return between(a, b, (1.0 + wave) * 0.5)

    return schedule


@described
def linear_decay(init: Real, steps: Real, final: Real = 0) -> Schedule:
    """A straight line from `init` at step 0 to `final` at `steps`, and then `final`.

    >>> [sf.schedules.linear_decay(0.5, 2)(step) for step in (0, 1, 2, 3)]
    [0.5, 0.25, 0.0, 0.0]

    Args:
        init: Value at step 0.
        steps: Number of steps to `final`, above 0.
        final: Value at the end.

    Returns:
        Schedule of that line.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`, or `steps` is not positive.
    """
    a, b, end = numbers(init=init, final=final, steps=steps)
    check_positive("steps", end)
    return lambda step: between(a, b, divide(end - held(_time(step), 0.0, end), end))


@described
def polynomial(
    init: Real,
    final: Real,
    begin: Real,
    end: Real,
    power: Real = 3,
) -> Schedule:
    """From `init` at step `begin` to `final` at `end`, fast first and slow at last.

    >>> schedule = sf.schedules.polynomial(0.0, 0.8, begin=100, end=300)
    >>> [schedule(step) for step in (0, 100, 200, 300, 400)]
    [0.0, 0.0, 0.7000000000000001, 0.8, 0.8]

    Args:
        init: Value up to step `begin`.
        final: Value from step `end` on.
        begin: First step of the change.
        end: Last step of the change, above `begin`.
        power: Exponent, above 0.

    Returns:
        Schedule of
        `final + (init - final) * (1 - (step - begin) / (end - begin)) ** power`,
        constant before and after.

    Raises:
        TypeError: As `constant`.
        ValueError: As `constant`, `end` is not above `begin`, or `power` is not
            positive.

    With power 3 the sparsity of Zhu and Gupta, "To prune, or not to prune", 2017,
    arXiv 1710.01878, equation 1.
    """
    a, b, start, stop, exponent = numbers(
        init=init, final=final, begin=begin, end=end, power=power
    )
    check_positive("power", exponent)
    if not isinstance(start, Tensor) and not isinstance(stop, Tensor) and stop <= start:
        raise ValueError(f"expected end > begin, got begin={begin}, end={end}")

    def schedule(step: Step) -> Real:
        left = divide(stop - held(_time(step), start, stop), stop - start)
        return between(a, b, elementary.real_power(left, exponent))

    return schedule


def _some(values: Iterable[object]) -> list[Real]:
    named = {f"values[{i}]": value for i, value in enumerate(values)}
    if not named:
        raise ValueError("expected at least one of values, got none")
    return numbers(**named)


@described
def cycling(values: Sequence[Real], when: Trigger) -> Schedule:
    """The values in turn, advancing whenever the trigger fires.

    >>> schedule = sf.schedules.cycling([0.5, 0.8], sf.triggers.every(10, start=10))
    >>> [schedule(step) for step in (0, 10, 19, 20, 30)]
    [0.5, 0.5, 0.5, 0.8, 0.5]

    Args:
        values: One number or more.
        when: Trigger that counts: `every`, `at`, `always`, `never`, or a callable with
            a method `count(step)`, the number of firings at steps up to and including
            `step`.

    Returns:
        Schedule of `values[j % len(values)]` from the j-th firing on, j = 0, 1, ... The
        first firing sees `values[0]`, and so does every step before it.

    Raises:
        TypeError: As `constant`, or `when` does not count.
        ValueError: As `constant`, or there are no values.
    """
    count = getattr(when, "count", None)
    if not callable(count):
        raise TypeError(
            "expected when to be a trigger with count(step), such as every, got "
            f"{type(when).__name__}"
        )
    turns = _some(values)

    def schedule(step: Step) -> Real:
        step = _step(step)
        latest = count(step) - 1
        # before the first firing: the first value
        index = (latest + (latest < 0)) % len(turns)
        return _pick(turns, [index == i for i in range(len(turns))], step)

    return schedule


@described
def piecewise(values: Mapping[int, Real] | Iterable[tuple[Step, Real]]) -> Schedule:
    """Piecewise constant: each value holds from its begin on.

    >>> schedule = sf.schedules.piecewise({0: 0.5, 100: 0.8})
    >>> [schedule(step) for step in (0, 99, 100)]
    [0.5, 0.5, 0.8]

    Args:
        values: `{begin: value}`, or pairs of the two, in any order. Where a begin is a
            0-d int64 tensor, in order of time: the last pair that has begun holds.

    Returns:
        Schedule of these values. The first value also holds before its begin.

    Raises:
        TypeError: As `constant`, or a begin is not an int.
        ValueError: As `constant`, a begin is negative or given twice, or there are no
            values.
    """
    pairs = list(values.items() if isinstance(values, Mapping) else values)
    for begin, _ in pairs:
        check_whole("piecewise(values)", "every begin", begin, 0)
    if not any(isinstance(begin, Tensor) for begin, _ in pairs):
        pairs.sort(key=lambda pair: pair[0])
        for (begin, _), (following, _) in itertools.pairwise(pairs):
            if begin == following:
                raise ValueError(f"expected one value for a begin, got two for {begin}")
    levels = _some(value for _, value in pairs)

    def schedule(step: Step) -> Real:
        step = _step(step)
        return _pick(levels, [step >= begin for begin, _ in pairs], step)

    return schedule


def as_schedule(value: Level) -> Schedule:
    """The schedule that was given, or a constant one for a float or a 0-d float tensor.

    >>> sf.schedules.as_schedule(0.9)(0)
    0.9

    Args:
        value: A schedule, a float or a 0-d float tensor.

    Returns:
        The schedule.

    Raises:
        TypeError: `value` is an int (write 1.0 for all), or something else that is no
            schedule.
        ValueError: `value` is a list (see `cycling`) or a dict (see `piecewise`), NaN
            or infinite.
    """
    if isinstance(value, (float, Tensor)):
        return constant(value)
    if isinstance(value, (list, tuple)):
        raise ValueError(
            "expected a float or a schedule, got a list; write cycling(values, when) "
            "with its trigger"
        )
    if isinstance(value, Mapping):
        raise ValueError(
            "expected a float or a schedule, got a mapping; write piecewise({begin: "
            "value})"
        )
    if isinstance(value, int):
        raise TypeError(
            f"expected a float or a schedule, got the {type(value).__name__} {value}; "
            f"write {float(value)}"
        )
    if not callable(value) or uncalled(value):
        raise TypeError(
            "expected a float or a schedule, got "
            f"{uncalled(value) or type(value).__name__}"
        )
    return value


def min_max_end(schedule: Schedule, begin: int, end: int) -> tuple[Real, Real, Real]:
    """The smallest and the largest value over steps begin..end, and the value at `end`.

    >>> sf.schedules.min_max_end(sf.schedules.cosine(1.0, 2), 0, 3)
    (0.0, 1.0, 0.5)

    Args:
        schedule: The schedule. One of your own that cannot be vmapped, or not in
            float64, is called step by step.
        begin: First step, an int >= 0.
        end: Last step, included.

    Returns:
        Three floats, or three 0-d tensors where the schedule gives tensors.

    Raises:
        TypeError: `begin` or `end` is not an int.
        ValueError: `begin` is negative, or `end` is below `begin`.

    Every step is evaluated, so the result is exact and the time is linear in
    `end - begin`.
    """
    check_int("min_max_end", "begin", begin, 0)
    check_int("min_max_end", "end", end, begin)
    # bounds memory
    last = schedule(end)
    chunk = 1 << 16
    parts = [
        range(first, min(end + 1, first + chunk))
        for first in range(begin, end + 1, chunk)
    ]
    low, high = torch.stack(
        [torch.stack(_values(schedule, part, last).aminmax()) for part in parts]
    ).aminmax()
    if isinstance(last, Tensor):
        return low, high, last
    return float(low), float(high), float(last)


def _values(schedule: Schedule, steps: range, model: Real) -> Tensor:
    zero = torch.zeros(
        (),
        dtype=torch.float64,
        device=model.device if isinstance(model, Tensor) else "cpu",
    )
    # a user's schedule may branch on the value of the step
    with contextlib.suppress(RuntimeError):
        batch = torch.arange(
            steps.start, steps.stop, dtype=torch.int64, device=zero.device
        )
        values: Tensor = torch.func.vmap(lambda step: like(zero, schedule(step)))(batch)
        if values.dtype == torch.float64:
            return values
    return torch.stack([like(zero, schedule(step)).double() for step in steps])
