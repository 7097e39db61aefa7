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

    Leaves that `where` does not choose get the 0-d True. NaN is not zero, -0.0 is.
    Raises and warns as `where` does: see `sparsefn.where.select_leaves`.
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

    Weights that are not zero are kept. Leaves that `where` does not choose and that are
    not given are dense.
    Raises ValueError for a chosen leaf without a mask, a path that params lack, and
    another shape; warns and raises as `where` does.
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
                f"from_dict: expected a mask for {path!r}, which is to be sparse; "
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

    With `within`, a dimension, positions are shuffled within each of its indices, and
    each keeps its count: within 0 every output of a linear layer keeps its number of
    inputs, within 1 every input its number of outputs.

    >>> rows = {
    ...     "w": torch.tensor([[True, True, False, False], [True, True, True, False]])
    ... }
    >>> sf.masks.shuffle(rows, sf.random.key(0), within=0)["w"].sum(1)
    tensor([2, 3])

    Every arrangement that keeps the counts is equally likely, by key and path alone.
    Raises TypeError for a leaf that is not a bool mask, ValueError for a DTensor and
    for a mask without that dimension.

    So a run says what a method's choice of weights adds to its counts: Frankle et al.
    2021, arXiv 2009.08576, sec. 5.
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

    Every row of the last dimension keeps about `(1 - sparsity) * columns`; leading
    dimensions count as rows in row-major order. `sparsity` is a float in [0, 1] or a
    0-d floating tensor (which may be batched; NaN is 0). 1.0, and any density under
    2**-31, keeps nothing. Raises TypeError for an int sparsity, ValueError outside [0,
    1] (the value of a tensor is not looked at) or for a shape without dimensions.
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
