"""Pruning a model from a folder to a folder, with one of its blocks in memory at a time."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsefn.calibration.carried import Prune, prune_block
from sparsefn.calibration.caught import BrokenChainError, unstow
from sparsefn.calibration.chain import names_in
from sparsefn.calibration.folders import INDEX, digest_of, read, write_json, write_tensors, write_whole
from sparsefn.calibration.inputs import names_of
from sparsefn.calibration.journal import PLACE, Journal, Part, begun, digest_of_batches, digest_of_model
from sparsefn.calibration.plan import OUTSIDE, Plan, bare, planned
from sparsefn.calibration.runs import Runs
from sparsefn.calibration.shares import place, share, together
from sparsefn.distributed.ends import everyone
from sparsefn.engine.processes import agreement
from sparsefn.modules.calls import Call, Example, as_call
from sparsefn.state import Where, effective
from sparsefn.tree import flatten, leaves_of

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}  # files of weights are not copied


def stream(
    folder: str | os.PathLike[str],
    prune: Prune,
    batches: Sequence[Example],
    out: str | os.PathLike[str],
    *,
    blocks: Sequence[Where] | None = None,
    of: str | Sequence[str] = ("count", "square", "gram"),
    make: Callable[[], nn.Module] | None = None,
) -> dict[str, float | None]:
    """Prune a model that need not fit in memory: from a folder of transformers to a new one, block after block.

    >>> sf.calibration.stream("/nowhere", sf.one_shot, [torch.arange(8)[None]], "pruned")
    Traceback (most recent call last):
        ...
    ValueError: stream: expected the folder of a model, got '/nowhere', which is no folder
    """
    names, calls = names_of(of), _calls(batches)
    source, target, groups = Path(folder), Path(out), everyone()
    device = next(x.device for x in leaves_of(calls[0]) if isinstance(x, Tensor))
    with agreement(groups):
        if source.resolve() == target.resolve():
            raise ValueError(f"stream: expected another folder to write to, got {os.fspath(out)!r} twice")
        plan = planned(source, blocks, make, device)
        run = {
            "model": digest_of_model(source / "config.json", plan.stored),
            "batches": digest_of_batches(calls),
            "blocks": repr([chosen for own in plan.blocks.values() for _, chosen in own]),
            "statistics": repr(names),
            "processes": str(place()[1]),
        }
        if place()[0] == 0:
            _checked(begun(target, run), plan, device)
    journal = begun(target, run)
    if len(journal.parts) <= len(plan.order) or not (target / INDEX).exists():
        with tempfile.TemporaryDirectory(dir=_work(target)) as scratch:
            runs = Runs(plan, share(calls), Path(scratch).parent, Path(scratch), device)
            try:
                journal = _streamed(plan, runs, journal, prune, names)
            except BrokenChainError as error:
                raise ValueError(
                    f"stream: expected layers that run one after the other, but {error}: prune the model in memory, with "
                    "sf.calibration.in_order"
                ) from None
    with agreement(groups):
        if place()[0] == 0:
            _finish(plan, target)
    return {block: error for part in journal.parts for block, error in part.errors.items()}


def _calls(batches: Sequence[Example]) -> list[Call]:
    calls = [as_call(batch) for batch in batches]
    if len(calls) < place()[1]:
        raise ValueError(f"stream: expected a batch for each of {place()[1]} processes, got {len(calls)}")
    for number, call in enumerate(calls):
        tensors = [x for x in leaves_of(call) if isinstance(x, Tensor)]
        if not tensors or any(not x.numel() for x in tensors):
            raise ValueError(f"stream: expected batches of tensors with values, got none in batch {number}")
        mask = call[1].get("attention_mask")
        if isinstance(mask, Tensor) and not mask.all():
            raise ValueError(
                f"stream: expected batches without padding, which is no data, got zeros in attention_mask of batch {number}"
                ": sequences of another length go into a batch of their own"
            )
    return calls


def _checked(journal: Journal, plan: Plan, device: torch.device) -> None:
    # What was read for the parts that are done must be what is there now.
    for path, part in zip([OUTSIDE, *plan.order], journal.parts, strict=False):
        if plan.load(path, device)[1] != part.digest:
            where = f"the part {path!r}" if path else "the leaves outside of all layers"
            raise ValueError(
                f"stream: expected the run that was killed in {os.fspath(journal.out)!r}, but {where} has other weights now: "
                "go on with the same, or give another folder out"
            )


def _work(out: Path) -> Path:
    work = out / PLACE / str(place()[0])
    work.mkdir(exist_ok=True)
    for left in work.glob("tmp*"):  # by a run that was killed
        shutil.rmtree(left)
    return work


def _streamed(plan: Plan, runs: Runs, journal: Journal, prune: Prune, of: Sequence[str]) -> Journal:
    groups, before = everyone(), set[int]()
    if not journal.parts:
        journal = _written(plan, journal, OUTSIDE, *plan.load(OUTSIDE, runs.device), {})
    pruned = [number for number in range(len(journal.parts) - 1) if plan.order[number] in plan.blocks]
    for number, path in enumerate(plan.order):
        part, blocks = plan.model.get_submodule(path), plan.blocks.get(path, [])
        again = number < len(journal.parts) - 1
        with agreement(groups):
            runs.reach(number)
            inputs = runs.needed()
            if again and pruned[-1:] != [number]:
                runs.passed(number)
                continue
            weights, digest = plan.load(path, runs.device)
            results, outputs = prune_block(
                *(part, names_in(plan.model, path), bare(weights), blocks, together(prune), lambda: runs.calls(number)),
                of,
                keep=runs.keep(number),
                read=unstow,
            )
            weights = flatten(effective(results[-1].state))[0] if results else weights
            if again and place()[0] == 0:
                _check_again(plan, journal.out, path, weights)
        runs.done(number, outputs)
        if not again:
            errors = {str(one.block): one.error for one in results}
            journal = _written(plan, journal, path, weights, digest, errors)
        before = inputs if blocks else before
        runs.forget(before | runs.needed() | {entered - 1 for entered in runs.entered})
    return journal


def _file(plan: Plan, path: str) -> str:
    number = 1 + (plan.order.index(path) + 1 if path else 0)
    return f"model-{number:05d}-of-{len(plan.order) + 1:05d}.safetensors"


def _named(plan: Plan, path: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # By the names that the folder has; tied leaves once.
    tensors = dict(plan.model.named_buffers()) | weights
    return {leaf.stored[0]: tensors[leaf.names[0]] for leaf in plan.leaves[path]}


def _written(
    plan: Plan, journal: Journal, path: str, weights: dict[str, Tensor], digest: str, errors: dict[str, float | None]
) -> Journal:
    part = Part(digest, errors)
    with agreement(everyone()):
        if place()[0]:
            return journal._replace(parts=(*journal.parts, part))
        write_tensors(journal.out / _file(plan, path), _named(plan, path, weights))
        return journal.done(part)


def _check_again(plan: Plan, out: Path, path: str, weights: dict[str, Tensor]) -> None:
    # The last part that was pruned must come out as it did before: the settings of `prune` are seen in nothing else.
    tensors = _named(plan, path, weights)
    for name, old in read(out, dict.fromkeys(tensors, _file(plan, path))):
        if digest_of(old) != digest_of(tensors[name]):
            raise ValueError(
                f"stream: expected the run that was killed in {os.fspath(out)!r}, but {name!r} is pruned otherwise now: go "
                "on with the same prune, threads and versions, or give another folder out"
            )


def _finish(plan: Plan, out: Path) -> None:
    # The index comes last: without it the folder is no model.
    for file in plan.folder.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights and not file.name.startswith("."):
            write_whole(out / file.name, partial(shutil.copyfile, file))
    placed, size = {}, 0
    for path, leaves in plan.leaves.items():
        placed |= {leaf.stored[0]: _file(plan, path) for leaf in leaves}
        size += sum(math.prod(plan.stored[leaf.stored[0]].shape) * leaf.dtype.itemsize for leaf in leaves)
    write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
    for folder in (out / PLACE).iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    shutil.rmtree(out / PLACE)
