"""What scores are besides functions: absolute values, of units, of inputs, drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn.core.checks import Made
from sparsefn.core.state import Accumulated, State, Step
from sparsefn.core.tree import Leaves, Tree, flatten
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.patterns.tied_sets import TiedPattern


def plain(score: object) -> Callable[..., Tree]:
    if isinstance(score, Accumulated) or not callable(score):
        raise TypeError(
            "expected a score function of (state, grads, step), got "
            f"{type(score).__name__}"
        )
    return score


class Function(Made):
    """A score that is a function, and has another way to be read besides."""

    def __init__(self, fn: Callable[..., Tree]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __call__(self, *args: Tree) -> Tree:
        """The values."""
        return self.fn(*args)

    def __repr__(self) -> str:
        known = self.made_by or self.__qualname__  # type: ignore[attr-defined]
        return str(known)

    def __reduce__(self) -> Any:
        return self.__qualname__  # type: ignore[attr-defined]


class Absolute(Function):
    """The absolute value of a score, `signed`, which selection compares without taking
    it; `keyed` if it may draw.
    """

    def __init__(self, signed: Callable[..., Tree], keyed: bool = True) -> None:
        super().__init__(signed)
        self.signed = signed
        self.keyed = keyed

    def __call__(self, *args: Tree) -> Tree:
        """The absolute values."""
        return optree.tree_map(torch.abs, self.signed(*args))


class OfUnits(Function):
    """A score of the units of a pattern of tied sets: its values are {name of the set:
    (units,)}.
    """

    def __init__(self, pattern: TiedPattern, fn: Callable[..., Tree]) -> None:
        super().__init__(fn)
        self.pattern = pattern


class OfInputs(Function):
    """A score that reads what weights are multiplied by: `check(pattern, path, leaf)`
    raises for other rows.
    """

    def __init__(
        self, check: Callable[[Pattern, str, Tensor], None], fn: Callable[..., Tree]
    ) -> None:
        super().__init__(fn)
        self.check = check


class Drawn(Function):
    """A score drawn leaf by leaf: `draw(leaves, state, step)` is of some leaves."""

    def __init__(
        self, draw: Callable[[Leaves, State, Step], Leaves], fn: Callable[..., Tree]
    ) -> None:
        super().__init__(fn)
        self.draw = draw

    def __call__(self, state: State, grads: Tree, step: Step) -> Tree:
        """The scores of all leaves."""
        leaves, rebuild = flatten(state.params)
        return rebuild(list(self.draw(leaves, state, step).values()))
