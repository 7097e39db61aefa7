"""Averages of weights that other tools make, under the masks of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from sparsefn._engine.processes import check_plain
from sparsefn.core.checks import aligned, natural
from sparsefn.core.state import inside
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.modules.calls import check_shape
from sparsefn.nn.modules.params import bake
from sparsefn.nn.modules.wrappers import check_not_sharded, tensors_by_name

_WANTED = "expected an average as a module or a dict of tensors by name"


class Row(NamedTuple):
    """What the mask of a leaf drops of an average.

    >>> from sparsefn.nn.modules.averages import Row
    >>> Row("w", weights=1, total=4, norm=0.25).norm
    0.25

    Attributes:
        path: Dotted path of the leaf, or "all".
        weights: Entries that are not zero and are dropped.
        total: Entries of the leaf.
        norm: Norm of the dropped entries over the norm of all entries.
    """

    path: str
    weights: int
    total: int
    norm: float


class Dropped(NamedTuple):
    """What `mask_average` dropped; `str()` of it is a table.

    >>> _, dropped = sf.modules.mask_average(
    ...     {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> print(dropped)
    path  dropped  total    norm
    w           1      2  0.8000
    all         1      2  0.8000

    Attributes:
        rows: A row for every masked leaf, in the order of paths.
        all: The row of all masked leaves together.
    """

    rows: tuple[Row, ...]
    all: Row

    def __str__(self) -> str:
        """Align the rows, with the sums below."""
        lines = [("path", "dropped", "total", "norm")]
        for row in (*self.rows, self.all):
            lines.append(
                (row.path, f"{row.weights:,}", f"{row.total:,}", f"{row.norm:.4f}")
            )
        return aligned(lines, left=1)


class _Leaf(NamedTuple):
    # A leaf that is masked, and the tensor of the average that belongs to it.
    path: str
    name: str
    tensor: Tensor
    mask: Tensor


@overload
def mask_average(average: nn.Module, masks: Tree) -> tuple[nn.Module, Dropped]: ...
@overload
def mask_average(
    average: Mapping[str, Tensor], masks: Tree
) -> tuple[dict[str, Tensor], Dropped]: ...
def mask_average(
    average: nn.Module | Mapping[str, Tensor], masks: Tree
) -> tuple[nn.Module | dict[str, Tensor], Dropped]:
    """A sparse copy of an average of a model's weights, and what the masks dropped.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    >>> averaged = torch.optim.swa_utils.AveragedModel(model)
    >>> masks = (
    ...     sf.static(0.75, init="magnitude").init(sf.modules.params_of(model)).masks
    ... )
    >>> final, dropped = sf.modules.mask_average(averaged, masks)
    >>> int(final.module[0].weight.count_nonzero()), dropped.all.weights
    (1, 3)

    Args:
        average: A module or a dict of tensors by name, such as a `state_dict`: torch's
            `AveragedModel`, the `ema` of timm's `ModelEmaV2` and `ModelEmaV3`, a copy
            of the model, or the model itself where a framework has written its average
            into it, as Lightning's `WeightAveraging` does after `fit`. Names are as in
            the masked model, or these names with one prefix, such as `module.`. It is
            not changed.
        masks: The masks of a state, or `sparse.masks` of what `attach` returned: bool
            tensors of the shapes of the weights, or 0-d for dense leaves, which need no
            weight.

    Returns:
        A module or dict like `average`, which is zero where the masks prune, and the
        `Dropped`: for each masked leaf how many weights were not zero there, and their
        norm divided by the norm of the leaf.

    Raises:
        TypeError: `average` is neither a module nor a dict of tensors, or `masks` is no
            tree of bool tensors.
        ValueError: The average lacks a masked weight, has one in another shape, has the
            names under several prefixes, or is sharded.

    Where masks change during a run, an average has weights at all places that were kept
    while it was made, and is denser than the model. Evaluate and ship the copy;
    `sf.optimizers.ema` makes an average that is never denser. Batch norm's running
    means and variances come from the average: `torch.optim.swa_utils.update_bn(loader,
    final)` measures them under the masks.
    """
    leaves = _leaves(average, masks)
    masked = {leaf.name: inside(leaf.mask, leaf.tensor.detach()) for leaf in leaves}
    if isinstance(average, nn.Module):
        return bake(average, masked, partial=True), _dropped(leaves)
    copied = {}
    for name, x in average.items():
        if isinstance(x, Tensor):
            copied[name] = x.detach().clone()
        else:
            copied[name] = x
    return {**copied, **masked}, _dropped(leaves)


def dropped_of(average: nn.Module | Mapping[str, Tensor], masks: Tree) -> Dropped:
    """What `mask_average` would drop, without a copy.

    >>> dropped_of(
    ...     {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([True, False])}
    ... ).all.weights
    1
    """
    return _dropped(_leaves(average, masks))


def _leaves(average: nn.Module | Mapping[str, Tensor], masks: Tree) -> list[_Leaf]:
    named = _tensors(average)
    wanted = _wanted(masks)
    prefix = _prefix(list(named), list(wanted))
    leaves = []
    for path, mask in sorted(wanted.items(), key=lambda row: natural(row[0])):
        tensor = named[prefix + path]
        check_plain(
            "mask_average",
            prefix + path,
            tensor,
            "; gather it first, as with full_state_dict",
        )
        check_shape("an average", prefix + path, tensor, mask)
        leaves.append(_Leaf(path, prefix + path, tensor, mask.to(tensor.device)))
    return leaves


def _tensors(average: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(average, nn.Module):
        check_not_sharded("sf.modules.mask_average", average)
        return tensors_by_name(average, tied=True)
    if not isinstance(average, Mapping):
        raise TypeError(
            f"mask_average: {_WANTED}, got {type(average).__name__}: where it has a "
            "method that copies its weights into a model, as copy_to of diffusers' "
            "EMAModel, give that model"
        )
    return {name: x for name, x in average.items() if isinstance(x, Tensor)}


def _wanted(masks: Tree) -> dict[str, Tensor]:
    # The masks of leaves that are not dense.
    if hasattr(masks, "masks"):  # a State, or what `attach` returned
        raise TypeError(
            f"mask_average: expected masks, got {type(masks).__name__}: give its .masks"
        )
    found = flatten(masks)[0]
    for path, mask in found.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"mask_average: expected masks, bool tensors, got {got} at {path!r}"
            )
    return {path: mask for path, mask in found.items() if mask.ndim}


def _prefix(names: list[str], paths: list[str]) -> str:
    # What comes before the paths of the masked model in the names of an average.
    known = set(names)
    first = next(iter(paths), "")
    if known.issuperset(paths):
        return ""
    ends = [name.removesuffix(first) for name in names if name.endswith(f".{first}")]

    def has_all(prefix: str) -> bool:
        return all(prefix + path in known for path in paths)

    found = [prefix for prefix in ends if has_all(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"mask_average: expected {first!r} once in the average, got it under "
            f"{', '.join(found)}"
        )
    prefix = next(iter(ends), "")
    missing = next(path for path in paths if prefix + path not in known)
    more = ", ..." if len(names) > 6 else ""
    shown = ", ".join(map(repr, names[:6]))
    raise ValueError(
        f"mask_average: expected the average to have {missing!r}; it has "
        f"{shown or 'no tensor'}{more}"
    )


def _dropped(leaves: list[_Leaf]) -> Dropped:
    rows = []
    square = 0.0
    dropped_square = 0.0
    for leaf in leaves:
        weights = leaf.tensor.detach().double()
        pruned = inside(~leaf.mask, weights)
        whole = float(weights.square().sum())
        part = float(pruned.square().sum())
        rows.append(
            Row(
                leaf.path,
                int(pruned.count_nonzero()),
                weights.numel(),
                _share(part, whole),
            )
        )
        square += whole
        dropped_square += part
    count = sum(row.weights for row in rows)
    total = sum(row.total for row in rows)
    return Dropped(
        tuple(rows), Row("all", count, total, _share(dropped_square, square))
    )


def _share(part: float, whole: float) -> float:
    # Of two sums of squares, as norms.
    return math.sqrt(part / whole) if whole else 0.0
