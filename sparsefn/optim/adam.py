"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.leaves import lists
from sparsefn._engine.numbers import sqrt
from sparsefn._engine.processes import localized
from sparsefn._engine.torch_limits import computed_once
from sparsefn.core.checks import described
from sparsefn.core.state import Level
from sparsefn.core.tree import Tree, wide, zipped
from sparsefn.optim import base
from sparsefn.optim.base import Optimizer, Row


class AdamState(NamedTuple):
    """The state of Adam.

    >>> sf.optimizers.adam(0.1).init({"w": torch.ones(1)}).mu
    {'w': tensor([0.])}

    `count` is the number of updates made (0-d int64), `mu` and `nu` the running means
    of the gradient and of its square, like params; `decay1` and `decay2` are the powers
    `beta ** count` (0-d float64), kept as products: the bits of a power differ between
    one number and a batch.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    mu: Tree
    nu: Tree
    decay1: Tensor
    decay2: Tensor


@described
def adam(
    lr: Level,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam; the weight decay is added to the gradient.

    >>> optimizer = sf.optimizers.adam(0.1)
    >>> optimizer.update(torch.tensor([3.0, -0.01]), optimizer.init(torch.zeros(2)))[0]
    tensor([-0.1000,  0.1000])

    Args:
        lr: Learning rate, as in `sgd`.
        betas: The factors, in [0, 1), of the old means of the gradient and of its
            square.
        eps: What is added to the root of the mean square.
        weight_decay: The factor of the params that is added to the gradient.

    Returns:
        The optimizer. The bias correction is float64; half-precision leaves are
        computed in float32 and rounded once.

    Raises:
        TypeError: A number is of another type; in an update, a gradient is of another
            dtype than its leaf.
        ValueError: A number is out of range, or `betas` are not two; in an update,
            grads do not fit, or `params` are missing for the weight decay.

    Kingma and Ba, "Adam: a method for stochastic optimization", 2014, arXiv 1412.6980,
    algorithm 1.
    """
    return _adam(lr, betas, eps, weight_decay, decoupled=False)


@described
def adamw(
    lr: Level,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Adam whose weight decay acts on the params and not on the moments.

    >>> optimizer = sf.optimizers.adamw(0.1, weight_decay=0.5)
    >>> params = torch.tensor([2.0])
    >>> optimizer.update(torch.tensor([0.0]), optimizer.init(params), params=params)[0]
    tensor([-0.1000])

    Args:
        lr: Learning rate, as in `sgd`.
        betas: As in `adam`.
        eps: As in `adam`.
        weight_decay: The decay of one update is `lr * weight_decay * params`.

    Returns:
        The optimizer, as `adam` in all else.

    Raises:
        TypeError: As in `adam`.
        ValueError: As in `adam`.

    Loshchilov and Hutter, "Decoupled weight decay regularization", 2017,
    arXiv 1711.05101, algorithm 2.
    """
    return _adam(lr, betas, eps, weight_decay, decoupled=True)


def _adam(
    lr: Level,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    *,
    decoupled: bool,
) -> Optimizer:
    base.check_rate(lr)
    base.check_range("eps", eps)
    base.check_range("weight_decay", weight_decay)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"expected two betas, got {betas!r}")
    for i, beta in enumerate(betas):
        base.check_range(f"betas[{i}]", beta, below=1.0)
    beta1, beta2 = betas
    options = ((beta1, beta2), eps, weight_decay, decoupled)

    def init(params: Tree) -> AdamState:
        count = base.start_count(params)
        one = torch.ones_like(count, dtype=torch.float64)
        return AdamState(
            count,
            base.zero_moments(params),
            base.zero_moments(params),
            one,
            one.clone(),
        )

    def formula(rows: Sequence[Row], numbers: Row) -> tuple[list[Row], Row]:
        # The update and the moments of each row of moments, gradient and param. Both
        # bias corrections are in the rate and in eps: section 2, last paragraph.
        count, decay1, decay2, rate = numbers
        decay1 = decay1 * beta1
        decay2 = decay2 * beta2
        scale = sqrt(1 - decay2)
        size = computed_once(rate * scale / (1 - decay1))
        least = computed_once(eps * scale)
        shrink = computed_once(rate * weight_decay) if decoupled else None

        def leaf(m: Tensor, v: Tensor, g: Tensor, p: Tensor) -> Row:
            dtype = g.dtype
            m, v, g = (wide(x) for x in (m, v, g))
            if weight_decay and shrink is None:
                g = g + weight_decay * wide(p)
            m = m + (g - m) * (1 - beta1)
            v = v * beta2 + g * g * (1 - beta2)
            update = -base.scalar_like(size, m) * (
                m / (sqrt(v) + base.scalar_like(least, v))
            )
            if weight_decay and shrink is not None:
                update = update - base.scalar_like(shrink, update) * wide(p)
            return update.to(dtype), m.to(dtype), v.to(dtype)

        return lists.foreach(leaf, *zip(*rows, strict=True)), (
            count + 1,
            decay1,
            decay2,
        )

    def updates(rows: Sequence[Row], numbers: Row) -> tuple[list[Row], Row]:
        return base.by_backend("adam_updates", rows, numbers, formula, *options)

    def update(
        grads: Tree, state: AdamState, *, params: Tree = None, inplace: bool = False
    ) -> tuple[Tree, AdamState]:
        base.check_fitting(grads, params, state.mu, weight_decay, inplace)
        rows, rebuild = localized(
            *zipped(state.mu, state.nu, grads, params if weight_decay else grads)
        )
        old = (state.count, state.decay1, state.decay2)
        rate = base.rate_at(lr, state.count)
        made, (count, *powers) = updates(rows, (*old, rate))
        update, mu, nu = base.trees_of(made, 3, rebuild)
        return update, AdamState(count, mu, nu, *powers)

    def under_masks(
        grads: Tree, state: AdamState, params: Tree, masks: Tree, clear: bool = False
    ) -> tuple[Tree, AdamState]:
        trees = (params, masks, grads, (state.mu, state.nu))
        old = (state.count, state.decay1, state.decay2)
        made = base.under_masks("adam", trees, lr, old, updates, clear, *options)
        (new, mu, nu), (count, *powers) = made
        return new, AdamState(count, mu, nu, *powers)

    return Optimizer(init, update, under_masks)
