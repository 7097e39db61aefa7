"""How far the slices of a weight are from each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparsefn.engine.checks import is_number
from sparsefn.engine.described import described
from sparsefn.engine.pooling import Pooling
from sparsefn.scores.leaves import of_sparsified
from sparsefn.state import PlainScore, State, Step
from sparsefn.tree import Tree, wide

_PIECE = 2**22  # entries of differences at a time
_SUM = Pooling("sum")


@described
def distance(norm: float | Callable[[Tensor], Tensor] = 2, axis: int = 0) -> PlainScore:
    """Sum of the distances of a slice of the weights to the other slices along an axis.

    >>> state = sf.State({"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])}, {"w": torch.ones(3, 2) > 0})
    >>> sf.scores.distance(norm=1)(state, (), 0)["w"]
    tensor([[ 8.,  8.],
            [13., 13.],
            [ 7.,  7.]])

    Each entry of a slice has its slice's sum, so that `patterns.channel(axis, norm=float("inf"))` prunes the
    slices nearest to the geometric median: `sf.one_shot(0.5, score=distance(), pattern=channel(0, norm=inf))`.
    `norm` is the order of the vector norm of the difference, or a function of the slices, (n, elements), that
    gives their distances, (n, n). Leaves that are not sparsified score 0. float16 and bfloat16 are summed
    in float32. ValueError for a DTensor. He et al. 2019, arXiv 1811.00250, eq. 4 and 5.
    """
    if not callable(norm) and not is_number(norm):
        raise TypeError(f"expected norm to be a number or a function of the slices, got {norm!r}")

    def of_leaf(path: str, leaf: Tensor, mask: Tensor) -> Tensor:
        del mask
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"distance: no axis {axis} in shape {tuple(leaf.shape)} at {path!r}")
        slices = wide(leaf.detach()).movedim(axis, 0)
        size, rest = slices.shape[0], slices.shape[1:]
        flat = slices.reshape(size, math.prod(rest)).contiguous()
        if callable(norm):
            sums = _SUM(_checked_distances(norm(flat), size, path).abs())
        else:
            sums = _distance_sums(flat, norm)
        return sums.reshape(size, *(1 for _ in rest)).expand(size, *rest).movedim(0, axis)

    def score(state: State, grads: Tree, step: Step) -> Tree:
        del grads, step
        return of_sparsified(of_leaf, state, whole="distance")

    return score


def _distance_sums(flat: Tensor, norm: float) -> Tensor:
    # A few slices at a time against all; a product of matrices would be faster, but sums in another order.
    size, width = flat.shape
    step, length = max(1, _PIECE // max(1, size * width)), Pooling("norm", norm)
    parts = [_SUM(length(flat[start : start + step, None] - flat)) for start in range(0, size, step)]
    return torch.cat(parts) if parts else _SUM(flat)


def _checked_distances(matrix: Tensor, size: int, path: str) -> Tensor:
    if tuple(matrix.shape) != (size, size):
        raise ValueError(f"distance: expected norm to give shape {(size, size)} at {path!r}, got {tuple(matrix.shape)}")
    return matrix
