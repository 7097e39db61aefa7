"""What competes: the units of the sparse leaves, as rows of groups, and the selection
of masks.

On which process units lie, and in how many leaves, their grids know; on which device,
and how many leaves are worked on at a time, is known here alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsefn._engine.draws import flips
from sparsefn._engine.leaves import as_tensor_on, brought, lists
from sparsefn._engine.numbers import Real
from sparsefn._engine.selection import (
    Count,
    Entry,
    counts_of_rows,
    grouped,
    totals,
)
from sparsefn.algorithms.competition import (
    Competition,
    Goal,
    bounded_winners,
    count_of,
    fixed_count,
    with_least,
)
from sparsefn.algorithms.memory import Scores
from sparsefn.core import random
from sparsefn.core.rounding import fraction_at, n_kept
from sparsefn.core.state import Step
from sparsefn.core.tree import Leaves
from sparsefn.masks.budgets.counts import Counted
from sparsefn.masks.budgets.distributions import Global, counts_given, spread
from sparsefn.masks.patterns.layouts import UnitLayouts
from sparsefn.masks.patterns.shards import check_whole_rows, counts_of_all, on_shards
from sparsefn.masks.patterns.units import (
    Grids,
    Units,
    active_rows,
    allowed_rows,
    competing,
)

# One tensor a grid, as selection reads its units: (groups, units of a group), or (rows,
# units, columns).
Flags = list[Tensor]
Open: TypeAlias = Flags | None  # None: all units


class UnitTable(NamedTuple):
    """The units that compete in one change of masks: a method calls `best`, then
    `masks_of`.

    `masks` are the masks of the leaves, within `allowed`; `free` are the units that may
    be kept. `known` are the counts at the step where a sparsity or the pattern says
    them, else scores decide by `goal`. Counts are 1-D, one entry a group, the grids one
    after another; where all leaves meet in one competition there is one entry.
    """

    rule: Competition
    grids: Grids
    leaves: Leaves
    masks: Leaves
    allowed: Leaves | None
    free: Open
    joint: bool
    elementwise: bool
    goal: Goal = None
    step: Step = 0
    known: Sequence[Count] | None = None

    @property
    def active(self) -> Flags:
        """The units that are kept now and may be kept on."""
        return self.within(self.grids.read(self.masks, active_rows))

    def within(self, flags: Flags) -> Flags:
        """The flags of some units, without the units that may not be kept."""
        if self.free is None:
            return flags
        return [rows & open_ for rows, open_ in zip(flags, self.free, strict=True)]

    def _scored(self, scores: Scores, signed: bool = False) -> list[Tensor]:
        leaves = scores.signed if signed else scores.values
        if scores.of_units:
            return [leaves[name][None] for name in self.grids.local]
        return self.grids.read(leaves, competing)

    @property
    def groups(self) -> list[int]:
        """How many competing groups each entry of a list of counts is for."""
        if self.joint:
            return [1]
        return [units.rows[0] for units in self.grids.local.values()]

    def totals(self, flags: Flags) -> Tensor:
        """How many flags are set in each group, over all processes."""
        grids = self.grids
        counts = totals(flags, grids.extents, grids.segments)
        return counts.sum(0, keepdim=True) if self.joint else counts

    def counts(self, given: Sequence[Count] | Tensor) -> Tensor:
        """Counts as one tensor."""
        if isinstance(given, Tensor):
            return given
        device = next(iter(self.leaves.values())).device
        return counts_of_rows(given, self.groups, device)

    @property
    def capacity(self) -> Tensor:
        """How many units of each group may be kept."""
        if self.free is not None:
            return self.totals(self.free)
        widths = [units.rows[1] for units in self.grids.full.values()]
        return self.counts([sum(widths)] if self.joint else widths)

    def targets(self, sparsity: Real | None) -> list[Count]:
        """Kept counts at a sparsity, or the pattern's; what a group has no room for
        goes to other groups of its leaf.
        """
        given = self._of_whole(sparsity, self._room())
        if self.joint:
            return given
        pairs = zip(self.grids.local.values(), given, strict=True)
        return [units.own_counts(count) for units, count in pairs]

    def _of_whole(self, sparsity: Real | None, room: Leaves) -> list[Count]:
        # The counts of all groups of the whole leaves.
        (pattern, distribution) = self.rule
        whole = self.grids.full
        if not whole:
            return []
        if pattern.fixed is not None:
            return [fixed_count(path, units, sparsity) for path, units in whole.items()]
        assert sparsity is not None
        shapes = {path: units.budgeted for path, units in whole.items()}
        if isinstance(distribution, Global):
            sizes = [math.prod(units.rows) for units in whole.values()]
            total = n_kept(sum(sizes), sparsity)
            distribution.bounds(shapes, total)
            return [total]
        counts = counts_given(distribution, shapes, sparsity)
        groups = {path: units.rows[0] for path, units in whole.items()}
        return [
            counts[path]
            if n == 1
            else spread(counts[path], n, room.get(path), self.leaves.get(path))
            for path, n in groups.items()
        ]

    def _room(self) -> Leaves:
        # How many units each group of a whole leaf may keep, of the leaves whose groups
        # are restricted: int64, by path.
        if self.allowed is None or self.rule.pattern.fixed is not None:
            return {}
        free = self.grids.by_grid(self.free or [])
        pairs = zip(self.grids.full.items(), free, strict=True)
        room = {
            path: grouped(open_).sum(-1)
            for (path, units), open_ in pairs
            if units.rows[0] > 1
        }
        return counts_of_all(self.grids, room)

    def target(self, scores: Scores, among: Open) -> Tensor:
        """What is `wanted` as one tensor."""
        return self.counts(self.wanted(scores, among))

    def wanted(self, scores: Scores, among: Open) -> Sequence[Count]:
        """Kept counts at the step.

        Where scores decide them, they are by these, among some units.
        """
        if self.known is not None:
            return self.known
        assert isinstance(self.goal, Counted)
        return self.counted(self.goal, scores, among)

    def counted(self, goal: Counted, scores: Scores, among: Open) -> list[Count]:
        """Kept counts that scores decide, among some units."""
        if goal.whole:
            check_whole_rows(goal, self.grids, shared=True)
        fields = [self]
        if not (self.joint and self.grids.local):
            fields = self._of_each()
        rows = zip(fields, self.rows(scores), self.rows_of(among), strict=True)
        return [field._counted(goal, row, flags) for field, row, flags in rows]

    def _counted(self, goal: Counted, row: Tensor, flags: Tensor) -> Tensor:
        # Kept counts of the groups of one competition.
        def total(flags: Tensor) -> Tensor:
            widths = [math.prod(units.rows) for units in self.grids.local.values()]
            return self.totals(
                list(torch.split(flags, widths, -1)) if self.joint else [flags]
            )

        count = count_of(
            goal, row, flags, self.step, total, ", ".join(map(repr, self.grids.local))
        )
        return count if goal.of == "kept" else (total(flags) - count).clamp(min=0)

    def rows(self, scores: Scores) -> list[Tensor]:
        """The scores of each competition, (groups, units of a group)."""
        rows = self.grids.by_grid(self._scored(scores))
        return self._in_groups([grouped(x) for x in rows])

    def rows_of(self, flags: Open) -> list[Tensor]:
        """Flags of each competition, (groups, units of a group)."""
        if flags is None:
            device = next((leaf.device for leaf in self.leaves.values()), None)
            flags = [
                torch.ones(units.rows, dtype=torch.bool, device=device)
                for units in self.grids.local.values()
            ]
        else:
            flags = [*self.grids.by_grid(flags)]
        return self._in_groups([grouped(rows) for rows in flags])

    def _in_groups(self, rows: list[Tensor]) -> list[Tensor]:
        return (
            [torch.cat([x.reshape(1, -1) for x in rows], -1)]
            if self.joint and len(rows) > 1
            else rows
        )

    def best(
        self,
        scores: Scores,
        counts: Sequence[Count] | Tensor,
        among: Open = None,
        but: Open = None,
        held: Open = None,
    ) -> Flags:
        """The best units of each group, as many as its count says, from the units of
        `among` without `but`.

        `held` are units that are kept already, which count for the bounds of a leaf.
        """
        distribution = self.rule.distribution
        whole = self.grids.full
        least = self.grids.least
        none: list[None] = [None] * len(self.grids.extents)
        absolute = scores.absolute and self.elementwise
        rows = zip(
            self._scored(scores, absolute),
            among or none,
            but or none,
            self.grids.extents,
            self.grids.segments or none,
            strict=True,
        )
        entries = []
        for x, allow, deny, extent, segments in rows:
            entries.append(Entry(x, allow, deny, absolute, extent, segments))
        if not entries:
            return []
        if least and but is None:
            counts = with_least(least, counts, [u.rows[1] for u in whole.values()])
        if isinstance(distribution, Global):
            sizes = {path: units.rows[1] for path, units in whole.items()}
            return bounded_winners(distribution, sizes, entries, counts[0], held, least)
        if len(entries) < len(whole):
            counts = self.counts(counts)
        return self.grids.select(entries, counts)

    def coins(self, sparsity: Real, key: Tensor) -> Flags:
        """Units that are kept by chance: each with the share of its competition that a
        sparsity keeps.
        """
        counts = self._of_whole(sparsity, {})
        whole = self.grids.full.values()
        groups = [units.rows[0] for units in whole]
        sizes = [math.prod(units.rows) for units in whole]
        if self.joint:
            counts = counts * len(sizes)
            groups = [1] * len(sizes)
            sizes = [sum(sizes)] * len(sizes)
        flags = []
        for i, (name, units) in enumerate(self.grids.local.items()):
            device = self.leaves[self.grids.at([i]).paths[0]].device
            total = as_tensor_on(counts[i], device).expand(groups[i]).sum()
            chance = total.double() / max(sizes[i], 1)
            row = flips(
                brought(random.leaf_key(key, name), device),
                chance.expand(units.rows),
                units.row_extent,
                math.prod(units.rows),
            )
            flags.append(row.reshape(units.rows))
        return flags

    def masks_of(
        self, flags: Flags, scores: Scores | None = None, among: Leaves | None = None
    ) -> Leaves:
        """Masks of the leaves from kept units; by the pattern, other units keep their
        best elements `among` some.
        """
        values: Leaves = {}
        if scores is not None and not self.elementwise and self.rule.pattern.partial:
            values = scores.values
        made = self.grids.masks(flags, self.leaves, values, among or {})
        if self.allowed is None or self.elementwise:
            return made
        return both_of(made, self.allowed)

    def best_masks(self, scores: Scores) -> Leaves:
        """Masks of the best units that may be kept, as many as are wanted."""
        kept = self.best(scores, self.wanted(scores, self.free), among=self.free)
        return self.masks_of(kept, scores, self.allowed)

    def parts(self, leafwise: bool) -> Iterator[UnitTable]:
        """The field in parts of a few leaves where an update saves memory and leaves
        stand `leafwise`, else the whole field.
        """
        grids = self.grids
        if len(grids.extents) < 2 or self.joint or not leafwise or grids.least:
            yield self
            return
        parts = lists.places_in_parts([*self.leaves.values()], grids.sizes)
        yield from map(self.part, parts) if len(parts) > 1 else [self]

    def part(self, at: Sequence[int]) -> UnitTable:
        """The field of the grids of some tensors."""
        grids = self.grids.at(at)
        known = None
        if self.known is not None:
            pairs = zip(self.grids.local, self.known, strict=True)
            known = [count for name, count in pairs if name in grids.local]
        return self._replace(
            grids=grids,
            leaves={p: self.leaves[p] for p in grids.paths},
            masks={p: self.masks[p] for p in grids.paths if p in self.masks},
            free=None if self.free is None else [self.free[i] for i in at],
            known=known,
        )

    def _of_each(self) -> list[UnitTable]:
        # The fields of all grids, each by itself.
        free = None if self.free is None else [*self.grids.by_grid(self.free)]
        field = self._replace(grids=self.grids.unpacked, free=free)
        return [field.part([i]) for i in range(len(self.grids.local))]


def unit_table(
    rule: Competition,
    leaves: Leaves,
    masks: Leaves | None = None,
    allowed: Leaves | None = None,
    goal: Goal = None,
    step: Step = 0,
    layouts: UnitLayouts | None = None,
) -> UnitTable:
    """The units of some leaves, of which the allowed units compete; a leaf that is
    missing in `allowed` is allowed whole.
    """
    known = None if layouts is None else layouts.of(leaves)
    if known is None:
        grids = on_shards(rule.pattern.grids(leaves), leaves)
    else:
        grids = known.grids
    joint = rule.joint
    if joint:
        grids = grids.unpacked
        rule.check_grids(grids, leaves)
    if allowed is not None:
        allowed = full(allowed, leaves)
        masks = None if masks is None else both_of(masks, allowed)
    free: Open = None
    if allowed is not None or rule.pattern.allowed is not None:
        some = full({}, leaves) if allowed is None else allowed
        free = grids.read(some, _open_rows)
    made = UnitTable(
        rule,
        grids,
        leaves,
        masks or {},
        allowed,
        free,
        joint,
        rule.pattern.elementwise,
        goal,
        step,
    )
    if isinstance(goal, Counted) or (goal is None and rule.pattern.fixed is None):
        return made
    sparsity = None if goal is None else fraction_at(goal, step)
    if known is None or allowed is not None or isinstance(sparsity, Tensor):
        return made._replace(known=made.targets(sparsity))
    counts = known.counts.get(sparsity)
    if counts is None:
        counts = made.targets(sparsity)
        if not any(isinstance(count, Tensor) for count in counts):
            known.counts = {sparsity: counts}
    return made._replace(known=counts)


def _open_rows(units: Units, mask: Tensor) -> Tensor:
    return allowed_rows(units, mask, active_rows(units, mask))


def either_of(flags: Flags, others: Flags) -> Flags:
    """The units in one of two fields of flags, or in both."""
    return lists.foreach(operator.or_, flags, others)


def both_of(masks: Leaves, others: Mapping[str, Tensor]) -> Leaves:
    """The entries that two masks of each leaf keep."""
    return dict(
        zip(
            masks,
            lists.foreach(
                operator.and_, list(masks.values()), [others[p] for p in masks]
            ),
            strict=True,
        )
    )


def full(masks: Leaves, like: Leaves) -> Leaves:
    """Masks of these leaves at full shape: a path that is missing is all True."""
    return {
        p: masks[p] if p in masks else torch.ones_like(x, dtype=torch.bool)
        for p, x in like.items()
    }
