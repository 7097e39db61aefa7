"""A run of a model without some of its parts: what each of them would be called with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.calibration.inputs import without_fusion
from sparsefn.modules.calls import Call, call_with_buffers
from sparsefn.modules.params import buffers_of
from sparsefn.tree import Tree

Run = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Tree]
Keep = Callable[[Tensor], "Kept"]
_PLAIN = (bool, int, float, complex, str, bytes)


class BrokenChainError(Exception):
    """The parts of a model cannot be run one by one; says why."""


class NeededError(BrokenChainError):
    """The model does something else with the outputs of a part than pass them on: the number of its call."""

    def __init__(self, number: int) -> None:
        super().__init__("the model reads what it handed on before")
        self.number = number


class _Stop(BaseException):
    pass


class _Touched(BaseException):
    def __init__(self, slot: Slot) -> None:
        super().__init__(slot)
        self.slot = slot


class Slot(NamedTuple):
    """A tensor that a part returns: the number of the part's call, and that of the leaf."""

    number: int
    leaf: int


class Form(NamedTuple):
    """What a part returns, without the tensors in it."""

    tree: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept somewhere, and how to read it."""

    read: Callable[[], Tensor]


class Stowed(NamedTuple):
    """A tree whose tensors are kept, or are outputs of parts."""

    tree: Any
    leaves: list[Any]

    def slots(self) -> list[Slot]:
        """The outputs of parts in it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]

    def form(self) -> Form:
        """The tree without its tensors."""
        return Form(self.tree, tuple(None if isinstance(leaf, Kept) else leaf for leaf in self.leaves))


class _Marker(Tensor):
    # Stands for an output of a part that did not run. It can be handed on, and nothing else.
    slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type,var-annotated]
        raise _Touched(next(leaf.slot for leaf in leaves if isinstance(leaf, _Marker)))


def in_memory(x: Tensor) -> Kept:
    """Keep a tensor where it is.

    >>> in_memory(torch.ones(1)).read()
    tensor([1.])
    """
    return Kept(lambda: x)


def form_of(out: Tree) -> Form:
    """What a part returns, without the tensors.

    >>> form_of((torch.ones(1), None)) == form_of((torch.zeros(2), None)), form_of(torch.ones(1)) == form_of([1])
    (True, False)

    Raises BrokenChainError for objects that may hide tensors.
    """
    leaves, tree = optree.tree_flatten(out)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise BrokenChainError(f"returns a {type(leaf).__name__}")
    return Form(tree, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves))


def _marked(form: Form, number: int) -> Tree:
    leaves = list(form.leaves)
    for i, leaf in enumerate(leaves):
        if leaf is None:
            leaves[i] = torch.empty(0).as_subclass(_Marker)
            leaves[i].__dict__["slot"] = Slot(number, i)
    return optree.tree_unflatten(form.tree, leaves)


def stow(tree: Tree, keep: Keep, memo: dict[int, tuple[Tensor, Kept]] | None = None) -> Stowed:
    """A tree with its tensors kept; those that `memo` has seen are kept once.

    >>> unstow(stow({"x": torch.ones(1), "n": 2}, in_memory))
    {'n': 2, 'x': tensor([1.])}
    """
    memo = {} if memo is None else memo
    leaves, form = optree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, _Marker):
            leaves[i] = leaf.slot
        elif isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = (leaf, keep(leaf))
            leaves[i] = memo[id(leaf)][1]
    return Stowed(form, leaves)


def unstow(stowed: Stowed, outputs: Mapping[int, Stowed] | None = None) -> Tree:
    """The tree with its tensors. Other objects are copied, as caches of keys and values are, which a call changes.

    >>> out = stow(torch.ones(1), in_memory)
    >>> unstow(Stowed(out.tree, [Slot(3, 0)]), {3: out})
    tensor([1.])
    """
    read: dict[int, Tensor] = {}
    copies: dict[int, Any] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return value((outputs or {})[leaf.number].leaves[leaf.leaf])
        if isinstance(leaf, Kept):
            if id(leaf) not in read:
                read[id(leaf)] = leaf.read()
            return read[id(leaf)]
        if isinstance(leaf, nn.Module):
            return leaf
        try:
            return copy.deepcopy(leaf, copies)
        except (_Touched, Exception):
            kind = type(leaf).__name__
            raise BrokenChainError(f"gets a {kind} that cannot be copied or holds outputs of others") from None

    return optree.tree_unflatten(stowed.tree, [value(leaf) for leaf in stowed.leaves])


