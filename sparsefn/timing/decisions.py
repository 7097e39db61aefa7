"""What Python decides by the step while an update sees the step as a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.compiler import is_compiling

from sparsefn.engine.checks import Step

# A function of the step, such as a trigger
Question: TypeAlias = Callable[[Step], bool | Tensor]


class _HostStep(NamedTuple):
    tensor: Tensor
    number: int | None
    decisions: list[tuple[Question, bool]]


_host_step: ContextVar[_HostStep | None] = ContextVar("host_step", default=None)


@contextlib.contextmanager
def host_step(
    tensor: Tensor, number: int | None
) -> Iterator[list[tuple[Question, bool]]]:
    """A context in which questions about the step in this tensor are decided by its
    number; yields the list of these questions and their answers.

    >>> from sparsefn.timing import decisions
    >>> step = torch.tensor(0)
    >>> with decisions.host_step(step, 20) as decided:
    ...     sf.every(10)(step), len(decided)
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


def decide(question: Question, step: Step) -> bool | Tensor:
    """The answer to a question about a step.

    It is a bool where Python knows the step.

    >>> decide(lambda step: step > 2, 3), decide(lambda step: step > 2, torch.tensor(3))
    (True, tensor(True))
    """
    now = None if is_compiling() else _host_step.get()
    if now is None or now.number is None or step is not now.tensor:
        return question(step)
    answer = question(now.number)
    if isinstance(answer, Tensor):  # a trigger whose own numbers are tensors
        return question(step)
    now.decisions.append((question, answer))
    return answer
