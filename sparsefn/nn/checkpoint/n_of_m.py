"""Weights under N:M masks as flat dicts of tensors that hold the kept weights alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsefn._engine.transforms import host_number
from sparsefn.core.checks import check_pairs
from sparsefn.core.state import State, Where, check_masks
from sparsefn.core.tree import flatten
from sparsefn.core.tree.where import shares
from sparsefn.masks.packing import check_unused, pack, unpack
from sparsefn.masks.patterns.kinds import Box, Pattern
from sparsefn.nn.checkpoint.states import INTEGERS, as_dense, check_values, refuse_false

_PARTS = ("values", "bitmask", "shape", "nm")


def compress(
    state: State, pattern: Pattern | Sequence[tuple[Where, Pattern]]
) -> dict[str, Tensor]:
    """Weights under N:M masks as a flat dict of kept weights and a bit for each weight.

    >>> state = sf.static(None, pattern=sf.patterns.nm(2, 4)).init(
    ...     {"w": torch.rand(8, 16), "b": torch.zeros(8)}
    ... )
    >>> tensors = sf.checkpoint.compress(state, sf.patterns.nm(2, 4))
    >>> {name: (*tensor.shape,) for name, tensor in tensors.items()}
    {'b': (8,), 'w.values': (8, 8), 'w.bitmask': (16,), 'w.shape': (2,), 'w.nm': (3,)}
    >>> sf.checkpoint.tree_equal(
    ...     sf.checkpoint.decompress(tensors).params, sf.effective(state)
    ... )
    True

    Args:
        state: A State, whose pruned weights are lost.
        pattern: `sf.patterns.nm(n, m, axis)`, or a list of (where, pattern) pairs of
            which the first match counts, as in `sf.partition`: transposed convolutions
            have another axis (`sf.modules.pattern_axis`).

    Returns:
        Dict of contiguous tensors that share no memory with the state or each other, as
        safetensors wants it. Bits are copied, NaN and -0.0 included.

    Raises:
        ValueError: A mask has a group that keeps more than n, m does not divide the
            axis, a pattern is not `nm`, a leaf with a full-shape mask has no pattern,
            two tensors have one name, or a tensor is of the meta device. The text names
            the path.
        TypeError: `state` is not a State, params are not floating-point, or `pattern`
            holds something else than patterns.

    A leaf with a 0-d mask is stored unchanged. Any other leaf becomes four tensors:

    - `<path>.values`: the leaf's shape with n entries for every m along the axis. They
      are the kept entries in their order; a group that keeps fewer than n ends in
      zeros.
    - `<path>.bitmask`: the mask as `sf.masks.pack` packs it, uint8.
    - `<path>.shape`: the sizes of the leaf, int64.
    - `<path>.nm`: n, m and the axis, counted from 0, int64.
    """
    if not isinstance(state, State):
        raise TypeError(f"compress: expected a State, got {type(state).__name__}")
    check_masks(state.masks, state.params)
    leaves = flatten(state.params)[0]
    masks = flatten(state.masks)[0]
    patterns = _by_path(
        pattern,
        {path: leaf for path, leaf in leaves.items() if masks[path].ndim},
        leaves,
    )
    tensors: dict[str, Tensor] = {}
    for path, leaf in leaves.items():
        dense = check_values("the state", path, as_dense("the state", path, leaf))
        if not dense.is_floating_point():
            raise TypeError(
                f"compress: expected floating-point params, got {dense.dtype} at "
                f"{path!r}"
            )
        mask = refuse_false(path, check_values("the masks", path, masks[path]))
        if mask.ndim:
            named = {
                f"{path}.{part}": x
                for part, x in _compressed(path, dense, mask, patterns[path]).items()
            }
        else:
            named = {path: dense.clone(memory_format=torch.contiguous_format)}
        for name, tensor in named.items():
            if name in tensors or (name == path and name.endswith(".nm")):
                raise ValueError(
                    f"compress: the name {name!r} is taken: rename the leaf of that "
                    "path"
                )
            tensors[name] = tensor
    return tensors


def decompress(tensors: Mapping[str, Tensor]) -> State:
    """The weights and masks that `compress` stored, as a state of flat dicts by path.

    >>> state = sf.State(
    ...     {"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([True, False])}
    ... )
    >>> sf.checkpoint.decompress(
    ...     sf.checkpoint.compress(state, sf.patterns.nm(1, 2))
    ... ).params
    {'w': tensor([3., 0.])}

    Args:
        tensors: Tensors by name, as `compress` gives them.

    Returns:
        A State that shares nothing with the tensors. Masks are the same bit for bit,
        weights too, with 0.0 where they are pruned.

    Raises:
        ValueError: Tensors are missing or do not fit each other, bits are set where
            `compress` leaves zeros or, before any memory is asked for, a tensor repeats
            its bytes (an expanded one: a small file could ask for any amount). The text
            names the path.
        TypeError: `tensors` is no dict, a name is no string, a tensor has another dtype
            or is not dense. The text names the path.

    For other trees than flat dicts use `sf.checkpoint.load_state_dict(params,
    state.params)`. To train on, start from the masks:
    `sf.from_masks(state.masks).init(state.params)`.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            "decompress: expected a dict of tensors by name, got "
            f"{type(tensors).__name__}"
        )
    found = {name: _stored(name, tensor) for name, tensor in tensors.items()}
    params: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for path in [name.removesuffix(".nm") for name in found if name.endswith(".nm")]:
        missing = [f"{path}.{part}" for part in _PARTS if f"{path}.{part}" not in found]
        if missing:
            raise ValueError(
                f"decompress: expected {', '.join(map(repr, missing))} beside "
                f"{path + '.nm'!r}"
            )
        params[path], masks[path] = _decompressed(
            path, *(found.pop(f"{path}.{part}") for part in _PARTS)
        )
    for path, leaf in found.items():
        _check_float(path, leaf)
        if path in params:
            raise ValueError(
                f"decompress: expected {path!r} or {path + '.nm'!r}, got both"
            )
        params[path] = leaf.clone(memory_format=torch.contiguous_format)
        masks[path] = torch.ones((), dtype=torch.bool, device=leaf.device)
    return State(params, masks)


