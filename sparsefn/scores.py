"""Scores: (state, grads, step) -> a tree of floats, larger = more important; some with memory.

`grads` is the dense gradient at the effective weights, so every score here sees pruned positions too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from sparsefn import random as _random
from sparsefn.engine.checks import is_number
from sparsefn.engine.described import Described, described, with_call
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.pooling import Pooling
from sparsefn.engine.shards import check_plain
from sparsefn.state import Accumulated, PlainScore, Score, State, Step, Trigger
from sparsefn.tree import Tree, leaves_of, map_with_path, wide
from sparsefn.triggers import never

Signed = TypeVar("Signed", bound=Callable[..., Tree] | Accumulated)

_PIECE = 2**22  # entries of differences at a time
_SUM = Pooling("sum")


def _plain(score: object) -> Callable[..., Tree]:
    if isinstance(score, Accumulated) or not callable(score):
        raise TypeError(f"expected a score function of (state, grads, step), got {type(score).__name__}")
    return score


def absolute(signed: Signed) -> Signed:
    """The absolute value of a score, which selection takes block by block, without a copy.

    >>> @sf.scores.absolute
    ... def drift(state, grads, step):
    ...     return state.opt
    >>> drift(sf.State((), (), opt={"w": torch.tensor([-2.0, 1.0])}), (), 0)
    {'w': tensor([2., 1.])}

    A decorator of a Score, with memory or without, and of the `value` of one with memory; `signed` of the result
    is the function. Raises TypeError for anything but a score.
    """
    if isinstance(signed, Accumulated):
        remembered: Any = signed._replace(value=absolute(signed.value))
        return cast(Signed, with_call(remembered, absolute, signed))
    _plain(signed)

    @functools.wraps(signed)
    def score(*args: Tree) -> Tree:
        return optree.tree_map(torch.abs, signed(*args))

    score.signed = signed  # type: ignore[attr-defined]
    # A function that is decorated keeps its own name.
    return with_call(score, absolute, signed) if isinstance(signed, Described) else score  # type: ignore[return-value]


@absolute
def magnitude(state: State, grads: Tree, step: Step) -> Tree:
    """Absolute value of the weights.

    >>> sf.scores.magnitude(sf.State({"w": torch.tensor([-2.0, 1.0])}, {"w": torch.tensor(True)}), (), 0)
    {'w': tensor([2., 1.])}
    """
    del grads, step
    return state.params


@absolute
def gradient(state: State, grads: Tree, step: Step) -> Tree:
    """Absolute value of the gradient.

    >>> sf.scores.gradient(sf.State((), ()), {"w": torch.tensor([-2.0, 1.0])}, 0)
    {'w': tensor([2., 1.])}

    Evci et al. 2020, arXiv 1911.11134 (growth in RigL).
    """
    del state, step
    return _given("gradient", grads)


def saliency(state: State, grads: Tree, step: Step) -> Tree:
    """|weight * gradient|: to first order, how much the loss changes without the weight.

    >>> state = sf.State({"w": torch.tensor([2.0, -1.0, 0.5])}, {"w": torch.tensor(True)})
    >>> sf.scores.saliency(state, {"w": torch.tensor([0.5, 3.0, 1.0])}, 0)
    {'w': tensor([1.0000, 3.0000, 0.5000])}

    Lee et al. 2019, arXiv 1810.02340, eq. 5.
    """
    del step
    return optree.tree_map(lambda w, g: (w * g).abs(), state.params, _given("saliency", grads))


def movement(state: State, grads: Tree, step: Step) -> Tree:
    """-weight * gradient: positive where gradient descent moves the weight away from zero.

    >>> state = sf.State({"w": torch.tensor([2.0, -1.0])}, {"w": torch.tensor(True)})
    >>> sf.scores.movement(state, {"w": torch.tensor([-0.5, -3.0])}, 0)
    {'w': tensor([ 1., -3.])}

    Sum it over steps, `sum(movement)`, for the score of Sanh et al. 2020, arXiv 2005.07683, eq. 3.
    """
    del step
    return optree.tree_map(lambda w, g: -(w * g), state.params, _given("movement", grads))


def _given(name: str, grads: Tree) -> Tree:
    if grads is None:
        raise ValueError(f"scores.{name} reads gradients, got grads=None")
    return grads


def random(state: State, grads: Tree, step: Step) -> Tree:
    """Uniform draws in [0, 1) of the state's key, the leaf's path, the step and the element's index.

    >>> state = sf.State({"w": torch.zeros(2)}, {"w": torch.tensor(True)}, key=sf.random.key(0))
    >>> draws = sf.scores.random(state, (), 7)["w"]
    >>> torch.equal(draws, sf.scores.random(state, (), torch.tensor(7))["w"])
    True

    ValueError for a state without a key.
    """
    del grads
    if not isinstance(state.key, Tensor):
        raise ValueError("expected a state with a PRNG key for random scores, got none; pass key=sf.random.key(seed)")
    return map_with_path(
        lambda path, leaf: _random.uniform_like(_random.leaf_key(state.key.to(leaf.device), path, step), leaf),
        state.params,
    )


@described
def distance(norm: float | Callable[[Tensor], Tensor] = 2, axis: int = 0) -> PlainScore:
    """Sum of the distances of a slice of the weights to the other slices along an axis.

    >>> state = sf.State({"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])}, {"w": torch.ones(3, 2) > 0})
    >>> sf.scores.distance(norm=1)(state, (), 0)["w"]
    tensor([[ 8.,  8.],
            [13., 13.],
            [ 7.,  7.]])

    Each entry of a slice has its slice's sum, so that `patterns.channel(axis, norm=float("inf"))` prunes the
    slices nearest to the geometric median: `sf.one_shot(0.5, score=distance(), pattern=channel(0, norm=inf))`.
    `norm` is the order of the vector norm of the difference, or a function of the slices, (n, elements), that
    gives their distances, (n, n). Leaves that are not sparsified score 0. float16 and bfloat16 are summed
    in float32. ValueError for a DTensor. He et al. 2019, arXiv 1811.00250, eq. 4 and 5.
    """
    if not callable(norm) and not is_number(norm):
        raise TypeError(f"expected norm to be a number or a function of the slices, got {norm!r}")

    def of_leaf(path: str, mask: Tensor, leaf: Tensor) -> Tensor:
        if not is_sparse(mask, leaf):
            return torch.zeros_like(leaf)
        check_plain("distance", path, leaf)
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"distance: no axis {axis} in shape {tuple(leaf.shape)} at {path!r}")
        slices = wide(leaf.detach()).movedim(axis, 0)
        size, rest = slices.shape[0], slices.shape[1:]
        flat = slices.reshape(size, math.prod(rest)).contiguous()
        if callable(norm):
            sums = _SUM(_checked_distances(norm(flat), size, path).abs())
        else:
            sums = _distance_sums(flat, norm)
        return sums.reshape(size, *(1 for _ in rest)).expand(size, *rest).movedim(0, axis)

    def score(state: State, grads: Tree, step: Step) -> Tree:
        del grads, step
        return map_with_path(of_leaf, state.masks, state.params)

    return score


def _distance_sums(flat: Tensor, norm: float) -> Tensor:
    # A few slices at a time against all; a product of matrices would be faster, but sums in another order.
    size, width = flat.shape
    step, length = max(1, _PIECE // max(1, size * width)), Pooling("norm", norm)
    parts = [_SUM(length(flat[start : start + step, None] - flat)) for start in range(0, size, step)]
    return torch.cat(parts) if parts else _SUM(flat)


def _checked_distances(matrix: Tensor, size: int, path: str) -> Tensor:
    if tuple(matrix.shape) != (size, size):
        raise ValueError(f"distance: expected norm to give shape {(size, size)} at {path!r}, got {tuple(matrix.shape)}")
    return matrix


def _zeros(params: Tree) -> Tree:
    return optree.tree_map(lambda leaf: torch.zeros_like(wide(leaf)), params)  # 16-bit sums would stop growing


def _blend(decay: float, memory: Tree, new: Tree) -> Tree:
    return optree.tree_map(lambda m, x: decay * m + (1 - decay) * x.to(m.dtype), memory, new)


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"expected decay in [0, 1), got {decay}")


@described
def momentum(decay: float) -> Accumulated:
    """Absolute value of a moving average of the dense gradient.

    >>> score = sf.scores.momentum(0.5)
    >>> memory = score.accumulate({"w": torch.zeros(1)}, sf.State((), ()), {"w": torch.ones(1)}, 0)
    >>> memory, score.value(memory, sf.State((), ()), (), 0)
    ({'w': tensor([0.5000])}, {'w': tensor([0.5000])})

    memory <- decay * memory + (1 - decay) * grad, from zero, without bias correction.
    Dettmers & Zettlemoyer 2019, arXiv 1907.04840, sec. 3.
    """
    _check_decay(decay)
    return Accumulated(
        init=_zeros,
        accumulate=lambda memory, state, grads, step: _blend(decay, memory, _given("momentum", grads)),
        value=absolute(lambda memory, state, grads, step: memory),
    )


@described
def ema(score: Score, decay: float) -> Accumulated:
    """Moving average of a score.

    >>> average = sf.scores.ema(sf.scores.gradient, 0.5)
    >>> average.accumulate({"w": torch.zeros(1)}, sf.State((), ()), {"w": -torch.ones(1)}, 0)
    {'w': tensor([0.5000])}

    memory <- decay * memory + (1 - decay) * score, from zero, without bias correction. The memory is float32, or
    wider where the leaf is; a wider score is rounded to it.
    """
    _check_decay(decay)
    fn = _plain(score)
    return Accumulated(
        init=_zeros,
        accumulate=lambda memory, state, grads, step: _blend(decay, memory, fn(state, grads, step)),
        value=lambda memory, state, grads, step: memory,
    )


@described
def sum(score: Score, reset: Trigger | None = None) -> Accumulated:
    """Sum of a score since `reset` last fired.

    >>> total = sf.scores.sum(sf.scores.gradient, reset=sf.every(2))
    >>> memory = total.init({"w": torch.zeros(1)})
    >>> for step in range(4):
    ...     memory = total.accumulate(memory, sf.State((), ()), {"w": torch.ones(1)}, step)
    ...     print(step, total.value(memory, sf.State((), ()), (), step)["w"].item())
    0 1.0
    1 1.0
    2 2.0
    3 1.0

    A step at which `reset` fires still belongs to the sum that is read at it; the next step starts a new sum. So
    `reset` may be the trigger of the algorithm itself. Without `reset`: since step 0. Sums are float32, or wider
    where the leaf is; a wider score is rounded to that.
    """
    fn, fires = _plain(score), reset or never()

    def accumulate(memory: Tree, state: State, grads: Tree, step: Step) -> Tree:
        total, fresh = memory["sum"], memory["fresh"]
        new = optree.tree_map(lambda m, x: torch.where(fresh, 0.0, m) + x.to(m.dtype), total, fn(state, grads, step))
        return {"sum": new, "count": torch.where(fresh, 0, memory["count"]) + 1, "fresh": _flag(fires(step), fresh)}

    def init(params: Tree) -> Tree:
        device = next((leaf.device for leaf in leaves_of(params)), torch.device("cpu"))
        count = torch.zeros((), dtype=torch.int64, device=device)
        return {"sum": _zeros(params), "count": count, "fresh": count > 0}

    return Accumulated(init, accumulate, lambda memory, state, grads, step: memory["sum"])


@described
def mean(score: Score, reset: Trigger | None = None) -> Accumulated:
    """Mean of a score since `reset` last fired (see `sum`).

    >>> average = sf.scores.mean(sf.scores.gradient)
    >>> memory = average.init({"w": torch.zeros(1)})
    >>> for value in (1.0, 3.0):
    ...     memory = average.accumulate(memory, sf.State((), ()), {"w": torch.tensor([value])}, 0)
    >>> average.value(memory, sf.State((), ()), (), 0)
    {'w': tensor([2.])}
    """
    total = sum(score, reset)

    def value(memory: Tree, state: State, grads: Tree, step: Step) -> Tree:
        return optree.tree_map(lambda m: m / memory["count"].clamp(min=1), memory["sum"])

    return Accumulated(total.init, total.accumulate, value)


def _flag(fired: bool | Tensor, like: Tensor) -> Tensor:
    return fired if isinstance(fired, Tensor) else torch.full_like(like, fired)
