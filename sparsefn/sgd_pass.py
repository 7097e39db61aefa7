"""A step of SGD under masks: gradient, momentum and weights of plain float32 leaves in one pass over their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine import leafwise
from sparsefn.engine.leafwise import is_sparse
from sparsefn.engine.memory import BLOCK, fresh, visible


class Numbers(NamedTuple):
    """The numbers of one step of SGD; the rate is 0-d float64.

    >>> from sparsefn import sgd_pass
    >>> sgd_pass.Numbers(torch.tensor(0.1, dtype=torch.float64), momentum=0.9).nesterov
    False
    """

    rate: Tensor
    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0


Leaf = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def step(
    numbers: Numbers,
    leaf: Leaf,
    masks: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]] | None:
    """New params and momenta, the gradient taken as zero off the masks and params moved on them alone.

    >>> from sparsefn import sgd_pass
    >>> numbers = sgd_pass.Numbers(torch.tensor(0.5, dtype=torch.float64))
    >>> mask, g, p = torch.tensor([True, False]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0])
    >>> sgd_pass.step(numbers, lambda g, b, p: (-0.5 * g, b), [mask], [g], [g], [p])[0][0]
    tensor([0., 3.])

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


def _in_blocks(numbers: Numbers, blocks: Iterator[leafwise.Row]) -> None:
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
