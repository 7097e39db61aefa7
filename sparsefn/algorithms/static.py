"""Masks that never change: dense, static, from_masks."""

from __future__ import annotations

from torch import Tensor

from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.frame import Decision, MaskRecipe, framed, own_params
from sparsefn.algorithms.memory import Memory, Pruned
from sparsefn.algorithms.start import Init, check_given, own_masks
from sparsefn.algorithms.unit_table import UnitTable
from sparsefn.core.checks import described
from sparsefn.core.state import (
    Algorithm,
    Level,
    State,
    Step,
    Where,
    apply_masks,
    everywhere,
)
from sparsefn.core.tree import Tree
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import never
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import Distribution, uniform
from sparsefn.masks.patterns.kinds import Pattern, unstructured


def _frozen(state: State, grads: Tree, step: Step) -> State:
    del grads, step
    return state


@described
def dense() -> Algorithm:
    """Nothing is sparsified: the baseline, under the same loop.

    >>> sf.dense().init({"w": torch.ones(2, 2)}).masks
    {'w': tensor(True)}
    """

    def init(params: Tree) -> State:
        params = own_params(params)
        return State(params, everywhere(params))

    return framed(init, _frozen)


@described
def static(
    sparsity: Level | Counted | None,
    *,
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "random",
    pruned: Pruned = "zero",
) -> Algorithm:
    """A mask made in `init` and kept for good.

    >>> algorithm = sf.static(0.75, key=sf.random.key(1))
    >>> state = algorithm.init({"w": torch.ones(4, 4), "b": torch.ones(4)})
    >>> int(state.masks["w"].sum()), state.masks["b"]
    (4, tensor(True))

    `sparsity` is a float, a Schedule (read at step 0), or a 0-d tensor; None where the
    pattern fixes it, and with `init="from_zeros"`, a function or a masks tree. With
    `init="magnitude"` it may be a count that the weights decide, such as
    `sf.counts.above(0.1)`. `pruned="keep"` keeps the weights off the mask in `params`,
    frozen; "train" lets an optimizer move them.
    """
    rule = Competition(pattern, distribution).check()
    kept = Memory({}, pruned)
    return MaskRecipe(
        rule, kept, _stay, rule.goal(sparsity), init, where, key, never()
    ).build()


def _stay(units: UnitTable, *_: object) -> Decision:
    return Decision(units.masks)


@described
def from_masks(masks: Tree) -> Algorithm:
    """Given masks, kept for good.

    >>> sf.from_masks({"w": torch.tensor([True, False])}).init(
    ...     {"w": torch.ones(2)}
    ... ).params
    {'w': tensor([1., 0.])}

    `masks` has the structure of params: bool, each of its leaf's shape, or 0-d True for
    a dense leaf.
    """
    check_given(masks)

    def init(params: Tree) -> State:
        params = own_params(params)
        own = own_masks(masks, params)
        return State(apply_masks(params, own), own)

    return framed(init, _frozen)
