"""A dispatch mode that sees which leaves are multiplied by which inputs, and tensors
that call it where they are multiplied.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from sparsefn._engine.transforms import CAST, GROUPED, TorchDispatchMode
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.posttraining.calibration.sums import (
    Stats,
    Sums,
    added_sums,
    as_stats,
    patch_sums,
    row_sums,
)

_aten = torch.ops.aten


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, it adds up the inputs that some leaves are multiplied by.

    >>> weight = torch.ones(3, 2)
    >>> with Watch({"w": weight}, gram=False) as watch:
    ...     out = torch.ones(5, 2) @ weight.T
    >>> watch.stats()
    {'w': {'count': tensor(5), 'square': tensor([5., 5.], dtype=torch.float64)}}

    A leaf is recognized by its storage, which it must have for itself. So views of it
    count, and casts of the whole of it, as autocast makes them; a leaf computed from it
    does not. ValueError for a product with a part of a leaf's inputs, as
    `x @ weight[:, :2].T`, and for a write into a leaf.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        gram: bool,
        tokens: Tensor | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A weak reference keeps the address of a storage from being used again.
        self.own = {_storage(leaf): (path, leaf) for path, leaf in leaves.items()}
        self.gram = gram
        self.start(tokens)

    def start(self, tokens: Tensor | None) -> None:
        """Forget what was seen; from here on count the inputs of these tokens."""
        self.tokens = tokens
        self.leaves = dict(self.own)
        self.found: dict[str, tuple[bool, int, dict[tuple[int, int], Sums]]] = {}
        # what rows of a matrix were before it was flattened
        self.rows: dict[StorageWeakRef, Sequence[int]] = {}
        self.last: tuple[Tensor, int, Sums] | None = None

    def stats(self) -> Stats:
        """The statistics of the leaves that were seen, by path."""
        return {
            path: as_stats(parts, outputs, turned)
            for path, (turned, outputs, parts) in self.found.items()
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and look at its factors if it is a product."""
        op = _watched(func)
        if op is _APART:
            # under inference_mode torch leaves it to the mode to take such operations
            # apart
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if op is _WRITE:
            self.check_unwritten(args[0])
        out = func(*args, **(kwargs or {}))
        if op is None or op is _WRITE:
            return out
        if op is CAST:
            known = self.leaf(args[0])
            if (
                known
                and _same_memory(args[0], known[1])
                and out.stride() == known[1].stride()
            ):
                self.leaves[_storage(out)] = (known[0], out)
        elif op in _VIEWS:
            if out.ndim == 2 < args[0].ndim:
                self.flattened(args[0].shape, out)
        elif op is _aten.convolution:
            x, weight, _, stride, padding, dilation, transposed, _, groups = args
            if not transposed:
                self.convolution(x, weight, (stride, padding, dilation), groups)
        elif op is GROUPED:
            self.grouped(*args[:3])
        else:
            self.product(*args[_PRODUCTS[op] :][:2])
        return out

    def leaf(self, x: Tensor) -> tuple[str, Tensor] | None:
        """The path and the tensor of the leaf that a tensor is a view of."""
        if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter):
            return None
        return self.leaves.get(_storage(x))

    def check_unwritten(self, x: object) -> None:
        """Raise before a leaf is written, through `.data` too."""
        known = None
        if isinstance(x, Tensor):
            known = self.leaf(x)
        if known:
            raise ValueError(
                "inputs: expected a forward that leaves its weights as they are, but "
                f"it writes into {known[0]!r}: have it compute a new tensor and "
                "multiply by that, or write into the weight beforehand"
            )

    def product(self, a: Tensor, b: Tensor) -> None:
        """Look at a product of two matrices, of a matrix and a vector, or of two
        batches of matrices.
        """
        left = self.leaf(a)
        right = self.leaf(b)
        if (left is None) == (right is None):
            return
        if b.ndim > 1:
            b = b.mT
        else:
            b = b[None]
        # The weight as (..., outputs, inputs), and the other factor as (..., n,
        # inputs).
        if left is not None:
            path, leaf = left
            weight = a
            x = b
        else:
            assert right is not None
            path, leaf = right
            weight = b
            x = a
        if weight.ndim == 2:
            self.add(path, leaf, weight, x)
        elif weight.stride(0) == 0 or len(weight) == 1:
            rows = x.flatten(0, 1)
            self.flattened(x.shape, rows)
            self.add(path, leaf, weight[0], rows)
        else:
            for one, inputs in zip(weight, x, strict=True):
                self.add(path, leaf, one, inputs)

    def grouped(self, a: Tensor, b: Tensor, ends: Tensor | None = None) -> None:
        """Look at a product of consecutive rows of a matrix with a matrix for each, up
        to these ends.
        """
        known = self.leaf(b)
        if known is None or ends is None or a.ndim != 2 or b.ndim != 3:
            return
        if self.tokens is not None:
            raise ValueError(
                f"inputs: expected {known[0]!r} to get inputs in the order of tokens, "
                "but it sorts them"
            )
        path, leaf = known
        first = 0
        for one, end in zip(b.mT, ends.tolist(), strict=False):
            self.add(path, leaf, one, a[first:end])
            first = end

    def add(self, path: str, leaf: Tensor, weight: Tensor, x: Tensor) -> None:
        """Add the rows of x to the inputs of the outputs that a matrix of (outputs,
        inputs) holds.
        """
        same = weight is leaf or _same_memory(leaf, weight)  # as in most layers
        if same and leaf.ndim == 2 and weight.shape[1] > 1:
            return self.keep(path, leaf, False, 0, len(leaf), self.sums(path, x))
        axis = _axis_of(leaf, weight)
        rows = None if axis is None else _rows_in(leaf, axis, weight)
        if axis is None or rows is None:
            raise ValueError(
                f"inputs: expected products with whole rows of {path!r}, of shape "
                f"{tuple(leaf.shape)}, got one with a part of shape "
                f"{tuple(weight.shape)}; leave it out with paths="
            )
        first, last = rows
        transposed = axis == leaf.ndim - 2
        self.keep(path, leaf, transposed, first, last + 1, self.sums(path, x))

    def sums(self, path: str, x: Tensor) -> Sums:
        """The sums over the rows of x; the sums of the tensor before if it is the same
        one, as q, k and v read it.
        """
        if self.tokens is not None and self.tokens.numel() != len(x):
            raise ValueError(
                f"inputs: expected an input of {path!r} for all {self.tokens.numel()} "
                f"tokens, got {len(x)}"
            )
        if self.tokens is not None:
            rows = self.rows.get(_storage(x), self.tokens.shape)
            if not _alike(rows, self.tokens.shape):
                raise ValueError(
                    f"inputs: expected inputs of {path!r} in the order of the "
                    f"{tuple(self.tokens.shape)} tokens, got {tuple(rows)}: give "
                    "examples of one length in one call, without tokens"
                )
        if x.is_inference():
            return row_sums(self.counted(x), self.gram)
        if self.last is not None:
            before, version, sums = self.last
            if version == x._version and _same_memory(before, x):
                return sums
        sums = row_sums(self.counted(x), self.gram)
        self.last = (x, x._version, sums)
        return sums

    def flattened(self, shape: Sequence[int], x: Tensor) -> None:
        """Note by which dimensions of a shape the rows of a matrix go, where tokens say
        which of them count.
        """
        if self.tokens is None:
            sizes = []
        else:
            sizes = list(itertools.accumulate(shape, operator.mul))
        if len(x) in sizes:
            self.rows[_storage(x)] = shape[: sizes.index(len(x)) + 1]

    def counted(self, x: Tensor) -> Tensor:
        """The rows of x that are tokens."""
        if self.tokens is None:
            return x
        return x[self.tokens.flatten().to(x.device)]

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        sizes: Sequence[Sequence[int]],
        groups: int,
    ) -> None:
        """Look at a convolution with these strides, paddings and dilations."""
        known = self.leaf(weight)
        if known is None:
            return
        path, leaf = known
        if self.tokens is not None:
            raise ValueError(
                f"inputs: expected an input of {path!r} a token, but it is the kernel "
                "of a convolution"
            )
        if not _same_memory(weight, leaf):
            raise ValueError(
                f"inputs: expected a convolution with the whole of {path!r}, got one "
                "with a part of it"
            )
        size = len(leaf) // groups
        of_groups = patch_sums(x, leaf.shape[2:], sizes, groups, self.gram)
        first = 0
        for sums in of_groups:
            self.keep(path, leaf, False, first, first + size, sums)
            first += size

    def keep(
        self,
        path: str,
        leaf: Tensor,
        transposed: bool,
        first: int,
        end: int,
        sums: Sums,
    ) -> None:
        """Add sums to the sums of the same outputs of a leaf."""
        outputs = leaf.numel() // len(sums["square"])
        was, _, parts = self.found.setdefault(path, (transposed, outputs, {}))
        if was != transposed:
            raise ValueError(
                f"inputs: {path!r} is multiplied once along each axis; leave it out "
                "with paths="
            )
        old = parts.get((first, end))
        parts[first, end] = sums if old is None else added_sums(old, sums)


