"""Draws of keys, with checks: of a shape, of an index, or of a DTensor's local part.

Element i of a draw is a function of the key and of i. So a process draws its part of a
DTensor from the places of that part in the whole, and gets what one process would have
drawn there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine import backends
from sparsefn._engine.draws.threefry import DIGITS, coins, draw, fold_in_words
from sparsefn._engine.draws.words import MASK32
from sparsefn._engine.leaves import as_tensor_on, brought, check_device
from sparsefn._engine.processes import Extent, extent_of, is_sharded, sharded_like
from sparsefn._engine.torch_limits import is_below
from sparsefn._engine.transforms import at_compile_time


def check_key(key: Tensor) -> None:
    """Raise unless this is a key, or a batch of keys.

    >>> from sparsefn._engine.draws.draws import check_key
    >>> check_key(torch.tensor(3))
    Traceback (most recent call last):
        ...
    ValueError: expected a key of shape (2,) or (..., 2), got ()
    """
    if not isinstance(key, Tensor):
        raise TypeError(
            f"expected a key from sf.random.key(seed), got {type(key).__name__}"
        )
    if key.dtype != torch.int64:
        raise TypeError(
            f"expected a key of dtype torch.int64, got {key.dtype}; make one by "
            "sf.random.key(seed)"
        )
    if key.ndim == 0 or key.shape[-1] != 2:
        raise ValueError(
            f"expected a key of shape (2,) or (..., 2), got {tuple(key.shape)}"
        )


def checked(
    key: Tensor, shape: Sequence[int], index: Tensor | None
) -> tuple[tuple[int, ...], Tensor | None]:
    """The shape as a tuple and the index as one row, after checks of both and of the
    key.

    >>> from sparsefn._engine.draws.draws import checked
    >>> checked(sf.random.key(0), [2, 3], None)
    ((2, 3), None)
    """
    check_key(key)
    if isinstance(shape, int):
        raise TypeError(
            f"expected shape to be a sequence of ints, got {shape}; write ({shape},)"
        )
    shape = tuple(shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"expected a shape without negative sizes, got {shape}")
    if index is not None:
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            got = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(
                "expected index to be an int64 tensor of global element indices, got "
                f"{got}"
            )
        if tuple(index.shape) != shape:
            raise ValueError(
                f"expected index of the draw's shape {shape}, got {tuple(index.shape)}"
            )
        index = index.reshape(-1)
    return shape, index


def draws_of(
    key: Tensor,
    shape: Sequence[int],
    index: Tensor | None,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """Draws of a kind and a shape for each key.

    >>> from sparsefn._engine.draws.draws import draws_of
    >>> draws_of(sf.random.key(0), (1,), None, "words", torch.int64)
    tensor([1797259609])
    """
    size, places = checked(key, shape, index)
    return draw(key, places, math.prod(size), kind, dtype).reshape(
        (*key.shape[:-1], *size)
    )


def as_keys(pairs: Tensor) -> Tensor:
    """Keys (..., 2) from both their words in one number.

    >>> from sparsefn._engine.draws.draws import as_keys
    >>> as_keys(torch.tensor([3 << 32 | 4]))
    tensor([[3, 4]])
    """
    return torch.stack(((pairs >> 32) & MASK32, pairs & MASK32), -1)


@at_compile_time
def digest(text: str) -> int:
    """The number of a name, in [-2^63, 2^63).

    >>> from sparsefn._engine.draws.draws import digest
    >>> digest("0.weight")
    -1839474028305099322
    """
    # Not hash(), which changes with PYTHONHASHSEED.
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


def folded_key(key: Tensor, data: int | Tensor, kind: str) -> Tensor:
    """The key that belongs to a key and a number, by "fold int" or "fold str".

    >>> from sparsefn._engine.draws.draws import folded_key
    >>> folded_key(torch.tensor([0, 0]), 1, "fold int")
    tensor([3520574224,  438507793])

    It is where the key is; where a CPU key is folded with a number on a device, it is
    there.
    """
    if isinstance(data, Tensor) and data.device != key.device:
        if key.device.type == "cpu":
            key = brought(key, data.device)
        else:
            data = brought(data, key.device)
    made = fold_in_words(key, data, kind)
    if made is not None:
        return made
    index = as_tensor_on(data, key.device).reshape(1)
    return as_keys(draw(key, index, 1, kind, torch.int64)[..., 0])


def drawn_like(key: Tensor, leaf: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Draws of the shape of a leaf, where it is; of a DTensor, this process's part of
    them, laid out like it.

    >>> from sparsefn._engine.draws.draws import drawn_like
    >>> drawn_like(sf.random.key(0), torch.zeros(1), "uniform", torch.float32)
    tensor([0.4185])
    """
    check_key(key)
    key = brought(key, leaf.device)
    if not is_sharded(leaf):
        return draws_of(key, leaf.shape, None, kind, dtype)
    extent = drawn_extent(key, leaf)
    return sharded_like(
        draw(key, extent, math.prod(extent.size), kind, dtype).reshape(extent.size),
        leaf,
    )


def drawn_extent(key: Tensor, leaf: Tensor) -> Extent:
    """Where the part of a DTensor lies that one key draws.

    Raises ValueError for more than one key. Also raises the errors of
    `shards.extent_of`.
    """
    check_key(key)
    if key.ndim != 1:
        raise ValueError(
            "expected a key of shape (2,) for a draw like a DTensor, got "
            f"{tuple(key.shape)}"
        )
    return extent_of(leaf)


def check_draw_dtype(dtype: torch.dtype) -> None:
    """Raise for a dtype that no draw has.

    >>> from sparsefn._engine.draws.draws import check_draw_dtype
    >>> check_draw_dtype(torch.int64)
    Traceback (most recent call last):
        ...
    TypeError: expected dtype float16, bfloat16, float32 or float64, got torch.int64
    """
    if dtype not in DIGITS:
        raise TypeError(
            f"expected dtype float16, bfloat16, float32 or float64, got {dtype}"
        )


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape broadcasts to another one.

    >>> from sparsefn._engine.draws.draws import broadcasts
    >>> broadcasts((3, 1), (2, 3, 4))
    True
    """
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)


def flips(
    key: Tensor,
    chances: int | Tensor,
    places: Tensor | Extent | None,
    n: int,
) -> Tensor:
    """Where the word of a place is below a number in [0, 2^32], or below 2^32 times its
    chance: one row of n.

    >>> from sparsefn._engine.draws.draws import flips
    >>> flips(sf.random.key(0), 1 << 30, None, 3)
    tensor([False,  True, False])
    """
    made = coins(key, chances, places, n)
    if made is not None:
        return made
    if isinstance(chances, Tensor):
        check_device("a key and its probabilities", key.device, chances)
    if not torch.compiler.is_compiling():
        drawn: Tensor | None = backends.call_backend(
            "coins", key.device.type, key, chances, places, n
        )
        if drawn is not None:
            return drawn
    below: int | Tensor = chances
    if isinstance(chances, Tensor):
        scaled = (
            (chances.to(torch.float64) * 2.0**32)
            .ceil()
            .nan_to_num(0.0)
            .clamp(0.0, 2.0**32)
        )
        below = scaled.to(torch.int64).reshape(-1)
    words = draw(key, places, n, "words", torch.int64)
    return is_below(words, below)
