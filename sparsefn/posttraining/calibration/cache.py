"""Calls and outputs of parts of a model, with their tensors in memory or in files of a
temporary folder.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
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
    """Something was done with a `Marker`; no model catches it."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot)
        self.slot = slot


class Slot(NamedTuple):
    """A tensor that a part returns: the number of the part's call, and the
    number of the leaf.
    """

    number: int
    leaf: int


@dataclass(frozen=True, eq=False)
class CachedTensor:
    """A tensor that is kept somewhere, and how to read it."""

    read: Callable[[], Tensor]


class CachedTree(NamedTuple):
    """The structure of a tree, and its leaves: tensors are cached, or are outputs of
    parts.
    """

    structure: Any
    leaves: list[Any]

    def slots(self) -> list[Slot]:
        """The outputs of parts in it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Slot)]

    def form(self) -> CachedTree:
        """The tree with None in place of its tensors."""
        leaves = [None if isinstance(x, CachedTensor) else x for x in self.leaves]
        return CachedTree(self.structure, leaves)


class Marker(Tensor):
    """Stands for an output of a part that did not run.

    It can be handed on, and nothing else.
    """

    slot: Slot

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        leaves = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type,var-annotated]
        raise Touched(next(leaf.slot for leaf in leaves if isinstance(leaf, Marker)))


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


def marked(form: CachedTree, number: int) -> Tree:
    """The outputs of the call of a number, with markers for tensors.

    >>> marked(form_of([1, torch.ones(1)]), 3)[1].__dict__["slot"]
    Slot(number=3, leaf=1)
    """
    leaves = list(form.leaves)
    for i, leaf in enumerate(leaves):
        if leaf is None:
            leaves[i] = torch.empty(0, device="cpu").as_subclass(Marker)
            leaves[i].__dict__["slot"] = Slot(number, i)
    return optree.tree_unflatten(form.structure, leaves)


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
        if isinstance(leaf, Marker):
            leaves[i] = leaf.slot
        elif isinstance(leaf, Tensor):
            if id(leaf) not in memo:
                memo[id(leaf)] = (leaf, cache(leaf))
            leaves[i] = memo[id(leaf)][1]
    return CachedTree(structure, leaves)


def read_tree(
    tree: CachedTree, outputs: Mapping[int, CachedTree] | None = None
) -> Tree:
    """The tree with its tensors. Other objects are copied, as caches of keys and values
    are, which a call changes.

    >>> out = cache_tree(torch.ones(1), in_memory)
    >>> read_tree(CachedTree(out.structure, [Slot(3, 0)]), {3: out})
    tensor([1.])
    """
    known = outputs or {}
    # One that is there twice is read once: attention asks whether its keys are its
    # queries.
    tensors: dict[CachedTensor, Tensor] = {}
    copies: dict[int, Any] = {}

    def read(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            leaf = known[leaf.number].leaves[leaf.leaf]
        if not isinstance(leaf, CachedTensor):
            return _copied(leaf, copies)
        if leaf not in tensors:
            tensors[leaf] = leaf.read()
        return tensors[leaf]

    return optree.tree_unflatten(tree.structure, map(read, tree.leaves))


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
