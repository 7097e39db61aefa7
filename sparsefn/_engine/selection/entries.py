"""The entries of a competition: tensors of scores and flags, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import placed, written
from sparsefn._engine.numbers import check_float
from sparsefn._engine.processes import Extent
from sparsefn._engine.transforms import Array, See, as_numpy

Flags = TypeVar("Flags", Tensor, Array)

# how many units of a competition win
Count: TypeAlias = int | Tensor
# a count of each entry, or one tensor of all counts end to end
Counts: TypeAlias = Sequence[Count] | Tensor

# equal where the thread counts subnormal numbers as zero
TINY: Array = np.array([1e-45, 0.0], np.float32)


class Entry(NamedTuple):
    """One tensor of a competition, and which of its units compete: the units of `allow`
    that are not in `deny`.

    >>> from sparsefn._engine.selection.entries import Entry
    >>> Entry(torch.tensor([[1.0, 2.0]])).allow is None
    True

    `scores` are floats of shape (rows, units), or (rows, units, columns) where the
    units of each column compete by themselves. `allow` and `deny` are bool tensors of
    that shape; None is all of `allow` and none of `deny`. With `absolute` the scores
    are absolute values, which are not stored. With an `extent` scores are (1, units):
    the box of the whole that is on this process, and all processes of its groups select
    together. With `segments` scores are (units,): competitions of these lengths, end to
    end.
    """

    scores: Tensor
    allow: Tensor | None = None
    deny: Tensor | None = None
    absolute: bool = False
    extent: Extent | None = None
    segments: Sequence[int] | None = None


class Arrays(NamedTuple):
    """The memory of an entry, and the array that its mask is written to.

    `wide` is float32 or float64. A 16-bit tensor comes as `narrow` and is widened block
    by block.
    """

    wide: Array | None
    narrow: Tensor | None
    allow: Array | None
    deny: Array | None
    out: Array
    absolute: bool


def check(entries: Sequence[Entry]) -> None:
    """Raise TypeError for scores that are not floats.

    >>> from sparsefn._engine.selection import entries
    >>> entries.check([entries.Entry(torch.tensor([[1]]))])
    Traceback (most recent call last):
        ...
    TypeError: expected floating-point scores, got torch.int64
    """
    for entry in entries:
        check_float("scores", entry.scores)


def arrays(entries: Sequence[Entry], see: See = as_numpy) -> list[Arrays] | None:
    """The arrays of entries, with a new one for each mask.

    They are None unless all memory is visible.

    >>> from sparsefn._engine.selection import bracket
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, 2.0]))])
    >>> bracket.write_best([at], 1)
    >>> at.out
    array([False,  True])
    """
    memory = see([x for entry in entries for x in entry[:3] if x is not None])
    if memory is None:
        return None
    left = iter(memory)
    made = []
    # spelt out, as a call for few scores takes microseconds
    for scores, allow, deny, absolute, _, _ in entries:
        values = next(left)
        allowed = None if allow is None else next(left)
        denied = None if deny is None else next(left)
        out: Array = np.empty(values.shape, np.bool_)
        if scores.dtype in (torch.float16, torch.bfloat16):
            made.append(Arrays(None, scores.detach(), allowed, denied, out, absolute))
        else:
            made.append(Arrays(values, None, allowed, denied, out, absolute))
    return made


def reshaped(at: Arrays, shape: tuple[int, ...] = (-1,)) -> Arrays:
    """The arrays in another shape, or as one row; masks are written to the same memory.

    >>> from sparsefn._engine.selection import entries
    >>> entries.reshaped(
    ...     *entries.arrays([entries.Entry(torch.ones(2, 2, 1))]), (2, 2)
    ... ).out.shape
    (2, 2)
    """
    wide, narrow, allow, deny = (
        None if x is None else x.reshape(shape) for x in at[:4]
    )
    return Arrays(wide, narrow, allow, deny, at.out.reshape(shape), at.absolute)  # type: ignore[arg-type]


def eligible(allow: Flags | None, deny: Flags | None) -> Flags | None:
    """Which units compete, as one tensor or array of flags; None for all.

    >>> from sparsefn._engine.selection import entries
    >>> entries.eligible(None, torch.tensor([True, False]))
    tensor([False,  True])
    """
    if deny is None:
        return allow
    return ~deny if allow is None else allow > deny


def open_count(competitors: Sequence[Arrays]) -> int:
    """How many units compete; `out` may be overwritten.

    >>> from sparsefn._engine.selection import entries
    >>> entries.open_count(
    ...     entries.arrays([entries.Entry(torch.ones(2), torch.tensor([True, False]))])
    ... )
    1
    """
    count = 0
    for at in competitors:
        if at.allow is None:
            denied = 0 if at.deny is None else int(np.count_nonzero(at.deny))
            count += at.out.size - denied
        elif at.deny is None:
            count += int(np.count_nonzero(at.allow))
        else:
            count += int(np.count_nonzero(np.greater(at.allow, at.deny, out=at.out)))
    return count


def counts_of_rows(
    counts: Sequence[Count], rows: Sequence[int], device: torch.device
) -> Tensor:
    """The counts of all rows in one int64 tensor: each is an int, or a tensor, 0-d or
    (rows,).

    >>> from sparsefn._engine.selection import entries
    >>> entries.counts_of_rows([3, torch.tensor([1, 2])], [2, 2], torch.device("cpu"))
    tensor([3, 3, 1, 2])
    """
    one_each = max(rows, default=1) == 1
    ints = all(map(isinstance, counts, repeat(int)))
    if (device.type == "cpu" or one_each) and ints:
        listed: list[int] = []
        for count, n in zip(counts, rows, strict=True):
            listed += [count] * n  # type: ignore[list-item]
        return written(listed, device)
    known = iter(
        written(
            [count for count in counts if not isinstance(count, Tensor)], device
        ).unbind()
    )
    cells = []
    for count in counts:
        if isinstance(count, Tensor):
            cells.append(placed(count, device).to(torch.int64))
        else:
            cells.append(next(known))
    return torch.cat(
        [cell.reshape(-1).expand(n) for cell, n in zip(cells, rows, strict=True)]
    )
