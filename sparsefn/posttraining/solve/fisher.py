"""The inverse of a damped empirical Fisher matrix, and pruning by it."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn._engine.leaves import plain_product
from sparsefn.core.checks import check_int, number
from sparsefn.masks.select import topk_mask
from sparsefn.posttraining.solve.arguments import (
    check_finite,
    check_floating,
    check_kept,
)


def fisher_inverse(grads: Tensor, damp: float, block: int | None = None) -> Tensor:
    """WoodFisher's inverse of (damp I + G'G / N), with gradients of N examples as G.

    >>> inverse = sf.solve.fisher_inverse(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), 0.5)
    >>> inverse
    tensor([[ 0.2927, -0.2439],
            [-0.2439,  0.5366]])
    >>> torch.tensor([1.0, -1.0]).square() / (2 * inverse.diagonal())
    tensor([1.7083, 0.9318])

    Args:
        grads: Floating-point tensor (N, ...), as `sf.curvature.example_gradients` gives
            it for a leaf. An example is flattened to d numbers.
        damp: A number above 0.
        block: Side of the blocks on the diagonal outside of which the matrix is taken
            to be 0, as in the paper. Default: one block.

    Returns:
        Tensor (d, d), or with a `block` (blocks, block, block); where the last block is
        short, gradients of 0 fill it up, so that `.diagonal(dim1=1,
        dim2=2).flatten()[:d]` is the diagonal. Computed in float32 at least, and
        returned in that dtype.

    Raises:
        TypeError: Gradients are not floats, `damp` is no number, or `block` is no int.
        ValueError: There is no example, a value is not finite, `damp` is not above 0,
            or `block` is below 1.

    w^2 / (2 times the diagonal) is how much the loss rises without a weight, to second
    order; the last line of the example shows it.

    Singh & Alistarh 2020, arXiv 2004.14340, section 3.
    """
    check_floating("fisher_inverse", "grads", grads)
    if not grads.ndim or not len(grads):
        raise ValueError(
            "fisher_inverse: expected grads of at least one example, got shape "
            f"{tuple(grads.shape)}"
        )
    value = number("damp", damp)
    if isinstance(value, Tensor) or value <= 0:
        raise ValueError(
            f"fisher_inverse: expected damp to be a number > 0, got {damp}"
        )
    if block is not None:
        check_int("fisher_inverse", "block", block, 1)
    check_finite("fisher_inverse", grads=grads)
    if grads.ndim > 1:
        g = grads.detach().flatten(1)
    else:
        g = grads.detach()[:, None]
    dtype = torch.promote_types(g.dtype, torch.float32)
    g = g.to(dtype) / len(g) ** 0.5
    if block is None:
        return _inverse(g, value)
    g = torch.nn.functional.pad(g, (0, -g.shape[1] % block))
    by_block = g.reshape(len(g), -1, block).transpose(0, 1)
    return _inverse(by_block, value)


def _inverse(g: Tensor, damp: float) -> Tensor:
    # Of damp I + g'g, by the smaller of the two squares that g makes.
    n, d = g.shape[-2:]
    wide = n < d
    square = plain_product(g, g.mT) if wide else plain_product(g.mT, g)
    eye = torch.eye(min(n, d), dtype=g.dtype, device=g.device)
    lower = torch.linalg.cholesky(square + damp * eye)
    if not wide:
        return torch.cholesky_inverse(lower)
    half = torch.linalg.solve_triangular(lower, g, upper=False)
    eye = torch.eye(d, dtype=g.dtype, device=g.device)
    inverse: Tensor = (eye - plain_product(half.mT, half)) / damp
    return inverse


def obs_fisher(
    weight: Tensor,
    grads: Tensor,
    keep: int,
    *,
    mask: Tensor | None = None,
    damp: float = 1e-5,
    block: int = 2000,
) -> tuple[Tensor, Tensor]:
    """WoodFisher: prune by an inverse Fisher matrix, and change the others to make up.

    >>> grads = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    >>> sf.solve.obs_fisher(torch.tensor([1.0, -1.0]), grads, 1, damp=0.5)
    (tensor([0.5455, 0.0000]), tensor([ True, False]))

    Args:
        weight: Floating-point tensor of any shape.
        grads: Tensor with one more axis in front, of examples:
            `sf.curvature.example_gradients` gives it.
        keep: Number of weights that stay.
        mask: Bool tensor of the weight's shape. Off it, gradients do not count, and
            pruned weights of 0 go first.
        damp: As in `fisher_inverse`.
        block: Number of consecutive entries that make a block, as in `fisher_inverse`;
            blocks are no larger than the weight. Memory is block * size.

    Returns:
        The new weight, +0.0 where it is pruned, and its mask, both of the weight's
        shape. Computed in float32 at least; the result has the dtype of the weight, and
        no gradient.

    Raises:
        TypeError: As in `fisher_inverse`, or `weight` is not floats.
        ValueError: As in `fisher_inverse`; gradients or the mask have another shape, or
            the count cannot be met.

    With F the matrix of `fisher_inverse(grads, damp, block)`, the `keep` weights of the
    largest w_q^2 / (2 [F^-1]_qq) stay, the lowest index among equal ones. For each
    pruned weight the other weights of its block change by -w_q [F^-1]_q / [F^-1]_qq;
    the changes for several weights are added up, as the paper does, which leaves out
    how pruned weights make up for each other.

    Singh & Alistarh 2020, arXiv 2004.14340, sections 3 and 4.
    """
    check_floating("obs_fisher", "weight", weight)
    if isinstance(grads, Tensor) and grads.shape[1:] != weight.shape:
        shape = ", ".join(map(str, ("examples", *weight.shape)))
        raise ValueError(
            f"obs_fisher: expected grads of shape ({shape}), got {tuple(grads.shape)}"
        )
    check_int("obs_fisher", "block", block, 1)
    if mask is not None:
        grads = torch.where(check_kept("obs_fisher", mask, weight), grads, 0.0)
    size = weight.numel()
    inverse = fisher_inverse(grads, damp, min(block, max(size, 1)))
    diagonal = inverse.diagonal(dim1=1, dim2=2)
    flat = weight.detach().flatten().to(inverse.dtype)
    scores = flat.square() / (2 * diagonal.flatten()[:size])
    kept = topk_mask(scores, keep)
    lost = torch.where(kept, 0.0, flat)
    lost = torch.nn.functional.pad(lost, (0, diagonal.numel() - size))
    by_block = lost.reshape(diagonal.shape) / diagonal
    changes = plain_product(inverse, by_block[..., None])
    new = flat - changes.flatten()[:size]
    new = torch.where(kept, new, 0.0).to(weight.dtype)
    return new.reshape(weight.shape), kept.reshape(weight.shape)
