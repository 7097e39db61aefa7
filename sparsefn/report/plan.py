"""What an algorithm will keep of every leaf, as a table, before training."""

from __future__ import annotations

from typing import NamedTuple

import optree
import torch

from sparsefn.engine.checks import check_int
from sparsefn.engine.described import uncalled
from sparsefn.engine.table import aligned
from sparsefn.report.summary import Row, cells, summary
from sparsefn.state import Algorithm
from sparsefn.timetable import unfinished
from sparsefn.tree import Tree, flatten
from sparsefn.where import why_dense


class Planned(NamedTuple):
    """What is planned for one leaf: a `Row`, and why nothing of the leaf is pruned.

    >>> sf.report.Planned("b", (2,), kept=2, total=2, sparsity=0.0, why="fewer than 2 dimensions").why
    'fewer than 2 dimensions'

    `why` is empty where something is pruned.
    """

    path: str
    shape: tuple[int, ...]
    kept: int
    total: int
    sparsity: float
    why: str


class Plan(NamedTuple):
    """The result of `plan`; `str()` of it is a table.

    >>> plan = sf.report.plan(sf.rigl(0.75), {"w": torch.ones(2, 4), "b": torch.ones(2)})
    >>> plan.sparsified.kept, plan.dense
    (2, ('b',))

    `rows` has a row for every leaf, `total` is over all leaves, `sparsified` over leaves with a mask, and
    `dense` holds the paths of the others. `notes` are sentences on what a run of `steps` steps ends too early for.
    """

    rows: tuple[Planned, ...]
    total: Row
    sparsified: Row
    dense: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Align the rows, with the totals and the notes below."""
        width = max([len("dense because"), *(len(row.why) for row in self.rows)])
        lines: list[tuple[str, ...]] = [("path", "shape", "kept", "total", "sparsity", "dense because".ljust(width))]
        lines += [
            (*cells(Row(*row[:5]), str(row.shape), row.path in self.dense), row.why.ljust(width)) for row in self.rows
        ]
        lines += [(*cells(row), "") for row in (self.sparsified, self.total)]
        return "\n".join([aligned(lines, left=2), *(f"note: {note}" for note in self.notes)])


def plan(algorithm: Algorithm, params: Tree, steps: int = 0, grads: Tree | None = None) -> Plan:
    """Count what an algorithm keeps of every leaf, before training.

    >>> params = {"0.weight": torch.ones(64, 64), "0.bias": torch.ones(64), "2.weight": torch.ones(4, 64)}
    >>> print(sf.report.plan(sf.rigl(0.9, distribution=sf.budgets.erk()), params))
    path        shape      kept  total  sparsity  dense because
    0.bias      (64,)        64     64     dense  fewer than 2 dimensions
    0.weight    (64, 64)    284  4,096    0.9307
    2.weight    (4, 64)     151    256    0.4102
    sparsified              435  4,352    0.9000
    all                     499  4,416    0.8870

    It counts the masks of `algorithm.init(params)`. An algorithm whose sparsity rises, such as `gmp`, starts with few
    zeros: with `steps` the masks after steps 0 to `steps - 1` are counted. For that `update` runs `steps` times, on
    the weights as they are and with the same gradients each time: `grads`, or zeros. No model runs, but that many
    updates do.

    >>> gmp = sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=20))
    >>> [sf.report.plan(gmp, params, steps).sparsified.kept for steps in (0, 11, 21)]
    [4352, 924, 436]

    `steps` is then the length of the run, and `notes`, below the table, name the schedules and triggers that have not
    ended by then:

    >>> print(sf.report.plan(gmp, {"w": torch.ones(10, 10)}, steps=11))
    path        shape     kept  total  sparsity  dense because
    w           (10, 10)    21    100    0.7900
    sparsified              21    100    0.7900
    all                     21    100    0.7900
    note: polynomial(0.0, 0.9, begin=0, end=20) ends at step 20, after the run of 11 steps: its last value there is \
0.787, not 0.9

    Most budgets say how many weights each leaf keeps, and then the plan is what training will do. Where scores decide
    that (`global_`, `snfs`), training will change the counts of leaves; their total is as planned. Of a `supermask`
    that draws its masks the counts are those of one draw.

    `why` says why nothing of a leaf is pruned: what `default_where` finds in its path or shape; "not chosen" where
    it finds nothing, so that the `where` of the algorithm left the leaf out; "its mask keeps all" for a leaf that has
    a mask, as of a small leaf under `erk`. Raises TypeError for anything but an Algorithm and for steps that are not
    an int, ValueError for negative steps, and as `init` and `update` do.
    """
    if not isinstance(algorithm, Algorithm):
        got = uncalled(algorithm) or type(algorithm).__name__
        raise TypeError(f"plan: expected an algorithm such as sf.rigl(0.9), got {got}")
    check_int("plan", "steps", steps, 0)
    state = algorithm.init(params)
    if grads is None:
        grads = optree.tree_map(torch.zeros_like, state.params)
    for step in range(steps):
        state = algorithm.update(state, grads, step)
    found, leaves = summary(state), flatten(state.params)[0]
    rows = []
    for row in found.rows:
        why = ""
        if row.path in found.dense:
            why = why_dense(row.path, leaves[row.path]) or "not chosen"
        elif row.kept == row.total:
            why = "its mask keeps all"
        rows.append(Planned(*row, why))
    notes = unfinished(algorithm, steps) if steps else []
    return Plan(tuple(rows), found.total, found.sparsified, found.dense, tuple(notes))
