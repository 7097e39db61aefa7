"""One competition's scores, flags and mask as arrays, read block by block, on one thread or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsefn.engine.memory import BLOCK, Array, See, each, visible

_THREADED = 1 << 22  # from so many scores on, one competition has several threads

Out = TypeVar("Out")


class Entry(NamedTuple):
    """One tensor of a competition, and which of its units compete: the units of `allow` that are not in `deny`.

    >>> from sparsefn.engine.selection.entries import Entry
    >>> Entry(torch.tensor([[1.0, 2.0]])).allow is None
    True

    `scores` are floats of shape (rows, units), or (rows, units, columns) where the units of each column compete by
    themselves. `allow` and `deny` are bool tensors of that shape; None is all of `allow` and none of `deny`. With
    `absolute` the scores are absolute values, which are not stored.
    """

    scores: Tensor
    allow: Tensor | None = None
    deny: Tensor | None = None
    absolute: bool = False


class Arrays(NamedTuple):
    """The memory of an entry, and the array that its mask is written to.

    `wide` is float32 or float64. A 16-bit tensor comes as `narrow` and is widened block by block.
    """

    wide: Array | None
    narrow: Tensor | None
    allow: Array | None
    deny: Array | None
    out: Array
    absolute: bool


def arrays(entry: Entry, see: See = visible) -> Arrays | None:
    """The arrays of an entry, with a new one for its mask; None unless all of its memory is visible.

    >>> from sparsefn.engine.selection import bracket, entries
    >>> at = entries.arrays(entries.Entry(torch.tensor([1.0, 2.0])))
    >>> bracket.write_best([at], 1)
    >>> at.out
    array([False,  True])
    """
    scores, allow, deny, absolute = entry
    values = see(scores)
    allowed = None if allow is None else see(allow)
    denied = None if deny is None else see(deny)
    if values is None or (allowed is None) != (allow is None) or (denied is None) != (deny is None):
        return None
    out: Array = np.empty(values.shape, np.bool_)
    if scores.dtype in (torch.float16, torch.bfloat16):
        return Arrays(None, scores.detach(), allowed, denied, out, absolute)
    return Arrays(values, None, allowed, denied, out, absolute)


def flat(at: Arrays) -> Arrays:
    """The arrays with one dimension.

    >>> from sparsefn.engine.selection import entries
    >>> entries.flat(entries.arrays(entries.Entry(torch.ones(2, 2)))).out.shape
    (4,)
    """
    return reshaped(at, (-1,))


def reshaped(at: Arrays, shape: tuple[int, ...]) -> Arrays:
    """The arrays in another shape: their mask is written where that of the given ones is.

    >>> from sparsefn.engine.selection import entries
    >>> entries.reshaped(entries.arrays(entries.Entry(torch.ones(2, 2, 1))), (2, 2)).out.shape
    (2, 2)
    """
    wide, narrow, allow, deny = (None if x is None else x.reshape(shape) for x in at[:4])
    return Arrays(wide, narrow, allow, deny, at.out.reshape(shape), at.absolute)  # type: ignore[arg-type]


def cut(at: Arrays, where: slice | int) -> Arrays:
    """Some rows of the arrays: their mask is written where that of all rows is.

    >>> from sparsefn.engine.selection import entries
    >>> entries.cut(entries.arrays(entries.Entry(torch.ones(5))), slice(None, None, 2)).out.shape
    (3,)
    """
    wide, narrow, allow, deny, out, absolute = at  # spelt out, as a call for few scores takes microseconds
    return Arrays(
        None if wide is None else wide[where],
        None if narrow is None else narrow[where],
        None if allow is None else allow[where],
        None if deny is None else deny[where],
        out[where],
        absolute,
    )


def bar(at: Arrays, start: int, stop: int, flags: Array) -> None:
    """Unset the flags of the units in a range that do not compete.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import entries
    >>> flags = np.array([True, True])
    >>> entry = entries.Entry(torch.ones(3), deny=torch.tensor([False, True, False]))
    >>> entries.bar(entries.arrays(entry), 1, 3, flags)
    >>> flags
    array([False,  True])
    """
    if at.allow is not None:
        np.bitwise_and(flags, at.allow[start:stop], out=flags)
    if at.deny is not None:
        np.greater(flags, at.deny[start:stop], out=flags)


def open_count(at: Arrays) -> int:
    """How many units compete; `out` may be overwritten.

    >>> from sparsefn.engine.selection import entries
    >>> entries.open_count(entries.arrays(entries.Entry(torch.ones(2), torch.tensor([True, False]))))
    1
    """
    if at.allow is None:
        return at.out.size - (0 if at.deny is None else int(np.count_nonzero(at.deny)))
    if at.deny is None:
        return int(np.count_nonzero(at.allow))
    return int(np.count_nonzero(np.greater(at.allow, at.deny, out=at.out)))


class Scratch:
    """Buffers for one block of scores and flags, used again for every block.

    >>> from sparsefn.engine.selection import entries
    >>> at = entries.arrays(entries.Entry(torch.tensor([-1.0, 2.0]), absolute=True))
    >>> [scores.tolist() for _, _, scores, _, _ in entries.Scratch(2, double=False).blocks(at)]
    [[1.0, 2.0]]
    """

    def __init__(self, size: int, double: bool) -> None:
        self.scores: Array = np.empty(size, np.float64 if double else np.float32)
        self.flags: Array = np.empty(size, np.bool_)

    def blocks(self, at: Arrays) -> Iterator[tuple[int, int, Array, Array, Array]]:
        """Start, end and scores of each block, its part of the mask, and flags to write to."""
        for start in range(0, at.out.size, BLOCK):
            stop = min(start + BLOCK, at.out.size)
            scores = self.read(at, slice(start, stop), self.scores[: stop - start])
            yield start, stop, scores, at.out[start:stop], self.flags[: stop - start]

    def read(self, at: Arrays, where: slice, buffer: Array) -> Array:
        """Some of the scores: a view of the memory where it holds what is wanted, else written into the buffer."""
        if at.narrow is not None:
            torch.from_numpy(buffer).copy_(at.narrow[where])
            return np.abs(buffer, out=buffer) if at.absolute else buffer
        assert at.wide is not None
        if at.absolute:
            return np.abs(at.wide[where], out=buffer)
        if at.wide.dtype != buffer.dtype:  # float32 scores in one competition with float64 scores
            buffer[...] = at.wide[where]
            return buffer
        return at.wide[where]


class Work(NamedTuple):
    """The entries of a competition in their order, in shares of which each may have a thread of its own.

    >>> from sparsefn.engine.selection import entries
    >>> listed = [entries.arrays(entries.Entry(torch.ones(n))) for n in (2, 3)]
    >>> entries.work_on(listed).run(lambda at, scratch: at.out.size)
    [2, 3]
    """

    shares: list[list[Arrays]]
    double: bool
    size: int

    @property
    def entries(self) -> list[Arrays]:
        """The entries of all shares in their order."""
        return [at for share in self.shares for at in share]

    def run(self, step: Callable[[Arrays, Scratch], Out]) -> list[Out]:
        """What a step returns for each entry, in their order."""

        def run_share(share: list[Arrays]) -> list[Out]:
            scratch = self.scratch(share)
            return [step(at, scratch) for at in share]

        return [out for outs in each(run_share, self.shares, self.size) for out in outs]

    def scratch(self, share: list[Arrays]) -> Scratch:
        """Buffers for the blocks of some entries."""
        return Scratch(min(BLOCK, max((at.out.size for at in share), default=0)), self.double)


def work_on(competitors: Sequence[Arrays]) -> Work:
    """Flat entries, divided between the threads that torch may use; up to a few million scores are for one thread.

    >>> from sparsefn.engine.selection import entries
    >>> len(entries.work_on([entries.arrays(entries.Entry(torch.ones(2)))]).shares)
    1
    """
    size = sum(at.out.size for at in competitors)
    most = max(1, -(-size // (torch.get_num_threads() if size >= _THREADED else 1)))
    shares: list[list[Arrays]] = [[]]
    left = most
    for at in competitors:
        first = 0
        while first < at.out.size:
            if not left:
                shares.append([])
                left = most
            stop = min(at.out.size, first + left)
            shares[-1].append(cut(at, slice(first, stop)))
            left -= stop - first
            first = stop
    double = any(at.wide is not None and at.wide.dtype == np.float64 for at in competitors)
    return Work(shares, double, size)
