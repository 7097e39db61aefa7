"""What an algorithm will keep of every leaf, as a table, before training."""

from __future__ import annotations

import optree
import torch

from sparsefn.core.checks import check_int, uncalled
from sparsefn.core.state import Algorithm
from sparsefn.core.timetable import unfinished
from sparsefn.core.tree import Tree, flatten
from sparsefn.core.tree.where import why_dense
from sparsefn.report.summary import Summary, summary


def plan(
    algorithm: Algorithm,
    params: Tree,
    steps: int = 0,
    grads: Tree | None = None,
) -> Summary:
    """Count what an algorithm keeps of every leaf, before training.

    >>> shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (4, 64)}
    >>> params = {name: torch.ones(shape) for name, shape in shapes.items()}
    >>> print(sf.report.plan(sf.rigl(0.9, distribution=sf.budgets.erk()), params))
    path        shape     kept  total  sparsity              dead  dense because
    0.bias      (64,)       64     64     dense                    fewer than 2
    dimensions
    0.weight    (64, 64)   284  4,096    0.9307  1 row, 2 columns
    2.weight    (4, 64)    151    256    0.4102         2 columns
    sparsified             435  4,352    0.9000  1 row, 4 columns
    all                    499  4,416    0.8870  1 row, 4 columns

    Args:
        algorithm: The algorithm.
        params: The parameters.
        steps: The length of the run, of which the masks after step `steps - 1` are
            counted. `update` runs so many times, on the weights as they are; no model
            runs. 0: the masks of `algorithm.init(params)` are counted.
        grads: The gradients of every step, a tree like `params`. None: zeros.

    Returns:
        The counts; `str()` of it is a table. `why` says why nothing of a leaf is
        pruned: what `default_where` finds in its path or shape; "not chosen" where it
        finds nothing, so that the `where` of the algorithm left the leaf out; "its mask
        keeps all" for a leaf that has a mask, as of a small leaf under `erk`.

    Raises:
        TypeError: `algorithm` is not an Algorithm, or `steps` is not an int.
        ValueError: `steps` is negative, or `init` or `update` raises it.

    An algorithm whose sparsity rises, such as `gmp`, starts with few zeros: count it
    after some steps.

    >>> gmp = sf.gmp(sf.schedules.polynomial(0.0, 0.9, begin=0, end=20))
    >>> [sf.report.plan(gmp, params, steps).sparsified.kept for steps in (0, 11, 21)]
    [4352, 924, 436]

    `notes`, below the table, name the schedules and triggers that have not ended by
    `steps`:

    >>> print(sf.report.plan(gmp, {"w": torch.ones(10, 10)}, steps=11))
    path        shape     kept  total  sparsity    dead
    w           (10, 10)    21    100    0.7900  7 rows
    sparsified              21    100    0.7900  7 rows
    all                     21    100    0.7900  7 rows
    note: polynomial(0.0, 0.9, begin=0, end=20) ends at step 20, after the run of 11
    steps: its last value there is 0.787, not 0.9

    Most budgets say how many weights each leaf keeps, and then the plan is what
    training will do. Where scores decide that (`global_`, `snfs`), training will change
    the counts of leaves; their total is as planned. Of a `supermask` that draws its
    masks the counts are of one draw.
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
    found = summary(state)
    leaves = flatten(state.params)[0]
    why = {
        row.path: "its mask keeps all" for row in found.rows if row.kept == row.total
    }
    why |= {path: why_dense(path, leaves[path]) or "not chosen" for path in found.dense}
    rows = [row._replace(why=why.get(row.path, "")) for row in found.rows]
    notes = unfinished(algorithm, steps) if steps else []
    return found._replace(rows=tuple(rows), notes=tuple(notes))
