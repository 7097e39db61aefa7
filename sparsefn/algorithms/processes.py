"""Inits and updates of states that several processes hold: they fail together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import optree
import torch
from torch import Tensor

from sparsefn._engine.processes import (
    agreed,
    agreement,
    any_sharded,
    check_local_size,
    check_plain,
    full_tensors,
    groups_of,
    is_open,
    is_sharded,
    is_spread,
    local_tensor,
    redistributed,
    scope,
    tell,
    words_of,
)
from sparsefn._engine.torch_limits import differentiating
from sparsefn.core.checks import check_step
from sparsefn.core.state import State, Step, TrainView
from sparsefn.core.tree import (
    Leaves,
    Tree,
    check_grads,
    flatten,
    leaves_of,
    opened,
    zipped,
)

InitFunction = Callable[[Tree], State]
Stepping = Callable[[State, Tree, Step], State]


def init_together(init: InitFunction) -> InitFunction:
    """An init that all processes of DTensors begin with the same leaves; an error of
    one is raised on all.
    """

    def beginning(params: Tree) -> State:
        leaves = [x for x in leaves_of(params) if isinstance(x, Tensor)]
        if not any_sharded(leaves) or is_open():
            return init(params)
        return agreed(
            {"call": "init"}, {"params": flatten(params)[0]}, lambda: init(params)
        )

    return beginning


def update_together(update: Stepping, state: State, grads: Tree, step: Step) -> State:
    """An update of DTensors, after its checks: where masks change, an error of one
    process is raised on all.

    A process whose gradients do not fit makes the step with zeros for them, up to the
    first agreement, where all processes raise. So it takes part wherever other
    processes wait for it, and sends nothing where they do not.
    """
    params = state.params
    fault = None
    groups = groups_of(leaves_of(params))
    try:
        with scope(groups):
            step = check_step(step)
            fault = _fault(grads, params)
            if fault is None:
                return update(state, laid_like_params(grads, params), step)
            if any(is_spread(*pair) for pair in _pairs(grads, params).values()):
                with agreement(groups):
                    raise fault
            with scope(groups, fault):
                update(state, optree.tree_map(torch.zeros_like, params), step)
    except Exception as error:
        tell(groups, fault or error)
    raise fault


def change_together(
    change: Callable[[State], State], state: State, step: Step
) -> State:
    """The changed state of DTensors, whose processes compare what they see first."""
    leaves = {"params": flatten(state.params)[0], "masks": flatten(state.masks)[0]}
    return agreed(
        {"call": "to change masks", "step": step}, leaves, lambda: change(state)
    )


def laid_like_params(grads: Tree, params: Tree) -> Tree:
    """Gradients laid out as params: they may be laid out otherwise, or be sums yet to
    be added.
    """
    if grads is None:
        return None
    rows, rebuild = zipped(grads, params)
    spread = [
        path
        for path, row in zip(flatten(params)[0], rows, strict=True)
        if is_spread(*row)
    ]
    if spread:
        given = {"grads": flatten(grads)[0], "params": flatten(params)[0]}
        why = (
            f"to redistribute grads: {spread[0]!r} is "
            f"{words_of(given['grads'][spread[0]])}"
        )
        grads = agreed(
            {"call": why},
            given,
            lambda: rebuild([redistributed(g, p) for g, p in rows]),
        )
        check_grads(grads, params)
    return grads


def derived_view(
    get: Callable[[State], Tree],
    put: Callable[[State, Tree], State],
    grads: Callable[[State, Tree, Step], Tree],
    support: Callable[[State], Tree],
) -> TrainView:
    """The view of a tree that params are made of, with gradients by derivatives."""

    def summed(state: State, given: Tree, step: Step) -> Tree:
        # The slope of a number that all parts of a DTensor share is their sum.
        slopes, rebuild = opened(pull(state, given, step))
        if not any_sharded(slopes):
            return rebuild(slopes)
        shared = [
            i
            for i, x in enumerate(leaves_of(get(state)))
            if is_sharded(slopes[i]) and not is_sharded(x)
        ]
        for i, slope in zip(
            shared, full_tensors([slopes[i] for i in shared]), strict=True
        ):
            slopes[i] = slope
        return rebuild(slopes)

    pull = differentiating(grads)
    return TrainView(get, put, summed, support)


def refuse_shards(what: str, leaves: Leaves, instead: str) -> None:
    """Raise ValueError for DTensors where a function reads whole leaves."""
    for path, leaf in leaves.items():
        check_plain(what, path, leaf, instead)


def _fault(grads: Tree, params: Tree) -> Exception | None:
    try:
        check_grads(grads, params, layout=False)
        for path, (grad, param) in _pairs(grads, params).items():
            if (
                not is_spread(grad, param)
                and local_tensor(grad).shape != local_tensor(param).shape
            ):
                check_local_size(path, grad, "grads: ")
                check_local_size(path, param, "params: ")
    except Exception as error:
        return error
    return None


def _pairs(grads: Tree, params: Tree) -> dict[str, tuple[Tree, Tensor]]:
    # The gradients that have a param; nothing else about them is checked.
    with suppress(Exception):
        given = flatten(grads)[0]
        return {
            path: (given[path], param)
            for path, param in flatten(params)[0].items()
            if path in given
        }
    return {}
