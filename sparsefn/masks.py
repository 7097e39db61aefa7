"""Masks trees: counting, set operations, building and packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsefn import random
from sparsefn.engine.checks import check_sparsity
from sparsefn.engine.numbers import divide, like
from sparsefn.engine.transforms import concrete, visible
from sparsefn.state import Where, check_masks, masks_tree
from sparsefn.tree import Tree, flatten, leaves_like, map_with_path
from sparsefn.where import default_where, select_leaves


def _sizes(masks: Tree, params: Tree | None) -> list[tuple[Tensor, int]]:
    # Each mask with the number of weights one of its entries stands for.
    shapes = masks if params is None else params
    check_masks(masks, shapes)
    rows = zip(flatten(masks)[0].values(), leaves_like(shapes, masks), strict=True)
    return [(mask, 1 if mask.ndim else 0 if params is None else leaf.numel()) for mask, leaf in rows]


def _known(count: Tensor | int) -> int | Tensor:
    known = concrete(count)
    return count if known is None else int(known)


def n_total(masks: Tree, params: Tree | None = None) -> int:
    """How many weights the sparsified leaves have.

    >>> masks = {"w": torch.tensor([[True, False, False]]), "b": torch.tensor(True)}
    >>> sf.masks.n_total(masks)
    3
    >>> sf.masks.n_total(masks, {"w": torch.zeros(1, 3), "b": torch.zeros(5)})
    8

    A 0-d mask has no size of its own, so a masks tree alone counts sparsified leaves only; with
    `params` every leaf counts. Always an int: shapes say it. In a stack of states 0-d masks
    have become (B,): count inside `vmap` or one member at a time.
    Raises TypeError for a leaf that is not a bool mask, ValueError where masks do not fit params.
    """
    return sum(mask.numel() * size for mask, size in _sizes(masks, params))


def n_kept(masks: Tree, params: Tree | None = None) -> int | Tensor:
    """How many weights of the sparsified leaves are kept.

    >>> sf.masks.n_kept({"w": torch.tensor([[True, False, False]]), "b": torch.tensor(True)})
    1

    An int, or a 0-d int64 tensor where `vmap` or `torch.compile` hides values. With `params` the
    weights of leaves that are not sparsified count as kept. Raises as `n_total` does.
    """
    rows = _sizes(masks, params)  # a 0-d mask keeps its leaf whole, as its shape alone says
    counts = [torch.count_nonzero(mask if mask.ndim else torch.ones_like(mask)) * size for mask, size in rows]
    return _known(sum(counts[1:], counts[0])) if counts else 0


def sparsity(masks: Tree, params: Tree | None = None) -> float | Tensor:
    """Fraction of zeros among the weights of the sparsified leaves.

    >>> sf.masks.sparsity({"w": torch.tensor([True, False, False, False]), "b": torch.tensor(True)})
    0.75
    >>> sf.masks.sparsity({"b": torch.tensor(True)})
    0.0

    A float, or a 0-d float64 tensor of the same bits where a transform hides values. With `params`
    it is the fraction over all weights; 0.0 where there are none. Raises as `n_total` does.
    """
    total = n_total(masks, params)
    pruned = total - n_kept(masks, params)
    return divide(pruned.double() if isinstance(pruned, Tensor) else float(pruned), float(max(total, 1)))


def _pairwise(fn: Callable[[str, Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tree:
    check_masks(a, a)
    check_masks(b, b)

    def checked(path: str, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim and y.ndim and x.shape != y.shape:
            raise ValueError(f"expected two masks of one shape at {path!r}, got {tuple(x.shape)} and {tuple(y.shape)}")
        return fn(path, x, y)

    return map_with_path(checked, a, b)


def intersect(a: Tree, b: Tree) -> Tree:
    """What both masks trees keep; a 0-d True keeps everything.

    >>> sf.masks.intersect({"w": torch.tensor([True, False])}, {"w": torch.tensor(True)})
    {'w': tensor([ True, False])}

    Raises ValueError for another structure or shape, naming the path, TypeError for a mask not bool.
    """
    return _pairwise(lambda path, x, y: y if x.ndim == 0 else x if y.ndim == 0 else x & y, a, b)


def union(a: Tree, b: Tree) -> Tree:
    """What either masks tree keeps; a 0-d True keeps everything, so it wins.

    >>> sf.masks.union({"w": torch.tensor([True, False])}, {"w": torch.tensor([False, False])})
    {'w': tensor([ True, False])}

    Raises as `intersect` does.
    """
    return _pairwise(lambda path, x, y: x if x.ndim == 0 else y if y.ndim == 0 else x | y, a, b)


def difference(a: Tree, b: Tree, params: Tree | None = None) -> Tree:
    """What `a` keeps and `b` does not: of new and old masks, what grew.

    >>> new, old = {"w": torch.tensor([True, True])}, {"w": torch.tensor([True, False])}
    >>> sf.masks.difference(new, old)
    {'w': tensor([False,  True])}

    Between two 0-d masks nothing is left, and that needs a shape, as a 0-d mask is always True:
    then `params` must be given (ValueError). Raises as `intersect` does.
    """
    shapes = {} if params is None else {path: leaf.shape for path, leaf in flatten(params)[0].items()}
    if params is not None:
        check_masks(a, params)

    def minus(path: str, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim or y.ndim:
            return torch.zeros_like(x) if y.ndim == 0 else x & ~y
        if path not in shapes:
            raise ValueError(f"expected params: two 0-d masks at {path!r} leave nothing, and of no known shape")
        return torch.zeros(shapes[path], dtype=torch.bool, device=x.device)

    return _pairwise(minus, a, b)


def hamming(a: Tree, b: Tree) -> int | Tensor:
    """In how many positions two masks trees differ; a 0-d True counts as full.

    >>> sf.masks.hamming({"w": torch.tensor([True, False])}, {"w": torch.tensor(True)})
    1

    An int, or a 0-d int64 tensor where a transform hides values. Raises as `intersect` does.
    """
    counts = list(flatten(_pairwise(lambda path, x, y: torch.count_nonzero(x ^ y), a, b))[0].values())
    return _known(sum(counts[1:], counts[0])) if counts else 0


def from_zeros(params: Tree, where: Where = default_where) -> Tree:
    """The masks that keep what is not zero.

    >>> sf.masks.from_zeros({"weight": torch.tensor([[0.0, 2.0]]), "bias": torch.zeros(1)})
    {'weight': tensor([[False,  True]]), 'bias': tensor(True)}

    Leaves that `where` does not choose get the 0-d True. NaN is not zero, -0.0 is. Raises and warns
    as `where` does: see `sparsefn.where.select_leaves`.
    """
    return masks_tree(params, {path: leaf != 0 for path, leaf in select_leaves(params, where).items()})


def from_dict(params: Tree, given: Mapping[str, Tensor], where: Where = default_where) -> Tree:
    """Masks by dotted path, as another program or a checkpoint holds them, as a masks tree.

    >>> sf.masks.from_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, {"weight": torch.tensor([[0.0, 1.0]])})
    {'weight': tensor([[False,  True]]), 'bias': tensor(True)}

    What is not zero is kept. Leaves that `where` does not choose and that are not given are dense.
    Raises ValueError for a chosen leaf without a mask, a path that params lack, and another shape; warns
    and raises as `where` does.
    """
    leaves, known = flatten(params)[0], ", ".join(map(repr, given)) or "none"
    for path, mask in given.items():
        if path not in leaves:
            raise ValueError(f"from_dict: params have no leaf at {path!r}; they are at {', '.join(map(repr, leaves))}")
        if mask.shape != leaves[path].shape:
            want = tuple(leaves[path].shape)
            raise ValueError(f"from_dict: expected a mask of shape {want} at {path!r}, got {tuple(mask.shape)}")
    for path in select_leaves(params, where):
        if path not in given:
            raise ValueError(f"from_dict: expected a mask for {path!r}, which is to be sparse; there are {known}")
    return masks_tree(params, {path: mask != 0 for path, mask in given.items()})


def shuffle(masks: Tree, key: Tensor) -> Tree:
    """Masks of the same counts in every leaf, at random positions.

    >>> masks = {"w": torch.tensor([[True, True, True, False, False, False]]), "b": torch.tensor(True)}
    >>> shuffled = sf.masks.shuffle(masks, sf.random.key(0))
    >>> int(shuffled["w"].sum()), shuffled["b"]
    (3, tensor(True))

    Every arrangement of a leaf is equally likely, by key and path alone. Raises TypeError for a leaf
    that is not a bool mask.
    """
    check_masks(masks, masks)

    def shuffled(path: str, mask: Tensor) -> Tensor:
        order = random.permutation(random.leaf_key(key.to(mask.device), path), mask.numel())
        return mask.reshape(-1).gather(0, order).reshape(mask.shape) if mask.ndim else mask

    return map_with_path(shuffled, masks)


def checkerboard(shape: Sequence[int], sparsity: float | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """A mask of evenly spread positions, moved along from row to row.

    >>> sf.masks.checkerboard((2, 4), 0.5)
    tensor([[False,  True, False,  True],
            [ True, False,  True, False]])

    Every row of the last dimension keeps about `(1 - sparsity) * columns`; leading dimensions count
    as rows in row-major order. `sparsity` is a float in [0, 1] or a 0-d floating tensor (which may
    be batched; NaN is 0). 1.0, and any density under 2**-31, keeps nothing. Raises TypeError for an int
    sparsity, ValueError outside [0, 1] (the value of a tensor is not looked at) or for a shape without
    dimensions.
    """
    check_sparsity(sparsity)
    if device is None:
        device = sparsity.device if isinstance(sparsity, Tensor) else torch.device("cpu")
    model = torch.empty((), device=device)
    density = 1 - like(model, sparsity).to(model.device, torch.float64).nan_to_num(0.0)
    if not shape or min(shape) < 0:
        raise ValueError(f"expected a shape of one dimension or more, none negative, got {tuple(shape)}")
    columns, rows = shape[-1], math.prod(shape[:-1])
    some = density >= 2.0**-31  # below, the int64 indices would overflow
    density = torch.where(some, density, 1.0)
    length = columns + torch.ceil(columns / density + 1e-5).long() - 1
    stride = torch.floor(1 / density - 1e-5).long()
    row = torch.arange(rows, device=device)[:, None] * stride
    index = (row + torch.arange(columns, device=device)) % length.clamp(min=1)
    kept = torch.floor((index + 1) * density + 1e-5) != torch.floor(index * density + 1e-5)
    return (kept & some).reshape(tuple(shape))


def pack(masks: Tree) -> Tree:
    """The masks with 8 weights in a byte.

    >>> packed = sf.masks.pack({"w": torch.tensor([[True, False, True], [False, True, True]])})
    >>> packed
    {'w': tensor([53], dtype=torch.uint8)}
    >>> sf.masks.unpack(packed, {"w": torch.zeros(2, 3)})["w"].tolist()
    [[True, False, True], [False, True, True]]

    A mask of n weights becomes uint8 of shape (ceil(n / 8),): bit j of byte i is element 8 i + j in
    row-major order, and unused bits are zero. A 0-d True stays as it is. Raises TypeError for a leaf
    that is not a bool mask.
    """
    check_masks(masks, masks)
    return map_with_path(lambda path, mask: _bytes(mask) if mask.ndim else mask, masks)


def _bytes(mask: Tensor) -> Tensor:
    memory = visible([mask])
    if memory is not None:
        return torch.from_numpy(np.packbits(memory[0].reshape(-1), bitorder="little"))
    bits = functional.pad(mask.reshape(-1), (0, -mask.numel() % 8)).reshape(-1, 8).to(torch.uint8)
    out = bits[:, 0]
    for j in range(1, 8):
        out = out | bits[:, j] * (1 << j)  # DTensor forgets to shift
    return out


def unpack(packed: Tree, like: Tree) -> Tree:
    """The masks that `pack` packed; `like` (params or masks) gives the shapes.

    >>> sf.masks.unpack({"w": torch.tensor([2], dtype=torch.uint8)}, {"w": torch.zeros(3)})
    {'w': tensor([False,  True, False])}

    Raises ValueError for another structure or number of bytes, TypeError for a dtype that is
    neither uint8 nor (0-d) bool, naming the path.
    """

    def mask_of(path: str, bits: Tensor, leaf: Tensor) -> Tensor:
        if bits.ndim == 0 and bits.dtype == torch.bool:
            return bits
        if bits.dtype != torch.uint8:
            raise TypeError(f"expected packed masks to be uint8 or a 0-d bool at {path!r}, got {bits.dtype}")
        size = -(-leaf.numel() // 8)
        if bits.shape != (size,) or leaf.ndim == 0:
            want = f"of shape ({size},)" if leaf.ndim else "that is a 0-d bool"
            raise ValueError(f"expected a packed mask {want} at {path!r}, got {tuple(bits.shape)}")
        return _bits(bits, leaf.numel()).reshape(leaf.shape)

    return map_with_path(mask_of, packed, like)


def _bits(packed: Tensor, n: int) -> Tensor:
    memory = visible([packed])
    if memory is not None:
        return torch.from_numpy(np.unpackbits(memory[0], count=n, bitorder="little").view(np.bool_))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).reshape(-1)[:n].to(torch.bool)
