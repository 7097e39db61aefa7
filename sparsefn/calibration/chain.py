"""Which parts of a model its blocks are in, and whether these can be run one by one
with the results of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsefn.calibration.carried import block_weights, state_in
from sparsefn.calibration.caught import NeededError, recorded
from sparsefn.calibration.inputs import collector, weights_of_call
from sparsefn.calibration.kept import (
    BrokenChainError,
    CalledAgainError,
    Touched,
    in_memory,
    own_call,
    stow,
)
from sparsefn.calibration.paused import Chain, Paused
from sparsefn.calibration.sums import Stats
from sparsefn.modules.calls import Call
from sparsefn.modules.wrappers import own_tensors
from sparsefn.state import State
from sparsefn.tree import Tree, flatten, leaves_of

# parts whose outputs are kept to the end, as the model does more with them than hand
# them on
_MOST_KEPT = 4
_WANTED = ("count", "square")
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def names_in(
    module: nn.Module, parts: Mapping[str, nn.Module]
) -> dict[str, dict[str, str]]:
    """The names in the model of the weights of some parts, by the parts' own names.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    >>> names_in(model, {"1": model[1]})
    {'1': {'weight': '1.weight', 'bias': '1.bias'}}
    """
    names = {
        id(tensor): name
        for name, (_, tensor) in own_tensors(module, "parameters").items()
    }
    found: dict[str, dict[str, str]] = {}
    for path, part in parts.items():
        own = own_tensors(part, "parameters")
        found[path] = {name: names[id(tensor)] for name, (_, tensor) in own.items()}
    return found


def chain_of(
    module: nn.Module, state: State, chosen: Sequence[Sequence[str]], call: Call
) -> Chain:
    """The parts that hold these leaves, a list of paths a block, and all that is called
    between them.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
    ... )
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> chain = chain_of(
    ...     model, state, [["0.weight"], ["2.weight"]], ((torch.ones(3, 2),), {})
    ... )
    >>> chain.order, chain.at
    (['0', '1', '2'], [0, 2])

    The call is run twice, as the model and part by part, and the statistics of the
    leaves are compared: the same bits on a CPU. Raises BrokenChainError where they
    differ, and where the model does not call the parts one after the other, ValueError
    where the blocks are in another order than the model has them.
    """
    places = {
        name: place for name, (place, _) in own_tensors(module, "parameters").items()
    }

    def lists_above(paths: Sequence[str]) -> list[str]:
        return _lists_above(module, [places[path] for path in paths])

    above = [lists_above(paths) for paths in chosen]
    for level, narrow in itertools.product(range(max(map(len, above))), (True, False)):
        at = [paths[min(level, len(paths) - 1)] for paths in above]
        try:
            return _chain(module, state, chosen, at, call, narrow)
        except BrokenChainError as error:
            why = error
    raise why


def _chain(
    module: nn.Module,
    state: State,
    chosen: Sequence[Sequence[str]],
    at: Sequence[str],
    call: Call,
    narrow: bool,
) -> Chain:
    if "" in at:
        raise BrokenChainError("a block has weights all over the model")
    at = [_outermost(path, at) for path in at]
    weights = weights_of_call(module, state)
    together = list(dict.fromkeys(path for paths in chosen for path in paths))
    parts = _parts(module, at)
    (stats, _), order, forms, why = recorded(
        parts,
        lambda: collector(module, weights, {path: path for path in together}, _WANTED)(
            own_call(call), None
        ),
    )
    _check_order(stats, chosen)
    for path in at:
        times = order.count(path)
        if times > 1:
            raise CalledAgainError(f"{path!r} is called {times} times")
        why = why if times else f"{path!r} is called 0 times"
    if why:
        raise BrokenChainError(why)
    numbers = [order.index(path) for path in at]
    kept = frozenset[int]()
    end = max(numbers) + 1
    names = names_in(module, parts)
    while True:
        chain = Chain(parts, names, order[:end], forms[:end], kept, numbers, narrow)
        try:
            alone = _by_parts(module, state, chain, chosen, call)
            break
        except NeededError as error:
            kept |= {error.number}
            if len(kept) > _MOST_KEPT:
                raise BrokenChainError(
                    f"there are operations between parts, as after {order[min(kept)]!r}"
                ) from None
    for path, of in stats.items():
        if not _same(of, alone.get(path, {})):
            raise BrokenChainError(
                f"{path!r} gets other inputs where parts run one by one"
            )
    return chain


def _lists_above(module: nn.Module, places: Sequence[str]) -> list[str]:
    # The paths of the parts that hold some tensors and are in a list of parts; the
    # innermost comes first.
    inner = ".parametrizations."
    owners = [
        (at.split(inner)[0] if inner in at else at.rpartition(".")[0]).split(".")
        for at in places
    ]
    common = list[str]()
    for names in zip(*owners, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    above = [".".join(common[:n]) for n in range(len(common), 0, -1)]
    listed = [
        path
        for path in above
        if isinstance(module.get_submodule(path.rpartition(".")[0]), _LISTS)
    ]
    return listed or [*above, ""][:1]


def _parts(module: nn.Module, at: Sequence[str]) -> dict[str, nn.Module]:
    # The parts at these paths and, of those in a list, the others in it, which data
    # passes as well.
    parts = {path: module.get_submodule(path) for path in at}
    for above in dict.fromkeys(path.rpartition(".")[0] for path in at):
        if isinstance(holder := module.get_submodule(above), _LISTS):
            for name, part in holder.named_children():
                path = f"{above}.{name}".lstrip(".")
                if not any(_inside(one, path) or _inside(path, one) for one in at):
                    parts[path] = part
    return {path: part for path, part in parts.items() if part is not module}


def _outermost(path: str, parts: Iterable[str]) -> str:
    # Of the parts that a path is in, the one that the others are in.
    return min((part for part in parts if _inside(path, part)), key=len)


def _inside(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.")


def _by_parts(
    module: nn.Module,
    state: State,
    chain: Chain,
    chosen: Sequence[Sequence[str]],
    call: Call,
) -> Stats:
    # The statistics over one call, part by part.
    paused = Paused(module, chain, call)
    stats = Stats()
    kinds = set[type]()
    leaves = (flatten(state.params)[0], flatten(state.masks)[0])
    whole = weights_of_call(module, state)
    for number, path in enumerate(chain.order):
        paused.go_on(number, whole)
        part = chain.parts[path]
        names = chain.names[path]
        weights = block_weights(part, names, state_in(*leaves, names.values()))
        asked = {
            name
            for at, paths in zip(chain.at, chosen, strict=True)
            if at == number
            for name in paths
        }
        own = {path: name for name, path in names.items() if path in asked}
        for given in paused.lent(number, bool(own)):
            before = [x.clone() for x in _tensors(given)]
            try:
                collect = collector(part, weights, own, _WANTED, chain.narrow)
                found, out = collect(given, None)
                # the other pass; layers of a kind remember as much as the first
                if own and type(part) not in kinds:
                    kinds.add(type(part))
                    _, out = collect(paused.call(number), None)
            except (Touched, Exception) as error:  # which the model did not raise
                raise BrokenChainError(
                    f"{path!r} by itself raises {type(error).__name__}: {error}"
                ) from error
            if own and not all(map(_equal, before, _tensors(given))):
                raise BrokenChainError(f"{path!r} writes into its inputs")
        stats |= found
        paused.done(number, stow(out, in_memory))
    return stats


def _tensors(tree: Tree) -> list[Tensor]:
    return [x for x in leaves_of(tree) if isinstance(x, Tensor)]


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(
        x.nan_to_num(), y.nan_to_num()
    )


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if not other or not torch.equal(one["count"], other["count"]):
        return False
    x = one["square"]
    y = other["square"]
    if x.device.type == "cpu":
        return x.shape == y.shape and _equal(x, y)
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, equal_nan=True)


def _check_order(stats: Stats, chosen: Sequence[Sequence[str]]) -> None:
    # Statistics come in the order in which their leaves were first used.
    used = {
        path: number
        for number, (path, of) in enumerate(stats.items())
        if of["count"].any()
    }

    def first_used(paths: Sequence[str]) -> str:
        return min(
            (path for path in paths if path in used), key=used.__getitem__, default=""
        )

    first = [first_used(paths) for paths in chosen]
    for before, after in itertools.pairwise(filter(None, first)):
        if used[after] < used[before]:
            raise ValueError(
                "in_order: expected blocks in the order in which data passes them, "
                f"but {after!r} is used before {before!r}; to prune in several rounds "
                "call in_order once for each, with the state of the last one"
            )
