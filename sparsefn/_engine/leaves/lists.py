"""Elementwise work on many leaves at once: on a device a launch costs more than the
traffic of a small leaf.

Leaves of a device and of the same dtypes are worked on at once, `MOST` elements at
most; a larger leaf is by itself. A formula of `+ - * /`, flags and `where` is written
once, for a tensor or for `TensorList`, whose operations are one launch and copy
nothing; no operation has a product and a sum in it, so none can be rounded once where
the formula rounds twice. For other functions leaves are laid end to end, and results
are split into tensors with memory of their own. Small CPU tensors are laid end to end,
too. Large CPU tensors, and tensors under a transform or whose gradient is wanted, are
worked on one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparsefn._engine.leaves.donation import saves_memory
from sparsefn._engine.transforms import (
    differentiated,
    flatten_tensors,
    foreach_add,
    foreach_add_,
    foreach_copy_,
    foreach_div,
    foreach_maximum,
    foreach_mul,
    foreach_sqrt_,
    foreach_sub,
    is_eager,
    transformed,
    unflatten_tensors,
)

Made = TypeVar("Made", bound="Tensor | tuple[Tensor, ...]")
Row = tuple[Tensor, ...]

# elements laid end to end: the copies of a pack take this much memory, not as much as a
# model
MOST = 1 << 25
PART_ON_CPU = 1 << 22  # elements of a part of an update that saves memory
# a leaf of at most this many elements takes less time end to end with other leaves than
# by itself, if at least `FEWEST` leaves are as small
SMALL = 1 << 12
FEWEST = 12

Value = TypeVar("Value", bound="Tensor | TensorList")
OfLists: TypeAlias = Callable[..., Sequence[Tensor]]
# a tensor is 0-d, on the same device and of the same dtype
Other: TypeAlias = "TensorList | Tensor | float"

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- leaves at once ------------------------------------------------------------------


def pays(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are on a device where many are best worked on at once.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.pays([torch.ones(2)]), lists.pays([torch.ones(2, device="meta")])
    (False, True)
    """
    if not tensors or any(x.device.type == "cpu" for x in tensors) or transformed():
        return False
    return not (torch.is_grad_enabled() and differentiated(*tensors))


def places_in_parts(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[int]]:
    """Places of tensors to work on one part after another, where an update saves
    memory; else one part.

    >>> from sparsefn._engine.leaves import donation
    >>> from sparsefn._engine.leaves import lists
    >>> lists.places_in_parts([torch.ones(1)] * 3, [10, 20, 1 << 22])
    [[0, 1, 2]]
    >>> with donation.donating([]):
    ...     lists.places_in_parts([torch.ones(1)] * 3, [10, 20, 1 << 22])
    [[0, 1], [2]]

    Flags of all elements at once are as large as the masks. A part is one tensor, or
    has 4 million elements at most; on a device, where launches count, 33 million.
    """
    if not saves_memory():
        return [list(range(len(sizes)))]
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    return packs([""] * len(sizes), sizes, PART_ON_CPU if on_cpu else MOST)


def packs(
    kinds: Sequence[object], sizes: Sequence[int], most: int | None = None
) -> list[list[int]]:
    """Places of the same kind, in order, of which a pack has `most` elements at most,
    or `MOST`.
    """
    most = MOST if most is None else most
    if len(set(kinds)) == 1 and sum(sizes) <= most:
        return [list(range(len(sizes)))]
    made: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        pack, left = open_.get(kind, ([], -1))
        if size > left:
            pack = []
            left = most
            made.append(pack)
        pack.append(i)
        open_[kind] = pack, left - size
    return made


