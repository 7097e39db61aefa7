"""Elementwise work on many leaves at once: on a device a launch costs more than the traffic of a small leaf.

Leaves of a device and of the same dtypes are worked on at once, `MOST` elements at most; a larger leaf is by itself.
Formulas of arithmetic take them as they are (`many.py`); for other functions they are laid end to end, and results are
cut apart into tensors with memory of their own. CPU tensors, and tensors under a transform or whose gradient is wanted,
are worked on one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsefn.engine.donation import saves
from sparsefn.engine.many import Many, alike
from sparsefn.engine.transforms import COPY_EACH, differentiated, transformed

Made = TypeVar("Made", bound="Tensor | tuple[Tensor, ...]")
Row = tuple[Tensor, ...]

MOST = 1 << 25  # elements laid end to end: the copies of a pack take this much memory, not that of a model
_MOST_ON_CPU = 1 << 22


def pays(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are on a device where many are best worked on at once.

    >>> from sparsefn.engine import together
    >>> together.pays([torch.ones(2)]), together.pays([torch.ones(2, device="meta")])
    (False, True)
    """
    if not tensors or any(x.device.type == "cpu" for x in tensors) or transformed():
        return False
    return not (torch.is_grad_enabled() and differentiated(*tensors))


def parts(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[int]]:
    """Places of tensors to work on one part after another, where an update saves memory; else one part.

    >>> from sparsefn.engine import donation, together
    >>> together.parts([torch.ones(1)] * 3, [10, 20, 1 << 22])
    [[0, 1, 2]]
    >>> with donation.giving([]):
    ...     together.parts([torch.ones(1)] * 3, [10, 20, 1 << 22])
    [[0, 1], [2]]

    Flags of all elements at once are as large as the masks. A part is one tensor, or has 4 million elements at most; on
    a device, where launches count, 33 million.
    """
    if not saves():
        return [list(range(len(sizes)))]
    return packs([""] * len(sizes), sizes, _MOST_ON_CPU if all(x.device.type == "cpu" for x in tensors) else MOST)


def packs(kinds: Sequence[object], sizes: Sequence[int], most: int | None = None) -> list[list[int]]:
    """Places of the same kind, in order, of which a pack has `most` elements at most, or `MOST`.

    >>> from sparsefn.engine import together
    >>> together.packs(["a", "b", "a"], [1, 2, together.MOST])
    [[0], [1], [2]]
    >>> together.packs(["a", "b", "a"], [1, 2, 3])
    [[0, 2], [1]]
    """
    made: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        pack, room = open_.get(kind, ([], -1))
        if size > room:
            pack, room = [], MOST if most is None else most
            made.append(pack)
        pack.append(i)
        open_[kind] = pack, room - size
    return made


def end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of tensors as one row.

    >>> from sparsefn.engine import together
    >>> together.end_to_end([torch.ones(1, 2), torch.zeros(1)])
    tensor([1., 1., 0.])
    """
    rows = [x.detach().reshape(-1) for x in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def apart(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The elements of a tensor cut into tensors of the shapes of some others, each with memory of its own.

    >>> from sparsefn.engine import together
    >>> together.apart(torch.tensor([1, 2, 3]), [torch.ones(1, 2), torch.ones(1)])
    [tensor([[1, 2]]), tensor([3])]
    """
    if len(like) == 1:
        return [row.reshape(like[0].shape)]
    made = [torch.empty(x.shape, dtype=row.dtype, device=row.device) for x in like]
    parts = torch.split(row.reshape(-1), [x.numel() for x in like])
    views = [part.view(x.shape) for part, x in zip(parts, like, strict=True)]
    COPY_EACH(made, views)
    return made


def each(fn: Callable[..., Made], *lists: Sequence[Tensor]) -> list[Made]:
    """A formula (`many.py`) of each row of tensors of one shape; it gives a tensor, or a tuple of them.

    >>> from sparsefn.engine import together
    >>> together.each(lambda a, b: a + b, [torch.ones(1), torch.ones(2)], [torch.ones(1), torch.zeros(2)])
    [tensor([2.]), tensor([1., 1.])]
    """
    rows: list[Row] = list(zip(*lists, strict=True))
    if len(rows) > 1 and pays([x for row in rows for x in row]):
        return laid(fn, rows, formula=True)
    return [fn(*row) for row in rows]


def laid(fn: Callable[..., Made], rows: Sequence[Row], formula: bool = False) -> list[Made]:
    """An elementwise function of each row of tensors of one shape, which are worked on at once wherever they are.

    >>> from sparsefn.engine import together
    >>> together.laid(torch.add, [(torch.ones(1), torch.ones(1)), (torch.ones(2), torch.zeros(2))])
    [tensor([2.]), tensor([1., 1.])]

    They are laid end to end, but for those of a formula that lie alike in memory. float64 is laid, too: its square root
    is no operation of lists.
    """
    results: dict[int, Made] = {}
    lists = [formula and alike(row) and all(x.dtype != torch.float64 for x in row) for row in rows]
    kinds = [(listed, *((x.device, x.dtype) for x in row)) for listed, row in zip(lists, rows, strict=True)]
    for pack in packs(kinds, [row[0].numel() for row in rows]):
        if len(pack) == 1:
            results[pack[0]] = fn(*rows[pack[0]])
            continue
        columns = list(zip(*(rows[i] for i in pack), strict=True))
        made: Any = fn(*map(Many if lists[pack[0]] else end_to_end, columns))
        several = isinstance(made, tuple)
        parts = [_apart(x, columns[0]) for x in (made if several else (made,))]
        results |= zip(pack, cast("list[Made]", list(zip(*parts, strict=True)) if several else parts[0]), strict=True)
    return [results[i] for i in range(len(rows))]


def _apart(made: Tensor | Many, like: Sequence[Tensor]) -> list[Tensor]:
    return made.tensors if isinstance(made, Many) else apart(made, like)
