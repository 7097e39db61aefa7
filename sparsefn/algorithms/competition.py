"""The competitions behind every mask: which units compete, how many win, and which win."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn.algorithms.bounds import within_bounds
from sparsefn.budgets import Distribution, Global, check_fixed, spread
from sparsefn.engine.checks import check_call
from sparsefn.engine.described import uncalled
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import n_kept
from sparsefn.engine.seats import check_grid
from sparsefn.engine.selection.winners import Count, Entry, totals, winners
from sparsefn.engine.shards import check_plain
from sparsefn.patterns.kinds import Pattern
from sparsefn.patterns.seated import from_seats, own_counts, seated, to_seats
from sparsefn.patterns.tied import checked_sets, joined, parted, tied_sets
from sparsefn.patterns.units import (
    Units,
    active_rows,
    allowed_rows,
    best_rows,
    entry_of,
    row_entries,
    to_rows,
    unit_mask,
    units_of,
)
from sparsefn.state import Where
from sparsefn.tree import Leaves, Tree
from sparsefn.where import float_leaves, select_leaves

Flags = list[Tensor | None]
Pool = dict[str, Units]
Pools = list[Pool]


class Competition(NamedTuple):
    """Which units compete with each other: the pattern inside a leaf, the distribution among leaves."""

    pattern: Pattern
    distribution: Distribution

    def check(self) -> Competition:
        """The competition itself, if its parts are a pattern and a distribution."""
        if not isinstance(self.pattern, Pattern):
            got = uncalled(self.pattern) or repr(self.pattern)
            raise TypeError(f"expected pattern to be one such as sf.patterns.nm(2, 4), got {got}")
        if not callable(self.distribution):
            table = "; write sf.budgets.by_path(...) around it" if isinstance(self.distribution, Mapping) else ""
            got = f"{self.distribution!r}{table}"
            raise TypeError(f"expected distribution to be one such as sf.budgets.erk(), got {got}")
        check_call("distribution", self.distribution, "shapes", "sparsity")
        return self

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)

    @property
    def elementwise(self) -> bool:
        """Whether every element is a unit by itself, so that its scores are only compared."""
        return self.pattern.reduce is None and self.pattern.zeros is None

    def select(self, params: Tree, where: Where) -> Leaves:
        """The leaves that `where` chooses, or all leaves of each tied set of which it chooses one.

        Globs are matched with all leaves of a set; a function is asked about the first.
        """
        if not self.pattern.members:
            return select_leaves(params, where)
        leaves = float_leaves(params)
        sets = checked_sets(self.pattern, list(leaves))
        members = {path: paths for paths in sets for path in (paths[:1] if callable(where) else paths)}
        hit = select_leaves({path: leaves[path] for path in leaves if path in members}, where)
        chosen = {path for name in hit for path in members[name]}
        return {path: leaf for path, leaf in leaves.items() if path in chosen}

    def pools(self, leaves: Leaves) -> Pools:
        """The units of the leaves that compete with each other, by path: a dict a pool; errors name the leaf."""
        made = self._units(leaves)
        if self.joint and any(units.of_all.rows[0] > 1 for units in made.values()):
            raise ValueError(f"global_ needs a pattern with one competing group a leaf, got {self.pattern}")
        if self.joint:
            check_grid(leaves)
        if self.joint and made and self.pattern.fixed is not None:
            raise ValueError(f"global_ needs a pattern that leaves the count open, got {self.pattern}")
        return [made] if self.joint and made else [{path: units} for path, units in made.items()]

    def _units(self, leaves: Leaves) -> Pool:
        made: Pool = {}
        if self.pattern.members:
            made = tied_sets(self.pattern, leaves)
            known = paths_of(made)
            for path in known:
                check_plain(str(self.pattern), path, leaves[path])
            if others := [path for path in leaves if path not in known]:
                raise ValueError(
                    f"{self.pattern}: expected every sparse leaf to be in a tied set whose leaves are all sparse, but "
                    f"{others[0]!r} is not"
                )
            return made
        for path, leaf in leaves.items():
            if self.pattern.pick is not None:
                check_plain(str(self.pattern), path, leaf)
            try:
                made[path] = seated(units_of(self.pattern, tuple(leaf.shape)), leaf)
            except ValueError as error:
                raise ValueError(f"{error} at {path!r}") from None
        return made

    def targets(
        self, pools: Pools, sparsity: Real | None, room: Leaves | None = None, like: Leaves | None = None
    ) -> list[Count]:
        """Kept count of each pool: an int, a 0-d tensor, or one a group; without a sparsity, the pattern's.

        `room` says, by path, how many units each group of the whole leaf may keep: a group with less room than its
        part of the leaf's count leaves the rest to the other groups. Counts of groups are where `like` is.
        """
        units = _by_path(pools)
        if not units:
            return []
        if self.pattern.fixed is not None:
            return [_fixed(path, one, sparsity) for path, one in units.items()]
        if sparsity is None:
            raise TypeError(f"expected a sparsity: {self.pattern} leaves the count open")
        grids = {path: one.budgeted for path, one in units.items()}
        if isinstance(self.distribution, Global):
            total = n_kept(sum(math.prod(one.of_all.rows) for one in units.values()), sparsity)
            self.distribution.bounds(grids, total)
            return [total]
        counts = self.distribution(grids, sparsity)
        groups = {path: one.of_all.rows[0] for path, one in units.items()}
        room, like = room or {}, like or {}
        return [
            own_counts(units[path], counts[path] if n == 1 else spread(counts[path], n, room.get(path), like.get(path)))
            for path, n in groups.items()
        ]

    def rows(self, pools: Pools, tensors: Leaves) -> list[Tensor]:
        """The units of each pool, as (groups, units of a group)."""
        tensors = to_seats(_by_path(pools), tensors)
        return [_joined([to_rows(*pair) for pair in _each(pool, tensors)]) for pool in pools]

    def active(self, pools: Pools, masks: Leaves) -> list[Tensor]:
        """Which units of each pool are kept, as (groups, units of a group)."""
        masks = to_seats(_by_path(pools), masks)
        return [_joined([active_rows(*pair) for pair in _each(pool, masks)]) for pool in pools]

    def free(self, pools: Pools, like: Leaves, among: Leaves | None) -> Flags:
        """Which units of each pool may be kept, among these masks; None is all of them."""
        if among is None and self.pattern.allowed is None:
            return [None] * len(pools)
        open_ = to_seats(_by_path(pools), full(among or {}, like, paths_of(_by_path(pools))))
        return [
            _joined([allowed_rows(units, mask, active_rows(units, mask)) for units, mask in _each(pool, open_)])
            for pool in pools
        ]

    def masks(self, pools: Pools, rows: Sequence[Tensor], scores: Leaves, among: Leaves | None = None) -> Leaves:
        """Rows of kept units as masks of their leaves, with the elements that the pattern leaves to other units."""
        made: Leaves = {}
        given = scores if self.pattern.zeros is None else to_seats(_by_path(pools), scores)
        open_ = None if among is None or self.pattern.zeros is None else to_seats(_by_path(pools), among)
        for pool, kept in zip(pools, rows, strict=True):
            for (path, units), part in zip(pool.items(), _split(pool, kept), strict=True):
                assert part is not None
                if units.places:
                    made |= parted(units, part, scores)
                else:
                    made[path] = unit_mask(units, part, given[path], None if open_ is None else open_[path])
        return from_seats(_by_path(pools), made, scores)

    def totals(self, pools: Pools, rows: Sequence[Tensor]) -> Tensor:
        """How many flags are set in each row of the pools, end to end; of a group that processes share, in all."""
        if not any(units.seat for pool in pools for units in pool.values()):
            return totals(rows)
        parts = [(part, units.lie) for pool, row in zip(pools, rows, strict=True) for part, units in _parts(pool, row)]
        counts = totals([part for part, _ in parts], [lie for _, lie in parts])
        return counts.sum(0, keepdim=True) if self.joint else counts

    def best(
        self, pools: Pools, scores: Leaves, counts: list[Count], among: Leaves | None, absolute: bool = False
    ) -> Leaves:
        """Masks of the best units of each pool, among these masks; with `absolute`, of the scores' absolute values."""
        every = _by_path(pools)
        open_ = {} if among is None else full(among, scores, paths_of(every))
        here, there = to_seats(every, scores), to_seats(every, open_)
        kept: Flags = [mask for _, mask in _each(every, there)] if there else [None] * len(every)
        rows = [(units, x, mask) for (units, x), mask in zip(_each(every, here), kept, strict=True)]
        if isinstance(self.distribution, Global):  # rows stay apart: those of all leaves are as large as the masks
            flags = [None if mask is None else active_rows(units, mask) for units, _, mask in rows]
            entries = row_entries(
                [row[0] for row in rows], [row[1] for row in rows], flags, [None] * len(rows), absolute
            )
            won = self._jointly(every, entries, counts, [None] * len(rows)) if rows else []
        else:
            won = best_rows(list(every.values()), [entry_of(*row, absolute) for row in rows], counts)
        masks = self.masks([{path: units} for path, units in every.items()], won, scores, open_ or None)
        if open_ and not self.elementwise:
            masks = {path: mask & open_[path] for path, mask in masks.items()}
        return masks

    def winners(
        self,
        pools: Pools,
        scores: Leaves,
        counts: Sequence[Count] | Tensor,
        allow: Flags | None = None,
        deny: Flags | None = None,
        held: Flags | None = None,
        absolute: bool = False,
    ) -> list[Tensor]:
        """Rows of the winners of each pool, among the units that are allowed and not denied.

        `counts` may be a tensor of the counts of all rows end to end. `held` are units kept already (for bounds).
        With `absolute` scores are absolute values, which are not stored.
        """
        if not pools:
            return []
        allow, deny, held = (flags or [None] * len(pools) for flags in (allow, deny, held))
        open_, barred = (
            [part for pool, flags in zip(pools, rows, strict=True) for part in _split(pool, flags)]
            for rows in (allow, deny)
        )
        each = list(_each(_by_path(pools), to_seats(_by_path(pools), scores)))
        entries = row_entries([one for one, _ in each], [x for _, x in each], open_, barred, absolute)
        if isinstance(self.distribution, Global):
            return [_joined(self._jointly(pools[0], entries, counts, _split(pools[0], held[0])))]
        return winners(entries, counts)

    def _jointly(self, pool: Pool, entries: list[Entry], counts: Sequence[Count] | Tensor, held: Flags) -> list[Tensor]:
        assert isinstance(self.distribution, Global)
        sizes = {path: units.of_all.rows[1] for path, units in pool.items()}
        return within_bounds(self.distribution, sizes, entries, counts[0], held)


