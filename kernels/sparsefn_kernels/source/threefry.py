"""Draws of Threefry-2x32-20 and numbers made from its words, with the bits of
`_engine/draws/threefry.py`.

Normals are computed in float64, operation for operation as
`_engine/numbers/elementary.py` does, and rounded once to float32. No product may be
fused with a sum: launch with `enable_fp_fusion=False`.
"""

import triton
import triton.language as tl

from sparsefn._engine.draws import PARITY, ROTATIONS
from sparsefn._engine.numbers import elementary
from sparsefn_kernels.source.keys import find
from sparsefn_kernels.tables import Drawn

DRAWN = tl.constexpr(len(Drawn._fields))
DRAWN_OUT, DRAWN_SIZE, DRAWN_CHUNK = map(tl.constexpr, range(len(Drawn._fields)))
_PARITY = tl.constexpr(PARITY)
_EVEN = tl.constexpr(ROTATIONS[0])
_ODD = tl.constexpr(ROTATIONS[1])
_COS = tl.constexpr(elementary.COS)
_SIN = tl.constexpr(elementary.SIN)
_ATANH_TAIL = tl.constexpr(elementary.ATANH_TAIL)
_CIRCLE = tl.constexpr(len(elementary.COS) - 1)  # the last coefficient of both
_TAIL = tl.constexpr(len(elementary.ATANH_TAIL) - 1)
_LN2_HI = tl.constexpr(elementary.LN2_HI)
_LN2_LO = tl.constexpr(elementary.LN2_LO)
_SQRT2 = tl.constexpr(elementary.SQRT2)


@triton.jit
def _turn(x0, x1, R: tl.constexpr):
    x0 = x0 + x1
    return x0, ((x1 << R) | (x1 >> (32 - R))) ^ x0


@triton.jit
def _words(k0, k1, x0, x1):
    """The two words of a block, from uint32 words of a key and of a counter."""
    k2 = k0 ^ k1 ^ _PARITY
    x0 = x0 + k0
    x1 = x1 + k1
    for i in tl.static_range(5):
        for j in tl.static_range(4):
            if i % 2 == 0:
                x0, x1 = _turn(x0, x1, _EVEN[j])
            else:
                x0, x1 = _turn(x0, x1, _ODD[j])
        if i % 3 == 0:
            x0 = x0 + k1
            x1 = x1 + (k2 + (i + 1))
        elif i % 3 == 1:
            x0 = x0 + k2
            x1 = x1 + (k0 + (i + 1))
        else:
            x0 = x0 + k0
            x1 = x1 + (k1 + (i + 1))
    return x0, x1


@triton.jit
def _horner(COEFFICIENTS: tl.constexpr, LAST: tl.constexpr, x):
    value = tl.full(x.shape, COEFFICIENTS[LAST], tl.float64)
    for i in tl.static_range(LAST):
        value = value * x + tl.full((), COEFFICIENTS[LAST - 1 - i], tl.float64)
    return value


@triton.jit
def _log(x):
    word = x.to(tl.int64, bitcast=True)
    k = ((word >> 52) - 1023).to(tl.float64)
    m = ((word & ((1 << 52) - 1)) | (1023 << 52)).to(tl.float64, bitcast=True)
    large = m > tl.full((), _SQRT2, tl.float64)
    k = tl.where(large, k + 1.0, k)
    f = tl.where(large, m * 0.5, m) - 1.0
    s = f / (f + 2.0)
    z = s * s
    tail = s * (f - z * _horner(_ATANH_TAIL, _TAIL, z)) - k * tl.full(
        (), _LN2_LO, tl.float64
    )
    return k * tl.full((), _LN2_HI, tl.float64) - (tail - f)


@triton.jit
def _cospi(x):
    """cos(pi x) of x in [0, 2)."""
    x = tl.where(x > 1.0, 2.0 - x, x)
    upper = x > 0.5
    x = tl.where(upper, 1.0 - x, x)
    rest = 0.5 - x
    value = tl.where(
        x <= 0.25,
        _horner(_COS, _CIRCLE, x * x),
        rest * _horner(_SIN, _CIRCLE, rest * rest),
    )
    return tl.where(upper, -value, value)


@triton.jit
def _uniform(x0, x1, DIGITS: tl.constexpr):
    if DIGITS > 32:
        whole = (x0.to(tl.int64) << (DIGITS - 32)) | (x1 >> (64 - DIGITS)).to(tl.int64)
        return whole.to(tl.float64) * (1.0 / (1 << DIGITS))
    else:
        return (x0 >> (32 - DIGITS)).to(tl.int32).to(tl.float32) * (1.0 / (1 << DIGITS))


