"""A run of a model without some parts: what each of them would be called with."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsefn.calibration.inputs import without_fusion
from sparsefn.calibration.kept import (
    BrokenChainError,
    OutputForm,
    Stowed,
    Touched,
    form_of,
    marked,
    own_call,
    unstow,
)
from sparsefn.modules.calls import Call, quiet_call
from sparsefn.tree import Tree

Run = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Tree]


class NeededError(BrokenChainError):
    """The model does something else with the outputs of a part than pass them on: the
    number of its call.
    """

    def __init__(self, number: int) -> None:
        super().__init__("the model reads what it handed on before")
        self.number = number


class _Stop(BaseException):
    pass


@contextlib.contextmanager
def intercepted(parts: Mapping[str, nn.Module], run: Run) -> Iterator[None]:
    """While it is entered, `run(path, part, args, kwargs)` takes the place of the calls
    of some parts of a model.

    >>> relu = torch.nn.ReLU()
    >>> with intercepted({"0": relu}, lambda path, part, args, kwargs: path):
    ...     relu(torch.ones(1))
    '0'

    A part is called so before its hooks, and whoever holds it; the attribute is the one
    that `Module.compile` sets. Raises BrokenChainError where an attribute of a part was
    set since, before its first call.
    """
    name = "_compiled_call_impl"
    before = [
        (vars(part), name in vars(part), vars(part).get(name))
        for part in parts.values()
    ]
    times = Counter(inner for part in parts.values() for inner in part.modules())
    try:
        for path, part in parts.items():
            given = [
                (inner, dict(vars(inner)))
                for inner in part.modules()
                if times[inner] == 1
            ]
            vars(part)[name] = partial(_instead, run, path, part, given)
        yield
    finally:
        for own, had, value in before:
            own.pop(name, None)
            if had:
                own[name] = value


def _instead(
    run: Run, path: str, part: nn.Module, given: list[Any], /, *args: Any, **kwargs: Any
) -> Tree:
    for inner, old in given:
        for key, x in vars(inner).items():
            if x is not old.get(key) and not callable(x):
                raise BrokenChainError(
                    f"{path!r} gets its {key!r} from elsewhere, and not as an argument"
                )
    given.clear()  # from here on it may be its own
    return run(path, part, args, kwargs)


def catch(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    parts: Mapping[str, nn.Module],
    order: Sequence[str],
    forms: Sequence[OutputForm],
    outputs: Mapping[int, Stowed],
    first: int,
    call: Call,
) -> list[Call]:
    """What the parts are called with from the call of a number on, as far as no value
    is needed that is not known.

    >>> from sparsefn.calibration.kept import in_memory, stow
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
    ... )
    >>> parts, form = {"0": model[0], "2": model[2]}, form_of(torch.ones(1))
    >>> weights, call = sf.modules.params_of(model), ((torch.ones(1, 2),), {})
    >>> catch(
    ...     model, weights, parts, ["0", "2"], [form, form], {}, 0, call
    ... )  # ReLU wants the outputs of "0"
    [((tensor([[1., 1.]]),), {})]
    >>> catch(
    ...     model,
    ...     weights,
    ...     parts,
    ...     ["0", "2"],
    ...     [form, form],
    ...     {0: stow(-torch.ones(1, 3), in_memory)},
    ...     1,
    ...     call,
    ... )
    [((tensor([[0., 0., 0.]]),), {})]

    `order` are the paths of the parts as the model calls them, and `forms` what they
    return. They do not run: where their `outputs` are known these are returned, else
    tensors that the model can only hand on. Raises NeededError where not even the first
    is reached so, BrokenChainError where the model calls the parts in another order.
    """
    found: list[Call] = []
    number = -1

    def run(
        path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tree:
        nonlocal number
        number += 1
        if path != order[number]:
            raise BrokenChainError(
                f"{path!r} is called where {order[number]!r} was before"
            )
        if number >= first:
            found.append((args, kwargs))
        if number == len(order) - 1:
            raise _Stop
        return (
            unstow(outputs[number])
            if number in outputs
            else marked(forms[number], number)
        )

    try:
        with torch.no_grad(), without_fusion(), intercepted(parts, run):
            quiet_call(module, weights)(own_call(call))
    except _Stop:
        pass
    except Touched as touched:
        if not found:
            raise NeededError(touched.slot.number) from None
    if not found:
        raise BrokenChainError(f"{order[first]!r} is not called every time")
    return found


def recorded(
    parts: Mapping[str, nn.Module], run: Callable[[], Tree]
) -> tuple[Tree, list[str], list[OutputForm], str]:
    """What a run of the model gives, the paths of some of its parts in the order of
    their calls, and what they return.

    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
    >>> recorded({"0": model[0], "1": model[1]}, lambda: model(torch.ones(1)))[:2]
    (tensor([1.]), ['0', '1'])

    The text at the end says why these cannot run one by one; it is empty where they
    may.
    """
    order = list[str]()
    forms = list[OutputForm]()
    inside = list[str]()
    why = list[str]()
    before = {
        path: part._compiled_call_impl or part._call_impl
        for path, part in parts.items()
    }

    def noted(
        path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tree:
        why.extend(f"{path!r} is called by {outer!r}" for outer in inside)
        inside.append(path)
        out = before[path](*args, **kwargs)
        inside.pop()
        order.append(path)
        try:
            forms.append(form_of(out))
        except BrokenChainError as error:
            why.append(f"{path!r} {error}")
        return out

    with intercepted(parts, noted):
        return run(), order, forms, next(iter(why), "")
