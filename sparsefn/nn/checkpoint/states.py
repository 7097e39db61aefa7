"""States as flat dicts of tensors, and trees compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn import masks
from sparsefn._engine.transforms import read_number
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, flatten, leaves_of, same_structure
from sparsefn.masks.packing import check_unused
from sparsefn.nn.checkpoint.release_0_2 import with_parts

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def state_dict(state: Tree, *, pack: bool = False) -> dict[str, Tensor]:
    """`{dotted path: tensor}` of any tree of tensors, such as a state or its masks.

    >>> state = sf.State(
    ...     {"w": torch.ones(2)},
    ...     {"w": torch.tensor(True)},
    ...     opt=sf.optimizers.sgd(0.1).init({}),
    ... )
    >>> list(sf.checkpoint.state_dict(state))
    ['params.w', 'masks.w', 'opt.count']
    >>> sf.checkpoint.state_dict(
    ...     {"mask": torch.ones(100, 80, dtype=torch.bool)}, pack=True
    ... )["mask"].shape
    torch.Size([1017])

    Args:
        state: The tree.
        pack: Whether every bool tensor that is not 0-d takes one bit an element. It
            becomes a vector of uint8: the number of dimensions, each size in 8 bytes,
            the lowest first, and the bytes of `sf.masks.pack`. `load_state_dict`
            recognizes packed masks.

    Returns:
        Dict in optree's order, whatever the insertion order of dicts, for `torch.save`
        and `torch.load(weights_only=True)`. Tensors are detached and shared with the
        state, except views of a larger storage (a member of a stack), which are copied:
        `torch.save` would write the whole storage.

    Raises:
        ValueError: Two leaves have one path.
        TypeError: A leaf is not a tensor, or is a sparse, nested or quantised one.
    """
    return {
        path: _saved(as_dense("the state", path, leaf), pack)
        for path, leaf in flatten(state)[0].items()
    }


def _saved(leaf: Tensor, pack: bool) -> Tensor:
    if pack and leaf.dtype == torch.bool and leaf.ndim:
        # Without its shape a mask could be loaded in place of any other of as many
        # bytes.
        sizes = [byte for size in leaf.shape for byte in size.to_bytes(8, "little")]
        head = torch.tensor([leaf.ndim, *sizes], dtype=torch.uint8, device=leaf.device)
        return torch.cat((head, *masks.pack([leaf])))
    whole = leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
    return leaf if whole else leaf.clone(memory_format=torch.contiguous_format)


def _shape_of(packed: Tensor) -> tuple[int, ...] | None:
    """The shape written in a packed mask, None for a tensor that is not one."""
    if packed.ndim != 1 or not packed.numel():
        return None
    ndim = int(packed[0])
    head = bytes(packed[1 : 1 + 8 * ndim].tolist())
    if ndim == 0 or len(head) < 8 * ndim:
        return None
    shape = tuple(
        int.from_bytes(head[i : i + 8], "little") for i in range(0, 8 * ndim, 8)
    )
    if packed.numel() == 1 + 8 * ndim + -(-math.prod(shape) // 8):
        return shape
    return None


def as_dense(what: str, path: str, leaf: object) -> Tensor:
    """The leaf detached; TypeError for anything but a dense tensor.

    >>> as_dense("the state", "w", 1.0)
    Traceback (most recent call last):
        ...
    TypeError: expected the state to hold tensors, got float at 'w'
    """
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"expected {what} to hold tensors, got {type(leaf).__name__} at {path!r}"
        )
    if leaf.is_nested:
        kind = "nested"
    elif leaf.is_quantized:
        kind = "quantised"
    elif leaf.layout != torch.strided:
        kind = str(leaf.layout)
    else:
        return leaf.detach()
    raise TypeError(
        f"expected {what} to hold dense tensors, got a {kind} one at {path!r}"
    )


def check_values(what: str, path: str, tensor: Tensor) -> Tensor:
    """The tensor itself; ValueError for one of the meta device.

    >>> check_values("the state", "w", torch.ones(1, device="meta"))
    Traceback (most recent call last):
        ...
    ValueError: expected the state to hold values, got a tensor of the meta device at
    'w'
    """
    if tensor.is_meta:
        raise ValueError(
            f"expected {what} to hold values, got a tensor of the meta device at "
            f"{path!r}"
        )
    return tensor


def refuse_false(path: str, mask: Tensor, depth: int = 0) -> Tensor:
    """The mask itself, unless it is a 0-d False.

    ValueError for that, or for one among the members of a stack of this depth.

    >>> refuse_false("w", torch.tensor(False))
    Traceback (most recent call last):
        ...
    ValueError: expected a mask of full shape or 0-d True at 'w', got 0-d False
    """
    if mask.ndim <= depth and read_number(mask.all()) is False:
        got = "0-d False"
        if mask.ndim:
            got = f"0-d False in a stack of shape {tuple(mask.shape)}"
        raise ValueError(
            f"expected a mask of full shape or 0-d True at {path!r}, got {got}"
        )
    return mask


def load_state_dict(
    template: Tree, sd: Mapping[str, Tensor], *, strict: bool = True
) -> Tree:
    """A tree like the template, with the tensors of `sd`.

    >>> state = sf.State({"w": torch.ones(2)}, {"w": torch.tensor(True)})
    >>> saved = sf.checkpoint.state_dict(
    ...     state._replace(params={"w": torch.tensor([3.0, 4.0])})
    ... )
    >>> sf.checkpoint.load_state_dict(state, saved).params
    {'w': tensor([3., 4.])}
    >>> larger = sf.dense().init({"w": torch.ones(2), "new": torch.zeros(1)})
    >>> sf.checkpoint.load_state_dict(larger, saved, strict=False).params
    {'w': tensor([3., 4.]), 'new': tensor([0.])}

    Args:
        template: A tree, `algorithm.init(params)` for example, which gives structure,
            shapes, dtypes and devices. Its values are not used.
        sd: Tensors by path, as `state_dict` gives them. Packed masks are unpacked.
        strict: Whether both must have the same paths. If not, a path that `sd` lacks
            keeps the template's value and one that the template lacks is left out: for
            a state of other params than the template's.

    Returns:
        A tree that shares no memory with `sd` or the template.

    Raises:
        ValueError: Paths are missing or unexpected, a tensor has another shape, a mask
            of a state or a stack of states is a 0-d False (0-d masks are True: the leaf
            is dense), unused bits of a packed mask are set, as in damaged bytes, or a
            tensor is of the meta device, which holds no values. The text names the
            path.
        TypeError: `sd` is no dict, a tensor has another dtype, or is sparse, nested or
            quantised. The text names the path.
    """
    leaves, rebuild = flatten(template)
    if not isinstance(sd, Mapping):
        raise TypeError(f"expected a dict of tensors by path, got {type(sd).__name__}")
    sd = with_parts(template, sd)
    if strict:
        check_paths(leaves, sd)
    likes = {
        path: as_dense("the template", path, leaf) for path, leaf in leaves.items()
    }
    found = {
        path: _fitting(path, like, sd.get(path, like)) for path, like in likes.items()
    }
    refuse_false_masks(template, found)
    return rebuild(list(found.values()))


def check_paths(leaves: Collection[str], found: Collection[str]) -> None:
    """Raise ValueError unless a template's leaves have the paths that were found.

    >>> check_paths(["a", "b"], ["b", "c"])
    Traceback (most recent call last):
        ...
    ValueError: expected the paths of the template, but missing are ['a'] and unexpected
    ['c']
    """
    missing = [path for path in leaves if path not in found]
    unexpected = [path for path in found if path not in leaves]
    if missing or unexpected:
        raise ValueError(
            f"expected the paths of the template, but missing are {missing} and "
            f"unexpected {unexpected}"
        )


def refuse_false_masks(template: Tree, found: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a 0-d False, alone or in a stack, among the masks of the
    states in a template.

    >>> refuse_false_masks(
    ...     State((), {"w": torch.tensor(True)}), {"masks.w": torch.tensor(False)}
    ... )
    Traceback (most recent call last):
        ...
    ValueError: expected a mask of full shape or 0-d True at 'masks.w', got 0-d False
    """
    depths: dict[str, Any] = flatten(_depths(template))[0]
    for path, depth in depths.items():
        if depth >= 0:
            refuse_false(path, found[path], depth)


