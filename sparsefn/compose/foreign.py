"""Optimizers from elsewhere: finding moments in their states, and spending a first update that is special."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from sparsefn.tree import Tree, leaves_of, opened, paths, same_structure

_MARK = 1 << 25  # a tensor may have one dimension of this size or more, and not two
_WAY_OUT = "pass mask_moments=False and reset_grown=False to leave its state alone"


class ForeignOptimizer(Protocol):
    """An optimizer as `with_optimizer` takes it: a pair init, update in the shape of TorchOpt and optax.

    >>> isinstance(sf.optimizers.sgd(0.1), tuple)
    True

    `init(params) -> state`; `update(grads, state, *, params, inplace=False) -> (updates, state)`,
    where updates are added to the params.
    """

    def init(self, params: Tree) -> Tree:
        """Make the optimizer's state."""

    def update(self, updates: Tree, state: Tree, *, params: Tree, inplace: bool) -> Tree:
        """Turn gradients into updates."""


def name_of(optimizer: object) -> str:
    """The name of an optimizer in error messages.

    >>> from sparsefn.compose import foreign
    >>> foreign.name_of(torch.optim.Adam)
    'Adam'
    """
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))


class MomentPlaces(NamedTuple):
    """For every leaf of an optimizer's state, the index of the trained leaf that it is a moment of, or -1.

    >>> from sparsefn.compose import foreign
    >>> foreign.MomentPlaces([-1, 0], (0, 0)).owners
    [-1, 0]

    `like` is a tree of the state's structure.
    """

    owners: list[int]
    like: Tree


def find(optimizer: ForeignOptimizer, trained: Tree, sparse: Sequence[bool]) -> MomentPlaces:
    """Find the moments in an optimizer's state for a tree, some of whose leaves are sparse.

    >>> from sparsefn.compose import foreign
    >>> params = {"b": torch.ones(2), "w": torch.ones(2, 2)}
    >>> foreign.find(sf.optimizers.sgd(0.1, momentum=0.9), params, [False, True]).owners
    [-1, 0, 1]

    A moment is a tensor of the shape of its leaf. Statistics of rows or columns, as Adafactor's, belong to no
    weight. ValueError for a state that joins leaves or holds a sparse one in another shape, and for an optimizer
    whose init fails on tensors of the meta device.
    """
    # Moments are recognized by shape: TorchOpt keeps them as flat lists, whose structure matches no treedef. The
    # largest size of each leaf is made unique. The other sizes stay: which moments an optimizer keeps may depend on
    # them.
    leaves, rebuild = opened(trained)
    shapes = [list(leaf.shape) for leaf in leaves]
    for i, shape in enumerate(shapes):
        if shape:
            shape[shape.index(max(shape))] = _MARK + i
    probes = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, leaves, strict=True)]

    def owner(path: str, leaf: object) -> int:
        sizes = list(leaf.shape) if isinstance(leaf, Tensor) else []
        marks = {size - _MARK for size in sizes if size >= _MARK}
        if not marks:
            return -1
        i = marks.pop()
        if not marks and i < len(shapes):
            if sizes == shapes[i]:
                return i
            part = any(sizes.count(size) < shapes[i].count(size) for size in shapes[i])
            if part or not sparse[i]:
                return -1
        raise ValueError(
            f"with_optimizer: cannot find moments of pruned weights in the state of {name_of(optimizer)}: at {path!r} "
            f"it joins leaves, or holds one in another shape; {_WAY_OUT}"
        )

    state = _init_on_meta(optimizer, rebuild(probes))
    return MomentPlaces([owner(*row) for row in zip(paths(state), leaves_of(state), strict=True)], state)


def _init_on_meta(optimizer: ForeignOptimizer, probes: Tree) -> Tree:
    try:
        return optimizer.init(probes)
    except Exception as error:
        raise ValueError(
            f"with_optimizer: cannot find the moments of {name_of(optimizer)}: its init fails on tensors of the meta "
            f"device ({type(error).__name__}: {error}); {_WAY_OUT}"
        ) from error


def owners_in(opt: Tree, found: MomentPlaces, optimizer: object, leaves: Sequence[Tensor]) -> list[int]:
    """The owners of a state's leaves, after checking that the state fits what was found.

    >>> from sparsefn.compose import foreign
    >>> foreign.owners_in({"mu": torch.ones(2)}, foreign.MomentPlaces([0], {"mu": 0}), "adam", [torch.ones(2)])
    [0]

    ValueError for a state of another structure, or with another shape in place of a moment.
    """
    if same_structure(found.like, opt) and all(
        i < 0 or leaf.shape == leaves[i].shape for i, leaf in zip(found.owners, leaves_of(opt), strict=True)
    ):
        return found.owners
    raise ValueError(
        f"with_optimizer: cannot find the moments of {name_of(optimizer)}: its state takes another form for leaves of "
        f"other sizes; {_WAY_OUT}"
    )


def no_tensor(optimizer: object, opt: Tree, i: int) -> str:
    """The error for a state that holds anything but tensors."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(opt)
    holder = type(accessors[i][:-1](opt)).__name__
    return (
        f"with_optimizer: expected the state of {name_of(optimizer)} to hold tensors, as vmap, checkpoints and "
        f"compiled code carry nothing else, got {type(leaves[i]).__name__} at {paths(opt)[i]!r} of {holder}"
    )