def _stored(name: object, tensor: object) -> Tensor:
    # A tensor of the dict, which has bytes of its own for every element.
    if not isinstance(name, str):
        raise TypeError(
            f"decompress: expected names that are strings, got {name!r}, a "
            f"{type(name).__name__}"
        )
    dense = check_values("the dict", name, as_dense("the dict", name, tensor))
    needed = dense.numel() * dense.element_size()
    has = dense.untyped_storage().nbytes()
    if needed > has:
        raise ValueError(
            f"decompress: expected {needed} bytes at {name!r}, got {has}, which the "
            "tensor repeats"
        )
    return dense


def _by_path(
    pattern: Pattern | Sequence[tuple[Where, Pattern]],
    masked: dict[str, Tensor],
    like: dict[str, Tensor],
) -> dict[str, Pattern]:
    if isinstance(pattern, Pattern):
        return dict.fromkeys(masked, pattern)
    if not isinstance(pattern, Sequence):
        raise TypeError(
            "compress: expected a pattern or a list of (where, pattern), got "
            f"{type(pattern).__name__}"
        )
    rules = list(pattern)
    check_pairs("compress", rules)
    for i, (_, one) in enumerate(rules):
        if not isinstance(one, Pattern):
            raise TypeError(
                f"compress: expected a pattern at position {i}, got "
                f"{type(one).__name__}"
            )
    *rows, rest = shares("compress", [where for where, _ in rules], masked, like)
    if rest:
        left = ", ".join(map(repr, rest))
        raise ValueError(
            f"compress: no rule matches {left} with a mask; end with ('*', a pattern)"
        )
    return {
        path: one for (_, one), row in zip(rules, rows, strict=True) for path in row
    }


def _numbers(path: str, pattern: Pattern, shape: Box) -> tuple[int, int, int]:
    """n, m and the axis of a pattern in a tensor of this shape."""
    try:
        box = pattern.group(shape)
    except ValueError as error:
        raise ValueError(f"{error} at {path!r}") from None
    along = [d for d, size in enumerate(box) if size != 1]
    if callable(pattern.fixed):
        n = None
    else:
        n = host_number(pattern.fixed)
    if n is None or len(along) > 1:
        raise ValueError(
            "compress: expected a pattern such as sf.patterns.nm(2, 4), got "
            f"{pattern!r} at {path!r}"
        )
    axis = along[0] if along else len(shape) - 1
    return min(max(n, 0), box[axis]), box[axis], axis


