"""Derivatives of a loss: per-example gradients and Hessian-vector products.

The loss is the training loop's, `loss(params, *batch) -> 0-d`; `batch` is the tuple of
its arguments after params.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.torch_limits import differentiating
from sparsefn.core.state import State, Step, effective
from sparsefn.core.tree import Tree, check_like, flatten, leaves_like
from sparsefn.core.tree.where import float_leaves
from sparsefn.nn.modules.gradients import checked_value

Loss = Callable[..., Tensor]
Batch = Sequence[Tree] | Callable[[Step], Sequence[Tree]]


def example_gradients(loss: Loss, params: Tree, batch: Sequence[Tree]) -> Tree:
    """Per-example gradients of a batch: each leaf has a leading axis of examples.

    >>> def loss(params, x, y):
    ...     return (x @ params["w"] - y).square().mean() / 2
    >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 1.0])
    >>> sf.curvature.example_gradients(loss, {"w": torch.tensor([2.0, 1.0])}, (x, y))
    {'w': tensor([[1., 0.],
            [3., 6.]])}

    Args:
        loss: A function `loss(params, *batch)` that returns a 0-d tensor. It is called
            with batches of one, so it may be the mean or the sum over examples.
        params: A tree of floating-point tensors.
        batch: Tuple of the loss's arguments after params. All of its leaves have the
            same leading axis.

    Returns:
        A tree like params.

    Raises:
        TypeError: Params are not floating-point tensors, or `batch` is no tuple of
            tensors.
        ValueError: The value of the loss is not 0-d, leaves of the batch have no
            example or not equally many, or the loss fails on a batch that is not on the
            device of params.
        RuntimeError: The loss draws random numbers, as gradients are computed as
            `vmap(grad)`.

    BatchNorm must be in eval mode: with batch statistics a single example has no
    gradient.
    """
    leaves, rebuild = unpacked(params)
    batch_size(batch)
    data, as_batch = flatten(tuple(batch))

    def of_one(example: list[Tensor]) -> tuple[Tensor, ...]:
        one = as_batch([x.unsqueeze(0) for x in example])
        return gradient_of(lambda weights: _called(loss, rebuild(weights), one))(leaves)

    # its `randomness` is "error"
    return rebuild(torch.vmap(of_one)(list(data.values())))


@differentiating
def hessian_vector(
    loss: Loss, params: Tree, vector: Tree, batch: Sequence[Tree]
) -> Tree:
    """Hessian-vector product of a loss: a tree like params.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> def loss(params):
    ...     return params["w"] @ matrix @ params["w"] / 2
    >>> sf.curvature.hessian_vector(
    ...     loss, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, -2.0])}, ()
    ... )
    {'w': tensor([ 0., -5.])}

    Args:
        loss: A function `loss(params, *batch)` that returns a 0-d tensor.
        params: A tree of floating-point tensors.
        vector: A tree with the structure, shapes and dtypes of params.
        batch: Tuple of the loss's arguments after params.

    Returns:
        A tree like params. Differentiable, and works under `vmap`. Map over vectors for
        several products.

    Raises:
        TypeError: Params are not floating-point tensors, `vector` has another dtype, or
            `batch` is no tuple.
        ValueError: `vector` has another structure or shape, the value of the loss is
            not 0-d, or the loss fails on a batch that is not on the device of params.

    Computed as `jvp` of `grad`, for about the cost of three gradients; the Hessian is
    never formed. Fused attention kernels have no second derivatives in torch: compute
    attention under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
    """
    check_like("vector", vector, params)
    leaves, rebuild = unpacked(params)
    checked_batch(batch)
    gradient = gradient_of(lambda weights: _called(loss, rebuild(weights), batch))
    if not leaves:
        return vector
    return rebuild(
        torch.func.jvp(gradient, (leaves,), (tuple(leaves_like(vector, params)),))[1]
    )


def unpacked(
    params: Tree,
) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tree]], Tree]]:
    """The leaves of params as a flat tuple, and the function that rebuilds the tree.

    >>> unpacked({"b": torch.ones(1), "a": torch.zeros(1)})[0]
    (tensor([0.]), tensor([1.]))
    """
    # torch.func is given flat tuples only: it orders dicts differently from optree.
    return tuple(float_leaves(params).values()), flatten(params)[1]


def sparsified(
    state: State, loss: Loss, params: Tree | None = None
) -> tuple[dict[str, Tensor], Loss, Callable[[Tree], Tree]]:
    """The sparsified leaves by path, a loss as a function of them, and the function
    that makes scores of values.

    >>> masks = {"w": torch.tensor([True]), "b": torch.tensor(True)}
    >>> state = sf.State({"w": torch.ones(1), "b": torch.zeros(1)}, masks)
    >>> weights, of_weights, scored = sparsified(
    ...     state, lambda params, x: params["w"] * x + params["b"]
    ... )
    >>> weights, of_weights(weights, 3.0), scored({"w": torch.full((1,), 5.0)})
    ({'w': tensor([1.])}, tensor([3.]), {'w': tensor([5.]), 'b': tensor([0.])})

    The other leaves are taken from `params` (the effective weights) for the loss, and 0
    among the scores.
    """
    if params is None:
        params = effective(state)
    leaves = float_leaves(params)
    rebuild = flatten(params)[1]
    masks = leaves_like(state.masks, params)
    chosen = {
        path: leaf
        for (path, leaf), m in zip(leaves.items(), masks, strict=True)
        if is_sparse(m, leaf)
    }

    def of_weights(weights: Tree, *batch: Tree) -> Tensor:
        tree = rebuild([weights.get(path, leaf) for path, leaf in leaves.items()])
        return _called(loss, tree, batch)

    def scored(found: Tree) -> Tree:
        return rebuild(
            [
                found[path].detach() if path in found else torch.zeros_like(x)
                for path, x in leaves.items()
            ]
        )

    return chosen, of_weights, scored


def _called(loss: Loss, params: Tree, batch: Sequence[Tree]) -> Tensor:
    # A loss may move its arguments itself, so devices are compared where it fails.
    try:
        return loss(params, *batch)
    except RuntimeError as error:
        _check_devices(params, batch, error)
        raise


def _check_devices(params: Tree, batch: Sequence[Tree], error: RuntimeError) -> None:
    devices = {leaf.device for leaf in flatten(params)[0].values()}
    for path, x in flatten(tuple(batch))[0].items():
        # a number on the CPU is an argument of operations on any device
        known = not isinstance(x, Tensor) or not x.ndim or x.device in devices
        if known or len(devices) != 1:
            continue
        (device,) = devices
        raise ValueError(
            f"expected the batch of a loss on {device}, where params are, got "
            f"{path!r} of the batch on {x.device}; move it: x.to({str(device)!r})"
        ) from error


def gradient_at(loss: Loss, params: Tree, batch: Sequence[Tree]) -> Tree:
    """The gradient of a loss: a tree like params.

    >>> gradient_at(
    ...     lambda params: params["w"].square().sum(),
    ...     {"w": torch.tensor([1.0, 2.0])},
    ...     (),
    ... )
    {'w': tensor([2., 4.])}
    """
    leaves, rebuild = unpacked(params)
    return rebuild(gradient_of(lambda weights: loss(rebuild(weights), *batch))(leaves))


def gradient_and_value_at(loss: Loss, params: Tree) -> tuple[Tree, Tensor]:
    """The gradient of a loss, a tree like params, and its value.

    >>> gradient_and_value_at(
    ...     lambda params: params["w"].square().sum(), {"w": torch.tensor([1.0, 2.0])}
    ... )
    ({'w': tensor([2., 4.])}, tensor(5.))
    """
    leaves, rebuild = unpacked(params)
    both = differentiating(
        torch.func.grad_and_value(lambda weights: checked_value(loss(rebuild(weights))))
    )
    grads, value = both(leaves)
    return rebuild(grads), value


def gradient_of(
    value: Callable[[Sequence[Tensor]], Tensor],
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """The gradient of a function from a flat tuple to a 0-d tensor.

    >>> gradient_of(lambda xs: xs[0].square().sum())((torch.tensor([1.0, 2.0]),))
    (tensor([2., 4.]),)
    """
    return differentiating(torch.func.grad(lambda leaves: checked_value(value(leaves))))


def check_loss(loss: object, batch: object) -> None:
    """Raise TypeError for a loss that is not a function, and for a batch that is
    neither a tuple nor a function.

    >>> check_loss(lambda params, x: x.sum(), torch.ones(2))
    Traceback (most recent call last):
        ...
    TypeError: expected batch to be a tuple of the loss's arguments after params, got
    Tensor; for one write (x,)
    """
    if not callable(loss):
        raise TypeError(
            "expected loss to be a function (params, *batch) -> 0-d tensor, got "
            f"{type(loss).__name__}"
        )
    if not callable(batch):
        checked_batch(batch)


def checked_batch(batch: object, what: str = "batch to be") -> Sequence[Tree]:
    """The batch itself, checked to be a tuple or list of arguments.

    >>> checked_batch((1, 2))
    (1, 2)
    """
    if not isinstance(batch, tuple | list):
        got = f"got {type(batch).__name__}; for one write (x,)"
        raise TypeError(
            f"expected {what} a tuple of the loss's arguments after params, {got}"
        )
    return batch


def arguments_at(batch: Batch, step: Step) -> Sequence[Tree]:
    """The batch at a step: `batch(step)` where it is a function, else the batch itself.

    >>> arguments_at(lambda step: (step + 1,), 2)
    (3,)
    """
    if callable(batch):
        return checked_batch(batch(step), "the function batch to give")
    return checked_batch(batch)


def batch_size(batch: Sequence[Tree]) -> int:
    """The number of examples: the size of the leading axis of every leaf.

    >>> batch_size((torch.ones(5, 2), {"y": torch.ones(5)}))
    5
    """
    size = 0
    first = ""
    for path, leaf in flatten(tuple(checked_batch(batch)))[0].items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"expected a batch of tensors, got {type(leaf).__name__} at {path!r}"
            )
        if not leaf.ndim:
            raise ValueError(
                "expected a leading axis of examples in the batch, got a 0-d tensor "
                f"at {path!r}"
            )
        if first and leaf.shape[0] != size:
            raise ValueError(
                f"expected equally many examples, got {size} at {first!r} and "
                f"{leaf.shape[0]} at {path!r}"
            )
        size = leaf.shape[0]
        first = first or path
    if not size:
        raise ValueError("expected a batch of at least one example, got none")
    return size
