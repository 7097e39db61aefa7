"""Tables of what a state keeps, and of what changed between two states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn.algorithms.frame import sparse_leaves
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.rounding import as_fraction, fraction_at
from sparsefn.engine.table import aligned
from sparsefn.ensemble import check_single
from sparsefn.masks import sparsity
from sparsefn.masks.counts import kept_in
from sparsefn.state import Level, State, Step, check_masks
from sparsefn.tree import check_like, flatten, leaves_like


class Row(NamedTuple):
    """Counts of one leaf, or of several together.

    >>> sf.report.Row("w", (2, 2), kept=1, total=4, sparsity=0.75).sparsity
    0.75
    """

    path: str
    shape: tuple[int, ...]
    kept: int
    total: int
    sparsity: float


class Summary(NamedTuple):
    """The result of `summary`; `str()` of it is a table.

    >>> state = sf.State({"w": torch.ones(1, 4)}, {"w": torch.tensor([[True, False, False, False]])})
    >>> sf.report.summary(state).total.sparsity
    0.75

    `rows` has a row for every leaf, `total` is over all of them, `sparsified` over those that have a
    mask, and `dense` holds the paths of the others.
    """

    rows: tuple[Row, ...]
    total: Row
    sparsified: Row
    dense: tuple[str, ...]

    def __str__(self) -> str:
        """Align the rows, with the totals below."""
        lines: list[tuple[str, ...]] = [("path", "shape", "kept", "total", "sparsity")]
        lines += [cells(row, str(row.shape), row.path in self.dense) for row in self.rows]
        lines += [cells(row) for row in (self.sparsified, self.total)]
        return aligned(lines, left=2)


def cells(row: Row, shape: str = "", dense: bool = False) -> tuple[str, ...]:
    """One line of a table of counts.

    >>> cells(Row("w", (2, 2), kept=1, total=4, sparsity=0.75), "(2, 2)")
    ('w', '(2, 2)', '1', '4', '0.7500')
    """
    level = "dense" if dense else f"{row.sparsity:.4f}"
    return row.path, shape, f"{row.kept:,}", f"{row.total:,}", level


class Change(NamedTuple):
    """How the mask of one leaf, or of several together, changed.

    >>> sf.report.Change("w", kept=2, grown=1, dropped=1, overlap=0.5).grown
    1

    `kept` counts the entries in both masks; `overlap` is that over the entries in either (1.0 if there are none).
    """

    path: str
    kept: int
    grown: int
    dropped: int
    overlap: float


class Changes(NamedTuple):
    """The result of `changed`; `str()` of it is a table.

    >>> state = sf.State({"w": torch.ones(2)}, {"w": torch.tensor([True, False])})
    >>> sf.report.changed(state, state).total
    Change(path='total', kept=1, grown=0, dropped=0, overlap=1.0)

    `rows` has a row for every leaf with a mask before or after; `total` is over them.
    """

    rows: tuple[Change, ...]
    total: Change

    def __str__(self) -> str:
        """Align the rows, with the total below."""
        lines = [("path", "kept", "grown", "dropped", "overlap")]
        for row in (*self.rows, self.total):
            lines.append((row.path, f"{row.kept:,}", f"{row.grown:,}", f"{row.dropped:,}", f"{row.overlap:.4f}"))
        return aligned(lines, left=1)


class Observed(NamedTuple):
    """The sparsity of one leaf: computed from its mask, and its target.

    >>> sf.report.Observed(computed=0.7, target=0.75).target
    0.75
    """

    computed: float | Tensor
    target: float | Tensor | None


def summary(state: State) -> Summary:
    """Count the entries that every leaf keeps.

    >>> state = sf.State(
    ...     {"0.weight": torch.ones(2, 4), "0.bias": torch.ones(2)},
    ...     {"0.weight": torch.tensor([[True, False, False, False]] * 2), "0.bias": torch.tensor(True)},
    ... )
    >>> print(sf.report.summary(state))
    path        shape   kept  total  sparsity
    0.bias      (2,)       2      2     dense
    0.weight    (2, 4)     2      8    0.7500
    sparsified             2      8    0.7500
    all                    4     10    0.6000

    Counts come from the masks, not from the values of the weights. Rows are in optree's order. Of a
    stack of states `sf.ensemble.summary` counts every member. Raises ValueError for a stack, and where masks do
    not fit params.
    """
    check_single(state)
    check_masks(state.masks, state.params)
    leaves = flatten(state.params)[0]
    masks = dict(zip(leaves, leaves_like(state.masks, state.params), strict=True))
    dense = tuple(path for path, leaf in leaves.items() if not is_sparse(masks[path], leaf))
    sparse = [path for path in leaves if path not in dense]
    kept = dict(zip(sparse, map(int, kept_in([masks[path] for path in sparse])), strict=True))
    totals = {path: leaf.numel() for path, leaf in leaves.items()}
    rows = [_row(path, tuple(leaf.shape), kept.get(path, totals[path]), totals[path]) for path, leaf in leaves.items()]
    return Summary(tuple(rows), _sum("all", rows), _sum("sparsified", [r for r in rows if r.path not in dense]), dense)


def observe(state: State, target: Level | None = None, step: Step = 0) -> dict[str, Observed]:
    """The sparsity of every leaf that has a mask, beside its target at a step.

    >>> state = sf.State({"w": torch.ones(4)}, {"w": torch.tensor([True, False, False, False])})
    >>> sf.report.observe(state, sf.schedules.linear(0.5, 0.125), step=2)
    {'w': Observed(computed=0.75, target=0.75)}

    `computed` comes from the masks, in optree's order of paths: a float, or a 0-d float64 tensor where
    `vmap` or `torch.compile` hides values. `target` is a float, a 0-d tensor or a Schedule; a value outside [0, 1] is
    clamped, as algorithms do, and without a target it is None. Nothing is registered: call it where you
    log. Raises ValueError where masks do not fit params.
    """
    check_single(state)
    check_masks(state.masks, state.params)
    level = as_fraction(target)
    aim = None if level is None else fraction_at(level, step)
    masks = sparse_leaves(state)[1]
    return {path: Observed(sparsity({path: mask}), aim) for path, mask in masks.items()}


def changed(old: State, new: State) -> Changes:
    """Count the entries that grew and that were dropped from one state to another.

    >>> old = sf.State({"w": torch.ones(4)}, {"w": torch.tensor([True, True, True, False])})
    >>> new = old._replace(masks={"w": torch.tensor([True, True, False, True])})
    >>> print(sf.report.changed(old, new))
    path   kept  grown  dropped  overlap
    w         2      1        1   0.5000
    total     2      1        1   0.5000

    A 0-d mask counts as full; leaves that have one before and after are left out. Raises ValueError
    where the two states differ in structure or shapes.
    """
    for state in (old, new):
        check_single(state)
        check_masks(state.masks, state.params)
    check_like("the new params", new.params, old.params, dtype=False)
    paths: list[str] = []
    both: list[Tensor] = []
    masks = [leaves_like(state.masks, old.params) for state in (old, new)]
    for (path, leaf), before, after in zip(flatten(old.params)[0].items(), *masks, strict=True):
        if is_sparse(before, leaf) or is_sparse(after, leaf):
            was, now = (mask if mask.ndim else torch.ones_like(leaf, dtype=torch.bool) for mask in (before, after))
            paths.append(path)
            both += [was & now, now & ~was, was & ~now]
    counts = list(map(int, kept_in(both)))
    rows = [_change(path, *counts[3 * i : 3 * i + 3]) for i, path in enumerate(paths)]
    total = _change(
        "total", sum(row.kept for row in rows), sum(row.grown for row in rows), sum(row.dropped for row in rows)
    )
    return Changes(tuple(rows), total)


def _row(path: str, shape: tuple[int, ...], kept: int, total: int) -> Row:
    return Row(path, shape, kept, total, (total - kept) / max(total, 1))


def _sum(path: str, rows: Sequence[Row]) -> Row:
    return _row(path, (), sum(row.kept for row in rows), sum(row.total for row in rows))


def _change(path: str, kept: int, grown: int, dropped: int) -> Change:
    either = kept + grown + dropped
    return Change(path, kept, grown, dropped, kept / either if either else 1.0)
