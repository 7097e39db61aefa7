"""Selection among processes: each holds boxes of some tensors, and all find one
threshold for the whole.

What decides is found as on one process (`bracket.narrowed`), from a sample and counts
of all processes. The scores that are left inside the bracket are a smaller competition
of the same kind, until few enough are left to be sent. Each process then writes the
masks of its boxes, and of its copies, by the threshold. Units equal to it win by their
place in the whole: the place before which all of the missing ones lie is searched for
by counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.leaves import BLOCK
from sparsefn._engine.processes import (
    Exchange,
    Extent,
    Gather,
    Groups,
    Sum,
    agree,
    collectives,
    is_first,
)
from sparsefn._engine.selection import block_passes
from sparsefn._engine.selection.bracket import (
    Bracket,
    Threshold,
    all_win,
    best,
    narrowed,
)
from sparsefn._engine.selection.entries import (
    TINY,
    Arrays,
    Count,
    Entry,
    arrays,
    check,
    open_count,
    reshaped,
)
from sparsefn._engine.transforms import (
    Array,
    as_numpy_inside,
    unwrapped,
    without_compiler,
)

FEW = 1 << 12  # up to this many scores of all processes are sent
# of fewer than 2**20 scores; more make the bracket narrower, and are themselves sent
_SAMPLED = 1 << 11
_PROBES = 1 << 10  # places at which ties are counted at a time


@without_compiler
def winners(
    entries: Sequence[Entry],
    counts: Sequence[Count],
    joint: bool,
    plain: Callable[[Sequence[Entry], Sequence[Count]], list[Tensor]],
) -> list[Tensor]:
    """Masks of the best units of entries, some of which several processes hold.

    >>> from sparsefn._engine.processes.extent import Extent
    >>> from sparsefn._engine.selection import among_processes
    >>> whole = among_processes.Entry(
    ...     torch.tensor([[1.0, 3.0, 2.0]]), extent=Extent((3,), (0,), (3,), ())
    ... )
    >>> among_processes.winners([whole], [2], False, lambda entries, counts: [])
    [tensor([[False,  True,  True]])]

    An entry that is no part, and is in no joint competition, is selected from by
    `plain`.
    """
    extents = [entry.extent for entry in entries if entry.extent is not None]
    groups = tuple(dict.fromkeys(name for x in extents for name in x.groups))
    # a signalling NaN counts as any other NaN
    with _all_numbers_count(), np.errstate(all="ignore"):
        try:
            seen = _arrays(entries)
            running = []
            alone = []
            if joint:
                pieces = []
                start = 0
                for entry, at in zip(entries, seen, strict=True):
                    pieces.append(_piece(entry, at, start, groups))
                    start += at.out.size if entry.extent is None else entry.extent.numel
                running.append((groups, selected(pieces, int(counts[0]), start)))
            else:
                for i, (entry, at) in enumerate(zip(entries, seen, strict=True)):
                    if entry.extent is None:
                        alone.append(i)
                        continue
                    own = entry.extent.groups
                    piece = _piece(entry, at, 0, own)
                    search = selected([piece], int(counts[i]), entry.extent.numel)
                    running.append((own, search))
            masks = [torch.from_numpy(at.out) for at in seen]
            won = plain([entries[i] for i in alone], [counts[i] for i in alone])
            for i, mask in zip(alone, won, strict=True):
                masks[i] = mask
        except Exception as error:
            agree(groups, error)
            raise
        collectives.in_step(running)
    pairs = zip(masks, entries, strict=True)
    return [mask.to(entry.scores.device) for mask, entry in pairs]


@without_compiler
def totals(counts: Sequence[Tensor], extents: Sequence[Extent | None]) -> list[Tensor]:
    """The counts of some tensors, summed over processes for tensors that are parts.

    >>> from sparsefn._engine.processes.extent import Extent
    >>> from sparsefn._engine.selection import among_processes
    >>> among_processes.totals([torch.tensor([2])], [Extent((3,), (0,), (3,), ())])
    [tensor([2])]
    """

    def summed(count: Array) -> Exchange[Array]:
        return (yield Sum(count))

    running = {}
    for i, (count, extent) in enumerate(zip(counts, extents, strict=True)):
        if extent is not None:
            running[i] = extent.groups, summed(count.cpu().numpy())
    made = list(counts)
    sums = collectives.in_step([*running.values()])
    for i, total in zip(running, sums, strict=True):
        made[i] = torch.from_numpy(total).to(counts[i].device)
    return made


class Piece(NamedTuple):
    """An entry of a competition among processes, and where its units are in the whole.

    >>> import numpy as np
    >>> from sparsefn._engine.processes.extent import Extent
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import among_processes
    >>> (at,) = entries.arrays([entries.Entry(torch.ones(2))])
    >>> among_processes.Piece(
    ...     at, Extent((2, 2), (0, 1), (2, 1), ()), start=10, counts=True
    ... ).places(np.array([0, 1]))
    array([11, 13])

    Arrays have one dimension. Without an extent all units of the entry are here; they
    start at `start` in the whole. One that does not count is a copy: another process
    counts its units, and only its mask is written here.
    """

    at: Arrays
    extent: Extent | None
    start: int
    counts: bool

    def places(self, index: Array) -> Array:
        """Places in the whole of units that are here; both grow in the same order."""
        return self.start + (
            index if self.extent is None else self.extent.places(index)
        )

    def before(self, places: Array) -> Array:
        """How many of the units that are here come before some places in the whole."""
        low = np.zeros_like(places)
        high = np.full_like(places, self.at.out.size)
        while (left := low < high).any():
            middle = (low + high) // 2
            earlier = self.places(middle) < places
            low = np.where(left & earlier, middle + 1, low)
            high = np.where(left & ~earlier, middle, high)
        return low


def selected(pieces: Sequence[Piece], k: int, size: int) -> Exchange[None]:
    """Write into each `out` the mask of the k best units of all pieces of all
    processes; `size` counts the barred units, too.

    >>> from sparsefn._engine.processes import collectives
    >>> from sparsefn._engine.selection import entries
    >>> from sparsefn._engine.selection import among_processes
    >>> (at,) = entries.arrays([entries.Entry(torch.tensor([1.0, 3.0, 2.0]))])
    >>> collectives.alone(
    ...     among_processes.selected([among_processes.Piece(at, None, 0, True)], 1, 3)
    ... )
    >>> at.out
    array([False,  True, False])

    Larger scores win first, then the unit that comes first in the whole; NaN ranks
    below -inf.
    """
    every = [piece.at for piece in pieces]
    counted = [piece for piece in pieces if piece.counts]
    total = size
    if k > 0 and any(at.allow is not None or at.deny is not None for at in every):
        own_count = open_count([piece.at for piece in counted])
        (count_of_all,) = yield Sum([own_count])
        total = int(count_of_all)
    if k <= 0:
        for at in every:
            at.out[:] = False
        return
    if k >= total:
        return all_win(every)
    double = block_passes.work_on(every).double
    work = _work([piece.at for piece in counted], double)
    threshold = yield from _threshold(work, k, total)
    end = yield from _end_of_ties(counted, double, threshold, size)
    value = threshold.value
    until: tuple[np.ufunc, float] = (np.greater_equal, value)
    beyond: tuple[np.ufunc, float] = (np.greater, value)
    if math.isnan(value):  # to which every score is unequal
        until = (np.not_equal, value)
        beyond = (np.greater_equal, -math.inf)
    firsts = []
    rest = []
    for piece in pieces:
        n = int(piece.before(np.array([end]))[0])
        firsts.append(block_passes.cut(piece.at, slice(0, n)))
        rest.append(block_passes.cut(piece.at, slice(n, None)))
    block_passes.write(_work(firsts, double), *until)
    block_passes.write(_work(rest, double), *beyond)


def _threshold(work: block_passes.Work, k: int, total: int) -> Exchange[Threshold]:
    while total > FEW:
        # Of a small competition the sample and what it leaves are sent; of a large one
        # neither is much.
        wanted = 8 * _SAMPLED
        if total < 1 << 20:
            wanted = _SAMPLED
        elif total < 1 << 23:
            wanted = 4 * _SAMPLED
        sample = yield Gather(block_passes.sample(work, total // wanted | 1))
        left = yield from narrowed(work, sample, k / total, k, wanted)
        if isinstance(left, Threshold):
            return left
        only = Arrays(
            left.values,
            None,
            None,
            None,
            np.empty(left.values.shape, np.bool_),
            absolute=False,
        )
        work = _work([only], work.double)
        k = left.need
        total = left.size
    numbers = yield Gather(block_passes.collect(work, *Bracket()).values)
    if k > numbers.size:
        return Threshold(math.nan, k - numbers.size, total - numbers.size)
    won = numbers[best(numbers, k)]
    value = won.min()
    return Threshold(
        float(value), int((won == value).sum()), int((numbers == value).sum())
    )


def _end_of_ties(
    pieces: Sequence[Piece], double: bool, threshold: Threshold, size: int
) -> Exchange[int]:
    # The place before which exactly as many of the units equal to the threshold lie as
    # win.
    if threshold.missing in (0, threshold.equal):
        return size if threshold.missing else 0
    low = 0
    end = size
    had = 0
    while end - low > 1:
        n = min(_PROBES, end - low)
        probes = low + np.arange(1, n) * (end - low) // n
        equal = sum(
            (_equal(piece, double, threshold.value, low, probes) for piece in pieces),
            np.zeros_like(probes),
        )
        found = had + (yield Sum(equal))
        i = int((found < threshold.missing).sum())
        if i:
            low = int(probes[i - 1])
            had = int(found[i - 1])
        if i < n - 1:
            end = int(probes[i])
    return end


def _equal(piece: Piece, double: bool, value: float, low: int, probes: Array) -> Array:
    # How many units of this process that equal the value lie from the place `low` on
    # and before each of `probes`.
    first, *ends = piece.before(np.array([low, *probes])).tolist()
    at = block_passes.cut(piece.at, slice(first, ends[-1]))
    marks = np.array(ends) - first
    counts: Array = np.zeros_like(marks)
    total = 0
    for start, stop, scores, _, flags in block_passes.Scratch(
        min(BLOCK, at.out.size), double
    ).blocks(at):
        np.isnan(scores, out=flags) if math.isnan(value) else np.equal(
            scores, value, out=flags
        )
        block_passes.bar(at, start, stop, flags)
        found = np.flatnonzero(flags)
        inside = (marks > start) & (marks <= stop)
        counts[inside] = total + np.searchsorted(found, marks[inside] - start)
        total += found.size
    return counts


def _work(competitors: Sequence[Arrays], double: bool) -> block_passes.Work:
    # With buffers of the dtype that all processes use: a float64 entry may count on
    # another one alone.
    return block_passes.work_on(competitors)._replace(double=double)


def _arrays(entries: Sequence[Entry]) -> list[Arrays]:
    check(entries)
    here = []
    for scores, allow, deny, absolute, *_ in entries:
        allow, deny = (None if x is None else unwrapped(x).cpu() for x in (allow, deny))
        here.append(Entry(unwrapped(scores).cpu(), allow, deny, absolute))
    seen = arrays(here, as_numpy_inside)
    if seen is None:
        raise TypeError(
            "expected tensors with values in memory to compete over processes, got "
            "fake or batched ones"
        )
    return seen


def _piece(entry: Entry, at: Arrays, start: int, groups: Groups) -> Piece:
    own = () if entry.extent is None else entry.extent.groups
    return Piece(
        reshaped(at),
        entry.extent,
        start,
        is_first([name for name in groups if name not in own]),
    )


@contextlib.contextmanager
def _all_numbers_count() -> Iterator[None]:
    # Where this thread counts subnormal numbers as zero, it does not for a while.
    if TINY[0] > TINY[1]:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
