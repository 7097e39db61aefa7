"""Rows of few units, as N:M patterns have them: a unit's rank is the number of better
units in its row.
"""

import triton
import triton.language as tl

from sparsefn_kernels.source.keys import least, ordered


@triton.jit
def _keys(
    scores,
    allow,
    deny,
    offs,
    inside,
    ABS: tl.constexpr,
    ALLOW: tl.constexpr,
    DENY: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
):
    keys = ordered(tl.load(scores + offs, mask=inside, other=0), ABS, BITS, INF)
    if ALLOW:
        keys = tl.where(
            tl.load(allow + offs, mask=inside, other=0) != 0, keys, least(BITS)
        )
    if DENY:
        keys = tl.where(
            tl.load(deny + offs, mask=inside, other=1) == 0, keys, least(BITS)
        )
    return keys


@triton.jit(do_not_specialize=["count_at"])
def select_narrow(
    scores,
    allow,
    deny,
    out,
    counts,
    count_at,
    count_step,
    rows,
    columns,
    ABS: tl.constexpr,
    ALLOW: tl.constexpr,
    DENY: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    UNITS: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
):
    """The winners of R rows (rows, UNITS, columns), each column of a row by itself;
    WIDE is a power of two.
    """
    competition = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = competition < rows * columns
    row = competition // columns
    start = row * (columns * UNITS) + (competition - row * columns)
    unit = tl.arange(0, WIDE)
    offs = start[:, None] + (unit * columns)[None, :]
    inside = there[:, None] & (unit < UNITS)[None, :]
    keys = _keys(scores, allow, deny, offs, inside, ABS, ALLOW, DENY, BITS, INF)
    rank = tl.zeros((R, WIDE), tl.int32)
    for other in tl.static_range(UNITS):
        theirs = _keys(
            scores,
            allow,
            deny,
            start + other * columns,
            there,
            ABS,
            ALLOW,
            DENY,
            BITS,
            INF,
        )[:, None]
        ahead = (unit > other)[None, :]  # wins at a tie
        rank += ((theirs > keys) | ((theirs == keys) & ahead)).to(tl.int32)
    k = tl.load(counts + count_at + competition * count_step, mask=there, other=0)
    won = (rank < k[:, None]) & (keys != least(BITS))
    tl.store(out + offs, won.to(tl.int8), mask=inside)
