"""How tensor operations change channels: each function takes the plan and the values of the operation's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sparsefn.engine.checks import is_int
from sparsefn.shrinking.channels import LENGTH, UNKNOWN, Batch, Channels, Input, Plan, Shape, Value, where_finite


def _plain(values: Iterable[object]) -> bool:
    return all(isinstance(value, int | float | str | None) for value in values)


def elementwise(plan: Plan, fn: Callable[..., Tensor], x: Value, *args: Value, **kwargs: Value) -> Value:
    """The value of a function that acts on each element by itself.

    >>> elementwise(Plan(), torch.relu, Channels(torch.tensor([0, 1]), torch.tensor([-1.0, torch.nan]), -1, 2)).const
    tensor([0., nan])
    """
    if not isinstance(x, Channels) or not _plain([*args, *kwargs.values()]):
        return UNKNOWN
    const = where_finite(x.const, fn(x.const.clone(), *args, **kwargs))
    plan.note(x, const, f"{plan.at} makes no finite number of their constant")
    return x._replace(const=const)


def binary(plan: Plan, fn: Callable[..., Tensor], a: Value, b: Value, **kwargs: Value) -> Value:
    """The value of a sum, difference or product: channels that are combined are tied.

    >>> x = Channels(torch.tensor([0]), torch.tensor([2.0]), -1, 2)
    >>> binary(Plan(), torch.mul, x, 3.0).const, binary(Plan(), torch.add, x, x).const
    (tensor([6.]), tensor([4.]))
    """
    if not isinstance(a, Channels) or not isinstance(b, Channels):
        one = a if isinstance(a, Channels) else b
        if not isinstance(one, Channels) or not _plain([b if one is a else a, *kwargs.values()]):
            plan.pin(one, f"{plan.at} joins them with a tensor whose channels are not known")
            return UNKNOWN
        x, y = (v.const.clone() if isinstance(v, Channels) else v for v in (a, b))
        return one._replace(const=where_finite(one.const, fn(x, y, **kwargs)))
    if (a.axis, len(a.ids), a.spread) != (b.axis, len(b.ids), b.spread) or not _plain(kwargs.values()):
        return UNKNOWN
    plan.ties.append((a.ids, b.ids))
    const = where_finite(a.const + b.const, fn(a.const.clone(), b.const, **kwargs))
    if fn.__name__ in ("mul", "mul_", "imul"):
        const = torch.where((a.const == 0) | (b.const == 0), 0.0, const)
    for x in (a, b):
        plan.note(x, const, f"{plan.at} joins them with a branch where they vary")
    batch = a.batch if (a.batch, a.rank) == (b.batch, b.rank) else object()
    return a._replace(const=const, rank=max(a.rank, b.rank), batch=batch)


def cat(plan: Plan, tensors: Value, dim: int = 0) -> Value:
    """The value of a concatenation along the channels.

    >>> x = Channels(torch.tensor([0]), torch.tensor([2.0]), -1, 2)
    >>> cat(Plan(), [x, x], 1).ids
    tensor([0, 0])
    """
    if not isinstance(tensors, tuple | list) or not all(isinstance(x, Channels) and not x.spread for x in tensors):
        return UNKNOWN
    places = {(x.axis, x.rank) for x in tensors}
    first = tensors[0]
    if len(places) != 1 or dim not in (first.axis, first.position):
        return UNKNOWN
    return first._replace(ids=torch.cat([x.ids for x in tensors]), const=torch.cat([x.const for x in tensors]))


def flattened(plan: Plan, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """The value of a flattened tensor, if flattening starts at the channels or after them.

    >>> flattened(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-3, rank=4), 1)[2:5]
    (-1, 2, True)
    """
    if not isinstance(x, Channels) or not all(d in range(-x.rank, x.rank) for d in (start_dim, end_dim)):
        return UNKNOWN
    start, end = start_dim % x.rank, end_dim % x.rank
    if start <= x.position <= end and (start < x.position or (x.spread and end > start)):
        return UNKNOWN
    rank, spread = x.rank - max(end - start, 0), x.spread or start == x.position < end
    axis = x.axis if x.position > end else x.position - rank
    return x._replace(axis=axis, rank=rank, spread=spread, batch=x.batch if start else object())


def view(plan: Plan, x: Value, *sizes: Value) -> Value:
    """The value of a tensor viewed as one row for each example.

    >>> view(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-3, rank=4, batch="x"), Batch("x"), -1).spread
    True
    """
    if len(sizes) == 1 and type(sizes[0]) is not Batch and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if isinstance(x, Channels) and len(sizes) == 2 and sizes[0] == Batch(x.batch) and sizes[1] == -1:
        return flattened(plan, x, 1)
    return UNKNOWN


def averaged(plan: Plan, x: Value, dim: Value = None, keepdim: bool = False) -> Value:
    """The value of a mean over dimensions that are not the channels.

    >>> averaged(Plan(), Channels(torch.tensor([0]), torch.ones(1), axis=-3, rank=4), (2, 3))[2:4]
    (-1, 2)
    """
    dims = list(dim) if isinstance(dim, tuple | list) else [dim]
    if not isinstance(x, Channels) or x.spread or not dims or not all(d in range(-x.rank, x.rank) for d in dims):
        return UNKNOWN
    gone = {d % x.rank for d in dims}
    return UNKNOWN if x.position in gone else _without(x, set() if keepdim else gone)


def _without(x: Channels, gone: set[int]) -> Channels:
    axis = x.axis + sum(d > x.position for d in gone)
    return x._replace(axis=axis, rank=x.rank - len(gone), batch=object() if 0 in gone else x.batch)


def pooled(plan: Plan, x: Value, dims: int, even: bool = True) -> Value:
    """The value of a pooled image; a constant stays what it is, unless borders count (`even=False`) and it is not 0.

    >>> x = Channels(torch.tensor([0, 1]), torch.tensor([0.0, 2.0]), axis=-3, rank=4)
    >>> pooled(Plan(), x, 2).const, pooled(Plan(), x, 2, even=False).const
    (tensor([0., 2.]), tensor([0., nan]))
    """
    if not isinstance(x, Channels) or x.axis != -dims - 1:
        return UNKNOWN
    if even:
        return x
    const = torch.where(x.const == 0, x.const, torch.nan)
    plan.note(x, const, f"{plan.at} counts zeros around the image, and their constant is not 0")
    return x._replace(const=const)


def size_of(plan: Plan, x: Value, dim: Value = None) -> Value:
    """The value of a tensor's shape, or of one entry of it.

    >>> size_of(Plan(), Input("x"))
    Shape(of=Input(batch='x'))
    """
    return Shape(x) if dim is None else getitem(plan, Shape(x), dim)


def attribute(plan: Plan, x: Value, name: str) -> Value:
    """The value of a tensor's attribute; only `shape` is known.

    >>> attribute(Plan(), Input("x"), "shape")
    Shape(of=Input(batch='x'))
    """
    return Shape(x) if name == "shape" else UNKNOWN


def getitem(plan: Plan, x: Value, index: Value) -> Value:
    """The value of an entry of a tuple or shape, or of a slice of a tensor that has all channels.

    >>> getitem(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-1, rank=3), (slice(None), -1))[2:4]
    (-1, 2)
    """
    if isinstance(x, Shape):
        of = x.of
        if index == 0 and (isinstance(of, Input) or (isinstance(of, Channels) and of.position)):
            return Batch(of.batch)
        inner = isinstance(of, Channels) and index in [*range(of.position + 1, of.rank), *range(of.axis + 1, 0)]
        return LENGTH if inner else UNKNOWN
    if not isinstance(x, Channels):
        return x[index] if type(x) is tuple and isinstance(index, int) else UNKNOWN
    entries = index if isinstance(index, tuple) else (index,)
    known = len(entries) <= x.rank and all(
        _plain([e.start, e.stop, e.step]) if isinstance(e, slice) else is_int(e) for e in entries
    )
    if not known or x.spread or (x.position < len(entries) and entries[x.position] != slice(None)):
        return UNKNOWN
    part = _without(x, {d for d, entry in enumerate(entries) if is_int(entry)})
    return part if entries[0] == slice(None) else part._replace(batch=object())
