"""Passes over the scores of one competition in blocks, on one thread or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from sparsefn._engine.leaves import BLOCK, run_jobs
from sparsefn._engine.selection.entries import Arrays, eligible, reshaped
from sparsefn._engine.transforms import Array

_THREADED = 1 << 22  # from this many scores on, one competition has several threads
# at most size / 32 scores are collected, or 65,536 if that is more
_CROWDED = 32
_MOST = 1 << 16

Out = TypeVar("Out")


def cut(at: Arrays, where: slice | int) -> Arrays:
    """Some rows of the arrays: their mask is part of the mask of all rows.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> block_passes.cut(
    ...     *entries.arrays([entries.Entry(torch.ones(5))]), slice(None, None, 2)
    ... ).out.shape
    (3,)
    """
    wide, narrow, allow, deny, out, absolute = (
        at  # spelt out, as a call for few scores takes microseconds
    )
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
    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> flags = np.array([True, True])
    >>> (at,) = entries.arrays(
    ...     [entries.Entry(torch.ones(3), deny=torch.tensor([False, True, False]))]
    ... )
    >>> block_passes.bar(at, 1, 3, flags)
    >>> flags
    array([False,  True])
    """
    if at.allow is not None:
        np.bitwise_and(flags, at.allow[start:stop], out=flags)
    if at.deny is not None:
        np.greater(flags, at.deny[start:stop], out=flags)


class Scratch:
    """Buffers for one block of scores and flags, used again for every block.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays(
    ...     [entries.Entry(torch.tensor([-1.0, 2.0]), absolute=True)]
    ... )
    >>> [
    ...     scores.tolist()
    ...     for _, _, scores, _, _ in block_passes.Scratch(2, double=False).blocks(at)
    ... ]
    [[1.0, 2.0]]
    """

    def __init__(self, size: int, double: bool) -> None:
        self.scores: Array = np.empty(size, np.float64 if double else np.float32)
        self.flags: Array = np.empty(size, np.bool_)

    def blocks(self, at: Arrays) -> Iterator[tuple[int, int, Array, Array, Array]]:
        """Start, end and scores of each block, its part of the mask, and flags to write
        to.
        """
        for start in range(0, at.out.size, BLOCK):
            stop = min(start + BLOCK, at.out.size)
            scores = self.read(at, slice(start, stop), self.scores[: stop - start])
            yield start, stop, scores, at.out[start:stop], self.flags[: stop - start]

    def read(self, at: Arrays, where: slice, buffer: Array) -> Array:
        """Some of the scores: a view of the memory if that needs no change, else
        written into the buffer.
        """
        if at.narrow is not None:
            torch.from_numpy(buffer).copy_(at.narrow[where])
            return np.abs(buffer, out=buffer) if at.absolute else buffer
        assert at.wide is not None
        if at.absolute:
            return np.abs(at.wide[where], out=buffer)
        # float32 scores in one competition with float64 scores
        if at.wide.dtype != buffer.dtype:
            buffer[...] = at.wide[where]
            return buffer
        return at.wide[where]


class Work(NamedTuple):
    """The entries of a competition in their order, in shares of which each may have a
    thread of its own.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> listed = entries.arrays([entries.Entry(torch.ones(n)) for n in (2, 3)])
    >>> block_passes.work_on(listed).run(lambda at, scratch: at.out.size)
    [2, 3]
    """

    shares: list[list[Arrays]]
    double: bool
    size: int

    def run(self, step: Callable[[Arrays, Scratch], Out]) -> list[Out]:
        """The results of a function for each entry, in their order."""

        def run_share(share: list[Arrays]) -> list[Out]:
            scratch = self.scratch(share)
            return [step(at, scratch) for at in share]

        if len(self.shares) == 1:
            return run_share(self.shares[0])
        every: list[Out] = []
        for outs in run_jobs(run_share, self.shares, self.size):
            every += outs
        return every

    def scratch(self, share: list[Arrays]) -> Scratch:
        """Buffers for the blocks of some entries."""
        largest = max((at.out.size for at in share), default=0)
        return Scratch(min(BLOCK, largest), self.double)


