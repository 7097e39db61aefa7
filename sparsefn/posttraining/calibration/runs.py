"""What each batch calls the parts of a model with, where they run one by one."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor, nn

from sparsefn.core.state import State, Where, everywhere
from sparsefn.core.tree import Tree
from sparsefn.nn.modules.calls import Call, quiet_call
from sparsefn.posttraining.calibration.blocks import with_one_example
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    CachedTensor,
    CachedTree,
    copied_call,
    form_of,
    on_disk,
)
from sparsefn.posttraining.calibration.capture import (
    Chain,
    PausedRun,
    guarded_calls,
    intercepted,
)
from sparsefn.posttraining.calibration.folders import naming, write_whole
from sparsefn.posttraining.calibration.inputs import (
    collector,
    weights_of_call,
    without_fusion,
)
from sparsefn.posttraining.calibration.plan import Plan, check_places


class Runs:
    """The runs of a model for some batches, all paused before the same part.

    The outputs of parts are files in the folder that `scratch` is in, which outlive the
    process; all other tensors that parts are called with are files in `scratch`. Both
    are read when a part is called, for one batch at a time.
    """

    def __init__(
        self,
        plan: Plan,
        calls: Sequence[Call],
        tokens: Sequence[Tensor | None],
        scratch: Path,
        device: torch.device,
    ) -> None:
        parts = plan.model.parts(plan.order)
        forms = forms_of(plan, calls[0], device)
        self.plan = plan
        self.work = scratch.parent
        self.tokens = tokens
        self.device = device
        self.chain = Chain(parts, plan.order, forms, frozenset(), [])
        disk = on_disk(scratch)

        def cache(x: Tensor) -> CachedTensor:
            with naming(scratch):
                return disk(x)

        self.paused = [PausedRun(plan.model, self.chain, call, cache) for call in calls]
        self.entered: set[int] = set()  # parts before which the model itself computes

    def advance(self, number: int) -> None:
        """Find out what the part of a number is called with, by the leaves of the model
        outside of all parts.
        """
        if number in self.paused[0].calls:
            return
        self.entered.add(number)
        weights = self.plan.outside(self.device)
        for run in self.paused:
            run.advance(number, weights)

    def calls(self, number: int) -> Iterator[Call]:
        """What each batch calls the part of a number with."""
        return guarded_calls(
            self.paused, number, self.plan.order[number] in self.plan.blocks
        )

    def cache(self, number: int) -> Callable[[Tree], CachedTree]:
        """How to keep the outputs of a part: each call is for the next batch, in a
        cycle.
        """
        turns = itertools.cycle(range(len(self.paused)))

        def cache(out: Tree) -> CachedTree:
            file = self._file(number, next(turns))
            tensors = [
                x.clone() for x in optree.tree_leaves(out) if isinstance(x, Tensor)
            ]
            # to a full disk torch itself raises no OSError
            torch.save(tensors, saved := io.BytesIO())
            write_whole(file, lambda path: path.write_bytes(saved.getbuffer()))
            return _in_file(file, form_of(out))

        return cache

    def finish(self, number: int, outputs: Sequence[CachedTree]) -> None:
        """Go on to the next part, with the outputs of one."""
        for run, out in zip(self.paused, outputs, strict=True):
            run.finish(number, out)

    def skip(self, number: int) -> None:
        """Go on to the next part, with the outputs in files where they are still
        needed.
        """
        for i, run in enumerate(self.paused):
            file = self._file(number, i)
            if file.exists():
                run.finish(number, _in_file(file, self.chain.forms[number]))
            else:
                del run.calls[number]

    def needed(self) -> set[int]:
        """The numbers of the parts whose outputs are needed from here on."""
        return {*self.paused[0].outputs}

    def forget(self, needed: Iterable[int]) -> None:
        """Remove the files of all outputs, but keep the outputs of some parts."""
        names = {
            self._file(number, i).name
            for number in needed
            for i in range(len(self.paused))
        }
        for file in self.work.glob("outputs-*"):
            if file.name not in names:
                file.unlink()

    def _file(self, number: int, batch: int) -> Path:
        return self.work / f"outputs-{number}-{batch}.pt"


def forms_of(plan: Plan, call: Call, device: torch.device) -> list[CachedTree]:
    """What each part of a model returns, without the tensors in it.

    >>> from sparsefn.nn.modules.wrappers import Named
    >>> layers = Named.of(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    >>> forms_of(
    ...     Plan(Path("."), {}, layers, [], {}, {"": []}), ((), {}), torch.device("cpu")
    ... )
    []

    The model runs to its end on one example of the call. The first part of each list
    runs, and the list's other parts return the same outputs: only the order in which
    the model calls them matters. Raises BrokenChainError where that is not the order of
    the parts, each of them once.
    """
    if not plan.order:
        return []
    return with_one_example(partial(_forms, plan, device), call)


def _forms(plan: Plan, device: torch.device, call: Call) -> list[CachedTree]:
    parts = plan.model.parts(plan.order)
    called = list[str]()
    outputs = dict[str, Tree]()
    used = dict[str, list[str]]()

    def run(
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        # the part itself, with its weights
        if called[-1:] == [own := path.rpartition(".")[0]]:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if own not in outputs:
            called.append(own)
            part = parts[path]
            params, _ = plan.load(path, device)
            weights = weights_of_call(part, State(params, everywhere(params)))
            matrices = [name for name, x in weights.items() if x.ndim > 1]
            collect = collector(part, weights, matrices, ["count"])
            stats, outputs[own] = collect((args, kwargs), None)
            used[own] = [part.own[name][0] for name in stats]  # as they are first used
            form_of(outputs[own])
            called.pop()
        called.append(path)
        return optree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, outputs[own]
        )

    with torch.no_grad(), without_fusion(), intercepted(parts, run):
        quiet_call(plan.model, plan.outside(device))(copied_call(call))
    for path in plan.order:
        times = called.count(path)
        if times != 1:
            raise BrokenChainError(f"{path!r} is called {times} times")
    for path, other in zip(called, plan.order, strict=True):
        if path != other:
            raise BrokenChainError(f"{path!r} is called before {other!r}")
    for path, blocks in plan.blocks.items():
        turns = used[path.rpartition(".")[0]]
        places: list[tuple[int, Where]] = []
        for block, chosen in blocks:
            at = [parts[path].own[name][0] for name in chosen]
            seen = [turns.index(one) for one in at if one in turns]
            if seen:
                places.append((min(seen), block))
        check_places(places)
    return [form_of(outputs[path.rpartition(".")[0]]) for path in plan.order]


def _in_file(file: Path, form: CachedTree) -> CachedTree:
    places = itertools.count()
    leaves = []
    for leaf in form.leaves:
        if leaf is None:
            leaves.append(CachedTensor(partial(_read, file, next(places))))
        else:
            leaves.append(leaf)
    return CachedTree(form.structure, leaves)


def _read(file: Path, place: int) -> Tensor:
    tensor: Tensor = torch.load(file, weights_only=True)[place]
    return tensor