@contextlib.contextmanager
def intercepted(parts: Mapping[str, nn.Module], run: Run) -> Iterator[None]:
    """While it is entered, `run(path, part, args, kwargs)` takes the place of the calls of some parts of a model.

    >>> relu = torch.nn.ReLU()
    >>> with intercepted({"0": relu}, lambda path, part, args, kwargs: path):
    ...     relu(torch.ones(1))
    '0'

    A part is called so before its hooks, and whoever holds it; the attribute is the one that `Module.compile` sets.
    """
    name = "_compiled_call_impl"
    before = [(vars(part), name in vars(part), vars(part).get(name)) for part in parts.values()]
    try:
        for path, part in parts.items():
            vars(part)[name] = partial(_instead, run, path, part)
        yield
    finally:
        for own, had, value in before:
            own.pop(name, None)
            if had:
                own[name] = value


def _instead(run: Run, path: str, part: nn.Module, /, *args: Any, **kwargs: Any) -> Tree:
    return run(path, part, args, kwargs)


def catch(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    parts: Mapping[str, nn.Module],
    order: Sequence[str],
    forms: Sequence[Form],
    outputs: Mapping[int, Stowed],
    first: int,
    call: Call,
) -> list[Call]:
    """What the parts are called with from the call of a number on, as far as no value is needed that is not known.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> parts, form = {"0": model[0], "2": model[2]}, form_of(torch.ones(1))
    >>> weights, call = sf.modules.params_of(model), ((torch.ones(1, 2),), {})
    >>> catch(model, weights, parts, ["0", "2"], [form, form], {}, 0, call)  # ReLU wants the outputs of "0"
    [((tensor([[1., 1.]]),), {})]
    >>> catch(model, weights, parts, ["0", "2"], [form, form], {0: stow(-torch.ones(1, 3), in_memory)}, 1, call)
    [((tensor([[0., 0., 0.]]),), {})]

    `order` are the paths of the parts as the model calls them, and `forms` what they return. They do not run: where
    their `outputs` are known these are returned, else tensors that the model can only hand on. Raises NeededError
    where not even the first is reached so, BrokenChainError where the model calls the parts in another order.
    """
    found: list[Call] = []
    number = -1

    def run(path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
        nonlocal number
        number += 1
        if path != order[number]:
            raise BrokenChainError(f"{path!r} is called where {order[number]!r} was before")
        if number >= first:
            found.append((args, kwargs))
        if number == len(order) - 1:
            raise _Stop
        return unstow(outputs[number]) if number in outputs else _marked(forms[number], number)

    try:
        with torch.no_grad(), without_fusion(), intercepted(parts, run):
            call_with_buffers(module, weights, buffers_of(module), *call[0], **call[1])
    except _Stop:
        pass
    except _Touched as touched:
        if not found:
            raise NeededError(touched.slot.number) from None
    if not found:
        raise BrokenChainError(f"{order[first]!r} is not called every time")
    return found


def recorded(parts: Mapping[str, nn.Module], run: Callable[[], Tree]) -> tuple[Tree, list[str], list[Form], str]:
    """What a run of the model gives, the paths of some of its parts in the order of their calls, and what they return.

    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
    >>> recorded({"0": model[0], "1": model[1]}, lambda: model(torch.ones(1)))[:2]
    (tensor([1.]), ['0', '1'])

    The text at the end says why these cannot run one by one; it is empty where they may.
    """
    order, forms, inside, why = list[str](), list[Form](), list[str](), list[str]()
    before = {path: part._compiled_call_impl or part._call_impl for path, part in parts.items()}

    def noted(path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
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
