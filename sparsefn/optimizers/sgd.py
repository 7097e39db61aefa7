"""SGD: its formula leaf by leaf, and a step under masks in one pass over CPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.checks import described
from sparsefn.engine.leaves import BLOCK, blockwise, leafwise, lists
from sparsefn.engine.processes import localized
from sparsefn.optimizers import base
from sparsefn.optimizers.base import Optimizer, Row
from sparsefn.state import Level
from sparsefn.tree import Tree, zipped


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

    `lr` is a number, a 0-d tensor (which may be batched) or a schedule of the
    optimizer's own count: the first update uses `lr(0)`. The weight decay is added to
    the gradient. Half-precision leaves are computed in float32 and rounded once. Raises
    ValueError for a number out of range, nesterov without momentum, and grads that do
    not fit; TypeError for another type.

    Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013.
    """
    base.check_rate(lr)
    base.check_within("momentum", momentum)
    base.check_within("weight_decay", weight_decay)
    if nesterov and not momentum:
        raise ValueError("expected a momentum above 0 for nesterov=True, got 0")

    def init(params: Tree) -> SgdState:
        return SgdState(
            base.start_count(params), base.zero_moments(params) if momentum else ()
        )

    def moments(state: SgdState) -> list[Tree]:
        return [state.momentum] if momentum else []

    def leaf(rate: Tensor, *row: Tensor) -> Row:
        *buffers, g, p = row
        dtype = g.dtype
        kind = torch.promote_types(g.dtype, torch.float32)
        g = g.to(kind)
        if weight_decay:
            g = g + weight_decay * p.to(kind)
        if momentum:
            b = momentum * buffers[0].to(kind) + g
            buffers = [b.to(dtype)]
            g = g + momentum * b if nesterov else b
        # Rounded explicitly: type promotion rounds a batched 0-d tensor at another
        # place than a single one.
        return (-rate.to(g.device, kind) * g).to(dtype), *buffers

    def ended(trees: list[Tree], count: Tensor) -> tuple[Tree, SgdState]:
        return trees[0], SgdState(count, *trees[1:])

    def update(
        grads: Tree, state: SgdState, *, params: Tree = None, inplace: bool = False
    ) -> tuple[Tree, SgdState]:
        base.check_fitting(
            grads, params, state.momentum if momentum else None, weight_decay, inplace
        )
        rows, rebuild = localized(
            *zipped(*moments(state), grads, params if weight_decay else grads)
        )
        stepped = lists.each(
            partial(leaf, base.rate_at(lr, state.count)), *zip(*rows, strict=True)
        )
        return ended(
            base.trees_of(stepped, 2 if momentum else 1, rebuild), state.count + 1
        )

    def under_masks(
        grads: Tree, state: SgdState, params: Tree, masks: Tree
    ) -> tuple[Tree, SgdState] | None:
        given = (params, masks, grads, moments(state))
        rate = base.known_rate(lr, state.count)
        if rate is None:
            made = base.by_backend(
                "sgd", lr, (state.count,), given, momentum, nesterov, weight_decay
            )
            return None if made is None else ended(*made)
        kernel = partial(_in_blocks, rate, momentum, nesterov, weight_decay)
        trees = base.under_masks_in_blocks(
            given, kernel, lambda rows: [leaf(rate, *row) for row in rows]
        )
        return ended(trees, state.count + 1)

    return Optimizer(init, update, under_masks)


# ---- one pass over memory ------------------------------------------------------------


def _in_blocks(
    rate: Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    blocks: Iterable[blockwise.Row],
) -> None:
    # The operations of `leaf` one by one: numpy rounds each as torch does. Results may
    # be written over their inputs.
    f = np.float32
    size = f(rate.item())
    keep = f(momentum)
    decay = f(weight_decay)
    buffers = [np.empty(BLOCK, f) for _ in range(3)]
    for mask, *row in blocks:
        gradient, p, new = row[-4:-1] if momentum else row
        g, extra, wide = (x[: p.size] for x in buffers)
        # nothing remembers the gradient off the mask
        if not (momentum or weight_decay):
            leafwise.widen_block(mask, wide)
            leafwise.descend_block(wide, p, np.multiply(gradient, size, out=extra), new)
            continue
        leafwise.zero_block(mask, gradient, g, wide)
        if weight_decay:
            np.add(g, np.multiply(p, decay, out=extra), out=g)
        if momentum:
            old = row[0]
            buffer = row[-1]
            np.add(np.multiply(old, keep, out=buffer), g, out=buffer)
            if nesterov:
                np.add(g, np.multiply(buffer, keep, out=extra), out=g)
            else:
                g = buffer
        leafwise.descend_block(wide, p, np.multiply(g, size, out=extra), new)
