"""Pruning by score: one_shot, gmp, iterative, ste.

Masks shrink, or are chosen afresh with regrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sparsefn._engine.selection import Count
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.frame import Decision, MaskRecipe
from sparsefn.algorithms.memory import Memory, Pruned, Read, Scores
from sparsefn.algorithms.start import Init
from sparsefn.algorithms.unit_table import Open, UnitTable, both_of
from sparsefn.core.checks import (
    check_call,
    check_sparsity,
    described,
    is_int,
    preset,
    shown,
)
from sparsefn.core.rounding import CountRule, as_fraction, fraction_at, rounded
from sparsefn.core.schedules import polynomial
from sparsefn.core.state import Algorithm, Level, Score, Step, Trigger, Where
from sparsefn.core.timetable import pace
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import always, at, every
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import Distribution, is_uniform, uniform
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.scores import magnitude
from sparsefn.masks.select import checked_count

# (units, scores, which units compete) -> kept counts
Counts = Callable[[UnitTable, Scores, Open], Sequence[Count]]


def _run(counts: Counts, regrow: bool, units: UnitTable, scores: Read) -> Decision:
    # Keep the best units of each group by score.
    score = scores("score")
    among = units.free if regrow else units.active
    kept = units.best(score, counts(units, score, among), among=among)
    masks = units.masks_of(kept, score, units.allowed if regrow else units.masks)
    shrinks = not regrow and not units.elementwise
    return Decision(both_of(masks, units.masks) if shrinks else masks)


@described
def gmp(
    sparsity: Level | Counted | None,
    score: Score = magnitude,
    *,
    when: Trigger | None = None,
    steps: int | None = None,
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "magnitude",
    pruned: Pruned = "zero",
    regrow: bool = False,
) -> Algorithm:
    """Gradual magnitude pruning: the schedule says how many weights are kept.

    >>> algorithm = sf.gmp(sf.schedules.polynomial(0.0, 0.5, begin=0, end=10))
    >>> params = {"w": torch.tensor([[4.0, 3.0], [2.0, 1.0]])}
    >>> state = algorithm.update(algorithm.init(params), params, 10)
    >>> state.params
    {'w': tensor([[4., 3.],
            [0., 0.]])}

    Say how long the run is, and the sparsity of its end:

    >>> state = sf.gmp(0.9, steps=400).init({"w": torch.randn(10, 100)})
    >>> kept = {}
    >>> for step in range(400):
    ...     state = sf.gmp(0.9, steps=400).update(state, state.params, step)
    ...     kept[step] = int(state.masks["w"].sum())
    >>> [kept[step] for step in (0, 100, 200, 296, 399)]
    [1000, 361, 131, 100, 100]

    Args:
        sparsity: Fraction of the weights that is pruned: a float, a schedule or a 0-d
            tensor; None where the pattern fixes it. It may be a count that the scores
            decide, such as `sf.counts.above(0.1)`, with `uniform()` or `global_()`.
            Without `steps` a float is the sparsity from the start on.
        score: Score of the weights, by which the best are kept.
        when: Trigger at which masks change. None: as `steps` says, else every step.
        steps: Length of the run in steps: masks change every 100 steps (in a run below
            10,000, every hundredth part of it) in its first three quarters, while the
            sparsity rises from 0 to the float or 0-d tensor `sparsity` as 1 - (1 -
            t)^3, equation 1 of the paper. `when` replaces that where given.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pattern: Which weights are kept or pruned as one, and which compete. Default:
            each weight by itself, in its whole leaf.
        distribution: How the kept weights are split between leaves. Default: each leaf
            has the same sparsity.
        key: PRNG key of random masks and scores. None: `sf.random.key(0)`.
        init: First masks, as in `sf.static`. "magnitude" keeps the largest weights by
            `sparsity(0)`; it is "dense" for a count by another score than magnitude,
            because its threshold says nothing about magnitudes.
        pruned: What becomes of pruned weights, as in `sf.static`.
        regrow: Whether every weight competes each time. Default: masks only ever
            shrink, so where the schedule falls the mask stays.

    Returns:
        Algorithm that keeps the best weights at each trigger.

    Raises:
        TypeError: An argument is of another kind, or `sparsity` is None and the pattern
            leaves the count open.
        ValueError: A fraction is outside [0, 1] or a name unknown; a count comes with a
            pattern that fixes it or another distribution; `steps` comes with None, a
            schedule or a count, which say themselves how many are kept; or, in the
            algorithm's `init`, as in `sf.static`.

    Zhu & Gupta 2017, arXiv 1710.01878.
    """
    rule = Competition(pattern, distribution).check()
    if steps is not None:
        when, sparsity = _rise(when, sparsity, steps)
    goal = rule.goal(sparsity)
    if goal is None and pattern.fixed is None:
        raise TypeError(
            "expected sparsity to be a float in [0, 1], a schedule or a 0-d tensor, "
            "got None"
        )
    if (
        isinstance(goal, Counted)
        and isinstance(init, str)
        and init == "magnitude"
        and score is not magnitude
    ):
        init = "dense"

    memory = Memory({"score": score}, pruned)
    method = partial(_run, UnitTable.wanted, regrow)
    return MaskRecipe(
        rule, memory, method, goal, init, where, key, always() if when is None else when
    ).build()


def _rise(
    when: Trigger | None, sparsity: Level | Counted | None, steps: int
) -> tuple[Trigger, Level]:
    # A sparsity that is reached where masks change last.
    n, stop = pace("gmp", steps)
    if sparsity is None or callable(sparsity) or isinstance(sparsity, Counted):
        raise ValueError(
            "gmp: expected the sparsity of the end as a float or a 0-d tensor beside "
            f"steps={steps}, got {shown(sparsity)}, which says itself how many are "
            "kept at each step: leave steps out, and give `when`"
        )
    check_sparsity(sparsity)
    end = (stop - 1) // n * n
    level: Level = polynomial(0.0, sparsity, begin=0, end=end) if end else sparsity
    return every(n, stop=stop) if when is None else when, level


@preset(gmp, when=at([0]), fixed={"init": "dense", "steps": None})
def one_shot() -> None:
    """Dense until its trigger, then pruned by any score; the score may use gradients.

    >>> algorithm = sf.one_shot(0.5, score=sf.scores.saliency)
    >>> state = algorithm.init({"w": torch.tensor([[2.0, -1.0, 0.5, 3.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.1, -0.4, 1.0, -0.05]])}, 0).masks
    {'w': tensor([[False,  True,  True, False]])}

    Args:
        sparsity: Fraction of the weights that is pruned, as in `gmp`.
        score: Score whose highest weights are kept. Default: magnitude.
        when: Trigger at which weights are pruned. Default: step 0.

    Returns:
        Algorithm, as from `gmp`. All weights are kept until `when` fires.

    `gmp` with init="dense": it takes all other arguments of `gmp` but `steps`. With
    saliency at step 0 this is SNIP: Lee et al. 2019, arXiv 1810.02340. Inside
    `with_optimizer` masks follow the optimizer's step, and such a score would multiply
    stepped weights by the gradient of the weights before it: leave that one step out,
    `with_optimizer(sf.one_shot(0.9, sf.scores.saliency), optimizer, skip=sf.at([0]))`.
    """


@described
def iterative(
    fraction: Level | None = None,
    *,
    count: Count | CountRule = rounded,
    when: Trigger = always(),
    score: Score = magnitude,
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "dense",
    pruned: Pruned = "zero",
) -> Algorithm:
    """At each trigger, prune a fraction of what REMAINS, or a count of it.

    >>> algorithm = sf.iterative(0.2, when=sf.always())
    >>> state = algorithm.init({"w": torch.arange(100.0).reshape(10, 10)})
    >>> counts = []
    >>> for step in range(5):
    ...     state = algorithm.update(state, state.params, step)
    ...     counts.append(int(state.masks["w"].sum()))
    >>> counts
    [80, 64, 51, 41, 33]
    >>> algorithm = sf.iterative(count=3)
    >>> int(algorithm.update(state, state.params, 5).masks["w"].sum())
    30

    Args:
        fraction: Fraction of the remaining units that is pruned: a float, a schedule or
            a 0-d tensor. None where `count` says how many.
        count: How many units are pruned: an int or a 0-d int tensor, or a function of
            (fraction, number of remaining units) that returns it. It is per competing
            group, or in total with `global_()`. A tensor above what is active is
            clamped, and so is an int on a device, where looking would wait. Default:
            round half even.
        when: Trigger at which masks change.
        score: Score of the weights, by which the best stay.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pattern: Which weights are kept or pruned as one, and which compete. Default:
            each weight by itself, in its whole leaf.
        distribution: `uniform()` or `global_()`; another one would need a total.
        key: PRNG key of random masks and scores. None: `sf.random.key(0)`.
        init: First masks, as in `sf.static`.
        pruned: What becomes of pruned weights, as in `sf.static`.

    Returns:
        Algorithm whose masks only ever shrink.

    Raises:
        TypeError: An argument is of another kind, or there are both a fraction and a
            count, or neither.
        ValueError: A fraction is outside [0, 1] or a name unknown; an int count is
            negative, or, in an update, above what is active; the pattern fixes the
            count; the distribution is another one; or, in the algorithm's `init`, as in
            `sf.static`.

    Frankle & Carbin 2019, arXiv 1803.03635.
    """
    rule = Competition(pattern, distribution).check()
    lost = _removal(fraction, count)
    if pattern.fixed is not None:
        raise ValueError(
            f"iterative: expected a pattern that leaves the count open, got {pattern}"
        )
    if not (rule.joint or is_uniform(distribution)):
        raise ValueError(
            "iterative: expected distribution to be uniform() or global_(), which "
            "follow what remains"
        )

    def counts(units: UnitTable, scores: Scores, among: Open) -> list[Count]:
        remain = units.totals(units.active)
        kept: list[Count] = []
        names = (
            [", ".join(map(repr, units.grids.local))]
            if rule.joint
            else map(repr, units.grids.local)
        )
        for name, n in zip(names, torch.split(remain, units.groups), strict=True):
            try:
                kept.append(n - checked_count("count", lost(n, units.step), n))
            except ValueError as error:
                raise ValueError(f"iterative: {error} at {name}") from None
        return kept

    memory = Memory({"score": score}, pruned)
    method = partial(_run, counts, False)
    return MaskRecipe(rule, memory, method, None, init, where, key, when).build()


def _removal(
    fraction: Level | None, count: Count | CountRule
) -> Callable[[Tensor, Step], Count]:
    """How many of the active units are pruned at a step."""
    level = as_fraction(fraction, "fraction")
    if callable(count):
        check_call("count", count, "fraction", "active")
        if level is None:
            raise TypeError(
                "iterative: expected a fraction of what remains, or a count of it, "
                "got neither"
            )
        return lambda active, step: count(fraction_at(level, step), active)
    if level is not None:
        raise TypeError(
            f"iterative: expected a fraction or a count, got both {fraction!r} and "
            f"{count!r}"
        )
    if not is_int(count) and not isinstance(count, Tensor):
        raise TypeError(
            "iterative: expected count to be an int, a tensor or a function, got "
            f"{count!r}"
        )
    if isinstance(count, int) and count < 0:
        raise ValueError(f"iterative: expected count >= 0, got {count}")
    return lambda active, step: count


@preset(gmp, when=always(), fixed={"pruned": "train", "regrow": True, "steps": None})
def ste() -> None:
    """Straight-through masks: dense weights train on, the forward pass sees the best.

    >>> algorithm = sf.with_optimizer(sf.ste(0.5), sf.optimizers.sgd(0.2))
    >>> state = algorithm.init({"w": torch.tensor([[1.0, 0.9]])})
    >>> state = algorithm.update(state, {"w": torch.tensor([[0.0, -1.0]])}, 0)
    >>> state.params, state.masks
    ({'w': tensor([[1.0000, 1.1000]])}, {'w': tensor([[False,  True]])})

    Args:
        sparsity: Fraction of the weights that is pruned, as in `gmp`.
        score: Score whose highest weights are kept. Default: magnitude.
        when: Trigger at which masks change. Default: every step.

    Returns:
        Algorithm, as from `gmp`. Every weight gets the dense gradient.

    `gmp` with pruned="train", regrow=True and when=always(): it takes all other
    arguments of `gmp` but `steps`.

    Wortsman et al. 2019, arXiv 1906.00586; with pattern=nm(n, m), Zhou et al. 2021,
    arXiv 2102.04010.
    """
