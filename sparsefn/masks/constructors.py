"""Masks trees that are made: from zeros, from a dict, shuffled, in a checkerboard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn._engine.draws import draws_of
from sparsefn._engine.leaves import brought
from sparsefn._engine.numbers import like
from sparsefn._engine.processes import check_plain
from sparsefn.core import random
from sparsefn.core.checks import check_int, check_sparsity
from sparsefn.core.state import Where, check_masks, masks_tree
from sparsefn.core.tree import Tree, flatten, map_with_path
from sparsefn.core.tree.where import default_where, select_leaves


def from_zeros(params: Tree, where: Where = default_where) -> Tree:
    """The masks that keep the weights that are not zero.

    >>> sf.masks.from_zeros(
    ...     {"weight": torch.tensor([[0.0, 2.0]]), "bias": torch.zeros(1)}
    ... )
    {'weight': tensor([[False,  True]]), 'bias': tensor(True)}

    Args:
        params: Tree of floating-point tensors. NaN is not zero, -0.0 is.
        where: Which leaves get a mask of their shape: a function of (path, leaf), a
            glob or a sequence of globs. Default: the weights of layers.

    Returns:
        Masks tree like `params`, with the 0-d True for every other leaf.

    Raises:
        TypeError: A leaf is not a floating-point tensor, or `where` of another kind.
        ValueError: A glob matches no path, or a weight is computed from a chosen leaf,
            as from `weight_v` of weight norm.

    Warns where no leaf is chosen, and where `sf.default_where` leaves out a weight that
    a parametrization computes.
    """
    return masks_tree(
        params, {path: leaf != 0 for path, leaf in select_leaves(params, where).items()}
    )


def from_dict(
    params: Tree, given: Mapping[str, Tensor], where: Where = default_where
) -> Tree:
    """A masks tree from masks by dotted path, as another program or a file holds them.

    >>> sf.masks.from_dict(
    ...     {"weight": torch.ones(1, 2), "bias": torch.ones(1)},
    ...     {"weight": torch.tensor([[0.0, 1.0]])},
    ... )
    {'weight': tensor([[False,  True]]), 'bias': tensor(True)}

    Args:
        params: Tree of floating-point tensors.
        given: Tensors of any dtype by dotted path, of the shapes of the leaves. An
            entry that is not zero keeps its weight.
        where: Which leaves must have a mask, as in `from_zeros`.

    Returns:
        Masks tree like `params`, with the 0-d True for leaves that are not given.

    Raises:
        TypeError: As in `from_zeros`.
        ValueError: A chosen leaf has no mask, `params` have no leaf at a path, a mask
            has another shape, or as in `from_zeros`.

    Warns as `from_zeros` does.
    """
    leaves = flatten(params)[0]
    known = ", ".join(map(repr, given)) or "none"
    for path, mask in given.items():
        if path not in leaves:
            raise ValueError(
                f"from_dict: params have no leaf at {path!r}; they are at "
                f"{', '.join(map(repr, leaves))}"
            )
        if mask.shape != leaves[path].shape:
            want = tuple(leaves[path].shape)
            raise ValueError(
                f"from_dict: expected a mask of shape {want} at {path!r}, got "
                f"{tuple(mask.shape)}"
            )
    for path in select_leaves(params, where):
        if path not in given:
            raise ValueError(
                f"from_dict: expected a mask for {path!r}, which where= selects; "
                f"there are {known}"
            )
    return masks_tree(params, {path: mask != 0 for path, mask in given.items()})


def shuffle(masks: Tree, key: Tensor, *, within: int | None = None) -> Tree:
    """Masks of the same counts in every leaf, at random positions.

    >>> masks = {
    ...     "w": torch.tensor([[True, True, True, False, False, False]]),
    ...     "b": torch.tensor(True),
    ... }
    >>> shuffled = sf.masks.shuffle(masks, sf.random.key(0))
    >>> int(shuffled["w"].sum()), shuffled["b"]
    (3, tensor(True))

    >>> rows = {
    ...     "w": torch.tensor([[True, True, False, False], [True, True, True, False]])
    ... }
    >>> sf.masks.shuffle(rows, sf.random.key(0), within=0)["w"].sum(1)
    tensor([2, 3])

    Args:
        masks: Masks tree.
        key: A key from `sf.random.key`. Positions depend on it and the path alone.
        within: A dimension, of which each index keeps its count: 0 keeps the number of
            inputs of every output of a linear layer, 1 the number of outputs of every
            input. None keeps only the count of the leaf.

    Returns:
        Masks tree like `masks`. Every arrangement that keeps the counts is equally
        likely.

    Raises:
        TypeError: A leaf is not a bool mask, `key` is no key, or `within` is no int.
        ValueError: A mask is a DTensor, or has no dimension `within`.

    A run with such masks says what a method's choice of weights adds to its counts.

    Frankle et al. 2021, arXiv 2009.08576, sec. 5.
    """
    check_masks(masks, masks)
    if within is not None:
        check_int("shuffle", "within", within)

    def shuffled(path: str, mask: Tensor) -> Tensor:
        check_plain("shuffle", path, mask)
        if not mask.ndim:
            return mask
        own = brought(random.leaf_key(key, path), mask.device)
        if within is None:
            lines = mask[None]
        elif -mask.ndim <= within < mask.ndim:
            lines = mask.movedim(within, 0)
        else:
            raise ValueError(
                f"shuffle: expected masks with a dimension {within}, got "
                f"{tuple(mask.shape)} at {path!r}"
            )
        flat = lines.reshape(lines.shape[0], math.prod(lines.shape[1:]))
        draws = draws_of(own, (flat.numel(),), None, "pairs", torch.int64)
        order = draws.reshape(flat.shape).argsort(dim=1, stable=True)
        mixed = flat.gather(1, order).reshape(lines.shape)
        if within is None:
            return mixed[0]
        return mixed.movedim(0, within).contiguous()

    return map_with_path(shuffled, masks)


def checkerboard(
    shape: Sequence[int],
    sparsity: float | Tensor,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """A mask of evenly spread positions, moved along from row to row.

    >>> sf.masks.checkerboard((2, 4), 0.5)
    tensor([[False,  True, False,  True],
            [ True, False,  True, False]])

    Args:
        shape: Sizes of one dimension or more; leading dimensions count as rows in
            row-major order.
        sparsity: Fraction of zeros: a float in [0, 1] or a 0-d floating-point tensor,
            which may be batched and whose NaN is 0. 1.0, and any density under 2**-31,
            keeps nothing.
        device: Where the mask is made. Default: the device of a tensor `sparsity`, else
            the CPU.

    Returns:
        Bool tensor of this shape. Every row of the last dimension keeps about
        `(1 - sparsity) * columns`.

    Raises:
        TypeError: `sparsity` is neither a float nor a 0-d floating-point tensor.
        ValueError: A float `sparsity` is outside [0, 1], or `shape` has no dimension or
            a negative one.
    """
    check_sparsity(sparsity)
    if device is None:
        if isinstance(sparsity, Tensor):
            device = sparsity.device
        else:
            device = torch.device("cpu")
    model = torch.empty((), device=device)
    level = like(model, sparsity).to(model.device, torch.float64)
    density = 1 - level.nan_to_num(0.0)
    if not shape or min(shape) < 0:
        raise ValueError(
            "expected a shape of one dimension or more, none negative, got "
            f"{tuple(shape)}"
        )
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    some = density >= 2.0**-31  # below, the int64 indices would overflow
    density = torch.where(some, density, 1.0)
    length = columns + torch.ceil(columns / density + 1e-5).long() - 1
    stride = torch.floor(1 / density - 1e-5).long()
    row = torch.arange(rows, device=device)[:, None] * stride
    index = (row + torch.arange(columns, device=device)) % length.clamp(min=1)
    kept = torch.floor((index + 1) * density + 1e-5) != torch.floor(
        index * density + 1e-5
    )
    return (kept & some).reshape(tuple(shape))
