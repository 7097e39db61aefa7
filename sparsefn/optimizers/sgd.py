"""SGD: its formula leaf by leaf in torch, and a step under masks in one pass over CPU memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from sparsefn.engine import leafwise
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.memory import BLOCK, fresh, visible
from sparsefn.optimizers.base import (
    Optimizer,
    Rate,
    check_given,
    check_rate,
    check_within,
    rate_at,
    rounded,
    start_count,
    zeros,
)
from sparsefn.tree import Tree, leaves_of, opened, wide


class SgdState(NamedTuple):
    """What SGD remembers.

    >>> sf.optimizers.sgd(0.1).init({"w": torch.ones(2)})
    SgdState(count=tensor(0), momentum=())

    `count` is the number of updates made (0-d int64), `momentum` a tree like params, or `()`.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    momentum: Tree = ()


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
    check_rate(lr)
    check_within("momentum", momentum)
    check_within("weight_decay", weight_decay)
    if nesterov and not momentum:
        raise ValueError("expected a momentum above 0 for nesterov=True, got 0")

    def init(params: Tree) -> SgdState:
        return SgdState(start_count(params), optree.tree_map(zeros, params) if momentum else ())

    def leaf(rate: Tensor, g: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        dtype, g = g.dtype, wide(g)
        if weight_decay:
            g = g + weight_decay * wide(p)
        if momentum:
            b = momentum * wide(b) + g
            g = g + momentum * b if nesterov else b
        return (-rounded(rate, g) * g).to(dtype), b.to(dtype)

    def update(grads: Tree, state: SgdState, *, params: Tree = None, inplace: bool = False) -> tuple[Tree, SgdState]:
        check_given(grads, params, state.momentum if momentum else None, weight_decay, inplace)
        rate = rate_at(lr, state.count)
        trees = (grads, state.momentum if momentum else grads, params if weight_decay else grads)
        rows = [leaf(rate, *row) for row in zip(*map(leaves_of, trees), strict=True)]
        rebuild = opened(trees[1])[1]
        updates, buffer = (rebuild([row[i] for row in rows]) for i in range(2))
        return updates, SgdState(state.count + 1, buffer if momentum else ())

    def under_masks(grads: Tree, state: SgdState, params: Tree, masks: Tree) -> tuple[Tree, SgdState] | None:
        check_given(grads, params, state.momentum if momentum else None, weight_decay, False)
        rate = rate_at(lr, state.count)
        numbers = SgdNumbers(rate, momentum, nesterov, weight_decay)
        trees = (masks, grads, state.momentum if momentum else grads, params)
        rows = _step_under_masks(numbers, functools.partial(leaf, rate), *map(leaves_of, trees))
        if rows is None:
            return None
        moved = opened(params)[1]([new for new, _ in rows])
        if not momentum:
            return moved, SgdState(state.count + 1)
        return moved, SgdState(state.count + 1, opened(state.momentum)[1]([buffer for _, buffer in rows]))

    return Optimizer(init, update, under_masks)


# ---- one pass over memory ---------------------------------------------------------------------------


class SgdNumbers(NamedTuple):
    """The numbers of one step of SGD; the rate is 0-d float64."""

    rate: Tensor
    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0


Leaf = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _step_under_masks(
    numbers: SgdNumbers,
    leaf: Leaf,
    masks: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]] | None:
    """New params and momenta, the gradient taken as zero off the masks and params moved on them alone.

    `leaf(grad, momentum, param)` gives the update and the momentum of a leaf in torch, for leaves that are not plain;
    without momentum the buffers are handed on. None where the rate is hidden by a transform or its gradient is wanted.
    """
    if visible(numbers.rate) is None or (torch.is_grad_enabled() and numbers.rate.requires_grad):
        return None
    rows: list[leafwise.Row] = []
    results = []
    for mask, g, b, p in zip(masks, grads, buffers, params, strict=True):
        plain = is_sparse(mask, p) and all(x.dtype == torch.float32 for x in (g, b, p))
        flat = leafwise.flat_memory(mask, g, b, p) if plain else None
        if flat is None:
            update, buffer = leaf(leafwise.zeroed([mask], [g])[0], b, p)
            results.append((leafwise.moved([mask], [p], [update])[0], buffer))
        else:
            new, room = fresh(flat[-1], p.dtype)
            buffer, moved = fresh(flat[-1], b.dtype) if numbers.momentum else (b, flat[2])  # not written to
            results.append((new.reshape(p.shape), buffer.reshape(p.shape) if numbers.momentum else b))
            rows.append((*flat, room, moved))
    if rows:
        leafwise.run(lambda blocks: _in_blocks(numbers, blocks), rows)
    return results


def _in_blocks(numbers: SgdNumbers, blocks: Iterator[leafwise.Row]) -> None:
    # The operations of `leaf` one by one: numpy rounds each as torch does.
    f = np.float32
    rate, momentum, decay = -f(numbers.rate.item()), f(numbers.momentum), f(numbers.decay)
    rooms = [np.empty(BLOCK, f) for _ in range(2)]
    for mask, gradient, b, p, new, buffer in blocks:
        g, extra = (room[: p.size] for room in rooms)
        leafwise.zero_block(mask.view(np.int8), gradient.view(np.int32), g.view(np.int32))
        if numbers.decay:
            np.add(g, np.multiply(p, decay, out=extra), out=g)
        if numbers.momentum:
            np.add(np.multiply(b, momentum, out=buffer), g, out=buffer)
            if numbers.nesterov:
                np.add(g, np.multiply(buffer, momentum, out=extra), out=g)
            else:
                g = buffer
        np.add(p, np.multiply(g, rate, out=extra), out=new)
        leafwise.keep_block(mask.view(np.int8), p.view(np.int32), new.view(np.int32), extra.view(np.int32))
