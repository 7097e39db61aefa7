"""Draws from the Threefry-2x32-20 block function, and numbers made from its words.

Plain keys on a CPU are drawn by numpy in blocks; large draws are traced into a compiled
graph, where they fuse with the code that uses them; all other draws are one opaque
operator. Every way gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine import backends
from sparsefn._engine.draws import words
from sparsefn._engine.draws.words import MASK32, Place
from sparsefn._engine.leaves import check_device
from sparsefn._engine.numbers import batch_first, elementary
from sparsefn._engine.processes import Extent
from sparsefn._engine.transforms import (
    Array,
    See,
    as_numpy,
    as_numpy_inside,
    in_mode,
    transformed,
)

# of a significand
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
# with this many draws of a key or more a compiled graph contains the rounds: two
# seconds to compile
_LARGE = 1 << 20
_MEMORY: dict[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def _unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64).bitwise_and_(MASK32)


def _pairs(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype  # both words in one int64, the first on top
    return x0.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_unsigned(x1))


def _uniforms(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    # as many leading bits as the dtype holds exactly, so 1.0 cannot come out
    digits = DIGITS[dtype]
    if digits > 32:
        whole = (
            _pairs(x0, x1, dtype)
            .bitwise_right_shift_(64 - digits)
            .bitwise_and_((1 << digits) - 1)
        )
    else:
        whole = (x0 >> (32 - digits)).bitwise_and_((1 << digits) - 1)
    return whole.to(dtype).mul_(2.0**-digits)


def _normals(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    squared = -2.0 * elementary.value_of(
        "log", (_unsigned(x0) + 1).to(torch.float64) * 2.0**-32
    )
    angle = _unsigned(x1).to(torch.float64).mul_(2.0**-31)
    return (cast(Tensor, squared).sqrt() * elementary.value_of("cospi", angle)).to(
        dtype
    )


# The function of the two words, and the number that the key is xored with first.
# Derived keys have their own domains: a key never equals words that were drawn.
# (Constants: leading digits of pi.)
_KINDS: dict[str, tuple[int, int, Callable[[Tensor, Tensor, torch.dtype], Tensor]]] = {
    "pairs": (0, 0, _pairs),
    "words": (0, 0, lambda x0, x1, dtype: _unsigned(x0)),
    "uniform": (0, 0, _uniforms),
    "normal": (0, 0, _normals),
    "split": (0x243F6A88, 0x85A308D3, _pairs),
    "fold int": (0x13198A2E, 0x03707344, _pairs),
    "fold str": (0xA4093822, 0x299F31D0, _pairs),
}


def lifted(key: Tensor) -> Tensor:
    """The key, for operations under a dispatch mode: fake tensors take no real one that
    was made before them.

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.lifted(sf.random.key(0))
    tensor([0, 0])
    """
    if in_mode() and not torch.compiler.is_compiling():
        return torch.ops.aten.lift_fresh(key)  # type: ignore[no-any-return]
    return key


def draw(
    key: Tensor,
    index: Tensor | Extent | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """Keys (*K, 2), indices (*I, n), or None for 0..n-1, or an Extent for its n places
    -> draws (*broadcast(K, I), n).

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.draw(torch.tensor([0, 0]), None, 2, "words", torch.int64)
    tensor([1797259609,  928981903])
    """
    plain = _plain(key, index, as_numpy)
    if plain is not None:
        return _drawn(plain, n, kind, dtype)
    if not isinstance(index, Extent):
        check_device("a key and its indices", key.device, index)
    if (
        key.device.type != "cpu"
        and not transformed()
        and not backends.has_backend("draws", key.device.type)
    ):
        return _by_rounds(key, index, n, kind, dtype)
    if isinstance(index, Extent):
        index = index.places(torch.arange(n, device=key.device))
    key = lifted(key)
    if (
        torch.compiler.is_compiling()
        and index is None
        and kind in ("words", "uniform")
        and _is_large(n)
    ):
        return _traced(key, n, kind, dtype)
    drawn: Tensor = operator(key, index, n, kind, dtype)
    return drawn


def _is_large(n: int) -> bool:
    # loads much
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # counters are int32
    return statically_known_true(n >= _LARGE) and statically_known_true(n < 1 << 31)


def fold_in_words(key: Tensor, data: int | Tensor, kind: str) -> Tensor | None:
    """The key of a plain key and a plain number, by `kind`.

    It is None where either is not plain.

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.fold_in_words(torch.tensor([0, 0]), 1, "fold int")
    tensor([3520574224,  438507793])
    """
    seen = None
    if key.ndim == 1:
        seen = as_numpy([key, data] if isinstance(data, Tensor) else [key])
    if seen is None:
        return None
    number = seen[1] if isinstance(data, Tensor) else data
    k0, k1 = seen[0].tolist()
    xor0, xor1, _ = _KINDS[kind]
    made = words.pair(
        (k0 ^ xor0) & MASK32,
        (k1 ^ xor1) & MASK32,
        (int(number) >> 32) & MASK32,
        int(number) & MASK32,
    )
    return torch.from_numpy(np.array(made, np.int64))


def coins(
    key: Tensor,
    below: int | Tensor,
    index: Tensor | Extent | None,
    n: int,
) -> Tensor | None:
    """Where the first word is below a number, or below 2^32 times a chance; None where
    a tensor is not plain.

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.coins(torch.tensor([0, 0]), 1 << 30, None, 3)
    tensor([False,  True, False])

    `below` is in [0, 2^32], or a tensor of n chances. NaN and what is below 0 never
    come true.
    """
    plain = _plain(key, index, as_numpy)
    tensors = []
    if isinstance(below, Tensor):
        if below.dtype == torch.bfloat16:
            below = below.float()
        tensors.append(below)
    seen = as_numpy(tensors)
    if plain is None or seen is None:
        return None
    keys, indices, batch = plain
    chances = None
    if seen:
        chances = seen[0].reshape(-1)
    flips = np.empty((len(keys), n), np.bool_)
    compare: np.ufunc = np.less
    limit = np.uint32(0)
    if isinstance(below, int) and below:
        compare = np.less_equal
        limit = np.uint32(below - 1)

    def use(place: Place, x0: Array, x1: Array) -> None:
        if chances is None:
            compare(x0, limit, flips[place])
            return
        _, across = place
        # a number too large is always above, and NaN never
        with np.errstate(all="ignore"):
            own_limits = np.multiply(chances[across], 2.0**32, dtype=np.float64)
            np.less(x0, own_limits, flips[place])

    words.words(keys, indices, n, use, second=False)
    return torch.from_numpy(flips).reshape((*batch, n))


def _plain(key: Tensor, index: Tensor | Extent | None, see: See) -> words.Rows | None:
    tensors = [key]
    if isinstance(index, Tensor):
        tensors.append(index)
    seen = see(tensors)
    if seen is None:
        return None
    indices = seen[1] if len(seen) > 1 else None
    keys, given, batch = words.rows(seen[0], indices)
    if isinstance(index, Extent):
        return keys, index, batch
    return keys, given, batch


def _drawn(plain: words.Rows, n: int, kind: str, dtype: torch.dtype) -> Tensor:
    keys, indices, batch = plain
    xor0, xor1, finish = _KINDS[kind]
    # numpy asks for large pages, which torch does not: a fourth of the time for 1e8
    # bytes
    values = np.empty((len(keys), n), _MEMORY[dtype])
    out = torch.from_numpy(values)
    if dtype == torch.bfloat16:
        out = out.view(torch.bfloat16)
    single = kind == "words" or (kind == "uniform" and DIGITS[dtype] <= 32)

    def use(place: Place, x0: Array, x1: Array) -> None:
        part = values[place]
        if kind == "words":
            part[...] = x0
        elif kind == "uniform" and dtype == torch.float32:
            np.right_shift(x0, 8, x0)
            part[...] = x0.view(np.int32)
            np.multiply(part, np.float32(2.0**-24), part)
        elif finish is _pairs:
            both = part.view(np.uint64)
            both[...] = x0
            np.left_shift(both, 32, both)
            np.bitwise_or(both, x1, both)
        else:
            first = torch.from_numpy(x0.view(np.int32))
            second = torch.from_numpy(x1.view(np.int32))
            out[place] = finish(first, second, dtype)

    own_keys = keys ^ np.array([xor0, xor1])
    words.words(own_keys, indices, n, use, not single)
    return out.reshape((*batch, n))


def halves(key: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The words of keys (*K, 2) for draws of a kind: int32, (*K, 1) each.

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.halves(torch.tensor([1, 2**31]), "uniform")
    (tensor([1], dtype=torch.int32), tensor([-2147483648], dtype=torch.int32))
    """
    xor0, xor1, _ = _KINDS[kind]
    first = key[..., :1] ^ xor0
    second = key[..., 1:] ^ xor1
    # int64 to int32 keeps the low 32 bits
    return first.to(torch.int32), second.to(torch.int32)


