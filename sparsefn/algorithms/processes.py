"""Inits and updates of states of which several processes hold parts: they begin alike, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import optree
import torch
from torch import Tensor

from sparsefn.engine.checks import check_step
from sparsefn.engine.processes import (
    agree,
    agreement,
    any_sharded,
    check_plain,
    group_of,
    groups_of,
    in_step,
    is_open,
    is_sharded,
    is_spread,
    laid_out,
    scope,
    tell,
    texts_of_all,
    whole,
)
from sparsefn.engine.surroundings import differentiating
from sparsefn.state import State, Step, TrainView, check_grads
from sparsefn.tree import Leaves, Tree, flatten, leaves_of, opened, zipped

Start = Callable[[Tree], State]
Stepping = Callable[[State, Tree, Step], State]


def begun(init: Start) -> Start:
    """An init that all processes of DTensors begin with the same leaves; an error of one is raised on all."""

    def beginning(params: Tree) -> State:
        leaves = [x for x in leaves_of(params) if isinstance(x, Tensor)]
        if not any_sharded(leaves) or is_open():
            return init(params)
        groups = groups_of(leaves)
        with agreement(groups):
            _check_alike(groups, params)
            return init(params)

    return beginning


def shared(update: Stepping, state: State, grads: Tree, step: Step) -> State:
    """An update of DTensors, after its checks: where masks change, an error of one process is raised on all.

    A process whose gradients do not fit makes the step with zeros for them, up to the first agreement, which tells the
    others. So it takes part wherever the others wait for it, and sends nothing where they do not.
    """
    params, fault = state.params, None
    groups = groups_of(leaves_of(params))
    try:
        with scope(groups):
            step, fault = check_step(step), _fault(grads, params)
            if fault is None:
                return update(state, laid_like_params(grads, params), step)
            if any(is_spread(*pair) for pair in _pairs(grads, params)):
                with agreement(groups):
                    raise fault
            with scope(groups, fault):
                update(state, optree.tree_map(torch.zeros_like, params), step)
    except Exception as error:
        tell(groups, fault or error)
    raise fault


def laid_like_params(grads: Tree, params: Tree) -> Tree:
    """Gradients laid out as params: they may be laid out otherwise, or be sums yet to be added."""
    if grads is None:
        return None
    rows, rebuild = zipped(grads, params)
    if any(is_spread(*row) for row in rows):
        with agreement(groups_of(leaves_of(params))):
            agree(())  # before torch's own messages
            grads = rebuild([laid_out(g, p) for g, p in rows])
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
        shared = [i for i, x in enumerate(leaves_of(get(state))) if is_sharded(slopes[i]) and not is_sharded(x)]
        for i, slope in zip(shared, whole([slopes[i] for i in shared]), strict=True):
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
    except Exception as error:
        return error
    return None


def _pairs(grads: Tree, params: Tree) -> list[tuple[Tree, Tensor]]:
    # The gradients that have a param, whatever else they are.
    with suppress(Exception):
        given = flatten(grads)[0]
        return [(given[path], param) for path, param in flatten(params)[0].items() if path in given]
    return []


def _check_alike(groups: tuple[str, ...], params: Tree) -> None:
    # Processes whose leaves differ would wait for each other, or take one leaf for another.
    words = "\n".join(f"{path}\t{_words(leaf)}" for path, leaf in flatten(params)[0].items())
    for name, told in zip(groups, in_step([((name,), texts_of_all(words)) for name in groups]), strict=True):
        texts = [dict(line.split("\t", 1) for line in text.splitlines()) for text in told]
        first, ranks = texts[0], torch.distributed.get_process_group_ranks(group_of(name))
        for rank, other in zip(ranks, texts, strict=True):
            for path in sorted({*first, *other}):
                if first.get(path) != other.get(path):
                    pair = ", and ".join(
                        f"rank {at} has {found.get(path, 'no leaf')} there"
                        for at, found in ((ranks[0], first), (rank, other))
                    )
                    raise ValueError(f"expected the same params on every rank, but not at {path!r}: {pair}")


def _words(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    laid = f" with placements {leaf.placements}" if is_sharded(leaf) else ""  # type: ignore[attr-defined]
    return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}{laid}"
