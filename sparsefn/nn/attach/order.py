"""The order of the calls around an optimizer's step, seen by two of its step hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sparsefn.core.checks import as_int, check_kind
from sparsefn.core.state import Algorithm
from sparsefn.core.triggers import At, Every
from sparsefn.nn.attach.files import arguments_of
from sparsefn.nn.attach.records import Record, optimizers_of

STEP_ALONE = (
    "step: call before_step before it, and after_step after it; attach(..., "
    "hooks=True) has step() call both. An optimizer that steps during backward, in "
    "hooks of parameters, moves weights before masks see all gradients: step after "
    "backward"
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


# an Attached, whose methods are called around the steps; None where it is garbage
Found = Callable[[], Any]


class _Watch(NamedTuple):
    around: Found
    ids: Collection[int]  # of its parameters, which live as long as it does
    handles: Sequence[RemovableHandle]


# Optimizer -> who watches it, while it lives. Two algorithms on one weight would undo
# each other's work.
# Parameters are no keys: torch swaps no tensor that something refers to weakly.
_WATCHES: MutableMapping[Optimizer, list[_Watch]] = weakref.WeakKeyDictionary()


def watched(parameter: nn.Parameter) -> bool:
    """Whether an algorithm is attached to a parameter.

    The hooks of one that is garbage are removed.

    >>> watched(torch.nn.Parameter(torch.ones(2)))
    False
    """
    found = [
        watch
        for watches in _WATCHES.values()
        for watch in watches
        if id(parameter) in watch.ids
    ]
    for watch in found:
        if watch.around() is None:
            _remove(watch)
    return any(watch.around() is not None for watch in found)


def _remove(watch: _Watch) -> None:
    for handle in watch.handles:
        handle.remove()
    for watches in _WATCHES.values():
        watches[:] = [one for one in watches if one is not watch]


def watch(around: Any, records: Sequence[Record], keep: bool) -> Callable[[], None]:
    """Set the step hooks, and return the function that removes them.

    With `keep` the optimizers hold what they call; else it may become garbage, and a
    step then raises RuntimeError.
    """
    alive = weakref.ref(around)
    found: Found = (lambda: around) if keep else alive
    handles: list[RemovableHandle] = []
    made = _Watch(alive, {id(record.parameter) for record in records}, handles)
    for optimizer in optimizers_of(records):
        handles.append(optimizer.register_step_pre_hook(partial(_before, found)))
        handles.append(optimizer.register_step_post_hook(partial(_after, found)))
        _WATCHES.setdefault(optimizer, []).append(made)
    return partial(_remove, made)


def later(call: str, step: object, last: int) -> int:
    """A step as an int, which has to be after the last one; NumPy's integers are ints.

    >>> later("after_step", 3, 2)
    3
    """
    number = as_int(call, "step", step)
    if number <= last:
        raise ValueError(f"{call}: expected a step after {last}, got {number}")
    check_kind(number)
    return number


def left_out(algorithm: Algorithm, last: int, step: int) -> str:
    """A warning of a trigger that fires at none but the steps between two, which a loop
    leaves out; "" without one.

    >>> left_out(sf.rigl(0.9), -1, 3), left_out(sf.rigl(0.9), 99, 103)[:72]
    ('', 'after_step: expected step 100, got 103, which leaves out where every(100')

    One is missed that fires between the two and not at the second. The first step of a
    run, where `last` is -1, may be a late one: then a trigger is missed that fires no
    more.
    """
    end = step if last >= 0 else 1 << 62
    for _, when in arguments_of(algorithm):
        if isinstance(when, Every | At) and when.count(last) < when.count(
            step - 1
        ) == when.count(end):
            return (
                f"after_step: expected step {last + 1}, got {step}, which leaves out "
                f"where {when!r} fires: count steps of the optimizer from 0, as "
                "after_step(i // 4) does where 4 batches make a step; where a run "
                "goes on, call load_state_dict first, and where it begins late, give "
                "the algorithm a later trigger"
            )
    return ""


def _before(
    found: Found, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    around = found()
    if around is None:
        raise RuntimeError(
            "step: what sf.attach returned for these weights is gone: keep it, or "
            "call detach() first"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    around.enter_step(optimizer, closure is not None)
    if closure is None:
        return None
    wrapped = partial(around.around_closure, optimizer, closure)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _after(
    found: Found, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any
) -> None:
    around = found()
    if around is not None:
        around.leave_step(optimizer)
