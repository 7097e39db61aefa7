"""Large segments, first part: a bracket of the threshold from a sample, and the one
pass over all scores.
"""

import triton
import triton.language as tl

from sparsefn_kernels.source.keys import (
    BEFORE,
    LOT,
    LOT_CHUNK,
    NEAR,
    ROOM,
    SEGMENT,
    SPAN,
    UNITS,
    WIDTH,
    at_rank,
    chunk_at,
    count_of,
    find,
    keys_at,
    keys_of_chunk,
    least,
    most,
    put,
)


@triton.jit(do_not_specialize=["many"])
def bracket(
    spans,
    lots,
    many,
    counts,
    ends,
    reach,
    JOINT: tl.constexpr,
    FLAGS: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    STEPS: tl.constexpr,
    M: tl.constexpr,
):
    """The (least, greatest) key that the threshold of a segment probably has, from M of
    its units.
    """
    s = tl.program_id(0)
    i = tl.arange(0, M)
    # a thousandth of a step: no period of the scores is met
    jitter = ((i.to(tl.int64) * 0x9E3779B1) >> 7) & 1023
    if JOINT:
        lot = lots
        row = s
    else:
        leaf = find(lots, LOT, SEGMENT, many, s, STEPS)
        lot = lots + leaf * LOT
        row = s - tl.load(lot + SEGMENT)
    n = tl.load(lot + UNITS)
    place = (i.to(tl.int64) * 1024 + jitter) * n // (1024 * M)
    if JOINT:
        leaves = find(spans, SPAN, BEFORE, many, place, STEPS)
        span = spans + leaves * SPAN
        place -= tl.load(span + BEFORE)
        keys = keys_at(span, 0, place, i < M, FLAGS, BITS, INF)
    else:
        span = spans + leaf * SPAN
        keys = keys_at(
            span, row * tl.load(span + WIDTH), place, i < M, FLAGS, BITS, INF
        )
    k = count_of(lot, row, counts)
    share = tl.minimum(tl.maximum(k.to(tl.float32) / n.to(tl.float32), 0.0), 1.0)
    rank = share * M
    spread = reach * tl.sqrt(rank * (1.0 - share)) + 2.0
    up = tl.floor(rank - spread).to(tl.int32)
    down = tl.ceil(rank + spread).to(tl.int32)
    hi = at_rank(keys, i < M, tl.maximum(up, 1), BITS)
    lo = at_rank(keys, i < M, tl.minimum(down, M), BITS)
    hi = tl.where((up < 1) | (k <= 0), most(BITS), hi)
    lo = tl.where(k <= 0, most(BITS), tl.where(down > M, least(BITS), lo))
    everyone = k >= n
    tl.store(ends + 2 * s, tl.where(everyone, least(BITS), lo))
    tl.store(ends + 2 * s + 1, tl.where(everyone, least(BITS), hi))


@triton.jit
def _divided(
    lot,
    span,
    s,
    start,
    size,
    first_place,
    lo,
    hi,
    tally,
    near_key,
    near_place,
    FLAGS: tl.constexpr,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    B: tl.constexpr,
):
    # Sixteen units a row of the tile: what is counted within them stays inside a warp.
    offs = tl.arange(0, B // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    keys = keys_of_chunk(span, start, size, offs, FLAGS, WHOLE, BITS, INF)
    above = keys > hi
    near = (keys <= hi) & (keys >= lo)
    if FLAGS:
        near = near & (keys != least(BITS))
    if not WHOLE:
        above = above & (offs < size)
        near = near & (offs < size)
    put(span, start, size, offs, above, WHOLE)
    both = tl.sum(tl.sum(above.to(tl.int32) * 65536 + near.to(tl.int32), 1), 0).to(
        tl.int64
    )
    old = tl.atomic_add(tally + s, ((both >> 16) << 32) | (both & 65535), sem="relaxed")
    if (both & 65535) > 0:
        room = tl.load(lot + ROOM).to(tl.int32)
        groups = tl.sum(near.to(tl.int32), 1)
        to = (old & 0xFFFFFFFF).to(tl.int32) + (tl.cumsum(groups, 0) - groups - 1)[
            :, None
        ]
        to += tl.cumsum(near.to(tl.int32), 1)
        fits = near & (to < room)
        first = tl.load(lot + NEAR) + (s - tl.load(lot + SEGMENT)) * room
        tl.store(near_key + first + to, keys, mask=fits)
        tl.store(near_place + first + to, first_place + offs, mask=fits)


@triton.jit(do_not_specialize=["many"])
def divide(
    spans,
    lots,
    many,
    ends,
    tally,
    near_key,
    near_place,
    JOINT: tl.constexpr,
    FLAGS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """The mask of keys above the bracket; keys inside it are kept with their places, in
    any order, and both counted.

    The tally of a segment has both counts in one number: those above in the upper half,
    those inside in the lower.
    """
    c = tl.program_id(0)
    leaf, span, row, start, size = chunk_at(spans, many, c, STEPS, B)
    if JOINT:
        lot = lots
        s = row
    else:
        lot = lots + leaf * LOT
        s = tl.load(lot + SEGMENT) + row
    lo = tl.load(ends + 2 * s)
    hi = tl.load(ends + 2 * s + 1)
    chunk = c - tl.load(lot + LOT_CHUNK)
    if not JOINT:
        chunk -= row * ((tl.load(span + WIDTH) + B - 1) // B)
    place = (chunk * B).to(tl.int32)
    if ALIGNED and size == B:
        _divided(
            lot,
            span,
            s,
            start,
            size,
            place,
            lo,
            hi,
            tally,
            near_key,
            near_place,
            FLAGS,
            True,
            BITS,
            INF,
            B,
        )
    else:
        _divided(
            lot,
            span,
            s,
            start,
            size,
            place,
            lo,
            hi,
            tally,
            near_key,
            near_place,
            FLAGS,
            False,
            BITS,
            INF,
            B,
        )
