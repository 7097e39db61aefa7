"""A better mask of the same counts: weights of a row change places, the best pair
first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsefn._engine.leaves import hidden, one_by_one
from sparsefn._engine.processes import check_alike, gathered, own
from sparsefn._engine.transforms import read
from sparsefn.core.checks import check_int
from sparsefn.masks.patterns.kinds import Pattern, unstructured
from sparsefn.posttraining.solve.arguments import (
    check_finite,
    check_kept,
    groups_in_rows,
    in_one_dtype,
)

AT_ONCE = 2**23  # changes of the error, one a pair, that are held at one time
# A swap lowers a row's error by this share at least, so that rounding makes no swap.
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

    Args:
        weight: The weight of a linear layer, (out, in).
        hessian: The gram of its inputs, (in, in), symmetric.
        mask: Bool tensor of the weight's shape: the mask to start from, of any method.
        pattern: Where weights may change places: inside its groups, which lie in rows,
            as with `nm(2, 4)`. By default inside rows.
        most: The most swaps of a row.

    Returns:
        A mask like `mask`, with as many weights in each row, or in each group. The
        error sum((masked - weight) @ hessian * (masked - weight)) of no row is larger
        than with `mask`.

    Raises:
        ValueError: Shapes do not fit, values are not finite, `most` is negative, or
            groups of `pattern` do not lie in rows.
        TypeError: Another dtype.

    A swap prunes one weight and brings a pruned one back. Each row makes the swap that
    lowers its error most, the first pair among equal ones, until none does. `refit`
    finds the weights for the mask, and `layerwise` does both for a model:
    `lambda w, h, m: (w, sf.solve.swaps(w, h, m))`. A swap takes time of a row's kept
    times its pruned weights, or of their number in all groups. Computed in float64.

    Zimmer et al. 2025, arXiv 2512.10922, algorithm 1.
    """
    w, h = in_one_dtype("swaps", weight, hessian)
    kept = check_kept("swaps", mask, weight)
    width = max(w.shape[1], 1)
    if pattern is not None and pattern != unstructured():
        width, _ = groups_in_rows("swaps", pattern, w)
    check_int("swaps", "most", most, 0)
    check_alike("swaps", w, h, kept, pattern, most)
    swap = _swapped if hidden(w, h, kept) else swapped
    return swap(w, h, kept, width, most)


def swapped(w: Tensor, h: Tensor, kept: Tensor, width: int, most: int) -> Tensor:
    """`swaps` of arguments that were checked: inside groups of `width` columns.

    >>> mask = torch.tensor([[True, False]])
    >>> swapped(torch.tensor([[1.0, 2.0]]), torch.eye(2), mask, 2, 9)
    tensor([[False,  True]])
    """
    check_finite("swaps", weight=w, hessian=h)  # hidden until now by a transform
    if not w.numel():
        return kept.clone()
    w = w.double()
    h = h.double()
    n_parts = max(1, -(-w.numel() * width // AT_ONCE))
    weights = w.chunk(n_parts)
    masks = kept.chunk(n_parts)
    done = []
    for i in own(len(weights)):
        done.append(_refined(weights[i], masks[i], h, width, most))
    (refined,) = gathered(torch.cat([*done, kept[:0]]))
    return refined


_swapped = torch.library.custom_op("sparsefn::swaps", swapped, mutates_args=())
_swapped.register_fake(
    lambda w, h, kept, *_: torch.empty_like(kept, memory_format=torch.contiguous_format)
)
one_by_one(_swapped)


def _refined(w: Tensor, kept: Tensor, h: Tensor, width: int, most: int) -> Tensor:
    # The masks of some rows.
    start = _errors(w, kept, h)
    rows = _Rows(w, kept, h, width)
    if not rows.crossed.numel():  # every group keeps all weights, or none
        return rows.kept
    for _ in range(most):
        swap = rows.best_swap()
        moves = swap.change < -_LEAST * start
        if not read(moves.any()):
            break
        rows.make(_Swap(*(x[moves] for x in swap)))
    is_worse = _errors(w, rows.kept, h) > start
    return torch.where(is_worse[:, None], kept, rows.kept)


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
    # Rows of which weights change places. With d = w off the mask, the error of a row
    # is d H d'. Pruning p and bringing q back adds to it
    #   2 w_p (d H)_p + w_p^2 H_pp - 2 w_q (d H)_q + w_q^2 H_qq - 2 w_p w_q H_pq.

    def __init__(self, w: Tensor, kept: Tensor, h: Tensor, width: int) -> None:
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
    change = w.masked_fill(kept, 0.0)
    return (change @ h * change).sum(1)
