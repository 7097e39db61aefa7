"""Triggers: at which steps something happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sparsefn._engine.leaves import written
from sparsefn.core.checks import Call, check_kind, check_whole, factory_of
from sparsefn.core.checks import check_step as check_step
from sparsefn.core.state import Step, Trigger

__all__ = ["always", "at", "check_step", "every", "never"]
__dir__ = __all__.copy


# ---- what Python decides while an update sees the step as a tensor -------------------


class _HostStep(NamedTuple):
    tensor: Tensor
    number: int | None
    decisions: list[tuple[Trigger, bool]]


_host_step: ContextVar[_HostStep | None] = ContextVar("host_step", default=None)


@contextlib.contextmanager
def host_step(
    tensor: Tensor, number: int | None
) -> Iterator[list[tuple[Trigger, bool]]]:
    """A context in which triggers that are asked about the step in this tensor are
    decided by its number; yields the list of these triggers and their answers.

    >>> from sparsefn.core import triggers
    >>> step = torch.tensor(0)
    >>> with triggers.host_step(step, 20) as decisions:
    ...     sf.every(10)(step), len(decisions)
    (True, 1)

    Without a number nothing is decided in Python.
    """
    now = _HostStep(tensor, number, [])
    token = _host_step.set(now)
    try:
        yield now.decisions
    finally:
        _host_step.reset(token)


def has_host_step() -> bool:
    """Whether this is inside of `host_step`.

    >>> has_host_step()
    False
    """
    return _host_step.get() is not None


def _decided(when: Trigger, step: Step) -> bool | Tensor:
    now = None if is_compiling() else _host_step.get()
    if now is None or now.number is None or step is not now.tensor:
        return when(step)
    fires = when(now.number)
    if isinstance(fires, Tensor):  # numbers of the trigger are tensors
        return when(step)
    now.decisions.append((when, fires))
    return fires


# ---- triggers ------------------------------------------------------------------------


def _most(value: Step, most: Step) -> Step:
    if isinstance(value, Tensor):
        return value.clamp(max=most)
    if isinstance(most, Tensor):
        return most.clamp(max=value)
    return min(value, most)


def _least(value: Step, least: int) -> Step:
    if isinstance(value, Tensor):
        return value.clamp(min=least)
    return max(value, least)


@dataclass(frozen=True)
class Every:
    """The trigger that `every` and `always` return, compared by value.

    >>> sf.triggers.Every(10, start=5).count(25)
    3

    Called with a step it says whether it fires; `count(step)` is how often it has fired
    up to that step, itself included. Its arguments are not checked: use `every`.

    Attributes:
        n: Steps from one firing to the next.
        start: First step at which it may fire.
        stop: First step at which it no longer fires. None: it never stops.
    """

    n: Step
    start: Step = 0
    stop: Step | None = None

    def __repr__(self) -> str:
        usual = {"n": 1, "start": 0, "stop": None}
        given = {
            name: x
            for name, x in vars(self).items()
            if isinstance(x, Tensor) or x != usual[name]
        }
        return repr(Call(every, (given.pop("n", 1),), given) if given else Call(always))

    def __call__(self, step: Step) -> bool | Tensor:
        """Whether it fires at this step."""
        return _decided(self._fires, check_kind(step))

    def _fires(self, step: Step) -> bool | Tensor:
        fires = (step >= self.start) & ((step - self.start) % self.n == 0)
        if self.stop is None:
            return fires
        return fires & (step < self.stop)

    def count(self, step: Step) -> Step:
        """How often it has fired at steps up to this one, itself included."""
        step = check_kind(step)
        if self.stop is None:
            last = step
        else:
            last = _most(step, self.stop - 1)
        return _least((last - self.start) // self.n + 1, 0)


@dataclass(frozen=True)
class At:
    """The trigger that `at` and `never` return, compared by value.

    >>> sf.triggers.At((1, 3)).count(3)
    2

    Called and counted like `Every`; without steps it is False at every step. Its
    arguments are not checked: use `at`.

    Attributes:
        steps: The steps at which it fires.
    """

    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return repr(Call(at, ([*self.steps],)) if self.steps else Call(never))

    def __call__(self, step: Step) -> bool | Tensor:
        """Whether it fires at this step."""
        step = check_kind(step)
        if not self.steps:  # known in Python, so that `choose` takes no other branch
            return False
        return _decided(self._fires, step)

    def _fires(self, step: Step) -> bool | Tensor:
        steps = self._tensor(step)
        if steps is None:
            return step in self.steps
        return torch.eq(steps, step).any(-1)

    def count(self, step: Step) -> Step:
        """How often it has fired at steps up to this one, itself included."""
        step = check_kind(step)
        steps = self._tensor(step)
        if steps is None:
            return sum(step >= fires for fires in self.steps)
        steps = steps.sort().values
        again = torch.cat(
            [torch.zeros_like(steps[:1], dtype=torch.bool), steps[1:] == steps[:-1]]
        )
        return ((step >= steps) & ~again).sum(-1)

    def _tensor(self, step: Step) -> Tensor | None:
        # The steps on one device, or None where they and the step are ints.
        given = [x for x in (step, *self.steps) if isinstance(x, Tensor)]
        if not given:
            return None
        if len(given) == 1 and given[0] is step:
            return written([x for x in self.steps if isinstance(x, int)], step.device)
        kind = given[-1].device
        return torch.stack(
            [
                torch.full((), x, device=kind) if isinstance(x, int) else x
                for x in self.steps
            ]
        )


@factory_of
def every(n: Step, start: Step = 0, stop: Step | None = None) -> Every:
    """Fires at start, start + n, start + 2n, ... below stop.

    >>> when = sf.triggers.every(10, start=5, stop=25)
    >>> [step for step in range(40) if when(step)]
    [5, 15]
    >>> when(torch.tensor(15))
    tensor(True)
    >>> torch.vmap(lambda n: sf.triggers.every(n)(6))(torch.tensor([2, 3, 4]))
    tensor([ True,  True, False])

    Args:
        n: Number of steps from one firing to the next, at least 1.
        start: First step at which it fires, at least 0. It sets the phase.
        stop: Step from which on it fires no more, above `start`. None: it never stops.

    Returns:
        Trigger. For ints alone it gives a bool, else a 0-d bool tensor. Its
        `.count(step)` is the number of firings at steps up to and including `step`.

    Raises:
        TypeError: An argument is neither an int nor a 0-d int64 tensor.
        ValueError: n < 1, start < 0, or stop <= start (that is `never()`).

    Arguments may be 0-d int64 tensors, so that members of an ensemble differ. The value
    of a tensor is not read: an n below 1 counts as 1, and stop <= start never fires.
    """
    call = "every(n, start, stop)"
    check_whole("every(n)", "n", n, 1)
    check_whole(call, "start", start, 0)
    if stop is not None:
        check_whole(call, "stop", stop, 0)
        if (
            not isinstance(start, Tensor)
            and not isinstance(stop, Tensor)
            and stop <= start
        ):
            raise ValueError(
                f"{call}: expected stop > start (stop is exclusive), got "
                f"start={start}, stop={stop}"
            )
    return Every(_least(n, 1), start, stop)


@factory_of
def at(steps: Iterable[Step]) -> At:
    """Fires at the steps listed; their order and duplicates do not matter.

    >>> when = sf.triggers.at([3, 1])
    >>> [step for step in range(5) if when(step)]
    [1, 3]
    >>> torch.vmap(lambda steps: sf.triggers.at(steps)(3))(
    ...     torch.tensor([[1, 3], [2, 4]])
    ... )
    tensor([ True, False])

    Args:
        steps: Ints >= 0 or 0-d int64 tensors, or one 1-D tensor of all.

    Returns:
        Trigger. Its result and `.count` are as for `every`.

    Raises:
        TypeError: `steps` cannot be iterated over, or a step is neither an int nor a
            0-d int64 tensor.
        ValueError: A step is negative, or there are none (that is `never()`).
    """
    if not isinstance(steps, Iterable) or (
        isinstance(steps, Tensor) and not steps.ndim
    ):
        raise TypeError(
            f"at(steps): expected a list of ints, got {steps!r}; write at([{steps!r}])"
        )
    listed = list(steps)
    for step in listed:
        check_whole("at(steps)", "every step", step, 0)
    if not listed:
        raise ValueError(
            "at(steps): expected at least one step, got none; never() fires at no step"
        )
    if any(isinstance(step, Tensor) for step in listed):
        return At(tuple(listed))
    return At(tuple(sorted({step for step in listed if isinstance(step, int)})))


@factory_of
def always() -> Every:
    """Fires at every step.

    >>> sf.triggers.always()(7)
    True

    Returns:
        The trigger of `every(1)`.
    """
    return Every(1)


@factory_of
def never() -> At:
    """Fires at no step.

    >>> sf.triggers.never()(7), sf.triggers.never()(torch.tensor(7))
    (False, False)

    Returns:
        A trigger, which counts as `every` does.

    It is False for a tensor, too, and no transform hides that: a compiled graph holds
    nothing of what waits for it.
    """
    return At(())
