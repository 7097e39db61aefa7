"""Calls and outputs of parts of a model, with their tensors in memory or elsewhere."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.modules.calls import Call
from sparsefn.tree import Tree

Keep = Callable[[Tensor], "KeptTensor"]
_PLAIN = (bool, int, float, complex, str, bytes)


class BrokenChainError(Exception):
    """The parts of a model cannot be run one by one; says why."""


class CalledAgainError(BrokenChainError):
    """The model runs one of its parts several times, with the same weights."""


class Touched(BaseException):
    """Something was done with a `Marker`; no model catches it."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot)
        self.slot = slot


class Slot(NamedTuple):
    """A tensor that a part returns: the number of the part's call, and that of the
    leaf.
    """

    number: int
    leaf: int


class OutputForm(NamedTuple):
    """What a part returns, without the tensors in it."""

    tree: Any
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is kept somewhere, and how to read it."""

    read: Callable[[], Tensor]


class Stowed(NamedTuple):
    """A tree whose tensors are kept, or are outputs of parts."""

    tree: Any
    leaves: list[Any]

    def slots(self) -> list[Slot]:
        """The outputs of parts in it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]

    def form(self) -> OutputForm:
        """The tree without its tensors."""
        return OutputForm(
            self.tree,
            tuple(
                None if isinstance(leaf, KeptTensor) else leaf for leaf in self.leaves
            ),
        )


class Marker(Tensor):
    """Stands for an output of a part that did not run.

    It can be handed on, and nothing else.
    """

    slot: Slot

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type,var-annotated]
        raise Touched(next(leaf.slot for leaf in leaves if isinstance(leaf, Marker)))


def in_memory(x: Tensor) -> KeptTensor:
    """Keep a tensor where it is.

    >>> in_memory(torch.ones(1)).read()
    tensor([1.])
    """
    return KeptTensor(lambda: x)


def form_of(out: Tree) -> OutputForm:
    """What a part returns, without the tensors.

    >>> (
    ...     form_of((torch.ones(1), None)) == form_of((torch.zeros(2), None)),
    ...     form_of(torch.ones(1)) == form_of([1]),
    ... )
    (True, False)

    Raises BrokenChainError for objects that may hide tensors.
    """
    leaves, tree = optree.tree_flatten(out)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise BrokenChainError(f"returns a {type(leaf).__name__}")
    return OutputForm(
        tree, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    )


def marked(form: OutputForm, number: int) -> Tree:
    """The outputs of the call of a number, with markers for tensors.

    >>> marked(form_of([1, torch.ones(1)]), 3)[1].__dict__["slot"]
    Slot(number=3, leaf=1)
    """
    leaves = list(form.leaves)
    for i, leaf in enumerate(leaves):
        if leaf is None:
            leaves[i] = torch.empty(0, device="cpu").as_subclass(Marker)
            leaves[i].__dict__["slot"] = Slot(number, i)
    return optree.tree_unflatten(form.tree, leaves)


def stow(
    tree: Tree, keep: Keep, memo: dict[int, tuple[Tensor, KeptTensor]] | None = None
) -> Stowed:
    """Keep the tensors of a tree; a tensor that is in `memo` already is not kept again.

    >>> unstow(stow({"x": torch.ones(1), "n": 2}, in_memory))
    {'x': tensor([1.]), 'n': 2}
    """
    memo = {} if memo is None else memo
    leaves, form = optree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Marker):
            leaves[i] = leaf.slot
        elif isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = (leaf, keep(leaf))
            leaves[i] = memo[id(leaf)][1]
    return Stowed(form, leaves)


def unstow(stowed: Stowed, outputs: Mapping[int, Stowed] | None = None) -> Tree:
    """The tree with its tensors. Other objects are copied, as caches of keys and values
    are, which a call changes.

    >>> out = stow(torch.ones(1), in_memory)
    >>> unstow(Stowed(out.tree, [Slot(3, 0)]), {3: out})
    tensor([1.])
    """
    known = outputs or {}
    leaves = [
        known[x.number].leaves[x.leaf] if isinstance(x, Slot) else x
        for x in stowed.leaves
    ]
    # One that is there twice is read once: attention asks whether its keys are its
    # queries.
    read: dict[int, Tensor] = {}
    for x in leaves:
        if isinstance(x, KeptTensor) and id(x) not in read:
            read[id(x)] = x.read()
    copies: dict[int, Any] = {}
    return optree.tree_unflatten(
        stowed.tree,
        [read[id(x)] if id(x) in read else _copied(x, copies) for x in leaves],
    )


def own_call(call: Call) -> Call:
    """A call with copies of its tensors and objects, as a model may write into what it
    is called with.

    >>> x = torch.ones(1)
    >>> args, _ = own_call(((x, [x]), {}))
    >>> args, args[0] is args[1][0], args[0] is x
    ((tensor([1.]), [tensor([1.])]), True, False)
    """
    copies: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copies.setdefault(id(leaf), leaf.detach().clone())
        with contextlib.suppress(BrokenChainError):
            return _copied(leaf, copies)
        return leaf

    return optree.tree_map(own, call)  # type: ignore[arg-type,return-value]


def _copied(leaf: Any, copies: dict[int, Any]) -> Any:
    if isinstance(leaf, nn.Module):
        return leaf
    try:
        return copy.deepcopy(leaf, copies)
    except (Touched, Exception):
        kind = type(leaf).__name__
        raise BrokenChainError(
            f"gets a {kind} that cannot be copied or holds outputs of others"
        ) from None
