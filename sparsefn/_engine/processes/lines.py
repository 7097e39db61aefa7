"""Messages between processes, over one process group or several of a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsefn._engine.transforms import Array

GATHER = "all_gather_single"
# torch 2.12 has it under the name that later ones warn of
if not hasattr(torch.distributed, GATHER):
    GATHER = "all_gather_into_tensor"

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

Groups: TypeAlias = tuple[str, ...]


class Lost(RuntimeError):
    """Other processes did not come to a message within the timeout of their group, or
    have ended.
    """


@contextmanager
def waiting() -> Iterator[None]:
    """Code that sends a message: an error of torch then says what it means.

    >>> from sparsefn._engine.processes import lines
    >>> with lines.waiting():
    ...     int("1")
    1
    """
    try:
        yield
    except RuntimeError as error:
        raise Lost(
            f"rank {torch.distributed.get_rank()} waited for other processes, which "
            "did not come, or have ended: every process must make the same calls, "
            "with the same step and with tensors that are laid out alike; if one of "
            f"them failed, its own output says why ({str(error).splitlines()[0]})"
        ) from error


class Line:
    """The way to the processes of some groups, one group after another.

    >>> import numpy as np
    >>> from sparsefn._engine.processes.lines import Line
    >>> Line(()).total(np.array([2]))
    array([2])
    """

    def __init__(self, names: Groups) -> None:
        self.groups = [group_of(name) for name in names]
        self.devices = [_device_of(group) for group in self.groups]

    @property
    def size(self) -> int:
        """How many processes there are, where the groups are the rows and columns of a
        grid.
        """
        return math.prod(group.size() for group in self.groups)

    @property
    def place(self) -> int:
        """The number of this process among all, in the order in which messages come."""
        place = 0
        step = 1
        for group in self.groups:
            place += group.rank() * step
            step *= group.size()
        return place

    def total(self, counts: Array) -> Array:
        """The sum of int64 counts."""
        for group, device in zip(self.groups, self.devices, strict=True):
            buffer = torch.from_numpy(counts).to(device, copy=True)
            with waiting():
                torch.distributed.all_reduce(buffer, group=group)
                counts = buffer.cpu().numpy()
        return counts

    def blocks(self, block: Array) -> Array:
        """The rows of bytes that all processes have, of one size: a row each."""
        size = block.size
        for group, device in zip(self.groups, self.devices, strict=True):
            here = torch.from_numpy(block).to(device)
            buffer = torch.empty(
                group.size() * block.size, dtype=torch.uint8, device=device
            )  # flat, as gloo wants it
            with waiting():
                getattr(torch.distributed, GATHER)(buffer, here, group=group)
                block = buffer.cpu().numpy()
        return block.reshape(-1, size)

    def end_to_end(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """The bytes, of these sizes, of all processes of the only group: for large
        tensors, as no message is copied.
        """
        (group,) = self.groups
        (device,) = self.devices
        every = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for rank, part in enumerate(torch.split(every, list(sizes))):
            if rank == self.place:
                part.copy_(own)
            if len(part):
                with waiting():
                    torch.distributed.broadcast(part, group=group, group_src=rank)
        return every

    def messages(self, message: Array, sizes: Array) -> list[Array]:
        """The messages of all processes, of these sizes in bytes."""
        block = np.zeros(int(sizes.max()), np.uint8)
        block[: message.size] = message
        return [
            row[:size]
            for row, size in zip(self.blocks(block), sizes.tolist(), strict=True)
        ]

    def texts(self, text: bytes) -> list[bytes]:
        """The texts of all processes."""
        length = np.array([len(text)], np.int64).view(np.uint8)
        sizes = self.blocks(length).view(np.int64)
        message = np.frombuffer(text, np.uint8)
        return [bytes(row) for row in self.messages(message, sizes.reshape(-1))]


def is_first(names: Sequence[str]) -> bool:
    """Whether this process is the first one of each of some groups.

    >>> from sparsefn._engine.processes import lines
    >>> lines.is_first([])
    True
    """
    return not any(group_of(name).rank() for name in names)


def group_of(name: str) -> ProcessGroup:
    """The group of processes of this name."""
    from torch.distributed import distributed_c10d as c10d

    group: ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def board() -> Store | None:
    """Where processes leave notes for each other without waiting: the store that they
    met at. MPI has none.
    """
    from torch.distributed import distributed_c10d as c10d

    return c10d._get_default_store()


def _device_of(group: ProcessGroup) -> torch.device:
    # Where its messages must lie: NCCL sends from its devices alone.
    from torch.distributed import distributed_c10d as c10d

    return torch.device(c10d._get_object_coll_device(group))
