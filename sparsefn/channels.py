"""Channels of the tensors in a traced module: which constants they hold, and which of them must go together."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
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
    for an equal run of features: an image that was flattened. Tensors whose `batch` is the same object have
    equal first dimensions. All tensors are on the CPU.
    """

    ids: Tensor
    const: Tensor
    axis: int
    rank: int
    spread: bool = False
    batch: object = None

    @property
    def position(self) -> int:
        """The axis counted from the front."""
        return self.rank + self.axis


class Input(NamedTuple):
    """An input of the module.

    >>> Input("x").batch
    'x'
    """

    batch: object


class Shape(NamedTuple):
    """The shape of a tensor, as the module's forward reads it.

    >>> Shape(Input("x")).of
    Input(batch='x')
    """

    of: Value


class Batch(NamedTuple):
    """The first size of the tensors with that `batch`.

    >>> Batch("x").batch
    'x'
    """

    batch: object


class Marker(enum.Enum):
    """Values of which no channel is known.

    >>> UNKNOWN
    <Marker.UNKNOWN: 'anything'>
    """

    UNKNOWN = "anything"
    LENGTH = "a size that is neither that of the batch nor of the channels"


UNKNOWN, LENGTH = Marker


def batch_of(x: Value) -> object:
    """What has the first dimension of a tensor, or something new.

    >>> batch_of(Input("x")), batch_of(UNKNOWN) == batch_of(UNKNOWN)
    ('x', False)
    """
    known = x.batch if isinstance(x, Channels | Input) else None
    return object() if known is None else known


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
        return torch.arange(self.count - n, self.count, device="cpu")

    def pin(self, values: Value) -> None:
        """Keep every channel in nested values."""
        self.pins += [value.ids for value in _channels(values)]

    def removed(self) -> Tensor:
        """Which channels can go: none that is one with a pinned channel."""
        pinned = torch.zeros(self.count, dtype=torch.bool, device="cpu")
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
            return x._replace(ids=ids, const=const, spread=False)
    plan.pin(x)
    return UNKNOWN
