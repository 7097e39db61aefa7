"""The loop over the blocks of a model: part by part, else with the whole model."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from sparsefn.calibration.carried import Prune, PrunedBlock, prune_block, state_in
from sparsefn.calibration.chain import chain_of
from sparsefn.calibration.inputs import weights_of_call
from sparsefn.calibration.kept import (
    BrokenChainError,
    CalledAgainError,
    in_memory,
    own_call,
    stow,
    unstow,
)
from sparsefn.calibration.paused import Chain, Paused, lent_calls
from sparsefn.calibration.stored import on_disk
from sparsefn.engine.checks import check_int
from sparsefn.modules.calls import Call
from sparsefn.state import State, Where
from sparsefn.tree import flatten, leaves_at, opened

# a block as it was asked for, and the paths of its leaves
Asked = tuple[Where, list[str]]


def steps_of(
    module: nn.Module,
    start: State,
    asked: list[Asked],
    prune: Prune,
    chunks: list[tuple[Call, Tensor | None]],
    of: Sequence[str],
    inputs_from: str,
    offload: str | None,
    errors: bool = True,
) -> Iterator[PrunedBlock]:
    """Prune blocks in turn, with the calls of the model in `chunks` and the tokens that
    count in each.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.randn(8, 4)
    >>> asked, start = (
    ...     [("0.*", ["0.weight"])],
    ...     sf.dense().init(sf.modules.params_of(model)),
    ... )
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats))
    >>> steps = steps_of(
    ...     model, start, asked, prune, [(((x,), {}), None)], ["square"], "pruned", None
    ... )
    >>> [(done.block, int(done.state.masks["0.weight"].sum())) for done in steps]
    [('0.*', 4)]
    """
    if not asked:
        return
    (params, put) = flatten(start.params)
    (masks, put_masks) = flatten(start.masks)
    calls = [call for call, _ in chunks]
    counted = [tokens for _, tokens in chunks]
    dense_leaves = (params, masks)
    left = list(asked)

    def record(done: PrunedBlock) -> PrunedBlock:
        nonlocal params, masks, left
        params = params | flatten(done.state.params)[0]
        masks = masks | flatten(done.state.masks)[0]
        left = left[1:]
        state = start._replace(
            params=put(list(params.values())), masks=put_masks(list(masks.values()))
        )
        return done._replace(state=state)

    state = start
    with contextlib.ExitStack() as stack:
        keep = (
            in_memory
            if offload is None
            else on_disk(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        try:
            chain = _chain(module, start, [chosen for _, chosen in asked], calls)
            runs = [Paused(module, chain, call, keep) for call in calls]
            for number, path in enumerate(chain.order):
                _go_on(
                    runs, number, module, state if inputs_from == "pruned" else start
                )
                names = chain.names[path]
                wanted = errors or number + 1 < len(chain.order)
                own = [
                    one for one, at in zip(asked, chain.at, strict=True) if at == number
                ]
                results, outputs = prune_block(
                    *(
                        chain.parts[path],
                        names,
                        state_in(params, masks, names.values()),
                        own,
                        prune,
                    ),
                    *(partial(lent_calls, runs, number, bool(own)), of),
                    inputs_from=inputs_from,
                    tokens=counted,
                    narrow=chain.narrow and all(tokens is None for tokens in counted),
                    errors=errors,
                    keep=partial(stow, keep=keep) if wanted else None,
                    read=unstow,
                )
                for done in map(record, results):
                    state = done.state
                    yield done
                for run, out in zip(runs, outputs, strict=wanted):
                    run.done(number, out)
        except BrokenChainError as error:
            why = str(error)
            again = isinstance(error, CalledAgainError)
            why += (
                ": the statistics of its weights are the sums over all calls"
                if again
                else ""
            )
    if len(left) > 1 or (left and again):
        warnings.warn(
            f"in_order: the whole model runs once for each block, as {why}",
            UserWarning,
            stacklevel=3,
        )
    own_names = {name: name for name in params}
    for block, chosen in left:
        base = State(params, masks) if inputs_from == "pruned" else State(*dense_leaves)
        (done,), _ = prune_block(
            *(
                module,
                own_names,
                base,
                [(block, chosen)],
                prune,
                lambda: map(own_call, calls),
                of,
            ),
            inputs_from="dense",
            tokens=counted,
            keep=None,
        )
        leaves = State(
            leaves_at(done.state.params, chosen), leaves_at(done.state.masks, chosen)
        )
        yield record(done._replace(state=leaves, why=why))


def _go_on(
    runs: Sequence[Paused], number: int, module: nn.Module, state: State
) -> None:
    if any(number not in run.calls for run in runs):
        weights = weights_of_call(module, state)
        for run in runs:
            run.go_on(number, weights)


def _chain(
    module: nn.Module,
    state: State,
    chosen: Sequence[Sequence[str]],
    calls: Sequence[Call],
) -> Chain:
    # One example says as much as all of them, where they can be told apart.
    with contextlib.suppress(Exception):
        return chain_of(module, state, chosen, next(chunks_of((calls[0], None), 1))[0])
    return chain_of(module, state, chosen, calls[0])


def chunks_of(
    data: tuple[Call, Tensor | None], size: int | None
) -> Iterator[tuple[Call, Tensor | None]]:
    """The calls for so many examples each, with the tokens that count in them.

    Without a size there is one call.

    >>> [
    ...     (args[0].tolist(), kwargs)
    ...     for (args, kwargs), _ in chunks_of((((torch.arange(3),), {}), None), 2)
    ... ]
    [([0, 1], {}), ([2], {})]

    Every tensor is split along its first axis. ValueError where they are not of one
    length.
    """
    if size is None:
        yield data
        return
    check_int("in_order", "chunk_size", size, 1)
    leaves, rebuild = opened(data)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    lengths = {len(x) if x.ndim else 0 for x in tensors}
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(
            "in_order: expected tensors with one number of examples to split, got "
            f"shapes {shapes}"
        )
    for first in range(0, lengths.pop(), size):
        yield rebuild(
            [x[first : first + size] if isinstance(x, Tensor) else x for x in leaves]
        )