@triton.jit
def _normal(x0, x1):
    first = (x0.to(tl.int64) + 1).to(tl.float64) * (1.0 / (1 << 32))
    angle = x1.to(tl.int64).to(tl.float64) * (1.0 / (1 << 31))
    return (tl.sqrt(_log(first) * -2.0) * _cospi(angle)).to(tl.float32)


@triton.jit
def _stored(made, DIGITS: tl.constexpr):
    """What is written of a number: of bfloat16, which has 8 digits, the word."""
    if DIGITS == 8 and made.dtype == tl.float32:
        word = made.to(tl.int32, bitcast=True)
        return (word + 32767 + ((word >> 16) & 1)) >> 16
    else:
        return made


@triton.jit(do_not_specialize=["below"])
def draw(
    keys,
    index,
    chances,
    out,
    n,
    total,
    index_step,
    chance_step,
    below: tl.int64,
    XOR0: tl.constexpr,
    XOR1: tl.constexpr,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    INDEXED: tl.constexpr,
    ONE_KEY: tl.constexpr,
    B: tl.constexpr,
):
    """Draws of keys (rows, 2), n each: of 0..n-1, or of the places in the index.

    KIND says what of: "words", "pairs", "uniform", "normal"; "below" compares the first
    word with a number, "chances" with 2^32 times a chance. DIGITS is how many the
    significand has of what is drawn: of 8, bfloat16 is written as words.
    """
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = i < total
    if ONE_KEY:
        column = i
        k0 = tl.load(keys)
        k1 = tl.load(keys + 1)
        row = tl.zeros((), tl.int64)
    else:
        row = i // n
        column = i - row * n
        k0 = tl.load(keys + 2 * row, mask=inside, other=0)
        k1 = tl.load(keys + 2 * row + 1, mask=inside, other=0)
    place = column
    if INDEXED:
        place = tl.load(index + row * index_step + column, mask=inside, other=0)
    high = ((place >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    k0 = ((k0 ^ XOR0) & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((k1 ^ XOR1) & 0xFFFFFFFF).to(tl.uint32)
    x0, x1 = _words(k0, k1, high, low)
    if KIND == "words":
        made = x0.to(tl.int64)
    elif KIND == "pairs":
        made = (x0.to(tl.int64) << 32) | x1.to(tl.int64)
    elif KIND == "below":
        made = (x0.to(tl.int64) < below).to(tl.int8)
    elif KIND == "chances":
        chance = tl.load(chances + row * chance_step + column, mask=inside, other=0).to(
            tl.float64
        )
        made = (x0.to(tl.float64) < chance * 4294967296.0).to(tl.int8)
    elif KIND == "uniform":
        made = _uniform(x0, x1, DIGITS)
    else:
        made = _normal(x0, x1)
    tl.store(out + i, _stored(made, DIGITS).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _to(address, DIGITS: tl.constexpr):
    """The memory of a new tensor."""
    if DIGITS == 8:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    elif DIGITS == 11:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), 16)
    elif DIGITS == 24:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float64)), 16)


@triton.jit(do_not_specialize=["many"])
def draw_leaves(
    table,
    many,
    keys,
    XOR0: tl.constexpr,
    XOR1: tl.constexpr,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    STEPS: tl.constexpr,
    B: tl.constexpr,
):
    """Uniforms or normals of many tensors, each from its own key (many, 2): a chunk of
    one of them.
    """
    c = tl.program_id(0)
    leaf = find(table, DRAWN, DRAWN_CHUNK, many, c, STEPS)
    row = table + leaf * DRAWN
    first = (c - tl.load(row + DRAWN_CHUNK)) * B
    place = first + tl.arange(0, B)
    high = ((place >> 32) & 0xFFFFFFFF).to(tl.uint32)
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    k0 = ((tl.load(keys + 2 * leaf) ^ XOR0) & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((tl.load(keys + 2 * leaf + 1) ^ XOR1) & 0xFFFFFFFF).to(tl.uint32)
    x0, x1 = _words(k0, k1, high, low)
    if KIND == "uniform":
        made = _uniform(x0, x1, DIGITS)
    else:
        made = _normal(x0, x1)
    out = _to(tl.load(row + DRAWN_OUT), DIGITS)
    made = _stored(made, DIGITS).to(out.dtype.element_ty)
    size = tl.load(row + DRAWN_SIZE)
    if first + B <= size:
        tl.store(out + place, made)
    else:
        tl.store(out + place, made, mask=place < size)
