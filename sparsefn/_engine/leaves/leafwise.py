"""Passes over the leaves of a tree in blocks: the masking in a training step.

`torch.where` reads a mask one bool at a time. Here the mask is widened to integers of a
float's width, 0 or 1, and multiplied with the float's bits: the product is the float or
+0.0, for NaN, inf and -0.0, too. Temporaries are blocks that are reused; a fresh tensor
of the size of a leaf costs more than the arithmetic on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import blockwise, lists
from sparsefn._engine.leaves.blockwise import Row, append_row, flat_memory, run_blocks
from sparsefn._engine.leaves.buffers import BLOCK
from sparsefn._engine.leaves.donation import is_donated
from sparsefn._engine.processes import any_sharded, local_tensor, sharded_like
from sparsefn._engine.torch_limits import VMAP_REINTERPRETS, reinterpreted
from sparsefn._engine.transforms import Array, differentiated

# fewer elements take torch less time than it takes to look at their memory: to choose
# between leaves, or to add, and to mask, for which torch makes a copy of the mask
_FEW = 1 << 15
_FEW_TO_MASK = 1 << 18
OnLists = TypeVar("OnLists", bound=Callable[..., list[Tensor]])

# by the size of a float
_WORDS = {2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}


_bits = Tensor.view if VMAP_REINTERPRETS else reinterpreted


def each_local(fn: OnLists) -> OnLists:
    """Let an elementwise function of lists of tensors see the local tensors of
    DTensors; results are laid out alike.

    A result is laid out as the last of its arguments, which are laid out alike or 0-d.
    Keywords are handed on.
    """

    @functools.wraps(fn)
    def on_local(*lists: Sequence[Tensor], **options: bool) -> list[Tensor]:
        if not any_sharded(lists[-1]):
            return fn(*lists, **options)
        parts = [list(map(local_tensor, tensors)) for tensors in lists]
        rows = zip(fn(*parts, **options), parts[-1], lists[-1], strict=True)
        return [x if new is old else sharded_like(new, x) for new, old, x in rows]

    return on_local  # type: ignore[return-value]


@each_local
def zeroed(
    masks: Sequence[Tensor], leaves: Sequence[Tensor], *, overwrite: bool = False
) -> list[Tensor]:
    """Each leaf with +0.0 off its mask.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leafwise.zeroed([torch.tensor([True, False])], [torch.tensor([1.0, -0.0])])
    [tensor([1., 0.])]

    A leaf whose mask is 0-d is returned unchanged. With `overwrite`, a leaf that was
    donated is zeroed in its own memory.
    """
    least = blockwise.SMALL if overwrite else _FEW_TO_MASK
    overwrites = (1,) if overwrite else ()
    return _chosen(_zero, _masked, masks, leaves, least=least, overwrites=overwrites)


def zero_(masks: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Write +0.0 off its mask into each leaf; a leaf whose mask is 0-d does not change.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leaf = torch.tensor([1.0, torch.nan])
    >>> leafwise.zero_([torch.tensor([True, False])], [leaf])
    >>> leaf
    tensor([1., 0.])

    Autograd does not see it: it is for leaves that are zero there, unless somebody
    wrote past autograd.
    """
    for mask, leaf in zip(masks, leaves, strict=True):
        if not mask.ndim:
            continue
        memory = leaf.data
        if type(memory) is not Tensor:
            memory = local_tensor(memory)
            mask = local_tensor(mask)
        if type(memory) is Tensor:
            memory.view(lists.WORDS[memory.dtype.itemsize]).mul_(mask)
        else:
            memory.copy_(lists.where(mask, memory))


