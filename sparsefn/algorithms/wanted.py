"""How many units each competing group keeps: by a sparsity and a budget, or by the scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn.algorithms.competition import Competition, Pool, Pools, paths_of
from sparsefn.budgets import is_uniform
from sparsefn.counts import Counted
from sparsefn.engine.described import shown
from sparsefn.engine.rounding import as_fraction, fraction_at
from sparsefn.engine.selection.winners import Count
from sparsefn.engine.shards import check_plain
from sparsefn.engine.talks import Sum, Talk, together
from sparsefn.engine.transforms import Array, eagerly
from sparsefn.patterns.seated import group_places
from sparsefn.patterns.units import Units
from sparsefn.state import Level, Schedule, Step
from sparsefn.tree import Leaves

# What an algorithm was told about its counts: a sparsity at each step, a count by scores, or nothing.
Goal = Schedule | Counted | None


def as_goal(rule: Competition, sparsity: Level | Counted | None, what: str = "sparsity") -> Goal:
    """A sparsity as a Schedule, or the count that was given in its place, checked to fit the competition."""
    if not isinstance(sparsity, Counted):
        return as_fraction(sparsity, what)
    if rule.pattern.fixed is not None:
        raise ValueError(
            f"{what}: expected a pattern that leaves the count open, got {rule.pattern} and {shown(sparsity)}"
        )
    if not (rule.joint or is_uniform(rule.distribution)):
        raise ValueError(
            f"{what}: expected distribution to be uniform() or global_() with {shown(sparsity)}, which decides every "
            f"count, got {shown(rule.distribution)}"
        )
    return sparsity


def wanted(
    rule: Competition, pools: Pools, goal: Goal, scores: Leaves, among: Leaves | None, room: Leaves, step: Step
) -> list[Count]:
    """Kept count of each pool, where the units that these masks keep compete by these scores."""
    if isinstance(goal, Counted):
        return [*counted(rule, pools, goal, scores, rule.free(pools, scores, among), step)]
    return rule.targets(pools, None if goal is None else fraction_at(goal, step), room, scores)


def counted(
    rule: Competition, pools: Pools, goal: Counted, scores: Leaves, active: Sequence[Tensor | None], step: Step
) -> list[Tensor]:
    """How many units of each group of each pool are kept by a count that scores decide, of those that are active.

    The counts are of shape (groups,); None means that all units of a pool are active.
    """
    made = []
    for pool, row, open_ in zip(pools, rule.rows(pools, scores), active, strict=True):
        flags = torch.ones_like(row, dtype=torch.bool) if open_ is None else open_
        made.append(_counted(rule, pool, goal, scores, row, flags, step))
    return made


def _counted(
    rule: Competition, pool: Pool, goal: Counted, scores: Leaves, row: Tensor, active: Tensor, step: Step
) -> Tensor:
    def total(flags: Tensor) -> Tensor:
        return rule.totals([pool], [flags])

    if goal.whole:
        for path, units in pool.items():
            if units.lie is not None:  # the one group of the leaf lies on several processes
                check_plain(shown(goal), path, scores[path], ": it reads whole rows of scores")
        count = goal.count(row, active, step)
    else:
        count = goal.count(row, active, step, total)
    at = ", ".join(map(repr, pool))
    if not isinstance(count, Tensor) or count.is_floating_point() or count.dtype == torch.bool:
        got = count.dtype if isinstance(count, Tensor) else type(count).__name__
        raise TypeError(f"expected {shown(goal)} to give an integer tensor, got {got} at {at}")
    if count.shape != row.shape[:1]:
        name, groups, shape = shown(goal), row.shape[0], tuple(count.shape)
        raise ValueError(f"expected {name} to give a count for each of {groups} groups, got shape {shape} at {at}")
    return count if goal.of == "kept" else (total(active) - count).clamp(min=0)


def rooms(rule: Competition, pools: Pools, leaves: Leaves, allowed: Leaves | None) -> Leaves:
    """How many units each group of a leaf may keep, of the leaves whose groups are restricted: int64, by path."""
    if allowed is None or rule.pattern.fixed is not None:
        return {}
    several = [pool for pool in pools if any(units.of_all.rows[0] > 1 for units in pool.values())]
    if not several:
        return {}
    units = {path: one for pool in several for path, one in pool.items()}
    flags = rule.free(several, leaves, {path: allowed[path] for path in paths_of(units) if path in allowed})
    counts = [open_.sum(-1) for open_ in flags if open_ is not None]
    if any(one.seat is not None for one in units.values()):
        counts = _of_all_groups(list(units.values()), counts)
    return dict(zip(units, counts, strict=True))


@eagerly
def _of_all_groups(units: list[Units], counts: list[Tensor]) -> list[Tensor]:
    # The counts of the groups of whole leaves, from those that are here.
    def told(vector: Array) -> Talk[Array]:
        return (yield Sum(vector))

    made, talks = list(counts), []
    seats = [(i, one, one.seat) for i, one in enumerate(units) if one.seat is not None]
    for i, one, seat in seats:
        vector = np.zeros(one.of_all.rows[0], np.int64)
        vector[group_places(one).numpy()] = counts[i].cpu().numpy()
        talks.append((seat.box.groups, told(vector)))
    for (i, *_), vector in zip(seats, together(talks), strict=True):
        made[i] = torch.from_numpy(vector).to(counts[i].device)
    return made


def best_at(
    rule: Competition,
    scores: Leaves,
    like: Leaves,
    goal: Goal,
    eligible: Leaves | None,
    step: Step,
    absolute: bool = False,
) -> Leaves:
    """Masks of the best units at a step, among the eligible elements."""
    pools = rule.pools(like)
    counts = wanted(rule, pools, goal, scores, eligible, rooms(rule, pools, like, eligible), step)
    return rule.best(pools, scores, counts, eligible, absolute)
