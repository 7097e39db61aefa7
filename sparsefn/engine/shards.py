"""What torch's DTensors hold: the one place that knows tensors of which other processes hold parts.

A DTensor has the shape of the whole, and what is computed from it may still be the part of one process: a sum is
"partial" until the processes add theirs. Read as a number it would be another one on each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is a DTensor.

    >>> from sparsefn.engine.shards import is_sharded
    >>> is_sharded(torch.ones(2))
    False
    """
    # Importing the module takes a second; without it there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of which processes may hold parts, as plain tensors that are complete on every process.

    >>> from sparsefn.engine.shards import whole
    >>> whole([torch.tensor(3), torch.tensor(4)])
    [tensor(3), tensor(4)]

    Meant for counts and other small results. The 0-d ones of one dtype, mesh and placement travel together, so that
    counting many leaves takes one message. All processes of a mesh must call it.
    """
    results = list(tensors)
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        if is_sharded(x) and x.ndim:
            results[i] = x.full_tensor()  # type: ignore[attr-defined]
        elif is_sharded(x):
            together.setdefault((x.device_mesh, x.placements, x.dtype), []).append(i)  # type: ignore[attr-defined]
    for (mesh, placements, _), at in together.items():
        parts = torch.stack([results[i].to_local() for i in at])  # type: ignore[attr-defined]
        sums = sys.modules["torch.distributed.tensor"].DTensor.from_local(parts, mesh, placements, run_check=False)
        for i, x in zip(at, sums.full_tensor().unbind(), strict=True):
            results[i] = x
    return results
