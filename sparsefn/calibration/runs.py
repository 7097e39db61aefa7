"""What each batch calls the parts of a model with, where these run one by one and their outputs are files."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import optree
import torch
from torch import Tensor

from sparsefn.calibration.carried import block_weights
from sparsefn.calibration.chain import names_in
from sparsefn.calibration.folders import told, write_whole
from sparsefn.calibration.inputs import collected
from sparsefn.calibration.kept import Form, Kept, Stowed, form_of
from sparsefn.calibration.paused import Chain, Paused
from sparsefn.calibration.plan import Plan, bare
from sparsefn.calibration.stored import on_disk
from sparsefn.modules.calls import Call
from sparsefn.tree import Tree

_UNKNOWN = Form(None, ())


class Runs:
    """The runs of a model for some batches, all paused before the same part.

    The outputs of parts are files in the folder that `scratch` is in, which outlive the process; all other tensors that
    parts are called with are files in `scratch`. Both are read when a part is called, for one batch at a time.
    """

    def __init__(
        self, plan: Plan, calls: Sequence[Call], tokens: Sequence[Tensor | None], scratch: Path, device: torch.device
    ) -> None:
        parts = {path: plan.model.get_submodule(path) for path in plan.order}
        self.plan, self.work, self.tokens, self.device = plan, scratch.parent, tokens, device
        self.chain = Chain(parts, names_in(plan.model, parts), plan.order, [_UNKNOWN] * len(parts), frozenset(), [])
        kept = on_disk(scratch)

        def keep(x: Tensor) -> Kept:
            with told(scratch):
                return kept(x)

        self.paused = [Paused(plan.model, self.chain, call, keep) for call in calls]
        self.entered: set[int] = set()  # parts before which the model itself computes

    def reach(self, number: int) -> None:
        """Find out what the part of a number is called with, by the leaves of the model outside of all parts."""
        if number in self.paused[0].calls:
            return
        self.entered.add(number)
        weights = self.plan.outside(self.device)
        if self.chain.forms[number] is _UNKNOWN:
            first = Paused(
                self.plan.model, self.chain._replace(order=self.plan.order[: number + 1]), self.paused[0].start
            )
            first.outputs = dict(self.paused[0].outputs)
            first.go_on(number, weights)
            self._learn(number, first.call(number))
        for run in self.paused:
            run.go_on(number, weights)

    def _learn(self, number: int, call: Call) -> None:
        # Members of one list return the same kind of thing; Paused.done looks whether they did.
        path = self.plan.order[number]
        part, state = self.chain.parts[path], bare(self.plan.load(path, self.device)[0])
        form = form_of(collected(part, block_weights(part, self.chain.names[path], state), {}, ["count"], call)[1])
        for i, other in enumerate(self.plan.order):
            if other.rpartition(".")[0] == path.rpartition(".")[0]:
                self.chain.forms[i] = form

    def calls(self, number: int) -> Iterator[Call]:
        """What each batch calls the part of a number with."""
        return (run.call(number) for run in self.paused)

    def keep(self, number: int) -> Callable[[Tree], Stowed]:
        """How to keep the outputs of a part, those of one batch after another, and again."""
        turns = itertools.cycle(range(len(self.paused)))

        def keep(out: Tree) -> Stowed:
            file = self._file(number, next(turns))
            tensors = [x.clone() for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
            torch.save(tensors, saved := io.BytesIO())  # to a full disk torch itself raises no OSError
            write_whole(file, lambda path: path.write_bytes(saved.getbuffer()))
            return _stowed(file, form_of(out))

        return keep

    def done(self, number: int, outputs: Sequence[Stowed]) -> None:
        """Go on to the next part, with the outputs of one."""
        for run, out in zip(self.paused, outputs, strict=True):
            run.done(number, out)

    def passed(self, number: int) -> None:
        """Go on to the next part, with the outputs in files where they are still needed."""
        for i, run in enumerate(self.paused):
            if (file := self._file(number, i)).exists():
                run.done(number, _stowed(file, self.chain.forms[number]))
            else:
                del run.calls[number]

    def needed(self) -> set[int]:
        """The numbers of the parts whose outputs are needed from here on."""
        return {*self.paused[0].outputs}

    def forget(self, needed: Iterable[int]) -> None:
        """Remove the files of all outputs but those of some parts."""
        names = {self._file(number, i).name for number in needed for i in range(len(self.paused))}
        for file in self.work.glob("outputs-*"):
            if file.name not in names:
                file.unlink()

    def _file(self, number: int, batch: int) -> Path:
        return self.work / f"outputs-{number}-{batch}.pt"


def _stowed(file: Path, form: Form) -> Stowed:
    places = itertools.count()
    return Stowed(
        form.tree, [Kept(partial(_read, file, next(places))) if leaf is None else leaf for leaf in form.leaves]
    )


def _read(file: Path, place: int) -> Tensor:
    tensor: Tensor = torch.load(file, weights_only=True)[place]
    return tensor