def work_on(competitors: Sequence[Arrays]) -> Work:
    """Entries, flattened and divided between the threads that torch may use; a few
    million scores are for one thread.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> len(block_passes.work_on(entries.arrays([entries.Entry(torch.ones(2))])).shares)
    1
    """
    size = sum(at.out.size for at in competitors)
    threads = torch.get_num_threads() if size >= _THREADED else 1
    most = max(1, -(-size // threads))
    shares: list[list[Arrays]] = [[]]
    left = most
    for at in map(reshaped, competitors):
        first = 0
        while first < at.out.size:
            if not left:
                shares.append([])
                left = most
            stop = min(at.out.size, first + left)
            shares[-1].append(cut(at, slice(first, stop)))
            left -= stop - first
            first = stop
    double = any(
        at.wide is not None and at.wide.dtype == np.float64 for at in competitors
    )
    return Work(shares, double, size)


def sample(work: Work, step: int | None = None) -> Array:
    """Every `step`-th score, if it competes, with NaN as -inf: some ten thousand unless
    a step is given.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> block_passes.sample(
    ...     block_passes.work_on(
    ...         entries.arrays([entries.Entry(torch.tensor([1.0, torch.nan]))])
    ...     )
    ... )
    array([  1., -inf], dtype=float32)
    """
    wanted = 1 << 16
    if work.size < 1 << 20:
        wanted = 1 << 13
    elif work.size < 1 << 23:
        wanted = 1 << 14
    # odd, as rows of a matrix mostly have even lengths
    step = step or work.size // wanted | 1
    drawn = []
    first = 0
    for share in work.shares:
        scratch = work.scratch(share)
        for at in share:
            some = cut(at, slice(first, None, step))
            buffer = np.empty(some.out.size, scratch.scores.dtype)
            scores = scratch.read(some, slice(None), buffer)
            open_ = eligible(some.allow, some.deny)
            if open_ is not None:
                scores = scores[open_]
            drawn.append(np.fmax(scores, -np.inf))
            first = (first - at.out.size) % step
    return np.concatenate(drawn or [work.scratch([]).scores])


def write(work: Work, wins: np.ufunc, value: float) -> None:
    """Keep in each mask the units that compete and whose scores compare with a value in
    some way.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, torch.nan]))])
    >>> block_passes.write(block_passes.work_on([at]), np.greater_equal, -math.inf)
    >>> at.out
    array([ True, False])
    """

    def step(at: Arrays, scratch: Scratch) -> None:
        for start, stop, scores, winners, _ in scratch.blocks(at):
            wins(scores, value, out=winners)
            bar(at, start, stop, winners)

    work.run(step)


class Found(NamedTuple):
    """How many scores are above a bracket and inside it, and the places and values of
    the collected ones.
    """

    above: int
    inside: int
    places: list[Array]
    values: Array


def collect(
    work: Work,
    low: float,
    low_open: bool,
    high: float,
    high_open: bool,
    most: int | None = None,
) -> Found:
    """The scores inside a bracket, unless they are too many.

    The mask becomes the units above.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, 2.0, 3.0, 2.0]))])
    >>> found = block_passes.collect(block_passes.work_on([at]), 2.0, False, 3.0, True)
    >>> found.above, found.inside, found.places, at.out.tolist()
    (1, 2, [array([1, 3])], [False, False, True, False])

    An open end does not belong to the bracket. There are places for each entry. More
    than `most` are counted alone.
    """
    reaches = np.greater if low_open else np.greater_equal
    exceeds = np.greater_equal if high_open else np.greater
    one = low == high and not (low_open or high_open)
    # For all threads together: threads that read it at the same moment collect some
    # more, which costs memory alone.
    spare = [max(work.size // _CROWDED, _MOST) if most is None else most]

    def step(at: Arrays, scratch: Scratch) -> tuple[int, int, Array, Array]:
        above = 0
        inside = 0
        places = [np.empty(0, np.int64)]
        values = [scratch.scores[:0]]
        for start, stop, scores, winners, flags in scratch.blocks(at):
            exceeds(scores, high, out=winners)
            if one:
                np.equal(scores, low, out=flags)
            else:
                reaches(scores, low, out=flags)
                np.bitwise_xor(flags, winners, out=flags)
            bar(at, start, stop, winners)
            bar(at, start, stop, flags)
            above += int(np.count_nonzero(winners))
            if spare[0] <= 0:
                inside += int(np.count_nonzero(flags))
                continue
            found = np.flatnonzero(flags)
            inside += found.size
            found = found[: spare[0]]
            spare[0] -= found.size
            values.append(scores[found])
            places.append(found + start)
        return above, inside, np.concatenate(places), np.concatenate(values)

    found = work.run(step) or [(0, 0, np.empty(0, np.int64), work.scratch([]).scores)]
    above, inside, places, values = zip(*found, strict=True)
    return Found(sum(above), sum(inside), list(places), np.concatenate(values))


def add(work: Work, places: Sequence[Array], keep: Array) -> None:
    """Put collected units into the mask: the places of each entry, where their flags,
    end to end, are set.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays([entries.Entry(torch.ones(3))])
    >>> at.out[:] = False
    >>> block_passes.add(
    ...     block_passes.work_on([at]), [np.array([0, 2])], np.array([False, True])
    ... )
    >>> at.out
    array([False, False,  True])
    """
    first = 0
    left = iter(places)
    for share in work.shares:
        for at in share:
            found = next(left)
            own = keep[first : first + found.size]
            at.out[found[own]] = True
            first += found.size


def fill(work: Work, missing: int, value: float) -> None:
    """Put the first units that have the value into the mask, as many as are missing;
    NaN stands for every NaN.

    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, 2.0, 2.0]))])
    >>> at.out[:] = False
    >>> block_passes.fill(block_passes.work_on([at]), 1, 2.0)
    >>> at.out
    array([False,  True, False])
    """
    for share in work.shares:
        scratch = work.scratch(share)
        for at in share:
            for start, stop, scores, winners, flags in scratch.blocks(at):
                if missing <= 0:
                    return
                if math.isnan(value):
                    np.not_equal(scores, scores, out=flags)
                else:
                    np.equal(scores, value, out=flags)
                bar(at, start, stop, flags)
                count = int(np.count_nonzero(flags))
                if count <= missing:
                    np.bitwise_or(winners, flags, out=winners)
                else:
                    first = np.flatnonzero(flags)[:missing]
                    winners[first] = True
                missing -= count
