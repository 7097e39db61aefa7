"""Where the competitions of a call lie: two small tables of integers, one row a tensor,
that its kernels read.

Scores stay where they are. A tensor (rows, units) is cut into chunks of one size, row
by row; a chunk is what one program reads. A segment is one competition: a row, or with
`joint` all tensors together. Every number follows from shapes and addresses alone, so
nothing is kept between calls and no value is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

Column: TypeAlias = npt.NDArray[np.int64]


class Tuning(NamedTuple):
    """Sizes that decide how fast kernels are, and nothing else."""

    chunk: int = 4096  # units that a program reads: a power of two, 16 or more
    small: int = 8192  # units of a segment that one program selects by itself
    sample: int = 4096  # units that guess the threshold of a larger one: a power of two
    reach: float = 3.0  # standard deviations that the guess allows for
    room: int = (
        8  # the units near the threshold fit, unless they are more than one in so many
    )
    workers: int = 1024  # programs of the passes that follow the first


class Span(NamedTuple):
    """Tensors, a number each in every column: addresses (0 for flags that there are
    not), and which chunks are their own.
    """

    scores: Column
    allow: Column
    deny: Column
    out: Column
    absolute: Column
    width: Column  # units of a row
    first_chunk: Column
    row_chunks: Column
    before: Column  # units of the same segment in the tensors before it


class Lot(NamedTuple):
    """Segments of one size, a number each in every column: the segments of a tensor, or
    one of all tensors.
    """

    first_segment: Column
    first_chunk: Column
    chunks: Column  # of a segment
    first_worker: Column
    workers: Column  # of a segment
    units: Column  # of a segment
    first_near: Column  # where the units near the first segment's threshold are kept
    room: Column  # for so many a segment
    count_at: Column  # the place of the first segment's count
    count_step: Column  # 0 where all segments share it


class Drawn(NamedTuple):
    """Tensors of draws, a number each in every column: addresses, sizes, and first
    chunks.
    """

    out: Column
    size: Column
    first_chunk: Column


class Stepped(NamedTuple):
    """Tensors that an optimizer moves, a number each in every column: addresses, 0 for
    what there is not, their sizes and their first chunks.
    """

    param: Column
    mask: Column
    grad: Column
    first: Column
    second: Column
    new_param: Column
    new_first: Column
    new_second: Column
    size: Column
    first_chunk: Column


class Leaf(NamedTuple):
    """A tensor (rows, units) of a call, its flags, its mask, and where its counts
    are.
    """

    scores: Tensor
    allow: Tensor | None
    deny: Tensor | None
    absolute: bool
    out: Tensor
    count_at: int
    count_step: int


class Plan(NamedTuple):
    """The tables, and how many of everything there are."""

    spans: Span
    lots: Lot
    segments: int
    chunks: int
    workers: int
    near: int
    widest: int  # units of a segment, counted in whole chunks


def plan(leaves: Sequence[Leaf], joint: bool, t: Tuning) -> Plan:
    """The tables of some tensors, none of them empty."""
    scores, allow, deny, absolute, outs, count_at, count_step = zip(
        *leaves, strict=True
    )
    rows, width = np.array([x.shape for x in scores], np.int64).T
    before = np.zeros_like(rows)
    if joint:
        width = rows * width
        rows = np.ones_like(rows)
        before = starts(width)
    row_chunks = -(-width // t.chunk)
    chunks = rows * row_chunks
    first_chunk = starts(chunks)
    spans = Span(
        addresses(scores),
        addresses(allow),
        addresses(deny),
        addresses(outs),
        np.array(absolute, np.int64),
        width,
        first_chunk,
        row_chunks,
        before,
    )
    n_chunks = int(chunks.sum())
    units, own = width, row_chunks
    counts = np.array([count_at, count_step], np.int64)
    if joint:  # one segment of all tensors
        rows, first_chunk, counts = rows[:1], first_chunk[:1], counts[:, :1]
        units = width.sum(keepdims=True)
        own = chunks.sum(keepdims=True)
    workers = np.minimum(own, np.maximum(1, t.workers * own // n_chunks))
    room = np.maximum(units // t.room, t.chunk)
    lots = Lot(
        starts(rows),
        first_chunk,
        own,
        starts(rows * workers),
        workers,
        units,
        starts(rows * room),
        room,
        *counts,
    )
    return Plan(
        spans,
        lots,
        segments=int(rows.sum()),
        chunks=n_chunks,
        workers=int((rows * workers).sum()),
        near=int((rows * room).sum()),
        widest=int(own.max()) * t.chunk,
    )


def starts(sizes: Column) -> Column:
    """Where each begins, end to end."""
    return sizes.cumsum() - sizes


def addresses(tensors: Sequence[Tensor | None]) -> Column:
    """The address of each tensor, 0 for none."""
    return np.array([0 if x is None else x.data_ptr() for x in tensors], np.int64)


def steps(many: int) -> int:
    """How many halvings find one of so many rows."""
    return (many - 1).bit_length()
