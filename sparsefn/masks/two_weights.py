"""A linear layer with one weight forwards and another one backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["linear_pair"]
__dir__ = __all__.copy


def linear_pair(
    x: Tensor, w_forward: Tensor, w_backward: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x @ w_forward.T + bias, whose gradient in x is taken with `w_backward`.

    >>> x, dense = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    >>> fewer, other = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    >>> sf.masks.linear_pair(x, fewer, other)
    tensor([[3.]])
    >>> torch.func.grad(lambda x, w: sf.masks.linear_pair(x, w, other).sum(), (0, 1))(
    ...     x, fewer
    ... )
    (tensor([[0., 4.]]), tensor([[1., 2.]]))

    Args:
        x: Tensor of shape (..., inputs).
        w_forward: Tensor of shape (outputs, inputs) for the forward product. With dy
            the gradient of the result, its gradient is dy.T @ x on all entries.
        w_backward: Tensor of the same shape for the backward pass: the gradient of `x`
            is dy @ w_backward. It has no gradient of its own.
        bias: Tensor of shape (outputs,), or None.

    Returns:
        Tensor of shape (..., outputs), as from `torch.nn.functional.linear`.

    Raises:
        ValueError: The weights have different shapes, or are not 2-D.

    A weight that is masked N:M along its inputs for the forward product, and along its
    outputs for the product of the backward pass, trains with both products sparse:
    `w_forward` is then `sf.masks.straight_through(masked, weight)`.

    Right under grad, vmap and compile. In compiled code it costs one more product:
    torch compiles the gradient of a custom function as if it had none of its own.

    Bi-Mask: Zhang et al. 2023, arXiv 2302.06058; BDWP: Fang et al. 2023,
    arXiv 2309.13015; SLoPe: Mozaffari et al. 2024, arXiv 2405.16325.
    """
    if w_forward.shape != w_backward.shape or w_forward.ndim != 2:
        raise ValueError(
            "linear_pair: expected two weights of one shape (outputs, inputs), got "
            f"{tuple(w_forward.shape)} and {tuple(w_backward.shape)}"
        )
    if torch.compiler.is_compiling():
        back = linear(x, w_backward.detach())
        return linear(x.detach(), w_forward, bias) + (back - back.detach())
    y: Tensor = _LinearPair.apply(x, w_forward, w_backward, bias)
    return y


class _LinearPair(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w_forward: Tensor, w_backward: Tensor, bias: Tensor | None
    ) -> Tensor:
        return linear(x, w_forward, bias)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        x, _, w_backward, bias = inputs
        ctx.save_for_backward(x, w_backward)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        x, w_backward = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        return (
            dy @ w_backward,
            rows.T @ inputs,
            None,
            rows.sum(0) if ctx.biased else None,
        )
