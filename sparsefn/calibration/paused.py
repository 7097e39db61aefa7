"""A run of a model that stops before each of its parts, which run elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsefn.calibration.caught import NeededError, catch
from sparsefn.calibration.kept import (
    BrokenChainError,
    Keep,
    KeptTensor,
    OutputForm,
    Slot,
    Stowed,
    in_memory,
    stow,
    unstow,
)
from sparsefn.modules.calls import Call
from sparsefn.tree import leaves_of


class Chain(NamedTuple):
    """The parts of a model that run one by one.

    `parts` are they by path, `names` those of their weights in the model by their own,
    `order` the paths as they are called, `forms` what each call returns, `kept` the
    numbers of the calls whose outputs the model itself needs, and `at` the number of
    the call for each block. `narrow` says how their leaves may be watched, see
    `collector`.
    """

    parts: dict[str, nn.Module]
    names: dict[str, dict[str, str]]
    order: list[str]
    forms: list[OutputForm]
    kept: frozenset[int]
    at: list[int]
    narrow: bool = False


class Paused:
    """A run of the model for one call, paused before one of its parts.

    >>> from sparsefn.calibration.chain import chain_of
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> state = sf.dense().init(sf.modules.params_of(model))
    >>> call = ((torch.ones(3, 2),), {})
    >>> chain = chain_of(model, state, [["0.weight"], ["1.weight"]], call)
    >>> paused = Paused(model, chain, call)
    >>> paused.go_on(0, state.params)
    >>> paused.call(0)[0][0].shape
    torch.Size([3, 2])
    """

    def __init__(
        self, module: nn.Module, chain: Chain, call: Call, keep: Keep = in_memory
    ) -> None:
        self.module = module
        self.chain = chain
        self.start = call
        self.keep = keep
        self.calls: dict[int, Stowed] = {}
        self.outputs: dict[int, Stowed] = {}
        # the call that is the last to get outputs of a call
        self.last: dict[int, int] = {}

    def go_on(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Find out what the part of a number, and those after it, are called with,
        where that is not known.
        """
        if number in self.calls:
            return
        chain = self.chain
        parts = (chain.parts, chain.order, chain.forms)
        found = catch(self.module, weights, *parts, self.outputs, number, self.start)
        memo: dict[int, tuple[Tensor, KeptTensor]] = {}
        for i, call in enumerate(found, number):
            stowed = stow(call, self.keep, memo)
            for slot in stowed.slots():
                if slot.number < number:
                    raise NeededError(slot.number)
                self.last[slot.number] = i
            self.calls[i] = stowed

    def call(self, number: int) -> Call:
        """What the part of a number is called with."""
        try:
            args, kwargs = unstow(self.calls[number], self.outputs)
        except BrokenChainError as error:
            raise BrokenChainError(f"{self.chain.order[number]!r} {error}") from None
        return args, kwargs

    def lent(self, number: int, again: bool) -> Iterator[Call]:
        """What the part of a number is called with, which it must not write into.

        It may where nobody reads it after: it does not run `again`, and no later part
        is called with the same.
        """
        leaves = self.calls[number].leaves
        call = self.call(number)
        later = {
            _key(leaf)
            for i, other in self.calls.items()
            if i > number
            for leaf in other.leaves
        }
        kept = [again or _key(leaf) in later for leaf in leaves]
        before = _versions(call)
        yield call
        after = _versions(call)
        if len(after) != len(before) or any(
            x != y for x, y, own in zip(before, after, kept, strict=True) if own
        ):
            raise BrokenChainError(
                f"{self.chain.order[number]!r} writes into its inputs"
            )

    def done(self, number: int, outputs: Stowed) -> None:
        """Take the outputs of a part, and forget what is not needed any more."""
        if outputs.form() != self.chain.forms[number]:
            raise BrokenChainError(
                f"{self.chain.order[number]!r} does not always return the same"
            )
        del self.calls[number]
        self.outputs[number] = outputs
        needed = {
            number,
            *self.chain.kept,
            *(i for i, last in self.last.items() if last > number),
        }
        self.outputs = {i: one for i, one in self.outputs.items() if i in needed}


def lent_calls(runs: Iterable[Paused], number: int, again: bool) -> Iterator[Call]:
    """What each of some runs calls the part of a number with; BrokenChainError where a
    part writes into it.
    """
    for run in runs:
        yield from run.lent(number, again)


def _key(leaf: object) -> object:
    return leaf if isinstance(leaf, Slot) else id(leaf)


def _versions(call: Call) -> list[Any]:
    # Tensors of inference mode do not count writes.
    return [
        (id(x), isinstance(x, Tensor) and not x.is_inference() and x._version)
        for x in leaves_of(call)
    ]
