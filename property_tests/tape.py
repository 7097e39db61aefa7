"""A stand-in for a CUDA graph where there is no GPU: a tape of torch's operations.

As in a graph, tensors have fixed places in memory, and everything else is what it was
when the tape was made: numbers of Python, its branches, the shapes. Work on memory that
torch does not see, by numpy, is in no tape: the library does none under a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn._engine.transforms import Onlooker, TorchDispatchMode
from sparsefn.algorithms.combine.cuda_graphs import Waits, line_of
from sparsefn.core.state import State

_WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_INDEX = ("index", "index_put", "index_put_")


class _Operation(NamedTuple):
    call: Any
    args: Any
    kwargs: Any
    made: list[Tensor]


class Tape(TorchDispatchMode):
    """A `Graph` on any device: `replay` does the operations again, and writes to the
    tensors that they made when they were captured.
    """

    captures = 0
    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def capture(self, run: Callable[[], State]) -> State:
        """Run once as it is, and once on the tape."""
        Tape.captures += 1
        run()
        try:
            with self:
                return run()
        except RuntimeError as error:
            raise Waits(line_of(error)) from error

    def replay(self) -> None:
        """Do it again, in the same memory."""
        Tape.replays += 1
        with torch.inference_mode(False), torch.no_grad():
            for operation in self.operations:
                _again(operation)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if _waits(func, args, given):
            raise RuntimeError(f"{func} needs a value that is on the device")
        made = func(*args, **given)
        # lists are copied, as their owner may change them
        self.operations.append(
            _Operation(func, _copied(args), _copied(given), tensors_of(made))
        )
        return made


class TapeElsewhere(Tape, Onlooker):
    """The same for tensors on another device, where the library does what it does: it
    reads keys on the CPU by numpy, and writes them to the device.
    """


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors among some arguments or results."""
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def _copied(tree: Any) -> Any:
    return optree.tree_map(lambda x: x, tree, none_is_leaf=True)


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _BY_INDEX:
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_of(args[1]))
    if name in ("_to_copy", "copy_"):
        devices = {x.device.type for x in tensors_of(args)}
        to = kwargs.get("device")
        return len(devices | ({torch.device(to).type} if to else set())) > 1
    return not _WAIT.isdisjoint(func.tags)


def _again(operation: _Operation) -> None:
    schema = operation.call._schema
    if "empty" in schema.name or "zerotensor" in schema.name:
        return  # memory without values, and zeros that nobody may write to
    if schema.is_mutable:
        operation.call(*operation.args, **operation.kwargs)
        return
    if any(result.alias_info for result in schema.returns):
        return  # a view of memory that others write to
    made = tensors_of(operation.call(*operation.args, **operation.kwargs))
    for place, value in zip(operation.made, made, strict=True):
        place.copy_(value)