def finished(x0: Tensor, x1: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The draws of a kind that two words make.

    >>> from sparsefn._engine.draws import threefry
    >>> threefry.finished(
    ...     *[torch.tensor([1 << 30], dtype=torch.int32)] * 2, "uniform", torch.float32
    ... )
    tensor([0.2500])
    """
    _, _, finish = _KINDS[kind]
    return finish(x0, x1, dtype)


def _traced(key: Tensor, n: int, kind: str, dtype: torch.dtype) -> Tensor:
    k0, k1 = halves(key, kind)
    counter = torch.arange(n, dtype=torch.int32, device=key.device)
    x0, x1 = words.rounds(k0, k1, torch.zeros_like(counter), counter)
    return finished(x0, x1, kind, dtype)


# Opaque to the compiler: small draws are many, and each would take seconds to compile.
@torch.library.custom_op("sparsefn::threefry2x32", mutates_args=())
def operator(
    key: Tensor,
    index: Tensor | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """The operator behind `draw`, for keys that are not plain."""
    made: Tensor | None = backends.call_backend(
        "draws", key.device.type, key, index, n, *kind_for_backend(kind, dtype)
    )
    if made is not None:
        return made
    plain = _plain(key, index, as_numpy_inside)
    if plain is None:
        return _by_rounds(key, index, n, kind, dtype)
    return _drawn(plain, n, kind, dtype)


def kind_for_backend(
    kind: str, dtype: torch.dtype
) -> tuple[str, torch.dtype, tuple[int, int], int]:
    """What a backend gets to know of a kind."""
    xor0, xor1, finish = _KINDS[kind]
    return (
        "pairs" if finish is _pairs else kind,
        dtype,
        (xor0, xor1),
        DIGITS.get(dtype, 0),
    )


def _by_rounds(
    key: Tensor,
    index: Tensor | Extent | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    k0, k1 = halves(key, kind)
    batch = _batch_shape(key, index if isinstance(index, Tensor) else None)
    out = torch.empty((*batch, n), dtype=dtype, device=key.device)
    # on a device launches cost more than memory traffic
    block = max(1, (1 << 24) // max(1, math.prod(batch)))
    for start in range(0, n, block):
        stop = min(n, start + block)
        if isinstance(index, Tensor):
            part = index[..., start:stop]
        else:
            part = torch.arange(start, stop, dtype=torch.int64, device=key.device)
            if index is not None:
                part = index.places(part)
        high = (part >> 32).to(torch.int32)
        low = part.to(torch.int32)
        x0, x1 = words.rounds(k0, k1, high, low)
        made = finished(x0, x1, kind, dtype)
        if stop - start == n:
            return made
        out[..., start:stop] = made
    return out


def _batch_shape(key: Tensor, index: Tensor | None) -> tuple[int, ...]:
    if index is None:
        return tuple(key.shape[:-1])
    return tuple(torch.broadcast_shapes(key.shape[:-1], index.shape[:-1]))  # type: ignore[no-untyped-call]


@operator.register_fake
def _(
    key: Tensor,
    index: Tensor | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    shape = (*_batch_shape(key, index), n)
    return torch.empty(shape, dtype=dtype, device=key.device)


@operator.register_vmap
def _(
    info: object,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    index: Tensor | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    batched = batch_first(in_dims, key, index)
    return operator(*batched, n, kind, dtype), 0
