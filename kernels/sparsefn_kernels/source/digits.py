"""Large segments, second part: the threshold digit by digit, and the rest of the mask.

Each unit of a segment has a composite of its key and its place counted down, and no two
are equal. So the winners have composites of at least T, the lowest among them, and ties
need no case of their own. Passes find T from its top digit on, 8 bits at a time: among
the units near the threshold where the bracket holds, among all where not. Each program
works out for itself what the pass before it left, so that nothing waits.
"""

import triton
import triton.language as tl

from sparsefn_kernels.source.keys import (
    LOT,
    LOT_CHUNK,
    LOT_CHUNKS,
    NEAR,
    OUT,
    ROOM,
    SEGMENT,
    SPAN,
    SPAN_CHUNK,
    WIDTH,
    WORKER,
    WORKERS,
    chunk_at,
    count_of,
    find,
    keys_of_chunk,
    least,
)

DONE = tl.constexpr(0)  # the first pass wrote the mask
AMONG_NEAR = tl.constexpr(2)  # T is searched among the units near the threshold
AMONG_ALL = tl.constexpr(3)
# added to either of the two: the digits of T that are left are zeros
KNOWN = tl.constexpr(2)
# the key of T is known, and too many units have it: its place is searched among all
TIED = tl.constexpr(6)


@triton.jit
def before_pass(
    lot,
    s,
    row,
    counts,
    ends,
    tally,
    states,
    found,
    d,
    segments,
    last_shift,
    BITS: tl.constexpr,
):
    """What is known of T before pass d: (mode, wanted, digits of the key, digits of the
    place).

    `wanted` is how many of the units that share the digits of T so far are winners.
    """
    if d == 0:
        k = count_of(lot, row, counts)
        both = tl.load(tally + s)
        near = both & 0xFFFFFFFF
        wanted = k - (both >> 32)
        lo = tl.load(ends + 2 * s)
        hi = tl.load(ends + 2 * s + 1)
        held = (wanted > 0) & (wanted <= near)  # T is in the bracket
        done = (wanted == 0) | (k <= 0) | ((hi == least(BITS)) & (wanted > 0))
        fits = near <= tl.load(lot + ROOM)
        mode = tl.where(
            held,
            tl.where(fits, AMONG_NEAR, tl.where(lo == hi, TIED, AMONG_ALL)),
            AMONG_ALL,
        )
        mode = tl.where(done, DONE, mode).to(tl.int64)
        wanted = tl.where(mode == AMONG_ALL, k, wanted)
        key = tl.where(mode == TIED, unsigned(hi, BITS), 0)
        place = tl.zeros((), tl.int64)
    else:
        old = states + ((d - 1) * segments + s) * 4
        mode = tl.load(old)
        wanted = tl.load(old + 1)
        key = tl.load(old + 2)
        place = tl.load(old + 3)
        if (mode == AMONG_NEAR) | (mode == AMONG_ALL):
            bins = tl.arange(0, 256)
            h = tl.load(found + ((d - 1) * segments + s) * 256 + bins).to(tl.int64)
            higher = tl.sum(h, 0) - tl.cumsum(h, 0)
            here = (higher < wanted) & (wanted <= higher + h)
            digit = tl.sum(tl.where(here, bins, 0), 0).to(tl.int64)
            wanted -= tl.sum(tl.where(here, higher, 0), 0)
            if d * 8 <= BITS:
                key |= digit << last_shift
            else:
                place |= digit << last_shift
            mode = tl.where(
                tl.sum(tl.where(here, h, 0), 0) == wanted, mode + KNOWN, mode
            )
        if d * 8 == BITS:
            mode = tl.where(mode == TIED, AMONG_ALL, mode)
    return mode, wanted, key, place


@triton.jit
def unsigned(keys, BITS: tl.constexpr):
    """Keys as words that have their order without a sign."""
    if BITS == 64:
        return keys.to(tl.int64) ^ least(64)
    else:
        return keys.to(tl.int64) - least(BITS).to(tl.int64)


@triton.jit
def signed(words, BITS: tl.constexpr):
    """The keys that `unsigned` made words of, as they are compared."""
    if BITS == 64:
        return words ^ least(64)
    else:
        return words + least(BITS).to(tl.int64)


@triton.jit
def segment_of(lots, many, w, JOINT: tl.constexpr, STEPS: tl.constexpr):
    """(lot, row, segment, number among the workers of the segment) of a worker."""
    if JOINT:
        lot = lots
        leaf = 0
    else:
        leaf = find(lots, LOT, WORKER, many, w, STEPS)
        lot = lots + leaf * LOT
    own = w - tl.load(lot + WORKER)
    row = own // tl.load(lot + WORKERS)
    return lot, row, tl.load(lot + SEGMENT) + row, own - row * tl.load(lot + WORKERS)


@triton.jit
def keys_near(lot, s, j, near, near_key, near_place, offs, B: tl.constexpr):
    """(inside, keys, places) of a block of the units near the threshold."""
    inside = j * B + offs < near
    at = (
        tl.load(lot + NEAR)
        + (s - tl.load(lot + SEGMENT)) * tl.load(lot + ROOM)
        + j * B
        + offs
    )
    keys = tl.load(near_key + at, mask=inside, other=0)
    return inside, keys, tl.load(near_place + at, mask=inside, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["many", "segments", "d", "shift", "last_shift"])
