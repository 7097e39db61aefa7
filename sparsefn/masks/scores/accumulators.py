"""Scores with memory: averages and sums of other scores, a threshold that is steered,
signs of the start.
"""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import claim
from sparsefn._engine.transforms import host_number
from sparsefn.core.checks import check_int, check_positive, check_trigger, described
from sparsefn.core.state import Accumulated, Score, State, Step, Trigger
from sparsefn.core.tree import Tree, choose, flatten, leaves_of, wide
from sparsefn.core.triggers import never
from sparsefn.masks.budgets.counts import below
from sparsefn.masks.scores.per_leaf import of_sparsified
from sparsefn.masks.scores.pointwise import absolute, given, magnitude
from sparsefn.masks.scores.score_types import OfUnits, plain
from sparsefn.masks.scores.unit_values import zeros_of_units


def _zeros(params: Tree) -> Tree:
    # 16-bit sums would stop growing
    return optree.tree_map(lambda leaf: torch.zeros_like(wide(leaf)), params)


def _alike(score: Callable[..., Tree], params: Tree) -> Tree:
    # Zeros for the values of a score.
    if isinstance(score, OfUnits):
        return zeros_of_units(score.pattern, params)
    return _zeros(params)


def _read(
    score: Callable[..., Tree], value: Callable[..., Tree]
) -> Callable[..., Tree]:
    # What is remembered of a score of units is one, too.
    if isinstance(score, OfUnits):
        return OfUnits(score.pattern, value)
    return value


def _blend(decay: float, memory: Tree, new: Tree) -> Tree:
    def blended(m: Tensor, x: Tensor) -> Tensor:
        share = (1 - decay) * x.to(m.dtype)
        own = claim(m)
        if own is None:
            return decay * m + share
        return own.mul_(decay).add_(share)

    return optree.tree_map(blended, memory, new)


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"expected decay in [0, 1), got {decay}")


@described
def momentum(decay: float) -> Accumulated:
    """Absolute value of a moving average of the dense gradient.

    >>> score = sf.scores.momentum(0.5)
    >>> memory = score.accumulate(
    ...     {"w": torch.zeros(1)}, sf.State((), ()), {"w": torch.ones(1)}, 0
    ... )
    >>> memory, score.value(memory, sf.State((), ()), (), 0)
    ({'w': tensor([0.5000])}, {'w': tensor([0.5000])})

    Args:
        decay: The share of the memory that stays at a step, in [0, 1).

    Returns:
        A score with memory. memory <- decay * memory + (1 - decay) * grad, from zero,
        without bias correction.

    Raises:
        ValueError: `decay` is outside [0, 1), or an update has no gradients.

    Dettmers & Zettlemoyer 2019, arXiv 1907.04840, sec. 3.
    """
    _check_decay(decay)
    return Accumulated(
        init=_zeros,
        accumulate=lambda memory, state, grads, step: _blend(
            decay, memory, given("momentum", grads)
        ),
        value=absolute(lambda memory, state, grads, step: memory),
    )


@described
def ema(score: Score, decay: float) -> Accumulated:
    """Moving average of a score.

    >>> average = sf.scores.ema(sf.scores.gradient, 0.5)
    >>> average.accumulate(
    ...     {"w": torch.zeros(1)}, sf.State((), ()), {"w": -torch.ones(1)}, 0
    ... )
    {'w': tensor([0.5000])}

    Args:
        score: A score without memory.
        decay: The share of the memory that stays at a step, in [0, 1).

    Returns:
        A score with memory. memory <- decay * memory + (1 - decay) * score, from zero,
        without bias correction. The memory is float32, or wider where the leaf is; a
        wider score is rounded to it.

    Raises:
        TypeError: `score` is not a function, or has memory itself.
        ValueError: `decay` is outside [0, 1).
    """
    _check_decay(decay)
    fn = plain(score)
    return Accumulated(
        init=lambda params: _alike(fn, params),
        accumulate=lambda memory, state, grads, step: _blend(
            decay, memory, fn(state, grads, step)
        ),
        value=_read(fn, lambda memory, state, grads, step: memory),
    )


