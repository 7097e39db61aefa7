"""Gradient clipping by the global norm, over the entries that masks keep."""

from __future__ import annotations

import torch

from sparsefn._engine.numbers import Real, check_float, folded, like, sqrt
from sparsefn._engine.processes import check_plain
from sparsefn._engine.sums import Pooling, pool
from sparsefn.core.checks import check_positive, number
from sparsefn.core.state import apply_masks
from sparsefn.core.tree import Tree, flatten, leaves_of, wide
from sparsefn.optim.base import scalar_like

__all__ = ["clip_norm"]
__dir__ = __all__.copy

_NORM = Pooling("norm", 2)


def clip_norm(grads: Tree, max_norm: Real, masks: Tree = None) -> Tree:
    """Gradients scaled down so that their norm over all leaves is at most `max_norm`.

    >>> grads, masks = (
    ...     {"w": torch.tensor([3.0, 100.0, 4.0])},
    ...     {"w": torch.tensor([True, False, True])},
    ... )
    >>> sf.optimizers.clip_norm(grads, 0.5, masks)
    {'w': tensor([ 0.3000, 10.0000,  0.4000])}

    Args:
        grads: Tree of floating-point tensors.
        max_norm: The largest norm: a number above 0, or a 0-d floating-point tensor,
            which may be batched.
        masks: Masks tree like `grads`. Only the entries that it keeps count in the
            norm, even if others are not finite. None counts all.

    Returns:
        Tree like `grads`. All entries are scaled by the same factor, so that entries
        off the masks, by which `rigl` grows weights, keep their order.

    Raises:
        TypeError: A gradient is not a floating-point tensor, `max_norm` no number, or a
            mask not bool.
        ValueError: A gradient is a DTensor, `max_norm` is out of range, or the masks do
            not fit.

    The factor is as in `torch.nn.utils.clip_grad_norm_`: `max_norm / (norm + 1e-6)`,
    and 1 at most. As in torch a norm of NaN makes every entry NaN, and an infinite one
    makes finite entries 0. The norm counts as a constant where derivatives are taken.

    The sum of squares is taken in one order, so that its bits do not depend on device,
    threads, layout, `vmap` or `torch.compile`; nothing waits for the device.
    Half-precision leaves are computed in float32 and rounded once.
    """
    limit = number("max_norm", max_norm)
    check_positive("max_norm", limit)
    leaves, rebuild = flatten(grads)
    if not leaves:
        return grads
    for path, leaf in leaves.items():
        check_float("grads", leaf, path)
        check_plain(
            "clip_norm", path, leaf, "; torch.nn.utils.clip_grad_norm_ clips those"
        )
    # 0-d float64: leaf by leaf in the leaf's precision, float32 at least, and of the
    # norms of leaves in float64.
    counted = leaves_of(grads if masks is None else apply_masks(grads, masks))
    own = [
        pool(g[None] if not g.ndim else g, tuple(g.shape) or (1,), _NORM).reshape(())
        for g in counted
    ]
    norms = torch.stack([x.to(own[0].device, torch.float64) for x in own])
    norm = sqrt(folded(norms * norms))
    factor = (like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)
    return rebuild(
        [(wide(g) * scalar_like(factor, wide(g))).to(g.dtype) for g in leaves.values()]
    )
