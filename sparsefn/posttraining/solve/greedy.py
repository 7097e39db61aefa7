"""Exact OBS: one weight after the other, the weight that the rest make up for best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine.leaves import hidden, one_by_one
from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn._engine.selection import Entry, winners
from sparsefn.core.checks import check_int
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.select import topk_mask
from sparsefn.posttraining.solve.arguments import (
    check_damp,
    check_finite,
    damp_in_place,
    factor_in_place,
    groups_in_rows,
    in_one_dtype,
)
from sparsefn.posttraining.solve.least_squares import solved

AT_ONCE = 2**23  # entries of the inverses that are held at one time


def obs_exact(
    weight: Tensor,
    hessian: Tensor,
    n_prune: int | Sequence[int] | None = None,
    pattern: Pattern | None = None,
    *,
    damp: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Optimal brain surgeon, exactly: prune one weight at a time, change the others.

    >>> weight, hessian = (
    ...     torch.tensor([[1.0, 2.0], [0.5, 0.1]]),
    ...     torch.tensor([[2.0, 1.0], [1.0, 2.0]]),
    ... )
    >>> sf.solve.obs_exact(weight, hessian, 2)
    (tensor([[1., 2.],
            [0., 0.]]), tensor([[ True,  True],
            [False, False]]))
    >>> sf.solve.obs_exact(weight, hessian, 1, sf.patterns.row_balanced())
    (tensor([[0.0000, 2.5000],
            [0.5500, 0.0000]]), tensor([[False,  True],
            [ True, False]]))

    Args:
        weight: Floating-point tensor (out, in).
        hessian: Symmetric tensor (in, in), as in `obs`.
        n_prune: Number of weights that go, over all rows: the row whose next weight
            costs least is next. Or a sequence with a count for each row; or with a
            pattern the number that each group loses. `nm` says it, so leave it out.
        pattern: A pattern whose groups lie inside rows, `row_balanced()` or `nm(n, m)`.
        damp: Share of the mean of the hessian's diagonal that is added to the diagonal.

    Returns:
        The new weight in its dtype, +0.0 where it is pruned, and its mask. Computed in
        the wider dtype of the two, float32 at least.

    Raises:
        ValueError: Shapes do not fit, values are not finite, the hessian is singular at
            this `damp` or all zeros, counts cannot be met, or groups do not lie inside
            rows.
        TypeError: A dtype is not floating-point, or a count is not an int.

    Each row prunes the weight of least w^2 / [H^-1]_qq over the columns that it has
    left, the lowest index among equal ones, and the row's other weights make up for it.
    The new weights are as `refit` gives them, which the changes add up to.

    A row takes time of in^2 for each weight that it loses and as much memory, so this
    is for small layers; `obs` is the fast approximation. Under `vmap` members are
    pruned one by one, and compiled code calls this; both give the same bits.

    Frantar, Singh & Alistarh 2022, arXiv 2208.11580, algorithm 1.
    """
    w, h = in_one_dtype("obs_exact", weight, hessian)
    rows, columns = w.shape
    counts: list[int] = []
    if isinstance(n_prune, Sequence):
        counts = _of_rows(list(n_prune), pattern, rows, columns)
        width = 0
        count = max(counts, default=0)
    else:
        width, count = _groups(w, n_prune, pattern)
    share = check_damp("obs_exact", damp)
    check_alike("obs_exact", w, h, n_prune, pattern, damp)
    prune = _pruned if hidden(w, h) else pruned
    new, kept = prune(w, h, counts, width, count, share)
    return new.to(weight.dtype), kept