@described
def sum(score: Score, reset: Trigger | None = None) -> Accumulated:
    """Sum of a score since `reset` last fired.

    >>> total = sf.scores.sum(sf.scores.gradient, reset=sf.every(2))
    >>> memory = total.init({"w": torch.zeros(1)})
    >>> for step in range(4):
    ...     memory = total.accumulate(
    ...         memory, sf.State((), ()), {"w": torch.ones(1)}, step
    ...     )
    ...     print(step, total.value(memory, sf.State((), ()), (), step)["w"].item())
    0 1.0
    1 1.0
    2 2.0
    3 1.0

    Args:
        score: A score without memory.
        reset: The trigger that ends a sum. The step at which it fires still belongs to
            the sum that is read at it; the next step starts a new sum. So it may be the
            trigger of the algorithm itself. None: one sum since step 0.

    Returns:
        A score with memory. Sums are float32, or wider where the leaf is; a wider score
        is rounded to that.

    Raises:
        TypeError: `score` is not a function, or has memory itself.
    """
    fn = plain(score)
    fires = reset or never()

    def accumulate(memory: Tree, state: State, grads: Tree, step: Step) -> Tree:
        total = memory["sum"]
        fresh = memory["fresh"]
        new = optree.tree_map(
            lambda m, x: torch.where(fresh, 0.0, m) + x.to(m.dtype),
            total,
            fn(state, grads, step),
        )
        return {
            "sum": new,
            "count": torch.where(fresh, 0, memory["count"]) + 1,
            "fresh": _flag(fires(step), fresh),
        }

    def init(params: Tree) -> Tree:
        device = next((leaf.device for leaf in leaves_of(params)), torch.device("cpu"))
        count = torch.zeros((), dtype=torch.int64, device=device)
        return {"sum": _alike(fn, params), "count": count, "fresh": count > 0}

    return Accumulated(
        init, accumulate, _read(fn, lambda memory, state, grads, step: memory["sum"])
    )


@described
def mean(score: Score, reset: Trigger | None = None) -> Accumulated:
    """Mean of a score since `reset` last fired (see `sum`).

    >>> average = sf.scores.mean(sf.scores.gradient)
    >>> memory = average.init({"w": torch.zeros(1)})
    >>> for value in (1.0, 3.0):
    ...     memory = average.accumulate(
    ...         memory, sf.State((), ()), {"w": torch.tensor([value])}, 0
    ...     )
    >>> average.value(memory, sf.State((), ()), (), 0)
    {'w': tensor([2.])}

    Args:
        score: A score without memory.
        reset: The trigger that ends a mean, as it ends a sum.

    Returns:
        A score with memory, the sum over the number of its steps.

    Raises:
        TypeError: `score` is not a function, or has memory itself.
    """
    total = sum(score, reset)

    def value(memory: Tree, state: State, grads: Tree, step: Step) -> Tree:
        return optree.tree_map(
            lambda m: m / memory["count"].clamp(min=1), memory["sum"]
        )

    return Accumulated(total.init, total.accumulate, _read(plain(score), value))


