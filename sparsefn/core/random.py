"""Counter-based random numbers: a draw depends on its key and global index alone.

The generator is Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, doi 10.1145/2063384.2063405. Element i of
a draw is the block of counter (i >> 32, i & 0xffffffff), so a shard that knows its
global indices draws its own part.
Draws land on the device of the key. No global generator is read or advanced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn._engine.draws import MASK32, draw, draws
from sparsefn._engine.processes import is_sharded, local_tensor, sharded_like
from sparsefn.core.checks import check_int, is_int, is_number
from sparsefn.core.tree import Tree, map_with_path

__all__ = [
    "bernoulli",
    "bits",
    "fold_in",
    "key",
    "leaf_key",
    "leaf_keys",
    "normal",
    "normal_like",
    "permutation",
    "split",
    "threefry2x32",
    "uniform",
    "uniform_like",
]
__dir__ = __all__.copy


def key(seed: int) -> Tensor:
    """The key of a seed: int64 of shape (2,), words in [0, 2^32).

    >>> sf.random.key(7)
    tensor([0, 7])

    Args:
        seed: An int in [0, 2^64). Its high word comes first.

    Returns:
        The key, on the CPU. Move it with `.to(device)` to draw elsewhere; the bits are
        the same.

    Raises:
        TypeError: `seed` is not an int.
        ValueError: `seed` is out of range.
    """
    check_int("", "seed", seed)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"expected 0 <= seed < 2**64, got {seed}")
    return torch.tensor([seed >> 32, seed & MASK32], dtype=torch.int64, device="cpu")


def split(key: Tensor, n: int) -> Tensor:
    """`n` new keys, of shape (n, 2).

    >>> sf.random.split(sf.random.key(0), 2).shape
    torch.Size([2, 2])

    Args:
        key: Key of shape (2,), or keys of shape (..., 2).
        n: Number of new keys, an int >= 0. Key i does not depend on it.

    Returns:
        Keys of shape (n, 2), or (..., n, 2), on the device of `key`.

    Raises:
        TypeError: `key` is not an int64 tensor, or `n` is not an int.
        ValueError: `key` has another shape, or `n` is negative.
    """
    draws.check_key(key)
    check_int("split(key, n)", "n", n, 0)
    return draws.as_keys(draw(key, None, n, "split", torch.int64))


def fold_in(key: Tensor, data: int | Tensor | str) -> Tensor:
    """The key that belongs to `key` and a number or a name.

    >>> key = sf.random.key(0)
    >>> bool(
    ...     (sf.random.fold_in(key, 3) == sf.random.fold_in(key, torch.tensor(3))).all()
    ... )
    True

    Args:
        key: Key of shape (2,), or keys of shape (..., 2), each of which is folded.
        data: An int in [-2^63, 2^63), a 0-d int64 tensor (the same key as its int) or a
            str (taken by its BLAKE2b digest). Numbers and names are told apart: `3` and
            `"3"` give unrelated keys.

    Returns:
        New keys of the shape of `key`.

    Raises:
        TypeError: `key` is not an int64 tensor, or `data` is of another type or dtype.
        ValueError: `key` has another shape, an int is out of range, or a tensor is not
            0-d.
    """
    draws.check_key(key)
    if isinstance(data, str):
        return draws.folded_key(key, draws.digest(data), "fold str")
    if isinstance(data, Tensor):
        if data.dtype != torch.int64:
            raise TypeError(
                "expected data to be an int, a str or a 0-d int64 tensor, got a "
                f"tensor of {data.dtype}"
            )
        if data.ndim:
            raise ValueError(
                f"expected data to be a 0-d tensor, got shape {tuple(data.shape)}"
            )
    elif not is_int(data):
        raise TypeError(
            "expected data to be an int, a str or a 0-d int64 tensor, got "
            f"{type(data).__name__}"
        )
    elif not -(1 << 63) <= data < 1 << 63:
        raise ValueError(f"expected data in [-2**63, 2**63), got {data}")
    return draws.folded_key(key, data, "fold int")


def leaf_key(key: Tensor, path: str, step: int | Tensor | None = None) -> Tensor:
    """The key of one leaf at one step: `fold_in(fold_in(key, path), step)`.

    >>> sf.random.leaf_key(sf.random.key(0), "0.weight", 5).shape
    torch.Size([2])

    Args:
        key: Key of shape (2,), or keys of shape (..., 2).
        path: Dotted path of the leaf.
        step: An int or a 0-d int64 tensor, as the `data` of `fold_in`. None: no step is
            folded in.

    Returns:
        The key of the leaf. It depends on the key, the path and the step, and not on
        the leaf's position in the tree.

    Raises:
        TypeError: As `fold_in`.
        ValueError: As `fold_in`.
    """
    folded = fold_in(key, path)
    return folded if step is None else fold_in(folded, step)


def leaf_keys(key: Tensor, tree: Tree, step: int | Tensor | None = None) -> Tree:
    """A tree like `tree` with the `leaf_key` of every leaf.

    >>> keys = sf.random.leaf_keys(sf.random.key(0), {"a": torch.zeros(3)})
    >>> bool((keys["a"] == sf.random.leaf_key(sf.random.key(0), "a")).all())
    True

    Args:
        key: Key of shape (2,), or keys of shape (..., 2).
        tree: Tree of any leaves.
        step: As in `leaf_key`.

    Returns:
        A tree of keys, with the structure of `tree`.

    Raises:
        TypeError: As `fold_in`.
        ValueError: As `fold_in`, or two leaves share a dotted path.
    """
    return map_with_path(lambda path, _: leaf_key(key, path, step), tree)


def threefry2x32(key: Tensor, counter: Tensor) -> Tensor:
    """The bare block function: key words and counter words to two random words.

    >>> threefry2x32 = sf.random.threefry2x32
    >>> [
    ...     hex(word)
    ...     for word in threefry2x32(
    ...         torch.tensor([0, 0]), torch.tensor([0, 0])
    ...     ).tolist()
    ... ]
    ['0x6b200159', '0x99ba4efe']

    Args:
        key: Key words, int64 of shape (..., 2).
        counter: Counter words, int64 of shape (..., 2) that broadcasts with `key`.
            Element i of a draw has the counter (i >> 32, i & 0xffffffff).

    Returns:
        Words in [0, 2^32), int64 of the broadcast shape, in the order of Random123 (its
        known answers hold).

    Raises:
        TypeError: `key` is not an int64 tensor.
        ValueError: `key` has another shape, or `counter` another dtype or shape.
    """
    draws.check_key(key)
    if (
        not isinstance(counter, Tensor)
        or counter.dtype != torch.int64
        or counter.ndim == 0
        or counter.shape[-1] != 2
    ):
        got = type(counter).__name__
        if isinstance(counter, Tensor):
            got = f"{counter.dtype} {tuple(counter.shape)}"
        raise ValueError(
            f"expected counter to be an int64 tensor of shape (..., 2), got {got}"
        )
    index = ((counter[..., 0] << 32) | (counter[..., 1] & MASK32)).unsqueeze(-1)
    return draws.as_keys(draw(key, index, 1, "pairs", torch.int64)[..., 0])


def bits(key: Tensor, shape: Sequence[int], *, index: Tensor | None = None) -> Tensor:
    """Random 32-bit words: int64 in [0, 2^32).

    >>> sf.random.bits(sf.random.key(0), (2,)).tolist()
    [1797259609, 928981903]

    Args:
        key: Key of shape (2,), or keys of shape (..., 2).
        shape: Shape of the draw of one key.
        index: Which global elements to draw, int64 of that shape. None: element i in
            row-major order is the first word of block i.

    Returns:
        Tensor of shape `shape`, or (..., *shape) for several keys, on the device of
        `key`.

    Raises:
        TypeError: `key` or `index` is not an int64 tensor, or `shape` is an int.
        ValueError: `key` or `index` has another shape, or a size is negative.
    """
    return draws.draws_of(key, shape, index, "words", torch.int64)


def uniform(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    index: Tensor | None = None,
) -> Tensor:
    """Uniform numbers in [0, 1), never 1.0.

    >>> sf.random.uniform(sf.random.key(0), (3,))
    tensor([0.4185, 0.2163, 0.9653])

    Args:
        key: As in `bits`.
        shape: As in `bits`.
        dtype: float16, bfloat16, float32 or float64. A number has as many leading bits
            of a block as the dtype holds exactly: float32 is `(word >> 8) * 2**-24`,
            float16 has 11 bits, bfloat16 8, float64 53 (of both words).
        index: As in `bits`.

    Returns:
        Tensor of that dtype, shaped as in `bits`.

    Raises:
        TypeError: As `bits`, or for another dtype.
        ValueError: As `bits`.
    """
    draws.check_draw_dtype(dtype)
    return draws.draws_of(key, shape, index, "uniform", dtype)


def normal(
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    index: Tensor | None = None,
) -> Tensor:
    """Standard normal numbers.

    >>> sf.random.normal(sf.random.key(0), (3,))
    tensor([-1.0655,  0.5837, -0.1782])

    Args:
        key: As in `bits`.
        shape: As in `bits`.
        dtype: float16, bfloat16, float32 or float64.
        index: As in `bits`.

    Returns:
        Tensor of that dtype, shaped as in `bits`. Magnitudes end at 6.67.

    Raises:
        TypeError: As `bits`, or for another dtype.
        ValueError: As `bits`.

    Box and Muller (1958) on the two words of a block, in float64 by IEEE-exact
    operations, then rounded to `dtype`.
    """
    draws.check_draw_dtype(dtype)
    return draws.draws_of(key, shape, index, "normal", dtype)


def uniform_like(
    key: Tensor, leaf: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform numbers of the shape of a leaf.

    >>> key = sf.random.key(0)
    >>> torch.equal(
    ...     sf.random.uniform_like(key, torch.zeros(3)), sf.random.uniform(key, (3,))
    ... )
    True

    Args:
        key: Key of shape (2,), or keys of shape (..., 2). A key on the CPU serves every
            device without a copy: nothing waits for the device.
        leaf: Tensor or DTensor whose shape, device and placements the numbers get.
        dtype: float16, bfloat16, float32 or float64. The dtype of `leaf` is not read.

    Returns:
        The numbers of `uniform(key, leaf.shape, dtype)`, where the leaf is; for a
        DTensor, a DTensor of the same placements.

    Raises:
        TypeError: As `uniform`.
        ValueError: As `uniform`; the DTensor is partial, or has parts that torch.chunk
            would not make; or several keys come with a DTensor.

    The numbers do not depend on how the leaf is sharded. Each process draws the part
    that it holds, and nothing is sent.
    """
    draws.check_draw_dtype(dtype)
    return draws.drawn_like(key, leaf, "uniform", dtype)


