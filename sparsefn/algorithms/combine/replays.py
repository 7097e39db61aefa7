"""The graphs of the updates of one algorithm: for each structure, and for each set of
triggers that fire.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from sparsefn._engine.leaves import brought, claim
from sparsefn._engine.transforms import foreach_copy_, host_number
from sparsefn.algorithms.combine.cuda_graphs import GRAPHS, Graph, Waits
from sparsefn.core.checks import shown
from sparsefn.core.state import Algorithm, State, Step, Trigger
from sparsefn.core.tree import Tree, opened, paths, same_structure
from sparsefn.core.triggers import host_step

_MOST_STRUCTURES = 8
_MOST_GRAPHS = 16  # of one structure

Inner = Callable[[State, Tree, Step], State]


class Target(NamedTuple):
    """Where an update runs."""

    device: torch.device
    stream: int


class Replays:
    """Updates of an algorithm by graphs, which are captured when they are needed."""

    def __init__(self, algorithm: Algorithm, inner: Inner) -> None:
        self._algorithm = algorithm
        self._inner = inner
        # in the order of their last use
        self._structures: dict[Hashable, _Structure] = {}
        # two threads would write to the same inputs
        self._lock = threading.Lock()

    def update(self, state: State, grads: Tree, step: Step, target: Target) -> State:
        """The new state."""
        given: list[Tensor]
        given, treedef = optree.tree_flatten((state, grads))  # type: ignore[arg-type]
        number: int | None = host_number(step)
        leaves = tuple((x.shape, x.stride(), x.dtype, x.device) for x in given)
        key = (target, treedef, leaves, number is None)
        with self._lock:
            structure = self._structures.pop(key, None)
            if structure is None:
                structure = _Structure(given, treedef.unflatten, target.device)
            captured = structure.captured_for(number)
            if captured is None or captured.makes_tensors():
                structure.write(given, step if number is None else number)
            if captured is None:
                # In a context of its own: `donated` would give our inputs away.
                capture = contextvars.Context().run
                captured = capture(self._captured, structure, state, number)
            self._structures[key] = structure
            if len(self._structures) > _MOST_STRUCTURES:
                del self._structures[next(iter(self._structures))]
            if captured.makes_tensors():
                captured.graph.replay()
            return captured.results(given)

    def _captured(
        self, structure: _Structure, state: State, number: int | None
    ) -> _Captured:
        try:
            return structure.capture(self._inner, state, number)
        except Waits as error:
            raise ValueError(
                "captured: expected an update that never waits for the device, as a "
                f"graph cannot wait, but the one of {shown(self._algorithm)} does, at "
                f"{error}; compute with tensors on the device, let sf.every or sf.at "
                "say when masks change, or leave sf.captured out"
            ) from error


class _Captured(NamedTuple):
    """A graph, and what the step decided when it was captured.

    `made` holds its results: a tensor that a replay writes to, or the place among the
    inputs of one that is handed on. `replaces` says of each whether it is like the
    input at its place, which nobody else needs.
    """

    graph: Graph
    decisions: list[tuple[Trigger, bool]]
    made: list[Tensor | int]
    replaces: list[bool]
    rebuild: Callable[[Sequence[Tree]], Tree]

    def serves(self, number: int) -> bool:
        """Whether a step decides the same."""
        return all(when(number) == fires for when, fires in self.decisions)

    def makes_tensors(self) -> bool:
        """Whether there is anything to replay: not where no trigger fires, and no
        optimizer steps.
        """
        return any(isinstance(x, Tensor) for x in self.made)

    def results(self, given: Sequence[Tensor]) -> State:
        """The results of the last replay, in memory of their own."""
        new: list[Tensor] = []
        copies: list[Tensor] = []
        origins: list[Tensor] = []
        for i, made in enumerate(self.made):
            if isinstance(made, int):
                new.append(given[made])
                continue
            donated = claim(given[i]) if self.replaces[i] else None
            copy = torch.empty_like(made) if donated is None else donated
            new.append(copy)
            copies.append(copy)
            origins.append(made)
        if copies:
            foreach_copy_(copies, origins)
        return self.rebuild(new)  # type: ignore[no-any-return]


class _Structure:
    """The tensors that all graphs of one structure read, and these graphs."""

    def __init__(
        self,
        given: Sequence[Tensor],
        rebuild: Callable[[Sequence[Tree]], Tree],
        device: torch.device,
    ) -> None:
        with torch.inference_mode(False):
            self._inputs = [torch.empty_like(x, device=device) for x in given]
            self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._rebuild = rebuild
        self._devices = [x.device for x in given]
        self._elsewhere = [i for i, x in enumerate(given) if x.device != device]
        self._make_graph = GRAPHS[device.type](device)
        self._all: list[_Captured] = []  # in the order of their last use

    def write(self, given: Sequence[Tensor], step: Step) -> None:
        """Copy a state, gradients and a step into the inputs."""
        origins = list(given)
        for i in self._elsewhere:  # keys on the CPU
            origins[i] = brought(given[i], self._step.device)
        foreach_copy_(self._inputs, origins)
        if isinstance(step, Tensor):
            self._step.copy_(step)
        else:
            self._step.fill_(step)

    def captured_for(self, number: int | None) -> _Captured | None:
        """The graph for a step, None if there is none yet."""
        for i, captured in enumerate(self._all):
            if number is None or captured.serves(number):
                self._all.append(self._all.pop(i))
                return captured
        return None

    def capture(self, inner: Inner, state: State, number: int | None) -> _Captured:
        """The graph of an update of the inputs."""
        inputs, grads = self._rebuild(self._inputs)
        decisions: list[tuple[Trigger, bool]] = []

        def run() -> State:
            nonlocal decisions
            with host_step(self._step, number) as decisions:
                return inner(inputs, grads, self._step)

        graph = self._make_graph()
        differentiable = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            new = graph.capture(run)
        results, rebuild = opened(new)
        places = {id(x): i for i, x in enumerate(self._inputs)}
        made = [places.get(id(x), x.detach()) for x in results]
        captured = _Captured(
            graph, decisions, made, self._replaces(new, state, made), rebuild
        )
        self._all.append(captured)
        if len(self._all) > _MOST_GRAPHS:
            del self._all[0]
        return captured

    def _replaces(
        self, new: State, state: State, made: Sequence[Tensor | int]
    ) -> list[bool]:
        if not same_structure(new, state):
            return [False] * len(made)
        handed_on = {x for x in made if isinstance(x, int)}
        replaces = []
        for i, x in enumerate(made):
            if isinstance(x, Tensor) and x.device != self._devices[i]:
                raise ValueError(
                    f"captured: expected an update that leaves {paths(new)[i]!r} of "
                    f"the state on {self._devices[i]}, got it on {x.device}; move it "
                    f"there before the update: x.to({str(x.device)!r})"
                )
            replaces.append(
                isinstance(x, Tensor)
                and i not in handed_on
                and x.device == self._inputs[i].device
                and _layout(x) == _layout(self._inputs[i])
            )
        return replaces


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype
