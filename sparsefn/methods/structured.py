"""Structured pruning: whole filters, or other units, which `sf.shrink` then removes."""

from __future__ import annotations

import dataclasses

import optree
import torch
from torch import Tensor

from sparsefn._engine.sums import Pooling
from sparsefn.algorithms.combine.sequence import sequence
from sparsefn.algorithms.combine.with_terms import with_terms
from sparsefn.algorithms.prune import gmp, iterative, one_shot
from sparsefn.algorithms.rewrite import rewrite
from sparsefn.core.checks import check_int, described, number, shown
from sparsefn.core.schedules import as_schedule
from sparsefn.core.state import Algorithm, Level, State, Step, Trigger, Where
from sparsefn.core.tree import Leaves, Tree, flatten, map_with_path, wide
from sparsefn.core.tree.where import default_where, matching
from sparsefn.core.triggers import always, at, every
from sparsefn.masks import patterns, scores
from sparsefn.masks.budgets.distributions import Distribution, global_, uniform
from sparsefn.masks.patterns.kinds import Pattern, Reduce, reduction, unstructured
from sparsefn.masks.patterns.tied_sets import TiedPattern
from sparsefn.masks.patterns.units import from_rows, to_rows, units_of
from sparsefn.optim import terms

_LENGTH = Pooling("norm", 2)
_SUM = Pooling("sum")


def _pooled(name: str, pattern: Pattern, reduce: Reduce) -> Pattern:
    # The same units, scored otherwise.
    if not isinstance(pattern, Pattern):
        got = type(pattern).__name__
        raise TypeError(
            f"{name}: expected pattern to be one such as sf.patterns.channel(0) or "
            f"groups.pattern(), got {got}"
        )
    if pattern.reduce is None:
        return pattern
    return dataclasses.replace(pattern, reduce=reduction(reduce))


@described
def taylor(
    count: int | Tensor = 100,
    *,
    when: Trigger = every(30, start=29),
    pattern: Pattern = patterns.channel(0),
    distribution: Distribution = global_(),
    where: Where = default_where,
) -> Algorithm:
    """Taylor-FO: prunes the filters whose removal changes the loss least.

    >>> algorithm = sf.methods.taylor(1, when=sf.at([1]))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, -1.0], [2.0, 1.0]])})
    >>> for step in range(2):
    ...     state = algorithm.update(
    ...         state, {"w": torch.tensor([[0.5, 0.5], [0.2, 0.1]])}, step
    ...     )
    >>> state.params
    {'w': tensor([[0., 0.],
            [2., 1.]])}

    Args:
        count: How many filters of all leaves together are pruned at a time, the lowest.
            A 0-d tensor is clamped to what is left.
        when: The trigger that prunes. The default is the authors', every 30 batches;
            `every(30, start=29, stop=1000)` ends it.
        pattern: The units. Default: filters, along axis 0. In the Conv1D of
            transformers outputs lie along axis 1: `sf.patterns.channel(1)`.
        distribution: `sf.budgets.global_()`, or `sf.budgets.uniform()`, with which
            `count` units of each leaf or set are pruned.
        where: Which leaves are sparsified. Choose them: the outputs of the last layer
            are classes.

    Returns:
        An algorithm that starts dense. Filters that are left train on.

    Raises:
        TypeError: `count` is neither an int nor a tensor, or `pattern` is not a
            pattern.
        ValueError: An int `count` is negative or above what is left, units are single
            entries, or `distribution` is another.

    The change is taken to first order. The score of a filter is (sum of weight *
    gradient)^2, averaged over the steps since filters were pruned last. With the
    pattern of `sf.shrinking.groups`, or another `sf.patterns.tied`, the sum is over all
    parameters that go with a unit, in all members of its set (the S of eq. 8). For a
    sparsity that rises, and shares by path, give the score to `gmp`:

    >>> def squared_sum(rows):
    ...     return rows.sum(-1).square()
    >>> score = sf.scores.mean(
    ...     sf.scores.by_unit(sf.scores.movement, sf.patterns.channel(0), squared_sum)
    ... )
    >>> algorithm = sf.gmp(
    ...     0.5,
    ...     steps=1000,
    ...     score=score,
    ...     pattern=sf.patterns.channel(0, norm=torch.inf),
    ...     distribution=sf.budgets.by_path({"first.*": 0.25}),
    ... )

    Differs from the authors' code: it adds up a filter before it squares, as the paper
    says, where theirs adds up squares, which is the same for gates of one number;
    inside `with_optimizer` a score reads the weights after the optimizer's step.

    Verified by a worked example in which the sum of squares prunes the other filter,
    brute force over batches, also of tied sets, the shrunk model that has the outputs
    of the masked one, and the laws.

    Molchanov, Mallya, Tyree, Frosio and Kautz 2019, arXiv 1906.10771.
    """
    whole = _pooled("taylor", pattern, "max")
    unit = scores.by_unit(scores.movement, pattern, _squared_sum)
    return iterative(
        count=count,
        when=when,
        score=scores.mean(unit, reset=when),
        where=where,
        pattern=whole,
        distribution=distribution,
    )


