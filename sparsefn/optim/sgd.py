"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sparsefn._engine.leaves import lists
from sparsefn._engine.processes import localized
from sparsefn.core.checks import described
from sparsefn.core.state import Level
from sparsefn.core.tree import Tree, wide, zipped
from sparsefn.optim import base
from sparsefn.optim.base import Optimizer, Row


class SgdState(NamedTuple):
    """The state of SGD.

    >>> sf.optimizers.sgd(0.1).init({"w": torch.ones(2)})
    SgdState(count=tensor(0), momentum=())

    `count` is the number of updates made (0-d int64), `momentum` a tree like params, or
    `()`.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    momentum: Tree = ()


@described
def sgd(
    lr: Level, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    """Stochastic gradient descent.

    >>> optimizer = sf.optimizers.sgd(lambda step: 0.5 / (1 + step), momentum=0.9)
    >>> state = optimizer.init(torch.zeros(2))
    >>> for _ in range(2):
    ...     updates, state = optimizer.update(torch.ones(2), state)
    >>> updates
    tensor([-0.4750, -0.4750])

    Args:
        lr: Learning rate: a number of at least 0, a 0-d tensor (which may be batched),
            or a schedule of the optimizer's own count: the first update uses `lr(0)`.
        momentum: The factor of the old momentum; 0 keeps none.
        nesterov: Whether the step is Nesterov's, which looks ahead.
        weight_decay: The factor of the params that is added to the gradient.

    Returns:
        The optimizer. Half-precision leaves are computed in float32 and rounded once.

    Raises:
        TypeError: A number is of another type; in an update, a gradient is of another
            dtype than its leaf.
        ValueError: A number is negative or not finite, or `nesterov` is without
            momentum; in an update, grads do not fit, or `params` are missing for the
            weight decay.

    Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013.
    """
    base.check_rate(lr)
    base.check_range("momentum", momentum)
    base.check_range("weight_decay", weight_decay)
    if nesterov and not momentum:
        raise ValueError("expected a momentum above 0 for nesterov=True, got 0")

    def init(params: Tree) -> SgdState:
        return SgdState(
            base.start_count(params), base.zero_moments(params) if momentum else ()
        )

    def moments(state: SgdState) -> list[Tree]:
        return [state.momentum] if momentum else []

    def formula(rows: Sequence[Row], numbers: Row) -> tuple[list[Row], Tensor]:
        # The update and the momentum of each row of momentum, gradient and param.
        count, rate = numbers

        def leaf(*row: Tensor) -> Row:
            *buffers, g, p = row
            dtype = g.dtype
            g = wide(g)
            if weight_decay:
                g = g + weight_decay * wide(p)
            if momentum:
                b = momentum * wide(buffers[0]) + g
                buffers = [b.to(dtype)]
                g = g + momentum * b if nesterov else b
            return (-base.scalar_like(rate, g) * g).to(dtype), *buffers

        return lists.foreach(leaf, *zip(*rows, strict=True)), count + 1

    def update(
        grads: Tree, state: SgdState, *, params: Tree = None, inplace: bool = False
    ) -> tuple[Tree, SgdState]:
        buffers = moments(state)
        base.check_fitting(
            grads, params, buffers[0] if buffers else None, weight_decay, inplace
        )
        rows, rebuild = localized(
            *zipped(*buffers, grads, params if weight_decay else grads)
        )
        made, count = formula(rows, (state.count, base.rate_at(lr, state.count)))
        updates, *new = base.trees_of(made, len(buffers) + 1, rebuild)
        return updates, SgdState(count, *new)

    def under_masks(
        grads: Tree, state: SgdState, params: Tree, masks: Tree, clear: bool = False
    ) -> tuple[Tree, SgdState]:
        trees = (params, masks, grads, moments(state))
        options = (momentum, nesterov, weight_decay)
        old = (state.count,)
        made = base.under_masks("sgd", trees, lr, old, formula, clear, *options)
        (moved, *new), count = made
        return moved, SgdState(count, *new)

    return Optimizer(init, update, under_masks)
