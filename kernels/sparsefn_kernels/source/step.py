"""Steps of optimizers under masks, with the bits of `optim/adam.py` and
`optim/sgd.py`.

Every operation rounds once, as torch does: launch with `enable_fp_fusion=False`.
Numbers that are 64 bits wide come as the words of float64: a float would be passed in
32 bits.
"""

import triton
import triton.language as tl

from sparsefn_kernels.source.keys import find
from sparsefn_kernels.tables import Stepped

STEPPED = tl.constexpr(len(Stepped._fields))
PARAM, MASK, GRAD, FIRST, SECOND, NEW_PARAM, NEW_FIRST, NEW_SECOND, SIZE, CHUNK = map(
    tl.constexpr, range(len(Stepped._fields))
)


@triton.jit
def _float64(word):
    return word.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _place(table, many, STEPS: tl.constexpr, B: tl.constexpr):
    """(program, row of its tensor, first entry of its chunk, entries of the tensor)."""
    c = tl.program_id(0)
    row = table + find(table, STEPPED, CHUNK, many, c, STEPS) * STEPPED
    return c, row, (c - tl.load(row + CHUNK)) * B, tl.load(row + SIZE)


@triton.jit
def _read(row, COLUMN: tl.constexpr, offs, inside, WHOLE: tl.constexpr):
    at = tl.load(row + COLUMN).to(tl.pointer_type(tl.float32))
    if WHOLE:
        return tl.load(tl.multiple_of(at, 16) + offs)
    else:
        return tl.load(at + offs, mask=inside, other=0.0)


@triton.jit
def _write(row, COLUMN: tl.constexpr, offs, inside, numbers, WHOLE: tl.constexpr):
    at = tl.load(row + COLUMN).to(tl.pointer_type(tl.float32))
    if WHOLE:
        tl.store(tl.multiple_of(at, 16) + offs, numbers)
    else:
        tl.store(at + offs, numbers, mask=inside)


@triton.jit
def _kept(row, offs, inside, WHOLE: tl.constexpr):
    """The mask of a chunk: all of a dense tensor, which has none."""
    at = tl.load(row + MASK)
    flags = at.to(tl.pointer_type(tl.int8))
    if WHOLE:
        return tl.load(tl.multiple_of(flags, 16) + offs, mask=at != 0, other=1) != 0
    else:
        return tl.load(flags + offs, mask=inside & (at != 0), other=1) != 0


@triton.jit
def _masked(row, first, numbers, WHOLE: tl.constexpr, B: tl.constexpr):
    """(places, inside, kept, params, masked gradients) of a chunk."""
    offs = first + tl.arange(0, B)
    inside = offs < numbers
    kept = _kept(row, offs, inside, WHOLE)
    g = tl.where(kept, _read(row, GRAD, offs, inside, WHOLE), 0.0)
    return offs, inside, kept, _read(row, PARAM, offs, inside, WHOLE), g


@triton.jit
def _adam_chunk(
    row,
    first,
    numbers,
    size,
    least,
    shrink,
    part1,
    part2,
    beta2,
    decay,
    DECAY: tl.constexpr,
    CLEAR: tl.constexpr,
    WHOLE: tl.constexpr,
    B: tl.constexpr,
):
    offs, inside, kept, p, g = _masked(row, first, numbers, WHOLE, B)
    m = _read(row, FIRST, offs, inside, WHOLE)
    v = _read(row, SECOND, offs, inside, WHOLE)
    if DECAY == 1:
        g = g + decay * p
    m = m + (g - m) * part1
    v = v * beta2 + g * g * part2
    update = size * tl.div_rn(m, tl.sqrt_rn(v) + least)
    if DECAY == 2:
        update = update - shrink * p
    _write(row, NEW_PARAM, offs, inside, tl.where(kept, p + update, p), WHOLE)
    if CLEAR:
        m = tl.where(kept, m, 0.0)
        v = tl.where(kept, v, 0.0)
    _write(row, NEW_FIRST, offs, inside, m, WHOLE)
    _write(row, NEW_SECOND, offs, inside, v, WHOLE)


