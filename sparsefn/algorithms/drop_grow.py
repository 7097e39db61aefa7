"""Dynamic sparse training: drop some weights, grow as many elsewhere.

Presets set, rigl, snfs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.numbers import Real
from sparsefn.algorithms.competition import Competition
from sparsefn.algorithms.frame import Decision, Grown, MaskRecipe, zeros
from sparsefn.algorithms.memory import Memory, Pruned, Read, Scores
from sparsefn.algorithms.start import Init
from sparsefn.algorithms.unit_table import Flags, UnitTable, either_of
from sparsefn.core.checks import check_call, described, preset
from sparsefn.core.rounding import CountRule, fraction_at, of_groups, rounded
from sparsefn.core.schedules import cosine_decay
from sparsefn.core.state import Algorithm, Level, Schedule, Score, Trigger, Where
from sparsefn.core.timetable import UNTIMED, pace
from sparsefn.core.tree.where import default_where
from sparsefn.core.triggers import every
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import Distribution, uniform
from sparsefn.masks.budgets.redistribute import (
    GrowCount,
    Redistribute,
    Share,
    allocate,
    check_redistribute,
    mean_active,
)
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.patterns.shards import check_whole_rows
from sparsefn.masks.patterns.units import check_single
from sparsefn.masks.scores import gradient, magnitude, momentum, ranked
from sparsefn.masks.scores import random as random_score

# A fraction, perhaps another one at every step; a count by scores; None where the
# pattern fixes it; or as many as are active.
Target = Level | Counted | Literal["current"] | None


@described
def drop_grow(
    sparsity: Target,
    *,
    drop: Score = magnitude,
    grow: Score = gradient,
    drop_fraction: Level | Counted | None = None,
    count: CountRule = rounded,
    grown: Grown = zeros,
    grow_count: GrowCount | None = None,
    exclude_dropped: bool = False,
    restart_dropped: bool = False,
    redistribute: Redistribute | Share | None = None,
    when: Trigger | None = None,
    steps: int | None = None,
    where: Where = default_where,
    pattern: Pattern = unstructured(),
    distribution: Distribution = uniform(),
    key: Tensor | None = None,
    init: Init = "random",
    pruned: Pruned = "zero",
) -> Algorithm:
    """Drop the worst of the kept weights, then grow the best of the pruned ones.

    >>> algorithm = sf.drop_grow(
    ...     0.5,
    ...     drop=sf.scores.magnitude,
    ...     grow=sf.scores.gradient,
    ...     drop_fraction=0.5,
    ...     init="magnitude",
    ... )
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, 0).masks
    {'w': tensor([[ True, False, False,  True]])}

    Args:
        sparsity: Fraction of the weights that is pruned: a float, a schedule, a 0-d
            tensor, or a count that the growth scores decide among the weights that may
            be kept, with an `init` that needs no sparsity. None where the pattern fixes
            it. "current" grows back as many as were dropped.
        drop: Score whose lowest kept weights are dropped. It reads the weights as they
            are.
        grow: Score whose highest pruned weights grow. It reads the gradient of the same
            step.
        drop_fraction: Fraction of the kept weights that is dropped: a float, a
            schedule, a 0-d tensor, or a count that the drop scores of the kept weights
            decide, such as `sf.counts.below(0.1)`. None: as `steps` says, else 0.3.
        count: Function of (drop fraction, number of kept weights) that returns how many
            are dropped. Default: round half even.
        grown: Function of (state, grown masks, step) that returns a tree like params:
            newly grown weights start at its values.
        grow_count: Function of (growth scores, free units, wanted counts), a row for
            each group, that returns how many really grow. None: all that are wanted.
            `sf.redistribute.independently` gives each a chance of its own.
        exclude_dropped: Whether just-dropped weights may not grow back.
        restart_dropped: Whether a just-dropped weight that grows back starts at
            `grown`. Default: it keeps its value.
        redistribute: How regrowth moves between leaves, such as
            `sf.redistribute.mean_active`: the sum is exact, and no leaf grows above its
            size. None: each leaf keeps its own count.
        when: Trigger at which masks change. None: as `steps` says, else
            `sf.every(100)`.
        steps: Length of the run in steps. Give it: masks change every 100 steps (in a
            run below 10,000, every hundredth part of it) in its first three quarters,
            while the drop fraction falls from 0.3 to 0 as half a cosine wave. `when`
            and `drop_fraction` replace these where given.
        where: Which leaves are sparsified: a function of (path, leaf), a glob or
            several globs. Default: the weights of layers.
        pattern: Which weights are kept or pruned as one, and which compete. Default:
            each weight by itself, in its whole leaf.
        distribution: How the kept weights are split between leaves. Default: each leaf
            has the same sparsity.
        key: PRNG key of random masks and scores. None: `sf.random.key(0)`.
        init: First masks, as in `sf.static`. With sparsity "current", "random" and
            "magnitude" are "dense".
        pruned: What becomes of pruned weights, as in `sf.static`.

    Returns:
        Algorithm. Where `when` fires, `count(drop_fraction, active)` weights of each
        group are dropped and as many grown as the sparsity asks for, so that exactly
        n_kept are active afterwards. Where too many are active (a dense start) more are
        dropped.

    Raises:
        TypeError: An argument is of another kind, or `sparsity` is None and the pattern
            leaves the count open.
        ValueError: A fraction is outside [0, 1] or a name unknown; the pattern picks
            its units together; `redistribute` comes with a pattern or `global_()`,
            `steps` with both `when` and `drop_fraction`, a count by scores with a
            pattern that fixes it, with another distribution than `uniform()` and
            `global_()`, or beside `count` or the rate of `redistribute`; or, in the
            algorithm's `init`, as in `sf.static`.

    Inside `with_optimizer` both scores see the optimizer's state in `state.opt`.
    """
    check_call("count", count, "fraction", "active")
    check_call("grown", grown, "state", "grown", "step")
    if grow_count is not None:
        check_call("grow_count", grow_count, "scores", "free", "wanted")
    rule = Competition(pattern, distribution).check()
    current = isinstance(sparsity, str)
    check_single("drop_grow", pattern)
    if (sparsity is None and pattern.fixed is None) or (
        current and sparsity != "current"
    ):
        wrong = ValueError if current else TypeError
        raise wrong(
            "expected sparsity to be a float, a schedule, a 0-d tensor or 'current', "
            f"got {sparsity!r}"
        )
    level = None if isinstance(sparsity, str) else rule.goal(sparsity)
    plan = None if redistribute is None else check_redistribute(redistribute)
    if plan is not None and (rule.joint or pattern != unstructured()):
        raise ValueError(
            "redistribute moves elements between leaves: it needs unstructured() and "
            "no global_()"
        )
    when, drop_fraction = _timetable(when, drop_fraction, steps)
    fraction = rule.goal(drop_fraction, "drop_fraction")
    assert fraction is not None
    if isinstance(fraction, Counted) and (
        count is not rounded or (plan is not None and plan.rate is not None)
    ):
        other = "count" if count is not rounded else "the rate of redistribute"
        raise ValueError(
            f"drop_fraction: {fraction!r} says how many are dropped, so that {other} "
            "would say nothing"
        )
    if current and isinstance(init, str) and init in ("random", "magnitude"):
        init = "dense"
    shared = {} if plan is None or plan.score is None else {"share": plan.score}
    memory = Memory({"drop": drop, "grow": grow, **shared}, pruned)

    cycle = _Cycle(
        current, fraction, count, grow_count, exclude_dropped, restart_dropped, plan
    )
    return MaskRecipe(
        rule,
        memory,
        cycle.run,
        level,
        init,
        where,
        key,
        when,
        grown,
        leafwise=plan is None,
        exact=grow_count is None,
    ).build()


def _timetable(
    when: Trigger | None, fraction: Level | Counted | None, steps: int | None
) -> tuple[Trigger, Level | Counted]:
    # What is given, else what Evci et al. 2020 chose for a run of that length.
    often: Trigger = UNTIMED
    share: Level | Counted = 0.3
    if steps is not None:
        n, stop = pace("drop_grow", steps)
        if when is not None and fraction is not None:
            raise ValueError(
                "expected steps, or both when and drop_fraction, got all three: steps "
                "would say nothing"
            )
        often = every(n, stop=stop)
        share = cosine_decay(0.3, stop)
    return often if when is None else when, share if fraction is None else fraction


# ---- presets -------------------------------------------------------------------------


def _by_sign(by_sign: bool) -> dict[str, Score]:
    return {"drop": ranked(magnitude)} if by_sign else {}


@preset(drop_grow, grow=random_score, renamed={"by_sign": _by_sign})
def set() -> None:
    """Sparse evolutionary training: drop the smallest weights, grow at random.

    >>> algorithm = sf.set(0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"w": torch.randn(4, 4)})
    >>> int(algorithm.update(state, state.params, 0).masks["w"].sum())
    8

    Args:
        sparsity: Fraction of the weights that is pruned, as in `drop_grow`.
        steps: Length of the run in steps, as in `drop_grow`. Give it, or `when` and
            `drop_fraction`.
        key: PRNG key of the first masks and of what grows. None: `sf.random.key(0)`.

    Returns:
        Algorithm, as from `drop_grow`.

    `drop_grow` with grow=random: it takes all other arguments of `drop_grow`, too. The
    paper drops an equal share of each sign, the code of ITOP equal numbers:
    `sf.set(0.9, drop=sf.scores.ranked(sf.scores.magnitude))` drops as many positive
    weights as negative ones, while they last, the smallest of each.

    Mocanu et al. 2018, arXiv 1707.04780.
    """
    # How masks change: `_Cycle.run`, below.


@preset(drop_grow, drop=magnitude, grow=gradient)
def rigl() -> None:
    """RigL: drop the smallest weights, grow where the dense gradient is largest.

    >>> algorithm = sf.rigl(0.5, drop_fraction=0.5, init="magnitude")
    >>> state = algorithm.init({"w": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    >>> algorithm.update(state, {"w": torch.tensor([[0.0, 0.0, 5.0, 9.0]])}, 0).masks
    {'w': tensor([[ True, False, False,  True]])}

    Args:
        sparsity: Fraction of the weights that is pruned, as in `drop_grow`.
        steps: Length of the run in steps, as in `drop_grow`. Give it, or `when` and
            `drop_fraction`.
        key: PRNG key of the first masks. None: `sf.random.key(0)`.

    Returns:
        Algorithm, as from `drop_grow`.

    `drop_grow` with drop=magnitude and grow=gradient: it takes all other arguments of
    `drop_grow`, too. `sf.rigl(0.9, steps=10_000)` is the algorithm of the paper for a
    run of 10,000 steps.

    Evci et al. 2020, arXiv 1911.11134, algorithm 1.
    """
    # How masks change: `_Cycle.run`, below.


def _decay(decay: float) -> dict[str, Score]:
    return {"grow": momentum(decay)}


@preset(
    drop_grow,
    grow=momentum(0.9),
    redistribute=mean_active,
    renamed={"decay": _decay},
)
def snfs() -> None:
    """Sparse networks from scratch: regrow across leaves, by the gradient's average.

    >>> algorithm = sf.snfs(0.5, drop_fraction=0.5, key=sf.random.key(0))
    >>> state = algorithm.init({"a": torch.randn(4, 4), "b": torch.randn(4, 4)})
    >>> grads = {"a": torch.ones(4, 4), "b": 3 * torch.ones(4, 4)}
    >>> masks = algorithm.update(state, grads, 0).masks
    >>> int(masks["a"].sum()), int(masks["b"].sum())
    (6, 10)

    Args:
        sparsity: Fraction of the weights that is pruned, as in `drop_grow`.
        steps: Length of the run in steps, as in `drop_grow`. Give it, or `when` and
            `drop_fraction`.
        key: PRNG key of the first masks. None: `sf.random.key(0)`.

    Returns:
        Algorithm, as from `drop_grow`.

    `drop_grow` with grow=momentum(0.9) and redistribute=mean_active: it takes all other
    arguments of `drop_grow`, too. The regrowth is split by the mean momentum over the
    active weights of each leaf. Another decay is another score,
    `grow=sf.scores.momentum(0.5)`. The total is exact, a leaf's count is free after the
    first update.

    Dettmers & Zettlemoyer 2019, arXiv 1907.04840.
    """
    # How masks change: `_Cycle.run`, below.


# ---- one cycle: drop, then grow ------------------------------------------------------


class _Cycle(NamedTuple):
    """The arguments of `drop_grow` that one cycle reads."""

    current: bool
    fraction: Schedule | Counted
    rounding: CountRule
    grow_count: GrowCount | None
    exclude_dropped: bool
    restart_dropped: bool
    plan: Redistribute | None

    def run(self, units: UnitTable, scores: Read) -> Decision:
        """Drop the worst of the active units of each group, then grow the best of its
        other units, up to the target.
        """
        drop = scores("drop")
        grow = scores("grow")
        plan = self.plan
        active = units.active
        n_active = units.totals(active)
        target = n_active if self.current else units.target(grow, units.free)
        share = grow if plan is None or plan.score is None else scores("share")
        n_drop = self._dropped(units, active, n_active, drop, share)
        n_drop = self._within(units, n_active, target, n_drop)
        stay = units.best(drop, n_active - n_drop, among=active)
        n_stay = n_active - n_drop
        if units.joint or units.grids.least:
            n_stay = units.totals(stay)
        if plan is not None:
            barred = n_active if self.exclude_dropped else n_stay
            target = _moved(plan, units, share, stay, n_stay, barred, target)
        taken = active if self.exclude_dropped else stay
        n_grow = self._grown(units, grow, taken, (target - n_stay).clamp(min=0))
        grew = units.best(grow, n_grow, among=units.free, but=taken, held=stay)
        new = units.masks_of(either_of(stay, grew), drop, units.masks)
        if not self.restart_dropped:
            return Decision(new)
        return Decision(new, units.masks_of(stay, drop, units.masks))

    def _dropped(
        self,
        units: UnitTable,
        active: Flags,
        n_active: Tensor,
        drop: Scores,
        share: Scores,
    ) -> Tensor:
        # How many units of each group are dropped: a part of them, or as many as their
        # scores say.
        plan = self.plan
        fraction = self.fraction
        if isinstance(fraction, Counted):
            return n_active - units.counts(units.counted(fraction, drop, active))
        rate = fraction_at(fraction, units.step)
        groups = units.groups
        rates: Sequence[Real] = [rate] * len(groups)
        if plan is not None and plan.rate is not None:
            own = plan.rate(rate, share.values, units.masks)
            rates = [own.get(path, rate) for path in units.grids.local]
        return of_groups(self.rounding, rates, n_active, groups)

    def _within(
        self, units: UnitTable, n_active: Tensor, target: Tensor, n_drop: Tensor
    ) -> Tensor:
        # As many, no more than can grow again or are there, and what is too much.
        # Where regrowth moves between leaves, their own counts bind only if there are
        # too many in all.
        wanted = target
        if self.plan is not None:
            wanted = torch.where(n_active.sum() > target.sum(), target, n_active)
        n_drop = n_drop.clamp(min=0)
        if self.exclude_dropped:
            n_drop = torch.minimum(n_drop, (units.capacity - wanted).clamp(min=0))
        return torch.minimum(torch.maximum(n_drop, n_active - wanted), n_active)

    def _grown(
        self, units: UnitTable, grow: Scores, taken: Flags, n_grow: Tensor
    ) -> Tensor:
        # How many units of each group grow: all that are wanted, or as many of them as
        # a function says.
        if self.grow_count is None:
            return n_grow
        check_whole_rows("grow_count", units.grids)
        others = units.within([~rows for rows in taken])
        rows = zip(
            units.rows(grow),
            units.rows_of(others),
            torch.split(n_grow, units.groups),
            strict=True,
        )
        return torch.cat([self.grow_count(*row) for row in rows])


def _moved(
    plan: Redistribute,
    units: UnitTable,
    share: Scores,
    stay: Flags,
    n_stay: Tensor,
    barred: Tensor,
    target: Tensor,
) -> Tensor:
    # The total regrowth is what all leaves lost; each leaf's part follows its share, up
    # to its capacity.
    parts = plan.shares(share.values, units.masks, units.masks_of(stay))
    caps = dict(zip(units.leaves, (units.capacity - barred).unbind(), strict=True))
    regrown = allocate(
        parts, (target.sum() - n_stay.sum()).clamp(min=0), caps, plan.most
    )
    return n_stay + units.counts([regrown[path] for path in units.leaves])
