"""SGD, Adam and AdamW as pure functions, equal to torch.optim's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn import adam_pass, sgd_pass
from sparsefn.adam_pass import rounded, widen
from sparsefn.engine.checks import number
from sparsefn.engine.elementary import sqrt
from sparsefn.engine.numbers import like
from sparsefn.tree import Tree, check_like, leaves_of, opened
from sparsefn.types import Schedule

Rate = float | Tensor | Schedule


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
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


class MaskedOptimizer(Optimizer):
    """An optimizer that can step under masks in one pass, as `with_optimizer` then does.

    >>> isinstance(sf.optimizers.sgd(0.1), sf.optimizers.Optimizer), len(sf.optimizers.sgd(0.1))
    (True, 2)

    `under_masks(grads, state, params, masks) -> (params, state)`: what `update` on gradients masked with +0.0 and
    the sum on the mask alone come to, bit for bit; or None where it does not know better than these.
    """

    under_masks: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree] | None]


class SgdState(NamedTuple):
    """What SGD remembers.

    >>> sf.optimizers.sgd(0.1).init({"w": torch.ones(2)})
    SgdState(count=tensor(0), momentum=())

    `count` is the number of updates made (0-d int64), `momentum` a tree like params, or `()`.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    momentum: Tree = ()


class AdamState(NamedTuple):
    """What Adam remembers.

    >>> sf.optimizers.adam(0.1).init({"w": torch.ones(1)}).mu
    {'w': tensor([0.])}

    `count` is the number of updates made (0-d int64), `mu` and `nu` the running means of the
    gradient and of its square, like params; `decay1` and `decay2` are the powers
    `beta ** count` (0-d float64), kept as products: a power has other bits one at a time than in a batch.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    mu: Tree
    nu: Tree
    decay1: Tensor
    decay2: Tensor


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent.

    >>> optimizer = sf.optimizers.sgd(lambda step: 0.5 / (1 + step), momentum=0.9)
    >>> state = optimizer.init(torch.zeros(2))
    >>> for _ in range(2):
    ...     updates, state = optimizer.update(torch.ones(2), state)
    >>> updates
    tensor([-0.4750, -0.4750])

    `lr` is a number, a 0-d tensor (which may be batched) or a schedule of the optimizer's own count:
    the first update uses `lr(0)`. The weight decay is added to the gradient. Half-precision leaves
    are computed in float32 and rounded once. Raises ValueError for a number out of range, nesterov without
    momentum, and grads that do not fit; TypeError for another type.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """
    _check_rate(lr)
    _check_number("momentum", momentum)
    _check_number("weight_decay", weight_decay)
    if nesterov and not momentum:
        raise ValueError("expected a momentum above 0 for nesterov=True, got 0")

    def init(params: Tree) -> SgdState:
        return SgdState(_count(params), optree.tree_map(_zeros, params) if momentum else ())

    def leaf(rate: Tensor, g: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        dtype, g = g.dtype, widen(g)
        if weight_decay:
            g = g + weight_decay * widen(p)
        if momentum:
            b = momentum * widen(b) + g
            g = g + momentum * b if nesterov else b
        return (-rounded(rate, g) * g).to(dtype), b.to(dtype)

    def update(grads: Tree, state: SgdState, *, params: Tree = None, inplace: bool = False) -> tuple[Tree, SgdState]:
        _check_update(grads, params, state.momentum if momentum else None, weight_decay, inplace)
        rate = _rate_at(lr, state.count)
        trees = (grads, state.momentum if momentum else grads, params if weight_decay else grads)
        rows = [leaf(rate, *row) for row in zip(*map(leaves_of, trees), strict=True)]
        rebuild = opened(trees[1])[1]
        updates, buffer = (rebuild([row[i] for row in rows]) for i in range(2))
        return updates, SgdState(state.count + 1, buffer if momentum else ())

    def under_masks(grads: Tree, state: SgdState, params: Tree, masks: Tree) -> tuple[Tree, SgdState] | None:
        _check_update(grads, params, state.momentum if momentum else None, weight_decay, False)
        rate = _rate_at(lr, state.count)
        numbers = sgd_pass.Numbers(rate, momentum, nesterov, weight_decay)
        trees = (masks, grads, state.momentum if momentum else grads, params)
        rows = sgd_pass.step(numbers, functools.partial(leaf, rate), *map(leaves_of, trees))
        if rows is None:
            return None
        moved = opened(params)[1]([new for new, _ in rows])
        if not momentum:
            return moved, SgdState(state.count + 1)
        return moved, SgdState(state.count + 1, opened(state.momentum)[1]([buffer for _, buffer in rows]))

    optimizer = MaskedOptimizer(init, update)
    optimizer.under_masks = under_masks
    return optimizer


def adam(
    lr: Rate, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam; the weight decay is added to the gradient.

    >>> optimizer = sf.optimizers.adam(0.1)
    >>> optimizer.update(torch.tensor([3.0, -0.01]), optimizer.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])

    `lr` as in `sgd`. The bias correction is float64; half-precision leaves are computed in float32 and
    rounded once. Raises ValueError for a number out of range and grads that do not fit, TypeError for
    another type.

    Kingma and Ba, "Adam: a method for stochastic optimization", 2014, arXiv 1412.6980, algorithm 1.
    """
    return _adam(lr, betas, eps, weight_decay, decoupled=False)


def adamw(
    lr: Rate, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam whose weight decay acts on the params and not on the moments.

    >>> optimizer = sf.optimizers.adamw(0.1, weight_decay=0.5)
    >>> params = torch.tensor([2.0])
    >>> optimizer.update(torch.tensor([0.0]), optimizer.init(params), params=params)[0]
    tensor([-0.1000])

    As `adam` in all else; the decay of one update is `lr * weight_decay * params`.

    Loshchilov and Hutter, "Decoupled weight decay regularization", 2017, arXiv 1711.05101, algorithm 2.
    """
    return _adam(lr, betas, eps, weight_decay, decoupled=True)


def _adam(lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float, *, decoupled: bool) -> Optimizer:
    _check_rate(lr)
    _check_number("eps", eps)
    _check_number("weight_decay", weight_decay)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"expected two betas, got {betas!r}")
    for i, beta in enumerate(betas):
        _check_number(f"betas[{i}]", beta, below=1.0)
    beta1, beta2 = betas

    def init(params: Tree) -> AdamState:
        count = _count(params)
        one = torch.ones_like(count, dtype=torch.float64)
        return AdamState(count, optree.tree_map(_zeros, params), optree.tree_map(_zeros, params), one, one.clone())

    def update(grads: Tree, state: AdamState, *, params: Tree = None, inplace: bool = False) -> tuple[Tree, AdamState]:
        _check_update(grads, params, state.mu, weight_decay, inplace)
        rate = _rate_at(lr, state.count)
        decay1, decay2 = state.decay1 * beta1, state.decay2 * beta2
        numbers = adam_pass.Step(rate / (1 - decay1), sqrt(1 - decay2), beta1, beta2, eps)
        if weight_decay:
            numbers = numbers._replace(**({"shrink": rate * weight_decay} if decoupled else {"decay": weight_decay}))
        trees = (grads, state.mu, state.nu, params if weight_decay else grads)
        stepped = adam_pass.step(numbers, *map(leaves_of, trees))
        rebuild = opened(state.mu)[1]
        updates, mu, nu = (rebuild([row[i] for row in stepped]) for i in range(3))
        return updates, AdamState(state.count + 1, mu, nu, decay1, decay2)

    return Optimizer(init, update)


def _count(params: Tree) -> Tensor:
    leaves = leaves_of(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else torch.device("cpu"))


def _zeros(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf.detach())


def _rate_at(lr: Rate, count: Tensor) -> Tensor:
    return like(count, lr(count) if callable(lr) else lr).double()


def _check_update(grads: Tree, params: Tree, moments: Tree, weight_decay: float, inplace: bool) -> None:
    if inplace:
        raise ValueError("expected inplace=False: this optimizer never changes its arguments")
    if weight_decay and params is None:
        raise ValueError(f"expected params in update for weight_decay={weight_decay}, got None")
    if params is not None:
        check_like("grads", grads, params)
    if moments is not None:
        check_like("grads", grads, moments)


def _check_rate(lr: Rate) -> None:
    # The value of a tensor is not looked at: it may be batched, or on another device.
    if not callable(lr) and not isinstance(number("lr", lr), Tensor):
        _check_number("lr", lr)


def _check_number(name: str, value: Any, below: float = math.inf) -> None:
    if isinstance(value, Tensor):
        raise TypeError(f"expected {name} to be a number, got a tensor")
    if not 0 <= number(name, value) < below:
        raise ValueError(f"expected {name} in [0, {below}), got {value}")