def are_zeroed(
    masks: Sequence[Tensor], leaves: Sequence[Tensor], others: Sequence[Tensor]
) -> bool:
    """Whether `others` are the leaves with +0.0 off their masks, bit for bit; for plain
    tensors in CPU memory.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leafwise.are_zeroed(
    ...     [torch.tensor([True, False])],
    ...     [torch.tensor([1.0, 2.0])],
    ...     [torch.tensor([1.0, 0.0])],
    ... )
    True
    """
    rows: list[Row] = []
    for mask, leaf, other in zip(masks, leaves, others, strict=True):
        flat = None
        if is_sparse(mask, leaf) and leaf.numel() >= _FEW:
            flat = _words(mask, leaf, other)
        if flat is not None:
            rows.append(flat)
            continue
        bits = [x.view(lists.WORDS[x.dtype.itemsize]) for x in (leaf, other)]
        if not torch.equal(bits[0] * mask, bits[1]):
            return False
    differ: list[bool] = []

    def look(blocks: Iterable[Row]) -> None:
        spare = np.empty(BLOCK, np.int64)
        flags = np.empty(BLOCK, np.bool_)
        for mask, bits, others in blocks:
            wide = spare.view(bits.dtype)[: bits.size]
            np.copyto(wide, mask)
            np.multiply(wide, bits, out=wide)
            if differ or np.not_equal(wide, others, out=flags[: bits.size]).any():
                differ.append(True)
                return

    if rows:
        run_blocks(look, rows)
    return not differ


@each_local
def either(
    masks: Sequence[Tensor], new: Sequence[Tensor], old: Sequence[Tensor]
) -> list[Tensor]:
    """Each new leaf with the old one's values off its mask.

    A leaf whose mask is 0-d is the new one.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leafwise.either(
    ...     [torch.tensor([True, False])],
    ...     [torch.tensor([1.0, 2.0])],
    ...     [torch.tensor([3.0, -0.0])],
    ... )
    [tensor([1., -0.])]
    """
    return _chosen(_select, lists.where, masks, new, old)


def _chosen(
    kernel: Callable[[Iterable[Row]], None],
    formula: Callable[..., Tensor],
    masks: Sequence[Tensor],
    *trees: Sequence[Tensor],
    least: int = _FEW,
    overwrites: Sequence[int] = (),
) -> list[Tensor]:
    # The results of a kernel for masks and leaves in memory, and of a formula for other
    # leaves and leaves of fewer than `least` elements. A leaf whose mask is 0-d is
    # returned unchanged.
    rows: list[Row] = []
    results = list(trees[0])
    sparse = sparse_among(masks, trees[0])
    sizes = list(map(Tensor.numel, masks))
    in_memory: set[int] = set()
    for i, (mask, *leaves) in enumerate(zip(masks, *trees, strict=True)):
        if not sparse[i] or not mask.is_cpu or sizes[i] < least:
            continue
        flat = _words(mask, *leaves)
        if flat is not None:
            in_memory.add(i)
            taken = overwrites if is_donated(leaves[0]) else ()
            (results[i],) = append_row(rows, flat, (mask, *leaves), 1, taken)
    if rows:
        run_blocks(kernel, rows)
    left = [i for i in range(len(results)) if sparse[i] and i not in in_memory]
    if left:
        columns = [_at(left, tensors) for tensors in (masks, *trees)]
        if len(left) < lists.FEWEST and columns[0][0].is_cpu:
            made = list(map(formula, *columns))
        else:
            made = lists.foreach(formula, *columns)
        for i, leaf in zip(left, made, strict=True):
            results[i] = leaf
    return results


def _at(places: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[i] for i in places]


def _masked(mask: Any, leaf: Any) -> Any:
    # `lists.where`, in less time for the few elements of a plain CPU tensor: a product
    # of words, which has no derivative.
    if type(leaf) is not Tensor or not leaf.is_cpu or differentiated(leaf):
        return lists.where(mask, leaf)
    if not leaf.is_floating_point() or mask.dtype != torch.bool or leaf.is_neg():
        return lists.where(mask, leaf)
    return _bits(_bits(leaf, lists.WORDS[leaf.dtype.itemsize]) * mask, leaf.dtype)


@each_local
def added(
    masks: Sequence[Tensor], old: Sequence[Tensor], updates: Sequence[Tensor]
) -> list[Tensor]:
    """`old + update` where the mask, old off it.

    A leaf whose mask is 0-d is `old + update` as a whole.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leafwise.added(
    ...     [torch.tensor([True, False])],
    ...     [torch.tensor([1.0, 2.0])],
    ...     [torch.tensor([0.5, 0.5])],
    ... )
    [tensor([1.5000, 2.0000])]
    """
    rows: list[Row] = []
    results = list(old)
    sparse = sparse_among(masks, old)
    sizes = list(map(Tensor.numel, old))
    in_memory: set[int] = set()
    for i, (mask, leaf, update) in enumerate(zip(masks, old, updates, strict=True)):
        # numpy's sum of these has torch's bits
        has_bits = leaf.dtype in (torch.float32, torch.float64)
        if not has_bits or not sparse[i] or sizes[i] < _FEW:
            continue
        flat = _words(mask, leaf, update)
        if flat is not None:
            in_memory.add(i)
            (results[i],) = append_row(rows, flat, (mask, leaf, update), 1)
    if rows:
        run_blocks(_move, rows)
    left = [i for i in range(len(results)) if i not in in_memory]
    if left:
        own = _at(left, old)
        sums = lists.foreach(_summed, own, _at(left, updates))
        chosen = _chosen(_select, lists.where, _at(left, masks), sums, own)
        for i, leaf in zip(left, chosen, strict=True):
            results[i] = leaf
    return results


