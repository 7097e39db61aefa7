"""Scores as integers in the order of `selection/reference.py`, and where in memory they
are.
"""

import triton
import triton.language as tl

from sparsefn_kernels.tables import Lot, Span

SPAN = tl.constexpr(len(Span._fields))
SCORES, ALLOW, DENY, OUT, ABSOLUTE, WIDTH, SPAN_CHUNK, ROW_CHUNKS, BEFORE = map(
    tl.constexpr, range(len(Span._fields))
)
LOT = tl.constexpr(len(Lot._fields))
(
    SEGMENT,
    LOT_CHUNK,
    LOT_CHUNKS,
    WORKER,
    WORKERS,
    UNITS,
    NEAR,
    ROOM,
    COUNT,
    COUNT_STEP,
) = map(tl.constexpr, range(len(Lot._fields)))


@triton.jit
def find(table, ROW: tl.constexpr, COLUMN: tl.constexpr, many, x, STEPS: tl.constexpr):
    """The last row of a table whose number in a column, which never falls, is at most
    x.
    """
    low = (x * 0).to(tl.int32)
    for b in tl.static_range(STEPS):
        probe = low + (1 << (STEPS - 1 - b))
        there = probe < many
        start = tl.load(table + probe * ROW + COLUMN, mask=there, other=0)
        low = tl.where(there & (start <= x), probe, low)
    return low


@triton.jit
def least(BITS: tl.constexpr):
    """The key of a unit that does not compete."""
    if BITS == 64:
        return tl.full((), -9223372036854775808, tl.int64)
    elif BITS == 32:
        return tl.full((), -2147483648, tl.int32)
    else:
        return tl.full((), -32768, tl.int32)


@triton.jit
def most(BITS: tl.constexpr):
    """A key above all that scores have."""
    if BITS == 64:
        return tl.full((), 9223372036854775807, tl.int64)
    elif BITS == 32:
        return tl.full((), 2147483647, tl.int32)
    else:
        return tl.full((), 32767, tl.int32)


@triton.jit
def ordered(raw, absolute, BITS: tl.constexpr, INF: tl.constexpr):
    """Integers in the order of the scores, from their bits: NaN is below every number,
    and -0.0 equals 0.0.
    """
    if BITS == 16:
        raw = raw.to(tl.int32)
    size = raw & most(BITS)
    key = tl.where((raw >= 0) | (absolute != 0), size, least(BITS) - raw)
    return tl.where(size > INF, least(BITS) + 1, key)


@triton.jit
def as_words(address, BITS: tl.constexpr):
    """An address as a pointer to the words of scores."""
    if BITS == 16:
        return address.to(tl.pointer_type(tl.int16))
    elif BITS == 32:
        return address.to(tl.pointer_type(tl.int32))
    else:
        return address.to(tl.pointer_type(tl.int64))


@triton.jit
def barred(span, start, offs, inside, keys, BITS: tl.constexpr):
    """The keys, and the least one where a unit is not eligible."""
    allow = tl.load(span + ALLOW)
    deny = tl.load(span + DENY)
    a = tl.load(
        allow.to(tl.pointer_type(tl.int8)) + start + offs,
        mask=inside & (allow != 0),
        other=1,
    )
    d = tl.load(
        deny.to(tl.pointer_type(tl.int8)) + start + offs,
        mask=inside & (deny != 0),
        other=0,
    )
    return tl.where((a != 0) & (d == 0), keys, least(BITS))


@triton.jit
def keys_at(
    span,
    start,
    offs,
    inside,
    FLAGS: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
):
    """The keys of some units of a tensor, at any places."""
    raw = tl.load(
        as_words(tl.load(span + SCORES), BITS) + start + offs, mask=inside, other=0
    )
    keys = ordered(raw, tl.load(span + ABSOLUTE), BITS, INF)
    if FLAGS:
        keys = barred(span, start, offs, inside, keys, BITS)
    return keys


@triton.jit
def keys_of_chunk(
    span,
    start,
    size,
    offs,
    FLAGS: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
):
    """The keys of a chunk of a tensor; a whole one of aligned memory is read 16 bytes
    at a time.
    """
    at = tl.load(span + SCORES)
    if WHOLE:
        first = start // 16 * 16
        if BITS == 16:  # the hint counts after the cast alone
            raw = tl.load(
                tl.multiple_of(at.to(tl.pointer_type(tl.int16)), 16) + first + offs
            )
        elif BITS == 32:
            raw = tl.load(
                tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16) + first + offs
            )
        else:
            raw = tl.load(
                tl.multiple_of(at.to(tl.pointer_type(tl.int64)), 16) + first + offs
            )
    else:
        raw = tl.load(as_words(at, BITS) + start + offs, mask=offs < size, other=0)
    keys = ordered(raw, tl.load(span + ABSOLUTE), BITS, INF)
    if FLAGS:
        keys = barred(span, start, offs, offs < size, keys, BITS)
    return keys


@triton.jit
def put(span, start, size, offs, flags, WHOLE: tl.constexpr):
    """Write the mask of a chunk."""
    to = tl.load(span + OUT)
    if WHOLE:
        tl.store(
            tl.multiple_of(to.to(tl.pointer_type(tl.int8)), 16)
            + start // 16 * 16
            + offs,
            flags.to(tl.int8),
        )
    else:
        tl.store(
            to.to(tl.pointer_type(tl.int8)) + start + offs,
            flags.to(tl.int8),
            mask=offs < size,
        )


@triton.jit
def chunk_at(spans, many, c, STEPS: tl.constexpr, B: tl.constexpr):
    """(span, row, start, size) of a chunk: its tensor, its row there, its first unit
    and how many it has.
    """
    leaf = find(spans, SPAN, SPAN_CHUNK, many, c, STEPS)
    span = spans + leaf * SPAN
    width = tl.load(span + WIDTH)
    own = c - tl.load(span + SPAN_CHUNK)
    per_row = tl.load(span + ROW_CHUNKS)
    row = own // per_row
    column = (own - row * per_row) * B
    return (
        leaf,
        span,
        row,
        row * width + column,
        tl.minimum(width - column, B).to(tl.int32),
    )


@triton.jit
def count_of(lot, row, counts):
    """How many units of a segment win."""
    return tl.load(counts + tl.load(lot + COUNT) + row * tl.load(lot + COUNT_STEP))


@triton.jit
def at_rank(keys, inside, rank, BITS: tl.constexpr):
    """The largest key that at least so many of the keys reach; the least one where
    there are fewer.
    """
    reach = tl.sum((inside & (keys >= 0)).to(tl.int32), 0)
    # the top bit is the step up from the least
    t = tl.where(reach >= rank, least(BITS) * 0, least(BITS))
    for b in range(BITS - 1):  # a loop: unrolled it takes long to compile
        c = t | (tl.full((), 1 << (BITS - 2), t.dtype) >> b)
        reach = tl.sum((inside & (keys >= c)).to(tl.int32), 0)
        t = tl.where(reach >= rank, c, t)
    return t
