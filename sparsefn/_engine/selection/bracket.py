"""The k best of very many scores: a bracket from a sample, then an exact finish.

A strided sample brackets the threshold. One pass writes the units above the bracket
straight into the mask and collects the few scores inside it; a partition finds the best
of these scores. Counts then say whether the sample was right: where it was not, the
bracket moves and the pass is made again, and where too many scores are inside, some of
them are the next sample. So the sample decides about speed alone. A value that very
many scores share, as the zeros of a pruned tensor, is tried as the threshold by itself:
its units are never collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsefn._engine.processes import Exchange, Gather, Sum, alone
from sparsefn._engine.selection import block_passes
from sparsefn._engine.selection.entries import Arrays, eligible, open_count
from sparsefn._engine.transforms import Array

_CLOSER = 1 << 15  # scores of the next sample, where too many are inside a bracket
_SORTED = 1 << 11  # up to this many scores a sort is faster than a partition
MOST_AT_ONCE = 1 << 15  # up to this many scores are partitioned without a sample
# standard deviations of a rank in the sample on either side; a miss costs another pass
_SURE = 2.5
_FEW = 7  # up to this many equal scores around the wanted rank are chance
_HEAVY = 32  # a value that more than 1/32 of the sample have is tried by itself


def write_best(competitors: Sequence[Arrays], k: int) -> None:
    """Write into each `out` the mask of the k best of all entries: larger first, NaN
    last, then the earlier.

    >>> from sparsefn._engine.selection import bracket
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays(
    ...     [entries.Entry(torch.tensor([1.0, float("nan"), -3.0]), absolute=True)]
    ... )
    >>> bracket.write_best([at], 1)
    >>> at.out
    array([False, False,  True])

    Where fewer than k compete, all of them win.
    """
    if k <= 0:
        for at in competitors:
            at.out[:] = False
    elif sum([at.out.size for at in competitors]) <= MOST_AT_ONCE:
        _at_once(competitors, k)
    else:
        total = open_count(competitors)
        if k < total:
            return _search(block_passes.work_on(competitors), k / total, k)
        all_win(competitors)


def all_win(competitors: Sequence[Arrays]) -> None:
    """Write into each `out` which units compete.

    >>> from sparsefn._engine.selection import bracket
    >>> from sparsefn._engine.selection import entries
    >>> (at,) = entries.arrays(
    ...     [entries.Entry(torch.ones(2), torch.tensor([True, False]))]
    ... )
    >>> bracket.all_win([at])
    >>> at.out
    array([ True, False])
    """
    for at in competitors:
        flags = eligible(at.allow, at.deny)
        at.out[:] = True if flags is None else flags


def best(values: Array, k: int) -> Array:
    """Which of some values are the k best: larger first, NaN last, then the earlier.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import bracket
    >>> bracket.best(np.array([1.0, 3.0, 3.0, np.nan]), 1)
    array([False,  True, False, False])
    """
    n = values.size
    if k <= 0 or k >= n:
        return np.full(n, k > 0)
    if n <= _SORTED:
        ordered = np.sort(values)
        last = ordered[-1]
    elif mostly_tied(values):
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


def mostly_tied(values: Array) -> bool:
    """Whether a tenth of some values are probably equal, by a look at a few of them.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import bracket
    >>> (
    ...     bracket.mostly_tied(np.arange(1000)),
    ...     bracket.mostly_tied(np.arange(1000).clip(500)),
    ... )
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


class Bracket(NamedTuple):
    """Where the threshold, the least score that wins, lies: the ends belong to it
    unless they are open.

    >>> import numpy as np
    >>> from sparsefn._engine.selection import bracket
    >>> bracket.Bracket(low=1.0, low_open=True).has(np.array([1.0, 2.0]))
    array([False,  True])
    """

    low: float = -math.inf
    low_open: bool = False
    high: float = math.inf
    high_open: bool = False

    def has(self, values: Array) -> Array:
        """Which of some values lie in it."""
        above: Array = values > self.low if self.low_open else values >= self.low
        return above & (values < self.high if self.high_open else values <= self.high)


class Threshold(NamedTuple):
    """A value above which all units win, and of the `equal` units that have it the
    first `missing`.

    NaN stands for every NaN, and all numbers are above it.
    """

    value: float
    missing: int
    equal: int


class Inside(NamedTuple):
    """Scores of which the best `need` are still to be found.

    All better units are written as winners. The places, for each entry, and the values
    are of one process; all processes together have `size`.
    """

    places: list[Array]
    values: Array
    need: int
    size: int