def _depths(tree: Tree) -> Tree:
    # At the masks of the states in a tree, how many dims of a stack they have;
    # elsewhere -1: other 0-d bools may be False, as a flag of a score is.
    def fields(state: Tree) -> Tree:
        if not isinstance(state, State):
            return -1
        depth = _stacked(state)
        masks, support = (
            optree.tree_map(lambda _: depth, tree)
            for tree in (state.masks, state.support)
        )
        return State(*map(_depths, state))._replace(masks=masks, support=support)

    return optree.tree_map(fields, tree, is_leaf=lambda node: isinstance(node, State))


def _stacked(state: State) -> int:
    # How many dimensions a stack has before its members': the dimensions of a mask that
    # is not of its leaf's shape, or all but the last of the key. Where neither tells,
    # 0: every mask has its leaf's shape.
    if same_structure(state.masks, state.params):
        pairs = zip(leaves_of(state.masks), leaves_of(state.params), strict=True)
        dense: list[int] = [
            mask.ndim for mask, leaf in pairs if mask.shape != leaf.shape
        ]
        if dense:
            return max(dense)
    if isinstance(state.key, Tensor):
        return max(state.key.ndim - 1, 0)
    return 0


def _fitting(path: str, like: Tensor, value: object) -> Tensor:
    found = as_dense("the saved dict", path, value)
    for what, tensor in (("the saved dict", found), ("the template", like)):
        check_values(what, path, tensor)
    if like.dtype == torch.bool and found.dtype == torch.uint8:
        shape = _shape_of(found)
        if shape is None:
            got = f"a uint8 tensor of shape {tuple(found.shape)}"
            raise TypeError(
                f"expected a mask at {path!r}, bool or packed by "
                f"state_dict(pack=True), got {got}"
            )
        if shape != tuple(like.shape):
            raise ValueError(
                f"expected a mask of shape {tuple(like.shape)} at {path!r}, got a "
                f"packed one of {shape}"
            )
        bits = found[1 + 8 * like.ndim :]
        check_unused(path, bits, like.numel())
        found = masks.unpack([bits], [like])[0]
    check_fits(path, like, found.shape, found.dtype)
    return found.to(like.device, copy=True)


