"""Messages between processes: the one place that sends anything.

An algorithm that several processes run together is a generator, an exchange. It yields
what it has, and gets back what all processes have: the sum of their counts, or their
values one after another. So it never says how it is answered: by other processes, by
nobody else (one process), or by a test. Many exchanges run in step, and what they ask
for at the same time travels together, so that a thousand leaves take as many messages
as one.

Every process must hold the same exchanges in the same order, and what each exchange
asks for next may depend only on the answers it got, never on the values of one process
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from sparsefn._engine.processes.agreements import agree
from sparsefn._engine.processes.lines import Groups, Line
from sparsefn._engine.transforms import Array

Result = TypeVar("Result")


class Sum(NamedTuple):
    """Counts of one process, whose sum over all processes an exchange wants: int64 of
    one length on every process.

    >>> from sparsefn._engine.processes import collectives
    >>> collectives.Sum([2, 3]).counts
    [2, 3]
    """

    counts: Sequence[int] | Array


class Gather(NamedTuple):
    """Values of one process; an exchange wants the values of all: one dtype, and any
    length on each process.

    >>> import numpy as np
    >>> from sparsefn._engine.processes import collectives
    >>> collectives.Gather(np.ones(2)).values.size
    2
    """

    values: Array


Exchange: TypeAlias = Generator[Sum | Gather, Array, Result]


def values_of_all(values: Array) -> Exchange[Array]:
    """The values of all processes, end to end.

    >>> import numpy as np
    >>> from sparsefn._engine.processes import collectives
    >>> collectives.alone(collectives.values_of_all(np.ones(2)))
    array([1., 1.])
    """
    return (yield Gather(values))


def texts_of_all(text: str) -> Exchange[list[str]]:
    """The text of each process. Most say the same, of which a number tells: the texts
    are sent where they differ.

    >>> from sparsefn._engine.processes import collectives
    >>> collectives.alone(collectives.texts_of_all("same"))
    ['same']
    """
    written = text.encode()
    digest = hashlib.sha256(written).digest()
    numbers = yield Gather(np.frombuffer(digest[:8], np.int64))
    if (numbers == numbers[0]).all():
        return [text] * len(numbers)
    every = yield Gather(np.frombuffer(written + b"\0", np.uint8))
    return bytes(every).decode().split("\0")[:-1]


def alone(exchange: Exchange[Result]) -> Result:
    """The result of an exchange of one process.

    >>> from sparsefn._engine.processes import collectives
    >>> def count():
    ...     total = yield collectives.Sum([3])
    ...     return int(total[0])
    >>> collectives.alone(count())
    3
    """
    try:
        asked = next(exchange)
        while True:
            asked = exchange.send(np.asarray(asked[0]))
    except StopIteration as end:
        result: Result = end.value
        return result


def in_step(running: Sequence[tuple[Groups, Exchange[Result]]]) -> list[Result]:
    """The results of many exchanges, each with the names of its process groups.

    >>> from sparsefn._engine.processes import collectives
    >>> def double(n):
    ...     return 2 * int((yield collectives.Sum([n]))[0])
    >>> collectives.in_step([((), double(1)), ((), double(2))])
    [2, 4]

    The processes of an exchange are its first group, and with each process of this
    group its second group, as in the rows and columns of a grid. However many
    exchanges there are, a step of all takes one sum for all the groups of an exchange,
    and one exchange of values where some ask for values. Begins with
    `agreements.agree`.
    """
    # Names of groups differ from process to process, so that only the order of the
    # exchanges may decide.
    names: dict[str, None] = {}
    alike: dict[Groups, list[int]] = {}
    for i, (groups, _) in enumerate(running):
        names |= dict.fromkeys(groups)
        alike.setdefault(groups, []).append(i)
    agree(tuple(names))
    results: list[Any] = [None] * len(running)
    lines = {groups: Line(groups) for groups in alike}
    told: dict[int, Array] = {}
    while any(alike.values()):
        for groups, left in alike.items():
            asked: dict[int, Sum | Gather] = {}
            for i in left:
                try:
                    asked[i] = running[i][1].send(told.get(i))  # type: ignore[arg-type]
                except StopIteration as end:
                    results[i] = end.value
            answers = _answers(lines[groups], list(asked.values()))
            told |= zip(asked, answers, strict=True)
            alike[groups] = list(asked)
    return results


def _answers(line: Line, asked: Sequence[Sum | Gather]) -> list[Array]:
    # What all processes have of each.
    if not asked:
        return []
    counts: list[Array] = []
    values: list[Array] = []
    for one in asked:
        if isinstance(one, Sum):
            counts.append(np.asarray(one.counts, np.int64))
        else:
            values.append(np.ascontiguousarray(one.values))
    # The values of all exchanges are one message, which begins with their sizes. Its
    # own size goes with the counts.
    lengths = np.array([x.size for x in values], np.int64)
    parts = [x.reshape(-1).view(np.uint8) for x in (lengths, *values)]
    message = np.concatenate(parts)
    sizes = np.zeros(line.size if values else 0, np.int64)
    if values:
        sizes[line.place] = message.size
    total = line.total(np.concatenate([sizes, *counts]))
    sizes, total = np.split(total, [sizes.size])
    gathered: list[Array] = []
    if values:
        messages = line.messages(message, sizes)
        gathered = _gathered(messages, values)
    ends = np.cumsum([x.size for x in counts])
    sums = iter(np.split(total, ends[:-1]))
    joined = iter(gathered)
    return [next(sums) if isinstance(one, Sum) else next(joined) for one in asked]


def _gathered(messages: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    # The values of each exchange, of all processes end to end.
    found: list[list[Array]] = [[] for _ in like]
    for message in messages:
        start = 8 * len(like)
        lengths = message[:start].view(np.int64).tolist()
        for parts, one, length in zip(found, like, lengths, strict=True):
            stop = start + length * one.itemsize
            part = message[start:stop].tobytes()
            parts.append(np.frombuffer(part, one.dtype))
            start = stop
    return [np.concatenate(parts) for parts in found]
