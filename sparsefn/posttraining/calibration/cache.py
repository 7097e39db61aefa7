"""Calls and outputs of parts of a model, with their tensors in memory or in files of a
temporary folder.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.core.tree import Tree
from sparsefn.nn.modules.calls import Call

Cache = Callable[[Tensor], "CachedTensor"]
_PLAIN = (bool, int, float, complex, str, bytes)
_SMALLEST = 4096  # bytes: a page


class BrokenChainError(Exception):
    """The parts of a model cannot be run one by one; says why."""


class CalledAgainError(BrokenChainError):
    """The model runs one of its parts several times, with the same weights."""


class Touched(BaseException):
    """An output was used that is not known yet: the number of the call that returns it.

    No model catches it, as it is no Exception.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, eq=False)
class CachedTensor:
    """A tensor that is kept somewhere, and how to read it."""

    read: Callable[[], Tensor]


class CachedTree(NamedTuple):
    """The structure of a tree, and its leaves, whose tensors are cached."""

    structure: Any
    leaves: list[Any]

    def form(self) -> CachedTree:
        """The tree with None in place of its tensors."""
        leaves = [None if isinstance(x, CachedTensor) else x for x in self.leaves]
        return CachedTree(self.structure, leaves)


def in_memory(x: Tensor) -> CachedTensor:
    """Keep a tensor where it is.

    >>> in_memory(torch.ones(1)).read()
    tensor([1.])
    """
    return CachedTensor(lambda: x)


def form_of(out: Tree) -> CachedTree:
    """What a part returns, with None in place of the tensors.

    >>> (
    ...     form_of((torch.ones(1), None)) == form_of((torch.zeros(2), None)),
    ...     form_of(torch.ones(1)) == form_of([1]),
    ... )
    (True, False)

    Raises BrokenChainError for objects that may hide tensors.
    """
    for leaf in optree.tree_leaves(out):
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise BrokenChainError(f"returns a {type(leaf).__name__}")
    return cache_tree(out, in_memory).form()


def cache_tree(
    tree: Tree,
    cache: Cache,
    memo: dict[int, tuple[Tensor, CachedTensor]] | None = None,
) -> CachedTree:
    """Keep the tensors of a tree; one that is in `memo` already is not kept again.

    >>> read_tree(cache_tree({"x": torch.ones(1), "n": 2}, in_memory))
    {'x': tensor([1.]), 'n': 2}
    """
    if memo is None:
        memo = {}
    leaves, structure = optree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = (leaf, cache(leaf))
            leaves[i] = memo[id(leaf)][1]
    return CachedTree(structure, leaves)


def read_tree(tree: CachedTree) -> Tree:
    """The tree with its tensors. Other objects are copied, as caches of keys and values
    are, which a call changes.

    >>> read_tree(cache_tree([torch.ones(1), 2], in_memory))
    [tensor([1.]), 2]
    """
    # One that is there twice is read once: attention asks whether its keys are its
    # queries.
    tensors: dict[CachedTensor, Tensor] = {}
    copies: dict[int, Any] = {}
    leaves = []
    for leaf in tree.leaves:
        if not isinstance(leaf, CachedTensor):
            leaves.append(_copied(leaf, copies))
            continue
        if leaf not in tensors:
            tensors[leaf] = leaf.read()
        leaves.append(tensors[leaf])
    return optree.tree_unflatten(tree.structure, leaves)


def copied_call(call: Call) -> Call:
    """A call with copies of its tensors and objects, as a model may write into what it
    is called with.

    >>> x = torch.ones(1)
    >>> args, _ = copied_call(((x, [x]), {}))
    >>> args, args[0] is args[1][0], args[0] is x
    ((tensor([1.]), [tensor([1.])]), True, False)
    """
    copies: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copies.setdefault(id(leaf), leaf.detach().clone())
        with contextlib.suppress(BrokenChainError):
            return _copied(leaf, copies)
        return leaf

    return optree.tree_map(own, call)  # type: ignore[arg-type,return-value]


def _copied(leaf: Any, copies: dict[int, Any]) -> Any:
    if isinstance(leaf, nn.Module):
        return leaf
    try:
        return copy.deepcopy(leaf, copies)
    except (Touched, Exception):
        kind = type(leaf).__name__
        raise BrokenChainError(
            f"gets a {kind} that cannot be copied or holds outputs of others"
        ) from None


def on_disk(folder: str | Path) -> Cache:
    """How to keep tensors as files in a folder.

    A file goes when its tensor is not needed any more.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = on_disk(folder)(torch.arange(4096.0).reshape(64, 64).T)
    ...     len(os.listdir(folder)), kept.read()[1, :3], kept.read().stride()
    (1, tensor([  1.,  65., 129.]), (1, 64))

    A tensor that is read has the values, dtype, device and order in memory of the kept
    tensor. On a CPU it maps the file: the system holds as much of the file in memory as
    fits, and writing to the tensor does not change the file. Tensors of less than a
    page stay where they are. OSError where the disk is full.
    """

    def cache(x: Tensor) -> CachedTensor:
        if type(x) is not Tensor or x.layout != torch.strided or x.nbytes < _SMALLEST:
            return CachedTensor(lambda: x)
        # Expanded dimensions are written with one entry, other dimensions in their
        # order in memory.
        own = [slice(None) if step else slice(0, 1) for step in x.stride()]
        dense = x[tuple(own)]
        axes = sorted(range(x.ndim), key=lambda d: (-dense.stride()[d], d))
        packed = dense.permute(axes).contiguous()
        handle, file = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                data = packed.cpu().flatten().view(torch.uint8)
                data.numpy().tofile(stream)
        except BaseException:
            os.unlink(file)
            raise
        read = partial(_read, file, packed.shape, axes, x.shape, x.dtype, x.device)
        weakref.finalize(read, Path(file).unlink, missing_ok=True)
        return CachedTensor(read)

    return cache


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
