"""A better mask of the same counts: units of a group change places, the best pair
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsefn._engine.leaves import hidden, one_by_one
from sparsefn._engine.numbers import folded
from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn._engine.sums import Box, Pooling
from sparsefn._engine.transforms import read_number
from sparsefn.core.checks import check_int
from sparsefn.core.tree import check_not_meta
from sparsefn.masks.patterns.boxes import over_boxes, over_elements
from sparsefn.masks.patterns.kinds import Pattern
from sparsefn.masks.patterns.units import check_single, unit_mask, units_of
from sparsefn.posttraining.solve.arguments import (
    check_finite,
    check_kept,
    in_one_dtype,
    units_of_weight,
)
from sparsefn.posttraining.solve.bands import Bands

AT_ONCE = 2**23  # products of two weights that are held at one time
# A swap lowers the error of a band by this share at least, so that rounding makes none.
_LEAST = 2.0**-36


def swaps(
    weight: Tensor,
    hessian: Tensor,
    mask: Tensor,
    pattern: Pattern | None = None,
    *,
    most: int = 100,
) -> Tensor:
    """SparseSwaps: a mask with the same counts and a smaller error of the layer.

    >>> weight, hessian = (
    ...     torch.tensor([[1.0, 2.0, 2.0]]),
    ...     torch.diag(torch.tensor([9.0, 1.0, 1.0])),
    ... )
    >>> sf.solve.swaps(weight, hessian, torch.tensor([[False, True, True]]))
    tensor([[ True, False,  True]])
    >>> pairs = sf.patterns.block((1, 2))
    >>> sf.solve.swaps(weight, hessian, torch.tensor([[False, False, True]]), pairs)
    tensor([[ True,  True, False]])

    Args:
        weight: The weight of a linear layer, (out, in).
        hessian: The gram of its inputs, (in, in), symmetric.
        mask: Bool tensor of the weight's shape: the mask to start from, of any method.
            It keeps or prunes each unit whole, unless `pattern` prunes a part of it.
        pattern: Which weights are kept or pruned together, as a unit, and which units
            change places: the units of a group. By default single weights inside rows.
        most: The most swaps of a band of rows.

    Returns:
        A mask like `mask`, with as many units in each group. The error sum((masked -
        weight) @ hessian * (masked - weight)) of no band is larger than with `mask`.

    Raises:
        ValueError: Shapes do not fit, values are not finite or on the meta device,
            `most` is negative, the mask keeps a part of a unit, or the pattern is for
            several weights or chooses units together.
        TypeError: Another dtype, or no pattern.

    A swap prunes one unit and brings back a pruned unit of its group. A band is the
    fewest rows that no unit and no group leaves: one row for `nm(2, 4)`, four rows for
    `nm(2, 4, axis=0)`, all rows for `channel(1)` and `in_groups(2)`. Each band makes
    the swap that lowers its error most, until none does. Of equal swaps the first is
    the one that prunes the unit of the lowest flat index; then the one that brings back
    the unit of the lowest index.

    Where all units of the weight are one group, as with `unstructured()` and
    `block((4, 4))`, units change places inside their row of units, so that all rows
    swap at once. Units as wide as the weight, as with `channel(0)`, change places with
    all others. Units that the pattern never keeps, as `nearly_diagonal(3)` outside of
    its diagonals, do not change. Where a pruned unit keeps some weights, as with
    `block((1, 4), zeros=2)`, a unit that is whole in `mask` can lose its weights of
    least w^2 H_jj, and another unit the weights that `mask` prunes.

    `transposable(2, 4)` is refused: two weights that change places are in other rows or
    in other columns, so no swap keeps the counts of both.

    `refit` finds the weights for the mask, and `layerwise` does both for a model:
    `lambda w, h, m: (w, sf.solve.swaps(w, h, m))`. A swap takes time of the pairs of a
    group in one row of units, for each group. Computed in float64.

    Zimmer et al. 2025, arXiv 2512.10922, algorithm 1.
    """
    w, h = in_one_dtype("swaps", weight, hessian)
    check_not_meta("swaps", [("weight", w)])
    kept = check_kept("swaps", mask, weight)
    unit, group, allowed = _groups(pattern, w)
    check_int("swaps", "most", most, 0)
    check_alike("swaps", w, h, kept, pattern, most)
    swap = _swapped if hidden(w, h, kept) else swapped
    if pattern is None or not pattern.partial or not w.numel():
        return swap(w, h, kept, allowed, unit, group, most)
    are_whole = over_boxes(kept, unit, Pooling("min"))
    whole = _spread(are_whole, unit, w)
    spared = _spared(pattern, w, h)
    stays = torch.where(whole, spared, kept)
    lost = w * ~stays  # of all units; a product shows the operator NaN of hidden values
    better = swap(lost, h, whole, allowed, unit, group, most)
    return better | stays


def _spared(pattern: Pattern, w: Tensor, h: Tensor) -> Tensor:
    # The weights that are kept where every unit is pruned.
    units = units_of(pattern, tuple(w.shape))
    none = torch.zeros(units.rows, dtype=torch.bool, device=w.device)
    inputs = h.double().diagonal()
    scores = w.double().square() * inputs
    return unit_mask(units, none, scores)


def _spread(flags: Tensor, unit: Box, w: Tensor) -> Tensor:
    return over_elements(flags, unit, tuple(w.shape))


def _groups(pattern: Pattern | None, w: Tensor) -> tuple[Box, Box, Tensor | None]:
    # The box of a unit, the box of a group, and which units may change places.
    if pattern is None:
        return (1, 1), (1, w.shape[1]), None
    units = units_of_weight("swaps", pattern, w)
    check_single("swaps", pattern)
    group = units.group
    # A row of units may be all that the weight has, but not of single weights.
    if group == units.grid and (pattern.elementwise or group[1] > 1):
        group = (1, group[1])
    # No unit is larger than the weight, where its block may be.
    pairs = zip(units.unit, w.shape, strict=True)
    unit = tuple(min(b, size) for b, size in pairs)
    allowed = units.allowed
    if allowed is not None:
        allowed = allowed.to(w.device)
    return unit, group, allowed


def swapped(
    w: Tensor,
    h: Tensor,
    kept: Tensor,
    allowed: Tensor | None,
    unit: Sequence[int],
    group: Sequence[int],
    most: int,
) -> Tensor:
    """`swaps` of arguments that were checked: units and groups are boxes, of weights
    and of units, and `allowed` says which units may change places.

    >>> mask = torch.tensor([[True, False]])
    >>> swapped(torch.tensor([[1.0, 2.0]]), torch.eye(2), mask, None, [1, 1], [1, 2], 9)
    tensor([[False,  True]])
    """
    check_finite("swaps", weight=w, hessian=h)  # hidden until now by a transform
    if not w.numel():
        return kept.clone()
    a, b = unit
    _check_whole(kept, (a, b))
    rows, columns = w.shape
    w = w.double()
    h = h.double()
    mask = kept
    more_rows = -rows % a
    more_columns = -columns % b
    if more_rows or more_columns:  # zeros make the units at the far borders whole
        w = pad(w, (0, more_columns, 0, more_rows))
        h = pad(h, (0, more_columns, 0, more_columns))
        flags = kept[::a, ::b]
        mask = _spread(flags, (a, b), w)
    height = group[0] * a
    width = group[1] * b
    n_parts = max(1, -(-w.numel() * width // AT_ONCE))
    in_bands = (-1, height, len(h))
    weights = w.reshape(in_bands).chunk(n_parts)
    masks = mask.reshape(in_bands).chunk(n_parts)
    n_bands = len(w) // height
    open_units: Sequence[Tensor | None] = [None] * len(weights)
    if allowed is not None:
        open_units = allowed.reshape(n_bands, -1).chunk(n_parts)
    done = [masks[0][:0]]
    for i in own(len(weights)):
        bands: _Rows | Bands
        if height == 1 and b == 1 and allowed is None:
            bands = _Rows(weights[i], masks[i], h, width)
        else:
            bands = Bands(
                weights[i],
                masks[i],
                h,
                open_units[i],
                unit,
                group,
                AT_ONCE,
            )
        refined = _refined(bands, weights[i], masks[i], h, most)
        done.append(refined)
    (of_all,) = gathered(torch.cat(done))
    new = of_all.flatten(0, 1)
    return new[:rows, :columns].contiguous()


_swapped = torch.library.custom_op("sparsefn::swaps", swapped, mutates_args=())
_swapped.register_fake(
    lambda w, h, kept, *_: torch.empty_like(kept, memory_format=torch.contiguous_format)
)
one_by_one(_swapped)


def _check_whole(kept: Tensor, unit: Box) -> None:
    if unit == (1, 1):
        return
    some = over_boxes(kept, unit, Pooling("max"))
    every = over_boxes(kept, unit, Pooling("min"))
    in_part = some != every
    broken = read_number(in_part.sum())
    if broken:
        raise ValueError(
            "swaps: expected a mask that keeps or prunes each unit whole, got one that "
            f"keeps {broken} of {some.numel()} in part"
        )


def _refined(
    bands: _Rows | Bands, w: Tensor, kept: Tensor, h: Tensor, most: int
) -> Tensor:
    # The masks of some bands.
    start = _errors(w, kept, h)
    limit = -_LEAST * start
    for _ in range(most):
        if not bands.step(limit):
            break
    refined = bands.mask
    is_worse = _errors(w, refined, h) > start
    return torch.where(is_worse[:, None, None], kept, refined)


class _Swap(NamedTuple):
    # One swap a row: what it adds to the row's error, the columns that it prunes and
    # brings back, and their places in the group.
    change: Tensor
    row: Tensor
    group: Tensor
    p: Tensor
    q: Tensor
    place_of_p: Tensor
    place_of_q: Tensor


class _Rows:
    # Bands of one row, of which single weights change places: `Bands` for this case,
    # with the products of those pairs alone that can change places. With d = w off the
    # mask, the error of a row is d H d'. Pruning p and bringing q back adds to it
    #   2 w_p (d H)_p + w_p^2 H_pp - 2 w_q (d H)_q + w_q^2 H_qq - 2 w_p w_q H_pq.

    def __init__(self, w: Tensor, kept: Tensor, h: Tensor, width: int) -> None:
        self.shape = w.shape
        w = w.flatten(0, 1)
        kept = kept.flatten(0, 1)
        self.w = w
        self.h = h
        self.kept = kept.clone()
        self.pull = w.masked_fill(kept, 0.0) @ h  # d H
        self.alone = w.square() * h.diagonal()
        # columns that are kept, and columns that are not: (rows, groups, places)
        self.prune, self.bring = _places(kept, width)
        self.row = torch.arange(len(w), device=w.device)
        self.crossed = self.products(
            self.row[:, None, None, None],
            self.prune[..., :, None],
            self.bring[..., None, :],
        )

    @property
    def mask(self) -> Tensor:
        return self.kept.reshape(self.shape)

    def step(self, limit: Tensor) -> bool:
        # As `Bands.step`.
        if not self.crossed.numel():  # every group keeps all weights, or none
            return False
        swap = self.best_swap()
        moves = swap.change < limit
        if not read_number(moves.any()):
            return False
        self.make(_Swap(*(x[moves] for x in swap)))
        return True

    def products(self, row: Tensor, p: Tensor, q: Tensor) -> Tensor:
        # 2 w_p w_q H_pq
        return 2 * self.w[row, p] * self.w[row, q] * self.h[p, q]

    def best_swap(self) -> _Swap:
        pulled = 2 * self.w * self.pull
        costs = _at(self.alone + pulled, self.prune)
        gains = _at(self.alone - pulled, self.bring)
        costs = costs.masked_fill(~_at(self.kept, self.prune), torch.inf)
        gains = gains.masked_fill(_at(self.kept, self.bring), torch.inf)
        change = (costs[..., :, None] + gains[..., None, :]).sub_(self.crossed)
        of_p = change.amin(-1).flatten(1)
        least = of_p.amin(1)
        p, place = _lowest(self.prune.flatten(1), of_p == least[:, None])
        n_places = self.prune.shape[-1]
        group = place // n_places
        of_q = change.flatten(1, 2)[self.row, place]
        q, place_of_q = _lowest(self.bring[self.row, group], of_q == least[:, None])
        return _Swap(least, self.row, group, p, q, place % n_places, place_of_q)

    def make(self, swap: _Swap) -> None:
        _, row, group, p, q, i, j = swap
        self.kept[row, p] = False
        self.kept[row, q] = True
        self.pull[row] += self.w[row, p, None] * self.h[p]
        self.pull[row] -= self.w[row, q, None] * self.h[q]
        self.prune[row, group, i] = q
        self.bring[row, group, j] = p
        of_q = self.products(row[:, None], q[:, None], self.bring[row, group])
        of_p = self.products(row[:, None], self.prune[row, group], p[:, None])
        self.crossed[row, group, i] = of_q
        self.crossed[row, group, :, j] = of_p


def _places(kept: Tensor, width: int) -> tuple[Tensor, Tensor]:
    # The kept columns of each group, and its pruned columns. Where groups have
    # different counts, both hold some columns of the other kind.
    rows, columns = kept.shape
    groups = kept.reshape(rows, columns // width, width)
    counts = groups.sum(-1)
    at = torch.where(
        groups, groups.cumsum(-1) - 1, counts[..., None] + (~groups).cumsum(-1) - 1
    )
    column = torch.arange(columns, device=kept.device).reshape(1, -1, width)
    order = torch.empty_like(at).scatter_(-1, at, column.expand_as(at))
    most = int(counts.max())
    least = int(counts.min())
    return order[..., :most].clone(), order[..., least:].clone()


def _at(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places.flatten(1)).reshape(places.shape)


def _lowest(columns: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    # The lowest flagged column of each row, and its place.
    beyond = columns.max() + 1
    lowest = torch.where(flags, columns, beyond).min(1)
    return lowest.values, lowest.indices


def _errors(w: Tensor, kept: Tensor, h: Tensor) -> Tensor:
    # The error of each band.
    change = w.masked_fill(kept, 0.0)
    change = change.flatten(0, 1)
    of_rows = (change @ h * change).sum(1)
    in_bands = of_rows.reshape(len(w), -1)
    return folded(in_bands.mT)  # in one order, whatever the number of threads