_PRODUCTS = {  # and where their factors begin among the arguments
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv), 0),
    **dict.fromkeys((_aten.addmm, _aten.baddbmm, _aten.addmv), 1),
}
_VIEWS = {_aten.view, _aten._unsafe_view}
_KNOWN = {*_PRODUCTS, *_VIEWS, _aten.convolution, CAST, GROUPED}
_APART = "consists of other operations"
_WRITE = "writes into its first argument"


@functools.cache  # most operations are none of these, and are to cost little
def _watched(func: Any) -> Any:
    if func.overloadpacket in _KNOWN:
        return func.overloadpacket
    if (
        func._schema.name.endswith("_")
        and func.overloadpacket is not _aten.embedding_renorm_
    ):  # of a table of its own
        return _WRITE
    if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
        return _APART
    return None


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _alike(rows: Sequence[int], tokens: Sequence[int]) -> bool:
    # One example or one token may have any place.
    if len(tokens) < 2:
        return True
    return [n for n in rows if n > 1] == [n for n in tokens if n > 1]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return _memory_of(a) == _memory_of(b)


def _memory_of(x: Tensor) -> tuple[object, ...]:
    return _storage(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _axis_of(leaf: Tensor, weight: Tensor) -> int | None:
    # The axis of the leaf's inputs, whose other axes can be its outputs.
    for axis in reversed(range(leaf.ndim)):
        if _is_axis(leaf, axis, weight):
            is_flat = axis == 1 and leaf.shape[2:].numel() == 1
            return axis if axis >= leaf.ndim - 2 or is_flat else None
    return None


def _rows_in(leaf: Tensor, axis: int, weight: Tensor) -> tuple[int, int] | None:
    # The first and the last output of a matrix, if it has all outputs between them.
    first = _output_at(leaf, axis, weight[0])
    last = _output_at(leaf, axis, weight[-1])
    if first is None or last is None or last - first != len(weight) - 1:
        return None
    return first, last


def _is_axis(leaf: Tensor, axis: int, weight: Tensor) -> bool:
    # Whether the columns of a matrix in the leaf's memory go along this axis of the
    # leaf.
    same = weight.shape[1] == leaf.shape[axis]
    return same and (weight.shape[1] == 1 or weight.stride(1) == leaf.stride(axis))


def _output_at(leaf: Tensor, axis: int, row: Tensor) -> int | None:
    # The number of the output, among all entries of the other axes, that a row of a
    # matrix is; None inside of one.
    at = row.storage_offset() - leaf.storage_offset()
    place = [0] * leaf.ndim
    for d in sorted(range(leaf.ndim), key=leaf.stride, reverse=True):
        if leaf.shape[d] > 1:
            place[d], at = divmod(int(at), leaf.stride(d))
    if at or place[axis]:
        return None
    output = 0
    for d, size in enumerate(leaf.shape):
        if d != axis:
            output = output * size + place[d]
    return output


class Watched(Tensor):
    """A leaf, or a view of one, which has torch's functions run under a `Watch` where
    it is among their arguments.

    >>> weight = torch.ones(3, 2)
    >>> watch = Watch({"w": weight}, gram=False)
    >>> out = torch.ones(5, 2) @ under_watch(weight, watch).T
    >>> type(out), watch.stats()
    (<class 'torch.Tensor'>, {'w': {'count': tensor(5), 'square': tensor([5., 5.],
    dtype=torch.float64)}})

    Code that torch does not ask, as `torch.vmap` and `torch.jit`, may pass it by:
    compare with the `Watch` alone.
    """

    plain: Tensor
    watch: Watch

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if (
            func is functional.linear
            and not kwargs
            and (out := _linear(*args)) is not None
        ):
            return out
        watch = next(
            x.watch for x in leaves_of((args, kwargs)) if isinstance(x, Watched)
        )
        args, kwargs = unwatched((args, kwargs or {}))
        with watch:
            out = func(*args, **kwargs)
        return optree.tree_map(
            lambda x: (
                under_watch(x, watch) if isinstance(x, Tensor) and watch.leaf(x) else x
            ),
            out,
        )


def under_watch(x: Tensor, watch: Watch) -> Tensor:
    """A tensor in the memory of a leaf, so that a watch sees what it is multiplied by.

    >>> under_watch(torch.ones(1), Watch({}, gram=False)) + 1
    tensor([2.])
    """
    out = x.as_subclass(Watched)
    out.plain = x
    out.watch = watch
    return out


def unwatched(tree: Tree) -> Any:
    """A tree with the tensors themselves.

    >>> unwatched([under_watch(torch.ones(1), Watch({}, gram=False)), 2])
    [tensor([1.]), 2]
    """
    return optree.tree_map(lambda x: x.plain if isinstance(x, Watched) else x, tree)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    # Most products by far: of a whole leaf with rows of plain numbers that no autocast
    # converts.
    if (
        type(x) is not Tensor
        or type(weight) is not Watched
        or x.ndim < 2
        or isinstance(bias, Watched)
    ):
        return None
    known = weight.watch.leaf(weight.plain)
    if known is None or torch.is_autocast_enabled(x.device.type):
        return None
    path, leaf = known
    if leaf is not weight.plain:
        return None
    out = functional.linear(x, leaf, bias)
    weight.watch.add(path, leaf, leaf, x.flatten(0, -2))
    return out
