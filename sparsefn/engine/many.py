"""Arithmetic on tensors of many shapes as on one: an operation on a device is one launch, and nothing is copied.

A formula of `+ - * /`, flags and `where` is written once, for a tensor or for `Many`. No operation has a product and a
sum in it, so none can be rounded once where the formula rounds twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparsefn.engine.transforms import (
    ADD_EACH,
    COPY_EACH,
    LARGER_EACH,
    LESS_EACH,
    OVER_EACH,
    ROOT_EACH,
    SUM_EACH,
    TIMES_EACH,
)

Value = TypeVar("Value", bound="Tensor | Many")
OfLists: TypeAlias = Callable[..., Sequence[Tensor]]
Other: TypeAlias = "Many | Tensor | float"  # a tensor is 0-d, on the same device and of the same dtype

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Many:
    """Tensors of one device and dtype, as the operand of a formula.

    >>> from sparsefn.engine.many import Many
    >>> x = Many([torch.tensor([1.0, 2.0]), torch.tensor(3.0)])
    >>> ((x * 2.0 + x) / torch.tensor(2.0)).tensors
    [tensor([1.5000, 3.0000]), tensor(4.5000)]

    Another operand has the same shapes and strides, in the same order, or is a number.
    """

    requires_grad = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.dtype, self.device = tensors[0].dtype, tensors[0].device

    def to(self, dtype: torch.dtype) -> Many:
        """The numbers in a dtype."""
        if dtype == self.dtype:
            return self
        made = [torch.empty_like(x, dtype=dtype) for x in self.tensors]
        COPY_EACH(made, self.tensors)
        return Many(made)

    def view(self, dtype: torch.dtype) -> Many:
        """The same memory, as a dtype of the same size."""
        return Many([x.view(dtype) for x in self.tensors])

    def double(self) -> Many:
        """The numbers in float64."""
        return self.to(torch.float64)

    def sqrt_(self) -> Many:
        """The square roots, in place."""
        ROOT_EACH(self.tensors)
        return self

    def add_(self, number: float) -> Many:
        """A number added, in place."""
        ADD_EACH(self.tensors, number)
        return self

    def __add__(self, other: Other) -> Many:
        if isinstance(other, Tensor):  # torch would read the number of some devices
            widest = max(x.numel() for x in self.tensors)
            same = other.expand(widest).contiguous()
            other = Many([same.as_strided(x.shape, x.stride()) for x in self.tensors])
        return self._by(SUM_EACH, other)

    def __sub__(self, other: Many) -> Many:
        return self._by(LESS_EACH, other)

    def __mul__(self, other: Other) -> Many:
        return self._by(TIMES_EACH, other)

    def __truediv__(self, other: Other) -> Many:
        return self._by(OVER_EACH, other)

    __rmul__ = __mul__

    def _by(self, fn: OfLists, other: Other) -> Many:
        return Many(fn(self.tensors, other.tensors if isinstance(other, Many) else other))

    def of_flags(self, fn: OfLists, other: Many) -> Many:
        """A function of the bytes of flags."""
        return self.view(torch.uint8)._by(fn, other.view(torch.uint8)).view(torch.bool)


def where(mask: Value, new: Value, old: Value | None = None) -> Value:
    """`new` on a mask, off it `old` or else +0.0: the very bits.

    >>> from sparsefn.engine import many
    >>> many.where(torch.tensor([True, False]), torch.tensor([1.0, 2.0]))
    tensor([1., 0.])
    >>> one = many.Many([torch.tensor([1.0, -0.0])])
    >>> many.where(many.Many([torch.tensor([True, False])]), one * 2.0, one).tensors
    [tensor([2., -0.])]
    """
    made: Any
    if isinstance(mask, Many):
        made = _where(mask, new, old)  # type: ignore[arg-type]
    else:
        made = torch.where(mask, new, new.new_zeros(()) if old is None else old)  # type: ignore[arg-type, union-attr]
    return made  # type: ignore[no-any-return]


def _where(mask: Many, new: Many, old: Many | None) -> Many:
    # Integers wrap around, so that the difference of any two words comes back whole.
    dtype = new.dtype if old is None else torch.promote_types(new.dtype, old.dtype)
    word = WORDS[dtype.itemsize]
    wide, bits = mask.to(word), new.to(dtype).view(word)
    if old is None:
        return (wide * bits).view(dtype)
    others = old.to(dtype).view(word)
    return ((bits - others) * wide + others).view(dtype)


def one_of(flags: Value, others: Value) -> Value:
    """Where one of two flags is set, or both.

    >>> from sparsefn.engine import many
    >>> many.one_of(torch.tensor([True, False]), torch.tensor([False, False]))
    tensor([ True, False])
    """
    return _of_flags(LARGER_EACH, torch.logical_or, flags, others)


def both(flags: Value, others: Value) -> Value:
    """Where both of two flags are set.

    >>> from sparsefn.engine import many
    >>> many.both(torch.tensor([True, True]), torch.tensor([True, False]))
    tensor([ True, False])
    """
    return _of_flags(TIMES_EACH, torch.logical_and, flags, others)


def _of_flags(of_bytes: OfLists, of_one: Callable[..., Tensor], flags: Value, others: Value) -> Value:
    made: Any = flags.of_flags(of_bytes, others) if isinstance(flags, Many) else of_one(flags, others)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def alike(row: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape lie alike in memory, without gaps, so that one operation may pass over all.

    >>> from sparsefn.engine import many
    >>> many.alike([torch.ones(2, 3), torch.zeros(2, 3)]), many.alike([torch.ones(2, 2), torch.ones(2, 2).T])
    (True, False)
    """
    first = row[0]
    dense = first.is_contiguous() or (first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last))
    return dense and all(x.stride() == first.stride() for x in row)