def pruned(
    w: Tensor,
    h: Tensor,
    counts: Sequence[int],
    width: int,
    count: int,
    damp: float,
) -> tuple[Tensor, Tensor]:
    """`obs_exact` of arguments that were checked: `count` of each group of `width`
    columns go, 0 for all of the weight.

    >>> pruned(torch.tensor([[1.0, 2.0]]), torch.eye(2), [], 0, 1, 0.0)
    (tensor([[0., 2.]]), tensor([[False,  True]]))
    """
    check_finite("obs_exact", weight=w, hessian=h)  # hidden until now by a transform
    rows, columns = w.shape
    hessian = h
    h = h.clone()
    dead = damp_in_place("obs_exact", h, damp)
    inverse = torch.cholesky_inverse(factor_in_place("obs_exact", h, damp))
    if width:
        steps = count * (columns // width)
    else:
        steps = min(count, columns)
    groups = (width, count) if width else (columns, columns)
    chunks = max(1, -(-rows * columns**2 // AT_ONCE))
    parts = w.masked_fill(dead, 0.0).chunk(chunks)
    mine = [parts[i] for i in own(len(parts))] or [w[:0]]
    orders = []
    costs = []
    for part in mine:
        order, losses = _trace(part, inverse, steps, *groups)
        orders.append(order)
        costs.append(losses)
    order, losses = gathered(torch.cat(orders), torch.cat(costs))
    gone = torch.ones_like(order, dtype=torch.bool)
    if counts:
        of_rows = torch.tensor(counts, device=w.device)
        gone = torch.arange(steps, device=w.device) < of_rows[:, None]
    elif not width and order.numel():
        # A weight cannot go before the first ones of its row: it costs as much as the
        # dearest of them.
        dearest = losses.cummax(1).values
        gone = topk_mask(-dearest, count)
    kept = ~torch.zeros_like(w, dtype=torch.bool).scatter(1, order, gone)
    return solved(w, hessian, kept, damp), kept


def _like_pruned(w: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    new = torch.empty_like(w, memory_format=torch.contiguous_format)
    return new, torch.empty_like(new, dtype=torch.bool)


_pruned = torch.library.custom_op("sparsefn::obs_exact", pruned, mutates_args=())
_pruned.register_fake(_like_pruned)
one_by_one(_pruned)


def _of_rows(
    counts: list[int],
    pattern: Pattern | None,
    rows: int,
    columns: int,
) -> list[int]:
    # A count for each row, checked.
    if pattern is not None:
        raise ValueError(
            f"obs_exact: expected one n_prune for the groups of {pattern}, got a "
            "count for each row"
        )
    if len(counts) != rows:
        raise ValueError(
            f"obs_exact: expected n_prune for each of {rows} rows, got {len(counts)}"
        )
    for i, count in enumerate(counts):
        check_int("obs_exact", f"n_prune of row {i}", count, 0)
        if count > columns:
            raise ValueError(
                f"obs_exact: expected n_prune of row {i} <= {columns}, got {count}"
            )
    return counts


def _groups(w: Tensor, n_prune: int | None, pattern: Pattern | None) -> tuple[int, int]:
    # The width of a group, 0 for all of the weight, and how many weights each group
    # loses.
    width = 0
    fixed = None
    if pattern is not None and pattern != unstructured():
        width, fixed = groups_in_rows("obs_exact", pattern, w)
    size = width or w.numel()
    if fixed is not None:
        if n_prune not in (None, size - fixed):
            raise ValueError(
                f"obs_exact: {pattern} prunes {size - fixed} of a group, got "
                f"n_prune={n_prune}"
            )
        n_prune = size - fixed
    check_int("obs_exact", "n_prune", n_prune, 0)
    assert n_prune is not None
    if n_prune > size:
        what = "a group" if width else "the weight"
        raise ValueError(
            f"obs_exact: expected n_prune <= {size}, the size of {what}, got {n_prune}"
        )
    return width, n_prune


def _trace(
    w: Tensor, inverse: Tensor, steps: int, width: int, count: int
) -> tuple[Tensor, Tensor]:
    # The columns that each row loses in their order, and what each adds to the error:
    # (rows, steps).
    rows, columns = w.shape
    # of each row, the inverse over the columns that are left
    left = inverse.repeat(rows, 1, 1)
    gone = torch.zeros_like(w, dtype=torch.bool)
    order = torch.zeros_like(w[:, :steps], dtype=torch.int64)
    losses = torch.zeros_like(w[:, :steps])
    for step in range(steps):
        in_groups = gone.reshape(rows, columns // width, width)
        full = in_groups.sum(-1, keepdim=True) >= count
        closed = gone | full.expand(-1, -1, width).flatten(1)
        loss = w.square() / left.diagonal(dim1=1, dim2=2)
        (best,) = winners([Entry(-loss, None, closed)], [1])
        at = best.to(torch.int64).argmax(1, keepdim=True)
        own_rows = at[:, :, None].expand(-1, 1, columns)
        row = left.gather(1, own_rows)[:, 0]
        value = w.gather(1, at)
        pivot = row.gather(1, at)
        order[:, step : step + 1] = at
        losses[:, step : step + 1] = value.square() / pivot
        gone = gone | best
        w = (w - row * (value / pivot)).masked_fill(gone, 0.0)
        scaled = row / pivot
        left.baddbmm_(scaled[:, :, None], row[:, None, :], alpha=-1)
    return order, losses
