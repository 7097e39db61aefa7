"""Masks that never change: dense, static, from_masks."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.core import (
    Init,
    Memory,
    as_level,
    check_given,
    check_pruned,
    check_update,
    detached,
    narrowed,
    start_masks,
)
from sparsefn.algorithms.rule import Leaves, Rule
from sparsefn.budgets import Distribution, uniform
from sparsefn.patterns import Pattern, unstructured
from sparsefn.tree import Tree
from sparsefn.types import Algorithm, State, Step, Where, apply_masks, check_masks
from sparsefn.where import default_where


def _frozen(state: State, grads: Tree, step: Step) -> State:
    check_update(state, grads, step)
    return state


def dense() -> Algorithm:
    """Nothing is sparsified: the baseline, under the same loop.

    >>> sf.dense().init({"w": torch.ones(2, 2)}).masks
    {'w': tensor(True)}
    """

    def init(params: Tree) -> State:
        params = detached(params)
        return State(params, optree.tree_map(lambda p: torch.ones((), dtype=torch.bool, device=p.device), params))

    return Algorithm(init, _frozen)


def static(
    sparsity: Any,
    *,
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "random",
    pruned: str = "zero",
) -> Algorithm:
    """A mask made in `init` and kept for good.

    >>> algorithm = sf.static(0.75, key=sf.random.key(1))
    >>> state = algorithm.init({"w": torch.ones(4, 4), "b": torch.ones(4)})
    >>> int(state.masks["w"].sum()), state.masks["b"]
    (4, tensor(True))

    `sparsity` is a float, a Schedule (read at step 0), or a 0-d tensor; None where the pattern fixes it,
    and with `init="from_zeros"`, a function or a masks tree. `pruned="keep"` keeps the weights off the mask in
    `params`, frozen; "train" lets an optimizer move them.
    """
    check_pruned(pruned)
    rule, level = Rule(pattern, distribution).check(), as_level(sparsity)
    seed = random.key(0) if key is None else key
    memory = Memory({}, pruned)

    def build(allowed: Leaves | None) -> Algorithm:
        def start(params: Tree) -> State:
            params = detached(params)
            masks = start_masks(params, rule, where, init, level, seed, allowed)
            kept = apply_masks(params, masks) if pruned == "zero" else params
            return State(kept, masks, memory.init(params), seed)

        return Algorithm(start, _frozen, within=lambda masks: build(narrowed(allowed, masks)))

    return build(None)


def from_masks(masks: Tree) -> Algorithm:
    """Given masks, kept for good.

    >>> sf.from_masks({"w": torch.tensor([True, False])}).init({"w": torch.ones(2)}).params
    {'w': tensor([1., 0.])}

    `masks` has the structure of params: bool, each of its leaf's shape, or 0-d True for a dense leaf.
    """
    check_given(masks)

    def init(params: Tree) -> State:
        params = detached(params)
        check_masks(masks, params)
        return State(apply_masks(params, masks), masks)

    return Algorithm(init, _frozen)
