"""The best weights under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.leaves import hidden, one_by_one
from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn.posttraining.solve.arguments import (
    check_damp,
    check_finite,
    check_kept,
    damp_in_place,
    factor_in_place,
    in_one_dtype,
)


def refit(
    weight: Tensor, hessian: Tensor, mask: Tensor, *, damp: float = 0.0
) -> Tensor:
    """Least squares on a mask: the weights that change the layer's outputs least.

    >>> weight, hessian = (
    ...     torch.tensor([[1.0, 2.0]]),
    ...     torch.tensor([[2.0, 1.0], [1.0, 2.0]]),
    ... )
    >>> sf.solve.refit(weight, hessian, torch.tensor([[False, True]]))
    tensor([[0.0000, 2.5000]])

    Args:
        weight: Floating-point tensor (out, in).
        hessian: Symmetric tensor (in, in), as in `obs`.
        mask: Bool tensor (out, in) of the weights to keep.
        damp: Share of the mean of the hessian's diagonal that is added to the diagonal.
            Without it, more inputs than kept columns are needed.

    Returns:
        The best of all weights that are 0 off the mask, with +0.0 there. Computed in
        the wider dtype of the two, float32 at least; the result has the dtype of the
        weight, and no gradient.

    Raises:
        ValueError: Shapes do not fit, values are not finite, or the hessian is all
            zeros or singular on the kept columns of a row.
        TypeError: A dtype is not floating-point.

    For a row w that keeps the columns S the result is w_S + H_SS^-1 H_SP w_P, where P
    are the pruned columns. Nothing that `obs` makes of that mask has a smaller error,
    nor has plain masking. A row that keeps everything stays as it is. Inputs that were
    always 0 have weights of 0.

    Rows with one mask are solved together, so that a mask that many rows share is
    cheap; rows that all differ cost a Cholesky factor of their kept columns each. Under
    `vmap` the members are solved one after another; compiled code calls it. Both give
    the same bits.
    """
    w, h = in_one_dtype("refit", weight, hessian)
    kept = check_kept("refit", mask, weight)
    share = check_damp("refit", damp)
    check_alike("refit", w, h, kept, damp)
    solve = _refitted if hidden(w, h, kept) else solved
    return solve(w, h, kept, share).to(weight.dtype)


def solved(w: Tensor, h: Tensor, kept: Tensor, share: float) -> Tensor:
    """`refit` of arguments that were checked, with values that are known.

    >>> solved(
    ...     torch.tensor([[1.0, 2.0]]), torch.eye(2), torch.tensor([[False, True]]), 0.0
    ... )
    tensor([[0., 2.]])
    """
    check_finite("refit", weight=w, hessian=h)  # hidden until now by a transform
    h = h.clone()
    dead = damp_in_place("refit", h, share)
    old = w.masked_fill(dead, 0.0)
    new = old.masked_fill(~kept, 0.0)
    pull = (old - new) @ h  # what the kept weights of a row have to make up for
    masks, which = torch.unique(kept, dim=0, return_inverse=True)
    mine = own(len(masks))
    for i in mine:
        at = masks[i].nonzero()[:, 0]
        rows = (which == i).nonzero()[:, 0]
        if 0 < len(at) < w.shape[1]:
            lower = factor_in_place(
                f"refit, row {int(rows[0])}", h[at[:, None], at], share
            )
            new[rows[:, None], at] += torch.cholesky_solve(
                pull[rows[:, None], at].T, lower
            ).T
    solved_here = ((which >= mine.start) & (which < mine.stop)).nonzero()[:, 0]
    places, rows = gathered(solved_here, new[solved_here])
    return new.index_copy(0, places, rows)


_refitted = torch.library.custom_op("sparsefn::refit", solved, mutates_args=())
_refitted.register_fake(
    lambda w, *_: torch.empty_like(w, memory_format=torch.contiguous_format)
)
one_by_one(_refitted)
