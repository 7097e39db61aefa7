"""Small segments, one program each, and the tables that kernels read."""

import triton
import triton.language as tl

from sparsefn_kernels.source.keys import (
    LOT,
    OUT,
    SPAN,
    SPAN_CHUNK,
    WIDTH,
    at_rank,
    count_of,
    find,
    keys_at,
    least,
)

# a number that is passed with it always has 64 bits: one kernel serves for all numbers
BIAS = tl.constexpr(1 << 62)


@triton.jit(do_not_specialize=["numbers"])
def write_table(table, numbers, N: tl.constexpr):
    """Numbers into a table. As arguments of a launch they need no memory that the host
    must keep.
    """
    for i in tl.static_range(N):
        tl.store(table + i, numbers[i] - BIAS)


@triton.jit(do_not_specialize=["many"])
def select_whole(
    spans,
    lots,
    many,
    counts,
    FLAGS: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """The winners of a segment of at most B units: its threshold by bits, then ties in
    order.
    """
    c = tl.program_id(0)
    leaf = find(spans, SPAN, SPAN_CHUNK, many, c, STEPS)
    span = spans + leaf * SPAN
    row = c - tl.load(span + SPAN_CHUNK)
    size = tl.load(span + WIDTH)
    start = row * size
    k = count_of(lots + leaf * LOT, row, counts)
    offs = tl.arange(0, B)
    inside = offs < size
    keys = keys_at(span, start, offs, inside, FLAGS, BITS, INF)
    t = at_rank(keys, inside, k, BITS)
    above = inside & (keys > t)
    equal = inside & (keys == t)
    # units that do not compete share the least key: none of these ties wins
    missing = tl.where(t == least(BITS), 0, k - tl.sum(above.to(tl.int32), 0))
    won = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    tl.store(
        tl.load(span + OUT).to(tl.pointer_type(tl.int8)) + start + offs,
        won.to(tl.int8),
        mask=inside,
    )
