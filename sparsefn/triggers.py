"""Triggers say at which steps something happens; `check_step` says what a step is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from sparsefn.calls import check_call
from sparsefn.types import Step


def check_kind(step: Step) -> Step:
    """The step itself, if it is one: an int of any sign or a 0-d int64 tensor.

    >>> sf.triggers.check_kind(0.5)
    Traceback (most recent call last):
        ...
    TypeError: expected step to be an int or a 0-d int64 tensor, got float

    An integer of another kind, such as NumPy's, comes back as an int. ValueError for an int that does not fit
    int64, or whose successor does not.
    """
    if torch.compiler.is_compiling() and not isinstance(step, int | float | Tensor) and hasattr(step, "__array__"):
        step = torch.as_tensor(step, device="cpu")  # while compiling, a NumPy integer is an array without dimensions
        step = step if step.is_floating_point() or step.dtype == torch.bool else step.to(torch.int64)
    if isinstance(step, Tensor):
        if step.dtype != torch.int64:
            raise TypeError(f"expected step to be an int or a 0-d int64 tensor, got a tensor of {step.dtype}")
        if step.ndim:
            raise ValueError(f"expected step to be a 0-d tensor, got shape {tuple(step.shape)}")
        return step
    if isinstance(step, bool) or not isinstance(step, int | Integral):
        raise TypeError(f"expected step to be an int or a 0-d int64 tensor, got {type(step).__name__}")
    step = int(step)
    if not -(2**63) <= step < 2**63 - 1:
        raise ValueError(f"expected a step that fits int64, as the one after it must, got {step}")
    return step


def check_step(step: Step) -> Step:
    """The step itself, if it is one: an int >= 0 or a 0-d int64 tensor.

    >>> sf.triggers.check_step(3)
    3

    Under `vmap` the tensor is 0-d per member. While compiling, an int comes back as a tensor: that
    graph serves every step. Raises TypeError for another type or dtype, ValueError for an int that is negative
    or above 2**63 - 2 and for a tensor that is not 0-d.
    """
    step = check_kind(step)
    if isinstance(step, Tensor):
        return step
    if step < 0:
        raise ValueError(f"expected step >= 0, got {step}")
    if torch.compiler.is_compiling():
        return torch.full((), step, dtype=torch.int64, device="cpu")  # as_tensor would compile anew for every step
    return step


def check_trigger(name: str, trigger: object) -> None:
    """Raise TypeError unless it can be called with a step.

    >>> sf.triggers.check_trigger("when", 100)
    Traceback (most recent call last):
        ...
    TypeError: expected when to be a trigger such as every(100) or at([0]), got 100
    """
    if not callable(trigger):
        raise TypeError(f"expected {name} to be a trigger such as every(100) or at([0]), got {trigger!r}")
    check_call(name, trigger, "step")


def _most(value: Step, most: Step) -> Step:
    if isinstance(value, Tensor):
        return value.clamp(max=most)
    return most.clamp(max=value) if isinstance(most, Tensor) else min(value, most)


def _least(value: Step, least: int) -> Step:
    return value.clamp(min=least) if isinstance(value, Tensor) else max(value, least)


@dataclass(frozen=True)
class Every:
    """The trigger that `every` and `always` return, compared by value.

    >>> sf.triggers.Every(10, start=5).count(25)
    3

    Called with a step it says whether it fires; `count(step)` is how often it has fired up to that
    step, itself included. Its arguments are not checked: use `every`.
    """

    n: Step
    start: Step = 0
    stop: Step | None = None

    def __call__(self, step: Step) -> bool | Tensor:
        """Whether it fires at this step."""
        step = check_kind(step)
        fires = (step >= self.start) & ((step - self.start) % self.n == 0)
        return fires if self.stop is None else fires & (step < self.stop)

    def count(self, step: Step) -> Step:
        """How often it has fired at steps up to this one, itself included."""
        step = check_kind(step)
        last = step if self.stop is None else _most(step, self.stop - 1)
        return _least((last - self.start) // self.n + 1, 0)


@dataclass(frozen=True)
class At:
    """The trigger that `at` and `never` return, compared by value.

    >>> sf.triggers.At((1, 3)).count(3)
    2

    Called and counted like `Every`. Its arguments are not checked: use `at`.
    """

    steps: tuple[Step, ...]

    def __call__(self, step: Step) -> bool | Tensor:
        """Whether it fires at this step."""
        step = check_kind(step)
        steps = self._tensor(step)
        return step in self.steps if steps is None else torch.eq(steps, step).any(-1)

    def count(self, step: Step) -> Step:
        """How often it has fired at steps up to this one, itself included."""
        step = check_kind(step)
        steps = self._tensor(step)
        if steps is None:
            return sum(step >= fires for fires in self.steps)
        steps = steps.sort().values
        again = torch.cat([torch.zeros_like(steps[:1], dtype=torch.bool), steps[1:] == steps[:-1]])
        return ((step >= steps) & ~again).sum(-1)

    def _tensor(self, step: Step) -> Tensor | None:
        # The steps on one device, or None where they and the step are ints.
        given = [x for x in (step, *self.steps) if isinstance(x, Tensor)]
        if not given:
            return None
        if len(given) == 1 and given[0] is step:
            return torch.tensor(self.steps, dtype=torch.int64, device=step.device)
        kind = given[-1].device
        return torch.stack([torch.full((), x, device=kind) if isinstance(x, int) else x for x in self.steps])


def check_int(call: str, name: str, value: object, low: int) -> None:
    """Raise unless the argument of that name is an int and at least `low`.

    >>> sf.triggers.check_int("every(n)", "n", 0, 1)
    Traceback (most recent call last):
        ...
    ValueError: every(n): expected n >= 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{call}: expected {name} to be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{call}: expected {name} >= {low}, got {value}")


