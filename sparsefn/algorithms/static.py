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

    Returns:
        Algorithm whose masks are 0-d True.
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

    Args:
        sparsity: Fraction of the weights that is pruned: a float, a schedule (read at
            step 0) or a 0-d tensor. None where the pattern fixes it, and where `init`
            needs none. With `init="magnitude"` it may be a count that the weights
            decide, such as `sf.counts.above(0.1)`.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pattern: Which weights are kept or pruned as one, and which compete. Default:
            each weight by itself, in its whole leaf.
        distribution: How the kept weights are split between leaves. Default: each leaf
            has the same sparsity.
        key: PRNG key of a random mask. None: `sf.random.key(0)`.
        init: First masks: "random" keeps random weights, exactly as many as the
            sparsity says; "bernoulli" each weight with that chance; "magnitude" the
            largest; "checkerboard" a regular pattern, at a float sparsity; "dense" all;
            "from_zeros" the weights that are not 0. An algorithm, a function of params
            or a tree of bools like params gives the masks.
        pruned: What becomes of pruned weights. "zero" sets them to +0.0; "keep" keeps
            them in `params`, frozen; "train" lets an optimizer move them.

    Returns:
        Algorithm whose masks never change.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A fraction is outside [0, 1] or a name unknown; a count comes with a
            pattern that fixes it or another distribution than `uniform()` and
            `global_()`; or, in the algorithm's `init`, the masks need a sparsity or do
            not fit params, a glob matches no leaf, or a leaf does not fit the pattern.
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

    Args:
        masks: Bool tensors, a tree with the structure of params: each mask has the
            shape of its leaf, or is 0-d True for a dense leaf. 0-d masks of further
            leaves, such as frozen ones of a module, are ignored.

    Returns:
        Algorithm whose masks never change.

    Raises:
        TypeError: In the algorithm's `init`, a mask is not bool.
        ValueError: A mask is 0-d False; or, in the algorithm's `init`, the structure or
            a shape differs from params, or a mask is for a parameter that a weight is
            computed from.
    """
    check_given(masks)

    def init(params: Tree) -> State:
        params = own_params(params)
        own = own_masks(masks, params)
        return State(apply_masks(params, own), own)

    return framed(init, _frozen)
