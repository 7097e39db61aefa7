"""Masks for activations, made from observed values: aggregate, reduce, mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn._engine.torch_limits import replaceable
from sparsefn.core.checks import Made, described, is_int
from sparsefn.core.state import everywhere
from sparsefn.core.tree import Tree

__all__ = ["activation_sparsifier"]
__dir__ = __all__.copy


@replaceable
class ActivationState(NamedTuple):
    """The mask and statistics of one activation, as a pytree of tensors.

    >>> act = sf.activations.activation_sparsifier(
    ...     torch.add, torch.abs, lambda x: x > 1.0
    ... )
    >>> act.init(torch.zeros(2))
    ActivationState(mask=tensor([True, True]), aggregate=tensor([0., 0.]),
    seen=tensor(0))

    Attributes:
        mask: Bool tensor that broadcasts to the activation, True = kept. With
            `features` a tuple, one tensor a feature.
        aggregate: Sum of the observations since the last update. With `features` a
            tuple, one tensor a feature.
        seen: How many observations these are, 0-d int64.
    """

    mask: Tree
    aggregate: Tree
    seen: Tensor


class _Functions(NamedTuple):
    init: Callable[[Tensor], ActivationState]
    observe: Callable[[ActivationState, Tensor], ActivationState]
    update: Callable[[ActivationState], ActivationState]
    apply: Callable[[ActivationState, Tensor], Tensor]


class ActivationSparsifier(Made, _Functions):
    """A mask of activations, as four pure functions.

    >>> act = sf.activations.activation_sparsifier(
    ...     torch.add, torch.abs, lambda x: x > 1.0
    ... )
    >>> state = act.update(
    ...     act.observe(act.init(torch.zeros(2)), torch.tensor([0.5, -3.0]))
    ... )
    >>> act.apply(state, torch.tensor([7.0, 8.0]))
    tensor([0., 8.])

    Attributes:
        init: Function of an activation that returns the first state, whose mask keeps
            everything; of the activation it reads shape, dtype and device alone.
        observe: Function of (state, activation) that returns the state with the
            activation in its data.
        update: Function of the state that returns it with the mask of its data.
        apply: Function of (state, activation) that returns the activation with +0.0
            where the mask is False.
    """


@described
def activation_sparsifier(
    aggregate: Callable[[Tensor, Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor],
    mask: Callable[[Tensor], Tensor],
    *,
    start: Callable[[Tensor], Tensor] = torch.zeros_like,
    features: Sequence[int] | None = None,
    axis: int | None = None,
) -> ActivationSparsifier:
    """A mask for an activation: `mask(reduce(aggregate of the observations))`.

    >>> act = sf.activations.activation_sparsifier(
    ...     torch.add, lambda total: total.mean(0), lambda mean: mean.abs() > 0.5
    ... )
    >>> x = torch.tensor([[1.0, 0.1, -2.0], [1.0, 0.2, 1.5]])
    >>> state = act.init(x)
    >>> for batch in (x, x):
    ...     state = act.observe(state, batch)
    >>> state = act.update(state)
    >>> state.mask, act.apply(state, x)[1]
    (tensor([ True, False, False]), tensor([1., 0., 0.]))

    Args:
        aggregate: Function of (old aggregate, activation) that gives the new aggregate,
            of the shape and dtype of the old one.
        reduce: Function of the aggregate.
        mask: Function of what `reduce` gives. Its bools broadcast to the activation.
        start: Function of an activation that gives the first old aggregate. For batches
            of several sizes give one without the batch.
        features: Indices along `axis`. Each of these slices of size 1 has an aggregate
            and a mask of its own, and the rest of the activation passes through. None
            is one mask for all of it.
        axis: The dimension of the features.

    Returns:
        Pure functions. `init(example)` gives a state, and `observe(state, x)` one with
        a new aggregate. `update(state)` makes a new mask and resets the aggregate;
        without an observation since the last update the mask stays. `apply(state, x)`
        gives a new tensor, +0.0 off the mask (-0.0, NaN and inf too), and is
        differentiable in `x`.

    Raises:
        TypeError: An argument is not a function, a feature is not an int, or a function
            gives something else than a tensor, a mask that is not bool or an aggregate
            of another dtype.
        ValueError: `features` come without `axis` or the reverse, none is given, one is
            negative, repeated or out of range, or shapes do not fit.

    Observations are detached. Works under `grad`, `vmap` and `compile`; there and
    eagerly both branches are computed and one is selected, without a device sync.
    """
    for name, fn in (
        ("aggregate", aggregate),
        ("reduce", reduce),
        ("mask", mask),
        ("start", start),
    ):
        if not callable(fn):
            raise TypeError(
                f"activation_sparsifier: expected {name} to be a function, got "
                f"{type(fn).__name__}"
            )
    chosen = _features(features, axis)
    dim = axis or 0

    def parts(x: Tensor) -> Tree:
        return x if chosen is None else _slices(x, chosen, dim)

    def masked(part: Tensor) -> Tensor:
        found = _tensor(mask(reduce(part)), "the mask")
        if found.dtype != torch.bool:
            raise TypeError(
                f"activation_sparsifier: expected mask to give bools, got {found.dtype}"
            )
        return found

    def init(example: Tensor) -> ActivationState:
        begun = optree.tree_map(
            lambda x: _tensor(start(x), "the start").detach(), parts(_tensor(example))
        )
        kept = optree.tree_map(lambda part: torch.ones_like(masked(part)), begun)
        return ActivationState(
            kept, begun, torch.zeros((), dtype=torch.int64, device=example.device)
        )

    def observe(state: ActivationState, x: Tensor) -> ActivationState:
        def step(old: Tensor, part: Tensor) -> Tensor:
            before = _like("the start", start(part), old)
            return _like(
                "the aggregate",
                aggregate(torch.where(state.seen == 0, before, old), part),
                old,
            )

        new = optree.tree_map(step, state.aggregate, parts(_tensor(x).detach()))
        return state._replace(aggregate=new, seen=state.seen + 1)

    def update(state: ActivationState) -> ActivationState:
        def renew(old: Tensor, part: Tensor) -> Tensor:
            return torch.where(
                state.seen > 0, _like("the mask", masked(part), old), old
            )

        masks = optree.tree_map(renew, state.mask, state.aggregate)
        return state._replace(mask=masks, seen=torch.zeros_like(state.seen))

    def apply(state: ActivationState, x: Tensor) -> Tensor:
        pieces = parts(_tensor(x))
        if chosen is None:
            return torch.where(_fitting(state.mask, x), x, 0.0)
        place = torch.arange(x.shape[dim], device=x.device).reshape(
            -1, *(1,) * (x.ndim - 1 - dim % x.ndim)
        )
        kept = everywhere(x)
        for feature, mask, piece in zip(chosen, state.mask, pieces, strict=True):
            kept = kept & (_fitting(mask, piece) | (place != feature))
        return torch.where(kept, x, 0.0)

    return ActivationSparsifier(init, observe, update, apply)


def _features(
    features: Sequence[int] | None, axis: int | None
) -> tuple[int, ...] | None:
    if (features is None) != (axis is None):
        given, needed = ("features", "axis") if axis is None else ("axis", "features")
        raise ValueError(
            f"activation_sparsifier: {given} needs {needed}, got {needed}=None"
        )
    if features is None:
        return None
    chosen = list(features)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(
            "activation_sparsifier: expected one feature or more, each once, got "
            f"{chosen}"
        )
    for feature in chosen:
        if not is_int(feature):
            raise TypeError(
                f"activation_sparsifier: expected features to be ints, got {feature!r}"
            )
        if feature < 0:
            raise ValueError(
                f"activation_sparsifier: expected features >= 0, got {feature}"
            )
    return tuple(chosen)


def _slices(x: Tensor, features: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"activation_sparsifier: expected an activation with axis {axis}, got "
            f"shape {tuple(x.shape)}"
        )
    if max(features) >= x.shape[axis]:
        raise ValueError(
            f"activation_sparsifier: expected features below {x.shape[axis]} along "
            f"axis {axis}, got {max(features)}"
        )
    return tuple(x.narrow(axis, feature, 1) for feature in features)


def _tensor(value: object, what: str = "an activation") -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"activation_sparsifier: expected {what} to be a tensor, got "
            f"{type(value).__name__}"
        )
    return value


def _like(what: str, value: object, old: Tensor) -> Tensor:
    new = _tensor(value, what)
    if new.shape != old.shape:
        raise ValueError(
            f"activation_sparsifier: expected {what} of shape {tuple(old.shape)}, got "
            f"{tuple(new.shape)}"
        )
    if new.dtype != old.dtype:
        raise TypeError(
            f"activation_sparsifier: expected {what} of dtype {old.dtype}, got "
            f"{new.dtype}"
        )
    return new


def _fitting(mask: Tensor, x: Tensor) -> Tensor:
    # A mask may have fewer dimensions, or sizes of 1; it never makes the activation
    # larger.
    pairs = zip(mask.shape[::-1], x.shape[::-1], strict=False)
    if mask.ndim > x.ndim or any(m not in (1, n) for m, n in pairs):
        raise ValueError(
            "activation_sparsifier: expected an activation that a mask of shape "
            f"{tuple(mask.shape)} broadcasts to, got shape {tuple(x.shape)}"
        )
    return mask
