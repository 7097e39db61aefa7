"""Scores of each weight by itself, without memory: magnitude, gradient, their products,
draws.

A score is a function of (state, grads, step) to a tree of floats, larger = more
important. `grads` is the dense gradient at the effective weights, so every score here
sees pruned positions too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from sparsefn._engine.draws import drawn_leaves
from sparsefn.core.checks import check_kind, has_name, with_call
from sparsefn.core.state import Accumulated, State, Step
from sparsefn.core.tree import Leaves, Tree, wide
from sparsefn.masks.scores.score_types import Absolute, Drawn, plain

Signed = TypeVar("Signed", bound=Callable[..., Tree] | Accumulated)
Plain = TypeVar("Plain", bound=Callable[..., Tree])


def absolute(signed: Signed) -> Signed:
    """The absolute value of a score, which selection takes in blocks, without a copy.

    >>> @sf.scores.absolute
    ... def drift(state, grads, step):
    ...     return state.opt
    >>> drift(sf.State((), (), opt={"w": torch.tensor([-2.0, 1.0])}), (), 0)
    {'w': tensor([2., 1.])}

    Args:
        signed: A score, with memory or without, or the `value` of a score with memory.

    Returns:
        The score of absolute values, whose `signed` is the function.

    Raises:
        TypeError: `signed` is not a score.
    """
    if isinstance(signed, Accumulated):
        remembered: Any = signed._replace(value=absolute(signed.value))
        return cast(Signed, with_call(remembered, absolute, signed))
    made = cast(Signed, Absolute(plain(signed)))
    return with_call(made, absolute, signed) if has_name(signed) else made


def _absolute_of(signed: Plain) -> Plain:
    # The absolute value of a score that draws nothing.
    return cast(Plain, Absolute(signed, keyed=False))


@_absolute_of
def magnitude(state: State, grads: Tree, step: Step) -> Tree:
    """Absolute value of the weights.

    >>> sf.scores.magnitude(
    ...     sf.State({"w": torch.tensor([-2.0, 1.0])}, {"w": torch.tensor(True)}), (), 0
    ... )
    {'w': tensor([2., 1.])}

    Args:
        state: A state, of which the params are read: floats of any shape.
        grads: Not read.
        step: Not read.

    Returns:
        Tree of floating-point tensors of the shapes of the params.
    """
    del grads, step
    return state.params


@_absolute_of
def gradient(state: State, grads: Tree, step: Step) -> Tree:
    """Absolute value of the gradient.

    >>> sf.scores.gradient(sf.State((), ()), {"w": torch.tensor([-2.0, 1.0])}, 0)
    {'w': tensor([2., 1.])}

    Args:
        state: Not read.
        grads: Dense gradients, a tree like the params.
        step: Not read.

    Returns:
        Tree of floating-point tensors of the shapes of the params.

    Raises:
        ValueError: The update was given no gradients.

    Evci et al. 2020, arXiv 1911.11134 (growth in RigL).
    """
    del state, step
    return given("gradient", grads)


def saliency(state: State, grads: Tree, step: Step) -> Tree:
    """|weight * gradient|: to first order, the loss's change without the weight.

    >>> state = sf.State(
    ...     {"w": torch.tensor([2.0, -1.0, 0.5])}, {"w": torch.tensor(True)}
    ... )
    >>> sf.scores.saliency(state, {"w": torch.tensor([0.5, 3.0, 1.0])}, 0)
    {'w': tensor([1.0000, 3.0000, 0.5000])}

    Args:
        state: A state, of which the params are read: floats of any shape.
        grads: Dense gradients, a tree like the params.
        step: Not read.

    Returns:
        Tree of floating-point tensors of the shapes of the params.

    Raises:
        ValueError: The update was given no gradients.

    16-bit products are made in float32: in float16 small ones would be 0.

    Lee et al. 2019, arXiv 1810.02340, eq. 5.
    """
    del step
    return optree.tree_map(
        lambda w, g: (wide(w) * g).abs(), state.params, given("saliency", grads)
    )


def movement(state: State, grads: Tree, step: Step) -> Tree:
    """-weight * gradient: positive where gradient descent moves away from zero.

    >>> state = sf.State({"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor(True)})
    >>> sf.scores.movement(state, {"w": torch.tensor([-0.5, -3.0])}, 0)
    {'w': tensor([ 1., -3.])}

    Args:
        state: A state, of which the params are read: floats of any shape.
        grads: Dense gradients, a tree like the params.
        step: Not read.

    Returns:
        Tree of floating-point tensors of the shapes of the params.

    Raises:
        ValueError: The update was given no gradients.

    Sum it over steps, `sum(movement)`, for the score of Sanh et al. 2020, arXiv
    2005.07683, eq. 3. 16-bit products are made in float32.
    """
    del step
    return optree.tree_map(
        lambda w, g: -(wide(w) * g), state.params, given("movement", grads)
    )


def given(name: str, grads: Tree) -> Tree:
    if grads is None:
        raise ValueError(f"scores.{name} reads gradients, got grads=None")
    return grads


def _drawn(leaves: Leaves, state: State, step: Step) -> Leaves:
    if not isinstance(state.key, Tensor):
        raise ValueError(
            "expected a state with a PRNG key for random scores, got none; pass "
            "key=sf.random.key(seed)"
        )
    return drawn_leaves(state.key, leaves, check_kind(step), "uniform", torch.float32)


def _by_leaf(fn: Plain) -> Plain:
    return cast(Plain, Drawn(_drawn, fn))


@_by_leaf
def random(state: State, grads: Tree, step: Step) -> Tree:
    """Uniform draws in [0, 1) of the state's key, the path, the step and the index.

    >>> state = sf.State(
    ...     {"w": torch.zeros(2)}, {"w": torch.tensor(True)}, key=sf.random.key(0)
    ... )
    >>> draws = sf.scores.random(state, (), 7)["w"]
    >>> torch.equal(draws, sf.scores.random(state, (), torch.tensor(7))["w"])
    True

    Args:
        state: A state with a key, of which the paths and shapes of params are read.
        grads: Not read.
        step: The step: an int or a 0-d integer tensor.

    Returns:
        Tree of float32 tensors of the shapes of the params.

    Raises:
        ValueError: The state has no key.

    The path is the leaf's, the index the element's.
    """
