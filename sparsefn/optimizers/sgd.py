"""SGD: its formula leaf by leaf in torch, and a step under masks in one pass over CPU memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from sparsefn.engine import backends, blockwise, leafwise, lists
from sparsefn.engine.described import described
from sparsefn.engine.memory import BLOCK
from sparsefn.engine.shards import localized
from sparsefn.engine.transforms import constants
from sparsefn.optimizers.base import (
    Optimizer,
    check_given,
    check_rate,
    check_within,
    rate_at,
    start_count,
    zeros,
)
from sparsefn.state import Level
from sparsefn.tree import Tree, zipped


class SgdState(NamedTuple):
    """The state of SGD.

    >>> sf.optimizers.sgd(0.1).init({"w": torch.ones(2)})
    SgdState(count=tensor(0), momentum=())

    `count` is the number of updates made (0-d int64), `momentum` a tree like params, or `()`.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as in optax
    momentum: Tree = ()


@described
def sgd(lr: Level, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
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
        dtype, kind = g.dtype, torch.promote_types(g.dtype, torch.float32)
        g = g.to(kind)
        if weight_decay:
            g = g + weight_decay * p.to(kind)
        if momentum:
            b = momentum * b.to(kind) + g
            g = g + momentum * b if nesterov else b
        # Rounded explicitly: type promotion rounds a batched 0-d tensor at another place than a single one.
        return (-rate.to(g.device, kind) * g).to(dtype), b.to(dtype)

    def update(grads: Tree, state: SgdState, *, params: Tree = None, inplace: bool = False) -> tuple[Tree, SgdState]:
        check_given(grads, params, state.momentum if momentum else None, weight_decay, inplace)
        rate = rate_at(lr, state.count)
        moments = state.momentum if momentum else grads
        rows, rebuild = localized(*zipped(moments, grads, params if weight_decay else grads))
        stepped = lists.each(lambda b, g, p: leaf(rate, g, b, p), *zip(*rows, strict=True))
        updates, buffers = (rebuild([pair[i] for pair in stepped]) for i in range(2))
        return updates, SgdState(state.count + 1, buffers if momentum else ())

    def under_masks(grads: Tree, state: SgdState, params: Tree, masks: Tree) -> tuple[Tree, SgdState] | None:
        check_given(grads, params, state.momentum if momentum else None, weight_decay, False)
        if constants([state.count]) is None:
            return by_backend(grads, state, params, masks)
        rate = rate_at(lr, state.count)
        numbers = SgdNumbers(rate, momentum, nesterov, weight_decay)
        rows, rebuild = localized(*zipped(params, masks, grads, state.momentum if momentum else grads))
        stepped = _step_under_masks(numbers, functools.partial(leaf, rate), rows)
        if stepped is None:
            return None
        moved, buffers = (rebuild([pair[i] for pair in stepped]) for i in range(2))
        return moved, SgdState(state.count + 1, buffers if momentum else ())

    def by_backend(grads: Tree, state: SgdState, params: Tree, masks: Tree) -> tuple[Tree, SgdState] | None:
        device = state.count.device.type
        if not backends.serves("sgd", device):
            return None
        moments = (state.momentum,) if momentum else ()
        rows, rebuild = localized(*zipped(params, masks, grads, *moments))
        numbers = state.count, rate_at(lr, state.count)
        made = backends.asked("sgd", device, rows, numbers, momentum, nesterov, weight_decay)
        if made is None:
            return None
        stepped, count = made
        new, *buffers = (rebuild([row[i] for row in stepped]) for i in range(len(stepped[0])))
        return new, SgdState(count, *buffers)

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
    numbers: SgdNumbers, leaf: Leaf, rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]] | None:
    """New params and momenta: gradients count as zero off the masks, and params move only on them.

    A row is a param, its mask, gradient and momentum. `leaf(grad, momentum, param)` gives the update and the momentum
    of a leaf in torch, for leaves whose memory is not read. Without momentum the buffers are handed on. Returns None
    where a transform hides the rate or its gradient is wanted.
    """
    if constants([numbers.rate]) is None:
        return None
    blocks: list[blockwise.Row] = []
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for i, (p, mask, g, b) in enumerate(rows):
        single = p.numel() >= blockwise.SMALL and all(x.dtype == torch.float32 for x in (g, b, p))
        over = (3, 2) if numbers.momentum else (3,)
        made = blockwise.add_masked_row(blocks, mask, g, b, p, results=len(over), over=over) if single else None
        if made is not None:
            results[i] = made[0], made[1] if numbers.momentum else b
    if blocks:
        blockwise.run(lambda blocks: _in_blocks(numbers, blocks), blocks)
    if len(results) < len(rows):
        rest = [i for i in range(len(rows)) if i not in results]
        params, masks, grads, buffers = zip(*(rows[i] for i in rest), strict=True)
        stepped = [leaf(*row) for row in zip(leafwise.zeroed(masks, grads), buffers, params, strict=True)]
        new_params = leafwise.moved(masks, params, [update for update, _ in stepped])
        results |= {i: (new, b) for i, new, (_, b) in zip(rest, new_params, stepped, strict=True)}
    return [results[i] for i in range(len(rows))]


def _in_blocks(numbers: SgdNumbers, blocks: Iterable[blockwise.Row]) -> None:
    # The operations of `leaf` one by one: numpy rounds each as torch does. Results may be written over their inputs.
    f = np.float32
    rate, momentum, decay = f(numbers.rate.item()), f(numbers.momentum), f(numbers.decay)
    buffers = [np.empty(BLOCK, f) for _ in range(3)]
    for mask, gradient, b, p, new, *moved in blocks:
        g, extra, wide = (x[: p.size] for x in buffers)
        if not (numbers.momentum or numbers.decay):  # nothing remembers the gradient off the mask
            leafwise.widen_block(mask, wide)
            leafwise.descend_block(wide, p, np.multiply(gradient, rate, out=extra), new)
            continue
        leafwise.zero_block(mask, gradient, g, wide)
        if numbers.decay:
            np.add(g, np.multiply(p, decay, out=extra), out=g)
        if numbers.momentum:
            (buffer,) = moved
            np.add(np.multiply(b, momentum, out=buffer), g, out=buffer)
            if numbers.nesterov:
                np.add(g, np.multiply(buffer, momentum, out=extra), out=g)
            else:
                g = buffer
        leafwise.descend_block(wide, p, np.multiply(g, rate, out=extra), new)
