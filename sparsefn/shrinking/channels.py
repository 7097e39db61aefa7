"""Coupled channels: a union-find over the channels of all dimensions of a program. What
is in one set stays or goes together. Units of a group are channels of one kind.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
# The label of a dimension, (size of the dimension, factors): the channels that each of
# its indices is made of. An index stays if all of its channels stay; None: all stay.
ChannelMap = Ids | None


class Rank(IntEnum):
    """Which factor of a product is pruned rather."""

    NONE = 0
    HEADS = 1  # and the entries of a convolution's groups
    REPEATS = 2  # of heads, and the groups of a convolution
    WIDTHS = 3  # of heads


_FIRST_SIZE = 1 << 12  # of the arrays, which double when they are full


class CoupledChannels:
    """A union-find of channels, some of which are products of other channels.

    >>> channels = CoupledChannels()
    >>> rows, heads, widths = channels.new(6), channels.new(2), channels.new(3)
    >>> channels.join(rows, product(heads, 2, widths, 3), "")
    >>> channels.resolve(rows).tolist()[
    ...     :4
    ... ]  # index h * 3 + d of the rows stays where head h and width d stay
    [[7, 9], [7, 10], [7, 11], [8, 9]]

    Channel 0 always stays, and fills up rows. Whatever joins does is sufficient for
    indices to stay together: where two products do not fit each other, all of their
    channels stay.
    """

    def __init__(self) -> None:
        self.count = 1
        self.parent = np.zeros(_FIRST_SIZE, np.int64)
        # the factors of a channel: itself, if it is no product
        self.parts = np.zeros((_FIRST_SIZE, 2), np.int64)
        # why a root stays: a place in `reasons`, 0 where it may go
        self.reason = np.zeros(_FIRST_SIZE, np.int32)
        self.rank = np.zeros(_FIRST_SIZE, np.int32)
        self.reasons = ["", "it fills up"]
        self._places = {why: i for i, why in enumerate(self.reasons)}
        self.reason[0] = 1

    def new(self, size: int, rank: int = Rank.NONE) -> Ids:
        """The label of a dimension of that many indices, each with a channel of its
        own.
        """
        while self.count + size > len(self.parent):
            for name in ("parent", "parts", "reason", "rank"):
                old = getattr(self, name)
                doubled = np.concatenate([old, np.zeros_like(old)])
                setattr(self, name, doubled)
        new = slice(self.count, self.count + size)
        ids = np.arange(new.start, new.stop)
        self.parent[new] = ids
        self.parts[new, 0] = ids
        self.rank[new] = rank
        self.count = new.stop
        return ids[:, None]

    def find(self, ids: Ids) -> Ids:
        """The roots of channels."""
        up = self.parent[ids]
        while True:
            top = self.parent[up]
            if (top == up).all():
                return up
            self.parent[ids] = top
            ids = top
            up = self.parent[top]

    def resolve(self, label: Ids) -> Ids:
        """A label as it is now: roots that are no products, each once a row, without
        columns of 0.
        """
        label = _once_a_row(self.find(label))
        while not (self.parts[label, 0] == label).all():
            factors = self.parts[label].reshape(len(label), -1)
            label = _once_a_row(self.find(factors))
        if label.shape[1] > 2:  # of columns in which all channels stay one tells enough
            stays = self.reason[label] > 0
            fixed = stays.all(0)
            if fixed.sum() > 1:
                others = label[:, ~fixed]
                one = label[:, fixed].max(1, keepdims=True)
                label = np.concatenate([others, one], 1)
        return label

    def free(self, label: ChannelMap) -> ChannelMap:
        """The channels of a label that may go; None where all of them stay."""
        if label is None:
            return None
        label = self._without_fixed(label)
        used = label.any(0)
        if not used.any():
            return None
        return label[:, used]

    def _without_fixed(self, label: Ids) -> Ids:
        # 0 in place of channels that stay.
        label = self.resolve(label)
        return np.where(self.reason[label] > 0, 0, label)

    def freeze(self, label: ChannelMap, why: str, which: Flags | None = None) -> None:
        """All channels of these indices stay, for this reason."""
        if label is None:
            return
        number = self._number(why)
        if which is not None:
            label = label[which]
        if len(label):
            ids = self.resolve(label)
            free = ids[self.reason[ids] == 0]
            self.reason[free] = number

    def join(self, a: ChannelMap, b: ChannelMap, why: str) -> None:
        """The indices of two dimensions stay or go together, index by index."""
        if a is None or b is None:
            self.freeze(a, why)
            self.freeze(b, why)
            return
        if a.shape[1] == b.shape[1] == 1:
            both = self.resolve(np.concatenate([a, b]))
            one = both[: len(a)]
            two = both[len(a) :]
            if (one == two).all():
                return
            if both.shape[1] == 1 and not self.reason[both].any():
                self._unite(one[:, 0], two[:, 0])
                return
        done = False
        while not done:
            one, two = self._apart(a, b)
            n = (one > 0).sum(1)
            m = (two > 0).sum(1)
            differ = (n > 0) | (m > 0)
            if not differ.any():
                return
            a = a[differ]
            b = b[differ]
            n = n[differ]
            m = m[differ]
            done = self._match(one[differ], two[differ], n, m, why)

    def _match(self, one: Ids, two: Ids, n: Ids, m: Ids, why: str) -> bool:
        # Join what is alone on each side, n and m channels of a row, as far as one step
        # can; whether that is all.
        only = (n == 0) | (m == 0)
        same = n == m
        single = (n == 1) | (m == 1)
        if only.any():  # more factors on one side
            self.freeze(one[only], why)
            self.freeze(two[only], why)
            return bool(only.all())
        if same.any():
            width = n[same].min()
            same &= n == width
            ours = one[same, :width]
            theirs = two[same, :width]
            self._unite(ours.ravel(), theirs.ravel())
            return bool(same.all())
        if single.any():
            first = n[single] == 1
            divided = self._divide(one[single], two[single], first)
            return divided and bool(single.all())
        in_two_ways = f"{why}, and divided in two ways"
        self.freeze(one, in_two_ways)
        self.freeze(two, in_two_ways)
        return True

    def _apart(self, a: Ids, b: Ids) -> tuple[Ids, Ids]:
        # What either side has that the other has not, in each row from the left.
        one = self._without_fixed(a)
        two = self._without_fixed(b)
        return _alone(one, two), _alone(two, one)

    def _divide(self, one: Ids, two: Ids, first: Flags) -> bool:
        # A channel, of the first side or of the second, is the product of several of
        # the other; of a channel that comes twice the first row counts, and joins go
        # on.
        whole = np.where(first, one[:, 0], two[:, 0])
        channels, at = np.unique(whole, return_index=True)
        width = max(one.shape[1], two.shape[1])
        more = width - self.parts.shape[1]
        if more > 0:
            self.parts = np.pad(self.parts, ((0, 0), (0, more)))
        factors = np.zeros((len(whole), width), np.int64)
        factors[first, : two.shape[1]] = two[first]
        factors[~first, : one.shape[1]] = one[~first]
        factors = factors[at]
        # no channel may become a factor of its own factors
        circular = np.isin(factors, channels).any(1)
        clear = np.asarray(~circular)
        clear[0] = True
        self.parts[channels[clear], :width] = factors[clear]
        return len(channels) == len(whole) and bool(clear.all())

    def _unite(self, a: Ids, b: Ids) -> None:
        # Roots that may go.
        while True:
            unequal = a != b
            if not unequal.any():
                return
            low = np.minimum(a, b)[unequal]
            high = np.maximum(a, b)[unequal]
            self.parent[high] = low
            # of several new parents the last one counts; the other pairs go on
            last = self.parent[high]
            ranked = (self.rank[last] == 0) & (self.rank[high] > 0)
            self.rank[last[ranked]] = self.rank[high[ranked]]
            others = last != low
            a = self.find(low[others])
            b = self.find(high[others])

    def _number(self, why: str) -> int:
        if why not in self._places:
            self._places[why] = len(self.reasons)
            self.reasons.append(why)
        return self._places[why]


def _alone(mine: Ids, other: Ids) -> Ids:
    shared = (mine[:, :, None] == other[:, None, :]).any(2)
    alone = np.where(shared, 0, mine)
    order = np.argsort(alone == 0, axis=1, kind="stable")
    alone = np.take_along_axis(alone, order, 1)
    width = max(1, alone.any(0).sum())
    return alone[:, :width]


def _once_a_row(label: Ids) -> Ids:
    # Zeros in place of repeats, without columns of zeros. Where factors are shared,
    # columns would double without end.
    for i in range(1, label.shape[1]):
        before = label[:, :i]
        column = label[:, i : i + 1]
        again = (before == column).any(1)
        label[again, i] = 0
    used = label.any(0)
    if used.all():
        return label
    return label[:, used]


def product(a: ChannelMap, m: int, b: ChannelMap, n: int) -> ChannelMap:
    """The label of a dimension of m * n indices, from the labels of the two dimensions
    that it is made of.

    >>> product(np.array([[1], [2]]), 2, None, 2).tolist()
    [[1], [1], [2], [2]]
    """
    rows = []
    if a is not None:
        rows.append(np.repeat(a, n, 0))
    if b is not None:
        rows.append(np.tile(b, (m, 1)))
    if not rows:
        return None
    return np.concatenate(rows, 1)


def kinds_of(channels: CoupledChannels, labels: Sequence[Ids]) -> Ids:
    """A number from 1 for channels that lie in the same dimensions, as the same
    factors; 0 for channels that stay or lie in none.
    """
    kinds = np.zeros(channels.count, np.int64)
    most = 0
    columns = {column.tobytes(): column for label in labels for column in label.T}
    for column in columns.values():
        may_go = channels.reason[column] == 0
        here = np.unique(column[may_go])
        if not len(here):
            continue
        _, pairs = np.unique(kinds[here], return_inverse=True)
        kinds[here] = most + 1 + pairs
        most += int(pairs.max()) + 1
    _, first, numbers = np.unique(kinds, return_index=True, return_inverse=True)
    # channel 0 is the first, and of kind 0
    order: Ids = first.argsort().argsort()[numbers]
    return order


def factors_of(labels: Sequence[Ids], kinds: Ids) -> dict[int, set[int]]:
    """Which groups are factors of one product, by number: a group has the channels of
    one kind.
    """
    multiplies_with: dict[int, set[int]] = defaultdict(set)
    count = int(kinds.max()) + 1
    for label in labels:
        rows = kinds[label]
        for i, j in itertools.combinations(range(rows.shape[1]), 2):
            pairs = rows[:, i] * count + rows[:, j]
            for pair in np.unique(pairs).tolist():
                one, other = divmod(pair, count)
                if not one or not other or one == other:
                    continue
                multiplies_with[one - 1].add(other - 1)
                multiplies_with[other - 1].add(one - 1)
    return multiplies_with


def preferred_groups(
    channels: CoupledChannels,
    units: Sequence[Ids],
    weights: Sequence[float],
    multiplies_with: Mapping[int, set[int]],
) -> set[int]:
    """The numbers of groups to prune: one of the groups that multiply with each other,
    by rank and then by weights.
    """
    ranks = [int(channels.rank[own[0]]) for own in units]
    # the width of the only head is never divided, and has no rank of its own
    for i, one in enumerate(ranks):
        others = [ranks[j] for j in multiplies_with[i]]
        if one == Rank.NONE and Rank.HEADS in others:
            ranks[i] = Rank.WIDTHS
    taken = set[int]()
    order = sorted(range(len(units)), key=lambda i: (ranks[i], -weights[i]))
    for i in order:
        if not multiplies_with[i] & taken and len(units[i]) > 1:
            taken.add(i)
    return taken
