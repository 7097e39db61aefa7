"""Passes over the leaves of a tree in blocks: the masking in a training step, at the speed of memory.

`torch.where` reads a mask one bool at a time. Here the mask is widened to integers of a float's width, 0 or 1, and
multiplied with the float's bits: the product is the float or +0.0, for NaN, inf and -0.0, too. Temporaries are blocks
that are reused; a fresh tensor of the size of a leaf costs more than the arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.donation import take
from sparsefn.engine.memory import BLOCK, each
from sparsefn.engine.transforms import Array, constants

_SMALL = 1 << 12  # fewer elements are not worth leaving torch for
_WORDS = {2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}  # by the size of a float

Row = tuple[Array, ...]


def flat_memory(*tensors: Tensor, least: int = _SMALL) -> Row | None:
    """The flat memory of contiguous tensors of one shape; None unless all of it may be read past torch.

    >>> from sparsefn.engine import leafwise
    >>> leafwise.flat_memory(torch.zeros(64, 64), torch.ones(64, 64))[1].shape
    (4096,)

    None for tensors of fewer than `least` elements, those whose gradient is wanted, and where a transform, a trace or
    a device hides them. bfloat16 comes as int16 words.
    """
    shape = tensors[0].shape
    if shape.numel() < least or not all(x.shape == shape and x.is_contiguous() for x in tensors):
        return None
    found = constants(tensors)
    return None if found is None else tuple(x.reshape(-1) for x in found)


def add_row(
    rows: list[Row], *tensors: Tensor, results: int, least: int = _SMALL, over: Sequence[int] = ()
) -> list[Tensor] | None:
    """Append the flat memory of tensors and of new ones, which are returned; None, and no row, as in `flat_memory`.

    >>> from sparsefn.engine import leafwise
    >>> rows = []
    >>> (sums,) = leafwise.add_row(rows, torch.ones(2), torch.ones(2), results=1, least=1)
    >>> a, b, out = rows[0]
    >>> out[:] = a + b
    >>> sums
    tensor([2., 2.])

    The new tensors have the shape and dtype of the last one. `over` names a tensor for each of the last results, whose
    memory that result takes if it is given away.
    """
    flat = flat_memory(*tensors, least=least)
    return None if flat is None else _append(rows, flat, tensors, results, over)


def add_masked_row(
    rows: list[Row], mask: Tensor, *tensors: Tensor, results: int, over: Sequence[int] = ()
) -> list[Tensor] | None:
    """`add_row` of a mask and tensors that it belongs to; a 0-d mask, that of a dense leaf, is True everywhere.

    >>> from sparsefn.engine import leafwise
    >>> rows = []
    >>> _ = leafwise.add_masked_row(rows, torch.tensor(True), torch.ones(64, 64), results=1)
    >>> rows[0][0]
    array([ True,  True,  True, ...,  True,  True,  True], shape=(4096,))

    `over` counts the mask as the tensor 0.
    """
    if mask.ndim:
        return add_row(rows, mask, *tensors, results=results, over=over)
    flat = flat_memory(*tensors)
    if flat is None:
        return None
    everywhere = np.broadcast_to(np.True_, flat[0].shape)  # one byte
    return _append(rows, (everywhere, *flat), (mask, *tensors), results, over)


def _append(
    rows: list[Row], flat: Row, tensors: Sequence[Tensor], results: int, over: Sequence[int] = ()
) -> list[Tensor]:
    shape, dtype = tensors[-1].shape, tensors[-1].dtype  # it may be the first to be taken
    made = [_fresh(flat[-1], shape, dtype) for _ in range(results - len(over))]
    for i in over:
        taken = take(tensors[i])
        made.append(_fresh(flat[-1], shape, dtype) if taken is None else (taken, flat[i]))
    rows.append((*flat, *(memory for _, memory in made)))
    return [new for new, _ in made]


def _fresh(like: Array, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Array]:
    # A new CPU tensor, and its memory, laid out as the array is. What torch makes may be wrapped by a transform, and
    # may lie on another device.
    memory = np.empty(like.shape, like.dtype)
    made = torch.from_numpy(memory)
    return (made if made.dtype == dtype else made.view(dtype)).reshape(shape), memory


def run(kernel: Callable[[Iterable[Row]], object], rows: Iterable[Row]) -> None:
    """Hand the blocks of all rows of flat arrays to a kernel, to one on each thread where that is worth it.

    >>> import numpy as np
    >>> from sparsefn.engine import leafwise
    >>> def double(blocks):
    ...     for x, out in blocks:
    ...         np.add(x, x, out=out)
    >>> x, out = np.ones(3), np.empty(3)
    >>> leafwise.run(double, [(x, out)])
    >>> out
    array([2., 2., 2.])

    The arrays of a row have one length, blocks at most `memory.BLOCK`. A kernel gets all blocks of a thread, so that it
    makes its temporaries once. An array may be in a row twice, as input and as result: the kernel then writes to other
    memory, and a block is copied when the kernel asks for the next one.
    """
    listed = list(rows)
    blocks: list[tuple[Row, Sequence[int]]] = []
    for row in listed:
        twice = [i for i, x in enumerate(row) if any(x is other for other in row[:i])]
        blocks += [(tuple(x[at : at + BLOCK] for x in row), twice) for at in range(0, row[0].size, BLOCK)]
    if not blocks:  # nor anything to trace
        return
    threads = min(torch.get_num_threads(), len(blocks))
    if threads > 1:
        parts = [_staged(blocks[first::threads]) for first in range(threads)]
        each(kernel, parts, sum(row[0].size for row in listed))
        return
    with np.errstate(all="ignore"):
        kernel(_staged(blocks))


def _staged(blocks: Iterable[tuple[Row, Sequence[int]]]) -> Iterator[Row]:
    # Blocks whose results are written beside the inputs that they replace.
    spare: dict[int, Array] = {}
    for block, twice in blocks:
        if not twice:
            yield block
            continue
        staged = list(block)
        for i in twice:
            if i not in spare:
                spare[i] = np.empty(BLOCK, np.int64)
            staged[i] = spare[i].view(block[i].dtype)[: block[i].size]
        yield tuple(staged)
        for i in twice:
            block[i][:] = staged[i]


def zeroed(masks: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Each leaf with +0.0 off its mask; a leaf whose mask is 0-d as it is.

    >>> from sparsefn.engine import leafwise
    >>> leafwise.zeroed([torch.tensor([True, False])], [torch.tensor([1.0, -0.0])])
    [tensor([1., 0.])]
    """
    return _chosen(_zero, lambda mask, leaf: torch.where(mask, leaf, leaf.new_zeros(())), masks, leaves)


