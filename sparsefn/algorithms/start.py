"""The first masks of an algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import optree
import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.competition import Competition, full, paths_of
from sparsefn.algorithms.wanted import Goal, best_at
from sparsefn.counts import Counted
from sparsefn.engine.checks import check_call
from sparsefn.engine.leaf_draws import drawn_leaves
from sparsefn.engine.memory import brought, on
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import fraction_at
from sparsefn.engine.shards import is_sharded, laid_out, part
from sparsefn.engine.transforms import concrete
from sparsefn.masks import checkerboard, from_zeros
from sparsefn.patterns.seated import unit_places
from sparsefn.patterns.tied import check_whole
from sparsefn.state import Algorithm, Schedule, Where, check_masks, masks_tree
from sparsefn.tree import Leaves, Tree, flatten, leaves_at

Named = Literal["dense", "random", "bernoulli", "magnitude", "from_zeros", "checkerboard"]
# A tree with leaves by name or by place, or one leaf: spelt out, so that a misspelt name is no tree to a type checker.
Given = Mapping[str, Tree] | list[Tree] | tuple[Tree, ...] | Tensor
Init = Named | Algorithm | Callable[[Tree], Tree] | Given


def check_given(masks: Tree) -> None:
    """Raise for a masks tree that would prune a whole leaf by one entry."""
    for path, mask in flatten(masks)[0].items():
        if isinstance(mask, Tensor) and mask.ndim == 0 and concrete(mask) is False:
            raise ValueError(f"expected a mask of full shape or 0-d True, got 0-d False at {path!r}")


def own_masks(masks: Tree, params: Tree) -> Tree:
    """Given masks as tensors of their own, where and as the params lie. Raises for masks that do not fit them."""
    check_given(masks)
    check_masks(masks, params)

    def own(mask: Tensor, param: Tensor) -> Tensor:
        whole = mask.ndim and not is_sharded(mask)
        mask = mask.to(param.device)
        return (part(mask, param) if whole else laid_out(mask, param)).clone()

    made: Tree = optree.tree_map(own, masks, params)
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
    leaves = rule.select(params, where)
    pools = rule.pools(leaves)
    level = None if isinstance(goal, Counted) else goal
    if level is not None:
        rule.targets(pools, fraction_at(level, 0))  # a budget that cannot be met is refused here
    if isinstance(init, Algorithm):
        init = init.init(params).masks
    elif callable(init):
        check_call("init", init, "params")
        init = init(params)
    if not isinstance(init, str):
        given = own_masks(init, params)
        if rule.pattern.members:
            check_whole(rule.pattern, flatten(given)[0], leaves)
        if allowed is None:
            return given
        return optree.tree_map(torch.logical_and, given, masks_tree(params, allowed))
    best_of = ("random", "magnitude") if rule.pattern.fixed is None else ()  # the pattern may know how many
    if init in ("bernoulli", "checkerboard", *best_of) and level is None and not (goal and init == "magnitude"):
        raise ValueError(f"init={init!r} needs a sparsity, got {goal!r}; init may be an algorithm that has one")
    if init == "dense":
        masks = full({}, leaves, list(leaves))
    elif init == "from_zeros":
        masks = leaves_at(from_zeros(params, where=lambda path, leaf: path in leaves), leaves)
    elif init == "checkerboard":
        masks = _checkerboards(leaves, level)
    elif init == "bernoulli":
        masks = _drawn(leaves, rule, fraction_at(level, 0), random.fold_in(key, "init"))  # type: ignore[arg-type]
    elif init in ("random", "magnitude"):
        if init == "magnitude":
            scores = {path: leaf.detach().abs() for path, leaf in leaves.items()}
        else:
            scores = drawn_leaves(random.fold_in(key, "init"), leaves, None, "uniform", torch.float32)
        return masks_tree(params, best_at(rule, scores, leaves, goal, allowed, 0))
    else:
        known = (
            "'dense', 'random', 'bernoulli', 'magnitude', 'from_zeros', 'checkerboard', an algorithm, a function of "
            "params or a masks tree"
        )
        raise ValueError(f"expected init to be {known}, got {init!r}")
    if rule.pattern.members and init in ("from_zeros", "checkerboard"):
        check_whole(rule.pattern, masks, leaves)
    return masks_tree(params, {p: m & allowed[p] if allowed and p in allowed else m for p, m in masks.items()})


def _checkerboards(leaves: Leaves, level: Schedule | None) -> Leaves:
    assert level is not None
    sparsity = fraction_at(level, 0)
    if isinstance(sparsity, Tensor):
        raise TypeError("init='checkerboard' needs a float sparsity, got a tensor")
    return {path: part(checkerboard(leaf.shape, sparsity, device=leaf.device), leaf) for path, leaf in leaves.items()}


def _drawn(leaves: Leaves, rule: Competition, sparsity: Real, key: Tensor) -> Leaves:
    # Each unit is kept with a chance of its own: the share of its competition that the budget keeps.
    if rule.pattern.fixed is not None:
        raise ValueError(f"init='bernoulli' needs a pattern that leaves the count open, got {rule.pattern}")
    masks: Leaves = {}
    pools = rule.pools(leaves)
    whole = [{path: units.of_all for path, units in pool.items()} for pool in pools]
    for pool, count in zip(pools, rule.targets(whole, sparsity), strict=True):
        size = sum(math.prod(units.of_all.rows) for units in pool.values())
        for path, units in pool.items():
            leaf = leaves[path]
            total = on(count, leaf.device)
            total = total.sum() if total.ndim else total * (1 if rule.joint else units.of_all.rows[0])
            chance, own = total.double() / max(size, 1), brought(random.leaf_key(key, path), leaf.device)
            scores = {at: leaves[at].detach().abs() for at in paths_of({path: units})}
            places = None if units.seat is None else unit_places(units).to(leaf.device)
            rows = random.bernoulli(own, chance, units.rows, index=places)
            masks |= rule.masks([{path: units}], [rows], scores)
    return masks