@triton.jit(do_not_specialize=["many", "beta1", "beta2", "eps", "decay"])
def adam(
    table,
    many,
    count,
    decay1,
    decay2,
    rate,
    new_count,
    new_decay1,
    new_decay2,
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    decay: tl.int64,
    DECAY: tl.constexpr,
    CLEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """A step of Adam of a chunk of a tensor. DECAY: 0 for none, 1 added to the
    gradient, 2 taken from the update. CLEAR: moments are +0.0 off the mask.
    """
    c, row, first, numbers = _place(table, many, STEPS, B)
    b1 = _float64(beta1)
    b2 = _float64(beta2)
    wide = _float64(decay)
    d1 = tl.load(decay1) * b1
    d2 = tl.load(decay2) * b2
    speed = tl.load(rate)
    scale = tl.sqrt(1.0 - d2)
    # Triton's own minus takes from 0: no -0.0
    size = (speed * scale / (1.0 - d1)).to(tl.float32) * -1.0
    least = (_float64(eps) * scale).to(tl.float32)
    shrink = (speed * wide).to(tl.float32)
    part1 = (1.0 - b1).to(tl.float32)
    part2 = (1.0 - b2).to(tl.float32)
    if c == 0:
        tl.store(new_count, tl.load(count) + 1)
        tl.store(new_decay1, d1)
        tl.store(new_decay2, d2)
    b2 = b2.to(tl.float32)
    wide = wide.to(tl.float32)
    if ALIGNED and first + B <= numbers:
        _adam_chunk(
            row,
            first,
            numbers,
            size,
            least,
            shrink,
            part1,
            part2,
            b2,
            wide,
            DECAY,
            CLEAR,
            True,
            B,
        )
    else:
        _adam_chunk(
            row,
            first,
            numbers,
            size,
            least,
            shrink,
            part1,
            part2,
            b2,
            wide,
            DECAY,
            CLEAR,
            False,
            B,
        )


@triton.jit
def _sgd_chunk(
    row,
    first,
    numbers,
    speed,
    momentum,
    decay,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLEAR: tl.constexpr,
    WHOLE: tl.constexpr,
    B: tl.constexpr,
):
    offs, inside, kept, p, g = _masked(row, first, numbers, WHOLE, B)
    if DECAY:
        g = g + decay * p
    if MOMENTUM:
        b = momentum * _read(row, FIRST, offs, inside, WHOLE) + g
        memory = tl.where(kept, b, 0.0) if CLEAR else b
        _write(row, NEW_FIRST, offs, inside, memory, WHOLE)
        if NESTEROV:
            g = g + momentum * b
        else:
            g = b
    _write(row, NEW_PARAM, offs, inside, tl.where(kept, p + speed * g, p), WHOLE)


@triton.jit(do_not_specialize=["many", "momentum", "decay"])
def sgd(
    table,
    many,
    count,
    rate,
    new_count,
    momentum: tl.int64,
    decay: tl.int64,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    CLEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """A step of SGD of a chunk of a tensor."""
    c, row, first, numbers = _place(table, many, STEPS, B)
    if c == 0:
        tl.store(new_count, tl.load(count) + 1)
    speed = tl.load(rate).to(tl.float32) * -1.0  # as above
    keep = _float64(momentum).to(tl.float32)
    wide = _float64(decay).to(tl.float32)
    if ALIGNED and first + B <= numbers:
        _sgd_chunk(
            row,
            first,
            numbers,
            speed,
            keep,
            wide,
            DECAY,
            MOMENTUM,
            NESTEROV,
            CLEAR,
            True,
            B,
        )
    else:
        _sgd_chunk(
            row,
            first,
            numbers,
            speed,
            keep,
            wide,
            DECAY,
            MOMENTUM,
            NESTEROV,
            CLEAR,
            False,
            B,
        )
