"""Steps of SGD and Adam in one pass over memory: the CPU's backend of
`_engine/backends.py`.

It takes float32 leaves whose memory it may read. numpy rounds each operation as torch
does, square roots of float32 too. A result may be written over its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import blockwise, lists
from sparsefn._engine.leaves.buffers import BLOCK
from sparsefn._engine.leaves.donation import saves_memory
from sparsefn._engine.transforms import Array, constants

Row = tuple[Tensor, ...]
Blocks = Iterable[blockwise.Row]
# of each row, None for a row that the caller steps
Results = list[Sequence[Tensor] | None]
_TAKEN = {torch.float32, torch.bool}


def sgd_step(
    rows: Sequence[Row],
    numbers: Row,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    clear: bool,
) -> tuple[Results, Tensor] | None:
    """A step of SGD under masks, as `optim/sgd.py` has it.

    >>> from sparsefn._engine.leaves import steps
    >>> p, mask = torch.ones(3), torch.tensor([True, True, False])
    >>> numbers = torch.tensor(0), torch.tensor(0.5, dtype=torch.float64)
    >>> rows, count = steps.sgd_step([(p, mask, p)], numbers, 0.0, False, 0.0, False)
    >>> rows[0][0], count
    (tensor([0.5000, 0.5000, 1.0000]), tensor(1))
    """
    if constants(numbers) is None:
        return None
    count, rate = numbers

    def kernel(blocks: Blocks) -> None:
        size = np.float32(rate.item())
        keep = np.float32(momentum)
        decay = np.float32(weight_decay)
        buffers = [np.empty(BLOCK, np.float32) for _ in range(3)]
        for p, mask, gradient, *row in blocks:
            g, extra, wide = (x[: p.size] for x in buffers)
            new = row[1] if momentum else row[0]
            # nothing remembers the gradient off the mask
            if not (momentum or weight_decay):
                _widen(mask, wide)
                _descend(wide, p, np.multiply(gradient, size, out=extra), new)
                continue
            _zero(mask, gradient, g, wide)
            if weight_decay:
                np.add(g, np.multiply(p, decay, out=extra), out=g)
            if momentum:
                old, _, buffer = row
                np.add(np.multiply(old, keep, out=buffer), g, out=buffer)
                if nesterov:
                    np.add(g, np.multiply(buffer, keep, out=extra), out=g)
                else:
                    g = buffer
            _descend(wide, p, np.multiply(g, size, out=extra), new)
            if momentum and clear:
                _cover(wide, buffer, buffer)

    overwrites = (0, 3) if momentum else (0,)
    return _results(rows, len(overwrites), overwrites, kernel), count + 1


def adam_step(
    rows: Sequence[Row],
    numbers: Row,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    clear: bool,
) -> tuple[Results, Row] | None:
    """A step of Adam under masks, as `optim/adam.py` has it."""
    if constants(numbers) is None:
        return None
    step, after = _adam_numbers(numbers, betas, eps, weight_decay, decoupled)

    def kernel(blocks: Blocks) -> None:
        buffers = [np.empty(BLOCK, np.float32) for _ in range(3)]

        def masked() -> Blocks:
            # Each block with its gradient masked. When the next block is asked for,
            # this one has its update and its moments.
            for p, mask, gradient, m, v, new, mu, nu in blocks:
                g, update, wide = (x[: p.size] for x in buffers)
                _zero(mask, gradient, g, wide)
                yield m, v, g, p, update, mu, nu
                _descend(wide, p, update, new)
                if clear:
                    _cover(wide, mu, mu)
                    _cover(wide, nu, nu)

        write_adam(step, 1, masked())

    return _results(rows, 3, (0, 3, 4), kernel), after


def adam_updates(
    rows: Sequence[Row],
    numbers: Row,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Results, Row] | None:
    """The updates of Adam and its new moments: a row is the two moments, the gradient
    and the param.
    """
    if constants(numbers) is None:
        return None
    step, after = _adam_numbers(numbers, betas, eps, weight_decay, decoupled)
    return _results(rows, 3, (0, 1), partial(write_adam, step, -1)), after


class _AdamNumbers(NamedTuple):
    # The numbers of a step: see the formula in `optim/adam.py`.
    size: float
    least: float
    betas: tuple[float, float]
    decay: float
    shrink: float | None


def _adam_numbers(
    numbers: Row,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[_AdamNumbers, Row]:
    # Beside it the count and the powers of the betas after the step.
    count, decay1, decay2, rate = numbers
    decay1 = decay1 * betas[0]
    decay2 = decay2 * betas[1]
    scale = math.sqrt(1 - decay2.item())
    step = _AdamNumbers(
        size=rate.item() * scale / (1 - decay1.item()),
        least=eps * scale,
        betas=betas,
        decay=0.0 if decoupled else weight_decay,
        shrink=rate.item() * weight_decay if decoupled and weight_decay else None,
    )
    return step, (count + 1, decay1, decay2)


def write_adam(step: _AdamNumbers, sign: int, blocks: Blocks) -> None:
    """Write the update and the moments of each block; the update has the sign -1 to add
    it to the param, 1 to take it away.
    """
    f = np.float32
    least = f(step.least)
    decay = f(step.decay)
    shrink = None if step.shrink is None else f(-step.shrink)
    # Where the two parts of an update with a decay cancel it is +0.0: so it is made
    # first, and turned then.
    size = f(step.size) * (sign if shrink is None else -1)
    part1, part2 = (f(1 - beta) for beta in step.betas)
    beta2 = f(step.betas[1])
    room = np.empty(BLOCK, f)
    for m, v, g, p, update, mu, nu in blocks:
        extra = room[: g.size]
        if step.decay:
            g = np.add(g, np.multiply(p, decay, out=extra), out=extra)
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


# ---- rows and blocks -----------------------------------------------------------------


def _results(
    rows: Sequence[Row],
    n: int,
    overwrites: Sequence[int],
    kernel: Callable[[Blocks], None],
) -> Results:
    # The n results of each row; memory that is given away is taken from these tensors.
    blocks: list[blockwise.Row] = []
    results: Results = [None] * len(rows)
    taken = overwrites if saves_memory() else ()
    small: list[tuple[lists.Joined, list[Tensor]]] = []
    left = set(range(len(rows)))
    if not taken and len(rows) >= lists.FEWEST:
        for joined in lists.joined_rows(list(map(_with_whole_mask, rows))):
            flat = _memory(joined.row)
            if flat is not None:
                made = blockwise.append_row(blocks, flat, joined.row, n)
                small.append((joined, made))
                left -= {*joined.places}
    for i in sorted(left):
        flat = _memory(rows[i])
        if flat is not None:
            results[i] = blockwise.append_row(blocks, flat, rows[i], n, taken)
    if blocks:
        blockwise.run_blocks(kernel, blocks)
    for joined, made in small:
        for i, of_leaf in zip(joined.places, joined.split(made), strict=True):
            results[i] = of_leaf
    return results


# The second tensor of a row is its mask, or in `adam_updates` the second moment. The
# mask of a dense leaf is one flag.


def _with_whole_mask(row: Row) -> Row:
    if row[1].ndim or row[1].dtype != torch.bool:
        return row
    return (row[0], row[1].expand(row[0].shape), *row[2:])


def _memory(row: Row) -> blockwise.Row | None:
    if any(x.dtype not in _TAKEN for x in row):
        return None
    if row[1].ndim or row[1].dtype != torch.bool:
        return blockwise.flat_memory(*row, least=1)
    flat = blockwise.flat_memory(row[0], *row[2:], least=1)
    if flat is None:
        return None
    return (flat[0], np.broadcast_to(np.True_, flat[0].shape), *flat[1:])


def _zero(mask: Array, floats: Array, out: Array, wide: Array) -> None:
    # The numbers on a mask, and +0.0 off it; `wide` becomes the mask.
    _widen(mask, wide)
    _cover(wide, floats, out)


def _widen(mask: Array, wide: Array) -> None:
    # The mask as integers of a float's width.
    np.copyto(wide.view(np.int32), mask.view(np.int8))


def _descend(wide: Array, p: Array, update: Array, out: Array) -> None:
    # The param less its update on a mask that was widened, the param off it. The update
    # is overwritten, and `out` may be the param.
    _cover(wide, update, update)
    # +0.0 taken from a float changes none; added, it would turn -0.0 into +0.0
    np.subtract(p, update, out=out)


def _cover(wide: Array, floats: Array, out: Array) -> None:
    np.multiply(wide.view(np.int32), floats.view(np.int32), out=out.view(np.int32))
