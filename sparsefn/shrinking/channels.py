"""Channels of the tensors in a traced module: which constants they hold, which are tied, which must be kept."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Value = Any  # the value of a node: Channels, a tuple of values, a Shape, a Marker, or ordinary data


class Channels(NamedTuple):
    """What is known about the channels of one tensor.

    >>> Channels(torch.tensor([0, 1]), torch.tensor([0.5, torch.nan]), axis=-3, rank=4).position
    1

    `ids` are the numbers of the channels in a `Plan`, `const` is the constant that a channel always holds, NaN where
    it varies. `axis` counts from the end. With `spread` each channel is an equal run of features, as in a flattened
    image. Tensors whose `batch` is the same object have equal first dimensions. All tensors are on the CPU.
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
    """Values whose channels are not known.

    >>> UNKNOWN
    <Marker.UNKNOWN: 'anything'>
    """

    UNKNOWN = "anything"
    LENGTH = "a size that is neither that of the batch nor of the channels"


UNKNOWN, LENGTH = Marker


def batch_of(x: Value) -> object:
    """The object that marks a tensor's first dimension; a new one if the value has none.

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
    """Channel numbers, which are tied, which must be kept.

    >>> plan = Plan()
    >>> a, b = plan.number(2), plan.number(2)
    >>> plan.ties.append((a, b))
    >>> plan.pin(Channels(b[:1], torch.zeros(1), -1, 2), "they are outputs")
    >>> plan.removed()
    tensor([False,  True, False,  True])
    >>> plan.reasons(b)
    ['they are outputs', '']

    `pins` are channels that must be kept, each with its reason. `notes` say why a channel stopped being constant, and
    `refused` why a layer (by its path) cannot change at all. `sizes` maps the path of a layer to its input and output
    channels, of which at least one each is kept. `at` describes the current node.
    """

    count: int = 0
    at: str = "it"
    ties: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)
    pins: list[tuple[Tensor, str]] = dataclasses.field(default_factory=list)
    notes: dict[int, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: dict[str, tuple[Value, Value]] = dataclasses.field(default_factory=dict)

    def number(self, n: int) -> Tensor:
        """Numbers for n new channels."""
        self.count += n
        return torch.arange(self.count - n, self.count, device="cpu")

    def pin(self, values: Value, why: str) -> None:
        """Keep every channel in nested values, for a reason."""
        self.pins += [(value.ids, why) for value in _channels(values) if len(value.ids)]

    def refuse(self, path: str, values: Value, why: str) -> None:
        """Keep every channel that a layer reads, as the layer itself cannot change; a function has no path."""
        if path:
            self.refused.setdefault(path, f"the layer is {why}")
        self.pin(values, f"{self.at}, which reads them, is {why}")

    def note(self, x: Channels, const: Tensor, why: str) -> None:
        """Record why channels that were constant are not any more, where `const` says so; the first reason is kept."""
        for i in x.ids[x.const.isfinite() & ~const.isfinite()].tolist():
            self.notes.setdefault(i, why)

    def removed(self) -> Tensor:
        """Which channels can be removed: none that is tied to a channel that must be kept."""
        return self.verdict() < 0

    def reasons(self, ids: Tensor) -> list[str]:
        """Why each channel must be kept; an empty text for a channel that is removed."""
        pins = {i: why for i, (_, why) in enumerate(self.pins)} | {-1: "", len(self.pins): "one channel always stays"}
        kept = zip(ids.tolist(), self.verdict()[ids].tolist(), strict=True)
        return [pins[pin] and self.notes.get(i, pins[pin]) for i, pin in kept]

    def verdict(self) -> Tensor:
        """For each channel the number of the first pin that keeps it, -1 if it can be removed."""
        because = torch.full((self.count,), -1, device="cpu")
        for i, (ids, _) in enumerate(self.pins):
            because[ids[because[ids] < 0]] = i
        sides = [side.ids for pair in self.sizes.values() for side in pair if isinstance(side, Channels)]
        while True:
            before = because.clone()
            for a, b in (*self.ties, *((b, a) for a, b in self.ties)):
                open_ = (because[a] >= 0) & (because[b] < 0)
                because[b[open_]] = because[a[open_]]
            if torch.equal(because, before):
                empty = next((ids for ids in sides if len(ids) and (because[ids] < 0).all()), None)
                if empty is None:
                    return because
                because[empty[0]] = len(self.pins)


def where_finite(const: Tensor, result: Tensor) -> Tensor:
    """`result` where it and `const` are finite, else NaN.

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
    plan.pin(x, f"{plan.at} does not read them as its features")
    return UNKNOWN
