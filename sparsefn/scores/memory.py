"""Scores with memory: moving averages, sums and means of other scores."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from sparsefn.engine.described import described
from sparsefn.scores.plain import absolute, given, plain
from sparsefn.state import Accumulated, Score, State, Step, Trigger
from sparsefn.tree import Tree, leaves_of, wide
from sparsefn.triggers import never


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
        accumulate=lambda memory, state, grads, step: _blend(decay, memory, given("momentum", grads)),
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
    fn = plain(score)
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
    fn, fires = plain(score), reset or never()

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