def _squared_sum(rows: Tensor) -> Tensor:
    return _SUM(rows).square()


@described
def slimming(
    sparsity: Level,
    where: Where,
    *,
    steps: int,
    strength: float = 1e-4,
    pattern: Pattern = unstructured(),
    distribution: Distribution = global_(),
) -> Algorithm:
    """Network slimming: trains batch norm scales with an l1 term, and prunes the least.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.slimming(0.5, "*.weight", steps=2), sf.optimizers.sgd(0.1)
    ... )
    >>> params = {
    ...     "1.weight": torch.tensor([0.5, -0.1]),
    ...     "4.weight": torch.tensor([0.3, 0.05]),
    ... }
    >>> state = algorithm.init(params)
    >>> for step in range(2):
    ...     state = algorithm.update(
    ...         state, {path: torch.zeros(2) for path in params}, step
    ...     )
    >>> state.params
    {'1.weight': tensor([0.5000, 0.0000]), '4.weight': tensor([0.3000, 0.0000])}

    Args:
        sparsity: The sparsity of the scales, a float, a 0-d tensor or a Schedule.
        where: The scales, a glob such as "*.bn*.weight".
        steps: How many steps have the l1 term. The last of them prunes; from then on
            the rest is fine-tuned.
        strength: The gradient of the scales has strength * sign(scale) more (eq. 1).
        pattern: The units. With the pattern of `sf.shrinking.groups`, or another
            `sf.patterns.tied`, channels are pruned in all members of their set.
        distribution: How many scales each leaf keeps. Default: as |scale| decides, with
            one threshold for the whole network.

    Returns:
        An algorithm that starts dense. `sf.shrink(model, state, example)` removes the
        channels.

    Raises:
        TypeError: `steps` is not an int, `pattern` is not a pattern, or, with tied
            sets, `where` is no globs.
        ValueError: `steps` is below 1, `sparsity` is outside [0, 1], a glob matches no
            path, or, with tied sets at the first step, a scale has two dimensions or
            more.

    Only sets with a scale among their leaves are pruned; other sets stay. A channel's
    score is the mean of |scale| over its scales. A residual stream has no scale of its
    own: its channels take the scales of all norms that write to it or read it.

    Differs from the authors' code: exactly as many scales are kept as the sparsity
    says; and the shifts of pruned scales stay, where theirs sets them to 0 (with tied
    sets they go). `shrink` adds what they give to the next layer.

    Verified by a worked example, brute force over tied sets, the shrunk model that has
    the outputs of the masked one, and the laws.

    Liu, Li, Shen, Huang, Yan and Zhang 2017, arXiv 1708.06519.
    """
    check_int("slimming", "steps", steps, 1)
    whole = _pooled("slimming", pattern, _mean_of_scales)
    l1 = terms.on(where, terms.l1(strength))
    tied = isinstance(pattern, TiedPattern)
    if tied and callable(where):
        raise TypeError(
            "slimming: expected where to be globs of the scales of tied sets, got "
            f"{shown(where)}"
        )

    def chosen(params: Tree) -> Leaves:
        found = matching("slimming", where, flatten(params)[0])
        other = [
            f"shape {tuple(leaf.shape)} at {path!r}"
            for path, leaf in found.items()
            if leaf.ndim != 1
        ]
        if other:
            raise ValueError(
                f"slimming: expected scales of one dimension, got {', '.join(other)}: "
                "see where="
            )
        return found

    def before(state: State, step: Step) -> Tree:
        if tied:
            chosen(state.params)
        return optree.tree_map(lambda x: x * (step < steps), l1(state, step))

    def scales(state: State, grads: Tree, step: Step) -> Tree:
        own = chosen(state.params)
        return map_with_path(
            lambda p, x: x.abs() if p in own else torch.full_like(x, _NO_SCALE),
            state.params,
        )

    score, units = (scales, whole) if tied else (scores.magnitude, pattern)
    last = at([steps - 1])
    return with_terms(
        one_shot(
            sparsity,
            score,
            when=last,
            where=where,
            pattern=units,
            distribution=distribution,
        ),
        before,
    )


