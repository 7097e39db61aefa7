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
    """A tensor: addresses (0 for flags that there are not), and which chunks are its
    own.
    """

    scores: int
    allow: int
    deny: int
    out: int
    absolute: int
    width: int  # units of a row
    first_chunk: int
    row_chunks: int
    before: int  # units of the same segment in the tensors before it


class Lot(NamedTuple):
    """Segments of one size: the segments of a tensor, or one of all tensors."""

    first_segment: int
    first_chunk: int
    chunks: int  # of a segment
    first_worker: int
    workers: int  # of a segment
    units: int  # of a segment
    first_near: int  # where the units near the threshold of the first segment are kept
    room: int  # for so many a segment
    count_at: int  # the place of the first segment's count
    count_step: int  # 0 where all segments share it


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

    spans: list[Span]
    lots: list[Lot]
    segments: int
    chunks: int
    workers: int
    near: int
    widest: int  # units of a segment, counted in whole chunks


def plan(leaves: Sequence[Leaf], joint: bool, t: Tuning) -> Plan:
    """The tables of some tensors, none of them empty."""
    spans: list[Span] = []
    sizes: list[tuple[int, int, int]] = []
    chunks = before = 0
    for leaf in leaves:
        rows, width = leaf.scores.shape
        rows, width = (1, rows * width) if joint else (rows, width)
        row_chunks = -(-width // t.chunk)
        sizes.append((rows, width, row_chunks))
        where = (
            address(leaf.scores),
            address(leaf.allow),
            address(leaf.deny),
            address(leaf.out),
        )
        spans.append(Span(*where, leaf.absolute, width, chunks, row_chunks, before))
        chunks += rows * row_chunks
        before += width if joint else 0
    lots: list[Lot] = []
    segments = workers = near = 0
    if joint:
        sizes = [(1, before, chunks)]
    for (rows, units, own), leaf, span in zip(sizes, leaves, spans, strict=False):
        some = min(own, max(1, t.workers * own // chunks))
        room = max(units // t.room, t.chunk)
        first = (segments, span.first_chunk, own, workers, some, units, near, room)
        lots.append(Lot(*first, leaf.count_at, leaf.count_step))
        segments = segments + rows
        workers = workers + rows * some
        near = near + rows * room
    return Plan(
        spans,
        lots,
        segments,
        chunks,
        workers,
        near,
        max(lot.chunks for lot in lots) * t.chunk,
    )


def address(x: Tensor | None) -> int:
    """Where the memory of a tensor starts, or 0 for none."""
    return 0 if x is None else x.data_ptr()


def addresses(tensors: Sequence[Tensor | None]) -> Column:
    """The address of each tensor, 0 for none."""
    return np.array([0 if x is None else x.data_ptr() for x in tensors], np.int64)


def steps(many: int) -> int:
    """How many halvings find one of so many rows."""
    return (many - 1).bit_length()