def normal_like(
    key: Tensor, leaf: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal numbers of the shape of a leaf.

    >>> key = sf.random.key(0)
    >>> torch.equal(
    ...     sf.random.normal_like(key, torch.zeros(3)), sf.random.normal(key, (3,))
    ... )
    True

    Args:
        key: As in `uniform_like`.
        leaf: As in `uniform_like`.
        dtype: float16, bfloat16, float32 or float64. The dtype of `leaf` is not read.

    Returns:
        The numbers of `normal(key, leaf.shape, dtype)`, where the leaf is; for a
        DTensor, a DTensor of the same placements.

    Raises:
        TypeError: As `uniform_like`.
        ValueError: As `uniform_like`.
    """
    draws.check_draw_dtype(dtype)
    return draws.drawn_like(key, leaf, "normal", dtype)


def bernoulli(
    key: Tensor,
    p: float | Tensor,
    shape: Sequence[int] | None = None,
    *,
    index: Tensor | None = None,
) -> Tensor:
    """Coin flips: bool, True with probability `p`.

    >>> sf.random.bernoulli(sf.random.key(0), torch.tensor([0.0, 0.5, 1.0]))
    tensor([False,  True,  True])

    Args:
        key: As in `bits`.
        p: A number in [0, 1], or a float tensor or DTensor of probabilities that
            broadcasts to `shape`. In a tensor, entries above 1 always fire, entries
            below 0 or NaN never do.
        shape: Shape of the draw of one key. None: the shape of `p`, () for a number.
        index: As in `bits`.

    Returns:
        Bool tensor, shaped as in `bits`. For a DTensor, a DTensor of the same
        placements, with the flips that the whole would give.

    Raises:
        TypeError: As `bits`, or `p` is neither a number nor a float tensor.
        ValueError: As `bits`; a number is outside [0, 1]; a tensor does not broadcast;
            or a DTensor comes with another shape, an index or several keys.

    True where the 32-bit word is below `p * 2**32`, computed in float64: 0 never fires,
    1 always.
    """
    if isinstance(p, Tensor):
        if not p.is_floating_point():
            raise TypeError(f"expected p to be a float tensor, got {p.dtype}")
        if shape is None:
            shape = tuple(p.shape)
        if not draws.broadcasts(p.shape, shape):
            raise ValueError(
                f"expected p to broadcast to shape {tuple(shape)}, got {tuple(p.shape)}"
            )
        shape, places = draws.checked(key, shape, index)
        if is_sharded(p):
            if index is not None or shape != tuple(p.shape):
                raise ValueError(
                    "expected a DTensor of probabilities without an index and without "
                    "another shape"
                )
            extent = draws.drawn_extent(key, p)
            return sharded_like(
                draws.flips(
                    key, local_tensor(p), extent, math.prod(extent.size)
                ).reshape(extent.size),
                p,
            )
        return draws.flips(key, p.expand(shape), places, math.prod(shape)).reshape(
            (*key.shape[:-1], *shape)
        )
    if not is_number(p):
        raise TypeError(
            f"expected p to be a number or a float tensor, got {type(p).__name__}"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"expected 0 <= p <= 1, got {p}")
    shape, places = draws.checked(key, () if shape is None else shape, index)
    return draws.flips(key, math.ceil(p * 2.0**32), places, math.prod(shape)).reshape(
        (*key.shape[:-1], *shape)
    )


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of 0..n-1: int64 of shape (n,).

    >>> sf.random.permutation(sf.random.key(1), 5)
    tensor([2, 3, 0, 4, 1])

    Args:
        key: Key of shape (2,), or keys of shape (..., 2).
        n: Length of the order, an int >= 0.

    Returns:
        Tensor of shape (n,), or (..., n) for several keys, on the device of `key`.

    Raises:
        TypeError: `key` is not an int64 tensor, or `n` is not an int.
        ValueError: `key` has another shape, or `n` is negative.

    Sorts n draws of 64 bits; the lower index goes first among equals.
    """
    check_int("permutation(key, n)", "n", n, 0)
    return (
        draws.draws_of(key, (n,), None, "pairs", torch.int64)
        .sort(dim=-1, stable=True)
        .indices
    )