def _fixed(path: str, units: Units, sparsity: Real | None) -> Count:
    count, width = units.fixed, units.rows[1]
    assert count is not None
    try:
        if sparsity is not None and not isinstance(count, Tensor):
            check_fixed(sparsity, count / width if width else 1.0, str(units.pattern))
    except ValueError as error:
        raise ValueError(f"{error} at {path!r}") from None
    return count


def _by_path(pools: Pools) -> Pool:
    return {path: units for pool in pools for path, units in pool.items()}


def paths_of(pool: Pool) -> list[str]:
    """The paths of the leaves in a pool, those of tied sets included."""
    return [at for path, units in pool.items() for at in ([place.path for place in units.places] or [path])]


def _each(pool: Pool, leaves: Leaves) -> Iterator[tuple[Units, Tensor]]:
    # The units of a pool with their leaves; those of a tied set as one matrix, made when its turn comes.
    for path, units in pool.items():
        yield units, joined(units, leaves) if units.places else leaves[path]


def _split(pool: Pool, rows: Tensor | None) -> list[Tensor | None]:
    # Rows of a pool by leaf.
    if rows is None or len(pool) == 1:
        return [rows] * len(pool)
    return list(torch.split(rows, [math.prod(units.rows) for units in pool.values()], -1))


def _parts(pool: Pool, rows: Tensor) -> Iterator[tuple[Tensor, Units]]:
    for units, part in zip(pool.values(), _split(pool, rows), strict=True):
        assert part is not None
        yield part, units


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(1, -1) for part in parts], -1)


def full(masks: Leaves, like: Leaves, paths: list[str]) -> Leaves:
    """Masks of these leaves at full shape: a path that is missing is all True."""
    return {p: masks[p] if p in masks else torch.ones_like(like[p], dtype=torch.bool) for p in paths}
