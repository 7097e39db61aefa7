"""Whether the ranks of a distributed run have the same masks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, distributed

from sparsefn.masks.packing import pack
from sparsefn.tree import Tree, flatten


def check_ranks(masks: Tree) -> None:
    """Raise RuntimeError on every rank, naming the path, where a mask differs between ranks.

    >>> sf.masks.check_ranks({"w": torch.tensor([True, False])})  # one process: nothing to compare

    Every rank of the default process group must call it; each sends 8 bytes a leaf, of a SHA-256. A check for loops
    in which every rank computes its own masks, as with `DistributedDataParallel`: call it now and then.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    leaves = flatten(masks)[0]
    if _differ([_digest(repr(list(leaves)).encode())])[0]:
        raise RuntimeError(f"check_ranks: expected the same leaves on every rank, got {list(leaves)} on this one")
    differ = _differ([_digest(repr(tuple(mask.shape)).encode() + _bits(mask)) for mask in leaves.values()])
    if any(differ):
        found = ", ".join(repr(path) for path, other in zip(leaves, differ, strict=True) if other)
        raise RuntimeError(
            f"check_ranks: expected the same masks on every rank, got others at {found}: do all ranks see the same "
            "gradients, weights and steps?"
        )


def _differ(digests: list[int]) -> list[bool]:
    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    least = torch.tensor(digests, dtype=torch.int64, device=device)
    most = least.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return (least != most).tolist()


def _bits(mask: Tensor) -> bytes:
    packed: Tensor = pack(mask.cpu())
    return bytes(packed.numpy())


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
