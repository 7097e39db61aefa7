"""The blocks of a model: which parts hold them, whether these can run one by one with
the results of the model, and how the blocks in one part are pruned.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn._engine.numbers import flags_of
from sparsefn.core.state import Algorithm, State, Where, effective
from sparsefn.core.tree import Tree, flatten, leaves_at, leaves_of, with_leaves
from sparsefn.core.tree.originals import computed_name
from sparsefn.nn.modules.calls import Call
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    CachedTree,
    CalledAgainError,
    Touched,
    cache_tree,
    copied_call,
    in_memory,
    read_tree,
)
from sparsefn.posttraining.calibration.capture import (
    Chain,
    NeededError,
    PausedRun,
    recorded,
)
from sparsefn.posttraining.calibration.inputs import (
    check_finite_stats,
    collector,
    is_table,
    layer_at,
    weights_of_call,
)
from sparsefn.posttraining.calibration.sums import Stats
from sparsefn.posttraining.calibration.targets import (
    Recover,
    errors_of,
    recovered_with,
)

Prune = Callable[[Stats], Algorithm]
Calls = Callable[[], Iterable[Call]]  # the same calls each time

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


class Block(NamedTuple):
    """A block as it was asked for, and the paths of its matrices.

    >>> Block("0.*", ["0.weight"]).leaves
    ['0.weight']
    """

    where: Where
    leaves: list[str]


class PrunedBlock(NamedTuple):
    """What pruning one block gave.

    >>> sf.calibration.PrunedBlock(
    ...     "0.*", sf.State({}, {}), seconds=1.5, error=0.25
    ... ).error
    0.25

    Attributes:
        block: The block as it was asked for.
        state: The state with this block and all before it pruned.
        seconds: The time that the block took.
        error: The norm of the change of the block's outputs over their norm, for the
            inputs that the block was pruned with. None where the outputs are not known.
        why: Why the whole model ran for this block. Empty where only the block did.
    """

    block: Where
    state: State
    seconds: float
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class PruneOptions:
    """How the blocks of a model are pruned.

    Attributes:
        prune: Makes the algorithm that prunes a block from its statistics.
        of: The names of the statistics.
        inputs_from: "pruned" or "dense".
        tokens: Which inputs are counted, for each call.
        narrow: How leaves are watched, see `collector`.
        errors: Whether errors are computed. Else only outputs of the last pass are
            kept.
        recover: Trains a part whose blocks are pruned, from its state and its errors.
    """

    prune: Prune
    of: Sequence[str]
    inputs_from: str = "pruned"
    tokens: Sequence[Tensor | None] = ()
    narrow: bool = False
    errors: bool = True
    recover: Recover | None = None


def prune_part(
    part: Named,
    state: State,
    blocks: Sequence[Block],
    calls: Calls,
    options: PruneOptions,
    cache: Callable[[Tree], CachedTree] | None = partial(cache_tree, cache=in_memory),
) -> tuple[list[PrunedBlock], list[CachedTree]]:
    """Prune the blocks in a part of a model in turn, and run the part: a result a
    block, and the outputs of each call.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.randn(8, 4)
    >>> part = Named.of(model).parts(["0"])["0"]
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats))
    >>> blocks = [Block("0.*", ["0.weight"])]
    >>> options = PruneOptions(prune, ["square"])
    >>> (done,), (out,) = prune_part(part, state, blocks, lambda: [((x,), {})], options)
    >>> int(done.state.masks["0.weight"].sum()), read_tree(out).shape, done.error > 0
    (4, torch.Size([8, 2]), True)

    A pass makes all calls of the part. There is one for each block, which collects its
    statistics, and a last one, whose outputs are returned. From "dense" inputs there is
    one pass, with the weights as they are at first, and no errors. Raises ValueError
    where no product was seen with any leaf, and for inputs that are not finite.

    Args:
        part: A part of a model, or the whole.
        state: The state of the part's parameters.
        blocks: The blocks to prune; there may be none.
        calls: The arguments of all calls of the part.
        options: How the blocks are pruned.
        cache: How outputs are kept. None: nobody wants them, and there is no last pass.
    """
    results = list[PrunedBlock]()
    passes = _Passes(part, calls, options, cache)
    before = list[CachedTree]()
    dense = options.inputs_from == "dense"
    start = time.perf_counter()
    for number, (block, chosen) in enumerate(blocks):
        if not dense:
            stats, error = passes.run(state, chosen, block)
            if results:
                results[-1] = results[-1]._replace(error=error)
            before = before or list(passes.outputs)
        elif number == 0:
            together = dict.fromkeys(path for one in blocks for path in one.leaves)
            stats, _ = passes.run(state, list(together), block)
            before = list(passes.outputs)
        seen = {path: stats[path] for path in chosen if path in stats}
        if not seen:
            raise ValueError(
                f"in_order: no product was seen with a leaf of the block {block!r}"
            )
        left = [p for p in chosen if p not in seen and not is_table(part, p)]
        if left:
            warnings.warn(
                f"in_order: no product was seen with {layer_at(part, left[0])}, so it "
                "stays dense",
                stacklevel=2,
            )
        state = pruned_with(state, options.prune(seen), list(seen))
        now = time.perf_counter()
        results.append(PrunedBlock(block, state, now - start))
        start = now
    if options.recover and blocks:
        errors = errors_of(part, calls, before, options.tokens)
        state = recovered_with(state, options.recover, errors)
        seconds = results[-1].seconds + time.perf_counter() - start
        results[-1] = results[-1]._replace(state=state, seconds=seconds)
        start = time.perf_counter()
    if cache and not (dense and blocks):
        _, error = passes.run(state, [], "")
        if results:
            last = results[-1]
            seconds = last.seconds + time.perf_counter() - start
            results[-1] = last._replace(error=error, seconds=seconds)
    return results, passes.outputs


class _Passes:
    # The passes over all calls of a part. The last pass gives the outputs.
    def __init__(
        self,
        part: Named,
        calls: Calls,
        options: PruneOptions,
        cache: Callable[[Tree], CachedTree] | None,
    ) -> None:
        self.part = part
        self.calls = calls
        self.options = options
        self.cache = cache
        self.outputs: list[CachedTree] = []

    def run(
        self, state: State, chosen: Sequence[str], block: Where
    ) -> tuple[Stats, float | None]:
        """The statistics of a pass, and how far its outputs are from the outputs of the
        pass before.
        """
        of = self.options.of
        weights = weights_of_call(self.part, state)
        collect = collector(self.part, weights, chosen, of, self.options.narrow)
        counted = itertools.chain(self.options.tokens, itertools.repeat(None))
        options = self.options
        is_wanted = options.errors or options.recover is not None
        keeps = not chosen or options.inputs_from == "dense" or is_wanted
        stats = Stats()
        moved: Tensor | None = None
        for number, (call, tokens) in enumerate(
            zip(self.calls(), counted, strict=False)
        ):
            new, out = collect(call, tokens)
            stats = added_stats(stats, new)
            if number < len(self.outputs):
                more = _changes(read_tree(self.outputs[number]), out, tokens)
                if more is not None:
                    moved = more if moved is None else moved + more
            if self.cache and keeps:
                self.outputs[number : number + 1] = [self.cache(out)]
        check_finite_stats(stats, self.part, f"in_order, block {block!r}")
        # the device is waited for once
        changed, total = (0.0, 0.0) if moved is None else moved.tolist()
        error = (changed / total) ** 0.5 if total else None
        return {path: stats[path] for path in chosen if path in stats}, error


def part_of(state: State, names: Iterable[str]) -> State:
    """The state of some leaves, by path.

    >>> part_of(sf.State({"a": 1, "b": 2}, {"a": 3, "b": 4}), ["b"])[:2]
    ({'b': 2}, {'b': 4})
    """
    names = list(names)
    return State(leaves_at(state.params, names), leaves_at(state.masks, names))


def with_part(state: State, part: State) -> State:
    """The state with the leaves of a part of it.

    >>> with_part(sf.State({"a": 1, "b": 2}, {"a": 3, "b": 4}), sf.State({"b": 5}, {}))[
    ...     :2
    ... ]
    ({'a': 1, 'b': 5}, {'a': 3, 'b': 4})
    """
    return state._replace(
        params=with_leaves(state.params, flatten(part.params)[0]),
        masks=with_leaves(state.masks, flatten(part.masks)[0]),
    )


def pruned_with(state: State, algorithm: Algorithm, chosen: Sequence[str]) -> State:
    """The state with some of its leaves as an algorithm makes them out of their
    effective weights, at step 0.

    >>> state = pruned_with(
    ...     sf.dense().init({"a": torch.ones(4), "b": torch.ones(4)}),
    ...     sf.one_shot(0.5, where="*"),
    ...     "b",
    ... )
    >>> state.masks["a"].shape, int(state.masks["b"].sum())
    (torch.Size([]), 2)
    """
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            "in_order: expected prune to give an Algorithm, got "
            f"{type(algorithm).__name__}"
        )
    start = algorithm.init(effective(part_of(state, chosen)))
    done = algorithm.update(start, optree.tree_map(torch.zeros_like, start.params), 0)
    masks = flatten(done.masks)[0]
    if any(mask.ndim for mask in masks.values()) and all(
        bool(mask.all()) for mask in masks.values()
    ):
        warnings.warn(
            f"in_order: nothing was pruned of {', '.join(map(repr, masks))}: the "
            "algorithm runs once, at step 0, so give one that prunes there, such as "
            "sf.one_shot",
            UserWarning,
            stacklevel=2,
        )
    return with_part(state, done)


def added_stats(stats: Stats, new: Stats) -> Stats:
    """The sums of two batches.

    >>> added_stats(
    ...     {"a": {"count": torch.tensor(1)}}, {"a": {"count": torch.tensor(2)}}
    ... )
    {'a': {'count': tensor(3)}}

    A leaf may be in one of them alone.
    """
    # leaves that read one tensor share their sums
    sums: dict[tuple[int, int], Tensor] = {}

    def total(x: Tensor, y: Tensor) -> Tensor:
        if (id(x), id(y)) not in sums:
            sums[id(x), id(y)] = x + y
        return sums[id(x), id(y)]

    both: Stats = {}
    for path, of in stats.items():
        if path in new:
            both[path] = {name: total(x, new[path][name]) for name, x in of.items()}
    return stats | new | both


def _changes(old: Tree, new: Tree, tokens: Tensor | None) -> Tensor | None:
    # Of the first tensor of the outputs, the square of its change and its own, where
    # tokens count; None where outputs have no floats.
    for x, y in zip(leaves_of(old), leaves_of(new), strict=True):
        if isinstance(x, Tensor) and x.is_floating_point():
            if tokens is not None and x.shape[: tokens.ndim] == tokens.shape:
                counted = tokens.to(x.device)
                x = x[counted]
                y = y[counted]
            norm = partial(
                torch.linalg.vector_norm,
                dtype=torch.promote_types(x.dtype, torch.float32),
            )
            return torch.stack([norm(y - x), norm(x)]).double().square()
    return None
