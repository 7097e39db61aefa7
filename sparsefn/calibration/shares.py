"""Calibration data split among processes: the first adds the sums of all and prunes, and the others get its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from sparsefn.calibration.folders import some
from sparsefn.calibration.sums import Stats
from sparsefn.distributed.ends import everyone
from sparsefn.engine.processes import agree
from sparsefn.state import Algorithm, State
from sparsefn.tree import Tree, flatten

T = TypeVar("T")


def place() -> tuple[int, int]:
    """The number of this process, and how many there are.

    >>> place()
    (0, 1)
    """
    return (distributed.get_rank(), distributed.get_world_size()) if everyone() else (0, 1)


def share(items: Sequence[T]) -> Sequence[T]:
    """The part of a sequence that is this process's: runs that follow each other, as long as each other or longer by 1.

    >>> share([1, 2, 3])
    [1, 2, 3]
    """
    number, processes = place()
    return items[len(items) * number // processes : len(items) * (number + 1) // processes]


def together(prune: Callable[[Stats], Algorithm]) -> Callable[[Stats], Algorithm]:
    """The same function for all processes: it gets the sums over all of them, and all get the weights that it makes.

    >>> prune = sf.one_shot
    >>> together(prune) is prune
    True

    Every process calls the result with its own statistics. The first process alone prunes: it adds the sums in the
    order of the processes, so that they have the same bits each time, and sends the params and masks. An error on one
    process is raised on all, if they are inside of an agreement.
    """
    if not everyone():
        return prune

    def of_all(stats: Stats) -> Algorithm:
        whole = _total(stats)
        algorithm = prune(whole) if place()[0] == 0 else None
        if algorithm is not None and not isinstance(algorithm, Algorithm):
            raise TypeError(f"stream: expected prune to give an Algorithm, got {type(algorithm).__name__}")

        def init(params: Tree) -> State:
            return State(params, ()) if algorithm is None else algorithm.init(params)

        def update(state: State, grads: Tree, step: Any) -> State:
            done = state if algorithm is None else algorithm.update(state, grads, step)
            return State(_sent(done.params, state.params), _sent(done.masks, state.params))

        return Algorithm(init, update)

    return of_all


def _total(stats: Stats) -> Stats:
    # On the first process the sums of all, on others nothing. A tensor that leaves share is sent once.
    agree(everyone())
    own = list({id(x): x for of in stats.values() for x in of.values()}.values())
    index = {id(x): i for i, x in enumerate(own)}
    named = {path: {name: index[id(x)] for name, x in of.items()} for path, of in stats.items()}
    told: list[Any] = [None] * place()[1]
    distributed.all_gather_object(told, (named, [(x.shape, x.dtype) for x in own]))
    for number, (theirs, _) in enumerate(told):
        if others := sorted({*theirs} ^ {*told[0][0]}):
            raise ValueError(
                f"stream: expected data of the same leaves on all processes, but {number} and 0 differ at "
                f"{some(others)}"
            )
    if place()[0]:
        for x in own:
            distributed.send(x.contiguous(), 0)
        return {}
    for number, (theirs, kinds) in enumerate(told[1:], 1):
        sums: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # beside a sum what it is of, so that no id is reused
        received = [_received(number, shape, dtype, own[0].device) for shape, dtype in kinds]
        for path, of in stats.items():
            for name, x in of.items():
                i = theirs[path][name]
                sums.setdefault((id(x), i), (x, x + received[i]))
        stats = {
            path: {name: sums[id(x), theirs[path][name]][1] for name, x in of.items()} for path, of in stats.items()
        }
    return stats


def _received(number: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.empty(shape, dtype=dtype, device=device)
    distributed.recv(x, number)
    return x


def _sent(tree: Tree, like: Tree) -> Tree:
    # What the first process has, on all of them; `like` has its structure.
    agree(everyone())
    first = place()[0] == 0
    leaves, rebuild = flatten(tree if first else like)
    told: list[Any] = [[(x.shape, x.dtype) for x in leaves.values()]]
    distributed.broadcast_object_list(told, 0)
    found = []
    for x, (shape, dtype) in zip(leaves.values(), told[0], strict=True):
        found.append(x.contiguous() if first else torch.empty(shape, dtype=dtype, device=x.device))
        distributed.broadcast(found[-1], 0)
    return rebuild(found)
