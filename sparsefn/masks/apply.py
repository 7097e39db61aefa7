"""Apply a mask made from scores to a tensor, with a choice of gradients."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparsefn._engine.selection import Count
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.masks.select import straight_through, topk_mask

__all__ = ["gate", "sparsify"]
__dir__ = __all__.copy

Mode = Literal["supermask", "joint", "ste"]


def check_mode(mode: str) -> None:
    """Raise ValueError unless it is one of the three modes.

    >>> check_mode("STE")
    Traceback (most recent call last):
        ...
    ValueError: expected mode to be 'supermask', 'joint' or 'ste', got 'STE'
    """
    if mode not in ("supermask", "joint", "ste"):
        raise ValueError(
            f"expected mode to be 'supermask', 'joint' or 'ste', got {mode!r}"
        )


def gate(
    x: Tensor,
    scores: Tensor,
    mask: Tensor,
    *,
    mode: Mode = "ste",
    mask_gradient: bool = False,
) -> Tensor:
    """`x` where the mask keeps it and +0.0 elsewhere, with a gradient for the scores.

    >>> x, s, mask = (
    ...     torch.tensor([2.0, 3.0]),
    ...     torch.tensor([0.1, 0.9]),
    ...     torch.tensor([False, True]),
    ... )
    >>> sf.masks.gate(x, s, mask)
    tensor([0., 3.])
    >>> torch.func.grad(lambda s: sf.masks.gate(x, s, mask, mode="supermask").sum())(s)
    tensor([2., 3.])

    Args:
        x: Tensor of weights or activations.
        scores: Tensor of the shape of `x`: the scores that made the mask.
        mask: Bool tensor of the shape of `x`. `sparsify` takes the best scores,
            `bernoulli_mask` draws.
        mode: What has a gradient, with dy the gradient of the result. "ste" gives `x`
            dy on the mask and the scores none; "supermask" gives the scores dy * x and
            `x` none; "joint" gives both.
        mask_gradient: Whether the scores have a gradient on the mask only.

    Returns:
        Tensor like `x`, +0.0 off the mask.

    Raises:
        TypeError: The mask is not bool.
        ValueError: `mode` is unknown, or shapes differ.

    Where `x` or a score is not finite, the gradient of that score is zero. Correct
    under grad, jvp, vmap and compile (see `straight_through`).
    """
    check_mode(mode)
    if mask.dtype != torch.bool:
        raise TypeError(f"expected a bool mask, got {mask.dtype}")
    for name, other in (("scores", scores), ("mask", mask)):
        if other.shape != x.shape:
            raise ValueError(
                f"expected {name} of shape {tuple(x.shape)}, got {tuple(other.shape)}"
            )
    kept = torch.where(mask, x.detach() if mode == "supermask" else x, 0.0)
    if mode == "ste":
        return kept
    # Zero in value, and x its slope in the scores: `straight_through` of a hard 0.
    if mask_gradient:
        reaches = torch.isfinite(x) & mask
    else:
        reaches = torch.isfinite(x)
    slope = torch.where(reaches, x.detach(), 0.0)
    soft = torch.where(torch.isfinite(scores), scores, 0.0)
    return kept + slope * straight_through(torch.zeros_like(soft), soft).to(x.dtype)


def sparsify(
    x: Tensor,
    scores: Tensor,
    n_keep: Count | None,
    *,
    pattern: Pattern = unstructured(),
    mode: Mode = "ste",
    mask_gradient: bool = False,
) -> Tensor:
    """Keep the entries of `x` with the best scores, inside any loss.

    >>> h = torch.tensor([[0.5, -2.0, 1.0, 0.1]])
    >>> sf.masks.sparsify(h, h.abs(), 2)
    tensor([[ 0., -2.,  1.,  0.]])
    >>> torch.func.grad(lambda h: sf.masks.sparsify(h, h.abs(), 2).sum())(h)
    tensor([[0., 1., 1., 0.]])

    Args:
        x: Tensor of weights or activations.
        scores: Floating-point tensor of the shape of `x`. Scores that depend on `x`
            pass their gradient on to it, except in mode "ste".
        n_keep: As in `topk_mask`, which makes the mask.
        pattern: As in `topk_mask`.
        mode: As in `gate`, which applies the mask.
        mask_gradient: As in `gate`.

    Returns:
        Tensor like `x`, +0.0 off the mask.

    Raises:
        TypeError: As in `topk_mask`.
        ValueError: As in `topk_mask` and `gate`.
    """
    return gate(
        x,
        scores,
        topk_mask(scores, n_keep, pattern=pattern),
        mode=mode,
        mask_gradient=mask_gradient,
    )
