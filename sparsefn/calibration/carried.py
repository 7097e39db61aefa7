"""One block with the inputs that it gets: its pruned weights, and its outputs."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.calibration.inputs import (
    check_finite_stats,
    collector,
    is_table,
    layer_at,
    weights_of_call,
)
from sparsefn.calibration.sums import Stats
from sparsefn.modules.calls import Call
from sparsefn.state import Algorithm, State, Where, effective
from sparsefn.tree import Tree, flatten, leaves_at, leaves_of, with_leaves

Prune = Callable[[Stats], Algorithm]
Calls = Callable[[], Iterable[Call]]  # the same calls each time


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
    part: nn.Module,
    names: Mapping[str, str],
    state: State,
    blocks: Sequence[tuple[Where, Sequence[str]]],
    prune: Prune,
    calls: Calls,
    of: Sequence[str],
    *,
    inputs_from: str = "pruned",
    tokens: Sequence[Tensor | None] = (),
    narrow: bool = False,
    errors: bool = True,
    keep: Callable[[Tree], Any] | None = lambda outputs: outputs,
    read: Callable[[Any], Tree] = lambda kept: kept,
) -> tuple[list[PrunedBlock], list[Any]]:
    """Prune the blocks in a part of a model in turn, and run the part: a result a
    block, and the outputs of each call.

    >>> layer, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
    >>> names = {"weight": "7.weight", "bias": "7.bias"}
    >>> state = sf.dense().init(
    ...     {"7.weight": layer.weight.detach(), "7.bias": layer.bias.detach()}
    ... )
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats))
    >>> blocks = [("7.*", ["7.weight"])]
    >>> (done,), (out,) = prune_block(
    ...     layer, names, state, blocks, prune, lambda: [((x,), {})], ["square"]
    ... )
    >>> int(done.state.masks["7.weight"].sum()), out.shape, done.error > 0
    (4, torch.Size([8, 2]), True)

    `names` are those that the part's weights have in the state, and `blocks` what was
    asked for with the names of the leaves to prune, of which there may be none. Each
    pass makes all `calls` of the part: one for each block, which collects its
    statistics, and a last one, whose outputs are returned. From "dense" inputs there is
    one pass, with the weights as they are at first, and no errors. Outputs go through
    `keep` when they are made, and through `read` when they are used; without `keep`
    nobody wants them, and there is no last pass, and without `errors` only those of the
    last pass are kept. `tokens` say, for each call, which of its inputs are counted,
    `narrow` how leaves are watched. Raises ValueError where no product was seen with
    any leaf, and for inputs that are not finite.
    """
    results = list[PrunedBlock]()
    outputs = list[Any]()
    start = time.perf_counter()
    local = {name: own for own, name in names.items()}
    together = [path for _, chosen in blocks for path in chosen]
    stats: Stats = {}

    def told(path: str) -> str:
        return layer_at(part, local[path], path)

    def passed(asked: Sequence[str], block: Where) -> tuple[Stats, float | None]:
        # One pass: statistics, and how far the outputs are from those of the pass
        # before, whose place they take.
        stats = Stats()
        changed = 0.0
        total = 0.0
        counted = itertools.chain(tokens, itertools.repeat(None))
        collect = collector(
            part,
            block_weights(part, names, state),
            {path: local[path] for path in asked},
            of,
            narrow,
        )
        for number, call in enumerate(calls()):
            new, out = collect(call, next(counted))
            stats = added_stats(stats, new) if stats else new
            if number < len(outputs):
                change, square = _changes(
                    read(outputs[number]),
                    out,
                    tokens[number] if number < len(tokens) else None,
                )
                changed = changed + change
                total = total + square
            if keep and (errors or not asked or inputs_from == "dense"):
                outputs[number : number + 1] = [keep(out)]
        check_finite_stats(stats, told, f"in_order, block {block!r}")
        return {path: stats[path] for path in asked if path in stats}, (
            changed / total
        ) ** 0.5 if total else None

    for number, (block, chosen) in enumerate(blocks):
        if inputs_from == "pruned" or not number:
            stats, error = passed(
                chosen if inputs_from == "pruned" else list(dict.fromkeys(together)),
                block,
            )
            results = (
                [*results[:-1], results[-1]._replace(error=error)]
                if results
                else results
            )
        seen = {path: stats[path] for path in chosen if path in stats}
        if not seen:
            raise ValueError(
                f"in_order: no product was seen with a leaf of the block {block!r}"
            )
        if left := [
            told(path)
            for path in chosen
            if path not in seen and not is_table(part, local[path])
        ]:
            warnings.warn(
                f"in_order: no product was seen with {left[0]}, so it stays dense",
                stacklevel=2,
            )
        state = pruned_with(state, prune(seen), list(seen))
        results.append(PrunedBlock(block, state, (now := time.perf_counter()) - start))
        start = now
    if keep and (inputs_from == "pruned" or not blocks):
        _, error = passed([], "")
        if results:
            last = results.pop()
            results.append(
                last._replace(
                    error=error, seconds=last.seconds + time.perf_counter() - start
                )
            )
    return results, outputs


def state_in(
    params: Mapping[str, Tensor], masks: Mapping[str, Tensor], names: Iterable[str]
) -> State:
    """The state of some leaves out of those of a model, by path.

    >>> state_in({"a": 1, "b": 2}, {"a": 3, "b": 4}, ["b"])[:2]
    ({'b': 2}, {'b': 4})
    """
    names = list(names)
    return State(
        {name: params[name] for name in names}, {name: masks[name] for name in names}
    )


def block_weights(
    part: nn.Module, names: Mapping[str, str], state: State
) -> dict[str, Tensor]:
    """The effective weights of a part of a model, by its own names.

    >>> state = sf.dense().init({"7.weight": torch.ones(1, 2)})
    >>> block_weights(torch.nn.Linear(2, 1, bias=False), {"weight": "7.weight"}, state)
    {'weight': tensor([[1., 1.]])}
    """
    params = flatten(state.params)[0]
    masks = flatten(state.masks)[0]
    own = State(
        {local: params[name] for local, name in names.items()},
        {local: masks[name] for local, name in names.items()},
    )
    return weights_of_call(part, own)


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
    leaves = State(leaves_at(state.params, chosen), leaves_at(state.masks, chosen))
    start = algorithm.init(effective(leaves))
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
    return state._replace(
        params=with_leaves(state.params, flatten(done.params)[0]),
        masks=with_leaves(state.masks, masks),
    )


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


def _changes(old: Tree, new: Tree, tokens: Tensor | None) -> tuple[float, float]:
    """Of the first tensor of the outputs, the square of its change and its own, where
    tokens count.
    """
    for one, other in zip(leaves_of(old), leaves_of(new), strict=True):
        if isinstance(one, Tensor) and one.is_floating_point():
            if tokens is not None and one.shape[: tokens.ndim] == tokens.shape:
                one, other = (x[tokens.to(x.device)] for x in (one, other))
            dtype = torch.promote_types(one.dtype, torch.float32)
            change, square = (
                torch.linalg.vector_norm(x, dtype=dtype) for x in (other - one, one)
            )
            return float(change) ** 2, float(square) ** 2
    return 0.0, 0.0
