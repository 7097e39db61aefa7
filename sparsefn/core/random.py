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

    `seed` is an int in [0, 2^64); its high word comes first. The key is on the CPU;
    move it with `.to(device)` to draw elsewhere, bits are the same. Raises TypeError
    for a seed that is not an int, ValueError for one out of range.
    """
    check_int("", "seed", seed)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"expected 0 <= seed < 2**64, got {seed}")
    return torch.tensor([seed >> 32, seed & MASK32], dtype=torch.int64, device="cpu")


def split(key: Tensor, n: int) -> Tensor:
    """`n` new keys, of shape (n, 2).

    >>> sf.random.split(sf.random.key(0), 2).shape
    torch.Size([2, 2])

    Key i does not depend on `n`. Keys of shape (..., 2) give (..., n, 2).
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

    `data` is an int in [-2^63, 2^63), a 0-d int64 tensor (the same key as its int) or a
    str (taken by its BLAKE2b digest). Numbers and names are told apart: `3` and `"3"`
    give unrelated keys. Keys of shape (..., 2) are each folded. Raises TypeError for
    other data, ValueError for an int out of range or a tensor that is not 0-d.
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

    It depends on the key, the dotted path and the step, and not on the leaf's position
    in the tree.
    """
    folded = fold_in(key, path)
    return folded if step is None else fold_in(folded, step)


def leaf_keys(key: Tensor, tree: Tree, step: int | Tensor | None = None) -> Tree:
    """A tree like `tree` with the `leaf_key` of every leaf.

    >>> keys = sf.random.leaf_keys(sf.random.key(0), {"a": torch.zeros(3)})
    >>> bool((keys["a"] == sf.random.leaf_key(sf.random.key(0), "a")).all())
    True
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

    `key` and `counter` are int64 of shape (..., 2) that broadcast; words are in [0,
    2^32), in the order of Random123 (its known answers hold). Element i of a draw has
    the counter (i >> 32, i & 0xffffffff).
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

    Element i in row-major order is the first word of block i. `index`, an int64 tensor
    of that shape, draws those global elements instead. Keys of shape (..., 2) give
    (..., *shape). Raises TypeError or ValueError for a bad key, shape or index.
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

    As many leading bits of a block as `dtype` holds exactly: float32 is
    `(word >> 8) * 2**-24`, float16 has 11 bits, bfloat16 8, float64 53 (of both words).
    `key`, `shape` and `index` as in `bits`. Raises TypeError for another dtype.
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

    Box and Muller (1958) on the two words of a block, in float64 by IEEE-exact
    operations, then rounded to `dtype`. Magnitudes end at 6.67. `key`, `shape` and
    `index` as in `bits`. Raises TypeError for a dtype that `uniform` does not take.
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

    For a DTensor they are a DTensor of the same placements. The numbers are as in
    `uniform(key, leaf.shape, dtype)`, and they are where the leaf is, for which a key
    on the CPU is not copied: nothing waits for a device. They do not depend on how the
    leaf is sharded. Each process draws the part that it holds, and nothing is sent. The
    dtype is float32 whatever the leaf's is. Raises the errors of `uniform`, and
    ValueError for a DTensor that is partial or has parts that torch.chunk would not
    make, or with several keys.
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

    For a DTensor they are a DTensor of the same placements. To `normal` as
    `uniform_like` is to `uniform`.
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

    `p` is a number in [0, 1], or a tensor of probabilities that broadcasts to `shape`
    (default: the shape of `p`). True where the 32-bit word is below `p * 2**32`,
    computed in float64: 0 never fires, 1 always; in a tensor, entries above 1 always
    fire, entries below 0 or NaN never do. `key` and `index` as in `bits`. A DTensor of
    probabilities gives a DTensor of the same placements, with the flips that the whole
    would give. Raises ValueError for a number outside [0, 1], and for a DTensor with
    another shape, an index or several keys.
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

    Sorts n draws of 64 bits; the lower index goes first among equals. Raises ValueError
    for n < 0.
    """
    check_int("permutation(key, n)", "n", n, 0)
    return (
        draws.draws_of(key, (n,), None, "pairs", torch.int64)
        .sort(dim=-1, stable=True)
        .indices
    )
