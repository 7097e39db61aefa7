"""Masks as compiled code reads them fast: the compiler's loops load bools one by one,
and bytes sixteen at a time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsefn.engine.processes import is_sharded
from sparsefn.engine.surroundings import is_exporting


def from_bytes(masks: Sequence[Tensor]) -> list[Tensor]:
    """The masks, which code that is compiled for a CPU computes from their bytes.

    It computes them wherever they are read.

    >>> from sparsefn.engine.leaves import mask_bytes
    >>> mask_bytes.from_bytes([torch.tensor([True, False]), torch.tensor(True)])
    [tensor([ True, False]), tensor(True)]

    A view takes no memory where inductor compiles; other compilers copy the bytes, a
    byte an entry, so call it once for all that reads them.
    """
    if not torch.compiler.is_compiling() or is_exporting():
        return list(masks)
    slow = [
        mask.ndim > 0 and mask.device.type == "cpu" and not is_sharded(mask)
        for mask in masks
    ]
    if not any(slow):
        return list(masks)
    seen = iter(
        _operator([mask for mask, is_slow in zip(masks, slow, strict=True) if is_slow])
    )
    # Compared as floats: the compiler compares bytes one by one, too.
    return [
        next(seen).to(torch.float32) != 0 if is_slow else x
        for x, is_slow in zip(masks, slow, strict=True)
    ]


# Opaque to the compiler, which takes a view of other dtype for the bools that it is of.
# Defined by hand: what `torch.library.custom_op` does around a call takes as long as
# the copies of a small network's masks.
_LIBRARY = torch.library.Library("sparsefn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("mask_bytes(Tensor[] masks) -> Tensor[]")  # type: ignore[no-untyped-call]


@torch.library.impl(_LIBRARY, "mask_bytes", "CPU")
def _copied(masks: Sequence[Tensor]) -> list[Tensor]:
    return [mask.view(torch.uint8).clone() for mask in masks]


@torch.library.register_fake("sparsefn::mask_bytes", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(masks: Sequence[Tensor]) -> list[Tensor]:
    if "torch._inductor.lowering" in sys.modules:
        _view_in_inductor()
    return [torch.empty_like(mask, dtype=torch.uint8) for mask in masks]


_operator = torch.ops.sparsefn.mask_bytes


@torch.library.register_vmap("sparsefn::mask_bytes", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(
    info: object, in_dims: tuple[list[int | None]], masks: Sequence[Tensor]
) -> tuple[list[Tensor], list[int | None]]:
    return _operator(masks), in_dims[0]


@functools.cache
def _view_in_inductor() -> None:
    # A view that inductor calls, as it calls those whose dtype has another size: it
    # knows whose memory they share.
    with contextlib.suppress(ImportError):
        from torch._inductor.lowering import fallback_handler, register_lowering

        view = fallback_handler(torch.ops.aten.view.dtype)  # type: ignore[no-untyped-call]
        lower = register_lowering(_operator.default, type_promotion_kind=None)
        lower(lambda masks: [view(mask, torch.uint8) for mask in masks])
