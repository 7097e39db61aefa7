"""The k best of very many scores in memory: a bracket from a sample, one pass in blocks, an exact finish.

A strided sample brackets the threshold. One pass writes what is surely above straight into the mask and collects the
few scores inside the bracket, of which the best are found by a partition. What a sample cannot say is counted: where
the bracket was wrong it moves, and where too many are inside, some of them are the next sample. So the sample decides
about speed alone. A value that very many scores share, as the zeros of a tensor that was pruned before, is tried as
the threshold by itself: its entries are never collected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sparsefn.engine.memory import Array
from sparsefn.engine.selection.entries import Part, Passes, Room, bar, cut, open_count, passes_over

_SORTED = 1 << 11  # so many are sorted sooner than partitioned
SMALL = 1 << 15  # no more scores than this are looked at all at once
_SURE = 2.5  # standard deviations of a rank in the sample on either side; a miss costs another pass
_FEW = 7  # as many equal ones around the wanted rank are chance
_CROWDED = 32  # one score in so many is collected, if more are inside the bracket
_MOST = 1 << 16  # so many are collected in any case
_HEAVY = 32  # a value that more than one in so many of the sample have is tried by itself


@np.errstate(all="ignore")  # a signalling NaN is as any other
def select(parts: Sequence[Part], k: int, absolute: bool = False) -> None:
    """Write into each `out` who is among the k best of all parts: larger first, NaN last, then the earlier.

    >>> from sparsefn.engine.selection import entries
    >>> from sparsefn.engine.selection import bracket
    >>> part = entries.part(torch.tensor([1.0, float("nan"), -3.0]))
    >>> bracket.select([part], 1, absolute=True)
    >>> part.out
    array([False, False,  True])

    With `absolute` the scores are absolute values. Where fewer than k may win, all of them do.
    """
    if k <= 0:
        for at in parts:
            at.out[:] = False
    elif sum(at.out.size for at in parts) <= SMALL:
        _at_once(parts, k, absolute)
    else:
        total = sum(open_count(at) for at in parts)
        if k < total:
            return _search(parts, k / total, k, absolute)
        for at in parts:
            at.out[:] = True
            bar(at, 0, at.out.size, at.out)


def best(values: Array, k: int) -> Array:
    """Which of some values are the k best: larger first, NaN last, then the earlier.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import bracket
    >>> bracket.best(np.array([1.0, 3.0, 3.0, np.nan]), 1)
    array([False,  True, False, False])
    """
    n = values.size
    if k <= 0 or k >= n:
        return np.full(n, k > 0)
    if n <= _SORTED:
        ordered = np.sort(values)
        last = ordered[-1]
    elif tied(values):
        ordered = np.partition(values, (n - k, n - 1))
        last = ordered[-1]
    else:  # a faster partition, which takes 15 times as long as the other on heavy ties
        ordered = np.partition(values, n - k)
        last = values.max()
    if last != last:
        return _with_nan(values, k)
    threshold = ordered[n - k]
    keep: Array = values >= threshold
    if np.count_nonzero(keep) > k:
        keep = values > threshold
        missing = k - int(np.count_nonzero(keep))
        keep[np.flatnonzero(values == threshold)[:missing]] = True
    return keep


def tied(values: Array) -> bool:
    """Whether a tenth of some values or more are probably equal, by a look at a few of them.

    >>> import numpy as np
    >>> from sparsefn.engine.selection import bracket
    >>> bracket.tied(np.arange(1000)), bracket.tied(np.arange(1000).clip(500))
    (False, True)
    """
    few = np.sort(values[:: max(values.size >> 6, 1)])
    return bool((few[3:] == few[:-3]).any())


def _with_nan(values: Array, k: int) -> Array:
    keep = np.equal(values, values)
    numbers = np.flatnonzero(keep)
    if k < numbers.size:
        keep[numbers] = best(values[numbers], k)
    else:
        keep[np.flatnonzero(~keep)[: k - numbers.size]] = True
    return keep


class _Bracket(NamedTuple):
    """Where the threshold, the least score that wins, lies: the ends belong to it unless they are open."""

    low: float = -math.inf
    low_open: bool = False
    high: float = math.inf
    high_open: bool = False

    @property
    def reaches(self) -> Callable[..., Array]:
        """The comparison with `low` that says who is not below."""
        return np.greater if self.low_open else np.greater_equal

    @property
    def exceeds(self) -> Callable[..., Array]:
        """The comparison with `high` that says who is above."""
        return np.greater_equal if self.high_open else np.greater

    def has(self, values: Array) -> Array:
        """Which of some values lie in it."""
        inside: Array = self.reaches(values, self.low) & ~self.exceeds(values, self.high)
        return inside


def _search(parts: Sequence[Part], share: float, k: int, absolute: bool) -> None:
    passes = passes_over(parts, absolute)
    sample, known, reach = _sample(passes), _Bracket(), _SURE
    while True:
        bracket, section = _window(sample, share, reach, known)
        value = _heavy(sample, section)
        if value is not None:
            counts = passes.run(partial(_compare, value))
            above, equal = (sum(column) for column in zip(*counts, strict=True))
            if above <= k <= above + equal:
                return _fill(passes, k - above, value)
            if k < above:
                known = known._replace(low=value, low_open=True)
            else:
                known = known._replace(high=value, high_open=True)
            continue
        found = passes.run(partial(_collect, bracket, [max(passes.size // _CROWDED, _MOST)]))
        need, inside = k - sum(above for above, *_ in found), sum(count for _, count, *_ in found)
        values = np.concatenate([scores for *_, scores in found])
        if 0 <= need <= inside == values.size:
            return _finish(passes.parts, [places for *_, places, _ in found], best(values, need))
        if 0 <= need <= inside:  # too many to collect: the scores that were are a closer sample
            known, sample, share, reach = bracket, values[:: values.size >> 15 | 1].copy(), need / inside, _SURE
            del found, values  # before the next are collected
            continue
        if need < 0:
            known = known._replace(low=bracket.high, low_open=True)
        elif bracket.low > -math.inf:
            known = known._replace(high=bracket.low, high_open=True)
        else:  # all numbers win
            passes.run(_numbers)
            return _fill(passes, need - inside, math.nan)
        reach *= 8


def _sample(passes: Passes) -> Array:
    # Every so-maniest of the scores that may win, NaN as -inf.
    wanted = 1 << 13 if passes.size < 1 << 20 else 1 << 14 if passes.size < 1 << 23 else 1 << 16
    step = passes.size // wanted | 1  # odd, as rows of a matrix mostly have even lengths
    drawn, first = [], 0
    for group in passes.groups:
        room = passes.room(group)
        for at in group:
            some = cut(at, slice(first, None, step))
            scores = room.read(some, slice(None), np.empty(some.out.size, room.scores.dtype))
            if at.allow is not None or at.deny is not None:
                flags = np.ones(scores.size, np.bool_)
                bar(some, 0, scores.size, flags)
                scores = scores[flags]
            drawn.append(np.fmax(scores, -np.inf))
            first = (first - at.out.size) % step
    return np.concatenate(drawn)


def _window(sample: Array, share: float, reach: float, known: _Bracket) -> tuple[_Bracket, Array]:
    # The scores of the sample around the wanted rank, within what is known, and the bracket that they make.
    n = sample.size
    rank, spread = (1 - share) * n, reach * math.sqrt(n * share * (1 - share)) + 4
    first, last = math.floor(rank - spread), math.ceil(rank + spread)
    ordered = np.partition(sample, (first, last)) if first >= 0 and last < n else np.sort(sample)
    bracket = known
    if first >= 0 and known.has(ordered[first]):
        bracket = bracket._replace(low=float(ordered[first]), low_open=False)
    if last < n and known.has(ordered[last]):
        bracket = bracket._replace(high=float(ordered[last]), high_open=False)
    section = ordered[max(first, 0) : last + 1]
    return bracket, section[bracket.has(section)]


def _heavy(sample: Array, section: Array) -> float | None:
    # The commonest value around the wanted rank, or an end of it, if many scores have it.
    section = np.sort(section)
    likely = [*section[:1], *section[-1:]]
    if (section[_FEW:] == section[: max(section.size - _FEW, 0)]).any():
        values, counts = np.unique(section, return_counts=True)
        likely.insert(0, values[counts.argmax()])
    return next((float(x) for x in likely if np.count_nonzero(sample == x) * _HEAVY > sample.size), None)


def _compare(value: float, at: Part, room: Room) -> tuple[int, int]:
    # How many are above a value and how many are equal; those above go into the mask.
    above = equal = 0
    for start, stop, scores, winners, flags in room.blocks(at):
        np.greater(scores, value, out=winners)
        np.equal(scores, value, out=flags)
        bar(at, start, stop, winners)
        bar(at, start, stop, flags)
        above += int(np.count_nonzero(winners))
        equal += int(np.count_nonzero(flags))
    return above, equal


def _numbers(at: Part, room: Room) -> None:
    for start, stop, scores, winners, _ in room.blocks(at):
        np.equal(scores, scores, out=winners)
        bar(at, start, stop, winners)


def _collect(bracket: _Bracket, spare: list[int], at: Part, room: Room) -> tuple[int, int, Array, Array]:
    # How many are above the bracket, which go into the mask, and inside, with the places and scores of those. They are
    # collected while places are to spare, for all threads together; a count that these miss costs memory alone.
    above, inside, places, values = 0, 0, [np.empty(0, np.int64)], [room.scores[:0]]
    for start, stop, scores, winners, flags in room.blocks(at):
        bracket.exceeds(scores, bracket.high, out=winners)
        bracket.reaches(scores, bracket.low, out=flags)
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


def _finish(parts: Sequence[Part], places: Sequence[Array], keep: Array) -> None:
    first = 0
    for at, found in zip(parts, places, strict=True):
        at.out[found[keep[first : first + found.size]]] = True
        first += found.size


def _fill(passes: Passes, missing: int, value: float) -> None:
    # The first so many of those that have the value win, too; NaN stands for all NaN.
    for group in passes.groups:
        room = passes.room(group)
        for at in group:
            for start, stop, scores, winners, flags in room.blocks(at):
                if missing <= 0:
                    return
                np.not_equal(scores, scores, out=flags) if math.isnan(value) else np.equal(scores, value, out=flags)
                bar(at, start, stop, flags)
                count = int(np.count_nonzero(flags))
                if count <= missing:
                    np.bitwise_or(winners, flags, out=winners)
                else:
                    winners[np.flatnonzero(flags)[:missing]] = True
                missing -= count


def _at_once(parts: Sequence[Part], k: int, absolute: bool) -> None:
    places, values = [], []
    for at in parts:
        scores = at.narrow.float().numpy() if at.wide is None else at.wide  # type: ignore[union-attr]
        open_ = at.allow if at.deny is None else ~at.deny if at.allow is None else np.greater(at.allow, at.deny)
        if open_ is not None:
            places.append(np.flatnonzero(open_))
            scores = scores[places[-1]]
        else:
            places.append(np.arange(scores.size))
        values.append(np.abs(scores) if absolute else scores)
        at.out[:] = False
    if parts:
        _finish(parts, places, best(np.concatenate(values) if len(parts) > 1 else values[0], k))
