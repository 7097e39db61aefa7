"""Shared by every mask algorithm: set-up, checks, scores with memory, and new masks in a state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.memory import Memory, Pruned
from sparsefn.algorithms.processes import Update, begun, check_grads, moved, shared
from sparsefn.algorithms.start import Init, start_masks
from sparsefn.algorithms.wanted import Goal
from sparsefn.engine.checks import check_step, check_trigger
from sparsefn.engine.leafwise import sparse_among
from sparsefn.engine.mask_bytes import from_bytes
from sparsefn.engine.promises import own_code, promised, promising
from sparsefn.engine.shards import agreed, any_sharded, check_bare, check_shards
from sparsefn.engine.threefry import lifted
from sparsefn.engine.transforms import transformed
from sparsefn.state import Algorithm, State, Step, Trigger, Where, apply_masks, everywhere, inside
from sparsefn.tree import (
    Leaves,
    Tree,
    choose,
    copied,
    fix_sizes,
    flatten,
    leaves_of,
    opened,
    with_leaves,
)
from sparsefn.where import float_leaves

# ---- states -------------------------------------------------------------------------------------


def own_params(params: Tree) -> Tree:
    """Copies of params, checked."""
    leaves = float_leaves(params)
    for path, leaf in leaves.items():
        check_shards(path, leaf)
    return copied(params)


def check_pruned(pruned: str) -> None:
    """Raise for a value of `pruned` that does not exist."""
    if pruned not in ("zero", "keep", "train"):
        raise ValueError(f"expected pruned to be 'zero', 'keep' or 'train', got {pruned!r}")


def check_update(state: State, grads: Tree, step: Step) -> tuple[Tree, Step]:
    """Checks at the start of every update, on structure alone; returns the step, and grads laid out as params."""
    if not isinstance(state, State):
        raise TypeError(f"expected state to be a State from init, got {type(state).__name__}")
    if transformed():
        for path, leaf in flatten(state.params)[0].items():
            check_bare(path, leaf)
    sharded = torch.compiler.is_compiling() and any_sharded(leaves_of(state.params))  # else `shared` checks
    check_grads(grads, state.params, layout=not sharded)
    if sharded:
        grads = moved(grads, state.params)
    fix_sizes((state, grads))
    return grads, check_step(step)


def checked(update: Update) -> Update:
    """An update that checks its arguments first, and hands them on as `check_update` gives them."""

    def checking(state: State, grads: Tree, step: Step) -> State:
        if isinstance(state, State) and not torch.compiler.is_compiling() and any_sharded(leaves_of(state.params)):
            return shared(update, state, grads, step)
        return update(state, *check_update(state, grads, step))

    return promising(own_code(checking), unchecked=update)


def unchecked(algorithm: Algorithm) -> Update:
    """The update of an algorithm for arguments that an algorithm around it has checked."""
    return promised(algorithm.update, "unchecked") or algorithm.update


def spends(algorithm: Algorithm) -> bool:
    """Whether weights may be offered to the update: it sets them last, and those on the new support stay."""
    return promised(algorithm.update, "spends") is True


def reading_bytes(update: Update) -> Update:
    """The update; compiled, it reads the bytes of masks and support, and returns masks that it leaves as given."""

    def reading(state: State, grads: Tree, step: Step) -> State:
        old, rebuild = opened((state.masks, state.support))
        seen = from_bytes(old)
        if all(x is y for x, y in zip(seen, old, strict=True)):
            return update(state, grads, step)
        masks, support = rebuild(seen)
        new = update(state._replace(masks=masks, support=support), grads, step)
        leaves, rebuild = opened((new.masks, new.support))
        masks, support = rebuild([x if y is z else y for x, y, z in zip(old, leaves, seen, strict=True)])
        return new._replace(masks=masks, support=support)

    return reading


def sparse_leaves(state: State) -> tuple[Leaves, Leaves]:
    """Params and masks of the sparsified leaves, by path."""
    params, masks = flatten(state.params)[0], leaves_of(state.masks)
    rows = zip(sparse_among(masks, list(params.values())), params.items(), masks, strict=True)
    chosen = [(path, leaf, mask) for sparse, (path, leaf), mask in rows if sparse]
    return {path: leaf for path, leaf, _ in chosen}, {path: mask for path, _, mask in chosen}


def allowed_within(allowed: Leaves | None, masks: Tree) -> Leaves:
    """What both an earlier restriction and these masks allow.

    >>> allowed_within(None, {"w": torch.tensor([True, False]), "b": torch.tensor(True)})
    {'w': tensor([ True, False])}
    """
    new = {path: mask for path, mask in flatten(masks)[0].items() if mask.ndim}
    return new if allowed is None else new | {p: m & new[p] if p in new else m for p, m in allowed.items()}


def with_masks(state: State, masks: Leaves, pruned: Pruned, spent: bool = False) -> State:
    """The state with other masks of some leaves; weights off them are zeroed unless they are kept or trained.

    With `spent`, weights that were offered are zeroed in their own memory.
    """
    tree = with_leaves(state.masks, masks)
    return state._replace(
        params=inside(tree, state.params, spent=spent) if pruned == "zero" else state.params, masks=tree
    )


# ---- the frame of every algorithm that starts from masks ----------------------------------------

# (what may be kept, state, grads, step) -> state: what is done when the trigger fires
Rewrite = Callable[[Leaves | None, State, Tree, Step], State]


def build_masked(
    rule: Competition,
    memory: Memory,
    rewrite: Rewrite,
    *,
    goal: Goal,
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
        @begun
        def start(params: Tree) -> State:
            params = own_params(params)
            masks = start_masks(params, rule, where, init, goal, seed, allowed)
            kept = apply_masks(params, masks) if memory.pruned == "zero" else params
            support = everywhere(params) if memory.pruned == "train" else ()
            return State(kept, masks, memory.init(params), lifted(seed).clone(), support=support)

        @checked
        def update(state: State, grads: Tree, step: Step) -> State:
            def changed(now: State) -> State:
                return agreed(leaves_of(now.params), lambda: rewrite(allowed, now, grads, step))

            return choose(when(step), changed, memory.accumulate(state, grads, step))  # type: ignore[no-any-return]

        promising(update, spends=True)
        return Algorithm(start, update, within=lambda masks: build(allowed_within(allowed, masks)))

    return build(None)
