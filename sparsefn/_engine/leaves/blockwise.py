"""Rows of flat arrays, for passes over the memory of leaves in blocks.

A pass is made of a row for each leaf, with the flat memory of tensors and of results,
and a kernel. Kernels get blocks that stay in a core's cache. A result may take the
memory of a tensor that is given away (`donation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves.buffers import BLOCK, run_jobs
from sparsefn._engine.leaves.donation import claim
from sparsefn._engine.transforms import Array, constants

SMALL = 1 << 12  # fewer elements are not worth leaving torch for

Row = tuple[Array, ...]


def flat_memory(*tensors: Tensor, least: int | None = None) -> Row | None:
    """The flat memory of contiguous tensors of one shape.

    It is None unless all of it may be read past torch.

    >>> from sparsefn._engine.leaves import blockwise
    >>> blockwise.flat_memory(torch.zeros(64, 64), torch.ones(64, 64))[1].shape
    (4096,)

    None for tensors of fewer than `least` elements (`SMALL` by default), for tensors
    whose gradient is wanted, and where a transform, a trace or a device hides the
    memory. bfloat16 comes as int16 words.
    """
    shape = tensors[0].shape
    if shape.numel() < (SMALL if least is None else least):
        return None
    if not all(x.shape == shape and x.is_contiguous() for x in tensors):
        return None
    found = constants(tensors)
    return None if found is None else tuple(x.reshape(-1) for x in found)


def append_row(
    rows: list[Row],
    flat: Row,
    tensors: Sequence[Tensor],
    results: int,
    overwrites: Sequence[int] = (),
) -> list[Tensor]:
    """Append memory that `flat_memory` found, or a view of it, and the memory of new
    tensors; return these tensors.

    >>> from sparsefn._engine.leaves import blockwise
    >>> rows, x = [], torch.ones(2)
    >>> (
    ...     blockwise.append_row(rows, blockwise.flat_memory(x, least=1), [x], 1)[
    ...         0
    ...     ].shape,
    ...     len(rows[0]),
    ... )
    (torch.Size([2]), 2)

    The new tensors have the shape and dtype of the last one. `overwrites` names a
    tensor for each of the last results, whose memory that result takes if it is given
    away.
    """
    # it may be the first to be taken
    shape = tensors[-1].shape
    dtype = tensors[-1].dtype
    made = [_fresh(flat[-1], shape, dtype) for _ in range(results - len(overwrites))]
    for i in overwrites:
        taken = claim(tensors[i])
        made.append(
            _fresh(flat[-1], shape, dtype) if taken is None else (taken, flat[i])
        )
    rows.append((*flat, *(memory for _, memory in made)))
    return [new for new, _ in made]


def _fresh(like: Array, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Array]:
    # A new CPU tensor, and its memory, laid out as the array is. What torch makes may
    # be wrapped by a transform, and may lie on another device.
    memory = np.empty(like.shape, like.dtype)
    made = torch.from_numpy(memory)
    return (made if made.dtype == dtype else made.view(dtype)).reshape(shape), memory


def _block(row: Row, start: int) -> Row:
    return tuple(x[start : start + BLOCK] for x in row)


def run_blocks(kernel: Callable[[Iterable[Row]], object], rows: Iterable[Row]) -> None:
    """Hand the blocks of all rows of flat arrays to a kernel, to one on each thread
    where that is worth it.

    >>> import numpy as np
    >>> from sparsefn._engine.leaves import blockwise
    >>> def double(blocks):
    ...     for x, out in blocks:
    ...         np.add(x, x, out=out)
    >>> x, out = np.ones(3), np.empty(3)
    >>> blockwise.run_blocks(double, [(x, out)])
    >>> out
    array([2., 2., 2.])

    The arrays of a row have one length, blocks at most `memory.BLOCK`. A kernel gets
    all blocks of a thread, so that it makes its temporaries once. A result that was
    made with `overwrites` may be the memory of its input: the kernel does not read that
    input after it has written the result.
    """
    listed = list(rows)
    blocks = [
        _block(row, start) for row in listed for start in range(0, row[0].size, BLOCK)
    ]
    if not blocks:  # nor anything to trace
        return
    threads = min(torch.get_num_threads(), len(blocks))
    if threads > 1:
        run_jobs(
            kernel,
            [blocks[first::threads] for first in range(threads)],
            sum(row[0].size for row in listed),
        )
        return
    with np.errstate(all="ignore"):
        kernel(blocks)
