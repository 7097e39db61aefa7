"""The inverse of a damped empirical Fisher matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsefn.engine.checks import check_int, number
from sparsefn.solve.inputs import check_finite


def fisher_inverse(grads: Tensor, damp: float, block: int | None = None) -> Tensor:
    """WoodFisher's inverse of (damp I + G'G / N) for the gradients of N examples, the rows of G.

    >>> inverse = sf.solve.fisher_inverse(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), 0.5)
    >>> inverse
    tensor([[ 0.2927, -0.2439],
            [-0.2439,  0.5366]])
    >>> torch.tensor([1.0, -1.0]).square() / (2 * inverse.diagonal())
    tensor([1.7083, 0.9318])

    `grads` is (N, ...), as `sf.curvature.example_gradients` gives it for a leaf; an example is flattened to d numbers.
    The result is (d, d). With a `block` the matrix is taken to be 0 outside of blocks on its diagonal, as in the
    paper, and the result is (blocks, block, block); where the last block is short, gradients of 0 fill it up, so that
    `.diagonal(dim1=1, dim2=2).flatten()[:d]` is the diagonal. Computed in float32 at least, and returned in that dtype.

    w^2 / (2 times the diagonal) is how much the loss rises without a weight, to second order; the last line shows it.
    Raises TypeError for gradients that are not floats, ValueError for values that are not finite, and unless damp > 0.
    Singh & Alistarh 2020, arXiv 2004.14340, section 3.
    """
    if not isinstance(grads, Tensor) or not grads.is_floating_point():
        got = grads.dtype if isinstance(grads, Tensor) else type(grads).__name__
        raise TypeError(f"fisher_inverse: expected grads to be a floating-point tensor, got {got}")
    if not grads.ndim or not len(grads):
        raise ValueError(f"fisher_inverse: expected grads of at least one example, got shape {tuple(grads.shape)}")
    value = number("damp", damp)
    if isinstance(value, Tensor) or value <= 0:
        raise ValueError(f"fisher_inverse: expected damp to be a number > 0, got {damp}")
    if block is not None:
        check_int("fisher_inverse", "block", block, 1)
    check_finite("fisher_inverse", "grads", grads)
    g = grads.detach().flatten(1) if grads.ndim > 1 else grads.detach()[:, None]
    g = g.to(torch.promote_types(g.dtype, torch.float32)) / len(g) ** 0.5
    if block is None:
        return _inverse(g, value)
    g = torch.nn.functional.pad(g, (0, -g.shape[1] % block))
    return _inverse(g.reshape(len(g), -1, block).transpose(0, 1), value)


def _inverse(g: Tensor, damp: float) -> Tensor:
    # Of damp I + g'g, by the smaller of the two squares that g makes.
    (n, d), wide = g.shape[-2:], g.shape[-2] < g.shape[-1]
    square = g @ g.mT if wide else g.mT @ g
    square = square + damp * torch.eye(n if wide else d, dtype=g.dtype, device=g.device)
    lower = torch.linalg.cholesky(square)
    if not wide:
        return torch.cholesky_inverse(lower)
    half = torch.linalg.solve_triangular(lower, g, upper=False)
    inverse: Tensor = (torch.eye(d, dtype=g.dtype, device=g.device) - half.mT @ half) / damp
    return inverse
