"""Who competes with whom, how many win, and who does: the competitions of every mask algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsefn.boxes import active_rows, allowed_rows, fixed_count, to_rows, unit_grid
from sparsefn.budgets import Distribution, Global, Sparsity, check_fixed, n_kept, spread
from sparsefn.patterns import Pattern
from sparsefn.select import rank_keys, top, unit_keys, unit_mask

Leaves = dict[str, Tensor]
Count = int | Tensor


class Rule(NamedTuple):
    """What competes with what: the pattern inside a leaf, the distribution among leaves."""

    pattern: Pattern
    distribution: Distribution

    def check(self) -> Rule:
        """The rule itself, if its parts are a pattern and a distribution."""
        if not isinstance(self.pattern, Pattern):
            raise TypeError(f"expected pattern to be one such as sf.patterns.nm(2, 4), got {self.pattern!r}")
        if not callable(self.distribution):
            raise TypeError(f"expected distribution to be one such as sf.budgets.erk(), got {self.distribution!r}")
        return self

    @property
    def joint(self) -> bool:
        """Whether all leaves meet in one competition."""
        return isinstance(self.distribution, Global)

    def fields(self, leaves: Mapping[str, Any]) -> list[list[str]]:
        """Paths of the leaves that meet in each competition."""
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

    def rows(self, field: list[str], tensors: Leaves) -> Tensor:
        """The units of a field as (groups, units of a group)."""
        return _joined([to_rows(self.pattern, tensors[path]) for path in field])

    def active(self, field: list[str], masks: Leaves) -> Tensor:
        """Which units of a field are kept."""
        return _joined([active_rows(self.pattern, masks[path]) for path in field])

    def free(self, field: list[str], like: Leaves, among: Leaves | None) -> Tensor:
        """Which units of a field may be kept, among these masks."""
        open_ = full(among or {}, like, field)
        return _joined([allowed_rows(self.pattern, mask, active_rows(self.pattern, mask)) for mask in open_.values()])

    def masks(self, field: list[str], rows: Tensor, scores: Leaves, among: Leaves | None = None) -> Leaves:
        """Rows of kept units spread over the elements of their leaves, and what the pattern leaves the others."""
        parts = [rows]
        if len(field) > 1:
            parts = list(torch.split(rows, [self.row_shape(scores[path]).numel() for path in field], -1))
        chosen = [None if among is None else among[path] for path in field]
        return {
            path: unit_mask(self.pattern, part, scores[path], flags)
            for path, part, flags in zip(field, parts, chosen, strict=True)
        }

    def keep(self, field: list[str], scores: Leaves, count: Count, among: Leaves | None) -> Leaves:
        """Masks of the best units of a field, among these masks."""
        if among is None:
            return self.masks(field, self.win(field, scores, None, count), scores)
        open_ = full(among, scores, field)
        won = self.masks(field, self.win(field, scores, self.active(field, open_), count), scores, open_)
        return {path: mask & open_[path] for path, mask in won.items()}

    def row_shape(self, leaf: Tensor) -> torch.Size:
        """(groups, units of a group) of a leaf, from its shape alone."""
        return to_rows(self.pattern, torch.empty(leaf.shape, device="meta")).shape

    def targets(self, leaves: Leaves, sparsity: Sparsity | None) -> list[Count]:
        """Kept count of each field: an int, a 0-d tensor, or one a group; without a sparsity, the pattern's."""
        grids = self.grids(leaves)
        if not leaves:
            return []
        groups = {path: self.row_shape(leaf) for path, leaf in leaves.items()}
        if self.pattern.fixed is not None:
            return [self._fixed(path, leaf, groups[path][1], sparsity) for path, leaf in leaves.items()]
        if sparsity is None:
            raise TypeError(f"expected a sparsity: {self.pattern} leaves the count open")
        if isinstance(self.distribution, Global):
            total = n_kept(sum(self.row_shape(leaf).numel() for leaf in leaves.values()), sparsity)
            self.distribution.bounds(grids, total)
            return [total]
        counts = self.distribution(grids, sparsity)
        return [spread(counts[path], groups[path][0]) for path in leaves]

    def _fixed(self, path: str, leaf: Tensor, width: int, sparsity: Sparsity | None) -> Count:
        count = fixed_count(self.pattern, tuple(leaf.shape))
        assert count is not None
        try:
            if sparsity is not None and not isinstance(count, Tensor):
                check_fixed(sparsity, count / width if width else 1.0, str(self.pattern))
        except ValueError as error:
            raise ValueError(f"{error} at {path!r}") from None
        return count

    def win(
        self, field: list[str], scores: Leaves, eligible: Tensor | None, count: Count, held: Tensor | None = None
    ) -> Tensor:
        """Rows of the winners among the eligible units; `held` are units kept already (for bounds)."""
        if not isinstance(self.distribution, Global):
            return top(unit_keys(self.pattern, scores[field[0]], eligible), count)
        rows = [to_rows(self.pattern, scores[path]).reshape(1, -1) for path in field]
        wide = torch.float64 if any(r.dtype == torch.float64 for r in rows) else torch.float32
        sizes = [r.shape[-1] for r in rows]
        flags = [None] * len(rows) if eligible is None else torch.split(eligible, sizes, -1)
        had = [None] * len(rows) if held is None else torch.split(held, sizes, -1)
        limits = self.distribution.bounds({path: (n,) for path, n in zip(field, sizes, strict=True)}, torch.zeros(()))
        keys = [
            _bounded(rank_keys(r, allowed_rows(self.pattern, scores[path], f), wide), h, *limits[path])
            for path, r, f, h in zip(field, rows, flags, had, strict=True)
        ]
        return top(torch.cat(keys, -1), count)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(1, -1) for part in parts], -1)


def _bounded(keys: Tensor, held: Tensor | None, least: int, most: int) -> Tensor:
    # The best `least` of a leaf win before all others; those beyond `most` are barred.
    size, info = keys.shape[-1], torch.iinfo(keys.dtype)
    have: Any = 0 if held is None else held.sum()
    if most < size:
        keys = torch.where(top(keys, most - have), keys, info.min)
    if least > 0:
        need = least - have if isinstance(have, int) else (least - have).clamp(min=0)
        keys = torch.where(top(keys, need) & (keys > info.min), info.max, keys)
    return keys


def best(rule: Rule, scores: Leaves, like: Leaves, sparsity: Sparsity | None, eligible: Leaves | None) -> Leaves:
    """Masks of the winners at a sparsity, among the eligible elements."""
    masks: Leaves = {}
    for field, count in zip(rule.fields(like), rule.targets(like, sparsity), strict=True):
        masks |= rule.keep(field, scores, count, eligible)
    return masks


def full(masks: Leaves, like: Leaves, paths: list[str]) -> Leaves:
    """Masks of these leaves at full shape: a path that is missing is all True."""
    return {p: masks[p] if p in masks else torch.ones_like(like[p], dtype=torch.bool) for p in paths}
