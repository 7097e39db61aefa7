"""Pruning a model from a folder to a folder, with one block in memory at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from sparsefn._engine.processes import agree, agreement, check_alike
from sparsefn.core.checks import check_call
from sparsefn.core.state import Algorithm, State, Where, effective, everywhere
from sparsefn.core.tree import Tree, flatten, leaves_of
from sparsefn.nn.checkpoint.folders import INDEX, some
from sparsefn.nn.distributed.by_rows import by_rows
from sparsefn.nn.distributed.ends import everyone
from sparsefn.nn.modules.calls import Call, Example, as_call
from sparsefn.posttraining.calibration.blocks import (
    Prune,
    PruneOptions,
    added_stats,
    prune_part,
)
from sparsefn.posttraining.calibration.cache import BrokenChainError
from sparsefn.posttraining.calibration.folders.disk import PLACE
from sparsefn.posttraining.calibration.folders.model import (
    OUTSIDE,
    ModelFolder,
    check_part,
    finish,
    open_folder,
    write_part,
)
from sparsefn.posttraining.calibration.folders.resume import (
    Journal,
    Part,
    Runs,
    digest_of_batches,
    digest_of_model,
    journal_in,
    only_run_in,
)
from sparsefn.posttraining.calibration.inputs import check_data, names_of
from sparsefn.posttraining.calibration.sums import Stats
from sparsefn.posttraining.calibration.targets import Recover, check_recover

T = TypeVar("T")


def stream(
    folder: str | os.PathLike[str],
    prune: Prune,
    batches: Sequence[Example],
    out: str | os.PathLike[str],
    *,
    blocks: Sequence[Where] | None = None,
    of: str | Sequence[str] = ("count", "square", "gram"),
    tokens: Sequence[Tensor] | None = None,
    make: Callable[[], nn.Module] | None = None,
    recover: Recover | None = None,
) -> dict[str, float | None]:
    """Prune a model that need not fit in memory, block by block, from folder to folder.

    >>> def prune(stats):
    ...     return sf.methods.wanda(0.5, stats)
    >>> sf.calibration.stream(
    ...     "/nowhere", prune, [{"input_ids": torch.arange(8)[None]}], "pruned"
    ... )
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no
    folder

    Args:
        folder: The folder of the model, with config.json and safetensors, as
            `save_pretrained` writes it.
        prune: A function of a block's statistics that returns the algorithm to prune
            it, as in `in_order`.
        batches: What the model is called with: a list of dicts, tuples or tensors,
            which may differ in length. Blocks run on the device of the batches.
        out: The new folder, which `from_pretrained` loads. It has the same tensors,
            names and other files.
        blocks: The blocks, as in `in_order`. None: the members of the model's lists of
            layers. Other layers of these lists run as they are.
        of: Names of the statistics, as in `in_order`.
        tokens: For each batch a bool tensor that says which tokens count, where they
            are padded. None: all count.
        make: A function that returns the model, the only module that is written to; no
            hook is left. None: the class that config.json names. Wherever the model is
            made, its parameters are not kept.
        recover: How each layer is trained once its blocks are pruned, as in `by_block`,
            with a step a batch. None: not at all.

    Returns:
        The errors by block. An error is the norm of the change of the block's outputs
        over their norm.

    Raises:
        OSError: The disk is full: make room, and call again.
        TypeError: `batches` is no list, `prune` gives no Algorithm, or `make` no
            module.
        ValueError: The folder lacks a tensor, has one too much, or stores one in 8
            bits. Leaves of a layer are tied to leaves outside of it. The model does not
            call its layers one after the other, or they write into their inputs or get
            attributes from elsewhere: use `in_order`. Inputs are not finite: the block
            and the layer are named. Another run writes to `out` at the same time, or
            `out` holds anything else. Something differs from the run that was killed.
            Processes differ in what `prune` gives, or `recover` is given and there are
            several.

    `in_order` gives the same weights for the whole model, bit for bit, where
    a batch is a chunk. At one time there are in memory one layer, its statistics, what
    `prune` makes of them, and one batch's activations; or the leaves outside of all
    layers, embeddings and head, while data passes these. Activations of the other
    batches are in `out`, about three times the hidden states of all batches. Weights
    are run and written in the dtype that `from_pretrained` gives them; folders of
    quantized and of compressed models are refused. What config.json says of the zeros
    of plain weights, as compressed-tensors does, is left out of the config.json of
    `out`, which has other zeros. One example is run beforehand, to see in which order
    the model calls its layers. What no input reached is as in `in_order`.

    **Killed at any moment**, the same call goes on at the block where it was, with the
    same bits: a file is on the disk before it has its name. What is there already is
    looked at: a digest of the weights that were read, the batches, and the last block
    that was pruned, which is pruned again and must have the same bits, as no one can
    look into `prune`.

    **Several processes** of `torch.distributed` share the batches, if all make the same
    call and see the same folders. Each adds the sums of all in the order of the
    processes, so that masks have the same bits in every run on so many processes, and
    differ from the masks of one process as sums in another order do. Then all call
    `prune`, and solve the rows of each weight together, as in `sf.distributed.by_rows`;
    the first process writes.

    Frantar & Alistarh 2023, arXiv 2301.00774, sec. 4; Sun et al. 2023,
    arXiv 2306.11695, sec. 3.
    """
    check_call("prune", prune, "stats")
    names = names_of(of)
    calls = batch_calls(batches)
    counted = tokens_of_calls(tokens, len(calls))
    if recover is not None:
        check_recover(recover)
        if place()[1] > 1:
            raise ValueError(
                f"stream: expected one process with recover, got {place()[1]}: each "
                "would train on batches of its own"
            )
    options = PruneOptions(
        together(prune), names, tokens=share(counted), recover=recover
    )
    target = Path(out)
    first = place()[0] == 0
    device = device_of(calls)
    with agreement(everyone()):
        check_other_folder(Path(folder), target)
        source = open_folder(Path(folder), blocks, make, device)
        data = list(zip(calls, counted, strict=True))
        check_data("stream", source.model.module, data)
        run = {
            "model": digest_of_model(source.path / "config.json", source.stored),
            "batches": digest_of_batches(data),
            "blocks": repr(
                [block.leaves for own in source.blocks.values() for block in own]
            ),
            "statistics": repr(names),
            "processes": str(place()[1]),
        }
    with contextlib.ExitStack() as stack:
        with agreement(everyone()):
            if first:  # for all processes of the run
                stack.enter_context(only_run_in(target))
                check_read(journal_in(target, run), source, device)
        with agreement(everyone()):
            journal = journal_in(target, run)
        if len(journal.parts) < len(source.leaves) or not (target / INDEX).exists():
            with (
                tempfile.TemporaryDirectory(dir=_work(target)) as scratch,
                agreement(everyone()),
            ):
                try:
                    runs = Runs(source, share(calls), Path(scratch), device)
                    journal = _streamed(runs, journal, options)
                except BrokenChainError as error:
                    raise ValueError(
                        "stream: expected layers that run one after the other, but "
                        f"{error}: prune the model in memory, with "
                        "sf.calibration.in_order"
                    ) from None
        with agreement(everyone()):
            if first:
                finish(source, target)
    return {
        block: error for part in journal.parts for block, error in part.errors.items()
    }


def check_other_folder(folder: Path, out: Path) -> None:
    """Raise ValueError where a folder is the new one, too.

    >>> check_other_folder(Path("model"), Path("./model"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected another folder to write to, got 'model' twice
    """
    if folder.resolve() == out.resolve():
        raise ValueError(
            f"stream: expected another folder to write to, got {os.fspath(out)!r} twice"
        )


def batch_calls(batches: Sequence[Example]) -> list[Call]:
    """The calls that batches stand for, a batch for each process or more.

    >>> batch_calls([(torch.ones(1),)])
    [((tensor([1.]),), {})]
    """
    if isinstance(batches, Tensor | Mapping | str):
        kind = type(batches).__name__
        raise TypeError(
            "stream: expected a list of batches, as batches=[{'input_ids': "
            f"tokens}}, ...], got a {kind}"
        )
    calls = [as_call(batch) for batch in batches]
    if not calls:
        raise ValueError("stream: expected a list of batches, got an empty one")
    if len(calls) < place()[1]:
        raise ValueError(
            f"stream: expected a batch for each of {place()[1]} processes, got "
            f"{len(calls)} in all"
        )
    for number, call in enumerate(calls):
        tensors = [x for x in leaves_of(call) if isinstance(x, Tensor)]
        if not tensors or any(not x.numel() for x in tensors):
            raise ValueError(
                "stream: expected batches of tensors that have entries, got none in "
                f"batch {number}"
            )
    return calls


def device_of(calls: Sequence[Call]) -> torch.device:
    """The device of the first tensor of calls.

    >>> device_of([((torch.ones(1),), {})])
    device(type='cpu')
    """
    return next(x.device for x in leaves_of(calls[0]) if isinstance(x, Tensor))


def tokens_of_calls(tokens: Sequence[Tensor] | None, count: int) -> list[Tensor | None]:
    """Which tokens count in each of so many calls; None where all do.

    >>> tokens_of_calls(None, 2)
    [None, None]
    """
    counted: list[Tensor | None] = [None] * count
    if tokens is not None:
        counted = [*tokens]
    if len(counted) != count:
        raise ValueError(
            f"stream: expected a tensor of tokens for each of {count} batches, got "
            f"{len(counted)}"
        )
    return counted


def check_read(journal: Journal, folder: ModelFolder, device: torch.device) -> None:
    """Raise ValueError where what was read for the parts that are done is not what is
    there now.

    >>> from sparsefn.nn.modules.wrappers import Named
    >>> folder = ModelFolder(
    ...     Path("."), {}, Named.of(torch.nn.Module()), [], {}, {"": []}
    ... )
    >>> journal = Journal(Path("out"), {}, (Part("another", {}),))
    >>> check_read(journal, folder, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the run that was killed in 'out', but the weights of
    'the embeddings and head' are others now: go on with the same, or give another
    folder out
    """
    for path, part in zip(folder.leaves, journal.parts, strict=False):
        if folder.load(path, device)[1] != part.digest:
            raise ValueError(
                "stream: expected the run that was killed in "
                f"{os.fspath(journal.out)!r}, but the weights of "
                f"{path or 'the embeddings and head'!r} are others now: go on with "
                "the same, or give another folder out"
            )


def _work(out: Path) -> Path:
    work = out / PLACE / str(place()[0])
    work.mkdir(exist_ok=True)
    for left in work.glob("tmp*"):  # by a run that was killed
        shutil.rmtree(left)
    return work


def _streamed(runs: Runs, journal: Journal, options: PruneOptions) -> Journal:
    folder = runs.folder
    if not journal.parts:
        with agreement(everyone()):
            weights, digest = folder.load(OUTSIDE, runs.device)
            journal = _written(folder, journal, OUTSIDE, weights, Part(digest, {}))
            del weights
    done = len(journal.parts) - 1
    last = max(
        (number for number in range(done) if folder.order[number] in folder.blocks),
        default=None,
    )
    # whose outputs the last part that was pruned was called with, so that it can be
    # pruned again
    before = set[int]()
    for number, path in enumerate(folder.order):
        with agreement(everyone()):
            runs.advance(number)
            if number < done and number != last:
                runs.skip(number)
                continue
            if path in folder.blocks:
                before = runs.needed()
            weights, part = _pruned(runs, number, options)
        # the outputs of all processes are on the disk by now
        with agreement(everyone()):
            if number >= done:
                journal = _written(folder, journal, path, weights, part)
            elif place()[0] == 0:
                check_part(folder, journal.out, path, weights)
            del weights
        if number >= done:
            runs.forget(
                before | runs.needed() | {entered - 1 for entered in runs.entered}
            )
    return journal


def _pruned(
    runs: Runs, number: int, options: PruneOptions
) -> tuple[dict[str, Tensor], Part]:
    path = runs.folder.order[number]
    weights, digest = runs.folder.load(path, runs.device)
    results, outputs = prune_part(
        runs.chain.parts[path],
        State(weights, everywhere(weights)),
        runs.folder.blocks.get(path, []),
        partial(runs.calls, number),
        options,
        cache=runs.cache(number),
    )
    runs.finish(number, outputs)
    if results:
        weights = flatten(effective(results[-1].state))[0]
    errors = {str(one.block): one.error for one in results}
    return weights, Part(digest, errors)


def _written(
    folder: ModelFolder,
    journal: Journal,
    path: str,
    weights: dict[str, Tensor],
    part: Part,
) -> Journal:
    if place()[0]:
        return journal._replace(parts=(*journal.parts, part))
    write_part(folder, journal.out, path, weights)
    return journal.done(part)


def place() -> tuple[int, int]:
    """The number of this process, and how many there are.

    >>> place()
    (0, 1)
    """
    if not everyone():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def share(items: Sequence[T]) -> Sequence[T]:
    """The part of a sequence that is this process's: runs that follow each other, as
    long as each other or longer by 1.

    >>> share([1, 2, 3])
    [1, 2, 3]
    """
    number, processes = place()
    start, end = (len(items) * i // processes for i in (number, number + 1))
    return items[start:end]


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
    gathered: list[Any] = [None] * place()[1]
    distributed.all_gather_object(gathered, (named, [(x.shape, x.dtype) for x in own]))
    for number, (theirs, _) in enumerate(gathered):
        others = sorted({*theirs} ^ {*gathered[0][0]})
        if others:
            raise ValueError(
                "stream: expected data of the same leaves on all processes, but "
                f"{number} and 0 differ at {some(others)}"
            )
    total: Stats = {}
    for number, (theirs, kinds) in enumerate(gathered):
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
