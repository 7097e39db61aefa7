"""Scores of one leaf at a time: LAMP, distances of slices, missing connections."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor

from sparsefn._engine.leaves import is_sparse
from sparsefn._engine.numbers import back, falling, running_sums
from sparsefn._engine.processes import check_plain
from sparsefn._engine.sums import Pooling
from sparsefn._engine.torch_limits import widened
from sparsefn.core.checks import (
    Described,
    check_call,
    described,
    is_number,
    with_call,
)
from sparsefn.core.state import PlainScore, State, Step
from sparsefn.core.tree import Tree, map_with_path, wide
from sparsefn.masks.patterns.boxes import boxes_of, over_elements
from sparsefn.masks.patterns.kinds import Pattern, channel
from sparsefn.masks.patterns.tied_sets import TiedPattern
from sparsefn.masks.patterns.units import Units, units_of
from sparsefn.masks.scores.score_types import OfUnits
from sparsefn.masks.scores.unit_values import check_units, of_tied_units

_PIECE = 2**22  # entries of differences at a time
_SUM = Pooling("sum")


def leafwise(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> PlainScore:
    """A score out of a function of one leaf, `fn(weight, grad, mask)`.

    >>> @sf.scores.leafwise
    ... def relative(weight, grad, mask):
    ...     return weight.abs() / weight.abs().max()
    >>> params = {"w": torch.tensor([2.0, -1.0]), "b": torch.ones(2)}
    >>> state = sf.State(
    ...     params, {"w": torch.tensor([True, True]), "b": torch.tensor(True)}
    ... )
    >>> relative(state, (), 0)
    {'w': tensor([1.0000, 0.5000]), 'b': tensor([0., 0.])}

    Args:
        fn: The function, called for sparsified leaves alone. The weight is from
            `state.params`, the mask has its full shape, and `grad` is None where the
            update was given no gradients. It gives floats of the shape of the weight,
            larger for a weight that is more important.

    Returns:
        A score. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `fn` is not a function of three arguments, or does not give a tensor.
    """
    check_call("fn", fn, "weight", "grad", "mask")

    @functools.wraps(fn)
    def score(state: State, grads: Tree, step: Step) -> Tree:
        def of_leaf(path: str, weight: Tensor, mask: Tensor, *grad: Tensor) -> Tensor:
            scored: object = fn(weight, grad[0] if grad else cast(Tensor, None), mask)
            if not isinstance(scored, Tensor):
                raise TypeError(
                    f"expected scores to be a tensor, got {type(scored).__name__} at "
                    f"{path!r}"
                )
            return scored

        return of_sparsified(
            of_leaf, state, *([] if grads is None or grads == () else [grads])
        )

    del score.__wrapped__  # it has other arguments
    # A function that is decorated keeps its own name.
    if isinstance(fn, Described):
        return with_call(score, leafwise, fn)
    return score


def of_sparsified(
    fn: Callable[..., Tensor],
    state: State,
    *trees: Tree,
    reader: str = "",
    instead: str = "",
) -> Tree:
    """`fn(path, weight, mask, *leaves)` for each sparsified leaf of a state, and zeros
    for each other leaf.

    >>> state = sf.State(
    ...     {"w": torch.ones(2), "b": torch.ones(1)},
    ...     {"w": torch.ones(2) > 0, "b": torch.tensor(True)},
    ... )
    >>> of_sparsified(lambda path, weight, mask: weight + 1, state)
    {'w': tensor([2., 2.]), 'b': tensor([0.])}

    Where a `reader` is named, who reads leaves as a whole, DTensors are refused;
    `instead` says what else to do.
    """

    def of_leaf(path: str, weight: Tensor, mask: Tensor, *leaves: Tensor) -> Tensor:
        if not is_sparse(mask, weight):
            return torch.zeros_like(weight)
        if reader:
            check_plain(reader, path, weight, instead)
        return fn(path, weight, mask, *leaves)

    return map_with_path(of_leaf, state.params, state.masks, *trees)


def lamp(state: State, grads: Tree, step: Step) -> Tree:
    """LAMP: weight^2 by the sum of all squares in its leaf that are not smaller.

    >>> state = sf.State(
    ...     {"w": torch.tensor([1.0, -2.0, 3.0, 4.0])}, {"w": torch.ones(4) > 0}
    ... )
    >>> sf.scores.lamp(state, (), 0)["w"]
    tensor([0.0333, 0.1379, 0.3600, 1.0000], dtype=torch.float64)

    Args:
        state: A state, of which params and masks are read.
        grads: Not read.
        step: Not read.

    Returns:
        Tree of float64 tensors of the shapes of the params.

    Raises:
        ValueError: A sparsified leaf is a DTensor.

    Use it with `distribution=sf.budgets.global_()`, which then chooses how many weights
    each leaf keeps; inside a leaf the order is by magnitude. The best weight of every
    leaf scores 1, and the scale of a leaf does not count. Of equal weights the first is
    the larger one; weights of 0 score 0. In float64, with the same bits on every
    device.

    Lee et al. 2021, arXiv 2010.07611.
    """

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        squares = widened(weight.detach()).double().square().flatten()
        order = falling(squares)
        sorted_squares = squares[order]
        ratios = torch.where(
            sorted_squares == 0, 0.0, sorted_squares / running_sums(sorted_squares)
        )
        return back(ratios, order).reshape(weight.shape)

    return of_sparsified(of_leaf, state, reader="lamp")


@described
def distance(
    norm: float | Callable[[Tensor], Tensor] = 2, pattern: Pattern = channel(0)
) -> PlainScore:
    """Sum of a unit's distances to the other units of its leaf, such as filters.

    >>> state = sf.State(
    ...     {"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])},
    ...     {"w": torch.ones(3, 2) > 0},
    ... )
    >>> sf.scores.distance(norm=1)(state, (), 0)["w"]
    tensor([[ 8.,  8.],
            [13., 13.],
            [ 7.,  7.]])

    Args:
        norm: The order of the vector norm of the difference, or a function of the
            units, (n, elements), that gives their distances, (n, n).
        pattern: A pattern whose units have several entries. Default: the slices along
            the first dimension, such as filters.

    Returns:
        A score, in which each entry of a unit has its unit's sum. float16 and bfloat16
        are summed in float32. Leaves that are not sparsified score 0.

    Raises:
        TypeError: `pattern` is not a pattern, or `norm` neither a number nor a
            function.
        ValueError: Units are single entries or differ in size inside of a leaf or set,
            `norm` gives another shape, or a sparsified leaf is a DTensor.

    `patterns.channel(axis, norm=float("inf"))` prunes the slices nearest to the
    geometric median: `sf.one_shot(0.5, score=distance(), pattern=channel(0,
    norm=inf))`.

    With `sf.patterns.tied`, such as the pattern of `sf.shrinking.groups`, a unit is the
    vector of all of its entries in all members, and the others are the units of its
    set. As in `sf.scores.by_unit` each unit has one value, and the algorithm has the
    same pattern.

    He et al. 2019, arXiv 1811.00250, eq. 4 and 5.
    """
    if not callable(norm) and not is_number(norm):
        raise TypeError(
            f"expected norm to be a number or a function of the slices, got {norm!r}"
        )
    check_units("distance", pattern)

    def sums(path: str, flat: Tensor) -> Tensor:
        if not callable(norm):
            return _distance_sums(flat, norm)
        norms = norm(flat)
        size = len(flat)
        if tuple(norms.shape) != (size, size):
            got = tuple(norms.shape)
            raise ValueError(
                f"distance: expected norm to give shape {(size, size)} at {path!r}, "
                f"got {got}"
            )
        return _SUM(norms.abs())

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        try:
            units = units_of(pattern, tuple(weight.shape))
        except ValueError as error:
            raise ValueError(f"distance: {error} at {path!r}") from None
        sides = zip(units.shape, units.unit, strict=True)
        if any(size % max(box, 1) for size, box in sides):
            raise ValueError(
                f"distance: expected whole units of {pattern}, got shape "
                f"{units.shape} at {path!r}"
            )
        rows = boxes_of(wide(weight.detach()), units.unit)
        found = sums(path, rows.contiguous())
        return over_elements(found.reshape(units.grid), units.unit, units.shape)

    def of_set(name: str, units: Units, rows: Tensor) -> Tensor:
        return sums(name, rows)[None]

    if isinstance(pattern, TiedPattern):

        def of_sets(state: State, grads: Tree, step: Step) -> Tree:
            return of_tied_units(of_set, pattern, state, state.params, "distance")

        return OfUnits(pattern, of_sets)
    return lambda state, grads, step: of_sparsified(of_leaf, state, reader="distance")


def _distance_sums(flat: Tensor, norm: float) -> Tensor:
    # A few slices at a time against all; a product of matrices would be faster, but
    # sums in another order.
    size, width = flat.shape
    step = max(1, _PIECE // max(1, size * width))
    length = Pooling("norm", norm)
    parts = []
    for start in range(0, size, step):
        some = flat[start : start + step, None]
        parts.append(_SUM(length(some - flat)))
    if not parts:
        return _SUM(flat)
    return torch.cat(parts)


@described
def topology(rule: Literal["CH2", "CH3"] = "CH2", least: float = 0.0) -> PlainScore:
    """The Cannistraci-Hebb score: how well a missing connection closes short paths.

    >>> mask = torch.tensor(
    ...     [[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool
    ... )
    >>> sf.scores.topology("CH3")(
    ...     sf.State({"w": torch.ones(3, 4)}, {"w": mask}), (), 0
    ... )["w"]
    tensor([[0.0000, 0.0000, 0.0000, 1.5000],
            [2.5000, 0.0000, 0.0000, 1.5000],
            [1.0000, 2.5000, 0.0000, 0.0000]], dtype=torch.float64)

    Args:
        rule: The weights of the paths. A leaf is the matrix M of its first dimension by
            all others, 1 where a connection is kept. With C = MM', the common
            neighbours of two rows i and j, and E = max(degree of j - C, 1), "CH3" gives
            a = [C > 0] / E and "CH2" a = [C > 0] (1 + C) / E.
        least: The least score of an entry that is not kept.

    Returns:
        A score, aM plus the same of the columns, for the paths of length three by their
        first and by their last unit. Kept entries score 0. Float64, from terms that are
        rounded so that no sum rounds: the bits are the same on every device. Leaves
        that are not sparsified score 0.

    Raises:
        ValueError: `rule` is another, or a sparsified leaf is a DTensor.

    Zhang et al. 2025, arXiv 2501.19107 (the node-based form, L3n).
    """
    if rule not in ("CH2", "CH3"):
        raise ValueError(f"expected rule to be 'CH2' or 'CH3', got {rule!r}")

    def of_leaf(path: str, weight: Tensor, mask: Tensor) -> Tensor:
        m = mask.reshape(mask.shape[0], math.prod(mask.shape[1:])).double()
        found = _half(m, rule) + _half(m.T, rule).T
        return torch.where(mask, 0.0, found.reshape(mask.shape).clamp(min=least))

    return lambda state, grads, step: of_sparsified(of_leaf, state, reader="topology")


def _half(m: Tensor, rule: str) -> Tensor:
    # Paths of length three from each row to each column, by how much each row has in
    # common with the row before last.
    common = m @ m.T
    others = (m.sum(1) - common).clamp(min=1.0)
    most = m.shape[0]  # no sum is larger
    if rule == "CH2":
        most *= m.shape[1] + 1
        weights = (1.0 + common) / others
    else:
        weights = 1.0 / others
    terms = torch.where(common > 0, weights, 0.0)
    unit = 2.0 ** (most.bit_length() - 51)
    rounded = (terms / unit).round() * unit
    return rounded @ m
