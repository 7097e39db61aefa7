"""Draws on a GPU in one launch, with the bits of `_engine/draws/threefry.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.numbers import batch_first
from sparsefn._engine.processes import Extent
from sparsefn_kernels.device_tables import on, write
from sparsefn_kernels.source import threefry as source
from sparsefn_kernels.tables import Drawn, addresses, starts, steps

_BLOCK = 1024


def draws(
    key: Tensor,
    index: Tensor | None,
    n: int,
    kind: str,
    dtype: torch.dtype,
    domain: tuple[int, int],
    digits: int,
) -> Tensor | None:
    """Draws of keys (*K, 2) at indices (*I, n), or of 0..n-1; None where no kernel
    serves.

    `kind` is "words", "pairs", "uniform" or "normal"; `domain` is what the key is xored
    with, `digits` is how many the significand of the dtype has. Normals of float64 are
    left to torch: its square root is not the correctly rounded one on every CPU, so
    that no kernel could have the bits of all.
    """
    if kind == "normal" and dtype == torch.float64:
        return None
    out = torch.empty((*batch_shape(key, index), n), dtype=dtype, device=key.device)
    written = out.view(torch.int16) if dtype == torch.bfloat16 else out
    _launch(written, key, index, None, 0, kind, domain, digits)
    return out


def draws_of_leaves(
    keys: Tensor,
    sizes: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    domain: tuple[int, int],
    digits: int,
) -> list[Tensor] | None:
    """Draws of keys (leaves, 2), of each as many as its size, in one launch; None where
    no kernel serves.

    As `draws`; `kind` is "uniform" or "normal".
    """
    if kind == "normal" and dtype == torch.float64:
        return None
    drawn: list[Tensor] = _leaves(keys, sizes, kind, dtype, *domain, digits)
    return drawn


@torch.library.custom_op("sparsefn_kernels::draws_of_leaves", mutates_args=())
def _leaves(
    keys: Tensor,
    sizes: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    xor0: int,
    xor1: int,
    digits: int,
) -> list[Tensor]:
    outs = [torch.empty(n, dtype=dtype, device=keys.device) for n in sizes]
    size = np.array(sizes, np.int64)
    chunks = -(-size // _BLOCK)
    drawn = Drawn(addresses(outs), size, starts(chunks))
    n_chunks = int(chunks.sum())
    if n_chunks:
        with on(keys.device):
            source.draw_leaves[(n_chunks,)](
                write(np.stack(drawn, 1), keys.device),
                len(outs),
                keys.contiguous(),
                XOR0=xor0,
                XOR1=xor1,
                KIND=kind,
                DIGITS=digits,
                STEPS=steps(len(outs)),
                B=_BLOCK,
                enable_fp_fusion=False,
            )
    return outs


@_leaves.register_fake
def _(
    keys: Tensor, sizes: Sequence[int], kind: str, dtype: torch.dtype, *rest: object
) -> list[Tensor]:
    return [torch.empty(n, dtype=dtype, device=keys.device) for n in sizes]


def coins(
    key: Tensor, below: int | Tensor, index: Tensor | Extent | None, n: int
) -> Tensor:
    """Where the first word is below a number in [0, 2^32], or below 2^32 times its
    chance.

    `below` is a number or a tensor of chances.
    """
    if isinstance(index, Extent):
        index = index.places(torch.arange(n, device=key.device))
    drawn: Tensor
    if isinstance(below, Tensor):
        drawn = _coins(key, 0, below.detach().reshape(-1), index, n)
    else:
        drawn = _coins(key, below, None, index, n)
    return drawn


@torch.library.custom_op("sparsefn_kernels::coins", mutates_args=())
def _coins(
    key: Tensor, below: int, chances: Tensor | None, index: Tensor | None, n: int
) -> Tensor:
    out = torch.empty(
        (*batch_shape(key, index, chances), n), dtype=torch.bool, device=key.device
    )
    _launch(
        out.view(torch.int8),
        key,
        index,
        chances,
        below,
        "below" if chances is None else "chances",
        (0, 0),
        0,
    )
    return out


@_coins.register_fake
def _(
    key: Tensor, below: int, chances: Tensor | None, index: Tensor | None, n: int
) -> Tensor:
    return torch.empty(
        (*batch_shape(key, index, chances), n), dtype=torch.bool, device=key.device
    )


@_coins.register_vmap
def _(
    info: object,
    in_dims: tuple[int | None, ...],
    key: Tensor,
    below: int,
    chances: Tensor | None,
    index: Tensor | None,
    n: int,
) -> tuple[Tensor, int]:
    keys, some, places = batch_first((in_dims[0], *in_dims[2:4]), key, chances, index)
    assert keys is not None
    return _coins(keys, below, some, places, n), 0


def batch_shape(key: Tensor, *others: Tensor | None) -> tuple[int, ...]:
    """The shape of the draws of keys and others that spread, without their last
    dimension.
    """
    shapes = [key.shape[:-1], *(x.shape[:-1] for x in others if x is not None)]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _launch(
    out: Tensor,
    key: Tensor,
    index: Tensor | None,
    chances: Tensor | None,
    below: int,
    kind: str,
    domain: tuple[int, int],
    digits: int,
) -> None:
    *batch, n = out.shape
    rows = math.prod(batch)
    keys = key.expand(*batch, 2).contiguous()
    places = []
    steps = []
    for x in (index, chances):  # one row for all keys stays one
        wide = x is not None and x.ndim > 1
        places.append(
            out if x is None else (x.expand(*batch, n) if wide else x).contiguous()
        )
        steps.append(n if wide else 0)
    if not out.numel():
        return
    with on(out.device):
        source.draw[(-(-out.numel() // _BLOCK),)](
            keys,
            places[0],
            places[1],
            out,
            n,
            out.numel(),
            *steps,
            below,
            XOR0=domain[0],
            XOR1=domain[1],
            KIND=kind,
            DIGITS=digits,
            INDEXED=index is not None,
            ONE_KEY=rows == 1,
            B=_BLOCK,
            enable_fp_fusion=False,
        )
