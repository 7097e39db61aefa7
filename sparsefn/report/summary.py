"""Tables of what a state keeps, and of what changed between two states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.processes import agreed, full_tensors, is_sharded
from sparsefn.algorithms.frame import sparse_leaves
from sparsefn.core.checks import aligned, natural
from sparsefn.core.rounding import as_fraction, fraction_at
from sparsefn.core.state import Level, State, Step, check_masks
from sparsefn.core.tree import check_like, flatten, leaves_like, mend_of
from sparsefn.masks import sparsity
from sparsefn.masks.sets import kept_in
from sparsefn.nn.attach.handle import Attached
from sparsefn.nn.ensemble import check_one_state


class Row(NamedTuple):
    """Counts of one leaf, or of several together.

    >>> sf.report.Row("w", (2, 2), kept=1, total=4, sparsity=0.75).sparsity
    0.75

    Attributes:
        path: Dotted path of the leaf, or what the row sums up.
        shape: Shape of the leaf; `()` for several.
        kept: Entries that the mask keeps.
        total: Entries of the leaf.
        sparsity: 1 - kept / total; 0.0 if there are none.
        dead: Rows and columns of the mask that keep nothing: indices of its first and
            of its second dimension, most often outputs and inputs.
        why: In a plan, why nothing of the leaf is pruned; "" if something is.
    """

    path: str
    shape: tuple[int, ...]
    kept: int
    total: int
    sparsity: float
    dead: tuple[int, int] = (0, 0)
    why: str = ""


class Summary(NamedTuple):
    """The result of `summary` and of `plan`; `str()` of it is a table.

    >>> state = sf.State(
    ...     {"w": torch.ones(1, 4)}, {"w": torch.tensor([[True, False, False, False]])}
    ... )
    >>> sf.report.summary(state).total.sparsity
    0.75

    Attributes:
        rows: A row for every leaf.
        total: The row of all leaves together.
        sparsified: The row of all leaves that have a mask.
        dense: Paths of the leaves that have none.
        notes: Sentences on what the run ends too early for. The run of a plan is its
            `steps` steps, the run of an `Attached` is the steps so far.
    """

    rows: tuple[Row, ...]
    total: Row
    sparsified: Row
    dense: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Align the rows, with the totals below, columns for `dead` and `why` where
        there are any, and the notes.
        """
        lines: list[list[str]] = [["path", "shape", "kept", "total", "sparsity"]]
        listed = (*self.rows, self.sparsified, self.total)
        for i, row in enumerate(listed):
            level = "dense" if row.path in self.dense else f"{row.sparsity:.4f}"
            shape = ""
            if i < len(self.rows):
                shape = str(row.shape)
            lines.append([row.path, shape, f"{row.kept:,}", f"{row.total:,}", level])
        if any(any(row.dead) for row in self.rows):
            lines[0].append("dead")
            for line, row in zip(lines[1:], listed, strict=True):
                counts = []
                for n, name in zip(row.dead, ("row", "column"), strict=True):
                    if n:
                        counts.append(f"{n:,} {name}{'s' if n > 1 else ''}")
                line.append(", ".join(counts))
        if any(row.why for row in self.rows):
            reasons = ["dense because", *(row.why for row in listed)]
            width = max(map(len, reasons))
            for line, why in zip(lines, reasons, strict=True):
                line.append(why.ljust(width))
        table = aligned([tuple(line) for line in lines], left=2)
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([table, *notes])


class Change(NamedTuple):
    """How the mask of one leaf, or of several together, changed.

    >>> sf.report.Change("w", kept=2, grown=1, dropped=1, overlap=0.5).grown
    1

    Attributes:
        path: Dotted path of the leaf, or "total".
        kept: Entries that both masks keep.
        grown: Entries that only the new mask keeps.
        dropped: Entries that only the old mask keeps.
        overlap: `kept` over the entries that one of the masks keeps; 1.0 if there are
            none.
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

    Attributes:
        rows: A row for every leaf that has a mask before or after.
        total: The row of all of these together.
    """

    rows: tuple[Change, ...]
    total: Change

    def __str__(self) -> str:
        """Align the rows, with the total below."""
        lines = [("path", "kept", "grown", "dropped", "overlap")]
        for row in (*self.rows, self.total):
            lines.append(
                (
                    row.path,
                    f"{row.kept:,}",
                    f"{row.grown:,}",
                    f"{row.dropped:,}",
                    f"{row.overlap:.4f}",
                )
            )
        return aligned(lines, left=1)


