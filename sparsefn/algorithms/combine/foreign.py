"""Optimizers from elsewhere: finding moments in their states, and spending a first
update that is special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from sparsefn.core.tree import Tree, leaves_of, opened, paths

_MARK = 1 << 25  # a tensor may have one dimension of this size or more, and not two
WAY_OUT = "pass mask_moments=False and reset_grown=False to leave its state alone"

# Names that optimizers give to a basis, beside which moments may have the weight's
# shape and belong to no weight: an entry is a direction. GaLore, Fira, APOLLO and Conda
# have a projector, SOAP and Alice Q.
BASES = frozenset(
    {"projector", "ortho_matrix", "Q", "eigenvectors", "corrected_eigenvalues"}
)

Kind = Literal["entries", "reshaped", "shared", "other"]


class ForeignOptimizer(Protocol):
    """An optimizer as `with_optimizer` takes it: a pair of init and update.

    >>> isinstance(sf.optimizers.sgd(0.1), tuple)
    True

    `init(params) -> state`; `update(grads, state, *, params, inplace=False) ->
    (updates, state)`, where updates are added to the params.
    """

    def init(self, params: Tree) -> Tree:
        """Make the optimizer's state."""

    def update(
        self, updates: Tree, state: Tree, *, params: Tree, inplace: bool
    ) -> Tree:
        """Turn gradients into updates."""


def name_of(optimizer: object) -> str:
    """The name of an optimizer in error messages.

    >>> from sparsefn.algorithms.combine import foreign
    >>> foreign.name_of(torch.optim.Adam)
    'Adam'
    """
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))


def layout(shape: Sequence[int], weight: Sequence[int]) -> Kind:
    """How a tensor of an optimizer's state relates to a weight, by their shapes.

    >>> from sparsefn.algorithms.combine import foreign
    >>> [foreign.layout(shape, (6, 8)) for shape in [(6, 8), (48,), (1, 6, 8)]]
    ['entries', 'reshaped', 'reshaped']
    >>> [foreign.layout(shape, (6, 8)) for shape in [(), (6,), (1, 8), (8, 8), (3,)]]
    ['shared', 'shared', 'shared', 'shared', 'shared']
    >>> [foreign.layout(shape, (6, 8)) for shape in [(4, 8), (8, 6), (2, 6, 8)]]
    ['other', 'other', 'other']

    "entries" has the weight's shape, and "reshaped" its entries in the same order.
    "shared" are statistics of several entries: of all, of rows, columns or blocks, or
    the square factors of Shampoo. "other" is anything else, such as moments of low
    rank, transposed ones, or several of them in one tensor.
    """
    if tuple(shape) == tuple(weight):
        return "entries"
    sizes = [size for size in shape if size != 1]
    own = [size for size in weight if size != 1]
    if sizes and _merges(sizes, own):
        return "reshaped"
    if len(sizes) < 2:
        return "shared"
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        return "shared"
    lacks = any(sizes.count(size) < own.count(size) for size in own)
    if lacks and set(sizes) <= set(own):
        return "shared"
    return "other"


def _merges(sizes: Sequence[int], own: Sequence[int]) -> bool:
    """Whether sizes are a weight's sizes, some adjacent ones multiplied."""
    left = list(own)
    for size in sizes:
        product = 1
        while left and product < size:
            product *= left.pop(0)
        if product != size:
            return False
    return not left


class MomentPlaces(NamedTuple):
    """For every leaf of an optimizer's state, the index of the sparse leaf that it is a
    moment of, or -1.

    >>> from sparsefn.algorithms.combine import foreign
    >>> foreign.MomentPlaces([-1, 0], (0, 0)).owners
    [-1, 0]

    `like` is a tree of the state's structure.
    """

    owners: list[int]
    like: Tree


