"""Numbers to log: of a state, of what changed, and of what was ever kept."""

from __future__ import annotations

from torch import Tensor

from sparsefn._engine.numbers import divide
from sparsefn.algorithms.frame import sparse_leaves
from sparsefn.core.state import State
from sparsefn.core.tree import Tree
from sparsefn.masks import n_kept, n_total
from sparsefn.report.summary import Row, changed, summary


def scalars(state: State, old: State | None = None) -> dict[str, float]:
    """The numbers of a state as a flat dict, for TensorBoard or W&B.

    >>> old = sf.State(
    ...     {"w": torch.ones(2, 2)}, {"w": torch.tensor([[True, False], [True, False]])}
    ... )
    >>> new = old._replace(masks={"w": torch.tensor([[True, True], [False, False]])})
    >>> sf.report.scalars(new)
    {'sparsity': 0.5, 'sparsity/w': 0.5, 'dead_units': 1.0, 'dead_units/w': 1.0}
    >>> {
    ...     name: value
    ...     for name, value in sf.report.scalars(new, old).items()
    ...     if name.endswith("/w")
    ... }
    {'sparsity/w': 0.5, 'dead_units/w': 1.0, 'overlap/w': 0.333..., 'grown/w': 1.0,
    'dropped/w': 1.0}

    Args:
        state: The state.
        old: An earlier state. With it `overlap`, `grown` and `dropped` come from
            `changed`.

    Returns:
        Values by name. A name is a quantity, with a slash and the path of a leaf behind
        it, or alone for all leaves that have a mask. `dead_units` counts rows, along
        the first dimension, of which nothing is kept.

    Raises:
        TypeError: `state` or `old` is not a State.
        ValueError: A state is a stack of states, its masks do not fit its params, or
            the two differ in structure or shapes.

    Reading the values waits for the device: call it where you log.
    """
    found = summary(state)
    masks = sparse_leaves(state)[1]
    rows = [row for row in found.rows if row.path in masks]
    dead = {row.path: float(_dead_units(row)) for row in rows}
    levels = {row.path: row.sparsity for row in rows}
    values = _named("sparsity", found.sparsified.sparsity, levels) | _named(
        "dead_units", sum(dead.values()), dead
    )
    if old is not None:
        changes, total = changed(old, state)
        for name in ("overlap", "grown", "dropped"):
            leaves = {row.path: float(getattr(row, name)) for row in changes}
            values |= _named(name, float(getattr(total, name)), leaves)
    return values


def _dead_units(row: Row) -> int:
    if row.total and len(row.shape) > 1:
        return row.dead[0]
    if row.total:
        return row.total - row.kept
    return row.shape[0]


def _named(name: str, total: float, leaves: dict[str, float]) -> dict[str, float]:
    return {name: float(total)} | {
        f"{name}/{path}": value for path, value in leaves.items()
    }


def itop(seen: Tree, params: Tree | None = None) -> float | Tensor:
    """The share of weights that were ever kept: the in-time over-parametrisation rate.

    >>> sf.report.itop(
    ...     {"w": torch.tensor([True, True, True, False]), "b": torch.tensor(True)}
    ... )
    0.75

    Args:
        seen: The masks that `sf.masks.explored` collects.
        params: The parameters. As in `sf.masks.sparsity`, leaves that are not
            sparsified count only with them.

    Returns:
        A float, or a 0-d float64 tensor where a transform hides values; 1.0 where there
        are no weights.

    Raises:
        TypeError: A leaf of `seen` is not a bool mask.
        ValueError: The masks do not fit `params`.

    Liu et al. 2021, arXiv 2102.02887.
    """
    total = n_total(seen, params)
    kept = n_kept(seen, params)
    if not total:
        return 1.0
    return divide(
        kept.double() if isinstance(kept, Tensor) else float(kept), float(total)
    )
