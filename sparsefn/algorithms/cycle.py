"""One cycle of dynamic sparse training: a quota for each group, then drop, grow and plant.

Counts are 1-D: one entry per group, the pools one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn.algorithms.competition import Competition, Pools, full, paths_of
from sparsefn.algorithms.frame import sparse_leaves, with_masks
from sparsefn.algorithms.memory import Memory, Pruned
from sparsefn.algorithms.wanted import Goal, counted, rooms
from sparsefn.counts import Counted
from sparsefn.engine import many, together
from sparsefn.engine.checks import Schedule, Step
from sparsefn.engine.leafwise import zeroed
from sparsefn.engine.memory import on
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import CountRule, fraction_at, rounded, rounded_down, rounded_up
from sparsefn.engine.selection.winners import end_to_end
from sparsefn.engine.shards import check_plain, whole
from sparsefn.redistribute import GrowCount, Redistribute, allocate
from sparsefn.state import State, masks_tree
from sparsefn.tree import Leaves, Tree, check_like, leaves_at, with_leaves

# (state, newly grown masks, step) -> values of the grown weights
Grown = Callable[[State, Tree, Step], Tree]


def zeros(state: State, grown: Tree, step: Step) -> Tree:
    """Grown weights start at zero.

    >>> zeros(sf.State({"w": torch.ones(2)}, ()), (), 0)
    {'w': tensor([0., 0.])}
    """
    del grown, step
    return optree.tree_map(torch.zeros_like, state.params)


class Cycle(NamedTuple):
    """What `drop_grow` was told: see there. Without `level` the count is the current one, or the pattern's.

    Scores of a `signed` role that are absolute values are read without taking them: they are only compared.
    """

    rule: Competition
    memory: Memory
    level: Goal
    current: bool
    fraction: Schedule | Counted
    rounding: CountRule
    grow_count: GrowCount | None
    grown: Grown
    exclude_dropped: bool
    restart_dropped: bool
    plan: Redistribute | None
    signed: dict[str, bool]


class Field(NamedTuple):
    """The weights that a cycle works on, with their units as rows, (groups, units of a group).

    `free` are the units of each pool that may be kept, None for all; `active` those of them that are kept; `had` is
    how many units of each group are active.
    """

    leaves: Leaves
    masks: Leaves
    pools: Pools
    free: list[Tensor | None]
    active: list[Tensor]
    had: Tensor

    @property
    def groups(self) -> list[int]:
        """How many groups each pool has."""
        return [rows.shape[0] for rows in self.active]

    def capacity(self, rule: Competition) -> Tensor:
        """How many units of each group may be kept."""
        if any(open_ is not None for open_ in self.free):  # then none of them is None
            return rule.totals(self.pools, [open_ for open_ in self.free if open_ is not None])
        widths = [sum(units.of_all.rows[1] for units in pool.values()) for pool in self.pools]
        return end_to_end(widths, self.groups, self.had.device)


def run(cycle: Cycle, allowed: Leaves | None, state: State, grads: Tree, step: Step) -> State:
    """The state after one cycle, in which masks stay inside the allowed ones."""
    rule, memory = cycle.rule, cycle.memory
    leaves, masks = sparse_leaves(state)
    pools = rule.pools(leaves)
    if not pools:
        return state
    drops, of_drops = memory.read("drop", state, grads, step, leaves, cycle.signed["drop"])
    in_parts = memory.by_leaf("grow") and cycle.plan is None and not isinstance(cycle.level, Counted)
    grows, of_grows = ({}, False) if in_parts else memory.read("grow", state, grads, step, leaves, cycle.signed["grow"])
    shares = memory.read("share", state, grads, step, leaves)[0] if "share" in memory.scores else grows
    free = rule.free(pools, leaves, allowed)
    active = [_within(rows, open_) for rows, open_ in zip(rule.active(pools, masks), free, strict=True)]
    field = Field(leaves, masks, pools, free, active, rule.totals(pools, active))
    lost, target = _quota(cycle, field, drops, grows, shares, allowed, step)
    zeroes = cycle.grown is zeros and memory.pruned == "zero"  # pruned and grown weights are both zero: one pass
    new: Leaves = {}
    kept: Leaves = {}
    for part, gone, wanted in _parts(cycle, field, lost, target):
        stay = rule.winners(part.pools, drops, part.had - gone, list(part.active), absolute=of_drops)
        if in_parts:
            some = [path for pool in part.pools for path in paths_of(pool)]
            grows = {}  # those of the last part go before those of the next are made
            grows, _ = memory.read("grow", state, grads, step, some)
        grew = _grow(cycle, part, grows, of_grows, shares, stay, part.had - gone, wanted)
        made = rule.masks(part.pools, together.each(many.one_of, stay, grew), drops, masks)
        if allowed is not None:
            made = _both(made, full(allowed, leaves, list(made)))
        held = _both(made, masks)
        if cycle.restart_dropped:
            held = _both(held, rule.masks(part.pools, stay, drops, masks))
        new |= made
        kept |= _zeroed(held, leaves, spent=not cycle.restart_dropped) if zeroes else held
    if zeroes:
        return state._replace(params=with_leaves(state.params, kept), masks=with_leaves(state.masks, new))
    return _plant(state, new, kept, cycle.grown, memory.pruned, step)


def _parts(cycle: Cycle, field: Field, lost: Tensor, target: Tensor) -> Iterator[tuple[Field, Tensor, Tensor]]:
    # Pools that do not depend on each other may be worked on a few at a time.
    pools = field.pools
    sizes = [sum(field.leaves[path].numel() for path in paths_of(pool)) for pool in pools]
    parts = together.parts(field.active, sizes)
    if len(parts) == 1 or cycle.plan is not None or any(units.seat for pool in pools for units in pool.values()):
        yield field, lost, target
        return
    counts = [torch.split(x, field.groups) for x in (field.had, lost, target)]
    for chosen in parts:
        had, lost, target = (torch.cat([rows[i] for i in chosen]) for rows in counts)
        free, active = [field.free[i] for i in chosen], [field.active[i] for i in chosen]
        yield field._replace(pools=[pools[i] for i in chosen], free=free, active=active, had=had), lost, target


def _zeroed(masks: Leaves, leaves: Leaves, spent: bool) -> Leaves:
    return dict(zip(masks, zeroed(list(masks.values()), [leaves[path] for path in masks], spent=spent), strict=True))


def _quota(
    cycle: Cycle, field: Field, drops: Leaves, grows: Leaves, shares: Leaves, allowed: Leaves | None, step: Step
) -> tuple[Tensor, Tensor]:
    # How many units of each group are dropped, and how many are to be active afterwards.
    rule, plan, had = cycle.rule, cycle.plan, field.had
    target = had
    if isinstance(cycle.level, Counted):
        target = end_to_end(counted(rule, field.pools, cycle.level, grows, field.free, step), field.groups, had.device)
    elif not cycle.current:
        level = None if cycle.level is None else fraction_at(cycle.level, step)
        room = rooms(rule, field.pools, field.leaves, allowed)
        target = end_to_end(rule.targets(field.pools, level, room, field.leaves), field.groups, had.device)
    # Where regrowth moves between leaves, their own counts bind only if there are too many in all.
    wanted = target if plan is None else torch.where(had.sum() > target.sum(), target, had)
    lost = _lost(cycle, field, drops, shares, step).clamp(min=0)
    if cycle.exclude_dropped:
        lost = torch.minimum(lost, (field.capacity(rule) - wanted).clamp(min=0))
    return torch.minimum(torch.maximum(lost, had - wanted), had), target


def _lost(cycle: Cycle, field: Field, drops: Leaves, shares: Leaves, step: Step) -> Tensor:
    # How many units of each group are dropped: a part of them, or as many as their scores say.
    had, plan, fraction = field.had, cycle.plan, cycle.fraction
    if isinstance(fraction, Counted):
        kept = counted(cycle.rule, field.pools, fraction, drops, field.active, step)
        return had - end_to_end(kept, field.groups, had.device)
    rate = fraction_at(fraction, step)
    own = {} if plan is None or plan.rate is None else plan.rate(rate, shares, field.masks)
    rates = [own.get(next(iter(pool)), rate) for pool in field.pools]
    return _counted(cycle.rounding, rates, had, field.groups)


def _counted(count: CountRule, rates: list[Real], had: Tensor, groups: list[int]) -> Tensor:
    # The library's own rules take the groups of all pools at once, others those of a pool, and may give an int.
    if count in (rounded, rounded_up, rounded_down):
        if all(rate is rates[0] for rate in rates):
            return on(count(rates[0], had), had.device)
        there = [rate.double() for rate in rates if isinstance(rate, Tensor) and rate.device == had.device]
        if len(there) == len(had) and not any(rate.ndim for rate in there):
            return on(count(torch.stack(there), had), had.device)
    given = [count(rate, n) for rate, n in zip(rates, torch.split(had, groups), strict=True)]
    return end_to_end(given, groups, had.device)


def _grow(
    cycle: Cycle,
    field: Field,
    scores: Leaves,
    absolute: bool,
    shares: Leaves,
    stay: list[Tensor],
    left: Tensor,
    target: Tensor,
) -> list[Tensor]:
    # The units that grow, up to the target, where `stay` are kept: `left` of each group, unless pools are joint.
    rule, plan = cycle.rule, cycle.plan
    left = rule.totals(field.pools, stay) if rule.joint else left
    taken = field.active if cycle.exclude_dropped else stay
    if plan is not None:
        barred = field.had if cycle.exclude_dropped else left
        target = _moved(rule, plan, field, shares, stay, left, barred, target)
    more = (target - left).clamp(min=0)
    if cycle.grow_count is not None:
        for path, leaf in field.leaves.items():
            check_plain("grow_count", path, leaf, ": it reads whole rows of scores")
        open_ = [_within(~rows, free) for rows, free in zip(taken, field.free, strict=True)]
        scored = rule.rows(field.pools, scores)
        wants = torch.split(more, field.groups)
        more = torch.cat([cycle.grow_count(*row) for row in zip(scored, open_, wants, strict=True)])
    return rule.winners(field.pools, scores, more, field.free, list(taken), list(stay), absolute=absolute)


def _moved(
    rule: Competition,
    plan: Redistribute,
    field: Field,
    shares: Leaves,
    stay: list[Tensor],
    left: Tensor,
    barred: Tensor,
    target: Tensor,
) -> Tensor:
    # The total regrowth is what all leaves lost; each leaf's part follows its share, up to its capacity.
    paths = [path for (path,) in field.pools]
    kept = rule.masks(field.pools, stay, field.leaves)
    parts = plan.share({path: shares[path] for path in paths}, field.masks, kept)
    parts = dict(zip(parts, whole(list(parts.values())), strict=True))
    caps = dict(zip(paths, (field.capacity(rule) - barred).unbind(), strict=True))
    regrown = allocate(parts, (target.sum() - left.sum()).clamp(min=0), caps, plan.most)
    return left + end_to_end([regrown[path] for path in paths], [1] * len(paths), left.device)


def _plant(state: State, new: Leaves, held: Leaves, grown: Grown, pruned: Pruned, step: Step) -> State:
    # The state with new masks: weights in `held` keep their values, grown ones start at `grown`.
    state = with_masks(state, new, pruned)
    fresh = {path: mask & ~held[path] for path, mask in new.items()}
    leaves = leaves_at(state.params, fresh)
    values: Leaves = {}
    if grown is not zeros:
        tree = grown(state, masks_tree(state.params, fresh), step)
        check_like("grown values", tree, state.params)
        values = leaves_at(tree, fresh)
    planted = {
        path: torch.where(mask, values.get(path, torch.zeros_like(leaves[path])), leaves[path])
        for path, mask in fresh.items()
    }
    return state._replace(params=with_leaves(state.params, planted))


def _both(some: Leaves, others: Leaves) -> Leaves:
    return dict(zip(some, together.each(many.both, list(some.values()), [others[p] for p in some]), strict=True))


def _within(rows: Tensor, open_: Tensor | None) -> Tensor:
    return rows if open_ is None else rows & open_
