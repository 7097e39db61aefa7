"""Values and gradients of a loss, by the fastest way that works where it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.torch_limits import differentiating
from sparsefn._engine.transforms import transformed
from sparsefn.core.tree import Tree, flatten
from sparsefn.core.tree.where import float_leaves

Differentiated = tuple[Sequence[Tensor], tuple[Tensor, Tree]]


def value_and_grad(
    loss: Callable[..., Tree], *, has_aux: bool = False
) -> Callable[..., tuple[Tree, Tree]]:
    """`f(params, ...) -> (value, gradient)` for `loss(params, ...)`.

    >>> f = sf.modules.value_and_grad(lambda params, x: (params["w"] * x).sum())
    >>> f(
    ...     {"w": torch.tensor([1.0, 2.0]), "unused": torch.ones(1)},
    ...     torch.tensor([3.0, 4.0]),
    ... )
    (tensor(11.), {'w': tensor([3., 4.]), 'unused': tensor([0.])})

    Args:
        loss: A function `loss(params, ...)` that returns a 0-d tensor.
        has_aux: Whether the loss returns `(value, aux)`, where aux is a tree of
            tensors.

    Returns:
        A function. Its gradient has the structure of params, with zeros for unused
        ones. With `has_aux` it returns `((value, aux), gradient)`. Outside `torch.func`
        results are detached from any graph, and no `.grad` is touched.

    Raises:
        TypeError: On a call, params are not floating point, or a loss with `has_aux`
            returns no pair.
        ValueError: On a call, the value of the loss is not 0-d.

    Under a transform or `torch.compile`, in inference mode and for tensors made there
    this is `torch.func.grad_and_value`, else `torch.autograd.grad`, which is faster.
    The results agree, except for last bits where torch uses another formula for a
    backward that may be differentiated again (group norm): see docs/training-step.md.
    """

    def value_and_gradient(
        params: Tree, *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, Tree]:
        leaves = list(float_leaves(params).values())
        rebuild = flatten(params)[1]

        def run(inputs: list[Tensor]) -> tuple[Tensor, Tree]:
            return _pair(loss(rebuild(inputs), *args, **kwargs), has_aux)

        differentiated = differentiating(torch.func.grad_and_value(run, has_aux=True))
        if transformed():
            grads, (value, aux) = differentiated(leaves)
        elif _inference((leaves, args, kwargs)):
            # no graph through other tensors that require a gradient
            with torch.no_grad():
                grads, (value, aux) = differentiated(leaves)
        else:
            grads, (value, aux) = _autograd(run, leaves)
        return (value, aux) if has_aux else value, rebuild(grads)

    return value_and_gradient


def _inference(tree: Tree) -> bool:
    # Autograd records nothing in inference mode, and nothing of tensors made there;
    # torch.func differentiates both.
    leaves = optree.tree_leaves(tree)
    return torch.is_inference_mode_enabled() or any(
        isinstance(x, Tensor) and x.is_inference() for x in leaves
    )


def _pair(result: Tree, has_aux: bool) -> tuple[Tensor, Tree]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"expected the loss to return (value, aux), got {type(result).__name__}"
        )
    value, aux = result if has_aux else (result, ())
    return checked_value(value), aux


def checked_value(value: object) -> Tensor:
    """The value of a loss. Raises ValueError for another than a 0-d tensor.

    >>> checked_value(torch.ones(()))
    tensor(1.)
    """
    if not isinstance(value, Tensor) or value.ndim:
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = f"shape {tuple(value.shape)}"
        raise ValueError(f"expected the loss to be a 0-d tensor, got {got}")
    return value


def _autograd(
    run: Callable[[list[Tensor]], tuple[Tensor, Tree]], leaves: list[Tensor]
) -> Differentiated:
    with torch.enable_grad():
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        value, aux = run(inputs)
    if value.requires_grad and inputs:
        grads: Sequence[Tensor] = torch.autograd.grad(
            value, inputs, materialize_grads=True
        )
    else:  # a loss that uses no param
        grads = [torch.zeros_like(leaf) for leaf in leaves]
    return grads, (
        value.detach(),
        optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux),
    )
