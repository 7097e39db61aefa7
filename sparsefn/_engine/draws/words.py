"""Threefry-2x32-20 in numpy, for keys in CPU memory, block by block in buffers that
stay in cache; and in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.processes import Extent
from sparsefn._engine.torch_limits import computed_once
from sparsefn._engine.transforms import Array

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
MASK32 = 0xFFFFFFFF
_PIECE = 1 << 12  # places of a box that are worked out at a time
# a ufunc takes an array sooner than a number
_SHIFTS = [np.array(r, np.uint32) for r in range(33)]

Place: TypeAlias = tuple[slice, slice]
Rows: TypeAlias = tuple[Array, Array | Extent | None, tuple[int, ...]]


def pair(k0: int, k1: int, high: int, low: int) -> tuple[int, int]:
    """The two words of one block, from ints to ints.

    >>> from sparsefn._engine.draws import words
    >>> [hex(word) for word in words.pair(0, 0, 0, 0)]
    ['0x6b200159', '0x99ba4efe']

    All are in [0, 2^32). For one block this is ten times as fast as arrays.
    """
    schedule = (k0, k1, k0 ^ k1 ^ PARITY)
    x0 = (high + k0) & MASK32
    x1 = (low + k1) & MASK32
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = (x0 + x1) & MASK32
            x1 = ((x1 << r | x1 >> (32 - r)) & MASK32) ^ x0
        x0 = (x0 + schedule[(i + 1) % 3]) & MASK32
        x1 = (x1 + schedule[(i + 2) % 3] + i + 1) & MASK32
    return x0, x1


def rounds(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The words of counters under keys, as int32 tensors that broadcast.

    >>> from sparsefn._engine.draws import words
    >>> [
    ...     word.item() % 2**32
    ...     for word in words.rounds(*[torch.zeros(1, dtype=torch.int32)] * 4)
    ... ]
    [1797259609, 2579123966]
    """
    # int32 wraps around like uint32, but its right shift copies the sign, hence the
    # mask. To the compiler a product is faster than a left shift, which it guards.
    compiled = is_compiling()
    schedule = (k0, k1, k0 ^ k1 ^ PARITY)
    x0 = x0 + k0
    x1 = x1 + k1
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = x0 + x1
            upper = (x1 >> (32 - r)) & ((1 << r) - 1)
            x1 = torch.add(upper, x1, alpha=1 << r) ^ x0
            if compiled:
                x0 = computed_once(x0)
                x1 = computed_once(x1)
        x0 = x0 + schedule[(i + 1) % 3]
        x1 = x1 + (schedule[(i + 2) % 3] + (i + 1))
    return x0, x1


def rows(keys: Array, index: Array | None) -> Rows:
    """Keys (*K, 2) as (rows, 2), indices (*I, n) as (rows or 1, n), and the batch that
    rows stand for.

    >>> import numpy as np
    >>> from sparsefn._engine.draws import words
    >>> keys, index, batch = words.rows(np.zeros((2, 3, 2), np.int64), np.arange(4))
    >>> keys.shape, index.shape, batch
    ((6, 2), (1, 4), (2, 3))
    """
    if index is None:
        return keys.reshape(-1, 2), None, keys.shape[:-1]
    if index.ndim == 1:
        return keys.reshape(-1, 2), index[None], keys.shape[:-1]
    batch = np.broadcast_shapes(keys.shape[:-1], index.shape[:-1])
    count = math.prod(batch)
    n = index.shape[-1]
    all_keys = np.broadcast_to(keys, (*batch, 2))
    all_indices = np.broadcast_to(index, (*batch, n))
    return all_keys.reshape(count, 2), all_indices.reshape(count, n), batch


