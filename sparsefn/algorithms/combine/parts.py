"""The states of several algorithms as parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from sparsefn.core.checks import uncalled
from sparsefn.core.state import (
    Algorithm,
    State,
    has_optimizer,
    has_own_support,
    masked_view,
    support_of,
)
from sparsefn.core.tree import Tree, flatten
from sparsefn.masks import intersect


def joined_support(parts: Sequence[State]) -> Tree:
    """The common support of several states, if one of them has its own, else `()`.

    >>> joined_support([sf.dense().init({"w": torch.ones(1)})])
    ()
    """
    if any(map(has_own_support, parts)):
        return reduce(intersect, (support_of(part) for part in parts))
    return ()


def check_algorithm(name: str, algorithm: object, at: str = "") -> None:
    """Raise for anything but an Algorithm; the error may say at which place it is.

    >>> check_algorithm("donated", sf.dense())
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"{name}: expected an Algorithm{at}, got "
            f"{uncalled(algorithm) or type(algorithm).__name__}"
        )


def check_trained(name: str, algorithms: Sequence[Algorithm]) -> None:
    """Raise unless every algorithm trains params; one with latents goes outermost.

    >>> check_trained("chain", [sf.dense()])
    """
    if not algorithms:
        raise ValueError(f"{name}: expected at least one algorithm, got none")
    for i, algorithm in enumerate(algorithms):
        check_algorithm(name, algorithm, f" at position {i}")
        if algorithm.view is not masked_view:
            raise ValueError(
                f"{name}: the algorithm at position {i} has a view of its own "
                "(latents or terms); put that outermost: reparametrised(..., "
                f"inner={name}(...)) or with_terms({name}(...), ...)"
            )


def no_optimizer(name: str, states: Sequence[State]) -> None:
    """Raise for a part that has an optimizer.

    >>> no_optimizer("chain", [sf.dense().init({"w": torch.ones(1)})])
    """
    for i, state in enumerate(states):
        if has_optimizer(state):
            raise ValueError(
                f"{name}: the algorithm at position {i} has an optimizer; put "
                "with_optimizer outermost"
            )


# Made once: a step that changes nothing does no tensor work.
_TRUE = torch.ones((), dtype=torch.bool, device="cpu")


def _true(device: torch.device) -> torch.Tensor:
    return (
        _TRUE
        if device.type == "cpu"
        else torch.ones((), dtype=torch.bool, device=device)
    )  # a copy would wait


def with_own_paths(state: State) -> State:
    """The state as stored in `parts`: `params` and `opt` empty, `masks` a dict keyed by
    the paths that this part sparsifies.

    >>> with_own_paths(
    ...     sf.static(0.5).init({"w": torch.ones(2, 2), "b": torch.ones(2)})
    ... ).masks
    {'w': ()}
    """
    own: dict[str, Tree] = {
        path: () for path, mask in flatten(state.masks)[0].items() if mask.ndim
    }
    return state._replace(params=(), masks=own, opt=())


def with_own_masks(part: State, params: Tree, masks: Tree, opt: Tree) -> State:
    """The state of such a part, which sees only the masks that are its own.

    >>> state = sf.static(0.5).init({"w": torch.ones(2, 2)})
    >>> with_own_masks(
    ...     with_own_paths(state)._replace(masks={}), state.params, state.masks, ()
    ... ).masks
    {'w': tensor(True)}
    """
    leaves, rebuild = flatten(masks)
    seen = rebuild(
        [
            m if p in part.masks or not m.ndim else _true(m.device)
            for p, m in leaves.items()
        ]
    )
    return part._replace(params=params, masks=seen, opt=opt)
