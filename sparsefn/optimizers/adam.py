"""Adam and AdamW: the formula in torch, leaf by leaf, and one pass over CPU memory,
with or without masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.checks import described
from sparsefn.engine.leaves import BLOCK, blockwise, leafwise, lists
from sparsefn.engine.numbers import sqrt
from sparsefn.engine.processes import localized
from sparsefn.engine.surroundings import computed_once, constants
from sparsefn.optimizers import base
from sparsefn.optimizers.base import Optimizer, Row
from sparsefn.state import Level
from sparsefn.tree import Tree, wide, zipped


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

    `lr` as in `sgd`. The bias correction is float64; half-precision leaves are computed
    in float32 and rounded once. Raises ValueError for a number out of range and grads
    that do not fit, TypeError for another type.

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

    As `adam` in all else; the decay of one update is `lr * weight_decay * params`.

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
    base.check_within("eps", eps)
    base.check_within("weight_decay", weight_decay)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"expected two betas, got {betas!r}")
    for i, beta in enumerate(betas):
        base.check_within(f"betas[{i}]", beta, below=1.0)
    beta1, beta2 = betas

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

    def begun(state: AdamState) -> tuple[AdamNumbers, Row]:
        # The numbers of the next step, and the count and the powers of the betas after
        # it.
        rate = base.rate_at(lr, state.count)
        decay1 = state.decay1 * beta1
        decay2 = state.decay2 * beta2
        scale = sqrt(1 - decay2)
        size = computed_once(rate * scale / (1 - decay1))
        least = computed_once(eps * scale)
        shrink = (
            computed_once(rate * weight_decay) if weight_decay and decoupled else None
        )
        numbers = AdamNumbers(
            size, least, beta1, beta2, 0.0 if decoupled else weight_decay, shrink
        )
        return numbers, (state.count + 1, decay1, decay2)

    def ended(trees: list[Tree], after: Row) -> tuple[Tree, AdamState]:
        return trees[0], AdamState(after[0], *trees[1:], *after[1:])

    def update(
        grads: Tree, state: AdamState, *, params: Tree = None, inplace: bool = False
    ) -> tuple[Tree, AdamState]:
        base.check_fitting(grads, params, state.mu, weight_decay, inplace)
        numbers, after = begun(state)
        rows, rebuild = localized(
            *zipped(state.mu, state.nu, grads, params if weight_decay else grads)
        )
        return ended(base.trees_of(_step(numbers, rows), 3, rebuild), after)

    def under_masks(
        grads: Tree, state: AdamState, params: Tree, masks: Tree
    ) -> tuple[Tree, AdamState] | None:
        given = params, masks, grads, (state.mu, state.nu)
        if constants([state.count]) is None:
            old = state.count, state.decay1, state.decay2
            made = base.by_backend(
                "adam", lr, old, given, betas, eps, weight_decay, decoupled
            )
            return None if made is None else ended(*made)
        numbers, after = begun(state)
        if not _known(numbers):
            return None
        kernel = partial(_in_masked_blocks, numbers)
        step = partial(_step, numbers)
        return ended(base.under_masks_in_blocks(given, kernel, step), after)

    return Optimizer(init, update, under_masks)


# ---- one pass over memory ------------------------------------------------------------


class AdamNumbers(NamedTuple):
    """The numbers of one step of Adam; tensors are 0-d float64 and may be batched.

    `size` and `least` are the rate and eps with both bias corrections in them: section
    2 of the paper, last paragraph. Times the param, `decay` is added to the gradient,
    and `shrink` taken from the update.
    """

    size: Tensor
    least: Tensor
    beta1: float
    beta2: float
    decay: float = 0.0
    shrink: Tensor | None = None


def _step(numbers: AdamNumbers, rows: Sequence[Row]) -> list[Row]:
    """The update of each leaf: a row is its two moments, its gradient and its param.

    Half-precision leaves are computed in float32 and rounded once.
    """
    plain = _known(numbers)

    def add(blocks: list[blockwise.Row], *row: Tensor) -> list[Tensor] | None:
        return (
            blockwise.add_row(blocks, *row, results=3, least=1, over=(0, 1))
            if plain
            else None
        )

    def others(left: Sequence[Row]) -> list[Row]:
        return lists.each(partial(_in_torch, numbers), *zip(*left, strict=True))

    return base.in_blocks(rows, add, partial(_in_blocks, numbers, -1), others)


def _known(numbers: AdamNumbers) -> bool:
    return (
        constants(
            [x for x in (numbers.size, numbers.least, numbers.shrink) if x is not None]
        )
        is not None
    )


def _in_torch(numbers: AdamNumbers, m: Tensor, v: Tensor, g: Tensor, p: Tensor) -> Row:
    dtype = g.dtype
    (m, v, g) = (wide(x) for x in (m, v, g))
    if numbers.decay:
        g = g + numbers.decay * wide(p)
    m = m + (g - m) * (1 - numbers.beta1)
    v = v * numbers.beta2 + g * g * (1 - numbers.beta2)
    update = -base.scalar_like(numbers.size, m) * (
        m / (sqrt(v) + base.scalar_like(numbers.least, v))
    )
    if numbers.shrink is not None:
        update = update - base.scalar_like(numbers.shrink, update) * wide(p)
    return update.to(dtype), m.to(dtype), v.to(dtype)


def _in_blocks(
    numbers: AdamNumbers, sign: int, blocks: Iterable[blockwise.Row]
) -> None:
    # The operations of `_in_torch` one by one: numpy rounds each as torch does, square
    # roots of float32 too. Moments may be written over the old ones. The update has
    # this sign: -1 to add it to the param, 1 to take it away.
    f = np.float32
    least = f(numbers.least.item())
    shrink = None if numbers.shrink is None else -f(numbers.shrink.item())
    # Where the two parts of an update with a decay cancel it is +0.0: so it is made
    # first, and turned then.
    size = f(numbers.size.item()) * (sign if shrink is None else -1)
    part1 = f(1 - numbers.beta1)
    part2 = f(1 - numbers.beta2)
    beta2 = f(numbers.beta2)
    room = np.empty(BLOCK, f)
    for m, v, g, p, update, mu, nu in blocks:
        extra = room[: g.size]
        if numbers.decay:
            g = np.add(g, np.multiply(p, f(numbers.decay), out=extra), out=extra)
        np.subtract(g, m, out=update)
        np.multiply(update, part1, out=update)
        np.add(m, update, out=mu)
        np.multiply(g, g, out=update)
        np.multiply(update, part2, out=update)
        np.multiply(v, beta2, out=nu)
        np.add(nu, update, out=nu)
        np.sqrt(nu, out=update)
        np.add(update, least, out=update)
        np.divide(mu, update, out=update)
        np.multiply(update, size, out=update)
        if shrink is not None:
            np.add(update, np.multiply(p, shrink, out=extra), out=update)
            if sign > 0:
                np.negative(update, out=update)


def _in_masked_blocks(numbers: AdamNumbers, blocks: Iterable[blockwise.Row]) -> None:
    buffers = [np.empty(BLOCK, np.float32) for _ in range(3)]

    def bare() -> Iterable[blockwise.Row]:
        # Each block with its gradient masked. When the next block is asked for, this
        # one has its update.
        for mask, m, v, gradient, p, new, mu, nu in blocks:
            g, update, wide = (x[: p.size] for x in buffers)
            leafwise.zero_block(mask, gradient, g, wide)
            yield m, v, g, p, update, mu, nu
            leafwise.descend_block(wide, p, update, new)

    _in_blocks(numbers, 1, bare())
