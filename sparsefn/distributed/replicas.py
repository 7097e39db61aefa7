"""Whether processes that should hold the same numbers do."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch
from torch import Tensor

from sparsefn.checkpoint.states import as_dense, check_values
from sparsefn.engine.shards import here, is_sharded, lie_of
from sparsefn.tree import Tree, flatten


def check_replicas(state: Tree) -> None:
    """Raise ValueError on every process, naming the path and the ranks, where copies of a tensor differ.

    >>> sf.distributed.check_replicas({"w": torch.ones(2)})  # one process: nothing to compare

    For any tree of tensors: a state, its masks alone. Compared are processes that hold the same part of a leaf: all of
    them for plain tensors, as under `DistributedDataParallel`, and for DTensors those along mesh dimensions that
    replicate it. Every process of the default process group must call it; each sends 16 bytes a leaf, of hashes, and
    reads all its tensors once: a check for now and then. Bits count: NaN equals NaN, and 0.0 is not -0.0.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    given = flatten(state)[0].items()
    leaves = {path: check_values("the state", path, as_dense("the state", path, leaf)) for path, leaf in given}
    same_leaves = _from_all([_digest(repr(list(leaves)).encode())])
    if len({row[0] for row in same_leaves}) > 1:
        raise ValueError(f"check_replicas: expected the same leaves on every rank, got {list(leaves)} on this one")
    rows = _from_all([number for leaf in leaves.values() for number in (_place(leaf), _content(leaf))])
    for i, path in enumerate(leaves):
        copies: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, row in enumerate(rows):
            copies[row[2 * i]][row[2 * i + 1]].append(rank)
        for found in copies.values():
            if len(found) > 1:
                ranks = " and ".join(str(group) for group in found.values())
                raise ValueError(
                    f"check_replicas: expected equal copies on all ranks, but at {path!r} ranks {ranks} have different "
                    "ones: do all ranks see the same gradients, weights, keys and steps?"
                )


def _from_all(numbers: list[int]) -> list[list[int]]:
    # The numbers of every process, a row each.
    distributed = torch.distributed
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = own.new_empty(distributed.get_world_size() * len(numbers))
    distributed.all_gather_single(found, own)
    rows: list[list[int]] = found.view(-1, len(numbers)).tolist()
    return rows


def _place(x: Tensor) -> int:
    lie = lie_of(x) if is_sharded(x) else None
    return _digest(repr(None if lie is None else (lie.shape, lie.start, lie.size)).encode())


def _content(x: Tensor) -> int:
    part = here(x).contiguous()
    return _digest(repr((tuple(part.shape), part.dtype)).encode(), part.view(-1).view(torch.uint8).cpu().numpy().data)


def _digest(*parts: bytes | memoryview) -> int:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest()[:8], "little", signed=True)