def check_fits(
    path: str,
    like: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Raise ValueError for a shape and TypeError for a dtype that is not the leaf's.

    >>> check_fits("w", torch.ones(2), (2,), torch.float64)
    Traceback (most recent call last):
        ...
    TypeError: expected a tensor of dtype torch.float32 at 'w', got torch.float64
    """
    if tuple(shape) != tuple(like.shape):
        raise ValueError(
            f"expected a tensor of shape {tuple(like.shape)} at {path!r}, got "
            f"{tuple(shape)}"
        )
    if dtype != like.dtype:
        raise TypeError(
            f"expected a tensor of dtype {like.dtype} at {path!r}, got {dtype}"
        )


def tree_equal(a: Tree, b: Tree) -> bool:
    """Whether two trees of tensors have the same structure and the same bits.

    >>> nan = torch.tensor(float("nan"))
    >>> sf.checkpoint.tree_equal({"w": nan}, {"w": nan.clone()})
    True
    >>> sf.checkpoint.tree_equal(torch.tensor(0.0), torch.tensor(-0.0))
    False

    Args:
        a: A tree of tensors.
        b: Another one.

    Returns:
        True where structures, shapes, dtypes and bits agree. Devices do not count. A
        NaN equals a NaN of the same bits, and 0.0 is not -0.0.

    Raises:
        TypeError: A leaf is not a dense tensor.
    """
    if optree.tree_structure(a) != optree.tree_structure(b):
        return False
    left = flatten(a)[0]
    right = flatten(b)[0]
    return all(
        _same_bits(as_dense("a", path, left[path]), as_dense("b", path, right[path]))
        for path in left
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(_bits(a), _bits(b).to(a.device))
    )


def _bits(leaf: Tensor) -> Tensor:
    leaf = leaf.resolve_conj().resolve_neg()  # lazy ones are not in memory yet
    real = leaf
    if leaf.is_complex():
        real = torch.view_as_real(leaf)
    return real.view(INTEGERS[real.element_size()])
