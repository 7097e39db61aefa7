"""The competitions behind every mask: which units compete, how many win, and which win."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn.budgets import Distribution, Global, check_fixed, spread
from sparsefn.engine.checks import check_call
from sparsefn.engine.numbers import Real
from sparsefn.engine.rounding import n_kept
from sparsefn.engine.selection.winners import Count, Entry, totals, winners
from sparsefn.patterns.kinds import Pattern
from sparsefn.patterns.units import active_rows, allowed_rows, fixed_count, row_shape, to_rows, unit_grid
from sparsefn.select import entry, unit_mask
from sparsefn.tree import Leaves

Flags = list[Tensor | None]


class Competition(NamedTuple):
    """What competes with what: the pattern inside a leaf, the distribution among leaves."""

    pattern: Pattern
    distribution: Distribution

    def check(self) -> Competition:
        """The competition itself, if its parts are a pattern and a distribution."""
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"expected pattern to be one such as sf.patterns.nm(2, 4), got {self.pattern!r}")
        if not callable(self.distribution):
            raise TypeError(f"expected distribution to be one such as sf.budgets.erk(), got {self.distribution!r}")
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

    def pools(self, leaves: Mapping[str, object]) -> list[list[str]]:
        """Paths of the leaves that compete with each other: a list a pool."""
        return [list(leaves)] if self.joint and leaves else [[path] for path in leaves]

    def grids(self, leaves: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Shapes of the grids of units that budgets see; errors name the leaf."""
        grids = {}
        for path, leaf in leaves.items():
            shape = tuple(leaf.shape)
            try:
                grids[path] = unit_grid(self.pattern, shape)
                groups = self.row_shape(leaf)[0]
            except ValueError as error:
                raise ValueError(f"{error} at {path!r}") from None
            if self.joint and groups > 1:
                raise ValueError(f"global_ needs a pattern with one competing group a leaf, got {self.pattern}")
            if self.joint and self.pattern.fixed is not None:
                raise ValueError(f"global_ needs a pattern that leaves the count open, got {self.pattern}")
        return grids

    def rows(self, pool: list[str], tensors: Leaves) -> Tensor:
        """The units of a pool as (groups, units of a group)."""
        return _joined([to_rows(self.pattern, tensors[path]) for path in pool])

    def active(self, pool: list[str], masks: Leaves) -> Tensor:
        """Which units of a pool are kept."""
        return _joined([active_rows(self.pattern, masks[path]) for path in pool])

    def free(self, pool: list[str], like: Leaves, among: Leaves | None) -> Tensor | None:
        """Which units of a pool may be kept, among these masks; None is all of them."""
        if among is None and self.pattern.allowed is None:
            return None
        open_ = full(among or {}, like, pool)
        return _joined([allowed_rows(self.pattern, mask, active_rows(self.pattern, mask)) for mask in open_.values()])

    def split(self, pool: list[str], rows: Tensor | None, like: Leaves) -> list[Tensor | None]:
        """Rows of a pool by leaf."""
        if rows is None or len(pool) == 1:
            return [rows] * len(pool)
        return list(torch.split(rows, [math.prod(self.row_shape(like[path])) for path in pool], -1))

    def masks(self, pool: list[str], rows: Tensor, scores: Leaves, among: Leaves | None = None) -> Leaves:
        """Rows of kept units as masks of their leaves, with the elements that the pattern leaves to other units."""
        return {
            path: unit_mask(self.pattern, part, scores[path], None if among is None else among[path])
            for path, part in zip(pool, self.split(pool, rows, scores), strict=True)
            if part is not None
        }

    def best(
        self, pools: list[list[str]], scores: Leaves, counts: list[Count], among: Leaves | None, absolute: bool = False
    ) -> Leaves:
        """Masks of the best units of each pool, among these masks; with `absolute`, of the scores' absolute values."""
        open_ = {} if among is None else full(among, scores, [path for pool in pools for path in pool])
        if self.joint:
            flags: Flags = [self.active(pool, open_) if open_ else None for pool in pools]
            won = self.winners(pools, scores, counts, flags, absolute=absolute)
        else:
            entries = [entry(self.pattern, scores[path], open_.get(path), absolute) for (path,) in pools]
            won = winners(entries, counts)
        masks: Leaves = {}
        for pool, kept in zip(pools, won, strict=True):
            masks |= self.masks(pool, kept, scores, open_ or None)
        if open_ and not self.elementwise:
            masks = {path: mask & open_[path] for path, mask in masks.items()}
        return masks

    def row_shape(self, leaf: Tensor) -> tuple[int, int]:
        """(groups, units of a group) of a leaf, from its shape alone."""
        return row_shape(self.pattern, tuple(leaf.shape))

    def targets(self, leaves: Leaves, sparsity: Real | None) -> list[Count]:
        """Kept count of each pool: an int, a 0-d tensor, or one a group; without a sparsity, the pattern's."""
        grids = self.grids(leaves)
        if not leaves:
            return []
        groups = {path: self.row_shape(leaf) for path, leaf in leaves.items()}
        if self.pattern.fixed is not None:
            return [self._fixed(path, leaf, groups[path][1], sparsity) for path, leaf in leaves.items()]
        if sparsity is None:
            raise TypeError(f"expected a sparsity: {self.pattern} leaves the count open")
        if isinstance(self.distribution, Global):
            total = n_kept(sum(math.prod(self.row_shape(leaf)) for leaf in leaves.values()), sparsity)
            self.distribution.bounds(grids, total)
            return [total]
        counts = self.distribution(grids, sparsity)
        return [spread(counts[path], groups[path][0]) for path in leaves]

    def _fixed(self, path: str, leaf: Tensor, width: int, sparsity: Real | None) -> Count:
        count = fixed_count(self.pattern, tuple(leaf.shape))
        assert count is not None
        try:
            if sparsity is not None and not isinstance(count, Tensor):
                check_fixed(sparsity, count / width if width else 1.0, str(self.pattern))
        except ValueError as error:
            raise ValueError(f"{error} at {path!r}") from None
        return count

    def winners(
        self,
        pools: list[list[str]],
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
        if self.joint:
            return [self._joint_winners(pools[0], scores, counts[0], allow[0], deny[0], held[0], absolute)]
        entries = []
        for (path,), allowed, denied in zip(pools, allow, deny, strict=True):
            rows = to_rows(self.pattern, scores[path])
            entries.append(Entry(rows, allowed_rows(self.pattern, scores[path], allowed), denied, absolute))
        return winners(entries, counts)

    def _joint_winners(
        self,
        pool: list[str],
        scores: Leaves,
        count: Count,
        allow: Tensor | None,
        deny: Tensor | None,
        held: Tensor | None,
        absolute: bool,
    ) -> Tensor:
        assert isinstance(self.distribution, Global)
        entries = []
        allow_, deny_, held_ = (self.split(pool, flags, scores) for flags in (allow, deny, held))
        for path, allowed, denied in zip(pool, allow_, deny_, strict=True):
            rows = to_rows(self.pattern, scores[path]).reshape(1, -1)
            entries.append(Entry(rows, allowed_rows(self.pattern, scores[path], allowed), denied, absolute))
        sizes = {path: (x.scores.shape[-1],) for path, x in zip(pool, entries, strict=True)}
        limits = list(self.distribution.bounds(sizes, torch.zeros((), device="cpu")).values())
        if any(most < n for (_, most), (n,) in zip(limits, sizes.values(), strict=True)):
            # Only the best of a leaf compete, as many as it keeps at most.
            left = [most - _had(flags) for (_, most), flags in zip(limits, held_, strict=True)]
            within = winners(entries, left)
            entries = [x._replace(allow=most, deny=None) for x, most in zip(entries, within, strict=True)]
        if any(least for least, _ in limits):
            # The best of a leaf, as many as it keeps at least, win before all others.
            left = [least - _had(flags) for (least, _), flags in zip(limits, held_, strict=True)]
            first = winners(entries, left)
            alike = [torch.zeros_like(x.scores[:1, :1]).expand(x.scores.shape) for x in entries]
            first = winners([Entry(*pair) for pair in zip(alike, first, strict=True)], [count], joint=True)
            rest = [
                x._replace(deny=won if x.deny is None else x.deny | won) for x, won in zip(entries, first, strict=True)
            ]
            others = winners(rest, [count - totals(first).sum()], joint=True)
            return _joined([a | b for a, b in zip(first, others, strict=True)])
        return _joined(winners(entries, [count], joint=True))


def _had(held: Tensor | None) -> Count:
    return 0 if held is None else held.sum()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(1, -1) for part in parts], -1)


def best_at(
    rule: Competition,
    scores: Leaves,
    like: Leaves,
    sparsity: Real | None,
    eligible: Leaves | None,
    absolute: bool = False,
) -> Leaves:
    """Masks of the best units at a sparsity, among the eligible elements."""
    return rule.best(rule.pools(like), scores, rule.targets(like, sparsity), eligible, absolute)


def full(masks: Leaves, like: Leaves, paths: list[str]) -> Leaves:
    """Masks of these leaves at full shape: a path that is missing is all True."""
    return {p: masks[p] if p in masks else torch.ones_like(like[p], dtype=torch.bool) for p in paths}
