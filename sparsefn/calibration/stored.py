"""Tensors in files of a temporary folder, mapped into memory where they are read."""

from __future__ import annotations

import os
import tempfile
import weakref
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sparsefn.calibration.kept import Keep, KeptTensor

_SMALLEST = 4096  # bytes: a page


def on_disk(folder: str | Path) -> Keep:
    """How to keep tensors as files in a folder.

    A file goes when its tensor is not needed any more.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = on_disk(folder)(torch.arange(4096.0).reshape(64, 64).T)
    ...     len(os.listdir(folder)), kept.read()[1, :3], kept.read().stride()
    (1, tensor([  1.,  65., 129.]), (1, 64))

    A tensor that is read has the values, dtype, device and order in memory of the one
    that was kept. On a CPU its memory is that of the file, of which the system holds in
    memory what it has room for, and writing to it does not change the file. Tensors of
    less than a page stay where they are. OSError where the disk is full.
    """

    def keep(x: Tensor) -> KeptTensor:
        if type(x) is not Tensor or x.layout != torch.strided or x.nbytes < _SMALLEST:
            return KeptTensor(lambda: x)
        # Dimensions that are expanded have one entry, and the others go as they are in
        # memory.
        dense = x[
            tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())
        ]
        axes = sorted(range(x.ndim), key=lambda d: (-dense.stride()[d], d))
        packed = dense.permute(axes).contiguous()
        handle, file = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                packed.cpu().flatten().view(torch.uint8).numpy().tofile(stream)
        except BaseException:
            os.unlink(file)
            raise
        read = partial(_read, file, packed.shape, axes, x.shape, x.dtype, x.device)
        weakref.finalize(read, Path(file).unlink, missing_ok=True)
        return KeptTensor(read)

    return keep


def _read(
    file: str,
    packed: torch.Size,
    axes: list[int],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    size = packed.numel()
    flat = torch.from_file(file, shared=False, size=size, dtype=dtype)
    back = [axes.index(d) for d in range(len(axes))]
    return flat.view(packed).permute(back).expand(shape).to(device)
