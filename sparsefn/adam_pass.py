"""Adam's arithmetic: leaf by leaf in torch, or for plain float32 leaves in one pass over their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine import leafwise
from sparsefn.engine.elementary import sqrt
from sparsefn.engine.memory import BLOCK, fresh, visible


class Step(NamedTuple):
    """The numbers of one step of Adam; tensors are 0-d float64 and may be batched.

    >>> from sparsefn import adam_pass
    >>> one = torch.ones((), dtype=torch.float64)
    >>> adam_pass.Step(size=0.1 * one, scale=one, beta1=0.9, beta2=0.99, eps=1e-8).beta1
    0.9

    `size` is the rate over its bias correction, `scale` the root of the other one. Times the param, `decay` is added
    to the gradient, and `shrink` taken from the update.
    """

    size: Tensor
    scale: Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float = 0.0
    shrink: Tensor | None = None


Leaves = tuple[Tensor, Tensor, Tensor]


def step(
    numbers: Step, grads: Sequence[Tensor], mus: Sequence[Tensor], nus: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Leaves]:
    """For every leaf its update and its new moments.

    >>> from sparsefn import adam_pass
    >>> one = torch.ones((), dtype=torch.float64)
    >>> numbers = adam_pass.Step(size=one, scale=one, beta1=0.5, beta2=0.5, eps=0.0)
    >>> x = torch.tensor([2.0])
    >>> adam_pass.step(numbers, [x], [0 * x], [0 * x], [x])
    [(tensor([-0.7071]), tensor([1.]), tensor([2.]))]

    Half-precision leaves are computed in float32 and rounded once. Without decay and shrink the params are not read.
    """
    rows: list[leafwise.Row] = []
    results: list[Leaves] = []
    plain = _plain(numbers)
    for g, m, v, p in zip(grads, mus, nus, params, strict=True):
        single = plain and all(x.dtype == torch.float32 for x in (g, m, v, p))
        flat = leafwise.flat_memory(g, m, v, p, least=1) if single else None
        if flat is None:
            results.append(_in_torch(numbers, g, m, v, p))
        else:
            (update, a), (mu, b), (nu, c) = (fresh(flat[0], g.dtype) for _ in range(3))
            results.append((update.reshape(g.shape), mu.reshape(g.shape), nu.reshape(g.shape)))
            rows.append((*flat, a, b, c))
    if rows:
        leafwise.run(lambda blocks: _in_blocks(numbers, blocks), rows)
    return results


def _plain(numbers: Step) -> bool:
    tensors = [x for x in (numbers.size, numbers.scale, numbers.shrink) if x is not None]
    graph = torch.is_grad_enabled()
    return not any((graph and x.requires_grad) or visible(x) is None for x in tensors)


def _in_torch(numbers: Step, g: Tensor, m: Tensor, v: Tensor, p: Tensor) -> Leaves:
    dtype, (g, m, v) = g.dtype, (widen(x) for x in (g, m, v))
    if numbers.decay:
        g = g + numbers.decay * widen(p)
    m = m + (g - m) * (1 - numbers.beta1)
    v = v * numbers.beta2 + g * g * (1 - numbers.beta2)
    update = -rounded(numbers.size, m) * (m / (sqrt(v) / rounded(numbers.scale, v) + numbers.eps))
    if numbers.shrink is not None:
        update = update - rounded(numbers.shrink, update) * widen(p)
    return update.to(dtype), m.to(dtype), v.to(dtype)


def _in_blocks(numbers: Step, blocks: Iterator[leafwise.Row]) -> None:
    # The operations of `_in_torch` one by one: numpy rounds each as torch does. Its root of a float32 is the right one.
    f = np.float32
    size, scale = -f(numbers.size.item()), f(numbers.scale.item())
    shrink = None if numbers.shrink is None else f(numbers.shrink.item())
    part1, part2, beta2 = f(1 - numbers.beta1), f(1 - numbers.beta2), f(numbers.beta2)
    room = np.empty(BLOCK, f)
    for g, m, v, p, update, mu, nu in blocks:
        extra = room[: g.size]
        if numbers.decay:
            g = np.add(g, np.multiply(p, f(numbers.decay), out=extra), out=extra)
        np.subtract(g, m, out=mu)
        np.multiply(mu, part1, out=mu)
        np.add(m, mu, out=mu)
        np.multiply(g, g, out=update)
        np.multiply(update, part2, out=update)
        np.multiply(v, beta2, out=nu)
        np.add(nu, update, out=nu)
        np.sqrt(nu, out=update)
        np.divide(update, scale, out=update)
        np.add(update, f(numbers.eps), out=update)
        np.divide(mu, update, out=update)
        np.multiply(update, size, out=update)
        if shrink is not None:
            np.subtract(update, np.multiply(p, shrink, out=extra), out=update)


def widen(leaf: Tensor) -> Tensor:
    """A half-precision leaf in float32.

    >>> from sparsefn import adam_pass
    >>> adam_pass.widen(torch.ones(1, dtype=torch.bfloat16))
    tensor([1.])
    """
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32))


def rounded(scalar: Tensor, leaf: Tensor) -> Tensor:
    """A 0-d tensor in the dtype of a leaf.

    >>> from sparsefn import adam_pass
    >>> adam_pass.rounded(torch.tensor(0.1, dtype=torch.float64), torch.ones(1))
    tensor(0.1000)
    """
    # Rounded by hand: left to type promotion, a batched 0-d tensor rounds elsewhere than a single one.
    return scalar.to(device=leaf.device, dtype=leaf.dtype)
