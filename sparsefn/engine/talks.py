"""What processes tell each other: the one place that sends anything.

An algorithm that several processes run together is a generator, a "talk". It yields what it has, and gets back what
all processes have: the sum of their counts, or their values one after another. So it never says how it is answered:
by other processes, by nobody else (one process), or by a test. Many talks run in step, and what they ask for at the
same time travels together, so that a thousand leaves take as many messages as one.

Every process must hold the same talks in the same order, and what each of them asks for next may depend only on what
it was told, never on the values of one process alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from sparsefn.engine.transforms import Array

GATHER = "all_gather_single"
if not hasattr(torch.distributed, GATHER):  # torch 2.12 has it under the name that later ones warn of
    GATHER = "all_gather_into_tensor"

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")
Groups: TypeAlias = tuple[str, ...]


class Sum(NamedTuple):
    """Counts of one process, of which a talk wants the sum over all: int64 of one length on every process.

    >>> from sparsefn.engine import talks
    >>> talks.Sum([2, 3]).counts
    [2, 3]
    """

    counts: Sequence[int] | Array


class Gather(NamedTuple):
    """Values of one process, of which a talk wants those of all: one dtype, and any length on each process.

    >>> import numpy as np
    >>> from sparsefn.engine import talks
    >>> talks.Gather(np.ones(2)).values.size
    2
    """

    values: Array


Talk: TypeAlias = Generator[Sum | Gather, Array, Result]


def alone(talk: Talk[Result]) -> Result:
    """The result of a talk of one process.

    >>> from sparsefn.engine import talks
    >>> def count():
    ...     total = yield talks.Sum([3])
    ...     return int(total[0])
    >>> talks.alone(count())
    3
    """
    try:
        asked = next(talk)
        while True:
            asked = talk.send(np.asarray(asked[0]))
    except StopIteration as end:
        result: Result = end.value
        return result


def together(running: Sequence[tuple[Groups, Talk[Result]]]) -> list[Result]:
    """The results of many talks, each with the names of the process groups that it goes over.

    >>> from sparsefn.engine import talks
    >>> def double(n):
    ...     return 2 * int((yield talks.Sum([n]))[0])
    >>> talks.together([((), double(1)), ((), double(2))])
    [2, 4]

    The processes of a talk are those of its first group, and with each of them those of its second group, as in the
    rows and columns of a grid. However many talks there are, a step of all takes one sum for all the groups of a talk,
    and one exchange of values where some ask for values. Begins with `agree`.
    """
    agree(tuple(dict.fromkeys(name for groups, _ in running for name in groups)))
    # Names of groups differ from process to process, so that only the order of the talks may decide.
    alike: dict[Groups, list[int]] = {}
    for i, (groups, _) in enumerate(running):
        alike.setdefault(groups, []).append(i)
    results: list[Any] = [None] * len(running)
    lines = {groups: _Line(groups) for groups in alike}
    told: list[Array | None] = [None] * len(running)
    while any(alike.values()):
        for groups, left in alike.items():
            asked: dict[int, Sum | Gather] = {}
            for i in left:
                try:
                    asked[i] = running[i][1].send(told[i])  # type: ignore[arg-type]
                except StopIteration as end:
                    results[i] = end.value
            for i, answer in zip(asked, lines[groups].answers(list(asked.values())), strict=True):
                told[i] = answer
            alike[groups] = list(asked)
    return results


def agree(groups: Groups, error: BaseException | None = None) -> None:
    """Raise on all processes of some groups if one of them comes with an error; its own is raised where it is from.

    >>> from sparsefn.engine import talks
    >>> talks.agree((), ValueError("no"))
    Traceback (most recent call last):
        ...
    ValueError: no

    Takes one sum of one number. Every exchange begins with it, so that a process with an error may call it in place of
    the exchange.
    """
    failed = int(_Line(groups).total(np.array([error is not None], np.int64))[0])
    if error is None and failed:
        error = RuntimeError("another process failed: its own error says why")
    if error is not None:
        error._told = _told(error) | {*groups}  # type: ignore[attr-defined]
        raise error


@contextlib.contextmanager
def agreement(groups: Groups) -> Iterator[None]:
    """Code that may fail on one process alone: if it does, it fails on all of them.

    >>> from sparsefn.engine import talks
    >>> with talks.agreement(()):
    ...     int("1")
    1

    Inside, an exchange over the same groups may stand. An error that it has raised everywhere is not told again.
    """
    try:
        yield
    except Exception as error:
        if _told(error) >= {*groups}:
            raise
        agree(groups, error)
    agree(groups)


def is_first(names: Sequence[str]) -> bool:
    """Whether this process is the first one of each of some groups.

    >>> from sparsefn.engine import talks
    >>> talks.is_first([])
    True
    """
    return not any(group_of(name).rank() for name in names)


def group_of(name: str) -> ProcessGroup:
    """The group of processes of this name."""
    from torch.distributed import distributed_c10d as c10d

    group: ProcessGroup = c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


def _told(error: BaseException) -> set[str]:
    # The groups whose processes all know of an error.
    told: set[str] = getattr(error, "_told", set())
    return told


def _device_of(group: ProcessGroup) -> torch.device:
    # Where its messages must lie: NCCL sends from its devices alone.
    from torch.distributed import distributed_c10d as c10d

    return torch.device(c10d._get_object_coll_device(group))


class _Line:
    """The way to the processes of some groups, one group after another."""

    def __init__(self, names: Groups) -> None:
        self.groups = [group_of(name) for name in names]
        self.devices = [_device_of(group) for group in self.groups]

    def answers(self, asked: Sequence[Sum | Gather]) -> list[Array]:
        """What all processes have of each."""
        sums = [np.asarray(one.counts, np.int64) for one in asked if isinstance(one, Sum)]
        parts = [np.ascontiguousarray(one.values) for one in asked if isinstance(one, Gather)]
        if not asked:
            return []
        # The values of all talks are one message, which begins with their sizes. Its own size goes with the sums.
        message = np.concatenate([_bytes(part) for part in (np.array([x.size for x in parts], np.int64), *parts)])
        sizes = np.zeros(math.prod(group.size() for group in self.groups) if parts else 0, np.int64)
        if parts:
            sizes[self._place()] = message.size
        total = self.total(np.concatenate([sizes, *sums]))
        summed = iter(np.split(total[sizes.size :], np.cumsum([x.size for x in sums])[:-1]))
        gathered = iter(_gathered(self._everywhere(message, total[: sizes.size]), parts) if parts else [])
        return [next(summed) if isinstance(one, Sum) else next(gathered) for one in asked]

    def total(self, counts: Array) -> Array:
        """The sum of int64 counts."""
        for group, device in zip(self.groups, self.devices, strict=True):
            buffer = torch.from_numpy(counts).to(device, copy=True)
            torch.distributed.all_reduce(buffer, group=group)
            counts = buffer.cpu().numpy()
        return counts

    def _place(self) -> int:
        # The number of this process among all, in the order in which messages come.
        place, step = 0, 1
        for group in self.groups:
            place += group.rank() * step
            step *= group.size()
        return place

    def _everywhere(self, message: Array, sizes: Array) -> list[Array]:
        # The messages of all processes, of these sizes in bytes.
        block = np.zeros(int(sizes.max()), np.uint8)
        block[: message.size] = message
        for group, device in zip(self.groups, self.devices, strict=True):
            here = torch.from_numpy(block).to(device)
            buffer = torch.empty(group.size() * block.size, dtype=torch.uint8, device=device)  # flat, as gloo wants it
            getattr(torch.distributed, GATHER)(buffer, here, group=group)
            block = buffer.cpu().numpy()
        return [row[:size] for row, size in zip(block.reshape(sizes.size, -1), sizes.tolist(), strict=True)]


def _bytes(values: Array) -> Array:
    return values.reshape(-1).view(np.uint8)


def _gathered(messages: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    # The values of each talk, those of all processes end to end.
    found: list[list[Array]] = [[] for _ in like]
    for message in messages:
        start = 8 * len(like)
        for parts, one, size in zip(found, like, message[:start].view(np.int64).tolist(), strict=True):
            stop = start + size * one.itemsize
            parts.append(np.frombuffer(message[start:stop].tobytes(), one.dtype))
            start = stop
    return [np.concatenate(parts) for parts in found]