_NO_SCALE = -1.0  # which no absolute value is


def _mean_of_scales(rows: Tensor) -> Tensor:
    other = rows == _NO_SCALE
    return _SUM(torch.where(other, 0.0, rows)) / _SUM((~other).to(rows.dtype))


@described
def fpgm(
    sparsity: Level,
    *,
    epoch: int,
    steps: int,
    pattern: Pattern = patterns.channel(0),
    distribution: Distribution = uniform(),
    where: Where = default_where,
) -> Algorithm:
    """FPGM: prunes the filters nearest to the geometric median of their layer.

    >>> algorithm = sf.methods.fpgm(1 / 5, epoch=10, steps=20)
    >>> state = algorithm.init(
    ...     {"w": torch.tensor([[0.0], [2.0], [3.0], [10.0], [11.0]])}
    ... )
    >>> state = algorithm.update(state, state.params, 9)
    >>> state.params["w"].T, state.masks["w"].all()
    (tensor([[ 0.,  2.,  0., 10., 11.]]), tensor(True))
    >>> algorithm.update(state, state.params, 19).masks["w"].T
    tensor([[ True, False,  True,  True,  True]])

    Args:
        sparsity: The share of filters that are pruned, a float, a 0-d tensor or a
            Schedule.
        epoch: The steps of an epoch. After its last step filters are chosen again, set
            to 0 and trained further, so that they may recover: masks stay open.
        steps: The length of the run. The last choice, at the end of its last whole
            epoch, is for good. `epoch=1, steps=1` prunes a trained network once.
        pattern: The units. Default: filters, along axis 0. In the Conv1D of
            transformers outputs lie along axis 1: `sf.patterns.channel(1)`.
        distribution: The share that each leaf keeps. Default: the same.
        where: Which leaves are sparsified. Choose them: the outputs of the last layer
            are classes.

    Returns:
        An algorithm that starts dense. `sf.shrink` removes the filters of the last
        choice.

    Raises:
        TypeError: `epoch` or `steps` is not an int, `sparsity` is neither a float nor a
            schedule, or `pattern` is not a pattern.
        ValueError: `epoch` is below 1 or longer than `steps`, `sparsity` is outside [0,
            1], or units are single entries.

    In each leaf the filters with the smallest sum of distances to the other filters are
    pruned (eq. 4 and 5). With the pattern of `sf.shrinking.groups`, or another
    `sf.patterns.tied`, a unit is the vector of all of its entries: the filters of all
    layers that write it, its biases, scales and shifts, and the columns of all layers
    that read it. Distances are Euclidean, between units of a set, which all have as
    many entries.

    Differs from the authors' code: exactly as many filters are pruned as the sparsity
    says, where theirs truncates, and all compete, where theirs may leave out some of
    small norm first.

    Verified by recordings of the filters that the authors' code prunes (1 case), a
    worked example, brute force over tied sets, the shrunk model that has the outputs of
    the masked one, and the laws.

    He, Liu, Wang, Hu and Yang 2019, arXiv 1811.00250.
    """
    check_int("fpgm", "epoch", epoch, 1)
    check_int("fpgm", "steps", steps, epoch)
    last = steps // epoch * epoch - 1
    whole = _pooled("fpgm", pattern, "max")
    prune = gmp(
        sparsity,
        score=scores.distance(pattern=pattern),
        when=every(epoch, start=epoch - 1, stop=last + 1),
        where=where,
        pattern=whole,
        distribution=distribution,
        init="dense",
        regrow=True,
    )
    if last < epoch:
        return prune
    again = every(epoch, start=epoch - 1, stop=last)
    return sequence(
        prune,
        gmp(0.0, when=again, where=where, pattern=whole, init="dense", regrow=True),
    )