def _summed(leaf: Tensor, update: Tensor) -> Tensor:
    return (leaf + update).to(leaf.dtype)


@each_local
def cleaned(masks: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """As `zeroed`, but leaves are read first, and returned unchanged if there is
    nothing to do.

    A leaf that is given away is cleaned in its own memory.

    >>> from sparsefn._engine.leaves import leafwise
    >>> leaf = torch.zeros(64, 64)
    >>> leafwise.cleaned([torch.zeros(64, 64, dtype=torch.bool)], [leaf])[0] is leaf
    True
    """
    results = list(leaves)
    rows: list[Row] = []
    sparse = [i for i, one in enumerate(sparse_among(masks, leaves)) if one]
    pairs = [(masks[i], leaves[i]) for i in sparse]
    looked: set[int] = set()
    for joined in lists.joined_rows(pairs):
        flat = _words(*joined.row, least=1)
        if flat is not None:
            rows.append(flat)
            looked |= {sparse[i] for i in joined.places}
    for i in sparse:
        flat = None if i in looked else _words(masks[i], leaves[i])
        if flat is not None:
            rows.append(flat)
            looked.add(i)
    left = [i for i in sparse if i not in looked]
    stains: list[bool] = []

    def look(blocks: Iterable[Row]) -> None:
        spare = np.empty(BLOCK, np.bool_)
        for mask, bits in blocks:
            if stains:
                return
            if _differ(mask, bits, 0, spare):
                stains.append(True)

    if rows:
        run_blocks(look, rows)
    if stains:
        left = sparse
    columns = _at(left, masks), _at(left, leaves)
    clean = _chosen(_zero, _masked, *columns, least=blockwise.SMALL, overwrites=(1,))
    for i, leaf in zip(left, clean, strict=True):
        results[i] = leaf
    return results


def _words(mask: Tensor, *leaves: Tensor, least: int | None = None) -> Row | None:
    # The mask as bytes and floats of one dtype as integers.
    dtype = leaves[0].dtype
    if not mask.is_cpu or not dtype.is_floating_point or mask.dtype != torch.bool:
        return None
    if any(leaf.dtype != dtype for leaf in leaves):
        return None
    flat = flat_memory(mask, *leaves, least=least)
    word = _WORDS.get(dtype.itemsize)
    if flat is None or word is None:
        return None
    return flat[0].view(np.int8), *(x.view(word) for x in flat[1:])


def _zero(blocks: Iterable[Row]) -> None:
    spare = np.empty(BLOCK, np.int64)
    for mask, bits, out in blocks:
        wide = spare.view(out.dtype)[: out.size]
        np.copyto(wide, mask)
        np.multiply(wide, bits, out=out)


def _select(blocks: Iterable[Row]) -> None:
    spare = np.empty(BLOCK, np.int64)
    for mask, new, old, out in blocks:
        _either(mask, new, old, out, spare.view(out.dtype))


def _move(blocks: Iterable[Row]) -> None:
    spare = np.empty(BLOCK, np.int64)
    for mask, old, update, out in blocks:
        kind = np.float32 if out.itemsize == 4 else np.float64
        np.add(old.view(kind), update.view(kind), out=out.view(kind))
        # Of most optimizers the updates off the mask are zeros, and there is nothing to
        # put back.
        if _differ(mask, out, old, spare.view(np.bool_)):
            _either(mask, out, old, out, spare.view(out.dtype))


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
    """Which of some leaves are sparsified."""
    pairs = zip(masks, leaves, strict=True)
    return [mask.ndim == leaf.ndim and leaf.ndim > 0 for mask, leaf in pairs]
