"""The best weights under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.leaves import check_device, hidden, one_by_one, plain_product
from sparsefn._engine.processes import check_alike, check_plain, gathered, own
from sparsefn.core.tree import check_not_meta
from sparsefn.posttraining.solve.arguments import (
    check_damp,
    check_finite,
    check_floating,
    check_kept,
    damp_in_place,
    factor_in_place,
    in_one_dtype,
)


def refit(
    weight: Tensor,
    hessian: Tensor,
    mask: Tensor,
    *,
    damp: float = 0.0,
    missing: Tensor | None = None,
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
            Without it, the hessian needs more tokens than a row has kept columns.
        missing: Floating-point tensor (out, in), for outputs that should become y + m:
            the sum of m'x over tokens, where x are the inputs (tokens, in) and m is
            (tokens, out). Where later layers were removed, m is what they added, and
            this layer takes it over. Default: m is 0.

    Returns:
        The best of all weights that are 0 off the mask, with +0.0 there. Computed in
        the wider dtype of the two, float32 at least; the result has the dtype of the
        weight, and no gradient.

    Raises:
        ValueError: Shapes do not fit, values are not finite, or the hessian is all
            zeros or singular on the kept columns of a row, where these are solved for.
        TypeError: A dtype is not floating-point.

    For a row w that keeps the columns S the result is w_S + H_SS^-1 (H_SP w_P + m_S),
    where P are the pruned columns and m is the row of `missing`. Nothing that `obs`
    makes of that mask has a smaller error, nor has plain masking. A row that keeps
    everything and lacks nothing stays as it is. Inputs that were always 0 have weights
    of 0.

    ReplaceMe (Shopkhoev et al. 2025, arXiv 2505.02819) puts a linear map of the outputs
    y of a layer in the place of the transformer blocks that followed it. With a sum m'y
    for `missing` the map is `refit(eye, y'y, eye == eye, missing=m'y)`, and the layer's
    weight becomes `map @ weight`. With inputs x in place of y the layer's own weight is
    solved for; its error is never larger.

    Rows with one mask are solved together, so that a mask that many rows share is
    cheap; rows that all differ cost a Cholesky factor of their kept columns each. Under
    `vmap` the members are solved one after another; in compiled code it is one opaque
    operator. Both give the same bits.
    """
    w, h = in_one_dtype("refit", weight, hessian)
    check_not_meta("refit", [("weight", w)])
    kept = check_kept("refit", mask, weight)
    share = check_damp("refit", damp)
    lack = None if missing is None else check_missing(missing, weight).to(w.dtype)
    tensors = [x for x in (w, h, kept, lack) if x is not None]
    check_alike("refit", *tensors, damp)
    solve = _refitted if hidden(*tensors) else solved
    return solve(w, h, kept, share, lack).to(weight.dtype)


def check_missing(missing: Tensor, weight: Tensor) -> Tensor:
    """The tensor without its gradient, if it is as `refit` takes it.

    >>> check_missing(torch.ones(2), torch.ones(2, 3))
    Traceback (most recent call last):
        ...
    ValueError: refit: expected missing of the weight's shape (2, 3), got (2,)
    """
    check_floating("refit", "missing", missing)
    check_plain("refit", "missing", missing)
    if missing.shape != weight.shape:
        raise ValueError(
            f"refit: expected missing of the weight's shape {tuple(weight.shape)}, got "
            f"{tuple(missing.shape)}"
        )
    check_device("weight and missing", weight.device, missing)
    return missing.detach()


def solved(
    w: Tensor, h: Tensor, kept: Tensor, share: float, missing: Tensor | None = None
) -> Tensor:
    """`refit` of arguments that were checked, with values that are known.

    >>> solved(
    ...     torch.tensor([[1.0, 2.0]]), torch.eye(2), torch.tensor([[False, True]]), 0.0
    ... )
    tensor([[0., 2.]])
    """
    check_finite("refit", weight=w, hessian=h)  # hidden until now by a transform
    if missing is not None:
        check_finite("refit", missing=missing)
    h = h.clone()
    dead = damp_in_place("refit", h, share)
    old = w.masked_fill(dead, 0.0)
    new = old.masked_fill(~kept, 0.0)
    # what the kept weights of a row have to make up for
    pull = plain_product(old - new, h)
    if missing is not None:
        pull += missing.masked_fill(dead, 0.0)
    masks, mask_of_row = torch.unique(kept, dim=0, return_inverse=True)
    share_of_masks = own(len(masks))  # of this process
    for i in share_of_masks:
        at = masks[i].nonzero()[:, 0]
        rows = (mask_of_row == i).nonzero()[:, 0]
        is_solved = len(at) == w.shape[1] and missing is None
        if len(at) and not is_solved:
            lower = factor_in_place(
                f"refit, row {int(rows[0])}", h[at[:, None], at], share
            )
            new[rows[:, None], at] += torch.cholesky_solve(
                pull[rows[:, None], at].T, lower
            ).T
    solved_here = (
        (mask_of_row >= share_of_masks.start) & (mask_of_row < share_of_masks.stop)
    ).nonzero()[:, 0]
    places, rows = gathered(solved_here, new[solved_here])
    return new.index_copy(0, places, rows)


_refitted = torch.library.custom_op("sparsefn::refit", solved, mutates_args=())
_refitted.register_fake(
    lambda w, *_: torch.empty_like(w, memory_format=torch.contiguous_format)
)
one_by_one(_refitted)