@described
def proximal(
    strength: float,
    *,
    rate: Level,
    pattern: Pattern = unstructured(),
    when: Trigger = always(),
    where: Where = default_where,
) -> Algorithm:
    """Proximal gradient: moves weights, or whole units, towards zero after each step.

    >>> algorithm = sf.with_optimizer(
    ...     sf.methods.proximal(1.0, rate=0.5), sf.optimizers.sgd(0.5)
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[2.0, -0.25, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[1.0, 0.0, 1.0]])}, 0).params
    {'w': tensor([[1., 0., 0.]])}
    >>> algorithm = sf.methods.proximal(1.0, rate=2.5, pattern=sf.patterns.channel(0))
    >>> state = algorithm.init({"w": torch.tensor([[3.0, 4.0], [1.0, 2.0]])})
    >>> algorithm.update(state, state.params, 0).params
    {'w': tensor([[1.5000, 2.0000],
            [0.0000, 0.0000]])}

    Args:
        strength: The factor of the penalty.
        rate: The learning rate, a number or a Schedule.
        pattern: The units. Default: each weight. A pattern such as `channel(0)` makes
            it group lasso.
        when: The trigger at which weights move.
        where: Which leaves are sparsified.

    Returns:
        An algorithm that starts dense.

    Raises:
        TypeError: `rate` is neither a number nor a schedule, or `strength` no number.
        ValueError: `rate` or `strength` is not finite.

    Small weights end at zero. This is gradient descent on the loss plus strength * sum
    |w|: w becomes sign(w) * max(|w| - rate * strength, 0). In group lasso it is
    strength * the sum of the lengths of all units: a unit u becomes u * max(1 - rate *
    strength / |u|, 0). Pruned weights have their gradient, too, and come back where it
    is larger than the strength. Nothing says how sparse the result is.

    Differs from the authors' code: this is the proximal step of sgd; theirs also weighs
    it for adaptive optimizers.

    Verified by the conditions of the optimum at the fixed point, for lasso and group
    lasso, a worked example, and the laws.

    Deleu and Bengio 2021, arXiv 2102.03869.
    """
    number("strength of proximal", strength)
    size_of_step = as_schedule(rate)

    def step_towards_zero(
        path: str, weight: Tensor, mask: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        units = units_of(pattern, tuple(weight.shape))
        limit = size_of_step(step) * strength
        w = wide(weight)
        if units.single:
            length = w.abs()
        else:
            length = from_rows(units, to_rows(units, w, _LENGTH))
        kept = length > limit
        return torch.where(kept, w - limit * (w / length), 0.0).to(weight.dtype), kept

    return rewrite(step_towards_zero, when=when, where=where, pruned="train")