def either(masks: Sequence[Tensor], new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Each new leaf with the old one's values off its mask; a leaf whose mask is 0-d is the new one.

    >>> from sparsefn.engine import leafwise
    >>> leafwise.either([torch.tensor([True, False])], [torch.tensor([1.0, 2.0])], [torch.tensor([3.0, -0.0])])
    [tensor([1., -0.])]
    """
    return _chosen(_select, torch.where, masks, new, old)


def _chosen(
    kernel: Callable[[Iterable[Row]], None],
    in_torch: Callable[..., Tensor],
    masks: Sequence[Tensor],
    *trees: Sequence[Tensor],
) -> list[Tensor]:
    # The results of a kernel for masks and leaves in memory, of torch for others; the first leaf if the mask is 0-d.
    rows: list[Row] = []
    results = []
    for mask, *leaves in zip(masks, *trees, strict=True):
        if not is_sparse(mask, leaves[0]):
            results.append(leaves[0])
        elif (flat := _words(mask, *leaves)) is None:
            results.append(in_torch(mask, *leaves))
        else:
            results += _append(rows, flat, leaves, 1)
    run(kernel, rows)
    return results


def moved(masks: Sequence[Tensor], old: Sequence[Tensor], updates: Sequence[Tensor]) -> list[Tensor]:
    """`old + update` where the mask, old off it; `old + update` whole for a leaf whose mask is 0-d.

    >>> from sparsefn.engine import leafwise
    >>> leafwise.moved([torch.tensor([True, False])], [torch.tensor([1.0, 2.0])], [torch.tensor([0.5, 0.5])])
    [tensor([1.5000, 2.0000])]
    """
    rows: list[Row] = []
    results = []
    for mask, leaf, update in zip(masks, old, updates, strict=True):
        if not is_sparse(mask, leaf):
            results.append((leaf + update).to(leaf.dtype))
            continue
        summed = leaf.dtype in (torch.float32, torch.float64)  # numpy's sum of these has torch's bits
        flat = _words(mask, leaf, update) if summed else None
        if flat is None:
            results += either([mask], [(leaf + update).to(leaf.dtype)], [leaf])
        else:
            results += _append(rows, flat, (mask, leaf, update), 1, over=(1,))
    run(_move, rows)
    return results


def cleaned(masks: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """As `zeroed`, but leaves are read first, and handed back as they are if there is nothing to do.

    >>> from sparsefn.engine import leafwise
    >>> leaf = torch.zeros(64, 64)
    >>> leafwise.cleaned([torch.zeros(64, 64, dtype=torch.bool)], [leaf])[0] is leaf
    True
    """
    results = list(leaves)
    rows: list[Row] = []
    looked: list[int] = []
    for i, (mask, leaf) in enumerate(zip(masks, leaves, strict=True)):
        if not is_sparse(mask, leaf):
            continue
        flat = _words(mask, leaf)
        if flat is None:
            results[i] = torch.where(mask, leaf, leaf.new_zeros(()))
        else:
            rows.append(flat)
            looked.append(i)
    stains: list[bool] = []

    def look(blocks: Iterable[Row]) -> None:
        spare = np.empty(BLOCK, np.bool_)
        for mask, bits in blocks:
            if stains:
                return
            if _differ(mask, bits, 0, spare):
                stains.append(True)

    run(look, rows)
    if stains:
        for i, leaf in zip(looked, zeroed([masks[i] for i in looked], [leaves[i] for i in looked]), strict=True):
            results[i] = leaf
    return results


def _words(mask: Tensor, *leaves: Tensor) -> Row | None:
    # The mask as bytes and floats of one dtype as integers.
    dtype = leaves[0].dtype
    if not dtype.is_floating_point or any(leaf.dtype != dtype for leaf in leaves) or mask.dtype != torch.bool:
        return None
    flat = flat_memory(mask, *leaves)
    word = _WORDS.get(dtype.itemsize)
    if flat is None or word is None:
        return None
    return flat[0].view(np.int8), *(x.view(word) for x in flat[1:])


def _zero(blocks: Iterable[Row]) -> None:
    for mask, bits, out in blocks:
        zero_block(mask, bits, out)


def _select(blocks: Iterable[Row]) -> None:
    spare = np.empty(BLOCK, np.int64)
    for mask, new, old, out in blocks:
        _either(mask, new, old, out, spare.view(out.dtype))


def _move(blocks: Iterable[Row]) -> None:
    spare = np.empty(BLOCK, np.int64)
    for mask, old, update, out in blocks:
        kind = np.float32 if out.itemsize == 4 else np.float64
        np.add(old.view(kind), update.view(kind), out=out.view(kind))
        keep_block(mask, old, out, spare.view(out.dtype))


def zero_block(mask: Array, bits: Array, out: Array) -> None:
    """The bits on a mask of int8 zeros and ones, zeros off it.

    >>> import numpy as np
    >>> from sparsefn.engine import leafwise
    >>> out = np.empty(2, np.int32)
    >>> leafwise.zero_block(np.array([1, 0], np.int8), np.array([7, 8], np.int32), out)
    >>> out
    array([7, 0], dtype=int32)
    """
    np.copyto(out, mask)
    np.multiply(out, bits, out=out)


def keep_block(mask: Array, old: Array, new: Array, spare: Array) -> None:
    """Put the old bits back into the new ones off a mask of int8 zeros and ones.

    >>> import numpy as np
    >>> from sparsefn.engine import leafwise
    >>> new, spare = np.array([7, 8], np.int32), np.empty(2, np.int32)
    >>> leafwise.keep_block(np.array([1, 0], np.int8), np.array([1, 2], np.int32), new, spare)
    >>> new
    array([7, 2], dtype=int32)
    """
    # Of most optimizers the updates off the mask are zeros, and there is nothing to put back.
    if _differ(mask, new, old, spare.view(np.bool_)):
        _either(mask, new, old, new, spare)


def _differ(mask: Array, bits: Array, others: Array | int, spare: Array) -> bool:
    off = spare[: bits.size]
    np.not_equal(bits, others, out=off)
    return bool(np.greater(off, mask.view(np.bool_), out=off).any())


def _either(mask: Array, new: Array, old: Array, out: Array, spare: Array) -> None:
    wide = spare[: out.size]
    np.copyto(wide, mask)
    np.bitwise_xor(new, old, out=out)
    np.multiply(out, wide, out=out)
    np.bitwise_xor(out, old, out=out)


def is_sparse(mask: Tensor, leaf: Tensor) -> bool:
    """Whether a leaf is sparsified, read off shapes alone (0-d True means dense).

    >>> is_sparse(torch.tensor(True), torch.zeros(2, 2))
    False
    """
    return mask.ndim == leaf.ndim and leaf.ndim > 0


def sparse_among(masks: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[bool]:
    """Which of some leaves are sparsified.

    >>> from sparsefn.engine import leafwise
    >>> leafwise.sparse_among([torch.tensor(True), torch.tensor([True])], [torch.ones(1), torch.ones(1)])
    [False, True]
    """
    return [is_sparse(mask, leaf) for mask, leaf in zip(masks, leaves, strict=True)]