@described
def steered(
    when: Trigger,
    target: int,
    *,
    score: Score = magnitude,
    tau: float = 1e-3,
    slack: float = 0.1,
    spare: int = 1,
) -> Accumulated:
    """A score over a threshold that is steered by how many weights are under it.

    >>> steered = sf.scores.steered(sf.always(), target=2, tau=0.5)
    >>> state = sf.State(
    ...     {"w": torch.tensor([0.1, 0.2, 0.3, 1.0])}, {"w": torch.ones(4) > 0}
    ... )
    >>> memory = steered.accumulate(steered.init(state.params), state, (), 0)
    >>> memory["tau"], memory["next"]
    (tensor(0.5000, dtype=torch.float64), tensor(0.2500, dtype=torch.float64))
    >>> steered.value(memory, state, (), 0)
    {'w': tensor([0.2000, 0.4000, 0.6000, 2.0000])}

    Args:
        when: The trigger of the algorithm. Where it fires, the threshold changes.
        target: How many weights are dropped: the next threshold is half of tau if more
            than (1 + slack) * target are, twice tau if fewer than (1 - slack) * target.
        score: A score without memory.
        tau: The first threshold, above 0.
        slack: The relative distance from `target` at which the threshold stays.
        spare: How many of the best kept weights of each leaf are not counted.

    Returns:
        A score with memory, score / tau. It counts what is dropped where it is `drop=`
        with `drop_fraction=sf.counts.below(1.0, spare=spare)` and the same `when`: kept
        weights whose score is not above tau, over all leaves, less the spared.

    Raises:
        TypeError: `target` or `spare` is not an int, `when` is not a trigger, or
            `score` is not a function or has memory itself.
        ValueError: `target` or `spare` is negative, `tau` is not positive, or a
            sparsified leaf is a DTensor.

    Mostafa & Wang 2019, arXiv 1902.05967.
    """
    fn = plain(score)
    under = below(1.0, spare)
    check_trigger("when", when)
    check_int("steered", "target", target, 0)
    check_positive("tau", tau)

    def init(params: Tree) -> Tree:
        device = next((leaf.device for leaf in leaves_of(params)), torch.device("cpu"))
        return {
            name: torch.full((), tau, dtype=torch.float64, device=device)
            for name in ("next", "tau")
        }

    def over(tau: Tensor, state: State, grads: Tree, step: Step) -> Tree:
        def of_leaf(path: str, weight: Tensor, mask: Tensor, value: Tensor) -> Tensor:
            return wide(value) / tau.to(value.device, wide(value).dtype)

        return of_sparsified(of_leaf, state, fn(state, grads, step), reader="steered")

    def accumulate(memory: Tree, state: State, grads: Tree, step: Step) -> Tree:
        def adapted(old: Tree) -> Tree:
            tau = old["next"]
            masks = flatten(state.masks)[0]
            values = flatten(over(tau, state, grads, step))[0]
            rows = [
                (x.reshape(1, -1), masks[path].reshape(1, -1))
                for path, x in values.items()
                if masks[path].ndim
            ]
            lost = torch.zeros_like(tau)
            for row, mask in rows:
                lost = lost + under.count(row, mask, step).sum().to(tau.device)
            factor = torch.where(
                lost > (1 + slack) * target,
                0.5,
                torch.where(lost < (1 - slack) * target, 2.0, 1.0),
            )
            return {"next": tau * factor, "tau": tau}

        return choose(when(step), adapted, memory)

    return Accumulated(
        init,
        accumulate,
        lambda memory, state, grads, step: over(memory["tau"], state, grads, step),
    )


@described
def first_sign() -> Accumulated:
    """The weight times the sign that it had at the start.

    >>> score = sf.scores.first_sign()
    >>> signs = score.init({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> (
    ...     signs,
    ...     score.value(
    ...         signs, sf.State({"w": torch.tensor([0.1, 1.0, -1.0])}, ()), (), 0
    ...     ),
    ... )
    ({'w': tensor([ 1., -1.,  1.])}, {'w': tensor([ 0.1000, -1.0000, -1.0000])})

    Returns:
        A score with memory, negative where the sign has changed since. The memory is
        the signs, of pruned weights too; 0 counts as positive.

    As `drop=`, with `drop_fraction=sf.counts.below(0.0)`, it drops the weights whose
    sign has changed.

    Bellec et al. 2018, arXiv 1711.05136.
    """
    return Accumulated(
        init=lambda params: optree.tree_map(
            lambda w: torch.where(w < 0, -1.0, 1.0).to(w.dtype), params
        ),
        accumulate=lambda memory, state, grads, step: memory,
        value=lambda memory, state, grads, step: optree.tree_map(
            torch.mul, state.params, memory
        ),
    )


def _flag(fired: bool | Tensor, like: Tensor) -> Tensor:
    if isinstance(fired, Tensor) and (
        fired.device == like.device or host_number(fired) is None
    ):
        return fired
    return torch.full_like(like, host_number(fired))
