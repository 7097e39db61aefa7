"""Orders of input channels under which N:M masks keep more of the weights."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.processes import check_plain
from sparsefn.core import random
from sparsefn.core.checks import check_int
from sparsefn.masks.patterns.kinds import Pattern, nm
from sparsefn.masks.select import topk_mask

__all__ = ["channels"]
__dir__ = __all__.copy

# sizes are whole numbers up to this, whose sums are exact in any order
_LEVELS = 1 << 23
# up to this m all ways to share out the channels of two groups are tried, beyond it
# single exchanges
_WIDEST = 4


class Permutation(NamedTuple):
    """An order of channels, and the sum of |w| that the N:M mask keeps with it.

    >>> sf.permutation.Permutation(torch.tensor([1, 0]), 3.0, 4.0).after
    4.0

    Attributes:
        order: The channels of the weight in their new order, int64 of shape
            (channels,): the permuted weight is `weight.index_select(axis, order)`.
        before: The sum that the mask of the weight keeps.
        after: The sum that the mask of the permuted weight keeps.
    """

    order: Tensor
    before: float
    after: float


def channels(
    weight: Tensor,
    n: int,
    m: int,
    *,
    axis: int = 1,
    escapes: int = 0,
    rounds: int | None = None,
    key: Tensor | None = None,
) -> Permutation:
    """Reorder the input channels of a weight so that its N:M mask keeps more of |w|.

    >>> weight = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    >>> found = sf.permutation.channels(weight, 2, 4)
    >>> found.before, found.after
    (7.0, 10.0)
    >>> mask = sf.masks.topk_mask(
    ...     weight[:, found.order].abs(), None, pattern=sf.patterns.nm(2, 4)
    ... )
    >>> weight[:, found.order][mask].sum()
    tensor(10.)

    Args:
        weight: Floating-point tensor of finite numbers.
        n: How many of every `m` consecutive channels the mask keeps.
        m: The size of a group of channels.
        axis: The dimension of the input channels: 1 for linear layers and convolutions.
        escapes: How often a few random pairs of channels change places at the end. What
            follows is kept if it ends higher.
        rounds: The most rounds, in each of which every group meets one other. None goes
            on until no pair of groups gains.
        key: A key from `sf.random.key`, for the escapes. Default: the key of seed 0.

    Returns:
        The order, and the sums of |w| that are kept without and with it. It is never
        worse than the given order, and the same on every device and for any number of
        threads: sizes are rounded to 2^-23 of the largest one, and added as integers.

    Raises:
        TypeError: The weight is not floating-point, or a number is not an int.
        ValueError: A number is out of range, `m` does not divide the axis, a weight is
            NaN or inf, or `weight` is a DTensor.

    Groups of m channels are compared two by two. For m up to 4 all ways to share out
    the channels of two groups are tried, for larger m all exchanges of one channel for
    another; the best is taken where it gains.

    The layer gives the same outputs if its inputs are in this order too: permute the
    rows of the layers before it, with their biases and norms, and the inputs of all
    others that read them.

    Pool & Yu 2021, "Channel permutations for N:M sparsity".
    """
    check_plain("permutation.channels", "weight", weight)
    for name, value, least in (("escapes", escapes, 0), ("rounds", rounds, 1)):
        if value is not None:
            check_int("permutation.channels", name, value, least)
    pattern = nm(n, m, axis)
    with torch.no_grad():
        size = weight.detach().abs()
        if not size.isfinite().all():
            raise ValueError(
                "permutation.channels: expected finite weights, got NaN or inf"
            )
        before = _kept_sum(size, pattern)
        along = size.movedim(axis, 0).reshape(size.shape[axis], -1)
        if along.numel():
            most = along.amax()
        else:
            most = along.new_ones(())
        unit = most.clamp(min=torch.finfo(size.dtype).tiny)
        whole = (along.double() / unit * _LEVELS).round().to(torch.int32)
        left = math.inf if rounds is None else rounds
        found = _search(whole, n, m, escapes, left, key)
        order = torch.from_numpy(found.reshape(-1)).to(weight.device)
        moved = size.index_select(axis, order)
        after = _kept_sum(moved, pattern)
    if after <= before:
        as_it_was = torch.arange(len(along), device=weight.device)
        return Permutation(as_it_was, before, before)
    return Permutation(order, before, after)


def _kept_sum(size: Tensor, pattern: Pattern) -> float:
    kept = size[topk_mask(size, None, pattern=pattern)]
    return kept.double().sum().item()


def _search(
    whole: Tensor,
    n: int,
    m: int,
    escapes: int,
    rounds: float,
    key: Tensor | None,
) -> np.ndarray:
    groups = len(whole) // m
    order = np.arange(len(whole)).reshape(groups, m)
    if groups < 2 or not 0 < n < m or not whole.numel():
        return order
    settled = np.zeros((groups, groups), bool)
    rounds = _settle(whole, order, n, m, settled, rounds)
    draws = random.key(0) if key is None else key
    for escape in range(escapes):
        if rounds <= 0:
            break
        trial = order.copy()
        known = settled.copy()
        own = random.fold_in(draws, escape)
        shuffled = random.permutation(own, groups).cpu().numpy()
        exchanged = shuffled[: 2 * max(1, groups // 16)]
        for a, b in exchanged.reshape(-1, 2):
            trial[a, 0], trial[b, m - 1] = trial[b, m - 1], trial[a, 0]
            known[[a, b]] = False
        rounds = _settle(whole, trial, n, m, known, rounds)
        if _value(whole, trial, n) > _value(whole, order, n):
            order = trial
            settled = known
    return order


def _settle(
    whole: Tensor,
    order: np.ndarray,
    n: int,
    m: int,
    settled: np.ndarray,
    rounds: float,
) -> float:
    # Improves the order in place until no pair of groups gains; returns the rounds that
    # are left. A pair is compared until both of its groups have marked it as settled; a
    # group that changes has no marks.
    ways = _ways(m)
    groups = len(order)
    size = groups + groups % 2
    turn = 0
    idle = 0
    while rounds > 0 and idle < size - 1:
        pairs = _meetings(size, turn)
        pairs = pairs[pairs.max(1) < groups]
        is_settled = settled[pairs, pairs[:, ::-1]].all(1)
        pairs = pairs[~is_settled]
        turn = (turn + 1) % (size - 1)
        idle = idle + 1
        if not len(pairs):
            continue
        both = order[pairs].reshape(len(pairs), 2 * m)
        best = _best_way(whole, both, ways, n, m)
        gains = best > 0
        reordered = np.take_along_axis(both, ways[best], 1)
        order[pairs] = reordered.reshape(len(pairs), 2, m)
        settled[pairs[gains]] = False
        # After the best of all ways a pair has no better one; after one exchange there
        # may be another.
        is_settled = ~gains | (m <= _WIDEST)
        settled[pairs, pairs[:, ::-1]] = is_settled[:, None]
        rounds = rounds - 1
        if gains.any():
            idle = 0
    return rounds


def _meetings(size: int, number: int) -> np.ndarray:
    # A round of a tournament in which each of an even number of groups meets another
    # one: all but the last move on.
    moved = np.roll(np.arange(size - 1), number)
    table = np.append(moved, size - 1)
    pairs = np.stack([table, table[::-1]], 1)[: size // 2]
    return np.sort(pairs, 1)


def _ways(m: int) -> np.ndarray:
    # Orders of the channels of two groups, first their present order.
    if m <= _WIDEST:
        orders = []
        for rest in itertools.combinations(range(1, 2 * m), m - 1):
            first = [0, *rest]
            second = [i for i in range(2 * m) if i not in first]
            orders.append(first + second)
        return np.array(orders)
    swaps = np.array([*itertools.product(range(m), range(m, 2 * m))])
    ways = np.tile(np.arange(2 * m), (len(swaps) + 1, 1))
    np.put_along_axis(ways[1:], swaps, swaps[:, ::-1], 1)
    return ways


def _best_way(
    whole: Tensor,
    both: np.ndarray,
    ways: np.ndarray,
    n: int,
    m: int,
) -> np.ndarray:
    # For each pair of groups the first of the best ways.
    found = np.zeros(len(both), np.int64)
    some = max(1, (1 << 16) // max(whole.shape[1], 1))
    parts = []
    for way in ways.tolist():
        first = tuple(sorted(way[:m]))
        second = tuple(sorted(way[m:]))
        parts.append((first, second))
    distinct = {part for pair in parts for part in pair}
    for at in range(0, len(both), some):
        columns = _columns(whole, both[at : at + some])
        kept = {}
        for part in distinct:
            largest = _largest([columns[i] for i in part], n)
            kept[part] = largest.sum(-1, dtype=torch.int64).cpu().numpy()
        found[at : at + some] = np.stack(
            [kept[one] + kept[other] for one, other in parts]
        ).argmax(0)
    return found


def _largest(columns: list[Tensor], n: int) -> Tensor:
    # The sum of the n largest of each row, entry by entry: n times the largest one is
    # taken out.
    left = list(columns)
    total = torch.zeros_like(columns[0], dtype=torch.int64)
    for taken in range(n):
        top = left[0]
        rest = []
        for column in left[1:]:
            if taken < n - 1:
                rest.append(torch.minimum(top, column))
            top = torch.maximum(top, column)
        left = rest
        total = total + top
    return total


def _value(whole: Tensor, order: np.ndarray, n: int) -> int:
    return int(_largest(_columns(whole, order), n).sum().item())


def _columns(whole: Tensor, order: np.ndarray) -> list[Tensor]:
    places = torch.from_numpy(order).to(whole.device)
    return [*whole[places].unbind(1)]