def words(
    keys: Array,
    index: Array | Extent | None,
    n: int,
    use: Callable[[Place, Array, Array], None],
    second: bool,
) -> None:
    """Give the words of every block to `use`, with the rows and columns that they
    belong to.

    >>> import numpy as np
    >>> from sparsefn._engine.draws import words
    >>> words.words(
    ...     np.zeros((1, 2), np.int64),
    ...     None,
    ...     1,
    ...     lambda place, x0, x1: print(x0, x1),
    ...     True,
    ... )
    [[1797259609]] [[2579123966]]

    `keys` are int64 (rows, 2), `index` int64 (rows or 1, n), an Extent for its n
    places, or None for 0..n-1. The words are uint32 of the place's shape, in buffers
    that are reused: `use` may write to them, and must not keep them. It is called from
    several threads. Without `second` the other words are left unfinished.
    """
    count = len(keys)
    k0 = keys[:, :1].astype(np.uint32)
    k1 = keys[:, 1:].astype(np.uint32)
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    added = []
    for i in range(5):
        to_a = schedule[(i + 1) % 3]
        to_b = schedule[(i + 2) % 3] + np.uint32(i + 1)
        added.append((to_a, to_b))
    width = max(1, min(n, BLOCK))
    height = max(1, min(count, BLOCK // max(n, 1)))
    places = []
    for row in range(0, count, height):
        down = slice(row, min(row + height, count))
        for column in range(0, n, width):
            across = slice(column, min(column + width, n))
            places.append((down, across))

    def run(share: list[Place]) -> None:
        buffers = [np.empty(width * height, np.uint32) for _ in range(3)]
        counter = np.arange(width if index is None else 0, dtype=np.uint32)
        for place in share:
            down, across = place
            shape = (down.stop - down.start, across.stop - across.start)
            size = shape[0] * shape[1]
            a, b, c = (buffer[:size].reshape(shape) for buffer in buffers)
            high: Array
            # a block never crosses a multiple of 2^32, as its size divides that
            if index is None:
                first = np.uint32(across.start & MASK32)
                np.add(counter[: shape[1]], k1[down] + first, b)
                high = k0[down] + np.uint32(across.start >> 32)
            elif isinstance(index, Extent):
                _write_places(index, across, b, c)
                np.add(b, k1[down], b)
                high = np.add(c, k0[down], c)
            else:
                own_rows = down if len(index) > 1 else slice(None)
                part = index[own_rows, across]
                np.add(part.astype(np.uint32), k1[down], b)
                high = (part >> 32).astype(np.uint32) + k0[down]
            own_added = [(to_a[down], to_b[down]) for to_a, to_b in added]
            _rounds(high, own_added, a, b, c, second)
            use(place, a, b)

    threads = max(1, min(len(places), torch.get_num_threads()))
    bounds = [len(places) * i // threads for i in range(threads + 1)]
    shares = [places[start:stop] for start, stop in pairwise(bounds)]
    run_jobs(run, shares, count * n)


def _write_places(extent: Extent, across: slice, low: Array, high: Array) -> None:
    # A few places at a time: all of a block's, as int64 and with what finds them, are
    # larger than the draws.
    narrow = extent.numel < 1 << 32
    dtype = np.uint32 if narrow else np.int64
    high[...] = 0
    for start in range(across.start, across.stop, _PIECE):
        stop = min(start + _PIECE, across.stop)
        here = np.s_[:, start - across.start : stop - across.start]
        places = extent.places(np.arange(start, stop, dtype=dtype))
        low[here] = places.astype(np.uint32, copy=False)
        if not narrow:
            high[here] = places >> 32


def _rounds(
    high: Array,
    added: list[tuple[Array, Array]],
    a: Array,
    b: Array,
    c: Array,
    second: bool,
) -> None:
    # The key is in `high` and in `b` already; `a` has no values yet, and `c` is scratch
    # memory.
    np.add(b, high, a)
    for i, (to_a, to_b) in enumerate(added):
        for j, r in enumerate(ROTATIONS[i % 2]):
            if i or j:
                np.add(a, b, a)
            if i == 4 and j == 3 and not second:
                break
            np.right_shift(b, _SHIFTS[32 - r], c)
            np.left_shift(b, _SHIFTS[r], b)
            np.bitwise_or(b, c, b)
            np.bitwise_xor(b, a, b)
        np.add(a, to_a, a)
        np.add(b, to_b, b)
