"""Weights whose products are seen without a look at all other operations."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import functional

from sparsefn.calibration.products import Watch
from sparsefn.tree import Tree, leaves_of


class Watched(Tensor):
    """A leaf, or a view of one, which has torch's functions run under a `Watch` where
    it is among their arguments.

    >>> weight = torch.ones(3, 2)
    >>> watch = Watch({"w": weight}, gram=False)
    >>> out = torch.ones(5, 2) @ under_watch(weight, watch).T
    >>> type(out), watch.stats()
    (<class 'torch.Tensor'>, {'w': {'count': tensor(5), 'square': tensor([5., 5.],
    dtype=torch.float64)}})

    Code that torch does not ask, as `torch.vmap` and `torch.jit`, may pass it by:
    compare with the `Watch` alone.
    """

    plain: Tensor
    watch: Watch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func is functional.linear
            and not kwargs
            and (out := _linear(*args)) is not None
        ):
            return out
        watch = next(
            x.watch for x in leaves_of((args, kwargs)) if isinstance(x, Watched)
        )
        args, kwargs = unwatched((args, kwargs or {}))
        with watch:
            out = func(*args, **kwargs)
        return optree.tree_map(
            lambda x: (
                under_watch(x, watch) if isinstance(x, Tensor) and watch.leaf(x) else x
            ),
            out,
        )


def under_watch(x: Tensor, watch: Watch) -> Tensor:
    """A tensor in the memory of a leaf, so that a watch sees what it is multiplied by.

    >>> under_watch(torch.ones(1), Watch({}, gram=False)) + 1
    tensor([2.])
    """
    out = x.as_subclass(Watched)
    out.plain = x
    out.watch = watch
    return out


def unwatched(tree: Tree) -> Any:
    """A tree with the tensors themselves.

    >>> unwatched([under_watch(torch.ones(1), Watch({}, gram=False)), 2])
    [tensor([1.]), 2]
    """
    return optree.tree_map(lambda x: x.plain if isinstance(x, Watched) else x, tree)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    # Most products by far: of a whole leaf with rows of plain numbers that no autocast
    # turns into others.
    if (
        type(x) is not Tensor
        or type(weight) is not Watched
        or x.ndim < 2
        or isinstance(bias, Watched)
    ):
        return None
    known = weight.watch.leaf(weight.plain)
    if (
        known is None
        or known[1] is not weight.plain
        or torch.is_autocast_enabled(x.device.type)
    ):
        return None
    out = functional.linear(x, weight.plain, bias)
    weight.watch.add(*known, weight.plain, x.flatten(0, -2))
    return out