def _compressed(
    path: str, leaf: Tensor, mask: Tensor, pattern: Pattern
) -> dict[str, Tensor]:
    n, m, axis = _numbers(path, pattern, tuple(leaf.shape))
    count = leaf.shape[axis] // m
    kept = _rows(mask, axis, count, m)
    slots = _slots(f"compress: expected a mask of {pattern!r}", path, kept, n)
    bits = leaf.resolve_neg().view(INTEGERS[leaf.element_size()])
    values = bits.new_zeros(slots.shape).masked_scatter_(
        slots, _rows(bits, axis, count, m).masked_select(kept)
    )
    numbers = (
        torch.tensor(row, dtype=torch.int64, device=leaf.device)
        for row in ([*leaf.shape], [n, m, axis])
    )
    return dict(
        zip(
            _PARTS,
            (_back(values, axis).view(leaf.dtype), *pack([mask]), *numbers),
            strict=True,
        )
    )


def _decompressed(
    path: str, values: Tensor, bitmask: Tensor, shape: Tensor, nm: Tensor
) -> tuple[Tensor, Tensor]:
    for part, tensor in (("shape", shape), ("nm", nm)):
        if tensor.dtype != torch.int64 or tensor.ndim != 1:
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise TypeError(
                f"decompress: expected a vector of int64 at '{path}.{part}', got {got}"
            )
    _check_float(f"{path}.values", values)
    size = tuple(shape.tolist())
    numbers = nm.tolist()
    n, m, axis = numbers if len(numbers) == 3 else (0, 0, 0)
    if any(length < 0 for length in size):
        raise ValueError(
            f"decompress: expected sizes >= 0 at '{path}.shape', got {size}"
        )
    if not 0 <= n <= m or m < 1 or not 0 <= axis < len(size) or size[axis] % m:
        raise ValueError(
            f"decompress: expected n, m and an axis of shape {size} at '{path}.nm', "
            f"got {numbers}"
        )
    count = size[axis] // m
    stored = (*size[:axis], count * n, *size[axis + 1 :])
    if values.shape != stored:
        got = f"'{path}.values', got {tuple(values.shape)}"
        raise ValueError(f"decompress: expected a tensor of shape {stored} at {got}")
    name = f"{path}.bitmask"
    total = math.prod(size)
    if bitmask.shape != (-(-total // 8),):  # before a tensor of that shape is made
        raise ValueError(
            f"expected a packed mask of shape ({-(-total // 8)},) at {name!r}, got "
            f"{tuple(bitmask.shape)}"
        )
    (flat,) = unpack(
        {name: bitmask}, {name: torch.empty(total, dtype=torch.bool, device="meta")}
    ).values()
    check_unused(name, bitmask, total)
    mask = flat.reshape(size)
    kept = _rows(mask, axis, count, m)
    slots = _slots(
        f"decompress: expected a mask of {n}:{m} along axis {axis}", path, kept, n
    )
    bits = values.view(INTEGERS[values.element_size()])
    if bool((_rows(bits, axis, count, n).masked_fill(slots, 0) != 0).any()):
        raise ValueError(
            f"decompress: expected zeros at '{path}.values' where a group keeps fewer "
            f"than {n}, got others"
        )
    leaf = bits.new_zeros(kept.shape).masked_scatter_(
        kept, _rows(bits, axis, count, n).masked_select(slots)
    )
    return _back(leaf, axis).view(values.dtype), mask


def _check_float(name: str, weights: Tensor) -> None:
    if not weights.is_floating_point():
        raise TypeError(
            f"decompress: expected floating-point weights at {name!r}, got "
            f"{weights.dtype}"
        )


def _rows(x: Tensor, axis: int, count: int, size: int) -> Tensor:
    """The tensor with groups of this size along the last dimension.

    There are so many along the axis.
    """
    return torch.unflatten(x, axis, (count, size)).movedim(axis + 1, -1)


def _back(rows: Tensor, axis: int) -> Tensor:
    """The inverse of `_rows`."""
    return rows.movedim(-1, axis + 1).flatten(axis, axis + 1).contiguous()


def _slots(expected: str, path: str, kept: Tensor, n: int) -> Tensor:
    # Which of the n places of each group hold a kept entry: the first ones, as many as
    # it keeps.
    counts = kept.sum(-1, keepdim=True)
    if counts.numel():
        most = int(counts.max())
    else:
        most = 0
    if most > n:
        raise ValueError(f"{expected} at {path!r}, got a group that keeps {most}")
    return torch.arange(n, device=kept.device) < counts
