"""Terms that `with_terms` adds to the gradient: (state, step) -> a tree like params.

Terms of half-precision leaves are float32: only their sum with the gradient is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.numbers import Real
from sparsefn._engine.processes import redistributed
from sparsefn._engine.torch_limits import differentiating
from sparsefn.core import random
from sparsefn.core.checks import check_call, described, is_number, number
from sparsefn.core.state import State, Step, Term, Where
from sparsefn.core.tree import Tree, flatten, map_with_path, opened, wide
from sparsefn.core.tree.where import matching

__all__ = ["l1", "l2", "noise", "on", "penalty", "pruned_decay"]
__dir__ = __all__.copy


@described
def l1(strength: float) -> Term:
    """Gradient of strength * sum |w|.

    >>> sf.terms.l1(0.5)(
    ...     sf.State({"w": torch.tensor([2.0, 0.0, -1.0])}, {"w": torch.tensor(True)}),
    ...     0,
    ... )
    {'w': tensor([ 0.5000,  0.0000, -0.5000])}

    Args:
        strength: The factor.

    Returns:
        The term, a function of (state, step).

    Raises:
        TypeError: `strength` is no number and no 0-d float tensor.
        ValueError: `strength` is not finite, or a tensor is not 0-d.
    """
    number("strength of l1", strength)
    return lambda state, step: optree.tree_map(
        lambda w: strength * torch.sign(wide(w)), state.params
    )


@described
def l2(strength: float) -> Term:
    """Gradient of strength / 2 * sum w^2: weight decay inside the gradient.

    >>> sf.terms.l2(0.5)(
    ...     sf.State({"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor(True)}), 0
    ... )
    {'w': tensor([ 1.0000, -0.5000])}

    Args:
        strength: The factor.

    Returns:
        The term, a function of (state, step).

    Raises:
        TypeError: `strength` is no number and no 0-d float tensor.
        ValueError: `strength` is not finite, or a tensor is not 0-d.
    """
    number("strength of l2", strength)
    return lambda state, step: optree.tree_map(
        lambda w: strength * wide(w), state.params
    )


@described
def pruned_decay(strength: Real) -> Term:
    """strength * w off the mask: the regulariser of SR-STE.

    >>> state = sf.State(
    ...     {"w": torch.tensor([3.0, -1.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> sf.terms.pruned_decay(0.1)(state, 0)
    {'w': tensor([ 0.0000, -0.1000])}

    Args:
        strength: The factor: a number, or a 0-d tensor.

    Returns:
        The term, for algorithms whose pruned weights train on (`ste`).

    Raises:
        TypeError: `strength` is no number and no 0-d float tensor.
        ValueError: `strength` is not finite, or a tensor is not 0-d.

    Zhou et al. 2021, arXiv 2102.04010, eq. 8.
    """
    number("strength of pruned_decay", strength)

    def leaf(w: Tensor, mask: Tensor) -> Tensor:
        return (
            torch.where(mask, 0.0, strength * wide(w))
            if is_sparse(mask, w)
            else torch.zeros_like(w)
        )

    return lambda state, step: optree.tree_map(leaf, state.params, state.masks)


@described
def penalty(fn: Callable[[Tree, Step], Tensor]) -> Term:
    """Gradient of any scalar function of the params and the step.

    >>> term = sf.terms.penalty(lambda params, step: (params["w"] ** 3).sum())
    >>> term(sf.State({"w": torch.tensor([2.0])}, {"w": torch.tensor(True)}), 0)
    {'w': tensor([12.])}

    Args:
        fn: Function of (params, step) that gives a 0-d tensor.

    Returns:
        The term, a function of (state, step).

    Raises:
        TypeError: `fn` is no function of two arguments.
    """
    check_call("penalty's fn", fn, "params", "step")

    def term(state: State, step: Step) -> Tree:
        leaves, rebuild = opened(state.params)
        gradient = differentiating(
            torch.func.grad(lambda values: fn(rebuild(values), step))
        )
        # A leaf with an empty part comes back replicated.
        return rebuild(
            [
                redistributed(slope, leaf)
                for slope, leaf in zip(gradient(leaves), leaves, strict=True)
            ]
        )

    return term


@described
def noise(std: float, key: Tensor) -> Term:
    """Gaussian noise of a standard deviation, drawn from (key, path, step, index).

    >>> sf.terms.noise(0.0, sf.random.key(0))(
    ...     sf.State({"w": torch.ones(2)}, {"w": torch.tensor(True)}), 3
    ... )
    {'w': tensor([0., 0.])}

    Args:
        std: The standard deviation, at least 0.
        key: A key from `sf.random.key`.

    Returns:
        The term, a function of (state, step).

    Raises:
        TypeError: `std` is no number; when the term is computed, `key` is no key.
        ValueError: `std` is negative or NaN.
    """
    if not isinstance(std, Tensor) and not is_number(std):
        raise TypeError(f"noise: expected std to be a number, got {type(std).__name__}")
    if not std >= 0:
        raise ValueError(f"expected std >= 0, got {std}")
    return lambda state, step: map_with_path(
        lambda path, w: (
            std * wide(random.normal_like(random.leaf_key(key, path, step), w, w.dtype))
        ),
        state.params,
    )


@described
def on(where: Where, term: Term) -> Term:
    """A term for the chosen leaves only.

    >>> state = sf.State(
    ...     {"1.weight": torch.tensor([2.0]), "1.bias": torch.tensor([3.0])}, ()
    ... )
    >>> sf.terms.on("*.weight", sf.terms.l2(0.5))(state, 0)
    {'1.weight': tensor([1.]), '1.bias': tensor([0.])}

    Args:
        where: Which leaves, as for an algorithm: a glob, a sequence of globs, or a
            function of (path, leaf).
        term: The term, a function of (state, step).

    Returns:
        The term, which is zero on other leaves.

    Raises:
        TypeError: `term` is no function of two arguments; when the term is computed,
            `where` is of another kind.
        ValueError: When the term is computed, a glob matches no path of the trained
            tree.

    An l1 term on the scales of batch norms is network slimming: Liu et al. 2017,
    arXiv 1708.06519, eq. 1.
    """
    check_call("on's term", term, "state", "step")

    def chosen(state: State, step: Step) -> Tree:
        leaves, rebuild = flatten(term(state, step))
        trained = flatten(state.params)[0]
        picked = matching("terms.on", where, trained)
        return rebuild(
            [x if path in picked else torch.zeros_like(x) for path, x in leaves.items()]
        )

    return chosen
