"""Whether processes that should hold the same numbers do."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.processes import (
    agreement,
    collectives,
    extent_of,
    is_sharded,
    local_tensor,
)
from sparsefn.core.tree import Tree, flatten
from sparsefn.nn.checkpoint.states import as_dense, check_values
from sparsefn.nn.distributed.ends import everyone


def check_replicas(state: Tree) -> None:
    """Raise an error on every process where copies of a tensor differ.

    >>> sf.distributed.check_replicas(
    ...     {"w": torch.ones(2)}
    ... )  # one process: nothing to compare

    Args:
        state: Any tree of tensors, such as a state, or its masks alone.

    Raises:
        ValueError: Copies of a tensor differ, by path and ranks, processes have other
            leaves, or a tensor is of the meta device.
        TypeError: A leaf is not a dense tensor.

    Processes that hold the same part of a leaf are compared: all processes for plain
    tensors, as under `DistributedDataParallel`, and for DTensors the processes along
    mesh dimensions that replicate the leaf. Every process of the default process group
    must call it; each sends 16 bytes a leaf, of hashes, and reads all its tensors once:
    a check for now and then. Bits count: NaN equals NaN, and 0.0 is not -0.0.
    """
    groups = everyone()
    if not groups:
        return
    with agreement(groups):
        given = flatten(state)[0].items()
        leaves = {
            path: check_values("the state", path, as_dense("the state", path, leaf))
            for path, leaf in given
        }
        hashes = [_digest(repr([*leaves]).encode())]
        hashes += [
            number
            for leaf in leaves.values()
            for number in (_place(leaf), _content(leaf))
        ]
    exchanges = [
        collectives.values_of_all(np.array(numbers, np.int64))
        for numbers in (hashes[:1], hashes)
    ]
    first, all_hashes = collectives.in_step(
        [(groups, exchange) for exchange in exchanges]
    )
    if len({*first.tolist()}) > 1:
        raise ValueError(
            f"check_replicas: expected the same leaves on every rank, got {[*leaves]} "
            "on this one"
        )
    rows = all_hashes.reshape(-1, len(hashes))[:, 1:].tolist()
    for i, path in enumerate(leaves):
        copies: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, row in enumerate(rows):
            copies[row[2 * i]][row[2 * i + 1]].append(rank)
        for found in copies.values():
            if len(found) > 1:
                ranks = " and ".join(str(group) for group in found.values())
                raise ValueError(
                    "check_replicas: expected equal copies on all ranks, but at "
                    f"{path!r} ranks {ranks} have different ones: do all ranks see "
                    "the same gradients, weights, keys and steps?"
                )


def _place(x: Tensor) -> int:
    extent = extent_of(x) if is_sharded(x) else None
    return _digest(
        repr(
            None if extent is None else (extent.shape, extent.start, extent.size)
        ).encode()
    )


def _content(x: Tensor) -> int:
    part = local_tensor(x).contiguous()
    return _digest(
        repr((tuple(part.shape), part.dtype)).encode(),
        part.view(-1).view(torch.uint8).cpu().numpy().data,
    )


def _digest(*parts: bytes | memoryview) -> int:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest()[:8], "little", signed=True)