def find(
    optimizer: ForeignOptimizer, trained: Tree, sparse: Sequence[bool]
) -> MomentPlaces:
    """Find the moments in an optimizer's state for a tree with some sparse leaves.

    >>> from sparsefn.algorithms.combine import foreign
    >>> params = {"b": torch.ones(2), "w": torch.ones(2, 2)}
    >>> foreign.find(sf.optimizers.sgd(0.1, momentum=0.9), params, [False, True]).owners
    [-1, -1, 1]

    A moment is a tensor of the shape of its leaf. Statistics of rows or columns, as
    Adafactor's, belong to no weight. ValueError for a state that joins leaves or holds
    a sparse one in another shape, in integers or in another basis, and for an optimizer
    whose init fails on tensors of the meta device.
    """
    # Moments are recognized by shape: TorchOpt keeps them as flat lists, whose
    # structure matches no treedef. The largest size of each leaf is made unique. The
    # other sizes stay: which moments an optimizer keeps may depend on them.
    leaves, rebuild = opened(trained)
    shapes = [list(leaf.shape) for leaf in leaves]
    for i, shape in enumerate(shapes):
        if shape:
            shape[shape.index(max(shape))] = _MARK + i
    probes = [
        torch.empty(s, dtype=x.dtype, device="meta")
        for s, x in zip(shapes, leaves, strict=True)
    ]

    def owner(path: str, leaf: object) -> int:
        if not isinstance(leaf, Tensor):
            return -1
        sizes = list(leaf.shape)
        marks = {size - _MARK for size in sizes if size >= _MARK}
        if not marks:
            return -1
        i = marks.pop()
        if marks or i >= len(shapes):
            raise refused(path, "it joins leaves, or holds one in another shape")
        kind = layout(sizes, shapes[i])
        if kind == "shared" or not sparse[i]:
            return -1
        if kind != "entries":
            raise refused(path, "it joins leaves, or holds one in another shape")
        if not holds_numbers(leaf):
            raise refused(
                path, f"it holds {leaf.dtype} entries, whose zero is not known"
            )
        return i

    def refused(path: str, what: str) -> ValueError:
        return ValueError(
            "with_optimizer: cannot find moments of pruned weights in the state of "
            f"{name_of(optimizer)}: at {path!r} {what}; {WAY_OUT}"
        )

    state = _init_on_meta(optimizer, rebuild(probes))
    names = paths(state)
    # a weight may have such a name
    bases = BASES.difference(*(path.split(".") for path in paths(trained)))
    for path in names if any(sparse) else ():
        if not bases.isdisjoint(path.split(".")):
            raise refused(
                path,
                "it holds a basis, so that moments belong to directions and not to "
                "weights",
            )
    return MomentPlaces(
        [owner(*row) for row in zip(names, leaves_of(state), strict=True)], state
    )


def holds_numbers(leaf: Tensor) -> bool:
    """Whether a tensor holds numbers and no codes, flags or counts: its zero is zero.

    >>> from sparsefn.algorithms.combine import foreign
    >>> (
    ...     foreign.holds_numbers(torch.ones(2)),
    ...     foreign.holds_numbers(torch.ones(2, dtype=torch.uint8)),
    ... )
    (True, False)
    """
    return leaf.is_floating_point() or leaf.is_complex()


def _init_on_meta(optimizer: ForeignOptimizer, probes: Tree) -> Tree:
    try:
        return optimizer.init(probes)
    except Exception as error:
        raise ValueError(
            f"with_optimizer: cannot find the moments of {name_of(optimizer)}: its "
            f"init fails on tensors of the meta device ({type(error).__name__}: "
            f"{error}); {WAY_OUT}"
        ) from error


def no_tensor(optimizer: object, opt: Tree, i: int) -> str:
    """The error for a state that holds anything but tensors."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(opt)
    holder = type(accessors[i][:-1](opt)).__name__
    return (
        f"with_optimizer: expected the state of {name_of(optimizer)} to hold tensors, "
        "as vmap, checkpoints and compiled code carry nothing else, got "
        f"{type(leaves[i]).__name__} at {paths(opt)[i]!r} of {holder}"
    )