def end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of tensors as one row.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.end_to_end([torch.ones(1, 2), torch.zeros(1)])
    tensor([1., 1., 0.])
    """
    listed = list(tensors)
    if transformed():  # vmap has no rule for it
        return torch.cat([x.reshape(-1) for x in listed]).detach()
    return flatten_tensors(listed).detach()


def split_like(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The elements of a tensor cut into tensors of the shapes of `like`, each with
    memory of its own.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.split_like(torch.tensor([1, 2, 3]), [torch.ones(1, 2), torch.ones(1)])
    [tensor([[1, 2]]), tensor([3])]
    """
    parts = unflatten_tensors(row.reshape(-1), list(like))
    if len(like) == 1:
        return parts
    if row.requires_grad:  # a copy of lists has no derivative
        return [part.clone() for part in parts]
    made = list(map(torch.empty_like, parts))
    foreach_copy_(made, parts)
    return made


def repeated(numbers: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each number of a row, or of some rows, as often as its size says.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.repeated(torch.tensor([5, 7]), [2, 1])
    tensor([5, 5, 7])
    >>> lists.repeated(torch.tensor([[5, 7], [6, 8]]), [2, 1])
    tensor([[5, 5, 7],
            [6, 6, 8]])

    `torch.repeat_interleave` reads the sizes from the device, and waits for it.
    """
    rows = numbers.shape[:-1]
    columns = zip(numbers[..., None].unbind(-2), sizes, strict=True)
    return torch.cat([column.expand(*rows, size) for column, size in columns], -1)


def foreach(
    fn: Callable[..., Made], *lists: Sequence[Tensor], formula: bool = True
) -> list[Made]:
    """A formula, or another elementwise function, of each row of tensors of one shape.

    It gives a tensor, or a tuple of them.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.foreach(
    ...     lambda a, b: a + b,
    ...     [torch.ones(1), torch.ones(2)],
    ...     [torch.ones(1), torch.zeros(2)],
    ... )
    [tensor([2.]), tensor([1., 1.])]
    """
    rows: list[Row] = list(zip(*lists, strict=True))
    if len(rows) > 1 and pays([x for row in rows for x in row]):
        return foreach_at_once(fn, rows, formula)
    small = joined_rows(rows)
    if not small:
        return [fn(*row) for row in rows]
    results: dict[int, Made] = {}
    for joined in small:
        made = _cut(fn(*joined.row), joined.leaves)
        results |= zip(joined.places, made, strict=True)
    for i, row in enumerate(rows):
        if i not in results:
            results[i] = fn(*row)
    return [results[i] for i in range(len(rows))]


class Joined(NamedTuple):
    """Rows of small leaves as one row: their places, their tensors end to end, and the
    first tensor of each.
    """

    places: list[int]
    row: Row
    leaves: list[Tensor]

    def split(self, made: Sequence[Tensor]) -> list[Row]:
        """The results of each row, cut from the joined ones, in their own memory."""
        return list(zip(*[split_like(x, self.leaves) for x in made], strict=True))


def joined_rows(rows: Sequence[Row]) -> list[Joined]:
    """The rows that are best worked on as one: the packs of `small_packs`.

    >>> from sparsefn._engine.leaves import lists
    >>> (joined,) = lists.joined_rows([(torch.full((1,), n),) for n in range(12)])
    >>> joined.row[0].shape, joined.split([2 * joined.row[0]])[-1]
    (torch.Size([12]), (tensor([22]),))
    """
    made = []
    for places in small_packs(rows):
        columns = zip(*[rows[i] for i in places], strict=True)
        row = tuple([flatten_tensors(list(column)) for column in columns])
        made.append(Joined(places, row, [rows[i][0] for i in places]))
    return made


def small_packs(rows: Sequence[Row]) -> list[list[int]]:
    """Places of rows of few elements that are best laid end to end: `FEWEST` or more
    whose tensors are plain ones of the CPU, of the same dtypes and of one shape in a
    row.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.small_packs([(torch.ones(n),) for n in (1 << 20, *range(1, 13))])
    [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    """
    if len(rows) < FEWEST or not is_eager():
        return []
    kinds: list[tuple[torch.dtype, ...] | None] = [None] * len(rows)
    firsts = [row[0] for row in rows]
    sizes = list(map(Tensor.numel, firsts))  # as updates ask often
    contiguous = list(map(Tensor.is_contiguous, firsts))
    for i, row in enumerate(rows):
        shape = firsts[i].shape
        if not firsts[i].is_cpu or sizes[i] > SMALL or not contiguous[i]:
            continue
        kind: tuple[torch.dtype, ...] = ()
        for x in row:
            if type(x) is not Tensor or x.shape != shape or not x.is_cpu:
                break
            if x.requires_grad:
                break
            kind = (*kind, x.dtype)
        else:
            kinds[i] = kind
    found = []
    for one in dict.fromkeys(kinds):  # in their order
        if one is not None:
            found.append([i for i, kind in enumerate(kinds) if kind == one])
    return [pack for pack in found if len(pack) >= FEWEST]


def foreach_at_once(
    fn: Callable[..., Made], rows: Sequence[Row], formula: bool = False
) -> list[Made]:
    """An elementwise function of each row of tensors of one shape, which are worked on
    at once wherever they are.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.foreach_at_once(
    ...     torch.add, [(torch.ones(1), torch.ones(1)), (torch.ones(2), torch.zeros(2))]
    ... )
    [tensor([2.]), tensor([1., 1.])]

    They are laid end to end, but for a formula. For a formula of float64 they are, too:
    its square root is no operation of lists.
    """
    results: dict[int, Made] = {}
    described = []
    for column in zip(*rows, strict=True):
        described.append([(x.device, x.dtype) for x in column])
    kinds = list(zip(*described, strict=True))
    sizes = list(map(Tensor.numel, [row[0] for row in rows]))  # as updates ask often
    for pack in packs(kinds, sizes):
        if len(pack) == 1:
            results[pack[0]] = fn(*rows[pack[0]])
            continue
        columns = list(zip(*[rows[i] for i in pack], strict=True))
        narrow = all(dtype != torch.float64 for _, dtype in kinds[pack[0]])
        join = TensorList if formula and narrow else end_to_end
        made = _cut(fn(*map(join, columns)), columns[0])
        results |= zip(pack, made, strict=True)
    return [results[i] for i in range(len(rows))]


def _cut(made: Any, like: Sequence[Tensor]) -> list[Any]:
    # The result of each leaf, of what a function made of all: a tensor, a `TensorList`,
    # or a tuple of these.
    if isinstance(made, TensorList):
        return made.tensors
    if isinstance(made, tuple):
        return list(zip(*[_cut(x, like) for x in made], strict=True))
    return split_like(made, like)


# ---- formulas ------------------------------------------------------------------------


class TensorList:
    """Tensors of one device and dtype, as the operand of a formula.

    >>> from sparsefn._engine.leaves.lists import TensorList
    >>> x = TensorList([torch.tensor([1.0, 2.0]), torch.tensor(3.0)])
    >>> ((x * 2.0 + x) / torch.tensor(2.0)).tensors
    [tensor([1.5000, 3.0000]), tensor(4.5000)]

    Another operand has the same shapes and strides, in the same order, or is a number.
    `&` and `|` are for flags.
    """

    requires_grad = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.dtype = tensors[0].dtype
        self.device = tensors[0].device

    def to(self, dtype: torch.dtype) -> TensorList:
        """The numbers in a dtype."""
        if dtype == self.dtype:
            return self
        made = list(map(partial(torch.empty_like, dtype=dtype), self.tensors))
        foreach_copy_(made, self.tensors)
        return TensorList(made)

    def view(self, dtype: torch.dtype) -> TensorList:
        """The same memory, as a dtype of the same size."""
        return TensorList(list(map(Tensor.view, self.tensors, repeat(dtype))))

    def double(self) -> TensorList:
        """The numbers in float64."""
        return self.to(torch.float64)

    def sqrt_(self) -> TensorList:
        """The square roots, in place."""
        foreach_sqrt_(self.tensors)
        return self

    def add_(self, number: float) -> TensorList:
        """A number added, in place."""
        foreach_add_(self.tensors, number)
        return self

    def __add__(self, other: Other) -> TensorList:
        if isinstance(other, Tensor):  # torch would read the number of some devices
            other = self._filled(other)
        return self._by(foreach_add, other)

    def __sub__(self, other: TensorList) -> TensorList:
        return self._by(foreach_sub, other)

    def __mul__(self, other: Other) -> TensorList:
        return self._by(foreach_mul, other)

    def __truediv__(self, other: Other) -> TensorList:
        return self._by(foreach_div, other)

    __rmul__ = __mul__

    def __and__(self, other: TensorList) -> TensorList:
        return self._bytes_by(foreach_mul, other)

    def __or__(self, other: TensorList) -> TensorList:
        return self._bytes_by(foreach_maximum, other)

    def _filled(self, number: Tensor) -> TensorList:
        # For each tensor one of the number that lies as it does; where it has gaps, one
        # whose strides are 0.
        widest = max(map(Tensor.numel, self.tensors))
        same = number.expand(widest).contiguous()
        shapes = [x.shape for x in self.tensors]
        strides = list(map(Tensor.stride, self.tensors))
        dense = list(map(Tensor.is_contiguous, self.tensors))
        for i, x in enumerate(self.tensors):
            if not dense[i] and not alike([x]):
                strides[i] = (0,) * x.ndim
        return TensorList(list(map(same.as_strided, shapes, strides)))

    def _by(self, fn: OfLists, other: Other) -> TensorList:
        return TensorList(
            fn(self.tensors, other.tensors if isinstance(other, TensorList) else other)
        )

    def _bytes_by(self, fn: OfLists, other: TensorList) -> TensorList:
        return self.view(torch.uint8)._by(fn, other.view(torch.uint8)).view(torch.bool)


def where(mask: Value, new: Value, old: Value | None = None) -> Value:
    """`new` on a mask, off it `old` or else +0.0: the very bits.

    >>> from sparsefn._engine.leaves import lists
    >>> lists.where(torch.tensor([True, False]), torch.tensor([1.0, 2.0]))
    tensor([1., 0.])
    >>> one = lists.TensorList([torch.tensor([1.0, -0.0])])
    >>> lists.where(
    ...     lists.TensorList([torch.tensor([True, False])]), one * 2.0, one
    ... ).tensors
    [tensor([2., -0.])]
    """
    made: Any
    if isinstance(mask, TensorList):
        made = _where(mask, new, old)  # type: ignore[arg-type]
    else:
        made = torch.where(mask, new, new.new_zeros(()) if old is None else old)  # type: ignore[arg-type, union-attr]
    return made  # type: ignore[no-any-return]


def _where(mask: TensorList, new: TensorList, old: TensorList | None) -> TensorList:
    # Integers wrap around, so that the difference of any two words comes back whole.
    dtype = new.dtype if old is None else torch.promote_types(new.dtype, old.dtype)
    word = WORDS[dtype.itemsize]
    wide = mask.to(word)
    bits = new.to(dtype).view(word)
    if old is None:
        return (wide * bits).view(dtype)
    others = old.to(dtype).view(word)
    return ((bits - others) * wide + others).view(dtype)


def alike(row: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape lie alike in memory, without gaps, so that one
    operation may pass over all.

    >>> from sparsefn._engine.leaves import lists
    >>> (
    ...     lists.alike([torch.ones(2, 3), torch.zeros(2, 3)]),
    ...     lists.alike([torch.ones(2, 2), torch.ones(2, 2).T]),
    ... )
    (True, False)
    """
    first = row[0]
    dense = first.is_contiguous() or (
        first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last)
    )
    return dense and all(x.stride() == first.stride() for x in row)
