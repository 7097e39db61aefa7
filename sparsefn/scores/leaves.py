"""Scores of one leaf at a time: a decorator that makes them, and LAMP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from sparsefn.engine.checks import check_call
from sparsefn.engine.described import Described, with_call
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.numbers import widened
from sparsefn.engine.ranks import back, falling, running_sums
from sparsefn.engine.shards import check_plain
from sparsefn.state import PlainScore, State, Step
from sparsefn.tree import Tree, map_with_path


def leafwise(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> PlainScore:
    """A score out of a function of one leaf: `fn(weight, grad, mask)` is called for sparsified leaves alone.

    >>> @sf.scores.leafwise
    ... def relative(weight, grad, mask):
    ...     return weight.abs() / weight.abs().max()
    >>> params = {"w": torch.tensor([2.0, -1.0]), "b": torch.ones(2)}
    >>> state = sf.State(params, {"w": torch.tensor([True, True]), "b": torch.tensor(True)})
    >>> relative(state, (), 0)
    {'w': tensor([1.0000, 0.5000]), 'b': tensor([0., 0.])}

    The weight is that of `state.params`, the mask has its full shape, and `grad` is None where the update was given no
    gradients. The function gives floats of the shape of the weight, larger for a weight that is more important. Other
    leaves score 0. Raises TypeError for anything but a function of three arguments, and for what is not a tensor.
    """
    check_call("fn", fn, "weight", "grad", "mask")

    @functools.wraps(fn)
    def score(state: State, grads: Tree, step: Step) -> Tree:
        del step

        def of_leaf(path: str, weight: Tensor, mask: Tensor, *grad: Tensor) -> Tensor:
            scored: object = fn(weight, grad[0] if grad else cast(Tensor, None), mask)
            if not isinstance(scored, Tensor):
                raise TypeError(f"expected scores to be a tensor, got {type(scored).__name__} at {path!r}")
            return scored

        return of_sparsified(of_leaf, state, *([] if grads is None or grads == () else [grads]))

    del score.__wrapped__  # it has other arguments
    # A function that is decorated keeps its own name.
    return with_call(score, leafwise, fn) if isinstance(fn, Described) else score


def of_sparsified(fn: Callable[..., Tensor], state: State, *trees: Tree, whole: str = "", why: str = "") -> Tree:
    """`fn(path, weight, mask, *leaves)` for each sparsified leaf of a state, and zeros for each other leaf.

    >>> state = sf.State({"w": torch.ones(2), "b": torch.ones(1)}, {"w": torch.ones(2) > 0, "b": torch.tensor(True)})
    >>> of_sparsified(lambda path, weight, mask: weight + 1, state)
    {'w': tensor([2., 2.]), 'b': tensor([0.])}

    For a function of `whole` leaves, which has this name in errors, ValueError for a DTensor.
    """

    def of_leaf(path: str, weight: Tensor, mask: Tensor, *leaves: Tensor) -> Tensor:
        if not is_sparse(mask, weight):
            return torch.zeros_like(weight)
        if whole:
            check_plain(whole, path, weight, why)
        return fn(path, weight, mask, *leaves)

    return map_with_path(of_leaf, state.params, state.masks, *trees)


def lamp(state: State, grads: Tree, step: Step) -> Tree:
    """LAMP: weight^2 by the sum of the squares of all weights of its leaf that are not smaller.

    >>> state = sf.State({"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}, {"w": torch.ones(4) > 0})
    >>> sf.scores.lamp(state, (), 0)["w"]
    tensor([0.0333, 0.1379, 0.3600, 1.0000], dtype=torch.float64)

    For `distribution=sf.budgets.global_()`, which then chooses how many weights each leaf keeps; inside a leaf the
    order is that of magnitudes. The best weight of every leaf scores 1, and the scale of a leaf does not count. Of
    equal weights the first is the larger one; weights of 0 score 0. In float64, with the same bits on every device.
    ValueError for a DTensor. Lee et al. 2021, arXiv 2010.07611.
    """
    del grads, step

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        del mask
        squares = widened(weight.detach()).double().square().flatten()
        order = falling(squares)
        sorted_squares = squares[order]
        ratios = torch.where(sorted_squares == 0, 0.0, sorted_squares / running_sums(sorted_squares))
        return back(ratios, order).reshape(weight.shape)

    return of_sparsified(of_leaf, state, whole="lamp")
