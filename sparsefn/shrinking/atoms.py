"""Atoms: what stays or goes together. A label of a dimension says of which atoms each
of its indices is made.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
# (size of the dimension, factors): an index stays if all of its atoms stay; None: all
# stay
Label = Ids | None


class Rank(IntEnum):
    """Which factor of a product is pruned rather."""

    NONE = 0
    HEADS = 1  # and the entries of a convolution's groups
    REPEATS = 2  # of heads, and the groups of a convolution
    WIDTHS = 3  # of heads


class Atoms:
    """A union-find of atoms, some of which are products of others.

    >>> atoms = Atoms()
    >>> rows, heads, widths = atoms.new(6), atoms.new(2), atoms.new(3)
    >>> atoms.join(rows, product(heads, 2, widths, 3), "")
    >>> atoms.resolve(rows).tolist()[
    ...     :4
    ... ]  # index h * 3 + d of the rows stays where head h and width d stay
    [[7, 9], [7, 10], [7, 11], [8, 9]]

    Atom 0 always stays, and fills up rows. Whatever joins does is sufficient for
    indices to stay together: where two products do not fit each other, all of their
    atoms stay.
    """

    def __init__(self) -> None:
        self.count = 1
        self.parent = np.zeros(1 << 12, np.int64)
        # the factors of an atom: itself, if it is no product
        self.parts = np.zeros((1 << 12, 2), np.int64)
        # why a root stays: a place in `reasons`, 0 where it may go
        self.reason = np.zeros(1 << 12, np.int32)
        self.rank = np.zeros(1 << 12, np.int32)
        self.reasons = ["", "it fills up"]
        self._places = {why: i for i, why in enumerate(self.reasons)}
        self.reason[0] = 1

    def new(self, size: int, rank: int = Rank.NONE) -> Ids:
        """The label of a dimension of that many indices, each with an atom of its
        own.
        """
        while self.count + size > len(self.parent):
            for name in ("parent", "parts", "reason", "rank"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        new = slice(self.count, self.count + size)
        ids = np.arange(new.start, new.stop)
        self.parent[new] = ids
        self.parts[new, 0] = ids
        if rank:
            self.rank[new] = rank
        self.count = new.stop
        return ids[:, None]

    def find(self, ids: Ids) -> Ids:
        """The roots of atoms."""
        up = self.parent[ids]
        while not ((top := self.parent[up]) == up).all():
            self.parent[ids] = top
            ids = top
            up = self.parent[top]
        return up

    def resolve(self, label: Ids) -> Ids:
        """A label as it is now: roots that are no products, each once a row, without
        columns of 0.
        """
        label = _once_a_row(self.find(label))
        while not (self.parts[label, 0] == label).all():
            factors = self.parts[label].reshape(len(label), -1)
            label = _once_a_row(self.find(factors))
        if label.shape[1] > 2:  # of columns in which all atoms stay one tells enough
            fixed = (self.reason[label] > 0).all(0)
            if fixed.sum() > 1:
                one = label[:, fixed].max(1, keepdims=True)
                label = np.concatenate([label[:, ~fixed], one], 1)
        return label

    def free(self, label: Label) -> Label:
        """The atoms of a label that may go; None where all of them stay."""
        if label is None:
            return None
        label = self.resolve(label)
        label = np.where(self.reason[label] > 0, 0, label)
        used = label.any(0)
        return label[:, used] if used.any() else None

    def freeze(self, label: Label, why: str, which: Flags | None = None) -> None:
        """All atoms of these indices stay, for this reason."""
        if label is None:
            return
        number = self._number(why)
        if which is None or which.any():
            ids = self.resolve(label if which is None else label[which])
            self.reason[ids[self.reason[ids] == 0]] = number

    def join(self, a: Label, b: Label, why: str) -> None:
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
        # Join what is alone on each side, n and m atoms of a row, as far as one step
        # can; whether that is all.
        only = (n == 0) | (m == 0)
        same = n == m
        single = (n == 1) | (m == 1)
        if only.any():  # further factors on one side
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
            divided = self._divide(one[single], two[single], n[single] == 1)
            return divided and bool(single.all())
        self.freeze(one, f"{why}, and divided in two ways")
        self.freeze(two, f"{why}, and divided in two ways")
        return True

    def _apart(self, a: Ids, b: Ids) -> tuple[Ids, Ids]:
        # What either side has that the other has not, in each row from the left.
        sides = []
        both = [self.resolve(label) for label in (a, b)]
        both = [np.where(self.reason[side] > 0, 0, side) for side in both]
        for mine, other in (both, both[::-1]):
            shared = (mine[:, :, None] == other[:, None, :]).any(2)
            alone = np.where(shared, 0, mine)
            order = np.argsort(alone == 0, axis=1, kind="stable")
            alone = np.take_along_axis(alone, order, 1)
            width = max(1, alone.any(0).sum())
            sides.append(alone[:, :width])
        return sides[0], sides[1]

    def _divide(self, one: Ids, two: Ids, first: Flags) -> bool:
        # An atom, of the first side or of the second, is the product of several of the
        # other; of an atom that comes twice the first row counts, and joins go on.
        whole = np.where(first, one[:, 0], two[:, 0])
        atoms, at = np.unique(whole, return_index=True)
        width = max(one.shape[1], two.shape[1])
        more = width - self.parts.shape[1]
        if more > 0:
            self.parts = np.pad(self.parts, ((0, 0), (0, more)))
        factors = np.zeros((len(whole), width), np.int64)
        factors[first, : two.shape[1]] = two[first]
        factors[~first, : one.shape[1]] = one[~first]
        factors = factors[at]
        # no atom may become a factor of its own factors
        clear = np.asarray(~np.isin(factors, atoms).any(1))
        clear[0] = True
        self.parts[atoms[clear], :width] = factors[clear]
        return len(atoms) == len(whole) and bool(clear.all())

    def _unite(self, a: Ids, b: Ids) -> None:
        # Roots that may go.
        while (apart := a != b).any():
            low = np.minimum(a, b)[apart]
            high = np.maximum(a, b)[apart]
            self.parent[high] = low
            # of several the last one counts, and the others go on
            last = self.parent[high]
            ranked = (self.rank[last] == 0) & (self.rank[high] > 0)
            self.rank[last[ranked]] = self.rank[high[ranked]]
            a = self.find(low[last != low])
            b = self.find(high[last != low])

    def _number(self, why: str) -> int:
        if why not in self._places:
            self._places[why] = len(self.reasons)
            self.reasons.append(why)
        return self._places[why]


def _once_a_row(label: Ids) -> Ids:
    # Zeros in place of repeats, without columns of zeros. Where factors are shared,
    # columns would double without end.
    for i in range(1, label.shape[1]):
        before = label[:, :i]
        again = (before == label[:, i : i + 1]).any(1)
        label[again, i] = 0
    used = label.any(0)
    return label if used.all() else label[:, used]


def product(a: Label, m: int, b: Label, n: int) -> Label:
    """The label of a dimension of m * n indices, from those of the two that it is made
    of.

    >>> product(np.array([[1], [2]]), 2, None, 2).tolist()
    [[1], [1], [2], [2]]
    """
    rows = [] if a is None else [np.repeat(a, n, 0)]
    rows += [] if b is None else [np.tile(b, (m, 1))]
    return np.concatenate(rows, 1) if rows else None