def count_digits(
    spans,
    lots,
    many,
    counts,
    ends,
    tally,
    near_key,
    near_place,
    states,
    found,
    segments,
    d,
    shift,
    last_shift,
    JOINT: tl.constexpr,
    FLAGS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    PLACE: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """Pass d: how many of the units that share the digits of T so far have which next
    one.
    """
    lot, row, s, worker = segment_of(lots, many, tl.program_id(0), JOINT, STEPS)
    mode, wanted, key, place = before_pass(
        lot, s, row, counts, ends, tally, states, found, d, segments, last_shift, BITS
    )
    if worker == 0:
        new = states + (d * segments + s) * 4
        tl.store(new, mode)
        tl.store(new + 1, wanted)
        tl.store(new + 2, key)
        tl.store(new + 3, place)
    if (mode != AMONG_NEAR) & (mode != AMONG_ALL):
        return
    chunks = tl.load(lot + LOT_CHUNKS)
    first = tl.load(lot + LOT_CHUNK) + row * chunks
    near = tl.load(tally + s) & 0xFFFFFFFF
    if mode == AMONG_NEAR:
        chunks = (near + B - 1) // B
    offs = tl.arange(0, B)
    # of the first digit, above all bits
    same_above = tl.full((), -256, tl.int64) << shift
    total = tl.zeros((256,), tl.int32)
    for j in range(worker, chunks, tl.load(lot + WORKERS)):
        if mode == AMONG_NEAR:
            inside, keys, places = keys_near(
                lot, s, j, near, near_key, near_place, offs, B
            )
        else:
            _leaf, span, _row, start, size = chunk_at(spans, many, first + j, STEPS, B)
            inside = offs < size
            if ALIGNED and size == B:
                keys = keys_of_chunk(span, start, size, offs, FLAGS, True, BITS, INF)
            else:
                keys = keys_of_chunk(span, start, size, offs, FLAGS, False, BITS, INF)
            places = (j * B + offs).to(tl.int64)
        words = unsigned(keys, BITS)
        if d * 8 < BITS:
            same = inside & (((words ^ key) & same_above) == 0)
        else:
            same = (
                inside
                & (words == key)
                & ((((PLACE - places) ^ place) & same_above) == 0)
            )
            words = PLACE - places
        total += tl.histogram(((words >> shift) & 255).to(tl.int32), 256, mask=same)
    to = found + (d * segments + s) * 256 + tl.arange(0, 256)
    tl.atomic_add(to, total, mask=total > 0, sem="relaxed")


@triton.jit(do_not_specialize=["many", "segments", "d", "last_shift"])
def finish(
    spans,
    lots,
    many,
    counts,
    ends,
    tally,
    near_key,
    near_place,
    states,
    found,
    segments,
    d,
    last_shift,
    JOINT: tl.constexpr,
    FLAGS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    PLACE: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """The winners near the threshold into the mask, or the mask of all scores again."""
    lot, row, s, worker = segment_of(lots, many, tl.program_id(0), JOINT, STEPS)
    mode, _wanted, key, place = before_pass(
        lot, s, row, counts, ends, tally, states, found, d, segments, last_shift, BITS
    )
    if mode == DONE:
        return
    threshold = signed(key, BITS)
    chunks = tl.load(lot + LOT_CHUNKS)
    first = tl.load(lot + LOT_CHUNK) + row * chunks
    near = tl.load(tally + s) & 0xFFFFFFFF
    is_near = (mode == AMONG_NEAR) | (mode == AMONG_NEAR + KNOWN)
    blocks = tl.where(is_near, (near + B - 1) // B, chunks)
    offs = tl.arange(0, B)
    for j in range(worker, blocks, tl.load(lot + WORKERS)):
        if is_near:
            inside, keys, places = keys_near(
                lot, s, j, near, near_key, near_place, offs, B
            )
            wide = keys.to(tl.int64)
            won = inside & (
                (wide > threshold) | ((wide == threshold) & (PLACE - places >= place))
            )
            c = first + places // B
            leaves = find(spans, SPAN, SPAN_CHUNK, many, c, STEPS)
            own = spans + leaves * SPAN
            if JOINT:
                at = (c - tl.load(own + SPAN_CHUNK)) * B + places % B
            else:
                at = row * tl.load(own + WIDTH) + places
            near_to = (tl.load(own + OUT) + at).to(tl.pointer_type(tl.int8))
            tl.store(near_to, tl.full((B,), 1, tl.int8), mask=won)
        else:
            _leaf, span, _row, start, size = chunk_at(spans, many, first + j, STEPS, B)
            if ALIGNED and size == B:
                keys = keys_of_chunk(span, start, size, offs, FLAGS, True, BITS, INF)
            else:
                keys = keys_of_chunk(span, start, size, offs, FLAGS, False, BITS, INF)
            wide = keys.to(tl.int64)
            places = (j * B + offs).to(tl.int64)
            best = (wide > threshold) | (
                (wide == threshold) & (PLACE - places >= place)
            )
            best = best & (keys != least(BITS))
            to = tl.load(span + OUT).to(tl.pointer_type(tl.int8))
            tl.store(to + start + offs, best.to(tl.int8), mask=offs < size)