class Observed(NamedTuple):
    """The sparsity of one leaf: computed from its mask, and its target.

    >>> sf.report.Observed(computed=0.7, target=0.75).target
    0.75

    Attributes:
        computed: Fraction of the mask that is False.
        target: Value at the step of the target that `observe` was given; None where
            it was given none.
    """

    computed: float | Tensor
    target: float | Tensor | None


def summary(
    state: State | Attached, *, only: Literal["sparsified"] | None = None
) -> Summary:
    """Count the entries that every leaf keeps.

    >>> state = sf.State(
    ...     {"0.weight": torch.ones(2, 4), "0.bias": torch.ones(2)},
    ...     {
    ...         "0.weight": torch.tensor([[True, True, False, False], [False] * 4]),
    ...         "0.bias": torch.tensor(True),
    ...     },
    ... )
    >>> print(sf.report.summary(state))
    path        shape   kept  total  sparsity              dead
    0.bias      (2,)       2      2     dense
    0.weight    (2, 4)     2      8    0.7500  1 row, 2 columns
    sparsified             2      8    0.7500  1 row, 2 columns
    all                    4     10    0.6000  1 row, 2 columns

    Args:
        state: A state, or the object that `sf.attach` returned. Of the latter weights
            count that are kept, or not zero in the module.
        only: "sparsified" leaves out the rows of dense leaves; the totals are the same.

    Returns:
        The counts; `str()` of it is a table. Rows are in the order of paths, with
        numbers by their value: `layers.2` before `layers.10`. Under `dead` stand rows
        and columns of masks of two dimensions or more that keep nothing: most often
        outputs without an input, and inputs that nothing reads. Below the table `notes`
        name, for `sf.attach`, the schedules and triggers that have not ended by the
        last step, and algorithms that do not know how long the run is and have changed
        masks once.

    Raises:
        TypeError: `state` is anything else.
        ValueError: `state` is a stack of states, of which `sf.ensemble.summary` counts
            every member, its masks do not fit its params, or `only` is another.

    Counts come from the masks, not from the values of the weights.
    """
    if only not in (None, "sparsified"):
        raise ValueError(
            f"summary: expected only to be 'sparsified' or None, got {only!r}"
        )
    notes: tuple[str, ...] = ()
    if isinstance(state, Attached):
        notes = tuple(state.notes)
        state = state.in_module()
    check_counted(state)
    leaves = flatten(state.params)[0]
    masks = sparse_leaves(state)[1]
    counted = agreed(
        {"call": "summary"}, {"masks": masks}, lambda: _counted(list(masks.values()))
    )
    numbers = list(map(int, counted))
    found = {}
    for i, path in enumerate(masks):
        kept, live, read = numbers[3 * i : 3 * i + 3]
        found[path] = (kept, live, read)
    rows = []
    for path in sorted(leaves, key=natural):
        shape = tuple(leaves[path].shape)
        total = leaves[path].numel()
        kept, live, read = found.get(path, (total, 0, 0))
        if path in found and len(shape) > 1 and total:
            dead = (shape[0] - live, shape[1] - read)
        else:
            dead = (0, 0)
        rows.append(_row(path, shape, kept, total, dead))
    sparsified = [row for row in rows if row.path in masks]
    dense = tuple(row.path for row in rows if row.path not in masks)
    shown = sparsified if only else rows
    return Summary(
        tuple(shown), _sum("all", rows), _sum("sparsified", sparsified), dense, notes
    )


def check_counted(state: State) -> None:
    """Raise TypeError for anything but a State, ValueError for a stack of states and
    masks that do not fit params.

    >>> check_counted(sf.dense().init({"w": torch.ones(2)}))
    """
    if not isinstance(state, State):
        got = f"{type(state).__name__}{mend_of('state', state)}"
        raise TypeError(
            f"expected a State, or for summary what sf.attach returned, got {got}"
        )
    check_one_state(state)
    check_masks(state.masks, state.params)


