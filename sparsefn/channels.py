"""Channels of the tensors in a traced module: which constants they hold, and which of them must go together."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Value = Any  # what is known of a node: Channels, a tuple of values, a Shape, a Marker, or plain data


class Channels(NamedTuple):
    """What is known about the channels of one tensor.

    >>> Channels(torch.tensor([0, 1]), torch.tensor([0.5, torch.nan]), axis=-3, rank=4).position
    1

    `ids` are the numbers of the channels in a `Plan`, `const` is the constant that a channel holds at all
    places and times, NaN where it varies. `axis` counts from the end. With `spread` every channel stands
    for an equal run of features: an image that was flattened. All tensors are on the CPU.
    """

    ids: Tensor
    const: Tensor
    axis: int
    rank: int
    spread: bool = False

    @property
    def position(self) -> int:
        """The axis counted from the front."""
        return self.rank + self.axis


class Shape(NamedTuple):
    """The shape of a tensor, as the module's forward reads it.

    >>> Shape(INPUT).of
    <Marker.INPUT: 'an input of the module'>
    """

    of: Value


class Marker(enum.Enum):
    """Values of which no channel is known.

    >>> UNKNOWN
    <Marker.UNKNOWN: 'anything'>
    """

    INPUT = "an input of the module"
    UNKNOWN = "anything"
    BATCH = "the number of examples"
    LENGTH = "another length"


INPUT, UNKNOWN, BATCH, LENGTH = Marker


def _channels(value: Value) -> Iterator[Channels]:
    if isinstance(value, Channels):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _channels(part)
    elif isinstance(value, Mapping):
        yield from _channels(list(value.values()))


@dataclasses.dataclass
class Plan:
    """Which channels there are, which of them are one, and which have to stay.

    >>> plan = Plan()
    >>> a, b = plan.number(2), plan.number(2)
    >>> plan.ties.append((a, b))
    >>> plan.pin(Channels(b[:1], torch.zeros(1), -1, 2))
    >>> plan.removed()
    tensor([False,  True, False,  True])

    `sizes` maps the path of a layer to the channels that come in and go out; one of each stays.
    """

    count: int = 0
    ties: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    pins: list[Tensor] = dataclasses.field(default_factory=list)
    sizes: dict[str, tuple[Value, Value]] = dataclasses.field(default_factory=dict)

    def number(self, n: int) -> Tensor:
        """Numbers for n new channels."""
        self.count += n
        return torch.arange(self.count - n, self.count)

    def pin(self, values: Value) -> None:
        """Keep every channel in nested values."""
        self.pins += [value.ids for value in _channels(values)]

    def removed(self) -> Tensor:
        """Which channels can go: none that is one with a pinned channel."""
        pinned = torch.zeros(self.count, dtype=torch.bool)
        for ids in self.pins:
            pinned[ids] = True
        sides = [side.ids for pair in self.sizes.values() for side in pair if isinstance(side, Channels)]
        while True:
            before = pinned.clone()
            for a, b in self.ties:
                both = pinned[a] | pinned[b]
                pinned[a[both]] = pinned[b[both]] = True
            if torch.equal(pinned, before):
                empty = next((ids for ids in sides if len(ids) and not pinned[ids].any()), None)
                if empty is None:
                    return ~pinned
                pinned[empty[0]] = True


def where_finite(const: Tensor, result: Tensor) -> Tensor:
    """The results where both are finite, else NaN.

    >>> where_finite(torch.tensor([1.0, torch.nan]), torch.tensor([2.0, 3.0]))
    tensor([2., nan])
    """
    return torch.where(const.isfinite() & result.isfinite(), result, torch.nan)


def columns(plan: Plan, x: Value, width: int, fits: bool = True) -> Value:
    """The channels as the features of a layer of that width, or UNKNOWN if they are something else.

    >>> columns(Plan(), Channels(torch.tensor([0, 1]), torch.zeros(2), -1, 2, spread=True), 4).ids
    tensor([0, 0, 1, 1])
    """
    if isinstance(x, Channels) and fits:
        times = width // len(x.ids) if x.spread and len(x.ids) else 1
        ids, const = x.ids.repeat_interleave(times), x.const.repeat_interleave(times)
        if len(ids) == width:
            return Channels(ids, const, x.axis, x.rank)
    plan.pin(x)
    return UNKNOWN


def _plain(values: Any) -> bool:
    return all(value is None or isinstance(value, bool | int | float | str) for value in values)


def elementwise(plan: Plan, fn: Callable[..., Tensor], x: Value, *args: Any, **kwargs: Any) -> Value:
    """The value of a function that acts on each element by itself.

    >>> elementwise(Plan(), torch.relu, Channels(torch.tensor([0, 1]), torch.tensor([-1.0, torch.nan]), -1, 2)).const
    tensor([0., nan])
    """
    if not isinstance(x, Channels) or not _plain([*args, *kwargs.values()]):
        return UNKNOWN
    return x._replace(const=where_finite(x.const, fn(x.const.clone(), *args, **kwargs)))


def binary(plan: Plan, fn: Callable[..., Tensor], a: Value, b: Value, **kwargs: Any) -> Value:
    """The value of a sum, difference or product: channels that meet are one.

    >>> x = Channels(torch.tensor([0]), torch.tensor([2.0]), -1, 2)
    >>> binary(Plan(), torch.mul, x, 3.0).const, binary(Plan(), torch.add, x, x).const
    (tensor([6.]), tensor([4.]))
    """
    if not isinstance(a, Channels) or not isinstance(b, Channels):
        one = a if isinstance(a, Channels) else b
        if not isinstance(one, Channels) or not _plain([b if one is a else a, *kwargs.values()]):
            return UNKNOWN
        x, y = (v.const.clone() if isinstance(v, Channels) else v for v in (a, b))
        return one._replace(const=where_finite(one.const, fn(x, y, **kwargs)))
    if (a.axis, len(a.ids), a.spread) != (b.axis, len(b.ids), b.spread) or not _plain(kwargs.values()):
        return UNKNOWN
    plan.ties.append((a.ids, b.ids))
    const = where_finite(a.const + b.const, fn(a.const.clone(), b.const, **kwargs))
    if fn.__name__ in ("mul", "mul_", "imul"):
        const = torch.where((a.const == 0) | (b.const == 0), 0.0, const)
    return a._replace(const=const, rank=max(a.rank, b.rank))


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


def flatten(plan: Plan, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """The value of a flattened tensor, if it starts at the channels or behind them.

    >>> flatten(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-3, rank=4), 1)[2:]
    (-1, 2, True)
    """
    if not isinstance(x, Channels) or not all(d in range(-x.rank, x.rank) for d in (start_dim, end_dim)):
        return UNKNOWN
    start, end = start_dim % x.rank, end_dim % x.rank
    if start <= x.position <= end and (start < x.position or (x.spread and end > start)):
        return UNKNOWN
    rank, spread = x.rank - max(end - start, 0), x.spread or start == x.position < end
    return x._replace(axis=x.axis if x.position > end else x.position - rank, rank=rank, spread=spread)


def view(plan: Plan, x: Value, *sizes: Any) -> Value:
    """The value of a tensor viewed as one row for each example.

    >>> view(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-3, rank=4), BATCH, -1).spread
    True
    """
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return flatten(plan, x, 1) if sizes == (BATCH, -1) else UNKNOWN


def mean(plan: Plan, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    """The value of a mean over dimensions that are not the channels.

    >>> mean(Plan(), Channels(torch.tensor([0]), torch.ones(1), axis=-3, rank=4), (2, 3))[2:4]
    (-1, 2)
    """
    dims = list(dim) if isinstance(dim, tuple | list) else [dim]
    if not isinstance(x, Channels) or x.spread or not dims or not all(d in range(-x.rank, x.rank) for d in dims):
        return UNKNOWN
    gone = {d % x.rank for d in dims}
    return UNKNOWN if x.position in gone else _without(x, set() if keepdim else gone)


def _without(x: Channels, gone: set[int]) -> Channels:
    return x._replace(axis=x.axis + sum(d > x.position for d in gone), rank=x.rank - len(gone))


def pool(plan: Plan, x: Value, dims: int, even: bool = True) -> Value:
    """The value of a pooled image; a constant stays what it is, unless borders count (`even=False`) and it is not 0.

    >>> x = Channels(torch.tensor([0, 1]), torch.tensor([0.0, 2.0]), axis=-3, rank=4)
    >>> pool(Plan(), x, 2).const, pool(Plan(), x, 2, even=False).const
    (tensor([0., 2.]), tensor([0., nan]))
    """
    if not isinstance(x, Channels) or x.axis != -dims - 1:
        return UNKNOWN
    return x if even else x._replace(const=torch.where(x.const == 0, 0.0, torch.nan))


def size(plan: Plan, x: Value, dim: Any = None) -> Value:
    """The value of a tensor's shape, or of one entry of it.

    >>> size(Plan(), INPUT, 0)
    <Marker.BATCH: 'the number of examples'>
    """
    return Shape(x) if dim is None else getitem(plan, Shape(x), dim)


def attribute(plan: Plan, x: Value, name: str) -> Value:
    """The value of an attribute of a tensor, of which `shape` is known.

    >>> attribute(Plan(), INPUT, "shape") == Shape(INPUT)
    True
    """
    return Shape(x) if name == "shape" else UNKNOWN


def getitem(plan: Plan, x: Value, index: Any) -> Value:
    """The value of an entry of a tuple or shape, or of a part of a tensor that has all channels.

    >>> getitem(Plan(), Channels(torch.tensor([0]), torch.zeros(1), axis=-1, rank=3), (slice(None), -1))[2:4]
    (-1, 2)
    """
    if isinstance(x, Shape):
        if index == 0 and (x.of is INPUT or (isinstance(x.of, Channels) and x.of.position)):
            return BATCH
        spatial = isinstance(x.of, Channels) and index in [
            *range(x.of.position + 1, x.of.rank),
            *range(x.of.axis + 1, 0),
        ]
        return LENGTH if spatial else UNKNOWN
    if not isinstance(x, Channels):
        return x[index] if type(x) is tuple and isinstance(index, int) else UNKNOWN
    entries = index if isinstance(index, tuple) else (index,)
    known = len(entries) <= x.rank and all(
        _plain([e.start, e.stop, e.step]) if isinstance(e, slice) else type(e) is int for e in entries
    )
    if not known or x.spread or (x.position < len(entries) and entries[x.position] != slice(None)):
        return UNKNOWN
    return _without(x, {d for d, entry in enumerate(entries) if type(entry) is int})
