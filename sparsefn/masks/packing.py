"""Masks at one bit an element."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsefn._engine.processes import check_plain
from sparsefn._engine.transforms import as_numpy, read_number
from sparsefn.core.state import check_masks
from sparsefn.core.tree import Tree, map_with_path


def pack(masks: Tree) -> Tree:
    """The masks with 8 weights in a byte.

    >>> packed = sf.masks.pack(
    ...     {"w": torch.tensor([[True, False, True], [False, True, True]])}
    ... )
    >>> packed
    {'w': tensor([53], dtype=torch.uint8)}
    >>> sf.masks.unpack(packed, {"w": torch.zeros(2, 3)})["w"].tolist()
    [[True, False, True], [False, True, True]]

    Args:
        masks: Masks tree.

    Returns:
        Tree like `masks`. A mask of n weights becomes uint8 of shape (ceil(n / 8),).
        Bit j of byte i is element 8 i + j in row-major order, and unused bits are zero.
        A 0-d True stays as it is.

    Raises:
        TypeError: A leaf is not a bool mask.
        ValueError: A mask is a DTensor, whose parts would share bytes.
    """
    check_masks(masks, masks)
    return map_with_path(
        lambda path, mask: _bytes(path, mask) if mask.ndim else mask, masks
    )


def _bytes(path: str, mask: Tensor) -> Tensor:
    check_plain("pack", path, mask, "; sf.distributed.save stores those")
    memory = as_numpy([mask])
    if memory is not None:
        packed = np.packbits(memory[0].reshape(-1), bitorder="little")
        return torch.from_numpy(packed)
    bits = (
        functional.pad(mask.reshape(-1), (0, -mask.numel() % 8))
        .reshape(-1, 8)
        .to(torch.uint8)
    )
    out = bits[:, 0]
    for j in range(1, 8):
        out = out | bits[:, j] << j
    return out


def unpack(packed: Tree, like: Tree) -> Tree:
    """The masks that `pack` packed; `like` (params or masks) gives the shapes.

    >>> sf.masks.unpack(
    ...     {"w": torch.tensor([2], dtype=torch.uint8)}, {"w": torch.zeros(3)}
    ... )
    {'w': tensor([False,  True, False])}

    Args:
        packed: Tree of packed masks: uint8 tensors, and 0-d bools.
        like: Tree of params or masks, which has the shapes.

    Returns:
        Masks tree like `like`.

    Raises:
        TypeError: A leaf is not a tensor, or a packed one neither uint8 nor a 0-d bool.
        ValueError: The trees have different structures, a leaf has another number of
            bytes or, on the CPU, unused bits that are set, as in damaged bytes.

    Errors name the path.
    """

    def mask_of(path: str, bits: Tensor, leaf: Tensor) -> Tensor:
        for tensor in (bits, leaf):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"unpack: expected tensors, got {type(tensor).__name__} at {path!r}"
                )
        if bits.ndim == 0 and bits.dtype == torch.bool:
            return bits
        if bits.dtype != torch.uint8:
            raise TypeError(
                f"expected packed masks to be uint8 or a 0-d bool at {path!r}, got "
                f"{bits.dtype}"
            )
        size = -(-leaf.numel() // 8)
        if bits.shape != (size,) or leaf.ndim == 0:
            want = f"of shape ({size},)" if leaf.ndim else "that is a 0-d bool"
            raise ValueError(
                f"expected a packed mask {want} at {path!r}, got {tuple(bits.shape)}"
            )
        if bits.device.type == "cpu":
            check_unused(path, bits, leaf.numel())
        return _bits(bits, leaf.numel()).reshape(leaf.shape)

    return map_with_path(mask_of, packed, like)


def check_unused(path: str, packed: Tensor, n: int) -> None:
    """Raise ValueError where bits after the first n are set in packed masks.

    This waits for a device.

    >>> check_unused("w", torch.tensor([0b1000], dtype=torch.uint8), 3)
    Traceback (most recent call last):
        ...
    ValueError: expected the packed mask at 'w' to end in 5 zero bits: its bytes are
    damaged
    """
    last = None
    if n % 8:
        last = read_number(packed[-1])
    if last is not None and last >> n % 8:
        raise ValueError(
            f"expected the packed mask at {path!r} to end in {8 - n % 8} zero bits: "
            "its bytes are damaged"
        )


def _bits(packed: Tensor, n: int) -> Tensor:
    memory = as_numpy([packed])
    if memory is not None:
        return torch.from_numpy(
            np.unpackbits(memory[0], count=n, bitorder="little").view(np.bool_)
        )
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, None] >> shifts) & 1
    return bits.reshape(-1)[:n].to(torch.bool)
