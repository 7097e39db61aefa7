"""What competes: the units of the sparse leaves, as rows of groups, and the doors
through which masks are chosen.

On which process they lie, on which device, how many leaves at a time and in how many
leaves is known here alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn import random
from sparsefn.algorithms.bounds import with_least, within_bounds
from sparsefn.algorithms.competition import Competition, Goal, count_of, fixed_count
from sparsefn.algorithms.memory import Scores
from sparsefn.budgets.counts import Counted
from sparsefn.budgets.distributions import Global, spread
from sparsefn.engine.checks import counts_of_rows, fraction_at, n_kept, shown
from sparsefn.engine.draws import flips
from sparsefn.engine.leaves import as_tensor_on, brought, lists
from sparsefn.engine.numbers import Real
from sparsefn.engine.selection import Count, Entry, dealt_winners, totals, winners
from sparsefn.patterns import grids as layout
from sparsefn.patterns.grids import Grids
from sparsefn.patterns.tied import over_units, parted
from sparsefn.patterns.units import (
    Units,
    active_rows,
    allowed_rows,
    competing,
    grouped,
    unit_mask,
)
from sparsefn.state import Step
from sparsefn.tree import Leaves

# One tensor a grid, as selection reads its units: (groups, units of a group), or (rows,
# units, columns).
Flags = list[Tensor]
Open = Sequence[Tensor | None]  # None: all units of the grid


class Field(NamedTuple):
    """The units of some leaves under a rule.

    `masks` are those of the leaves, within `allowed`; `free` are the units that may be
    kept. `known` are the counts at the step where a sparsity or the pattern says them,
    else scores decide by `goal`. Counts are 1-D, one entry a group, the grids one after
    another; where all leaves meet in one competition there is one. Each grid keeps
    `least` units.
    """

    rule: Competition
    grids: Grids
    leaves: Leaves
    masks: Leaves
    allowed: Leaves | None
    free: Open
    joint: bool
    elementwise: bool
    sharded: bool
    least: int
    goal: Goal = None
    step: Step = 0
    known: Sequence[Count] | None = None

    @property
    def active(self) -> Flags:
        """The units that are kept now and may be kept on."""
        return self.within(list(self._each(self.masks, active_rows)))

    def within(self, flags: Flags) -> Flags:
        """The flags of some units, without the units that may not be kept."""
        return [
            rows if open_ is None else rows & open_
            for rows, open_ in zip(flags, self.free, strict=True)
        ]

    def _each(
        self, leaves: Leaves, read: Callable[[Units, Tensor], Tensor]
    ) -> Iterator[Tensor]:
        # What a function makes of the grids and of what is here of their leaves, each
        # when its turn comes.
        leaves = layout.to_aligned(self.grids, leaves) if self.sharded else leaves
        for path, units in self.grids.items():
            yield (
                over_units(units, leaves, read)
                if units.places
                else read(units, leaves[path])
            )

    def _scored(self, scores: Scores, signed: bool = False) -> Iterator[Tensor]:
        leaves = scores.signed if signed else scores.values
        return (
            (leaves[name][None] for name in self.grids)
            if scores.of_units
            else self._each(leaves, competing)
        )

    @property
    def groups(self) -> list[int]:
        """How many competing groups each entry of a list of counts is for."""
        return [1] if self.joint else [units.rows[0] for units in self.grids.values()]

    def totals(self, flags: Flags) -> Tensor:
        """How many flags are set in each group, over all processes."""
        counts = totals(
            [grouped(rows) for rows in flags],
            [units.extent for units in self.grids.values()],
        )
        return counts.sum(0, keepdim=True) if self.joint else counts

    def counts(self, given: Sequence[Count]) -> Tensor:
        """Counts as one tensor."""
        return counts_of_rows(
            given, self.groups, next(iter(self.leaves.values())).device
        )

    @property
    def capacity(self) -> Tensor:
        """How many units of each group may be kept."""
        if any(open_ is not None for open_ in self.free):  # then none of them is None
            return self.totals([open_ for open_ in self.free if open_ is not None])
        widths = [units.of_all.rows[1] for units in self.grids.values()]
        return self.counts([sum(widths)] if self.joint else widths)

    def targets(self, sparsity: Real | None) -> list[Count]:
        """Kept counts at a sparsity, or the pattern's; what a group has no room for
        goes to the others of its leaf.
        """
        given = self._of_whole(sparsity, self._room())
        if self.joint or not self.sharded:
            return given
        return [
            layout.own_counts(*pair)
            for pair in zip(self.grids.values(), given, strict=True)
        ]

    def _of_whole(self, sparsity: Real | None, room: Leaves) -> list[Count]:
        # The counts of all groups of the whole leaves.
        (pattern, distribution) = self.rule
        grids = self.grids
        if not grids:
            return []
        if pattern.fixed is not None:
            return [fixed_count(path, units, sparsity) for path, units in grids.items()]
        if sparsity is None:
            raise TypeError(f"expected a sparsity: {pattern} leaves the count open")
        shapes = {path: units.budgeted for path, units in grids.items()}
        if isinstance(distribution, Global):
            total = n_kept(
                sum(math.prod(units.of_all.rows) for units in grids.values()), sparsity
            )
            distribution.bounds(shapes, total)
            return [total]
        counts = distribution(shapes, sparsity)
        groups = {path: units.of_all.rows[0] for path, units in grids.items()}
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
        pairs = zip(self.grids.items(), self.free, strict=True)
        several = {
            p: (units, open_)
            for (p, units), open_ in pairs
            if units.of_all.rows[0] > 1 and open_ is not None
        }
        counts = [grouped(open_).sum(-1) for _, open_ in several.values()]
        if self.sharded:
            counts = layout.of_all_groups(
                [units for units, _ in several.values()], counts
            )
        return dict(zip(several, counts, strict=True))

    def target(self, scores: Scores, among: Open) -> Tensor:
        """What is `wanted` as one tensor."""
        return self.counts(self.wanted(scores, among))

    def wanted(self, scores: Scores, among: Open) -> Sequence[Count]:
        """Kept counts at the step.

        Where scores decide them, they are by these, among some units.
        """
        if self.known is not None:
            return self.known
        return (
            self.counted(self.goal, scores, among)
            if isinstance(self.goal, Counted)
            else self.targets(None)
        )

    def counted(self, goal: Counted, scores: Scores, among: Open) -> list[Count]:
        """Kept counts that scores decide, among some units."""
        if goal.whole:
            layout.refuse_parts(shown(goal), self.grids, shared=True)
        fields = (
            [self]
            if self.joint and self.grids
            else [self.part([i]) for i in range(len(self.grids))]
        )
        rows = zip(fields, self.rows(scores), self.rows_of(among), strict=True)
        return [field._counted(goal, row, flags) for field, row, flags in rows]

    def _counted(self, goal: Counted, row: Tensor, flags: Tensor) -> Tensor:
        # Kept counts of the groups of one competition.
        def total(flags: Tensor) -> Tensor:
            widths = [math.prod(units.rows) for units in self.grids.values()]
            return self.totals(
                list(torch.split(flags, widths, -1)) if self.joint else [flags]
            )

        count = count_of(
            goal, row, flags, self.step, total, ", ".join(map(repr, self.grids))
        )
        return count if goal.of == "kept" else (total(flags) - count).clamp(min=0)

    def rows(self, scores: Scores, what: str | None = None) -> list[Tensor]:
        """The scores of each competition, (groups, units of a group), for a function of
        whole leaves if it is named.
        """
        if what is not None:
            layout.refuse_parts(what, self.grids)
        return self._in_groups([grouped(rows) for rows in self._scored(scores)])

    def rows_of(self, flags: Open) -> list[Tensor]:
        """Flags of each competition, (groups, units of a group)."""
        pairs = zip(flags, self.grids.values(), strict=True)
        device = next((leaf.device for leaf in self.leaves.values()), None)
        rows = [
            grouped(
                torch.ones(u.rows, dtype=torch.bool, device=device) if x is None else x
            )
            for x, u in pairs
        ]
        return self._in_groups(rows)

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
        among: Open | None = None,
        but: Open | None = None,
        held: Open | None = None,
    ) -> Flags:
        """The best units of each group, as many as its count says, `among` some and not
        those of `but`.

        `held` are units that are kept already, which count for the bounds of a leaf.
        """
        none = [None] * len(self.grids)
        grids = self.grids.values()
        absolute = self.elementwise and scores.absolute
        rows = zip(
            self._scored(scores, self.elementwise),
            among or none,
            but or none,
            grids,
            strict=True,
        )
        entries = [
            Entry(x, allow, deny, absolute, units.extent)
            for x, allow, deny, units in rows
        ]
        if not entries:
            return []
        if self.least and but is None:
            counts = with_least(self.least, counts, [units.rows[1] for units in grids])
        if isinstance(self.rule.distribution, Global):
            sizes = {path: units.of_all.rows[1] for path, units in self.grids.items()}
            return within_bounds(
                self.rule.distribution,
                sizes,
                entries,
                counts[0],
                list(held or none),
                self.least,
            )
        if self.rule.pattern.pick is not None:
            return [self.rule.pattern.pick(entry) for entry in entries]
        return (winners if self.sharded else dealt_winners)(entries, counts)

    def coins(self, sparsity: Real, key: Tensor) -> Flags:
        """Units that are kept by chance: each with the share of its competition that a
        sparsity keeps.
        """
        flags = []
        counts = self._of_whole(sparsity, {})
        joint = self.joint
        sizes = {
            path: math.prod(units.of_all.rows) for path, units in self.grids.items()
        }
        for i, (path, units) in enumerate(self.grids.items()):
            device = self.leaves[layout.paths_of({path: units})[0]].device
            total = as_tensor_on(counts[0 if joint else i], device)
            total = (
                total.sum()
                if total.ndim
                else total * (1 if joint else units.of_all.rows[0])
            )
            chance = total.double() / max(
                sum(sizes.values()) if joint else sizes[path], 1
            )
            own = brought(random.leaf_key(key, path), device)
            places = layout.unit_extent(units)
            row = flips(own, chance.expand(units.rows), places, math.prod(units.rows))
            flags.append(row.reshape(units.rows))
        return flags

    def masks_of(
        self, flags: Flags, scores: Scores | None = None, among: Leaves | None = None
    ) -> Leaves:
        """Masks of the leaves from kept units, and the best elements `among` some of
        others by the pattern.
        """
        spared = scores is not None and self.rule.pattern.zeros is not None
        values = (
            layout.to_aligned(self.grids, scores.values)
            if spared and scores is not None
            else {}
        )
        open_ = (
            layout.to_aligned(self.grids, among) if spared and among is not None else {}
        )
        if self.rule.pattern.members:
            made = parted(self.grids, flags, self.leaves)
        else:
            pairs = zip(self.grids.items(), flags, strict=True)
            made = {
                path: unit_mask(units, kept, values.get(path), open_.get(path))
                for (path, units), kept in pairs
            }
        made = (
            layout.from_aligned(self.grids, made, self.leaves) if self.sharded else made
        )
        return (
            made
            if self.allowed is None or self.elementwise
            else both_of(made, self.allowed)
        )

    def best_masks(self, scores: Scores) -> Leaves:
        """Masks of the best units that may be kept, as many as are wanted."""
        kept = self.best(scores, self.wanted(scores, self.free), among=self.free)
        return self.masks_of(kept, scores, self.allowed)

    def parts(self, apart: bool) -> Iterator[Field]:
        """The field in parts of a few leaves where an update saves memory and leaves
        stand `apart`, else as it is.
        """
        if len(self.grids) < 2 or self.joint or not apart or self.least:
            yield self
            return
        firsts = [self.leaves[path] for path in self.grids]
        parts = lists.places_in_parts(
            firsts, [math.prod(units.shape) for units in self.grids.values()]
        )
        yield from map(self.part, parts) if len(parts) > 1 else [self]

    def part(self, at: Sequence[int]) -> Field:
        """The field of the grids at some places."""
        grids = dict([[*self.grids.items()][i] for i in at])
        paths = layout.paths_of(grids)
        leaves = {path: self.leaves[path] for path in paths if path in self.leaves}
        masks = {path: self.masks[path] for path in paths if path in self.masks}
        known = None if self.known is None else [self.known[i] for i in at]
        return self._replace(
            grids=grids,
            leaves=leaves,
            masks=masks,
            free=[self.free[i] for i in at],
            known=known,
        )


def field(
    rule: Competition,
    leaves: Leaves,
    masks: Leaves | None = None,
    allowed: Leaves | None = None,
    goal: Goal = None,
    step: Step = 0,
) -> Field:
    """The units of some leaves, of which those compete that are allowed; a path that is
    missing is allowed whole.
    """
    found = layout.grids(rule.pattern, leaves)
    if joint := rule.joint:
        rule.check_grids(found, leaves)
    sharded = any(units.alignment is not None for units in found.values())
    if allowed is not None:
        allowed = full(allowed, leaves)
        masks = None if masks is None else both_of(masks, allowed)
    least = int(
        bool(rule.pattern.members) and len(layout.paths_of(found)) > len(leaves)
    )  # where tied sets meet
    free: Open = [None] * len(found)
    made = Field(
        rule,
        found,
        leaves,
        masks or {},
        allowed,
        free,
        joint,
        rule.elementwise,
        sharded,
        least,
        goal,
        step,
    )
    if allowed is not None or rule.pattern.allowed is not None:
        some = full({}, leaves) if allowed is None else allowed
        rows = made._each(
            some,
            lambda units, mask: allowed_rows(units, mask, active_rows(units, mask)),
        )
        made = made._replace(free=list(rows))
    if isinstance(goal, Counted) or (goal is None and rule.pattern.fixed is None):
        return made
    return made._replace(
        known=made.targets(None if goal is None else fraction_at(goal, step))
    )


def either_of(flags: Flags, others: Flags) -> Flags:
    """The units in one of two fields of flags, or in both."""
    return lists.each(lists.one_of, flags, others)


def both_of(masks: Leaves, others: Mapping[str, Tensor]) -> Leaves:
    """The entries that two masks of each leaf keep."""
    return dict(
        zip(
            masks,
            lists.each(lists.both, list(masks.values()), [others[p] for p in masks]),
            strict=True,
        )
    )


def full(masks: Leaves, like: Leaves) -> Leaves:
    """Masks of these leaves at full shape: a path that is missing is all True."""
    return {
        p: masks[p] if p in masks else torch.ones_like(x, dtype=torch.bool)
        for p, x in like.items()
    }
