"""Memory that is given away: results may overwrite a state that nobody reads again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# The donated tensors that no result has claimed, and the ids of the tensors that
# `donate` added.
_given: ContextVar[tuple[dict[int, Tensor], set[int]] | None] = ContextVar(
    "given", default=None
)


@contextlib.contextmanager
def donating(tensors: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """A context in which results may take the memory of these tensors; yields the
    tensors that are not taken yet.

    >>> from sparsefn._engine.leaves import donation
    >>> x = torch.ones(2)
    >>> with donation.donating([x]) as left:
    ...     donation.claim(x), len(left)
    (tensor([1., 1.]), 0)
    """
    left = {id(x): x for x in tensors}
    token = _given.set((left, set()))
    try:
        yield left
    finally:
        _given.reset(token)


def claim(x: Tensor) -> Tensor | None:
    """A tensor with the memory of one that is given away, which is emptied.

    It is None for any other.

    >>> from sparsefn._engine.leaves import donation
    >>> x = torch.ones(2)
    >>> with donation.donating([x]):
    ...     donation.claim(x), donation.claim(x), donation.claim(torch.ones(2))
    (tensor([1., 1.]), None, None)
    >>> x
    <given away: float32 of shape (2,)>

    Emptied now, and not at the end: code of a user that reads it later in the same
    update raises, and gets no values that are overwritten.
    """
    now = _now()
    if now is None or now[0].pop(id(x), None) is None:
        return None
    taken = x.detach()
    empty([x])
    return taken


def donate(tensors: Sequence[Tensor], others: Iterable[Tensor]) -> None:
    """Donate the tensors, made by this update, that share memory with no other tensor;
    outside of `donating`, do nothing.

    >>> from sparsefn._engine.leaves import donation
    >>> x, y = torch.ones(2), torch.ones(2)
    >>> with donation.donating([]):
    ...     donation.donate([x, y], others=[y[:1]])
    ...     donation.is_donated(x), donation.claim(x), donation.claim(y)
    (True, tensor([1., 1.]), None)
    """
    now = _now()
    if now is not None:
        made = {id(x): x for x in unshared_memory(tensors, others)}
        now[0].update(made)
        now[1].update(made)


def saves_memory() -> bool:
    """Whether memory is given away now, so that an update saves it.

    >>> from sparsefn._engine.leaves import donation
    >>> donation.saves_memory()
    False
    """
    return _now() is not None


def _now() -> tuple[dict[int, Tensor], set[int]] | None:
    return None if torch.compiler.is_compiling() else _given.get()


def is_donated(x: Tensor) -> bool:
    """Whether a tensor was given by `donate`, and not taken since.

    >>> from sparsefn._engine.leaves import donation
    >>> donation.is_donated(torch.ones(2))
    False
    """
    now = _now()
    return now is not None and id(x) in now[0] and id(x) in now[1]


def unshared_memory(
    tensors: Sequence[Tensor], others: Iterable[Tensor]
) -> list[Tensor]:
    """The contiguous tensors whose storage no other tensor, here or in `others`,
    shares.

    >>> from sparsefn._engine.leaves import donation
    >>> x = torch.ones(2)
    >>> (
    ...     donation.unshared_memory([x, x[:1]], []),
    ...     donation.unshared_memory([x], [x]),
    ...     donation.unshared_memory([x], []),
    ... )
    ([], [], [tensor([1., 1.])])
    """
    owners: dict[int, Tensor | None] = {
        x.untyped_storage().data_ptr(): None for x in others
    }
    for x in tensors:
        at = x.untyped_storage().data_ptr()
        owners[at] = None if at in owners else x
    return [
        x
        for x in owners.values()
        if x is not None
        and x.is_contiguous()
        and x.untyped_storage().nbytes() == x.nbytes
    ]


class Emptied(Tensor):
    """A tensor that was given away: every use of it raises.

    >>> from sparsefn._engine.leaves import donation
    >>> x = torch.ones(2)
    >>> donation.empty([x])
    >>> x
    <given away: float32 of shape (2,)>
    >>> x + 1
    Traceback (most recent call last):
        ...
    ValueError: expected a tensor, got <given away: float32 of shape (2,)>: ...
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [
            x for group in given if isinstance(group, list | tuple) for x in group
        ]
        what = next((repr(x) for x in given if isinstance(x, cls)), "<given away>")
        raise ValueError(
            f"expected a tensor, got {what}: a donated algorithm has updated the "
            "state that it belongs to; go on with the state that update returned, or "
            "copy a state before: optree.tree_map(torch.clone, state)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<given away: {self.__dict__['_was']}>"


def empty(tensors: Iterable[Tensor]) -> None:
    """Take the memory of tensors away.

    Every later use of one of them raises ValueError.

    >>> from sparsefn._engine.leaves import donation
    >>> x = torch.ones(2)
    >>> y = x.detach()
    >>> donation.empty([x])
    >>> y
    tensor([1., 1.])
    """
    for x in tensors:
        if type(x) is not Tensor:  # a subclass has a way of its own to hold its memory
            continue
        was = f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
        # torch changes no inference tensor outside of inference mode
        if not x.is_inference():
            x.set_()  # type: ignore[call-overload]
        x.__class__ = Emptied
        x.__dict__["_was"] = was
