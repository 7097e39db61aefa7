"""Steps of optimizers under masks on a GPU: all tensors in one launch, each entry read
and written once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import lists
from sparsefn._engine.transforms import differentiated, transformed
from sparsefn_kernels.device_tables import on, write
from sparsefn_kernels.source import step as source
from sparsefn_kernels.tables import Column, Stepped, addresses, starts, steps

# a param, its mask, its gradient and its moments
Rows: TypeAlias = Sequence[tuple[Tensor, ...]]

_BLOCK = 1024


def takes(rows: Rows, numbers: Sequence[Tensor]) -> bool:
    """Whether a kernel takes rows of tensors, and the numbers of the step, a count and
    float64 ones, all 0-d.

    It takes float32 that lies alike in each row, with masks of the same shape or 0-d
    ones, on one device. Where there are others among them, or a gradient is wanted, it
    takes none.
    """
    if not rows or transformed():
        return False
    device = numbers[0].device
    params, masks, grads, *moments = map(list, zip(*rows, strict=True))
    if not any(map(Tensor.numel, params)):
        return False
    floats = [x for column in (params, grads, *moments) for x in column]
    if torch.is_grad_enabled() and differentiated(*numbers, *floats):
        return False
    count, *others = numbers
    if count.dtype != torch.int64 or any(x.dtype != torch.float64 for x in others):
        return False
    if not all(x.device == device and not x.ndim for x in numbers):
        return False
    sparse = [i for i, mask in enumerate(masks) if mask.ndim]
    own_masks = [masks[i] for i in sparse]
    dense = all(map(Tensor.is_contiguous, params))
    return (
        {x.dtype for x in floats} == {torch.float32}
        and {x.dtype for x in masks} == {torch.bool}
        and {x.device for x in (*floats, *own_masks)} == {device}
        and (dense or all(lists.alike([p]) for p in params))
        and _lie_alike([params[i] for i in sparse], own_masks)
        and all(_lie_alike(params, column) for column in (grads, *moments))
    )


def _lie_alike(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    # Whether the tensors of each pair have one shape and the same strides.
    shapes = [x.shape for x in ones]
    strides = list(map(Tensor.stride, ones))
    return shapes == [x.shape for x in others] and strides == list(
        map(Tensor.stride, others)
    )


def adam(
    rows: Rows,
    numbers: Sequence[Tensor],
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decoupled: bool,
    clear: bool,
) -> tuple[list[tuple[Tensor, ...]], list[Tensor]] | None:
    """New params and moments of a step of Adam, and the new count and powers; None for
    rows that it does not take.

    `numbers` are the count, the powers of the betas and the rate; with `clear`, moments
    are +0.0 off the masks.
    """
    if not takes(rows, numbers):
        return None
    params, masks, grads, first, second = map(list, zip(*rows, strict=True))
    how = (2 if decoupled else 1) if decay else 0
    made = _adam(
        params,
        _sparse(masks),
        grads,
        first,
        second,
        list(numbers),
        [*betas, eps, decay],
        how,
        clear,
    )
    n = len(params)
    return list(zip(made[:n], made[n : 2 * n], made[2 * n : 3 * n], strict=True)), made[
        3 * n :
    ]


def sgd(
    rows: Rows,
    numbers: Sequence[Tensor],
    momentum: float,
    nesterov: bool,
    decay: float,
    clear: bool,
) -> tuple[list[tuple[Tensor, ...]], Tensor] | None:
    """New params and momenta of a step of SGD, and the new count; without momentum the
    params alone.

    `numbers` are the count and the rate; with `clear`, momenta are +0.0 off the masks.
    """
    if not takes(rows, numbers):
        return None
    params, masks, grads, *first = map(list, zip(*rows, strict=True))
    moments = first[0] if momentum else []
    made = _sgd(
        params,
        _sparse(masks),
        grads,
        moments,
        *numbers,
        [momentum, decay],
        nesterov,
        clear,
    )
    *tensors, new_count = made
    n = len(params)
    return [tuple(tensors[i::n]) for i in range(n)], new_count


def _sparse(masks: Sequence[Tensor]) -> list[Tensor | None]:
    return [mask if mask.ndim else None for mask in masks]


@torch.library.custom_op("sparsefn_kernels::adam_under_masks", mutates_args=())
def _adam(
    params: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    numbers: Sequence[Tensor],
    constants: Sequence[float],
    how: int,
    clear: bool,
) -> list[Tensor]:
    device = params[0].device
    outs = _like(params, first, second)
    count, decay1, decay2, rate = numbers
    new = _like([count, decay1, decay2])
    with on(device):
        table, chunks, aligned = _table(params, masks, grads, [first, second], outs)
        source.adam[(chunks,)](
            table,
            len(params),
            count,
            decay1,
            decay2,
            rate,
            *new,
            *map(_word, constants),
            DECAY=how,
            CLEAR=clear,
            ALIGNED=aligned,
            STEPS=steps(len(params)),
            B=_BLOCK,
            enable_fp_fusion=False,
        )
    return [*outs, *new]


@_adam.register_fake
def _(
    params: Sequence[Tensor],
    masks: object,
    grads: object,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    numbers: Sequence[Tensor],
    *rest: object,
) -> list[Tensor]:
    return _like(params, first, second, numbers[:3])


@torch.library.custom_op("sparsefn_kernels::sgd_under_masks", mutates_args=())
def _sgd(
    params: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    count: Tensor,
    rate: Tensor,
    constants: Sequence[float],
    nesterov: bool,
    clear: bool,
) -> list[Tensor]:
    device = params[0].device
    outs = _like(params, first)
    (new_count,) = _like([count])
    momentum, decay = constants
    with on(device):
        table, chunks, aligned = _table(
            params, masks, grads, [first] if first else [], outs
        )
        source.sgd[(chunks,)](
            table,
            len(params),
            count,
            rate,
            new_count,
            _word(momentum),
            _word(decay),
            DECAY=decay != 0,
            MOMENTUM=momentum != 0,
            NESTEROV=nesterov,
            CLEAR=clear,
            ALIGNED=aligned,
            STEPS=steps(len(params)),
            B=_BLOCK,
            enable_fp_fusion=False,
        )
    return [*outs, new_count]


@_sgd.register_fake
def _(
    params: Sequence[Tensor],
    masks: object,
    grads: object,
    first: Sequence[Tensor],
    count: Tensor,
    *rest: object,
) -> list[Tensor]:
    return _like(params, first, [count])


def _like(*lists: Sequence[Tensor]) -> list[Tensor]:
    return [x for some in lists for x in map(torch.empty_like, some)]


def _word(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _table(
    params: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
) -> tuple[Tensor, int, bool]:
    # The table, the number of chunks, and whether all memory starts at a multiple of 16
    # bytes.
    n = len(params)
    sizes = np.fromiter(map(Tensor.numel, params), np.int64, n)
    chunks = -(-sizes // _BLOCK)
    old = [addresses(some) for some in (params, masks, grads, *moments)]
    new = [addresses(outs[i : i + n]) for i in range(0, len(outs), n)]
    columns = [*_filled(old, 5), *_filled(new, 3), sizes, starts(chunks)]
    rows = np.stack(Stepped._make(columns), 1)
    aligned = not (rows[:, :-2] % 16).any()
    return write(rows, params[0].device), int(chunks.sum()), aligned


def _filled(columns: Sequence[Column], n: int) -> list[Column]:
    # Zeros are the addresses of what there is not.
    absent = np.zeros_like(columns[0])
    return [*columns, *[absent] * (n - len(columns))]
