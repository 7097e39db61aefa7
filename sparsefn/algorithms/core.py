"""What every mask algorithm shares: setting up, checking, writing back, remembering."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.memory import Memory
from sparsefn.algorithms.rule import Leaves, Rule, best
from sparsefn.engine.checks import Sparsity, check_call, check_sparsity, check_step, check_trigger
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.threefry import lifted
from sparsefn.engine.transforms import concrete
from sparsefn.masks import checkerboard, from_zeros
from sparsefn.tree import Tree, check_like, choose, copied, fix_sizes, flatten, leaves_at, none_paths, same_structure
from sparsefn.types import (
    Algorithm,
    Schedule,
    State,
    Step,
    Trigger,
    Where,
    apply_masks,
    check_masks,
    everywhere,
)
from sparsefn.where import float_leaves, select_leaves

Pruned = str
Init = str | Algorithm | Callable[[Tree], Tree] | Tree


# ---- sparsity and its value at a step -----------------------------------------------------------


def as_level(sparsity: Any, what: str = "sparsity") -> Schedule | None:
    """A checked float, 0-d tensor or Schedule as a Schedule; None stays None."""
    if sparsity is None:
        return None
    if callable(sparsity):
        check_call(what, sparsity, "step")
        schedule: Schedule = sparsity
        return schedule
    value = check_sparsity(sparsity, what)
    return lambda step: value


def level_at(level: Schedule, step: Step) -> Sparsity:
    """The sparsity at a step; a schedule that leaves [0, 1] is clamped to it, and NaN in a tensor is 0."""
    value = level(step)
    if isinstance(value, Tensor):
        return value.nan_to_num(0.0).clamp(0.0, 1.0)
    if not isinstance(value, int | float | Real):
        raise TypeError(f"expected a sparsity schedule to give numbers, got {type(value).__name__} at step {step}")
    if value != value:
        raise ValueError(f"expected a sparsity schedule to give numbers, got {value} at step {step}")
    return float(min(max(value, 0.0), 1.0))


# ---- states -------------------------------------------------------------------------------------


def own_params(params: Tree) -> Tree:
    """Copies of params, checked."""
    float_leaves(params)
    return copied(params)


def check_pruned(pruned: str) -> None:
    """Raise for a value of `pruned` that does not exist."""
    if pruned not in ("zero", "keep", "train"):
        raise ValueError(f"expected pruned to be 'zero', 'keep' or 'train', got {pruned!r}")


def check_update(state: State, grads: Tree, step: Step) -> Step:
    """Checks at the start of every update, on structure alone; returns the step."""
    if not isinstance(state, State):
        raise TypeError(f"expected state to be a State from init, got {type(state).__name__}")
    if grads is not None:
        _check_grads(grads, state.params)
    fix_sizes((state, grads))
    return check_step(step)


def _check_grads(grads: Tree, params: Tree) -> None:
    if not same_structure(grads, params):
        for path in none_paths(grads):
            raise ValueError(
                f"expected a gradient for every param, got None at {path!r}: a frozen param, or one that the loss does "
                "not use, has none; give zeros, or leave it out of params"
            )
    check_like("grads", grads, params)


def sparse_leaves(state: State) -> tuple[Leaves, Leaves]:
    """Params and masks of the sparsified leaves, by path."""
    params, masks = flatten(state.params)[0], flatten(state.masks)[0]
    chosen = [path for path in params if is_sparse(masks[path], params[path])]
    return {path: params[path] for path in chosen}, {path: masks[path] for path in chosen}


def masks_tree(params: Tree, masks: Leaves) -> Tree:
    """The masks of some leaves as a tree like params, 0-d True for the rest."""
    leaves, rebuild = flatten(params)
    return rebuild(
        [masks[p] if p in masks else torch.ones((), dtype=torch.bool, device=x.device) for p, x in leaves.items()]
    )


def check_given(masks: Tree) -> None:
    """Raise for a masks tree that would prune a whole leaf by one entry."""
    for path, mask in flatten(masks)[0].items():
        if isinstance(mask, Tensor) and mask.ndim == 0 and concrete(mask) is False:
            raise ValueError(f"expected a mask of full shape or 0-d True, got 0-d False at {path!r}")


def start_masks(
    params: Tree, rule: Rule, where: Where, init: Init, level: Schedule | None, key: Tensor, allowed: Leaves | None
) -> Tree:
    """The initial masks tree that `init` asks for, among what is allowed."""
    leaves = select_leaves(params, where)
    rule.grids(leaves)
    if level is not None:
        rule.targets(leaves, level_at(level, 0))  # a budget that cannot be met is refused here
    if isinstance(init, Algorithm):
        init = init.init(params).masks
    elif callable(init):
        check_call("init", init, "params")
        init = init(params)
    if not isinstance(init, str):
        check_given(init)
        check_masks(init, params)
        if allowed is None:
            return optree.tree_map(torch.clone, init)
        return optree.tree_map(torch.logical_and, init, masks_tree(params, allowed))
    best_of = ("random", "magnitude") if rule.pattern.fixed is None else ()  # the pattern may know how many
    if init in ("bernoulli", "checkerboard", *best_of) and level is None:
        raise ValueError(f"init={init!r} needs a sparsity, got None; init may be an algorithm that has one")
    if init == "dense":
        masks = {path: torch.ones_like(leaf, dtype=torch.bool) for path, leaf in leaves.items()}
    elif init == "from_zeros":
        masks = leaves_at(from_zeros(params, where=lambda path, leaf: path in leaves), leaves)
    elif init == "checkerboard":
        masks = _checkerboards(leaves, level)
    elif init == "bernoulli":
        masks = _drawn(leaves, rule, level_at(level, 0), random.fold_in(key, "init"))  # type: ignore[arg-type]
    elif init in ("random", "magnitude"):
        draws = random.fold_in(key, "init")
        scores = {
            path: leaf.detach().abs()
            if init == "magnitude"
            else random.uniform(random.leaf_key(draws.to(leaf.device), path), leaf.shape)
            for path, leaf in leaves.items()
        }
        sparsity = None if level is None else level_at(level, 0)
        return masks_tree(params, best(rule, scores, leaves, sparsity, allowed))
    else:
        known = (
            "'dense', 'random', 'bernoulli', 'magnitude', 'from_zeros', 'checkerboard', an algorithm, a function of "
            "params or a masks tree"
        )
        raise ValueError(f"expected init to be {known}, got {init!r}")
    return masks_tree(params, {p: m & allowed[p] if allowed and p in allowed else m for p, m in masks.items()})


def _checkerboards(leaves: Leaves, level: Schedule | None) -> Leaves:
    assert level is not None
    sparsity = level_at(level, 0)
    if isinstance(sparsity, Tensor):
        raise TypeError("init='checkerboard' needs a float sparsity, got a tensor")
    return {path: checkerboard(leaf.shape, sparsity, device=leaf.device) for path, leaf in leaves.items()}


def _drawn(leaves: Leaves, rule: Rule, sparsity: Sparsity, key: Tensor) -> Leaves:
    # Each unit is kept with a chance of its own: the share of its competition that the budget keeps.
    if rule.pattern.fixed is not None:
        raise ValueError(f"init='bernoulli' needs a pattern that leaves the count open, got {rule.pattern}")
    masks: Leaves = {}
    for field, count in zip(rule.fields(leaves), rule.targets(leaves, sparsity), strict=True):
        size = sum(math.prod(rule.row_shape(leaves[path])) for path in field)
        for path in field:
            leaf, shape = leaves[path], rule.row_shape(leaves[path])
            total = torch.as_tensor(count, device=leaf.device)
            total = total.sum() if total.ndim else total * (1 if rule.joint else shape[0])
            chance, own = total.double() / max(size, 1), random.leaf_key(key.to(leaf.device), path)
            masks |= rule.masks([path], random.bernoulli(own, chance, shape), {path: leaf.detach().abs()})
    return masks


def narrowed(allowed: Leaves | None, masks: Tree) -> Leaves:
    """What both an earlier restriction and these masks allow.

    >>> narrowed(None, {"w": torch.tensor([True, False]), "b": torch.tensor(True)})
    {'w': tensor([ True, False])}
    """
    new = {path: mask for path, mask in flatten(masks)[0].items() if mask.ndim}
    return new if allowed is None else new | {p: m & new[p] if p in new else m for p, m in allowed.items()}


def settle(state: State, masks: Leaves, pruned: Pruned) -> State:
    """The state with new masks; weights off them are zeroed unless they are kept or trained."""
    tree = masks_tree(state.params, masks)
    params = apply_masks(state.params, tree) if pruned == "zero" else state.params
    return state._replace(params=params, masks=tree)


# ---- the frame of every algorithm that starts from masks ----------------------------------------

# (what may be kept, state, grads, step) -> state: what is done when the trigger fires
Rewrite = Callable[[Leaves | None, State, Tree, Step], State]


def masked(
    rule: Rule,
    memory: Memory,
    rewrite: Rewrite,
    *,
    level: Schedule | None,
    init: Init,
    where: Where,
    key: Tensor | None,
    when: Trigger,
) -> Algorithm:
    """The algorithm that makes masks in `init`, remembers at every step and rewrites masks at a trigger."""
    check_pruned(memory.pruned)
    check_trigger("when", when)
    seed = random.key(0) if key is None else key

    def build(allowed: Leaves | None) -> Algorithm:
        def start(params: Tree) -> State:
            params = own_params(params)
            masks = start_masks(params, rule, where, init, level, seed, allowed)
            kept = apply_masks(params, masks) if memory.pruned == "zero" else params
            support = everywhere(params) if memory.pruned == "train" else ()
            return State(kept, masks, memory.init(params), lifted(seed).clone(), support=support)

        def update(state: State, grads: Tree, step: Step) -> State:
            step = check_update(state, grads, step)
            state = memory.accumulate(state, grads, step)
            return choose(when(step), lambda now: rewrite(allowed, now, grads, step), state)  # type: ignore[no-any-return]

        return Algorithm(start, update, within=lambda masks: build(narrowed(allowed, masks)))

    return build(None)
