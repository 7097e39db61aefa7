"""Calibration data split among processes: each adds the sums of all, and prunes some
rows of each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from sparsefn.calibration.carried import added_stats
from sparsefn.calibration.folders import some
from sparsefn.calibration.sums import Stats
from sparsefn.distributed.ends import everyone
from sparsefn.distributed.rows import by_rows
from sparsefn.engine.processes import agree, check_alike
from sparsefn.state import Algorithm, State
from sparsefn.tree import Tree, flatten

T = TypeVar("T")


def place() -> tuple[int, int]:
    """The number of this process, and how many there are.

    >>> place()
    (0, 1)
    """
    return (
        (distributed.get_rank(), distributed.get_world_size()) if everyone() else (0, 1)
    )


def share(items: Sequence[T]) -> Sequence[T]:
    """The part of a sequence that is this process's: runs that follow each other, as
    long as each other or longer by 1.

    >>> share([1, 2, 3])
    [1, 2, 3]
    """
    number, processes = place()
    return items[
        len(items) * number // processes : len(items) * (number + 1) // processes
    ]


def together(prune: Callable[[Stats], Algorithm]) -> Callable[[Stats], Algorithm]:
    """The same function for all processes: it gets the sums over all of them, and they
    deal out the rows of weights.

    >>> prune = sf.one_shot
    >>> together(prune) is prune
    True

    Every process calls the result with its own statistics, and then the algorithm that
    it makes. Each adds the sums in the order of the processes, so that they have the
    same bits on all and each time. An error on one process is raised on all, if they
    are inside of an agreement, and so is ValueError where what they make is not the
    same.
    """
    if not everyone():
        return prune

    def of_all(stats: Stats) -> Algorithm:
        algorithm = prune(_total(stats))
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "stream: expected prune to give an Algorithm, got "
                f"{type(algorithm).__name__}"
            )

        def update(state: State, grads: Tree, step: Any) -> State:
            with by_rows():
                done = algorithm.update(state, grads, step)
                check_alike(
                    "what prune made",
                    *flatten(done.params)[0].values(),
                    *flatten(done.masks)[0].values(),
                )
            return done

        return algorithm._replace(update=update)

    return of_all


def _total(stats: Stats) -> Stats:
    # The sums of all processes, on each of them. A tensor that leaves share is sent
    # once.
    agree(everyone())
    own = list({id(x): x for of in stats.values() for x in of.values()}.values())
    index = {id(x): i for i, x in enumerate(own)}
    named: dict[str, dict[str, int]] = {}
    for path, of in stats.items():
        named[path] = {name: index[id(x)] for name, x in of.items()}
    told: list[Any] = [None] * place()[1]
    distributed.all_gather_object(told, (named, [(x.shape, x.dtype) for x in own]))
    for number, (theirs, _) in enumerate(told):
        if others := sorted({*theirs} ^ {*told[0][0]}):
            raise ValueError(
                "stream: expected data of the same leaves on all processes, but "
                f"{number} and 0 differ at {some(others)}"
            )
    total: Stats = {}
    for number, (theirs, kinds) in enumerate(told):
        if number == place()[0]:
            sent = [x.contiguous() for x in own]
        else:
            sent = [
                torch.empty(shape, dtype=dtype, device=own[0].device)
                for shape, dtype in kinds
            ]
        for x in sent:
            distributed.broadcast(x, number)
        total = added_stats(total, _stats_of(theirs, sent))
    return total


def _stats_of(places: Mapping[str, Mapping[str, int]], sums: Sequence[Tensor]) -> Stats:
    # The sums of each leaf, out of a list of them and their places in it.
    stats: Stats = {}
    for path, of in places.items():
        stats[path] = {name: sums[i] for name, i in of.items()}
    return stats
