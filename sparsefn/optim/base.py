"""The type of an optimizer, and what SGD and Adam share: rates, counts and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn._engine import backends
from sparsefn._engine.leaves import leafwise, steps
from sparsefn._engine.processes import localized
from sparsefn.core.checks import Made, number, uncalled
from sparsefn.core.state import Level
from sparsefn.core.tree import Tree, check_like, check_tree, leaves_of, zipped

Row = tuple[Tensor, ...]  # of one leaf: what goes into its step, or what comes out
Rebuild = Callable[[Sequence[Tensor]], Tree]
# (rows, numbers of a step) -> results of each row, and the numbers after it
Formula = Callable[[Sequence[Row], Row], tuple[list[Row], Any]]
# (grads, state, params, masks, clear) -> (params, state)
UnderMasks = Callable[..., tuple[Tree, Tree]]
# params, masks, gradients and any moments
Trees = tuple[Tree, Tree, Tree, Sequence[Tree]]

backends.BACKENDS |= {
    ("sgd", "cpu"): steps.sgd_step,
    ("adam", "cpu"): steps.adam_step,
    ("adam_updates", "cpu"): steps.adam_updates,
}


class _Pair(NamedTuple):
    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    under_masks: UnderMasks | None = None


class Optimizer(Made, _Pair):
    """A pure pair of functions in the shape of TorchOpt's and optax's.

    >>> import optree
    >>> optimizer = sf.optimizers.sgd(0.5)
    >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.4])}
    >>> updates, state = optimizer.update(grads, optimizer.init(params), params=params)
    >>> optree.tree_map(torch.add, params, updates)
    {'w': tensor([0.8000])}

    Attributes:
        init: Function of params that gives the first state, a tree of tensors. Stacked
            params take `vmap(init)`.
        update: Function of (grads, state, *, params=None, inplace=False) that gives
            (updates, state). Add the updates to the params. Weight decay needs
            `params`.
        under_masks: Function of (grads, state, params, masks, clear=False) that gives
            (params, state): the whole step under masks in one pass, which
            `with_optimizer` then takes. It has the bits of `update` on gradients that
            are +0.0 off the masks, with the updates added only on the masks, and with
            `clear` moments of +0.0 off the masks. It is for optimizers that step each
            entry by itself: in compiled code `with_optimizer` makes their updates from
            whole gradients. None leaves it to `update`. `_replace(update=...)` clears
            it, as it is a way of the old update.

    A state goes through `vmap`, `torch.compile` and checkpoints; the updates are
    differentiable.
    """

    ways_of: ClassVar = {"under_masks": ("update",)}


def start_count(params: Tree) -> Tensor:
    """The count before any update: 0-d int64 zero, on the device of the params.

    >>> start_count({"w": torch.ones(2)})
    tensor(0)
    """
    check_tree("params", params)
    leaves = leaves_of(params)
    return torch.zeros(
        (),
        dtype=torch.int64,
        device=leaves[0].device if leaves else torch.device("cpu"),
    )


def zero_moments(params: Tree) -> Tree:
    """Zeros like the params: the moments before any update.

    >>> zero_moments({"w": torch.ones(2, requires_grad=True)})
    {'w': tensor([0., 0.])}
    """
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf.detach()), params)


def rate_at(lr: Level, count: Tensor) -> Tensor:
    """The learning rate at a count: 0-d float64.

    >>> rate_at(lambda step: 0.5 / (1 + step), torch.tensor(1))
    tensor(0.2500, dtype=torch.float64)
    """
    rate = lr(count) if callable(lr) else lr
    if isinstance(rate, Tensor):
        return rate.double()
    return torch.full((), rate, dtype=torch.float64, device=count.device)


def check_fitting(
    grads: Tree,
    params: Tree,
    moments: Tree,
    weight_decay: float = 0.0,
    inplace: bool = False,
) -> None:
    """Raise for grads, params and moments that do not fit each other, and for an update
    in place.

    >>> check_fitting({"w": torch.ones(2)}, None, None, weight_decay=0.1)
    Traceback (most recent call last):
        ...
    ValueError: expected params in update for weight_decay=0.1, got None
    """
    if inplace:
        raise ValueError(
            "expected inplace=False: this optimizer never changes its arguments"
        )
    if weight_decay and params is None:
        raise ValueError(
            f"expected params in update for weight_decay={weight_decay}, got None"
        )
    likes = [tree for tree in (params, moments) if tree is not None]
    check_like("grads", grads, *likes)


def check_rate(lr: Level) -> None:
    """Raise unless it is a number of at least 0, a 0-d float tensor (its value is not
    read) or a schedule.

    >>> check_rate(-0.1)
    Traceback (most recent call last):
        ...
    ValueError: expected lr in [0, inf), got -0.1
    """
    if words := uncalled(lr):
        raise TypeError(f"expected lr to be a number or a schedule, got {words}")
    if not callable(lr) and not isinstance(number("lr", lr), Tensor):
        check_range("lr", lr)


def check_range(name: str, value: object, below: float = math.inf) -> None:
    """Raise unless it is a number in [0, below).

    >>> check_range("momentum", 0.9)
    """
    if isinstance(value, Tensor):
        raise TypeError(f"expected {name} to be a number, got a tensor")
    if not 0 <= number(name, value) < below:
        raise ValueError(f"expected {name} in [0, {below}), got {value}")


def scalar_like(scalar: Tensor, leaf: Tensor) -> Tensor:
    """A 0-d tensor in the dtype of a leaf.

    >>> scalar_like(torch.tensor(0.1, dtype=torch.float64), torch.ones(1))
    tensor(0.1000)
    """
    # Rounded explicitly: type promotion rounds a batched 0-d tensor at another place
    # than a single one.
    return scalar.to(device=leaf.device, dtype=leaf.dtype)


def trees_of(rows: Sequence[Row], n: int, rebuild: Rebuild) -> list[Tree]:
    """The trees of the first n results of each leaf.

    >>> trees_of([(torch.tensor(1), torch.tensor(2))], 2, tuple)
    [(tensor(1),), (tensor(2),)]
    """
    trees = []
    for i in range(n):
        column = [row[i] for row in rows]
        trees.append(rebuild(column))
    return trees


def by_backend(
    name: str, rows: Sequence[Row], numbers: Row, formula: Formula, *options: object
) -> tuple[list[Row], Any]:
    """What the backend of a device makes of rows and numbers (first the count);
    `formula` makes the rows that the backend leaves, or all if it declines.

    >>> by_backend("none", [], (torch.tensor(0),), lambda *given: given)
    ([], (tensor(0),))
    """
    device = numbers[0].device.type
    made = backends.call_backend(name, device, rows, numbers, *options)
    if made is None:
        return formula(rows, numbers)
    results, after = made
    left = [row for row, done in zip(rows, results, strict=True) if done is None]
    rest = iter(formula(left, numbers)[0] if left else ())
    return [next(rest) if done is None else tuple(done) for done in results], after


def under_masks(
    name: str,
    trees: Trees,
    lr: Level,
    old: Row,
    formula: Formula,
    clear: bool,
    *options: object,
) -> tuple[list[Tree], Any]:
    """New params, moments and numbers of a step under masks, by the backend of the
    device if it has one.

    >>> w = torch.ones(2)
    >>> trees = [w], [torch.tensor([True, False])], [w], []
    >>> old = (torch.tensor(0),)
    >>> under_masks("sgd", trees, 1.0, old, lambda *rows: None, False, 0.0, False, 0.0)
    ([[tensor([0., 1.])]], tensor(1))

    Gradients count as zero off the masks, and params move only on them; with `clear`,
    moments are +0.0 off the masks. `old` are the numbers of the state, first the count;
    the rate is appended to them. The formula makes updates and moments of rows of
    (*moments, gradient, param).
    """
    params, masks, grads, moments = trees
    check_fitting(grads, params, moments[0] if moments else None)
    rows, rebuild = localized(*zipped(params, masks, grads, *moments))

    def masked(left: Sequence[Row], numbers: Row) -> tuple[list[Row], Any]:
        old, covers, slopes, *moments = zip(*left, strict=True)
        # no name here refers to the masked gradients, whose memory is free for weights
        columns = zip(*moments, leafwise.zeroed(covers, slopes), old, strict=True)
        stepped, after = formula(list(columns), numbers)
        updates, *moments = zip(*stepped, strict=True)
        weights = leafwise.added(covers, old, updates)
        if clear:
            moments = [tuple(leafwise.zeroed(covers, x)) for x in moments]
        return list(zip(weights, *moments, strict=True)), after

    numbers = (*old, rate_at(lr, old[0]))
    results, after = by_backend(name, rows, numbers, masked, *options, clear)
    return trees_of(results, len(moments) + 1, rebuild), after
