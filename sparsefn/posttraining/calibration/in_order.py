"""Pruning block after block, and how unequal the blocks are."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparsefn.algorithms import dense
from sparsefn.core.checks import check_call, check_int
from sparsefn.core.state import State, Where, effective
from sparsefn.core.tree import flatten, opened
from sparsefn.core.tree.where import matching
from sparsefn.masks.scores.data import wanda_of
from sparsefn.nn.modules.calls import Call, Example, as_call
from sparsefn.nn.modules.wrappers import Named, own_tensors
from sparsefn.posttraining.calibration.blocks import (
    Block,
    Prune,
    PrunedBlock,
    PruneOptions,
    chain_of,
    is_inside,
    part_of,
    prune_part,
    with_part,
)
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    Cache,
    CalledAgainError,
    cache_tree,
    copied_call,
    in_memory,
    on_disk,
)
from sparsefn.posttraining.calibration.capture import (
    Chain,
    PausedRun,
    guarded_calls,
)
from sparsefn.posttraining.calibration.inputs import (
    check_data,
    check_has_values,
    names_of,
    weights_of_call,
)
from sparsefn.posttraining.calibration.sums import Stats
from sparsefn.posttraining.calibration.targets import Recover, check_recover

T = TypeVar("T")


def in_order(
    module: nn.Module,
    state: State | None,
    blocks: Sequence[Where],
    prune: Prune,
    inputs: Example,
    *,
    of: str | Sequence[str] = ("count", "square", "gram"),
    chunk_size: int | None = None,
    tokens: Tensor | None = None,
    inputs_from: str = "pruned",
    offload: str | None = None,
    recover: Recover | None = None,
    progress: bool = False,
) -> State:
    """Prune the blocks of a module in turn, each on inputs from pruned blocks.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ... )
    >>> def prune(stats):
    ...     return sf.one_shot(
    ...         0.5, sf.scores.wanda(stats), pattern=sf.patterns.row_balanced()
    ...     )
    >>> x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    >>> state = sf.calibration.in_order(
    ...     model, None, ["0.*", "2.*"], prune, x, of="square"
    ... )
    >>> state.masks["0.weight"].sum(1).tolist(), state.masks["2.weight"].sum(1).tolist()
    ([2, 2, 2, 2, 2, 2, 2, 2], [4, 4])

    Args:
        module: The model, in its own mode (train or eval).
        state: The state to begin with. None: the module's own weights, without masks.
        blocks: Globs of the leaves of each block, in the order in which data passes
            the blocks.
        prune: A function of a block's statistics that returns the algorithm to prune
            it.
        inputs: What the module is called with: a tensor, a tuple or a dict by name.
        of: Names of the statistics, as in `inputs`.
        chunk_size: Number of examples in one call of the module. None: all.
        tokens: Bool tensor of shape (examples, tokens), False where a token is padding.
        inputs_from: "pruned", or "dense" for the inputs in the model as it is at first.
        offload: "disk" keeps the inputs and outputs of layers in files. None: in
            memory.
        recover: How each layer is trained once its blocks are pruned, such as
            `sf.recovery.blockwise`; see `by_block`. None: not at all.
        progress: Whether a bar of tqdm shows how long each block took, and how far its
            outputs moved, where tqdm is installed. Without it errors are not computed,
            so the outputs of the last block are not either.

    Returns:
        The state with all blocks pruned, which is the last one that `by_block` gives.

    Raises:
        TypeError: As in `by_block`.
        ValueError: As in `by_block`.

    `by_block` takes the same arguments but for `progress`, and tells more about them.
    """
    options = PruneOptions(
        prune, names_of(of), inputs_from, errors=progress, recover=recover
    )
    data = _Data(inputs, tokens, chunk_size, offload)
    work = _work_of(module, state, blocks, data, options)
    state = work.start
    steps = _pruned(work)
    for done in _shown(steps, len(blocks)) if progress else steps:
        state = done.state
    return state


def by_block(
    module: nn.Module,
    state: State | None,
    blocks: Sequence[Where],
    prune: Prune,
    inputs: Example,
    *,
    of: str | Sequence[str] = ("count", "square", "gram"),
    chunk_size: int | None = None,
    tokens: Tensor | None = None,
    inputs_from: str = "pruned",
    offload: str | None = None,
    recover: Recover | None = None,
) -> Iterator[PrunedBlock]:
    """Prune the blocks of a module in turn, and give a record of each.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ... )
    >>> def prune(stats):
    ...     return sf.one_shot(0.5, sf.scores.wanda(stats))
    >>> x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    >>> for done in sf.calibration.by_block(
    ...     model, None, ["0.*", "2.*"], prune, x, of="square"
    ... ):
    ...     print(
    ...         done.block,
    ...         [int(mask.sum()) for mask in done.state.masks.values()],
    ...         0 < done.error < 1,
    ...     )
    0.* [16, 1, 1, 1] True
    2.* [16, 1, 8, 1] True

    Args:
        module: The model, in its own mode (train or eval). Nothing is written to it,
            and no hook is left.
        state: The state to begin with. None: the module's own weights, without masks.
        blocks: A glob, a sequence of globs or a function of (path, leaf) a block, in
            the order in which data passes the blocks. Blocks may be left out, and be
            halves of a layer.
        prune: A function of the statistics of a block's leaves, as `inputs` collects
            them, that returns the algorithm to prune the block. The algorithm's `init`
            takes the effective weights of these leaves, a dict by path, then its
            `update` runs at step 0, with gradients of zero.
        inputs: What the module is called with: a tensor, a tuple of arguments, or a
            dict of them by name.
        of: Names of the statistics, as in `inputs`.
        chunk_size: Number of examples in one call of the module, split along the first
            axis of every tensor in `inputs`. None: all.
        tokens: Bool tensor of shape (examples, tokens), False where a token is padding
            and does not count; see `inputs` for what layers must get. None: all count.
        inputs_from: "pruned", or "dense": every block is pruned for the inputs that it
            has in the model as it is at first.
        offload: "disk" keeps the inputs and outputs of layers in files of a temporary
            folder, which goes at the end. None: in memory.
        recover: A function that trains a layer once its blocks are pruned, such as
            `sf.recovery.blockwise` gives. It gets the state of the layer's leaves,
            params and masks by path, and `errors`, and returns a State whose params are
            taken; the masks stay. `errors(loss)` gives for each chunk, in order, a
            function of params: the loss of (student, teacher, tokens), of what the
            layer returns and what it returned before any of its blocks was pruned.
            None: layers are not trained.

    Returns:
        An iterator with a record of each block, which comes when its block is pruned.
        The block's params and masks are the algorithm's; all else in the state stays,
        but for what `recover` trains, which is in the record of its layer's last block.

    Raises:
        TypeError: `blocks` is no sequence, `state` is no State, `prune` gives no
            Algorithm, `recover` gives no State, or `tokens` is no bool tensor.
        ValueError: The inputs of a weight are not finite: its path and layer are named.
            No product was seen with the leaves of a block, or blocks are in another
            order. A mask such as `attention_mask` or `key_padding_mask` hides tokens
            and `tokens` is None. `inputs_from` or `offload` is another word. Tensors
            cannot be split by `chunk_size`. `recover` is given and the model cannot run
            layer by layer, a leaf of a layer is tied to a leaf outside of it, or what
            `recover` gives has other shapes. As in `inputs`.

    The time is linear in the number of blocks. The embeddings and masks before the
    first block are computed once. Then the layer that a block is in runs twice on what
    it is called with, without the rest of the model: once for the statistics, and once
    pruned, which makes the inputs of the next one. From "dense" inputs it runs once.
    What is in memory is the inputs and outputs of one layer for all data, if they are
    not on the disk, one chunk's activations and the statistics of one block. Outputs
    that the model itself uses before the next block, as a decoder uses its encoder's,
    are kept to the end, of four layers at most.

    One example is run beforehand, as the whole model and layer by layer. Where the
    statistics are not the same bits (on a CPU), or the model uses its blocks otherwise
    than one after the other, the module runs once for each block. A UserWarning and
    each record then say why, and so they do where a layer writes into its inputs, or
    gets an attribute from elsewhere. A layer that the model runs several times, as
    looped transformers do, is pruned once, by the sums over all its calls, in which the
    layers of later blocks are not pruned yet. Not noticed is what a layer keeps for its
    next call, unless it is the first of its class, and what the model computes from the
    weights of one block and hands to another: the weights at first give it.

    A UserWarning names a leaf of a block with which no product was seen: it stays
    dense, as do tables of embeddings, which are not named. Another one tells of padding
    in `input_ids`. A weight that no input reached, as of an expert, has a count of 0,
    which methods that read data refuse: `fill_unreached` has them prune it by size.

    Frantar & Alistarh 2023, arXiv 2301.00774, sec. 4; Sun et al. 2023,
    arXiv 2306.11695, sec. 3.
    """
    options = PruneOptions(prune, names_of(of), inputs_from, recover=recover)
    data = _Data(inputs, tokens, chunk_size, offload)
    return _pruned(_work_of(module, state, blocks, data, options))


@dataclass(frozen=True)
class _Data:
    # What the model is called with, and how it is split and kept.
    inputs: Example
    tokens: Tensor | None
    chunk_size: int | None
    offload: str | None


@dataclass(frozen=True)
class _Work:
    # A model, the state that it begins with, the blocks to prune, and the calls, one a
    # chunk.
    model: Named
    start: State
    blocks: list[Block]
    calls: list[Call]
    options: PruneOptions
    offload: str | None

    def before(self, state: State) -> State:
        """The state that gives a block its inputs."""
        return state if self.options.inputs_from == "pruned" else self.start


def _work_of(
    module: nn.Module,
    state: State | None,
    blocks: Sequence[Where],
    data: _Data,
    options: PruneOptions,
) -> _Work:
    # All arguments are checked here.
    if isinstance(blocks, str) or not isinstance(blocks, Sequence):
        raise TypeError(
            "in_order: expected blocks to be a sequence, with an entry a block, got "
            f"{blocks!r}"
        )
    if options.inputs_from not in ("pruned", "dense"):
        raise ValueError(
            "in_order: expected inputs_from to be 'pruned' or 'dense', got "
            f"{options.inputs_from!r}"
        )
    if data.offload not in (None, "disk"):
        raise ValueError(
            f"in_order: expected offload to be 'disk' or None, got {data.offload!r}"
        )
    check_call("prune", options.prune, "stats")
    if options.recover is not None:
        check_recover(options.recover)
    call = as_call(data.inputs)
    model = Named.of(module)
    if state is None:
        state = dense().init(weights_of_call(model, None))
    leaves = weights_of_call(model, state)
    check_has_values("in_order", model, leaves)
    check_data("in_order", module, [(call, data.tokens)])
    chunks = list(chunks_of((call, data.tokens), data.chunk_size))
    asked = list[Block]()
    for block in blocks:
        chosen = [
            path
            for path, leaf in matching("blocks", block, leaves).items()
            if leaf.ndim > 1
        ]
        if not chosen:
            raise ValueError(
                f"in_order: no product was seen with a leaf of the block {block!r}"
            )
        asked.append(Block(block, chosen))
    options = replace(options, tokens=[counted for _, counted in chunks])
    calls = [call for call, _ in chunks]
    return _Work(model, state, asked, calls, options, data.offload)


def _pruned(work: _Work) -> Iterator[PrunedBlock]:
    # Part by part, else with the whole model.
    if not work.blocks:
        return
    state = work.start
    done = 0
    again = False
    why = ""
    try:
        with contextlib.closing(_part_by_part(work)) as results:
            for result in results:
                state = result.state
                done += 1
                yield result
    except BrokenChainError as error:
        why = str(error)
        again = isinstance(error, CalledAgainError)
    left = work.blocks[done:]
    if not left:
        return
    if work.options.recover is not None:
        raise ValueError(
            "in_order: expected a model whose layers run one by one with recover, but "
            f"{why}: leave recover out, and train the whole model afterwards"
        )
    if again:
        why += ": the statistics of its weights are the sums over all calls"
    if again or len(left) > 1:
        warnings.warn(
            f"in_order: the whole model runs once for each block, as {why}",
            UserWarning,
            stacklevel=3,
        )
    once = replace(work.options, inputs_from="dense")  # one pass
    for block in left:
        (result,), _ = prune_part(
            work.model,
            part_of(work.before(state), work.model.own),
            [block],
            lambda: map(copied_call, work.calls),
            once,
            cache=None,
        )
        state = with_part(state, part_of(result.state, block.leaves))
        yield result._replace(state=state, why=why)


def _part_by_part(work: _Work) -> Generator[PrunedBlock, None, None]:
    # Raises BrokenChainError where parts cannot run one by one.
    options = work.options
    state = work.start
    chosen = [block.leaves for block in work.blocks]
    find = partial(chain_of, work.model, state, chosen)
    with contextlib.ExitStack() as stack:
        cache: Cache = in_memory
        if work.offload:
            cache = on_disk(stack.enter_context(tempfile.TemporaryDirectory()))
        chain = with_one_example(find, work.calls[0])  # which says as much as all
        runs = [PausedRun(work.model, chain, call, cache) for call in work.calls]
        plain = all(counted is None for counted in options.tokens)
        options = replace(options, narrow=chain.narrow and plain)
        if options.recover:
            _check_untied(work.model, chain)
        for number, path in enumerate(chain.order):
            _advance(runs, number, work.model, work.before(state))
            part = chain.parts[path]
            own = [
                block
                for block, at in zip(work.blocks, chain.at, strict=True)
                if at == number
            ]
            is_last = number + 1 == len(chain.order)
            wanted = options.errors or options.recover is not None or not is_last
            results, outputs = prune_part(
                part,
                part_of(state, part.own),
                own,
                partial(guarded_calls, runs, number, bool(own)),
                options,
                cache=partial(cache_tree, cache=cache) if wanted else None,
            )
            for result in results:
                state = with_part(state, result.state)
                yield result._replace(state=state)
            for run, out in zip(runs, outputs, strict=wanted):
                run.finish(number, out)


def _check_untied(model: Named, chain: Chain) -> None:
    # Training a layer must not change what other layers compute.
    tied = own_tensors(model.module, "parameters", tied=True)
    for number in chain.at:
        path = chain.order[number]
        for name, (_, leaf) in chain.parts[path].own.items():
            for other, (_, same) in tied.items():
                if same is leaf and not is_inside(other, path):
                    raise ValueError(
                        "in_order: expected layers with leaves of their own with "
                        f"recover, but {name!r} in {path!r} is also {other!r}: leave "
                        "recover out, and train the whole model afterwards"
                    )


def _advance(
    runs: Sequence[PausedRun], number: int, model: Named, state: State
) -> None:
    if any(number not in run.calls for run in runs):
        weights = weights_of_call(model, state)
        for run in runs:
            run.advance(number, weights)


def with_one_example(run: Callable[[Call], T], call: Call) -> T:
    """What a function gives for the first example of a call, or for all of them, where
    it fails or they cannot be told apart.

    >>> with_one_example(lambda call: len(call[0][0]), ((torch.ones(3, 2),), {}))
    1
    """
    with contextlib.suppress(Exception):
        return run(next(chunks_of((call, None), 1))[0])
    return run(call)


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


def _shown(steps: Iterator[PrunedBlock], total: int) -> Iterator[PrunedBlock]:
    if importlib.util.find_spec("tqdm") is None:
        yield from steps
        return
    with importlib.import_module("tqdm").tqdm(steps, total=total, unit="block") as bar:
        for done in bar:
            bar.set_postfix(
                error="unknown" if done.error is None else f"{done.error:.3g}"
            )
            yield done


def outlier_ratios(
    state: State,
    stats: Stats,
    blocks: Sequence[str],
    multiple: float = 5.0,
) -> dict[str, float]:
    """The share of each block's Wanda scores above `multiple` times their mean.

    >>> state = sf.dense().init(
    ...     {"0": torch.tensor([[1.0, 1.0, 1.0, 9.0]]), "1": torch.ones(1, 4)}
    ... )
    >>> stats = {
    ...     path: {"count": torch.tensor(2), "square": torch.ones(4)} for path in "01"
    ... }
    >>> sf.calibration.outlier_ratios(state, stats, ["0", "1"], multiple=2.0)
    {'0': 0.25, '1': 0.0}

    Args:
        state: The state with the weights.
        stats: Statistics from `inputs`, with "square".
        blocks: A glob a block. The leaves of `stats` that it matches are the block's.
        multiple: The multiple of the mean of a block's scores. A higher score is an
            outlier.

    Returns:
        A dict with the share of each block, a float from 0 to 1, for `sf.budgets.owl`.

    Raises:
        ValueError: `stats` has no leaf of a block, or as `sf.scores.wanda`.

    Yin et al. 2023, arXiv 2310.05175, sec. 3.
    """
    leaves = flatten(effective(state))[0]
    ratios = {}
    for block in blocks:
        chosen = [path for path in matching("blocks", block, leaves) if path in stats]
        if not chosen:
            raise ValueError(
                "outlier_ratios: expected statistics of a leaf of the block "
                f"{block!r}, got none"
            )
        total = sum(leaves[path].numel() for path in chosen)
        # Computed twice, so that the scores of one leaf are in memory at a time.
        mean = (
            sum(
                wanda_of(path, stats[path], leaves[path]).sum(dtype=torch.float64)
                for path in chosen
            )
            / total
        )
        above = sum(
            (wanda_of(path, stats[path], leaves[path]) > multiple * mean).sum()
            for path in chosen
        )
        ratios[block] = int(above) / total
    return ratios