def check_whole(call: str, name: str, value: object, low: int) -> None:
    """Raise unless the argument of that name is a 0-d int64 tensor, or passes `check_int`.

    >>> sf.triggers.check_whole("every(n)", "n", torch.tensor(0.5), 1)
    Traceback (most recent call last):
        ...
    TypeError: every(n): expected n to be an int or a 0-d int64 tensor, got a tensor of torch.float32

    The value of a tensor is not looked at: it may be batched, or on another device.
    """
    if not isinstance(value, Tensor):
        check_int(call, name, value, low)
        if isinstance(value, int) and value >= 2**63:
            raise ValueError(f"{call}: expected {name} to fit int64, got {value}")
    elif value.dtype != torch.int64:
        raise TypeError(f"{call}: expected {name} to be an int or a 0-d int64 tensor, got a tensor of {value.dtype}")
    elif value.ndim:
        raise ValueError(f"{call}: expected {name} to be a 0-d tensor, got shape {tuple(value.shape)}")


def every(n: Step, start: Step = 0, stop: Step | None = None) -> Every:
    """Fires at start, start + n, start + 2n, ... below stop.

    >>> when = sf.triggers.every(10, start=5, stop=25)
    >>> [step for step in range(40) if when(step)]
    [5, 15]
    >>> when(torch.tensor(15))
    tensor(True)
    >>> torch.vmap(lambda n: sf.triggers.every(n)(6))(torch.tensor([2, 3, 4]))
    tensor([ True,  True, False])

    `start` is inclusive and sets the phase; `stop` is exclusive, None for no end. Each may be a 0-d int64
    tensor, so that members of an ensemble differ. Called with ints alone it gives a bool, else a 0-d
    bool tensor. `.count(step)` is the number of firings at steps up to and including `step`. Raises
    TypeError for what is no int, ValueError for n < 1, start < 0, or stop <= start (that is `never()`).
    The value of a tensor is not looked at: an n below 1 counts as 1, and stop <= start never fires.
    """
    call = "every(n, start, stop)"
    check_whole("every(n)", "n", n, 1)
    check_whole(call, "start", start, 0)
    if stop is not None:
        check_whole(call, "stop", stop, 0)
        if not isinstance(start, Tensor) and not isinstance(stop, Tensor) and stop <= start:
            raise ValueError(f"{call}: expected stop > start (stop is exclusive), got start={start}, stop={stop}")
    return Every(_least(n, 1), start, stop)


def at(steps: Iterable[Step]) -> At:
    """Fires at the steps listed; their order and duplicates do not matter.

    >>> when = sf.triggers.at([3, 1])
    >>> [step for step in range(5) if when(step)]
    [1, 3]
    >>> torch.vmap(lambda steps: sf.triggers.at(steps)(3))(torch.tensor([[1, 3], [2, 4]]))
    tensor([ True, False])

    A step may be a 0-d int64 tensor, and all of them one 1-D tensor. Result and `.count` as for `every`.
    Raises TypeError for steps that are no ints, ValueError for a negative step or an empty list (that is
    `never()`).
    """
    if not isinstance(steps, Iterable) or (isinstance(steps, Tensor) and not steps.ndim):
        raise TypeError(f"at(steps): expected a list of ints, got {steps!r}; write at([{steps!r}])")
    listed = list(steps)
    for step in listed:
        check_whole("at(steps)", "every step", step, 0)
    if not listed:
        raise ValueError("at(steps): expected at least one step, got none; never() fires at no step")
    if any(isinstance(step, Tensor) for step in listed):
        return At(tuple(listed))
    return At(tuple(sorted({step for step in listed if isinstance(step, int)})))


def always() -> Every:
    """Fires at every step.

    >>> sf.triggers.always()(7)
    True
    """
    return Every(1)


def never() -> At:
    """Fires at no step.

    >>> sf.triggers.never()(7)
    False
    """
    return At(())
