"""What each block of a model is called with, without running the model once a block.

A part is a block, or another layer of the list that the block is in. The order of
events:

1. `recorded` runs the whole model on one example, and notes the order in which the
   parts are called, and the form of what each returns.
2. `PausedRun.advance` runs the model on a batch, where `intercepted` takes the place of
   the parts: no part runs.
3. The model computes the arguments of the first part, such as embeddings and masks, and
   they are noted.
4. In place of the outputs of the part it gets markers: empty tensors, each with the
   number of the call and of the output that it stands for, a `Slot`.
5. The model hands the markers to the next part, whose arguments are noted with slots in
   their place, and so on: one run finds the arguments of all parts.
6. A model that does more than that with a marker, such as an addition, raises
   `Touched`, which ends the run; the calls that were noted are kept.
7. `PausedRun.call` gives the arguments of a part with the outputs of earlier parts in
   the slots; the part runs with its pruned weights, outside of this file.
8. `PausedRun.finish` takes its outputs, and forgets all outputs that no later call
   needs.
9. Where the run has ended early, `advance` runs the model again for the next part:
   outputs that are known are returned, and markers only in place of the rest.
10. A model that needs outputs which are forgotten raises `NeededError`: `chain_of` then
    has them kept to the end, or the whole model runs once for each block.

The inputs of the first block and the outputs of each are not enough: T5 hands a bias
from block to block, and Gemma has two kinds of masks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from sparsefn.core.tree import Tree, leaves_of
from sparsefn.nn.modules.calls import Call, quiet_call
from sparsefn.nn.modules.wrappers import Named
from sparsefn.posttraining.calibration.cache import (
    BrokenChainError,
    Cache,
    CachedTensor,
    CachedTree,
    Touched,
    cache_tree,
    copied_call,
    form_of,
    in_memory,
    read_tree,
)
from sparsefn.posttraining.calibration.inputs import without_fusion

# instead of a part: a function of its path, the part, and the arguments of its call
Run = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Tree]


class NeededError(BrokenChainError):
    """The model does something else with the outputs of a part than pass them on: the
    number of its call.
    """

    def __init__(self, number: int) -> None:
        super().__init__("the model reads what it handed on before")
        self.number = number


class _Stop(BaseException):
    pass


@dataclass(frozen=True)
class Slot:
    """The place of an output: the number of the call that returns it, and the number of
    the leaf.
    """

    number: int
    leaf: int


class Marker(Tensor):
    """Stands for an output of a part that did not run.

    It can be handed on, and nothing else.
    """

    slot: Slot

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Marker):
                raise Touched(leaf.slot.number)


def marked(form: CachedTree, number: int) -> Tree:
    """The outputs of the call of a number, with markers for tensors.

    >>> marked(form_of([1, torch.ones(1)]), 3)[1].__dict__["slot"]
    Slot(number=3, leaf=1)
    """
    leaves = list(form.leaves)
    for i, leaf in enumerate(leaves):
        if leaf is None:
            leaves[i] = torch.empty(0, device="cpu").as_subclass(Marker)
            leaves[i].__dict__["slot"] = Slot(number, i)
    return optree.tree_unflatten(form.structure, leaves)


def with_slots(tree: Tree) -> Tree:
    """A tree with slots in the place of markers.

    >>> with_slots((marked(form_of(torch.ones(1)), 3), 2))
    (Slot(number=3, leaf=0), 2)
    """
    return optree.tree_map(lambda x: x.slot if isinstance(x, Marker) else x, tree)


def slots_in(call: CachedTree) -> list[Slot]:
    """The outputs that a call gets.

    >>> slots_in(CachedTree(None, [Slot(3, 0), 1]))
    [Slot(number=3, leaf=0)]
    """
    return [leaf for leaf in call.leaves if isinstance(leaf, Slot)]


@contextlib.contextmanager
def intercepted(parts: Mapping[str, Named], run: Run) -> Iterator[None]:
    """While it is entered, `run(path, part, args, kwargs)` takes the place of the calls
    of some parts of a model.

    >>> relu = torch.nn.ReLU()
    >>> with intercepted({"0": Named.of(relu)}, lambda path, part, args, kwargs: path):
    ...     relu(torch.ones(1))
    '0'

    `run` is called before the hooks of a part, wherever the model holds the part; the
    attribute that does so is the attribute that `Module.compile` sets. Raises
    BrokenChainError where an attribute of a part was set since, before its first call.
    """
    name = "_compiled_call_impl"
    modules = {path: part.module for path, part in parts.items()}
    before = [
        (vars(part), name in vars(part), vars(part).get(name))
        for part in modules.values()
    ]
    times = Counter(inner for part in modules.values() for inner in part.modules())
    try:
        for path, part in modules.items():
            given = [
                (inner, dict(vars(inner)))
                for inner in part.modules()
                if times[inner] == 1
            ]
            vars(part)[name] = partial(_instead, run, path, part, given)
        yield
    finally:
        for own, had, value in before:
            own.pop(name, None)
            if had:
                own[name] = value


def _instead(
    run: Run,
    path: str,
    part: nn.Module,
    given: list[Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Tree:
    for inner, old in given:
        for key, x in vars(inner).items():
            if x is not old.get(key) and not callable(x):
                raise BrokenChainError(
                    f"{path!r} gets its {key!r} from elsewhere, and not as an argument"
                )
    given.clear()  # from here on it may be its own
    return run(path, part, args, kwargs)


def recorded(
    parts: Mapping[str, Named], run: Callable[[], Tree]
) -> tuple[Tree, list[str], list[CachedTree], str]:
    """What a run of the model gives, the paths of some of its parts in the order of
    their calls, and what they return.

    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
    >>> parts = Named.of(model).parts(["0", "1"])
    >>> recorded(parts, lambda: model(torch.ones(1)))[:2]
    (tensor([1.]), ['0', '1'])

    The text at the end says why these cannot run one by one; it is empty where they
    may.
    """
    order = list[str]()
    forms = list[CachedTree]()
    inside = list[str]()
    why = list[str]()
    before = {
        path: part.module._compiled_call_impl or part.module._call_impl
        for path, part in parts.items()
    }

    def noted(
        path: str,
        part: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        why.extend(f"{path!r} is called by {outer!r}" for outer in inside)
        inside.append(path)
        out = before[path](*args, **kwargs)
        inside.pop()
        order.append(path)
        try:
            forms.append(form_of(out))
        except BrokenChainError as error:
            why.append(f"{path!r} {error}")
        return out

    with intercepted(parts, noted):
        return run(), order, forms, next(iter(why), "")


class Chain(NamedTuple):
    """The parts of a model that run one by one.

    parts: The parts, by path.
    order: The paths in the order of their calls.
    forms: What each call returns, without tensors.
    kept: The numbers of the calls whose outputs the model itself needs.
    at: The number of the call for each block.
    narrow: How the leaves may be watched, see `collector`.
    """

    parts: dict[str, Named]
    order: list[str]
    forms: list[CachedTree]
    kept: frozenset[int]
    at: list[int]
    narrow: bool = False


class PausedRun:
    """A run of the model for one call, paused before one of its parts.

    >>> from sparsefn.posttraining.calibration.blocks import chain_of
    >>> model = Named.of(
    ...     torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    ... )
    >>> state = sf.dense().init(sf.modules.params_of(model.module))
    >>> call = ((torch.ones(3, 2),), {})
    >>> chain = chain_of(model, state, [["0.weight"], ["1.weight"]], call)
    >>> run = PausedRun(model, chain, call)
    >>> run.advance(0, state.params)
    >>> run.call(0)[0][0].shape
    torch.Size([3, 2])

    `calls` has the arguments of the parts that are known, `outputs` what parts returned
    that is needed later, both by the number of the part.
    """

    def __init__(
        self, model: Named, chain: Chain, call: Call, cache: Cache = in_memory
    ) -> None:
        self.model = model
        self.chain = chain
        self.start = call
        self.cache = cache
        self.calls: dict[int, CachedTree] = {}
        self.outputs: dict[int, CachedTree] = {}
        # the call that is the last to get outputs of a call
        self.last: dict[int, int] = {}

    def advance(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Find the arguments, where they are not known, of the part of call `number`
        and of the parts after it.

        Raises NeededError where they depend on outputs that were not kept,
        BrokenChainError where the model calls the parts in another order.
        """
        if number in self.calls:
            return
        memo: dict[int, tuple[Tensor, CachedTensor]] = {}
        for i, call in enumerate(self._captured(number, weights), number):
            cached = cache_tree(with_slots(call), self.cache, memo)
            for slot in slots_in(cached):
                if slot.number < number:
                    raise NeededError(slot.number)
                self.last[slot.number] = i
            self.calls[i] = cached

    def _captured(self, first: int, weights: Mapping[str, Tensor]) -> list[Call]:
        # The arguments of each part from call `first` on, up to the first that depend
        # on an output that is not known. Parts do not run: outputs that are known are
        # returned, else tensors that the model can only hand on.
        order = self.chain.order
        found: list[Call] = []
        number = -1

        def run(
            path: str,
            part: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Tree:
            nonlocal number
            number += 1
            if path != order[number]:
                raise BrokenChainError(
                    f"{path!r} is called where {order[number]!r} was before"
                )
            if number >= first:
                found.append((args, kwargs))
            if number == len(order) - 1:
                raise _Stop
            if number in self.outputs:
                return read_tree(self.outputs[number])
            return marked(self.chain.forms[number], number)

        try:
            with torch.no_grad(), without_fusion(), intercepted(self.chain.parts, run):
                quiet_call(self.model, weights)(copied_call(self.start))
        except _Stop:
            pass
        except Touched as touched:
            if not found:
                raise NeededError(touched.number) from None
        if not found:
            raise BrokenChainError(f"{order[first]!r} is not called every time")
        return found

    def call(self, number: int) -> Call:
        """The arguments of the part of a number."""
        leaves = list(self.calls[number].leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Slot):
                leaves[i] = self.outputs[leaf.number].leaves[leaf.leaf]
        try:
            args, kwargs = read_tree(self.calls[number]._replace(leaves=leaves))
        except BrokenChainError as error:
            raise BrokenChainError(f"{self.chain.order[number]!r} {error}") from None
        return args, kwargs

    def guarded_call(self, number: int, again: bool) -> Iterator[Call]:
        """The arguments of the part of a number, which it must not write into.

        It may where nobody reads them after: it does not run `again`, and no later part
        is called with the same.
        """
        leaves = self.calls[number].leaves
        call = self.call(number)
        later = [other.leaves for i, other in self.calls.items() if i > number]
        needed = {_key(leaf) for other in later for leaf in other}
        kept = [again or _key(leaf) in needed for leaf in leaves]
        before = _versions(call)
        yield call
        after = _versions(call)
        if len(after) != len(before) or any(
            x != y for x, y, own in zip(before, after, kept, strict=True) if own
        ):
            raise BrokenChainError(
                f"{self.chain.order[number]!r} writes into its inputs"
            )

    def finish(self, number: int, outputs: CachedTree) -> None:
        """Take the outputs of a part, and forget what is not needed any more."""
        if outputs.form() != self.chain.forms[number]:
            raise BrokenChainError(
                f"{self.chain.order[number]!r} does not always return the same"
            )
        del self.calls[number]
        later = {i for i, last in self.last.items() if last > number}
        needed = {number, *self.chain.kept, *later}
        self.outputs[number] = outputs
        self.outputs = {i: one for i, one in self.outputs.items() if i in needed}


def guarded_calls(
    runs: Iterable[PausedRun], number: int, again: bool
) -> Iterator[Call]:
    """What each of some runs calls the part of a number with; BrokenChainError where a
    part writes into it.
    """
    for run in runs:
        yield from run.guarded_call(number, again)


def _key(leaf: object) -> object:
    return leaf if isinstance(leaf, Slot) else id(leaf)


def _versions(call: Call) -> list[Any]:
    # Tensors of inference mode do not count writes.
    return [
        (id(x), isinstance(x, Tensor) and not x.is_inference() and x._version)
        for x in leaves_of(call)
    ]
