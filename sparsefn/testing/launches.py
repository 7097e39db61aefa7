"""A counter of what operations cost on a device: launches, bytes and waits.

It needs no device: `torch.device("meta")` tensors have shapes and no values, and code
that looks at a value fails on them as it would wait on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from sparsefn._engine.transforms import Onlooker

# Operations that make another tensor of the same memory, or memory that nothing is
# written to.
_VIEWS = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "expand",
        "unsqueeze",
        "squeeze",
        "t",
        "transpose",
    ),
    *(
        "permute",
        "movedim",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "unfold",
        "narrow",
        "chunk",
    ),
    *(
        "diagonal",
        "as_strided",
        "detach",
        "alias",
        "lift_fresh",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
    ),
}
# Operations whose result, or its size, Python reads.
_READS = {
    *(
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "bincount",
    ),
    *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
_ONLY_WRITES = {"copy_", "fill_", "zero_"}


class Launches(Onlooker):
    """What the operations under it cost on devices other than the CPU.

    >>> from sparsefn.testing import Launches
    >>> with Launches() as counted:
    ...     x = torch.empty(1000, device="meta")
    ...     _ = (x + 1).reshape(10, 100)
    >>> counted.launches, counted.bytes, counted.waits
    (1, 8000, [])

    Attributes:
        operations: Counter of operations by name.
        bytes: Sum of the tensors that each operation reads and writes, each once; an
            operation that passes over memory several times, as a sort does, moves more.
        waits: Names of what makes Python wait until the device has done all before: a
            value that is read, a shape that depends on values, a copy between a device
            and the CPU. `torch.tensor(numbers, device=...)` copies past every mode, and
            is not seen.

    `launches` counts the operations that run: one for each, whatever number of kernels
    a device makes of it, and none for a view or a tensor without elements. An operation
    that is opaque, such as one of `torch.library`, counts as one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self.bytes = 0
        self.waits: list[str] = []

    @property
    def launches(self) -> int:
        """How many operations ran on a device."""
        return self.operations.total()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        given = kwargs or {}
        inputs = _tensors(
            (args, {key: value for key, value in given.items() if key != "out"})
        )
        # before the call: on a meta tensor it may fail
        self.waits += _waits(name, args, given, inputs)
        made = func(*args, **given)
        # an operation on a list of tensors in place returns nothing
        outputs = _tensors(made) or _tensors(args[:1])
        runs = name not in _VIEWS and any(map(Tensor.numel, outputs))
        if runs and _on_device(inputs + outputs):
            self.operations[name] += 1
            read = inputs
            if name.removeprefix("_foreach_") in _ONLY_WRITES:
                read = inputs[len(outputs) :]
            self.bytes += sum(_size(x) for x in read) + sum(_size(x) for x in outputs)
        return made


def counted(call: Callable[[], object]) -> Launches:
    """The counter of one call.

    >>> from sparsefn.testing.launches import counted
    >>> counted(lambda: torch.zeros(3, device="meta")).operations
    Counter({'zeros': 1})
    """
    found = Launches()
    with found:
        call()
    return found


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Any] = optree.tree_leaves(tree)
    return [x for x in found if isinstance(x, Tensor)]


def _on_device(tensors: list[Tensor]) -> bool:
    return any(x.device.type != "cpu" for x in tensors)


def _waits(
    name: str,
    args: tuple[Any, ...],
    given: dict[str, Any],
    inputs: list[Tensor],
) -> list[str]:
    if name in _READS and _on_device(inputs):
        return [name]
    # A 0-d CPU tensor in arithmetic is an argument of the launch, and no copy.
    if name in ("_to_copy", "copy_") and inputs:
        origin = inputs[-1].device.type
        to = inputs[0].device
        if name == "_to_copy":
            to = torch.device(given.get("device") or origin)
        if to.type != origin:
            return [f"copy of {tuple(inputs[-1].shape)} from {origin} to {to.type}"]
        return []
    flags = (torch.bool, torch.uint8)
    if name in ("index", "index_put", "index_put_") and _on_device(inputs):
        indices = _tensors(args[1])
    else:
        indices = []
    if any(x.dtype in flags or x.device.type == "cpu" for x in indices):
        return [f"{name} by flags or by indices on the CPU"]
    return []


def _size(x: Tensor) -> int:
    # An element that is expanded is read once.
    return x.element_size() * math.prod(
        n if step or not n else 1 for n, step in zip(x.shape, x.stride(), strict=True)
    )
