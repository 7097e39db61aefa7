"""One cycle of dynamic sparse training: a quota for each group, then drop and grow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn.algorithms.frame import Decision
from sparsefn.algorithms.memory import Read, Scores
from sparsefn.algorithms.units import Field, Flags, either_of
from sparsefn.budgets.counts import Counted
from sparsefn.budgets.redistribute import GrowCount, Redistribute, allocate
from sparsefn.engine.checks import CountRule, Schedule, Step, fraction_at, of_groups


class Cycle(NamedTuple):
    """What `drop_grow` was told: see there."""

    current: bool
    fraction: Schedule | Counted
    rounding: CountRule
    grow_count: GrowCount | None
    exclude_dropped: bool
    restart_dropped: bool
    plan: Redistribute | None


def run(cycle: Cycle, units: Field, scores: Read, step: Step) -> Decision:
    """Drop the worst of the active units of each group, then grow the best of the
    others, up to the target.
    """
    drop = scores("drop")
    grow = scores("grow")
    active = units.active
    had = units.totals(active)
    target = had if cycle.current else units.target(grow, units.free)
    share = (
        scores("share")
        if cycle.plan is not None and cycle.plan.score is not None
        else grow
    )
    lost = _lost(cycle, units, active, had, target, drop, share, step)
    stay = units.best(drop, had - lost, among=active)
    left = units.totals(stay) if units.joint or units.least else had - lost
    if cycle.plan is not None:
        target = _moved(
            cycle.plan,
            units,
            share,
            stay,
            left,
            had if cycle.exclude_dropped else left,
            target,
        )
    taken = active if cycle.exclude_dropped else stay
    more = _more(cycle, units, grow, taken, (target - left).clamp(min=0))
    grew = units.best(grow, more, among=units.free, but=taken, held=stay)
    new = units.masks_of(either_of(stay, grew), drop, units.masks)
    return Decision(
        new, units.masks_of(stay, drop, units.masks) if cycle.restart_dropped else None
    )


def _lost(
    cycle: Cycle,
    units: Field,
    active: Flags,
    had: Tensor,
    target: Tensor,
    drop: Scores,
    share: Scores,
    step: Step,
) -> Tensor:
    # How many units of each group are dropped: a part of them, or as many as their
    # scores say, and what is too much.
    plan = cycle.plan
    fraction = cycle.fraction
    if isinstance(fraction, Counted):
        lost = had - units.counts(units.counted(fraction, drop, active))
    else:
        rate = fraction_at(fraction, step)
        own = (
            {}
            if plan is None or plan.rate is None
            else plan.rate(rate, share.values, units.masks)
        )
        lost = of_groups(
            cycle.rounding,
            [own.get(path, rate) for path in units.grids],
            had,
            units.groups,
        )
    # Where regrowth moves between leaves, their own counts bind only if there are too
    # many in all.
    wanted = (
        target if plan is None else torch.where(had.sum() > target.sum(), target, had)
    )
    lost = lost.clamp(min=0)
    if cycle.exclude_dropped:
        lost = torch.minimum(lost, (units.capacity - wanted).clamp(min=0))
    return torch.minimum(torch.maximum(lost, had - wanted), had)


def _more(
    cycle: Cycle, units: Field, grow: Scores, taken: Flags, more: Tensor
) -> Tensor:
    # How many units of each group grow: all that are wanted, or as many of them as a
    # function says.
    if cycle.grow_count is None:
        return more
    others = units.within([~rows for rows in taken])
    rows = zip(
        units.rows(grow, "grow_count"),
        units.rows_of(others),
        torch.split(more, units.groups),
        strict=True,
    )
    return torch.cat([cycle.grow_count(*row) for row in rows])


def _moved(
    plan: Redistribute,
    units: Field,
    share: Scores,
    stay: Flags,
    left: Tensor,
    barred: Tensor,
    target: Tensor,
) -> Tensor:
    # The total regrowth is what all leaves lost; each leaf's part follows its share, up
    # to its capacity.
    parts = plan.shares(
        {path: share.values[path] for path in units.leaves},
        units.masks,
        units.masks_of(stay),
    )
    caps = dict(zip(units.leaves, (units.capacity - barred).unbind(), strict=True))
    regrown = allocate(parts, (target.sum() - left.sum()).clamp(min=0), caps, plan.most)
    return left + units.counts([regrown[path] for path in units.leaves])