def narrowed(
    work: block_passes.Work,
    sample: Array,
    share: float,
    k: int,
    closer: int,
) -> Exchange[Threshold | Inside]:
    """The threshold of the k best, where fewer than all win, or the few scores among
    which it is.

    >>> from sparsefn._engine.processes import collectives
    >>> from sparsefn._engine.selection import block_passes
    >>> from sparsefn._engine.selection import bracket
    >>> from sparsefn._engine.selection import entries
    >>> work = block_passes.work_on(
    ...     entries.arrays([entries.Entry(torch.arange(100.0))])
    ... )
    >>> left = collectives.alone(
    ...     bracket.narrowed(work, block_passes.sample(work), 0.9, 90, 1 << 15)
    ... )
    >>> left.need, left.size
    (13, 23)

    The work has the scores of one process. The sample is of the scores of all
    processes, and `share` is the share of all scores that win. Where too many scores
    are inside a bracket, about `closer` of them are the next sample.
    """
    known = Bracket()
    reach = _SURE
    while True:
        bracket, section = _window(sample, share, reach, known)
        value = _heavy(sample, section)
        if value is not None:
            above, equal, *_ = block_passes.collect(
                work, value, False, value, False, most=0
            )
            above, equal = (yield Sum((above, equal))).tolist()
            if above <= k <= above + equal:
                return Threshold(value, k - above, equal)
            if k < above:
                known = known._replace(low=value, low_open=True)
            else:
                known = known._replace(high=value, high_open=True)
            continue
        above, inside, places, values = block_passes.collect(work, *bracket)
        above, inside, held = (yield Sum((above, inside, values.size))).tolist()
        need = k - above
        if not need:
            return Threshold(bracket.high, 0, 0)
        if 0 < need <= inside == held:
            return Inside(places, values, need, inside)
        # too many to collect: the scores that were are a closer sample
        if 0 < need <= inside:
            known = bracket
            share = need / inside
            reach = _SURE
            del places
            sample = yield Gather(values[:: held // closer | 1].copy())
            del values  # before the next are collected
            continue
        if need < 0:
            known = known._replace(low=bracket.high, low_open=True)
        elif bracket.low > -math.inf:
            known = known._replace(high=bracket.low, high_open=True)
        else:  # all numbers win
            return Threshold(math.nan, need - inside, 0)
        reach *= 8


@np.errstate(all="ignore")  # a signalling NaN counts as any other NaN
def _search(work: block_passes.Work, share: float, k: int) -> None:
    left = alone(narrowed(work, block_passes.sample(work), share, k, _CLOSER))
    if isinstance(left, Inside):
        return block_passes.add(work, left.places, best(left.values, left.need))
    if math.isnan(left.value):
        block_passes.write(work, np.greater_equal, -math.inf)
    block_passes.fill(work, left.missing, left.value)


def _window(
    sample: Array, share: float, reach: float, known: Bracket
) -> tuple[Bracket, Array]:
    # The scores of the sample around the wanted rank, inside the known bracket, and the
    # narrower bracket they make.
    n = sample.size
    rank = (1 - share) * n
    spread = reach * math.sqrt(n * share * (1 - share)) + 4
    first = math.floor(rank - spread)
    last = math.ceil(rank + spread)
    if first >= 0 and last < n:
        ordered = np.partition(sample, (first, last))
    else:
        ordered = np.sort(sample)
    bracket = known
    if first >= 0 and known.has(ordered[first]):
        bracket = bracket._replace(low=float(ordered[first]), low_open=False)
    if last < n and known.has(ordered[last]):
        bracket = bracket._replace(high=float(ordered[last]), high_open=False)
    section = ordered[max(first, 0) : last + 1]
    return bracket, section[bracket.has(section)]


def _heavy(sample: Array, section: Array) -> float | None:
    # The commonest value around the wanted rank, or an end of it, if many scores have
    # it.
    section = np.sort(section)
    likely = [*section[:1], *section[-1:]]
    earlier = section[: max(section.size - _FEW, 0)]
    if (section[_FEW:] == earlier).any():
        values, counts = np.unique(section, return_counts=True)
        likely.insert(0, values[counts.argmax()])
    for x in likely:
        count = np.count_nonzero(sample == x)
        if count * _HEAVY > sample.size:
            return float(x)
    return None


def _at_once(competitors: Sequence[Arrays], k: int) -> None:
    values = []
    flags = []
    for at in competitors:
        scores: Array = at.narrow.float().numpy() if at.wide is None else at.wide  # type: ignore[union-attr]
        open_ = eligible(at.allow, at.deny)
        if open_ is None:
            scores = scores.reshape(-1)
        else:
            scores = scores[open_]
        flags.append(open_)
        values.append(np.abs(scores) if at.absolute else scores)
    if len(values) == 1:
        return _keep(competitors[0], flags[0], best(values[0], k))
    with np.errstate(all="ignore"):  # a signalling NaN is widened as any other NaN
        together = np.concatenate(values)
    keep = best(together, k)
    first = 0
    for at, open_, scores in zip(competitors, flags, values, strict=True):
        _keep(at, open_, keep[first : first + scores.size])
        first += scores.size


def _keep(at: Arrays, open_: Array | None, keep: Array) -> None:
    if open_ is None:
        at.out[:] = keep.reshape(at.out.shape)
    else:
        at.out[:] = False
        at.out[open_] = keep
