"""The type of an optimizer, and what SGD and Adam share: rates, counts and checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn.engine.checks import number
from sparsefn.engine.described import uncalled
from sparsefn.engine.numbers import like
from sparsefn.engine.records import forgetting
from sparsefn.state import Level
from sparsefn.tree import Tree, check_like, leaves_of


@forgetting("under_masks", "update")
class Optimizer(NamedTuple):
    """A pure pair of functions in the shape of TorchOpt's and optax's.

    >>> optimizer = sf.optimizers.sgd(0.5)
    >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.4])}
    >>> updates, state = optimizer.update(grads, optimizer.init(params), params=params)
    >>> optree.tree_map(torch.add, params, updates)
    {'w': tensor([0.8000])}

    `init(params) -> state`; `update(grads, state, *, params=None, inplace=False) -> (updates, state)`
    where the updates are to be added to the params. `params` is needed for weight decay. A state
    holds tensors only and goes through `vmap` (use `vmap(init)` for stacked params),
    `torch.compile` and checkpoints; the updates are differentiable.

    `under_masks(grads, state, params, masks) -> (params, state)` is optional: the whole step under masks in one pass,
    which `with_optimizer` then takes. It has the bits of `update` on gradients that are +0.0 off the masks, with the
    updates added only on the masks; or it gives None where there is no faster way. It is for optimizers that step each
    entry by itself: in compiled code `with_optimizer` makes their updates from whole gradients. `_replace(update=...)`
    clears it, as it is a way of the old update.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    under_masks: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree] | None] | None = None


def start_count(params: Tree) -> Tensor:
    """The count before any update: 0-d int64 zero, on the device of the params.

    >>> start_count({"w": torch.ones(2)})
    tensor(0)
    """
    leaves = leaves_of(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else torch.device("cpu"))


def zeros(leaf: Tensor) -> Tensor:
    """Zeros like a leaf: the initial moments.

    >>> zeros(torch.ones(2, requires_grad=True))
    tensor([0., 0.])
    """
    return torch.zeros_like(leaf.detach())


def rate_at(lr: Level, count: Tensor) -> Tensor:
    """The learning rate at a count: 0-d float64.

    >>> rate_at(lambda step: 0.5 / (1 + step), torch.tensor(1))
    tensor(0.2500, dtype=torch.float64)
    """
    return like(count, lr(count) if callable(lr) else lr).double()


def check_given(grads: Tree, params: Tree, moments: Tree, weight_decay: float, inplace: bool) -> None:
    """Raise for grads, params and moments that do not fit each other, and for an update in place.

    >>> check_given({"w": torch.ones(2)}, None, None, weight_decay=0.1, inplace=False)
    Traceback (most recent call last):
        ...
    ValueError: expected params in update for weight_decay=0.1, got None
    """
    if inplace:
        raise ValueError("expected inplace=False: this optimizer never changes its arguments")
    if weight_decay and params is None:
        raise ValueError(f"expected params in update for weight_decay={weight_decay}, got None")
    if params is not None:
        check_like("grads", grads, params)
    if moments is not None:
        check_like("grads", grads, moments)


def check_rate(lr: Level) -> None:
    """Raise unless it is a number of at least 0, a 0-d float tensor (its value is not read) or a schedule.

    >>> check_rate(-0.1)
    Traceback (most recent call last):
        ...
    ValueError: expected lr in [0, inf), got -0.1
    """
    # The value of a tensor is not read: it may be batched, or on another device.
    if words := uncalled(lr):
        raise TypeError(f"expected lr to be a number or a schedule, got {words}")
    if not callable(lr) and not isinstance(number("lr", lr), Tensor):
        check_within("lr", lr)


def check_within(name: str, value: object, below: float = math.inf) -> None:
    """Raise unless it is a number in [0, below).

    >>> check_within("momentum", 0.9)
    """
    if isinstance(value, Tensor):
        raise TypeError(f"expected {name} to be a number, got a tensor")
    if not 0 <= number(name, value) < below:
        raise ValueError(f"expected {name} in [0, {below}), got {value}")


def rounded(scalar: Tensor, leaf: Tensor) -> Tensor:
    """A 0-d tensor in the dtype of a leaf.

    >>> rounded(torch.tensor(0.1, dtype=torch.float64), torch.ones(1))
    tensor(0.1000)
    """
    # Rounded explicitly: type promotion rounds a batched 0-d tensor at another place than a single one.
    return scalar.to(device=leaf.device, dtype=leaf.dtype)
