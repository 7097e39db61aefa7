"""Counts of masks trees, and unions, intersections and differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import optree
import torch
from torch import Tensor

from sparsefn._engine.numbers import divide
from sparsefn._engine.processes import agreed, full_tensors
from sparsefn._engine.transforms import read_number
from sparsefn.core.state import State, check_masks
from sparsefn.core.tree import Tree, flatten, leaves_like, leaves_of, map_with_path


def _sizes(masks: Tree, params: Tree | None) -> list[tuple[Tensor, int]]:
    # Each mask with the number of weights that one of its entries counts for.
    shapes = masks if params is None else params
    check_masks(masks, shapes)
    found = []
    for mask, leaf in zip(leaves_of(masks), leaves_like(shapes, masks), strict=True):
        size = 1
        if not mask.ndim:
            size = 0 if params is None else leaf.numel()
        found.append((mask, size))
    return found


def _sum(counts: Sequence[Tensor]) -> int | Tensor:
    total = sum(counts[1:], counts[0]) if counts else 0
    known = read_number(total)
    return total if known is None else int(known)


def n_total(masks: Tree, params: Tree | None = None) -> int:
    """How many weights the sparsified leaves have.

    >>> masks = {"w": torch.tensor([[True, False, False]]), "b": torch.tensor(True)}
    >>> sf.masks.n_total(masks)
    3
    >>> sf.masks.n_total(masks, {"w": torch.zeros(1, 3), "b": torch.zeros(5)})
    8

    Args:
        masks: Masks tree. A 0-d mask has no size of its own. In a stack of states it
            has become (B,): count inside `vmap` or one member at a time.
        params: Tree like `masks`, with which every leaf counts. None counts sparsified
            leaves only.

    Returns:
        An int in any case, as shapes say it.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The masks do not fit `params`.
    """
    return sum(mask.numel() * size for mask, size in _sizes(masks, params))


def n_kept(masks: Tree, params: Tree | None = None) -> int | Tensor:
    """How many weights of the sparsified leaves are kept.

    >>> sf.masks.n_kept(
    ...     {"w": torch.tensor([[True, False, False]]), "b": torch.tensor(True)}
    ... )
    1

    Args:
        masks: Masks tree, as in `n_total`.
        params: Tree like `masks`, with which the weights of leaves that are not
            sparsified count as kept. None leaves them out.

    Returns:
        An int, or a 0-d int64 tensor where `vmap` or `torch.compile` hides values.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The masks do not fit `params`.
    """
    # a 0-d mask keeps its leaf whole, as its shape alone says
    rows = _sizes(masks, params)
    own = []
    for mask, _ in rows:
        if mask.ndim:
            own.append(mask)
        else:
            own.append(torch.ones_like(mask))
    leaves = {"masks": flatten(masks)[0]}
    counts = agreed({"call": "n_kept"}, leaves, lambda: kept_in(own))
    pairs = zip(counts, rows, strict=True)
    return _sum([count * size for count, (_, size) in pairs])


def kept_in(masks: Sequence[Tensor]) -> list[Tensor]:
    """How many entries each mask keeps, 0-d int64; of a DTensor over all processes.

    >>> kept_in([torch.tensor([True, False]), torch.tensor([True, True])])
    [tensor(1), tensor(2)]
    """
    return full_tensors([torch.count_nonzero(mask) for mask in masks])


def sparsity(masks: Tree, params: Tree | None = None) -> float | Tensor:
    """Fraction of zeros among the weights of the sparsified leaves.

    >>> sf.masks.sparsity(
    ...     {"w": torch.tensor([True, False, False, False]), "b": torch.tensor(True)}
    ... )
    0.75
    >>> sf.masks.sparsity({"b": torch.tensor(True)})
    0.0

    Args:
        masks: Masks tree, as in `n_total`.
        params: Tree like `masks`, with which the fraction is of all weights. None
            leaves out leaves that are not sparsified.

    Returns:
        A float, or a 0-d float64 tensor of the same bits where a transform hides
        values; 0.0 where there are no weights.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The masks do not fit `params`.
    """
    total = n_total(masks, params)
    pruned = total - n_kept(masks, params)
    if isinstance(pruned, Tensor):
        pruned = pruned.double()
    return divide(pruned, float(max(total, 1)))


def _pairwise(fn: Callable[[str, Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tree:
    check_masks(a, a)
    check_masks(b, b)

    def checked(path: str, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim and y.ndim and x.shape != y.shape:
            raise ValueError(
                f"expected two masks of one shape at {path!r}, got {tuple(x.shape)} "
                f"and {tuple(y.shape)}"
            )
        return fn(path, x, y)

    return map_with_path(checked, a, b)


def intersect(a: Tree, b: Tree) -> Tree:
    """What both masks trees keep; a 0-d True keeps everything.

    >>> sf.masks.intersect(
    ...     {"w": torch.tensor([True, False])}, {"w": torch.tensor(True)}
    ... )
    {'w': tensor([ True, False])}

    Args:
        a: Masks tree.
        b: Masks tree of the same structure and shapes.

    Returns:
        Masks tree like `a`.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The structures differ, or the shapes of two masks at a path.
    """
    return _pairwise(_both, a, b)


def _both(path: str, x: Tensor, y: Tensor) -> Tensor:
    if x.ndim == 0:
        return y
    if y.ndim == 0:
        return x
    return x & y


def union(a: Tree, b: Tree) -> Tree:
    """What either masks tree keeps; a 0-d True keeps everything, so it wins.

    >>> sf.masks.union(
    ...     {"w": torch.tensor([True, False])}, {"w": torch.tensor([False, False])}
    ... )
    {'w': tensor([ True, False])}

    Args:
        a: Masks tree.
        b: Masks tree of the same structure and shapes.

    Returns:
        Masks tree like `a`.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The structures differ, or the shapes of two masks at a path.
    """
    return _pairwise(_either, a, b)


def _either(path: str, x: Tensor, y: Tensor) -> Tensor:
    if x.ndim == 0:
        return x
    if y.ndim == 0:
        return y
    return x | y


def explored(seen: Tree | None, state_or_masks: State | Tree) -> Tree:
    """The union of the masks so far: what any state before, or this one, keeps.

    >>> algorithm = sf.set(0.5, when=sf.always(), key=sf.random.key(0))
    >>> state = algorithm.init({"w": torch.ones(4, 4), "b": torch.ones(4)})
    >>> seen = sf.masks.explored(None, state)
    >>> for step in range(5):
    ...     state = algorithm.update(state, state.params, step)
    ...     seen = sf.masks.explored(seen, state)
    >>> sf.masks.n_kept(state.masks), sf.masks.n_kept(seen)
    (8, 13)

    Args:
        seen: Masks tree of the states before, or None before the first state.
        state_or_masks: A state, of which the masks alone are read, or its masks.

    Returns:
        Masks tree of new tensors.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The structures differ, or the shapes of two masks at a path.

    Call it wherever masks may have changed; `sf.report.itop` counts it.
    """
    masks = (
        state_or_masks.masks if isinstance(state_or_masks, State) else state_or_masks
    )
    check_masks(masks, masks)
    # `union` returns a 0-d mask of either tree unchanged.
    both = masks if seen is None else union(seen, masks)

    def own(mask: Tensor) -> Tensor:
        if seen is not None and mask.ndim:
            return mask
        return mask.clone()

    return optree.tree_map(own, both)


def difference(a: Tree, b: Tree, params: Tree | None = None) -> Tree:
    """What `a` keeps and `b` does not: of new and old masks, what grew.

    >>> new, old = {"w": torch.tensor([True, True])}, {"w": torch.tensor([True, False])}
    >>> sf.masks.difference(new, old)
    {'w': tensor([False,  True])}

    Args:
        a: Masks tree.
        b: Masks tree of the same structure and shapes.
        params: Tree like `a`, which says the shape of a leaf where both masks are 0-d.
            Nothing is left there.

    Returns:
        Masks tree like `a`.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The structures differ, or the shapes of two masks at a path; two
            masks at a path are 0-d, and there are no `params`; `a` does not fit
            `params`.
    """
    leaves = {}
    if params is not None:
        check_masks(a, params)
        leaves = flatten(params)[0]

    def minus(path: str, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim or y.ndim:
            if y.ndim == 0:
                return torch.zeros_like(x)
            return x & ~y
        if path not in leaves:
            raise ValueError(
                f"expected params: two 0-d masks at {path!r} leave nothing, and of no "
                "known shape"
            )
        return torch.zeros(leaves[path].shape, dtype=torch.bool, device=x.device)

    return _pairwise(minus, a, b)


def hamming(a: Tree, b: Tree) -> int | Tensor:
    """In how many positions two masks trees differ; a 0-d True counts as full.

    >>> sf.masks.hamming({"w": torch.tensor([True, False])}, {"w": torch.tensor(True)})
    1

    Args:
        a: Masks tree.
        b: Masks tree of the same structure and shapes.

    Returns:
        An int, or a 0-d int64 tensor where a transform hides values.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: The structures differ, or the shapes of two masks at a path.
    """
    differs = _pairwise(lambda path, x, y: x ^ y, a, b)
    return _sum(kept_in(leaves_of(differs)))
