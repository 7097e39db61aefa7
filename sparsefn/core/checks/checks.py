"""Checks of arguments: steps, ints, numbers, sparsities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real, like
from sparsefn.core.checks.callables import check_call

Step = int | Tensor
Schedule = Callable[[Step], Real]
Level = Real | Schedule  # a number, perhaps another one at every step


def check_kind(step: Step) -> Step:
    """The step itself, if it is one: an int of any sign or a 0-d int64 tensor.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_kind(0.5)
    Traceback (most recent call last):
        ...
    TypeError: expected step to be an int or a 0-d int64 tensor, got float

    An integer of another kind, such as NumPy's, comes back as an int. ValueError for an
    int that does not fit int64, or whose successor does not.
    """
    if (
        torch.compiler.is_compiling()
        and not isinstance(step, int | float | Tensor)
        and hasattr(step, "__array__")
    ):
        # while compiling, a NumPy integer is an array without dimensions
        step = torch.as_tensor(step, device="cpu")
        if not (step.is_floating_point() or step.dtype == torch.bool):
            step = step.to(torch.int64)
    if isinstance(step, Tensor):
        if step.dtype != torch.int64:
            raise TypeError(
                "expected step to be an int or a 0-d int64 tensor, got a tensor of "
                f"{step.dtype}"
            )
        if step.ndim:
            raise ValueError(
                f"expected step to be a 0-d tensor, got shape {tuple(step.shape)}"
            )
        return step
    if isinstance(step, bool) or not isinstance(step, int | Integral):
        raise TypeError(
            "expected step to be an int or a 0-d int64 tensor, got "
            f"{type(step).__name__}"
        )
    step = int(step)
    if not -(2**63) <= step < 2**63 - 1:
        raise ValueError(
            f"expected a step that fits int64, as the one after it must, got {step}"
        )
    return step


def check_step(step: Step) -> Step:
    """The step itself, if it is one: an int >= 0 or a 0-d int64 tensor.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_step(3)
    3

    Args:
        step: The value to check. Under `vmap` a tensor is 0-d per member.

    Returns:
        The step. While compiling, an int comes back as a tensor, so that the graph
        serves every step. An integer of another kind, such as NumPy's, comes back as an
        int.

    Raises:
        TypeError: `step` is of another type or dtype.
        ValueError: An int is negative or above 2**63 - 2, or a tensor is not 0-d.
    """
    step = check_kind(step)
    if isinstance(step, Tensor):
        return step
    if step < 0:
        raise ValueError(f"expected step >= 0, got {step}")
    if torch.compiler.is_compiling():
        # as_tensor would compile again for every step
        return torch.full((), step, dtype=torch.int64, device="cpu")
    return step


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list, a tuple or the like; a string is not.

    >>> from sparsefn.core.checks import checks
    >>> checks.is_sequence((0, 1)), checks.is_sequence("01"), checks.is_sequence(0)
    (True, False, False)
    """
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_int(value: object) -> TypeGuard[int]:
    """Whether the value is an int; a bool is not.

    >>> from sparsefn.core.checks import checks
    >>> checks.is_int(1), checks.is_int(True), checks.is_int(1.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def as_int(call: str, name: str, value: object) -> int:
    """The argument of that name as an int: any kind of integer, such as NumPy's, but no
    bool.

    >>> from sparsefn.core.checks import checks
    >>> checks.as_int("after_step", "step", 1.0)
    Traceback (most recent call last):
        ...
    TypeError: after_step: expected step to be an int, got 1.0
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{call}: expected {name} to be an int, got {value!r}")
    return int(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is an int or a float; a bool is not.

    >>> from sparsefn.core.checks import checks
    >>> checks.is_number(1), checks.is_number(1.0), checks.is_number(True)
    (True, True, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(call: str, name: str, value: object, low: int | None = None) -> None:
    """Raise unless the argument of that name is an int and at least `low`; the call, if
    any, begins the error.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_int("every(n)", "n", 0, 1)
    Traceback (most recent call last):
        ...
    ValueError: every(n): expected n >= 1, got 0
    """
    where = f"{call}: " if call else ""
    if not is_int(value):
        raise TypeError(
            f"{where}expected {name} to be an int, got {type(value).__name__}"
        )
    if low is not None and value < low:
        raise ValueError(f"{where}expected {name} >= {low}, got {value}")


def check_whole(call: str, name: str, value: object, low: int) -> None:
    """Raise unless the argument is a 0-d int64 tensor, or passes `check_int`.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_whole("every(n)", "n", torch.tensor(0.5), 1)
    Traceback (most recent call last):
        ...
    TypeError: every(n): expected n to be an int or a 0-d int64 tensor, got a tensor of
    torch.float32

    The value of a tensor is not looked at: it may be batched, or on another device.
    """
    if not isinstance(value, Tensor):
        check_int(call, name, value, low)
        if isinstance(value, int) and value >= 2**63:
            raise ValueError(f"{call}: expected {name} to fit int64, got {value}")
    elif value.dtype != torch.int64:
        raise TypeError(
            f"{call}: expected {name} to be an int or a 0-d int64 tensor, got a "
            f"tensor of {value.dtype}"
        )
    elif value.ndim:
        raise ValueError(
            f"{call}: expected {name} to be a 0-d tensor, got shape "
            f"{tuple(value.shape)}"
        )


def check_pairs(name: str, rules: Sequence[object]) -> None:
    """Raise TypeError unless every rule is a pair.

    >>> check_pairs("phases", [(0, sf.dense())])
    """
    for i, rule in enumerate(rules):
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            raise TypeError(
                f"{name}: expected a list of pairs, got {type(rule).__name__} at "
                f"position {i}"
            )


def check_trigger(name: str, trigger: object) -> None:
    """Raise TypeError unless it can be called with a step.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_trigger("when", 100)
    Traceback (most recent call last):
        ...
    TypeError: expected when to be a trigger such as every(100) or at([0]), got 100
    """
    if not callable(trigger):
        raise TypeError(
            f"expected {name} to be a trigger such as every(100) or at([0]), got "
            f"{trigger!r}"
        )
    check_call(name, trigger, "step")


def check_sparsity(sparsity: Real, what: str = "sparsity") -> Real:
    """Raise unless it is a float in [0, 1] or a 0-d floating-point tensor.

    >>> check_sparsity(1)
    Traceback (most recent call last):
        ...
    TypeError: expected sparsity to be a float in [0, 1], got the int 1; a fraction is
    written 1.0

    The value of a tensor is not looked at.
    """
    if isinstance(sparsity, Tensor):
        if not sparsity.is_floating_point() or sparsity.ndim:
            got = f"{sparsity.dtype} of shape {tuple(sparsity.shape)}"
            raise TypeError(
                f"expected {what} to be a 0-d floating-point tensor, got {got}"
            )
        return sparsity
    percent = isinstance(sparsity, int | float) and 1 < sparsity <= 100
    hint = f"; {sparsity} per cent is written {sparsity / 100}" if percent else ""
    if isinstance(sparsity, int):
        if sparsity in (0, 1) and is_int(sparsity):
            hint = f"; a fraction is written {float(sparsity)}"
        kind = type(sparsity).__name__
        raise TypeError(
            f"expected {what} to be a float in [0, 1], got the {kind} {sparsity}{hint}"
        )
    if not isinstance(sparsity, float):
        raise TypeError(
            f"expected {what} to be a float in [0, 1], got "
            f"{sparsity!r}{_table(what, sparsity)}"
        )
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"expected {what} in [0, 1], got {sparsity}{hint}")
    return sparsity


def _table(what: str, value: object) -> str:
    # How the levels of a dict are written: by step, or by path.
    if not isinstance(value, Mapping):
        return ""
    if value and all(is_int(name) for name in value):
        return f"; for one by step write sf.schedules.piecewise({value!r})"
    beside = "beside the sparsity of the other leaves"
    return (
        f"; for one by path write distribution=sf.budgets.by_path({value!r}) {beside}"
        if what == "sparsity"
        else ""
    )


def numbers(**values: object) -> list[Real]:
    """Finite hyper-parameters as floats.

    All are float64 tensors where one is a 0-d float tensor.

    >>> from sparsefn.core.checks import checks
    >>> checks.numbers(init=0.5, final=1)
    [0.5, 1.0]
    >>> checks.numbers(init=0.5, final=torch.tensor(1.0))
    [tensor(0.5000, dtype=torch.float64), tensor(1., dtype=torch.float64)]

    Raises what `number` raises.
    """
    checked = [number(name, value) for name, value in values.items()]
    model = next((x for x in checked if isinstance(x, Tensor)), None)
    if model is None:
        return checked
    return [like(model, x) for x in checked]


def number(name: str, value: object) -> Real:
    """A finite hyper-parameter as a float, or a 0-d float tensor as float64.

    >>> from sparsefn.core.checks import checks
    >>> checks.number("slope", 1)
    1.0

    Raises TypeError for another type or dtype, ValueError for NaN, inf or a tensor that
    is not 0-d.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(
                f"expected {name} to be a number or a 0-d float tensor, got a tensor "
                f"of {value.dtype}"
            )
        if value.ndim:
            raise ValueError(
                f"expected {name} to be a 0-d tensor, got shape {tuple(value.shape)}"
            )
        return value.to(torch.float64)
    if not is_number(value):
        raise TypeError(
            f"expected {name} to be a number or a 0-d float tensor, got "
            f"{type(value).__name__}"
        )
    try:
        finite = float(value)
    except OverflowError:
        raise ValueError(
            f"expected {name} to fit a float, got an int of {int(value).bit_length()} "
            "bits"
        ) from None
    if not math.isfinite(finite):
        raise ValueError(f"expected {name} to be finite, got {value}")
    return finite


def positive_pair(name: str, value: object) -> tuple[Real, Real]:
    """Two finite hyper-parameters above 0, one for the first step and one for the last.

    >>> from sparsefn.core.checks import checks
    >>> checks.positive_pair("scale", (1, 5.0))
    (1.0, 5.0)

    Raises TypeError for what is no pair of numbers, and ValueError for numbers that are
    not finite or not above 0; the sign of a tensor is not looked at.
    """
    if not is_sequence(value) or len(value) != 2:
        mend = f"; write ({value}, {value})" if is_number(value) else ""
        raise TypeError(
            f"expected {name} to be two numbers, at the first step and at the last, "
            f"got {value!r}{mend}"
        )
    ends = ("first", "last")
    first, last = (
        number(f"the {end} {name}", one) for end, one in zip(ends, value, strict=True)
    )
    check_positive(f"the first {name}", first)
    check_positive(f"the last {name}", last)
    return first, last


def check_positive(name: str, value: Real) -> None:
    """Raise for a float that is not above 0; the sign of a tensor is not looked at.

    >>> from sparsefn.core.checks import checks
    >>> checks.check_positive("steps", 0.0)
    Traceback (most recent call last):
        ...
    ValueError: expected steps > 0, got 0.0
    """
    if not isinstance(value, Tensor) and value <= 0:
        raise ValueError(f"expected {name} > 0, got {value}")
