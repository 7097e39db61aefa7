"""Which parts of a model its blocks are in, and whether these can be run one by one
with the results of the model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsefn._engine.numbers import flags_of
from sparsefn.core.state import State
from sparsefn.core.tree import Tree, leaves_of
from sparsefn.core.tree.originals import computed_name
from sparsefn.nn.modules.calls import Call
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    CalledAgainError,
    Touched,
    cache_tree,
    copied_call,
    in_memory,
)
from sparsefn.posttraining.calibration.capture import (
    Chain,
    NeededError,
    PausedRun,
    recorded,
)
from sparsefn.posttraining.calibration.inputs import collector, weights_of_call
from sparsefn.posttraining.calibration.one_block import part_of
from sparsefn.posttraining.calibration.sums import Stats

# parts whose outputs are kept to the end, as the model does more with them than hand
# them on
_MOST_KEPT = 4
_WANTED = ("count", "square")
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def chain_of(
    model: Named,
    state: State,
    chosen: Sequence[Sequence[str]],
    call: Call,
) -> Chain:
    """The parts that hold these leaves, a list of paths a block, and all that is called
    between them.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)
    ... )
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> call = ((torch.ones(3, 2),), {})
    >>> chain = chain_of(Named.of(model), state, [["0.weight"], ["2.weight"]], call)
    >>> chain.order, chain.at
    (['0', '1', '2'], [0, 2])

    The call is run twice, as the model and part by part, and the statistics of the
    leaves are compared: the same bits on a CPU. Raises BrokenChainError where they
    differ, and where the model does not call the parts one after the other, ValueError
    where the blocks are in another order than the model has them.
    """
    above = [_lists_above(model, paths) for paths in chosen]
    for level in range(max(map(len, above))):
        at = [paths[min(level, len(paths) - 1)] for paths in above]
        for narrow in (True, False):
            try:
                return _chain(model, state, chosen, at, call, narrow)
            except BrokenChainError as error:
                why = error
    raise why


def _chain(
    model: Named,
    state: State,
    chosen: Sequence[Sequence[str]],
    at: Sequence[str],
    call: Call,
    narrow: bool,
) -> Chain:
    if "" in at:
        raise BrokenChainError("a block has weights all over the model")
    at = [_outermost(path, at) for path in at]
    weights = weights_of_call(model, state)
    leaves = dict.fromkeys(path for paths in chosen for path in paths)
    collect = collector(model, weights, leaves, _WANTED)
    parts = model.parts(_with_siblings(model.module, at))
    (stats, _), order, forms, why = recorded(
        parts, lambda: collect(copied_call(call), None)
    )
    _check_order(stats, chosen)
    for path in at:
        times = order.count(path)
        if times > 1:
            raise CalledAgainError(f"{path!r} is called {times} times")
        if not times:
            why = f"{path!r} is called 0 times"
    if why:
        raise BrokenChainError(why)
    numbers = [order.index(path) for path in at]
    end = max(numbers) + 1
    kept = frozenset[int]()
    while True:
        chain = Chain(parts, order[:end], forms[:end], kept, numbers, narrow)
        try:
            alone = _by_parts(model, state, chain, chosen, call)
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


def _outermost(path: str, parts: Sequence[str]) -> str:
    # The outermost of the parts that a path is in.
    return min((part for part in parts if is_inside(path, part)), key=len)


def _lists_above(model: Named, names: Sequence[str]) -> list[str]:
    # The paths of the parts that hold some leaves and are in a list of parts; the
    # innermost comes first.
    owners = list[list[str]]()
    for name in names:
        at = model.own[name][0]
        weight = computed_name(at) or at
        owners.append(weight.split(".")[:-1])
    common = os.path.commonprefix(owners)  # noqa: RUF071  # of lists of names
    above = [".".join(common[:n]) for n in range(len(common), 0, -1)]
    listed = [
        path
        for path in above
        if isinstance(model.module.get_submodule(path.rpartition(".")[0]), _LISTS)
    ]
    return listed or [*above, ""][:1]


def _with_siblings(module: nn.Module, at: Sequence[str]) -> dict[str, None]:
    # These paths of parts and, for a part in a list, the list's other parts, which data
    # passes as well.
    paths = dict.fromkeys(at)
    for above in dict.fromkeys(path.rpartition(".")[0] for path in at):
        if isinstance(holder := module.get_submodule(above), _LISTS):
            for name, _ in holder.named_children():
                path = f"{above}.{name}".lstrip(".")
                if not any(is_inside(one, path) or is_inside(path, one) for one in at):
                    paths[path] = None
    return paths


def is_inside(path: str, other: str) -> bool:
    """Whether a path is another path, or lies below it.

    >>> is_inside("0.weight", "0"), is_inside("0", "0"), is_inside("01", "0")
    (True, True, False)
    """
    return f"{path}.".startswith(f"{other}.")


def _by_parts(
    model: Named,
    state: State,
    chain: Chain,
    chosen: Sequence[Sequence[str]],
    call: Call,
) -> Stats:
    # The statistics over one call, part by part.
    run = PausedRun(model, chain, call)
    stats = Stats()
    kinds = set[type]()
    whole = weights_of_call(model, state)
    for number, path in enumerate(chain.order):
        run.advance(number, whole)
        part = chain.parts[path]
        weights = weights_of_call(part, part_of(state, part.own))
        asked = set[str]()
        for at, paths in zip(chain.at, chosen, strict=True):
            if at == number:
                asked.update(paths)
        own = [name for name in part.own if name in asked]
        for given in run.guarded_call(number, bool(own)):
            before = [x.clone() for x in _tensors(given)]
            try:
                collect = collector(part, weights, own, _WANTED, chain.narrow)
                found, out = collect(given, None)
                # the other pass; layers of a kind remember as much as the first
                if own and type(part.module) not in kinds:
                    kinds.add(type(part.module))
                    _, out = collect(run.call(number), None)
            except (Touched, Exception) as error:  # which the model did not raise
                raise BrokenChainError(
                    f"{path!r} by itself raises {type(error).__name__}: {error}"
                ) from error
            if own and not all(map(_equal, before, _tensors(given))):
                raise BrokenChainError(f"{path!r} writes into its inputs")
        stats |= found
        run.finish(number, cache_tree(out, in_memory))
    return stats


def _tensors(tree: Tree) -> list[Tensor]:
    return [x for x in leaves_of(tree) if isinstance(x, Tensor)]


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if not other or not torch.equal(one["count"], other["count"]):
        return False
    x = one["square"]
    y = other["square"]
    if x.device.type == "cpu":
        return _equal(x, y)
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, equal_nan=True)


def _check_order(stats: Stats, chosen: Sequence[Sequence[str]]) -> None:
    # Statistics come in the order in which their leaves were first used.
    reached = flags_of([of["count"].any() for of in stats.values()])
    used = list(itertools.compress(stats, reached))
    first = list[str]()
    for paths in chosen:
        first += [path for path in used if path in paths][:1]
    for before, after in itertools.pairwise(first):
        if used.index(after) < used.index(before):
            raise ValueError(
                "in_order: expected blocks in the order in which data passes them, "
                f"but {after!r} is used before {before!r}; to prune in several rounds "
                "call in_order once for each, with the state of the last one"
            )
