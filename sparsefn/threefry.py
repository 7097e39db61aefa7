"""The Threefry-2x32-20 block function as one opaque operator, and what its words are made into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from sparsefn import elementary
from sparsefn.numerics import batch_first

MASK32 = 0xFFFFFFFF
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}  # of a significand
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64).bitwise_and_(MASK32)


def _pairs(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype  # both words in one int64, the first on top
    return x0.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_unsigned(x1))


def _first_words(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    del x1, dtype
    return _unsigned(x0)


def _uniforms(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    digits = DIGITS[dtype]  # as many leading bits as the dtype holds exactly, so 1.0 cannot come out
    if digits > 32:
        whole = _pairs(x0, x1, dtype).bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)
    else:
        whole = (x0 >> (32 - digits)).bitwise_and_((1 << digits) - 1)
    return whole.to(dtype).mul_(2.0**-digits)


def _normals(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    squared = -2.0 * elementary.value_of("log", (_unsigned(x0) + 1).to(torch.float64) * 2.0**-32)
    angle = _unsigned(x1).to(torch.float64).mul_(2.0**-31)
    return (cast(Tensor, squared).sqrt() * elementary.value_of("cospi", angle)).to(dtype)


# What becomes of the two words, and what the key is xored with first. Derived keys live in domains
# of their own: a key never equals words that were drawn. (Constants: leading digits of pi.)
_LAWS: dict[str, tuple[int, int, Callable[[Tensor, Tensor, torch.dtype], Tensor]]] = {
    "pairs": (0, 0, _pairs),
    "words": (0, 0, _first_words),
    "uniform": (0, 0, _uniforms),
    "normal": (0, 0, _normals),
    "split": (0x243F6A88, 0x85A308D3, _pairs),
    "fold int": (0x13198A2E, 0x03707344, _pairs),
    "fold str": (0xA4093822, 0x299F31D0, _pairs),
}


def _rounds(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> None:
    # int32 wraps around like uint32, but its right shift copies the sign, hence the mask.
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    carry = torch.empty_like(x1)
    x0.add_(k0)
    x1.add_(k1)
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0.add_(x1)
            torch.bitwise_right_shift(x1, 32 - r, out=carry)
            x1.bitwise_left_shift_(r).bitwise_or_(carry.bitwise_and_((1 << r) - 1)).bitwise_xor_(x0)
        x0.add_(schedule[(i + 1) % 3])
        x1.add_(schedule[(i + 2) % 3] + (i + 1))


# Opaque to the compiler: unrolled into a graph, 20 rounds take a minute to compile.
@torch.library.custom_op("sparsefn::threefry2x32", mutates_args=())
def draw(key: Tensor, index: Tensor | None, n: int, law: str, dtype: torch.dtype) -> Tensor:
    """Keys (*K, 2), indices (*I, n) or None for 0..n-1 -> draws (*broadcast(K, I), n)."""
    xor0, xor1, finish = _LAWS[law]
    # int64 to int32 keeps the low 32 bits
    k0, k1 = (key[..., :1] ^ xor0).to(torch.int32), (key[..., 1:] ^ xor1).to(torch.int32)
    batch = _batch_shape(key, index)
    out = torch.empty((*batch, n), dtype=dtype, device=key.device)
    # On a CPU a block stays in cache; elsewhere launches cost more than memory traffic.
    block = max(1, (1 << (17 if key.device.type == "cpu" else 24)) // max(1, math.prod(batch)))
    for start in range(0, n, block):
        stop = min(n, start + block)
        if index is None:
            part = torch.arange(start, stop, dtype=torch.int64, device=key.device)
        else:
            part = index[..., start:stop]
        x0, x1 = (
            half.to(torch.int32).expand(*batch, stop - start).clone(memory_format=torch.contiguous_format)
            for half in (part >> 32, part)
        )
        _rounds(k0, k1, x0, x1)
        out[..., start:stop] = finish(x0, x1, dtype)
    return out


def _batch_shape(key: Tensor, index: Tensor | None) -> tuple[int, ...]:
    if index is None:
        return tuple(key.shape[:-1])
    return tuple(torch.broadcast_shapes(key.shape[:-1], index.shape[:-1]))  # type: ignore[no-untyped-call]


@draw.register_fake
def _(key: Tensor, index: Tensor | None, n: int, law: str, dtype: torch.dtype) -> Tensor:
    return torch.empty((*_batch_shape(key, index), n), dtype=dtype, device=key.device)


@draw.register_vmap
def _(
    info: object,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    index: Tensor | None,
    n: int,
    law: str,
    dtype: torch.dtype,
) -> tuple[Tensor, int]:
    batched = batch_first(in_dims, key, index)
    return draw(*batched, n, law, dtype), 0
