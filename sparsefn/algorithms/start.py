"""The first masks of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import optree
import torch
from torch import Tensor

from sparsefn._engine.draws import drawn_leaves
from sparsefn._engine.processes import laid_like
from sparsefn._engine.transforms import host_number
from sparsefn.algorithms.competition import Competition, Goal
from sparsefn.algorithms.memory import Scores
from sparsefn.algorithms.unit_table import full, unit_table
from sparsefn.core import random
from sparsefn.core.checks import check_call
from sparsefn.core.rounding import fraction_at
from sparsefn.core.state import Algorithm, Schedule, Where, check_masks, masks_tree
from sparsefn.core.tree import Leaves, Tree, flatten
from sparsefn.core.tree.originals import check_weights
from sparsefn.masks import checkerboard
from sparsefn.masks.budgets.counts import Counted

Named = Literal[
    "dense", "random", "bernoulli", "magnitude", "from_zeros", "checkerboard"
]
# A tree with leaves by name or by place, or one leaf: spelt out, so that a misspelt
# name is no tree to a type checker.
Given = Mapping[str, Tree] | list[Tree] | tuple[Tree, ...] | Tensor
Init = Named | Algorithm | Callable[[Tree], Tree] | Given


def check_given(masks: Tree) -> None:
    """Raise for a masks tree that would prune a whole leaf by one entry."""
    for path, mask in flatten(masks)[0].items():
        if isinstance(mask, Tensor) and mask.ndim == 0 and host_number(mask) is False:
            raise ValueError(
                f"expected a mask of full shape or 0-d True, got 0-d False at {path!r}"
            )


def own_masks(masks: Tree, params: Tree) -> Tree:
    """Given masks as tensors of their own, where and as the params lie. Raises for
    masks that do not fit them.

    A 0-d mask of a leaf that params lack is left out: the leaf is dense, and not
    trained here.
    """
    check_given(masks)
    given = flatten(masks)[0]
    leaves, rebuild = flatten(params)
    if set(leaves) < set(given):
        used = {
            path: mask
            for path, mask in given.items()
            if path in leaves or not isinstance(mask, Tensor) or mask.ndim
        }
        if len(used) < len(given):
            own = own_masks(used, leaves)
            return rebuild([own[path] for path in leaves])
    check_masks(masks, params)
    check_weights("masks", [path for path, mask in given.items() if mask.ndim], leaves)
    made: Tree = optree.tree_map(
        lambda mask, param: laid_like(mask, param).clone(), masks, params
    )
    return made


def start_masks(
    params: Tree,
    rule: Competition,
    where: Where,
    init: Init,
    goal: Goal,
    key: Tensor,
    allowed: Leaves | None,
) -> Tree:
    """The initial masks tree that `init` asks for, among what is allowed."""
    leaves = rule.pattern.leaves_in(params, where)
    # which refuses a budget that cannot be met
    units = unit_table(rule, leaves, None, allowed, goal)
    level = None if isinstance(goal, Counted) else goal
    if isinstance(init, Algorithm):
        init = init.init(params).masks
    elif callable(init):
        check_call("init", init, "params")
        init = init(params)
    if not isinstance(init, str):
        given = own_masks(init, params)
        rule.pattern.check_masks(flatten(given)[0], leaves)
        if allowed is None:
            return given
        return optree.tree_map(torch.logical_and, given, masks_tree(params, allowed))
    # the pattern may know how many
    best_of = ("random", "magnitude") if rule.pattern.fixed is None else ()
    if (
        init in ("bernoulli", "checkerboard", *best_of)
        and level is None
        and not (goal and init == "magnitude")
    ):
        raise ValueError(
            f"init={init!r} needs a sparsity, got {goal!r}; init may be an algorithm "
            "that has one"
        )
    if init == "dense":
        masks = full({}, leaves)
    elif init == "from_zeros":
        masks = {path: leaf != 0 for path, leaf in leaves.items()}
    elif init == "checkerboard":
        masks = _checkerboards(leaves, level)
    elif init == "bernoulli":
        if rule.pattern.fixed is not None:
            raise ValueError(
                "init='bernoulli' needs a pattern that leaves the count open, got "
                f"{rule.pattern}"
            )
        flags = units.coins(fraction_at(level, 0), random.fold_in(key, "init"))  # type: ignore[arg-type]
        masks = units.masks_of(flags, Scores(leaves, absolute=True))
    elif init in ("random", "magnitude"):
        if init == "magnitude":
            scores = {path: leaf.detach().abs() for path, leaf in leaves.items()}
        else:
            scores = drawn_leaves(
                random.fold_in(key, "init"), leaves, None, "uniform", torch.float32
            )
        return masks_tree(params, units.best_masks(Scores(scores)))
    else:
        known = (
            "'dense', 'random', 'bernoulli', 'magnitude', 'from_zeros', "
            "'checkerboard', an algorithm, a function of params or a masks tree"
        )
        raise ValueError(f"expected init to be {known}, got {init!r}")
    if init in ("from_zeros", "checkerboard"):
        rule.pattern.check_masks(masks, leaves)
    return masks_tree(
        params,
        {
            p: m & allowed[p] if allowed and p in allowed else m
            for p, m in masks.items()
        },
    )


def _checkerboards(leaves: Leaves, level: Schedule | None) -> Leaves:
    assert level is not None
    sparsity = fraction_at(level, 0)
    if isinstance(sparsity, Tensor):
        raise TypeError("init='checkerboard' needs a float sparsity, got a tensor")
    made: Leaves = {}
    for path, leaf in leaves.items():
        board = checkerboard(leaf.shape, sparsity, device=leaf.device)
        made[path] = laid_like(board, leaf)
    return made