def observe(
    state: State, target: Level | None = None, step: Step = 0
) -> dict[str, Observed]:
    """The sparsity of every leaf that has a mask, beside its target at a step.

    >>> state = sf.State(
    ...     {"w": torch.ones(4)}, {"w": torch.tensor([True, False, False, False])}
    ... )
    >>> sf.report.observe(state, sf.schedules.linear(0.5, 0.125), step=2)
    {'w': Observed(computed=0.75, target=0.75)}

    Args:
        state: The state.
        target: A float, a 0-d tensor or a Schedule; values of the latter two outside
            [0, 1] are clamped, as algorithms do. None: no target.
        step: The step of the target.

    Returns:
        By path, in optree's order, the target and the sparsity `computed` from the
        mask, a float, or a 0-d float64 tensor where `vmap` or `torch.compile` hides
        values.

    Raises:
        TypeError: `state` is not a State, or `target` not a sparsity.
        ValueError: `state` is a stack of states, its masks do not fit its params, or a
            float `target` is outside [0, 1].

    Nothing is registered: call it where you log.
    """
    check_counted(state)
    level = as_fraction(target)
    aim = None if level is None else fraction_at(level, step)
    masks = sparse_leaves(state)[1]
    return {path: Observed(sparsity({path: mask}), aim) for path, mask in masks.items()}


def changed(old: State, new: State) -> Changes:
    """Count the entries that grew and that were dropped from one state to another.

    >>> old = sf.State(
    ...     {"w": torch.ones(4)}, {"w": torch.tensor([True, True, True, False])}
    ... )
    >>> new = old._replace(masks={"w": torch.tensor([True, True, False, True])})
    >>> print(sf.report.changed(old, new))
    path   kept  grown  dropped  overlap
    w         2      1        1   0.5000
    total     2      1        1   0.5000

    Args:
        old: The earlier state.
        new: The later state.

    Returns:
        The counts; `str()` of it is a table. A 0-d mask counts as full; leaves that
        have one before and after are left out.

    Raises:
        TypeError: A state is not a State.
        ValueError: A state is a stack of states, its masks do not fit its params, or
            the two differ in structure or shapes.
    """
    for state in (old, new):
        check_counted(state)
    check_like("the new params", new.params, old.params, dtype=False)
    paths: list[str] = []
    both: list[Tensor] = []
    masks = [leaves_like(state.masks, old.params) for state in (old, new)]
    each = zip(flatten(old.params)[0].items(), *masks, strict=True)
    for (path, leaf), before, after in sorted(each, key=lambda row: natural(row[0][0])):
        if is_sparse(before, leaf) or is_sparse(after, leaf):
            was = _full(before, leaf)
            now = _full(after, leaf)
            paths.append(path)
            both += [was & now, now & ~was, was & ~now]
    counts = list(map(int, kept_in(both)))
    rows = []
    for i, path in enumerate(paths):
        rows.append(_change(path, *counts[3 * i : 3 * i + 3]))
    totals = [sum(counts[i::3]) for i in range(3)]
    return Changes(tuple(rows), _change("total", *totals))


def _full(mask: Tensor, leaf: Tensor) -> Tensor:
    if mask.ndim:
        return mask
    return torch.ones_like(leaf, dtype=torch.bool)


def _counted(masks: Sequence[Tensor]) -> list[Tensor]:
    flags: list[Tensor] = []
    for mask in masks:
        rows, columns = _lines(mask)
        flags += [mask, rows, columns]
    return kept_in(flags)


def _lines(mask: Tensor) -> tuple[Tensor, Tensor]:
    # Which rows and which columns keep an entry; empty for fewer than two dimensions.
    if mask.ndim < 2 or not mask.numel():
        return mask.new_zeros(0), mask.new_zeros(0)
    if is_sharded(mask):
        of_rows = mask.sum([*range(1, mask.ndim)])
        of_columns = mask.sum([0, *range(2, mask.ndim)])
        rows, columns = full_tensors([of_rows, of_columns])
        return rows, columns
    rows = mask.flatten(1).any(1)
    columns = mask.any(0)
    if columns.ndim > 1:
        columns = columns.flatten(1).any(1)
    return rows, columns


def _row(
    path: str,
    shape: tuple[int, ...],
    kept: int,
    total: int,
    dead: tuple[int, int] = (0, 0),
) -> Row:
    sparsity = (total - kept) / max(total, 1)
    return Row(path, shape, kept, total, sparsity, dead)


def _sum(path: str, rows: Sequence[Row]) -> Row:
    kept = 0
    total = 0
    dead_rows = 0
    dead_columns = 0
    for row in rows:
        kept += row.kept
        total += row.total
        dead_rows += row.dead[0]
        dead_columns += row.dead[1]
    return _row(path, (), kept, total, (dead_rows, dead_columns))


def _change(path: str, kept: int, grown: int, dropped: int) -> Change:
    either = kept + grown + dropped
    overlap = kept / either if either else 1.0
    return Change(path, kept, grown, dropped, overlap)
