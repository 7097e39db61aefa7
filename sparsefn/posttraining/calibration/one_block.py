"""One block with the inputs that it gets: its pruned weights, and its outputs."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn.core.state import Algorithm, State, Where, effective
from sparsefn.core.tree import Tree, flatten, leaves_at, leaves_of, with_leaves
from sparsefn.nn.modules.calls import Call
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import (
    CachedTree,
    cache_tree,
    in_memory,
    read_tree,
)
from sparsefn.posttraining.calibration.inputs import (
    check_finite_stats,
    collector,
    is_table,
    layer_at,
    weights_of_call,
)
from sparsefn.posttraining.calibration.sums import Stats

Prune = Callable[[Stats], Algorithm]
Calls = Callable[[], Iterable[Call]]  # the same calls each time
# a block as it was asked for, and the names of its leaves
Asked = tuple[Where, list[str]]


class PrunedBlock(NamedTuple):
    """What pruning one block gave.

    >>> sf.calibration.PrunedBlock(
    ...     "0.*", sf.State({}, {}), seconds=1.5, error=0.25
    ... ).error
    0.25

    `block` is as it was asked for, `state` the state with this block and all before it
    pruned, `seconds` the time that it took. `error` is the norm of the change of the
    block's outputs over their norm, for the inputs that the block was pruned with, None
    where the outputs are not known. `why` says why the whole model ran for this block,
    and is empty where only the block did.
    """

    block: Where
    state: State
    seconds: float
    error: float | None = None
    why: str = ""


def prune_block(
    part: Named,
    state: State,
    blocks: Sequence[Asked],
    prune: Prune,
    calls: Calls,
    of: Sequence[str],
    *,
    inputs_from: str = "pruned",
    tokens: Sequence[Tensor | None] = (),
    narrow: bool = False,
    errors: bool = True,
    cache: Callable[[Tree], CachedTree] | None = partial(cache_tree, cache=in_memory),
) -> tuple[list[PrunedBlock], list[CachedTree]]:
    """Prune the blocks in a part of a model in turn, and run the part: a result a
    block, and the outputs of each call.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.randn(8, 4)
    >>> part = Named.of(model).parts(["0"])["0"]
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats))
    >>> blocks = [("0.*", ["0.weight"])]
    >>> (done,), (out,) = prune_block(
    ...     part, state, blocks, prune, lambda: [((x,), {})], ["square"]
    ... )
    >>> int(done.state.masks["0.weight"].sum()), read_tree(out).shape, done.error > 0
    (4, torch.Size([8, 2]), True)

    A pass makes all calls of the part. There is one for each block, which collects its
    statistics, and a last one, whose outputs are returned. From "dense" inputs there is
    one pass, with the weights as they are at first, and no errors. Raises ValueError
    where no product was seen with any leaf, and for inputs that are not finite.

    Args:
        part: A part of a model, or the whole.
        state: The state of the part's parameters.
        blocks: What was asked for, with the leaves to prune; there may be none.
        prune: Makes the algorithm that prunes a block out of its statistics.
        calls: The arguments of all calls of the part.
        of: The names of the statistics.
        inputs_from: "pruned" or "dense".
        tokens: Which inputs are counted, for each call.
        narrow: How leaves are watched, see `collector`.
        errors: Whether errors are computed. Else only outputs of the last pass are
            kept.
        cache: How outputs are kept. None: nobody wants them, and there is no last pass.
    """
    results = list[PrunedBlock]()
    outputs = list[CachedTree]()
    dense = inputs_from == "dense"
    start = time.perf_counter()

    def run(chosen: Sequence[str], block: Where) -> tuple[Stats, float | None]:
        # One pass: statistics, and how far the outputs are from the outputs of the
        # pass before, whose place they take.
        stats = Stats()
        moved: Tensor | None = None
        collect = collector(part, weights_of_call(part, state), chosen, of, narrow)
        counted = itertools.chain(tokens, itertools.repeat(None))
        for number, (call, own) in enumerate(zip(calls(), counted, strict=False)):
            new, out = collect(call, own)
            stats = added_stats(stats, new)
            if number < len(outputs):
                more = _changes(read_tree(outputs[number]), out, own)
                if more is not None:
                    moved = more if moved is None else moved + more
            if cache and (errors or dense or not chosen):
                outputs[number : number + 1] = [cache(out)]
        check_finite_stats(stats, part, f"in_order, block {block!r}")
        # the device is waited for once
        changed, total = (0.0, 0.0) if moved is None else moved.tolist()
        error = (changed / total) ** 0.5 if total else None
        return {path: stats[path] for path in chosen if path in stats}, error

    for number, (block, chosen) in enumerate(blocks):
        if not dense:
            stats, error = run(chosen, block)
            if results:
                results[-1] = results[-1]._replace(error=error)
        elif number == 0:
            together = dict.fromkeys(path for _, paths in blocks for path in paths)
            stats, _ = run(list(together), block)
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
        state = pruned_with(state, prune(seen), list(seen))
        now = time.perf_counter()
        results.append(PrunedBlock(block, state, now - start))
        start = now
    if cache and not (dense and blocks):
        _, error = run([], "")
        if results:
            last = results[-1]
            seconds = last.seconds + time.perf_counter() - start
            results[-1] = last._replace(error=error, seconds=seconds)
    return results, outputs


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
